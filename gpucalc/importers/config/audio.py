"""Encoders of raw audio: their convolutions, how positions enter, and what stands on top."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader
from gpucalc.importers.config.tops import class_of, labels_of

_LISTS = {"widths": "conv_dim", "kernels": "conv_kernel", "strides": "conv_stride"}
# Keys of what else the classes put on top or do in training: nothing of the encoder changes with them.
_ELSEWHERE = frozenset({
    "adapter_kernel_size", "adapter_stride", "apply_spec_augment", "classifier_proj_size", "codevector_dim",
    "contrastive_logits_temperature", "ctc_loss_reduction", "ctc_zero_infinity", "diversity_loss_weight",
    "feat_extract_activation", "feat_proj_dropout", "feat_quantizer_dropout", "final_dropout",
    "mask_channel_length", "mask_channel_min_space", "mask_channel_other", "mask_channel_prob",
    "mask_channel_selection", "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob",
    "mask_time_length", "mask_time_min_masks", "mask_time_min_space", "mask_time_other", "mask_time_prob",
    "mask_time_selection", "max_bucket_distance", "num_adapter_layers", "num_clusters",
    "num_codevector_groups", "num_codevectors_per_group", "num_ctc_classes", "num_negatives",
    "output_hidden_size", "proj_codevector_dim", "replace_prob", "tdnn_dilation", "tdnn_dim", "tdnn_kernel",
    "use_weighted_layer_sum", "xvector_output_dim",
})  # fmt: skip


def audio_of(c: Reader, key: str, fields: dict[str, Any]) -> None:
    """Set the `audio` group of a model description, and the traits that go with it."""
    c.used |= _ELSEWHERE & c.config.keys()
    lists = {name: _wholes(c, field) for name, field in _LISTS.items()}
    depth = c.whole("num_feat_extract_layers")
    if len({len(each) for each in lists.values()}) > 1 or depth not in (None, len(lists["widths"])):
        raise InputError(
            "conv_dim, conv_kernel and conv_stride differ in length", where=c.where, key="conv_dim"
        )
    kind = c.get("feat_extract_norm")
    if kind not in ("group", "layer"):
        raise InputError(
            "missing" if kind is None else "unknown norm",
            where=c.where,
            key="feat_extract_norm",
            given=kind,
            legal=("group", "layer"),
        )
    for name in ("add_adapter", "adapter_attn_dim", "conv_pos_batch_norm"):
        if c.get(name):
            raise _other(c, name, f"{key} with {name}")
    groups = c.need("num_conv_pos_embedding_groups")
    if groups < 1 or fields["hidden"] % groups:
        raise InputError(
            f"does not divide the width {fields['hidden']}",
            where=c.where,
            key="num_conv_pos_embedding_groups",
            given=groups,
        )
    fields["audio"] = {
        **lists,
        "norm": kind,
        "bias": _switch(c, "conv_bias"),
        "position_kernel": c.need("num_conv_pos_embeddings"),
        "position_groups": groups,
        "projection_norm": key != "hubert" or _switch(c, "feat_proj_layer_norm"),
        "mask": key == "unispeech_sat"
        or any(_share(c, name) for name in ("mask_time_prob", "mask_feature_prob")),
        **({"buckets": c.need("num_buckets")} if key == "wavlm" else {}),
    }
    fields["post_norm"] = not _switch(c, "do_stable_layer_norm")
    _top(c, fields)


def _top(c: Reader, fields: dict[str, Any]) -> None:
    name = class_of(c)
    if name.endswith("ForCTC"):
        fields["head"] = "lm"
    elif name.endswith("ForSequenceClassification"):
        fields["head"], fields["classes"] = "classifier", labels_of(c)
        fields["audio"]["classifier_width"] = c.need("classifier_proj_size")
        fields["audio"]["weighted_layers"] = _switch(c, "use_weighted_layer_sum")
    elif not name:
        c.assumed.append("architectures not stated: nothing on top, as the bare class has it")
    elif not name.endswith("Model"):
        raise _other(c, "architectures", "what stands on top", name)


def _wholes(c: Reader, key: str) -> list[int]:
    values = c.listing(key)
    if not values or any(type(value) is not int or value < 1 for value in values):
        raise InputError("missing, or no list of whole numbers", where=c.where, key=key)
    return values


def _switch(c: Reader, key: str) -> bool:
    value = c.get(key)
    if not isinstance(value, bool):
        raise InputError("missing", where=c.where, key=key, given=value, legal="true or false")
    return value


def _share(c: Reader, key: str) -> bool:
    value = c.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(
            "missing: a masked model has a vector to put in", where=c.where, key=key, given=value
        )
    return value > 0


def _other(c: Reader, key: str, what: str, given: Any = None) -> UnsupportedModel:
    return UnsupportedModel(f"no drawing of {what}", where=c.where, key=key, given=given)
