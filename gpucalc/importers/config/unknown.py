"""Architectures without a drawing: taken as a plain decoder where every key agrees, else refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES, canonical
from gpucalc.importers.config.reader import HARMLESS, TEXT_KEYS, Reader

# Keys of an unknown architecture that a plain decoder does not have.
_STRUCTURE = re.compile(
    r"expert|moe|lora|latent|mamba|ssm|state_size|conv|linear_|recurrent|rwkv|block_type|layer_type|hybrid"
    r"|kv_shared|per_layer|altup|laurel|cross_attention|encoder|decoder_layers|vision|audio|image|mtp|nextn"
    r"|index_|sparse|memory|loop|adapter|group_norm|alibi|sandwich|parallel"
)


_SHAPE_WORDS = re.compile(r"dim|size|rank|heads|layers|width|hidden|groups|ratio|num_|n_|norm|bias|gate")


def refuse_unless_plain(config: Mapping[str, Any], model_type: str, where: str) -> None:
    """Refuse an unknown architecture unless its keys are those of a plain causal decoder."""
    from difflib import get_close_matches

    from gpucalc.errors import nearest

    def refuse(why: str, key: str = "model_type") -> UnsupportedModel:
        drawn = [name for name, family in FAMILIES.items() if not family.refused]
        near = nearest(canonical(model_type), drawn)
        return UnsupportedModel(why, where=where, key=key, given=model_type, near=near)

    text = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
    if text is not None:
        inner = text.get("model_type")
        if isinstance(inner, str) and FAMILIES.get(canonical(inner)) is not None:
            raise refuse(
                f"no drawing for its towers; its {inner} text model can be imported with --text-only"
            )
        raise refuse("no drawing for this architecture")
    if get_close_matches(canonical(model_type), FAMILIES, n=1, cutoff=0.8):
        raise refuse("no drawing for this architecture")
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    if (name and not name.endswith(("ForCausalLM", "LMHeadModel"))) or config.get("is_encoder_decoder"):
        raise refuse("no drawing for this architecture")
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if isinstance(activation, str) and activation not in ("silu", "swish", "swiglu"):
        raise refuse(f"no drawing for this architecture; {activation} does not say whether parts are gated")
    for key, value in config.items():
        switched_off = value is None or value is False or value == 0 or value in ([], {})
        if _STRUCTURE.search(str(key)) and not switched_off and key not in HARMLESS:
            raise refuse(f"no drawing for this architecture, and {key} says it is no plain decoder")


def may_be_a_shape(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is True:
        return bool(re.search(r"norm|bias|gate", key))
    if isinstance(value, float):
        return value != 0
    return isinstance(value, int | list | dict) and bool(value) and bool(_SHAPE_WORDS.search(key))


def refuse_unread_layers(reader: Reader, layers: Any) -> None:
    """Refuse a list that says something else for different layers and that nobody has read."""
    for part in (reader, *reader.inner):
        for key, value in part.config.items():
            unread = key not in part.used and key not in HARMLESS and isinstance(value, list)
            if not unread or not isinstance(layers, int) or not 2 <= layers <= len(value) <= layers + 4:
                continue
            if any(item != value[0] for item in value[:layers]):
                raise UnsupportedModel(
                    "says what each layer is, in a way that is not known",
                    where=reader.where,
                    key=part.prefix + key,
                )


def text_alone(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], list[str]]:
    """The nested language model with what the outer file says of ties and quantisation."""
    inner = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
    if inner is None:
        raise InputError("there is no text_config to take alone", where=where, key="text_config")
    kept = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    towers = [key for key in config if key.endswith("_config") and key not in (*TEXT_KEYS, *kept)]
    said = [f"left out, since the text model alone was asked for: {', '.join(towers)}"] if towers else []
    return {**kept, **{key: value for key, value in inner.items() if value is not None}}, said
