"""A config.json whose keys are ticked off as they are used, and the keys that change nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel

MAX_WHOLE = 10**15
OF_ITS_CLASS = "a number, or a catalogue id where the file leaves it to its class"


TEXT_KEYS = ("text_config", "llm_config", "language_config")


# Keys that change neither shapes nor traits.
# fmt: off
HARMLESS = frozenset({
    "_name_or_path", "activation_dropout", "add_cross_attention", "architectures",
    "attention_dropout", "attention_multiplier", "attention_probs_dropout_prob", "attn_pdrop",
    "attn_scale", "attn_temperature_tuning", "auto_map", "aux_loss_alpha", "bos_token_id",
    "cache_implementation", "chunk_size", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_layerdrop",
    "decoder_start_token_id", "dropout", "dropout_rate", "dtype", "emb_pdrop", "embd_pdrop",
    "embedding_dropout", "embedding_multiplier", "encoder_layerdrop", "eos_token_id",
    "final_logit_softcapping", "floor_scale", "forced_bos_token_id", "forced_eos_token_id",
    "hidden_dropout", "hidden_dropout_prob", "id2label", "init_std", "initializer_factor",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_norm_eps",
    "layer_norm_epsilon", "layerdrop", "logit_scale", "logit_scale_init_value", "logits_scaling",
    "model_type", "n_group", "no_rope_layer_interval", "no_rope_layers", "norm_eps",
    "norm_topk_prob", "num_nextn_predict_layers", "original_max_position_embeddings",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "partial_rotary_factor", "pooler_dropout", "pooler_hidden_act", "pretraining_tp",
    "problem_type", "query_pre_attn_scalar", "rescale_prenorm_residual", "resid_pdrop",
    "residual_dropout", "residual_in_fp32", "residual_multiplier", "return_dict", "rms_norm_eps",
    "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim",
    "routed_scaling_factor", "router_aux_loss_coef", "router_jitter_noise", "scale_embedding",
    "scoring_func", "sep_token_id", "seq_aux", "stage_names", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "swiglu_alpha", "swiglu_limit",
    "task_specific_params", "time_step_floor", "time_step_init_scheme", "time_step_limit",
    "time_step_max", "time_step_min", "time_step_scale", "topk_group", "topk_method", "torch_dtype",
    "transformers_version", "unk_token_id", "use_associative_scan", "use_cache",
    "use_mamba_kernels", "use_mambapy",
})
# fmt: on


class Reader:
    """A config whose keys are ticked off as they are used."""

    def __init__(self, config: Mapping[str, Any], where: str, family: str, prefix: str = "") -> None:
        self.config = config
        self.where = where
        self.family = family
        self.prefix = prefix
        self.used: set[str] = set()
        self.understood: list[str] = []
        self.assumed: list[str] = []
        self.groups: dict[str, Reader] = {}

    @property
    def inner(self) -> tuple[Reader, ...]:
        """Readers of the nested objects met so far."""
        return tuple(self.groups.values())

    def get(self, *keys: str) -> Any:
        """The first of these keys that is present and not null, else None."""
        found = None
        for key in keys:
            if key in self.config:
                self.used.add(key)
                if found is None and self.config[key] is not None:
                    found = self.config[key]
                    self.understood.append(f"{self.prefix}{key}")
        return found

    def whole(self, *keys: str) -> int | None:
        """A whole number under one of these keys, or None."""
        value = self.get(*keys)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError("not a whole number", where=self.where, key=self.prefix + keys[0], given=value)
        if not -MAX_WHOLE <= value <= MAX_WHOLE:
            raise InputError("out of range", where=self.where, key=self.prefix + keys[0], given=value)
        return value

    def even(self, *keys: str) -> int | None:
        """A whole number, also as a list that says the same for every layer."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, list) and value and isinstance(value[0], int | float):
                self.get(key)
                if any(item != value[0] for item in value):
                    raise UnsupportedModel(
                        "differs from layer to layer", where=self.where, key=self.prefix + key
                    )
                return int(value[0])
        return self.whole(*keys)

    def listing(self, *keys: str) -> list[Any]:
        """A list under one of these keys, empty without one; a text is the list of its letters."""
        value = self.get(*keys)
        if value is None:
            return []
        if not isinstance(value, list | str):
            raise InputError("not a list", where=self.where, key=self.prefix + keys[0], given=value)
        return list(value)

    def need(self, *keys: str) -> int:
        """A whole number under one of these keys. Raises InputError naming the first."""
        value = self.whole(*keys)
        if value is None:
            also = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
            raise InputError(
                f"missing{also}; a {self.family} model cannot be described without it",
                where=self.where,
                key=self.prefix + keys[0],
                legal=OF_ITS_CLASS if self.prefix else None,
            )
        return value

    def group(self, *keys: str) -> Reader | None:
        """A nested object as a reader of its own, or None."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, Mapping):
                if key in self.groups:
                    return self.groups[key]
                self.used.add(key)
                inner = Reader(value, self.where, self.family, f"{self.prefix}{key}.")
                inner.understood, inner.assumed = self.understood, self.assumed
                self.groups[key] = inner
                return inner
        return None

    def leftovers(self) -> list[str]:
        """Keys that were neither used nor known to be harmless."""
        own = [
            f"{self.prefix}{key}"
            for key, value in self.config.items()
            if key not in self.used
            and key not in HARMLESS
            and not key.endswith("_token_id")
            and value is not None
        ]
        return own + [key for inner in self.inner for key in inner.leftovers()]
