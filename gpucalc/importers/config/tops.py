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


# What the classes of an encoder put on top, by the end of their name.
_BERT_TOPS = {
    "ForMaskedLM": "mlm",
    "LMHeadModel": "mlm",
    "ForCausalLM": "mlm",
    "ForSequenceClassification": "classifier",
}


def tops(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """What stands on an encoder, from the class the weights were saved as."""
    name = class_of(c)
    if FAMILIES[key].form == "vit":
        _image_top(c, key, name, fields)
    else:
        _encoder_top(c, key, name, fields)


def _refused(c: Reader, key: str, what: str, given: Any = None) -> UnsupportedModel:
    return UnsupportedModel(f"no drawing of {what}", where=c.where, key=key, given=given)


def _unstated(c: Reader, key: str) -> None:
    c.assumed.append(f"architectures not stated: {FAMILIES[key].head} on top, as the bare {key} class has it")


def _encoder_top(c: Reader, key: str, name: str, fields: dict[str, Any]) -> None:
    top = next((ours for end, ours in _BERT_TOPS.items() if name.endswith(end)), None)
    if top is not None:
        fields["head"] = top
        if top == "classifier":
            fields["classes"] = labels_of(c)
    elif not name:
        _unstated(c, key)
    elif not name.endswith("Model"):
        raise _refused(c, "architectures", "what stands on top", name)
    elif key == "modernbert":
        fields["head"] = "body"
    elif key == "mpnet":
        fields["head"] = "pooler"
    if key in ("electra", "albert"):
        fields["embedding_width"] = c.need("embedding_size")
        if key == "electra" and top == "classifier":
            raise _refused(c, "architectures", "what stands on top", name)
    elif c.whole("embedding_size") not in (None, fields["hidden"]):
        raise _refused(c, "embedding_size", "an embedding of another width")
    if key == "deberta_v2":
        _deberta(c, fields)
    if key == "albert":
        if c.need("inner_group_num") != 1:
            raise _refused(c, "inner_group_num", "ALBERT with several layers in a group")
        fields["shared"] = {"blocks": c.need("num_hidden_groups")}
    kinds = c.whole("type_vocab_size")
    if kinds is not None and key not in ("distilbert", "mpnet"):
        fields["token_types"] = kinds
    if key == "ernie" and c.get("use_task_id"):
        fields["token_types"] = (fields.get("token_types") or 0) + c.need("task_type_vocab_size")
    if key == "mpnet" and c.whole("relative_attention_num_buckets") not in (None, 32):
        raise _refused(c, "relative_attention_num_buckets", "other than 32 buckets of positions")
    if key == "modernbert":
        fields["pattern"], fields["window"] = pattern_of(c, key, fields["layers"])
        for switch in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
            if c.get(switch):
                raise _refused(c, switch, "ModernBERT with these biases")
        if c.get("decoder_bias") is False:
            raise _refused(c, "decoder_bias", "ModernBERT without that bias")


def _deberta(c: Reader, fields: dict[str, Any]) -> None:
    buckets = c.whole("position_buckets")
    if buckets is None or c.get("position_biased_input") or c.get("relative_attention") is False:
        raise _refused(c, "position_buckets", "DeBERTa without bucketed relative positions alone")
    if c.get("share_att_key") is False or c.whole("conv_kernel_size"):
        raise _refused(c, "share_att_key", "DeBERTa with keys of its own for positions, or a convolution")
    fields["positions"] = 2 * buckets
    c.get("norm_rel_ebd", "pos_att_type", "max_relative_positions")


def _image_top(c: Reader, key: str, name: str, fields: dict[str, Any]) -> None:
    if name.endswith("ForImageClassification"):
        fields["head"], fields["classes"] = "classifier", labels_of(c)
    elif not name:
        _unstated(c, key)
    elif not name.endswith("Model"):
        raise _refused(c, "architectures", "what stands on top", name)
    elif key != "dinov2":
        fields["head"] = "pooler"
        if c.whole("pooler_output_size") not in (None, fields["hidden"]):
            raise _refused(c, "pooler_output_size", "a pooler of another width")
    if c.whole("num_channels") not in (None, 3):
        raise _refused(c, "num_channels", "images of other than three channels")
    if c.get("use_swiglu_ffn"):
        raise _refused(c, "use_swiglu_ffn", "DINOv2 with gated feed-forward parts")
    if c.get("use_mask_token") is False:
        raise _refused(c, "use_mask_token", "DINOv2 without its mask token")
    queries = c.get("qkv_bias")
    if isinstance(queries, bool):
        fields["qkv_bias"] = queries
