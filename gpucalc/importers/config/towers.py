"""Vision towers beside a decoder, and models made of two towers."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader


def tower_of(c: Reader, key: str) -> dict[str, Any]:
    tower = {
        "layers": c.need("num_hidden_layers", "depth", "vt_num_hidden_layers"),
        "hidden": c.need("hidden_size", "vt_hidden_size"),
        "heads": c.need("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        "ffn": c.need("intermediate_size", "vt_intermediate_size"),
        "patch": c.need("patch_size"),
        "image": c.whole("image_size"),
        "positions": c.whole("num_position_embeddings", "position_embedding_size"),
        "projection": c.whole("projector_output_dim", "out_hidden_size"),
    }
    if key == "gemma3" and c.get("vision_use_head"):
        raise UnsupportedModel(
            "Gemma 3 with the tower's pooling head", where=c.where, key=c.prefix + "vision_use_head"
        )
    c.get("spatial_merge_size", "temporal_patch_size", "in_channels", "num_channels")
    return {k: v for k, v in tower.items() if v is not None}


def contrastive(c: Reader) -> dict[str, Any]:
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
