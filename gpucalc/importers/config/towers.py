"""Vision towers beside a decoder, and models made of two towers."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader
from gpucalc.importers.config.tops import class_of

# Multimodal types that put a tower of theirs before any text model: how the tower is drawn, and the text
# model where the file does not name one.
WRAPPERS = {
    "llava": ("llava", "llama"),
    "llava_next": ("llava_next", "llama"),
    "internvl": ("internvl", "qwen2"),
    "paligemma": ("paligemma", "gemma"),
    "idefics3": ("idefics3", "llama"),
    "smolvlm": ("idefics3", "llama"),
    "mistral3": ("pixtral", "mistral"),
}


def tower_of(c: Reader, top: Reader, kind: str) -> dict[str, Any]:
    """The `vision_tower` group of a model description; `kind` says how it is built."""
    if kind == "qwen2_vl":
        return _qwen2_vl(c)
    hidden = c.need("hidden_size", "vt_hidden_size")
    tower: dict[str, Any] = {
        "layers": c.need("num_hidden_layers", "depth", "vt_num_hidden_layers"),
        "hidden": hidden,
        "heads": c.need("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        "ffn": c.need("intermediate_size", "vt_intermediate_size"),
        "patch": c.even("patch_size") or c.need("patch_size"),
        "image": c.even("image_size"),
        "positions": c.whole("num_position_embeddings", "position_embedding_size"),
        "projection": c.whole("projector_output_dim", "out_hidden_size"),
    }
    channels = c.whole("num_channels", "in_channels", "in_chans")
    if channels not in (None, 3):
        raise _refused(c, "num_channels", "images of other than three channels")
    if c.get("vision_use_head") and kind in ("gemma3", "paligemma"):
        raise _refused(c, "vision_use_head", "the tower's pooling head")
    if kind == "internvl":
        tower["qkv_bias"] = bool(c.get("attention_bias"))
        if (
            c.get("use_qk_norm")
            or c.get("use_mask_token")
            or c.get("use_absolute_position_embeddings") is False
        ):
            raise _refused(c, "use_qk_norm", "another InternVL tower than the published ones")
        if c.get("norm_type") not in (None, "layer_norm") or top.get("downsample_ratio") not in (None, 0.5):
            raise _refused(c, "norm_type", "another InternVL tower than the published ones")
    elif kind == "paligemma":
        tower["projection"] = c.whole("projection_dim") or top.whole("projection_dim")
        top.get("projection_dim")
    elif kind == "idefics3":
        tower["merge"] = top.need("scale_factor")
    elif kind == "llama4":
        _same(c, 4 * hidden, "intermediate_size")
        _same(c, tower["projection"] or 4096, "projector_input_dim", "vision_output_dim")
    elif kind in ("llava", "llava_next") and top.get("multimodal_projector_bias") is False:
        raise _refused(top, "multimodal_projector_bias", "a projector without biases")
    c.get("spatial_merge_size", "temporal_patch_size")
    c.get("projection_dim")
    return {k: v for k, v in tower.items() if v is not None}


def _qwen2_vl(c: Reader) -> dict[str, Any]:
    hidden = c.need("embed_dim")
    ratio = c.get("mlp_ratio")
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or ratio <= 0:
        raise InputError("missing", where=c.where, key=c.prefix + "mlp_ratio")
    c.get("spatial_merge_size", "temporal_patch_size", "in_channels", "in_chans", "num_channels")
    return {
        "layers": c.need("depth"),
        "hidden": hidden,
        "heads": c.need("num_heads"),
        "ffn": int(ratio * hidden),
        "patch": c.need("patch_size"),
        "projection": c.need("hidden_size"),
    }


def _same(c: Reader, value: int, *keys: str) -> None:
    for key in keys:
        given = c.whole(key)
        if given is not None and given != value:
            raise _refused(c, key, f"a width other than {value}")


def _refused(c: Reader, key: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"no drawing of {what}", where=c.where, key=c.prefix + key)


def contrastive(c: Reader) -> dict[str, Any]:
    name = class_of(c)
    if (name and not name.endswith("Model")) or "Vision" in name or "Text" in name:
        raise UnsupportedModel(
            "no drawing of this part alone", where=c.where, key="architectures", given=name
        )
    sight, text = c.group("vision_config"), c.group("text_config")
    if sight is None or text is None:
        missing = "vision_config" if sight is None else "text_config"
        raise InputError("missing", where=c.where, key=missing)
    width = c.whole("projection_dim")

    def tower(part: Reader) -> dict[str, Any]:
        return {
            "layers": part.need("num_hidden_layers"),
            "hidden": part.need("hidden_size"),
            "heads": part.need("num_attention_heads"),
            "ffn": part.need("intermediate_size"),
        }

    words = {
        **tower(text),
        "vocab": text.need("vocab_size"),
        "positions": text.need("max_position_embeddings"),
    }
    if width is not None:
        words["projection"] = width
    for part in (sight, text):
        part.get("projection_dim", "projection_size", "vision_use_head", "hidden_act", "num_channels")
    return {
        "kind": "clip",
        "vision_tower": {
            **tower(sight),
            "patch": sight.need("patch_size"),
            "image": sight.need("image_size"),
        },
        "text_tower": words,
    }
