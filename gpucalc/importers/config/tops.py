"""What stands on top of a model: a vocabulary, a classifier, nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import UnsupportedModel
from gpucalc.families import FAMILIES
from gpucalc.importers.config.layers import pattern_of
from gpucalc.importers.config.reader import Reader


def class_of(c: Reader) -> str:
    """The class the weights were saved as, empty where it is not stated."""
    names = c.config.get("architectures") or []
    c.used.add("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def labels_of(c: Reader) -> int:
    """How many classes a classifier tells apart."""
    labels = c.config.get("id2label")
    classes = c.whole("num_labels") or (len(labels) if isinstance(labels, Mapping) else None)
    if classes is None:
        classes = 2
        c.assumed.append("num_labels not stated: 2, the library's default")
    return classes


def decoder_top(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """A decoder saved without its vocabulary matrix, or with a classifier in its place."""
    name = class_of(c)
    if "SequenceClassification" in name:
        fields["head"], fields["classes"] = "classifier", labels_of(c)
    elif any(word in name for word in ("Reward", "Classification", "QuestionAnswering", "MultipleChoice")):
        raise UnsupportedModel(
            "no drawing of what stands on top", where=c.where, key="architectures", given=name
        )
    elif name.endswith("Model") and not name.endswith("LMHeadModel") and key != "chatglm":
        fields["head"] = "body"


def two_stack_top(c: Reader, fields: dict[str, Any]) -> None:
    """An encoder and its decoder: no drawing of one of them alone."""
    name = class_of(c)
    whole = not name or "ConditionalGeneration" in name or "WithLMHead" in name or "Summarization" in name
    bare = name.endswith("Model") and "Encoder" not in name and fields.get("tied_embeddings")
    if not (whole or bare):
        raise UnsupportedModel(
            "no drawing of this part alone", where=c.where, key="architectures", given=name
        )


def tops(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """What stands on an encoder, from the class the weights were saved as."""
    name = class_of(c)
    if any(word in name for word in ("MaskedLM", "PreTraining", "LMHead", "CausalLM")):
        fields["head"] = "mlm"
    elif "Classification" in name:
        fields["head"], fields["classes"] = "classifier", labels_of(c)
    elif not name:
        c.assumed.append(
            f"architectures not stated: {FAMILIES[key].head} on top, as the bare {key} class has it"
        )
    elif key == "vit":
        fields["head"] = "pooler"
    if key == "deberta_v2":
        buckets = c.whole("position_buckets")
        if buckets is None or c.get("position_biased_input") or c.get("relative_attention") is False:
            raise UnsupportedModel(
                "DeBERTa without bucketed relative positions alone has no drawing",
                where=c.where,
                key="position_buckets",
            )
        fields["positions"] = 2 * buckets
        c.get("norm_rel_ebd", "share_att_key", "pos_att_type", "max_relative_positions")
    kinds = c.whole("type_vocab_size")
    if kinds is not None and FAMILIES[key].form == "bert":
        fields["token_types"] = kinds
    if key == "modernbert":
        fields["pattern"], fields["window"] = pattern_of(c, key, fields["layers"])
        c.get("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    if key == "dinov2" and c.get("use_swiglu_ffn"):
        raise UnsupportedModel("DINOv2 with gated feed-forward parts", where=c.where, key="use_swiglu_ffn")
    c.get("qkv_bias", "num_channels", "use_mask_token")
