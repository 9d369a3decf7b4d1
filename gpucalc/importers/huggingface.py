"""A Hugging Face config.json, or a folder holding one, as a model description.

Only the text is read: no import, no network, nothing executed. Every key is understood, known to
change no shape, or reported as ignored; a key that matters and is missing is an error. An
architecture without a drawing is drawn as a llama-shaped decoder when every key that could change
that is absent, with what was assumed said; anything else is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES, canonical
from gpucalc.spec.model import ModelSpec

MAX_LAYERS = 10_000
MAX_WHOLE = 10**15
MAX_BYTES = 4 * 2**20  # a config.json is a few kB


@dataclass(frozen=True, slots=True)
class Imported:
    """What came out of a file, and what was made of its keys."""

    spec: ModelSpec
    understood: tuple[str, ...]
    assumed: tuple[str, ...]
    ignored: tuple[str, ...]


def read_config(path: str | Path, *, text_only: bool = False) -> Imported:
    """The description in a config.json or in a model folder. Raises InputError, UnsupportedModel."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    name = file.parent.name if file.name == "config.json" else file.stem
    return from_config(read_json(file), where=str(file), name=name or None, text_only=text_only)


def read_json(file: Path) -> Any:
    """The value in a small JSON file; a key given twice is an error. Raises InputError."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InputError("too large for a config.json", where=str(file), given=f"{size} bytes")
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise InputError(f"no {file.name} there", where=str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(file)) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", where=str(file)) from None
    except _Twice as error:
        raise InputError("the key is given twice", where=str(file), key=str(error)) from None


class _Twice(Exception):
    """A key that a JSON object holds twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return data


def from_config(
    config: Any, *, where: str = "config.json", name: str | None = None, text_only: bool = False
) -> Imported:
    """The description in a parsed config.json. Raises InputError, UnsupportedModel.

    `text_only`: the language model of a multimodal one, the towers beside it left out.
    """
    if not isinstance(config, Mapping):
        raise InputError("expected a JSON object", where=where, given=config)
    left_out: list[str] = []
    if text_only:
        config, left_out = _text_alone(config, where)
    model_type = config.get("model_type")
    classes = config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
            raise InputError("missing, so the architecture is unknown", where=where, key="model_type")
        model_type = classes[0]
    key = canonical(_SHAPED_LIKE.get(model_type.lower(), model_type))
    family = FAMILIES.get(key)
    generic = family is None
    if family is not None and (family.refused or model_type.lower() in _NOT_ITS_FAMILY):
        why = family.refused or _NOT_ITS_FAMILY[model_type.lower()]
        raise UnsupportedModel(why, where=where, key="model_type", given=model_type)
    if family is not None and family.form == "totals":
        raise UnsupportedModel(
            "a convolutional network is described by its totals; a trace of the module measures them",
            where=where,
            key="model_type",
            given=model_type,
        )
    if generic:
        _refuse_unless_plain(config, model_type, where)
        key = "llama"
    reader = _Reader(config, where, model_type if generic else key)
    reader.assumed += left_out
    if generic:
        reader.assumed.append(
            f"{model_type} is not a known architecture: drawn as a decoder of the llama shape (RMS norms,"
            " rotary positions, gated feed-forward), so counts are approximate"
        )
    fields = _fields(reader, key)
    leftovers = reader.leftovers()
    _refuse_unread_layers(reader, fields.get("layers"))
    if generic:
        shapes = [word for word in leftovers if _may_be_a_shape(config, word)]
        if shapes:
            raise UnsupportedModel(
                f"not a known architecture, and {', '.join(shapes[:5])} may change its shape",
                where=where,
                key="model_type",
                given=model_type,
            )
    named = config.get("_name_or_path")
    spec = ModelSpec.read(
        {
            "name": (named if isinstance(named, str) and named else None) or name or model_type,
            "family": key,
            **({"architecture": model_type} if canonical(model_type) == key else {}),
            **{field: value for field, value in fields.items() if value is not None},
        },
        where=where,
    )
    return Imported(spec, tuple(dict.fromkeys(reader.understood)), tuple(reader.assumed), tuple(leftovers))


def _refuse_unread_layers(reader: _Reader, layers: Any) -> None:
    """Refuse a list that says something else for different layers and that nobody has read."""
    for part in (reader, *reader.inner):
        for key, value in part.config.items():
            unread = key not in part.used and key not in _HARMLESS and isinstance(value, list)
            if not unread or not isinstance(layers, int) or not 2 <= layers <= len(value) <= layers + 4:
                continue
            if any(item != value[0] for item in value[:layers]):
                raise UnsupportedModel(
                    "says what each layer is, in a way that is not known",
                    where=reader.where,
                    key=part.prefix + key,
                )


# Architectures that build what another one does, checked by instantiating both.
_SHAPED_LIKE = {"mimo": "qwen2", "helium": "llama", "ernie4_5": "llama", "iquestcoder": "llama"}
# Names the family table knows for a later generation of another shape.
_NOT_ITS_FAMILY = {"olmo": "OLMo 1 has norms without weights, which have no drawing"}
# Keys of an unknown architecture that a plain decoder does not have.
_STRUCTURE = re.compile(
    r"expert|moe|lora|latent|mamba|ssm|state_size|conv|linear_|recurrent|rwkv|block_type|layer_type|hybrid"
    r"|kv_shared|per_layer|altup|laurel|cross_attention|encoder|decoder_layers|vision|audio|image|mtp|nextn"
    r"|index_|sparse|memory|loop|adapter|group_norm|alibi|sandwich|parallel"
)
_SHAPE_WORDS = re.compile(r"dim|size|rank|heads|layers|width|hidden|groups|ratio|num_|n_|norm|bias|gate")


def _text_alone(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], list[str]]:
    """The nested language model with what the outer file says of ties and quantisation."""
    inner = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
    if inner is None:
        raise InputError("there is no text_config to take alone", where=where, key="text_config")
    kept = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    towers = [key for key in config if key.endswith("_config") and key not in (*_TEXT_KEYS, *kept)]
    said = [f"left out, since the text model alone was asked for: {', '.join(towers)}"] if towers else []
    return {**kept, **{key: value for key, value in inner.items() if value is not None}}, said


_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def _refuse_unless_plain(config: Mapping[str, Any], model_type: str, where: str) -> None:
    """Refuse an unknown architecture unless its keys are those of a plain causal decoder."""
    from difflib import get_close_matches

    from gpucalc.errors import nearest

    def refuse(why: str, key: str = "model_type") -> UnsupportedModel:
        drawn = [name for name, family in FAMILIES.items() if not family.refused]
        near = nearest(canonical(model_type), drawn)
        return UnsupportedModel(why, where=where, key=key, given=model_type, near=near)

    text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), None)
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
        if _STRUCTURE.search(str(key)) and not switched_off and key not in _HARMLESS:
            raise refuse(f"no drawing for this architecture, and {key} says it is no plain decoder")


def _may_be_a_shape(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is True:
        return bool(re.search(r"norm|bias|gate", key))
    return isinstance(value, int | list | dict) and bool(value) and bool(_SHAPE_WORDS.search(key))


# Keys that change neither shapes nor traits.
# fmt: off
_HARMLESS = frozenset({
    "_name_or_path", "activation_dropout", "add_cross_attention", "architectures",
    "attention_dropout", "attention_multiplier", "attention_probs_dropout_prob", "attn_pdrop",
    "attn_scale", "attn_temperature_tuning", "auto_map", "aux_loss_alpha", "bos_token_id",
    "cache_implementation", "chunk_size", "classifier_dropout", "decoder_layerdrop",
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

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}

_LAYER_TYPES = {
    "full_attention": "F",
    "attention": "F",
    "*": "F",
    "sliding_attention": "S",
    "chunked_attention": "K",
    "indexed_attention": "D",
    "deepseek_sparse_attention": "D",
    "compressed_sparse_attention": "C",
    "heavily_compressed_attention": "H",
    "mamba": "M",
    "M": "M",
    "moe": "E",
    "E": "E",
    "mlp": "-",
    "-": "-",
}


class _Reader:
    """A config whose keys are ticked off as they are used."""

    def __init__(self, config: Mapping[str, Any], where: str, family: str, prefix: str = "") -> None:
        self.config = config
        self.where = where
        self.family = family
        self.prefix = prefix
        self.used: set[str] = set()
        self.understood: list[str] = []
        self.assumed: list[str] = []
        self.inner: list[_Reader] = []

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
            )
        return value

    def group(self, *keys: str) -> _Reader | None:
        """A nested object as a reader of its own, or None."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, Mapping):
                self.used.add(key)
                inner = _Reader(value, self.where, self.family, f"{self.prefix}{key}.")
                inner.understood, inner.assumed = self.understood, self.assumed
                self.inner.append(inner)
                return inner
        return None

    def leftovers(self) -> list[str]:
        """Keys that were neither used nor known to be harmless."""
        own = [
            f"{self.prefix}{key}"
            for key, value in self.config.items()
            if key not in self.used
            and key not in _HARMLESS
            and not key.endswith("_token_id")
            and value is not None
        ]
        return own + [key for inner in self.inner for key in inner.leftovers()]


def _fields(top: _Reader, key: str) -> dict[str, Any]:
    form = FAMILIES[key].form
    if form == "clip":
        return _contrastive(top)
    text = top.group(*_TEXT_KEYS) or top
    fields = _shape(text, key)
    tie = top.get("tie_word_embeddings")
    if tie is None and text is not top:
        tie = text.get("tie_word_embeddings")
    elif text is not top:
        text.used.add("tie_word_embeddings")
    if tie is None and FAMILIES[key].head == "lm":
        tie = FAMILIES[key].tied_embeddings
        top.assumed.append(f"tie_word_embeddings not stated: {str(tie).lower()}, the {key} default")
    fields["tied_embeddings"] = tie
    stored = top.get("torch_dtype", "dtype") or text.get("torch_dtype", "dtype")
    if isinstance(stored, str):
        fields["native_dtype"] = stored.removeprefix("torch.")
    fields["quantization"], held = _quantization(top)
    if held is None and text is not top:
        fields["quantization"], held = _quantization(text)
    fields["native_dtype"] = held or fields.get("native_dtype")
    if form == "decoder":
        _decoder(text, key, fields)
        sight = top.group("vision_config")
        if sight is not None:
            if not FAMILIES[key].vision:
                raise UnsupportedModel(
                    f"the vision tower of {key} models has no drawing",
                    where=top.where,
                    key="vision_config",
                )
            fields["vision_tower"] = _tower(sight, key)
    elif form == "vit":
        fields["patch"] = top.need("patch_size")
        fields["image_size"] = top.need("image_size")
    plain = fields.get("moe") is None and fields.get("ssm") is None
    if fields["ffn"] is None and plain and FAMILIES[key].ffn_ratio is None:
        text.need("intermediate_size", "ffn_dim", "d_ff")
    if form in ("bert", "vit"):
        _tops(top, key, fields)
    if form == "whisper":
        fields["mel_bins"] = top.need("num_mel_bins")
        fields["positions"] = top.need("max_target_positions")
        top.get("max_source_positions")
    return fields


def _shape(c: _Reader, key: str) -> dict[str, Any]:
    form = FAMILIES[key].form
    hidden = c.need("hidden_size", "d_model", "n_embd")
    listed = c.config.get("layers_block_type") or c.config.get("hybrid_override_pattern")
    layers = c.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
    if layers is None and isinstance(listed, list | str):
        layers = len(listed)  # hybrids list their layers instead of counting them
    fields: dict[str, Any] = {
        "hidden": hidden,
        "layers": c.need("num_hidden_layers", "n_layer", "num_layers") if layers is None else layers,
        "decoder_layers": c.whole("num_decoder_layers", "decoder_layers"),
        "heads": c.whole("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        "head_dim": c.whole("head_dim", "d_kv", "attention_head_dim"),
        "ffn": c.whole(
            "intermediate_size_mlp" if key == "llama4" else "intermediate_size",
            "n_inner",
            "ffn_dim",
            "d_ff",
            "ffn_hidden_size",
            "encoder_ffn_dim",
        ),
        "decoder_ffn": c.whole("decoder_ffn_dim"),
        "max_context": c.whole(
            "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"
        ),
    }
    if form != "vit":
        fields["vocab"] = c.need("vocab_size")
    if key in ("mamba", "mamba2", "falcon_mamba"):
        fields["heads"] = fields["head_dim"] = fields["ffn"] = None
    elif fields["heads"] is None:
        c.need("num_attention_heads", "n_head", "num_heads")
    c.get("decoder_attention_heads")
    ratio = c.whole("expansion_ratio", "mlp_ratio")
    if fields["ffn"] is None and ratio is not None:
        fields["ffn"] = ratio * hidden
    if fields["ffn"] is None and key in ("gpt2", "gptj", "bloom", "gpt_bigcode"):
        fields["ffn"] = 4 * hidden
        if "n_inner" in c.config or key == "bloom":
            c.understood.append("n_inner null: 4 x hidden")
    act = c.get(
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "activation",
        "dense_act_fn",
        "mlp_hidden_act",
    )
    if isinstance(act, str):
        if act not in _ACTIVATIONS:
            raise InputError("unknown activation", where=c.where, key=c.prefix + "hidden_act", given=act)
        if form != "t5" and key != "gpt_oss":
            fields["activation"] = _ACTIVATIONS[act]
    if form == "t5":
        kind = c.get("feed_forward_proj") or "relu"
        fields["gated_mlp"] = str(kind).startswith("gated")
        fields["activation"] = "gelu_new" if "gelu" in str(kind) else "relu"
        c.get("is_gated_act", "relative_attention_num_buckets", "relative_attention_max_distance")
        if fields["decoder_layers"] is None:
            fields["decoder_layers"] = fields["layers"]
    if FAMILIES[key].position_kind == "learned" and form in ("decoder", "bert", "bart"):
        fields["positions"] = fields["max_context"]
    fields["kv_heads"] = _kv_heads(c, key, fields["heads"])
    return fields


def _kv_heads(c: _Reader, key: str, heads: int | None) -> int | None:
    if heads is None:
        return None
    if key == "falcon":
        kv = c.whole("num_kv_heads", "n_head_kv")
        many, new = c.get("multi_query"), c.get("new_decoder_architecture")
        return (kv or heads) if new else (1 if many else heads)
    if key == "gpt_bigcode":
        return 1 if c.get("multi_query") else heads
    inner = c.group("attn_config") if key == "dbrx" else None
    if inner is not None:
        c.get("num_key_value_heads")
        return inner.need("kv_n_heads")
    kv = c.whole("num_key_value_heads")
    return heads if kv is None else kv  # null or absent means one per head in transformers too


def _decoder(c: _Reader, key: str, fields: dict[str, Any]) -> None:
    layers = fields["layers"]
    fields["embedding_width"] = c.whole("word_embed_proj_dim")
    c.get("attn_logit_softcapping")  # the family says whether scores are capped
    if c.get("do_layer_norm_before") is False:
        raise UnsupportedModel("OPT with norms after each part", where=c.where, key="do_layer_norm_before")
    _biases(c, key, fields)
    fields["moe"] = _moe(c, key)
    if c.whole("kv_lora_rank") is not None:
        fields["mla"] = {
            "q_lora": c.whole("q_lora_rank"),
            "kv_lora": c.need("kv_lora_rank"),
            "qk_nope": c.need("qk_nope_head_dim"),
            "qk_rope": c.need("qk_rope_head_dim"),
            "v_head": c.need("v_head_dim"),
        }
        fields["mla"] = {k: v for k, v in fields["mla"].items() if v is not None}
        fields["head_dim"] = fields["kv_heads"] = None
        c.get("qk_head_dim")
    if c.whole("index_topk") is not None:
        fields["indexer"] = {
            "heads": c.need("index_n_heads"),
            "head_dim": c.need("index_head_dim"),
            "topk": c.need("index_topk"),
        }
    if key == "deepseek_v4":
        rates = c.group("compress_rates")
        fields["compressed"] = {
            "q_lora": c.need("q_lora_rank"),
            "o_groups": c.need("o_groups"),
            "o_lora": c.need("o_lora_rank"),
            "rope_dim": c.need("qk_rope_head_dim"),
            "sparse_ratio": rates.need("compressed_sparse_attention") if rates else 4,
            "heavy_ratio": rates.need("heavily_compressed_attention") if rates else 128,
            "residual_streams": c.whole("hc_mult") or 1,
        }
        if rates is None and not isinstance(c.config.get("compress_ratios"), list):
            c.assumed.append("compress_rates not stated: 4 and 128, the published ones")
    _state(c, key, fields)
    if layers > MAX_LAYERS:
        raise InputError("more layers than any model has", where=c.where, key=c.prefix + "num_hidden_layers")
    fields["pattern"], fields["window"] = _pattern(c, key, layers)
    if "E" in (fields["pattern"] or "") and fields["moe"] is None:
        c.need("n_routed_experts", "num_local_experts", "num_experts")
        raise InputError("says experts, and no number of them fits", where=c.where, key="n_routed_experts")
    if key == "mimo_v2_flash":
        fields["global_attention"] = {
            "kv_heads": fields["kv_heads"],
            "head_dim": fields["head_dim"],
            "v_head_dim": c.need("v_head_dim"),
        }
        fields["v_head_dim"] = c.need("v_head_dim")
        swa = c.whole("swa_num_key_value_heads")
        if swa is None:
            swa = 2 * fields["kv_heads"]
            c.assumed.append(f"swa_num_key_value_heads not stated: {swa}, twice those of full layers")
        fields["kv_heads"] = swa
    if key == "gemma4":
        _gemma4(c, fields)


def _biases(c: _Reader, key: str, fields: dict[str, Any]) -> None:
    family = FAMILIES[key]
    attention = c.get("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias")
    if key in ("falcon", "mpt"):
        attention = c.get("bias")
        c.get("no_bias", "norm_type", "learned_pos_emb")
        if key == "falcon":
            fields["mlp_bias"] = attention
            new, norms = c.get("new_decoder_architecture"), c.whole("num_ln_in_parallel_attn")
            fields["parallel_block"] = bool(new or c.get("parallel_attn"))
            if not fields["parallel_block"] or norms == 2 or (new and norms is None):
                fields["norms_per_block"] = 2
            if c.get("alibi"):
                fields["position_kind"] = "alibi"
    if isinstance(attention, bool) and family.position_kind != "learned":
        if not (key in ("mamba", "mamba2", "falcon_mamba") and not attention):
            fields["qkv_bias"] = attention
        # In these families the same switch also biases the output projection.
        if key in (
            "llama",
            "gpt_oss",
            "gpt_neox",
            "falcon",
            "starcoder2",
            "granite",
            "qwen3",
            "qwen3_moe",
            "gemma",
        ):
            fields["o_bias"] = attention
    if key == "starcoder2" and isinstance(attention, bool):
        fields["mlp_bias"] = attention
    mlp = c.get("mlp_bias")
    if isinstance(mlp, bool):
        fields["mlp_bias"] = mlp
    if key == "gpt_neox" and c.get("use_parallel_residual") is False:
        fields["parallel_block"] = False
    if key == "stablelm" and (c.get("use_parallel_residual") or c.get("qk_layernorm")):
        raise UnsupportedModel(
            "StableLM with parallel residual or query norms", where=c.where, key="model_type"
        )
    norms = c.get("use_qk_norm", "qk_layernorm")
    if isinstance(norms, bool):
        kind = {"cohere": "width", "llama4": "head_l2", "minimax_m2": "width"}.get(key, "head")
        fields["qk_norm"] = kind if norms else "none"


def _moe(c: _Reader, key: str) -> dict[str, Any] | None:
    inner = c.group("ffn_config") if key == "dbrx" else None
    if inner is not None:
        return {
            "experts": inner.need("moe_num_experts"),
            "top_k": inner.need("moe_top_k"),
            "expert_ffn": inner.need("ffn_hidden_size"),
        }
    experts = c.whole("n_routed_experts", "num_local_experts", "num_experts")
    top_k = c.whole("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
    width = c.whole("moe_intermediate_size")
    shared = c.whole("n_shared_experts", "num_shared_experts")
    shared_width = c.whole("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    dense = c.whole("first_k_dense_replace")
    listed = c.config.get("moe_layer_freq")
    if isinstance(listed, list):  # 0 or 1 for every layer
        c.get("moe_layer_freq")
        dense = listed.index(1) if 1 in listed else len(listed)
        if 0 in listed[dense:]:
            raise UnsupportedModel("dense layers among the expert ones", where=c.where, key="moe_layer_freq")
    sparse_step = c.whole("decoder_sparse_step", *(() if isinstance(listed, list) else ("moe_layer_freq",)))
    only = c.listing("mlp_only_layers")
    types = c.listing("mlp_layer_types")
    interleave = c.whole("interleave_moe_layer_step")
    c.get("moe_layers")
    period, offset = c.whole("expert_layer_period"), c.whole("expert_layer_offset")
    latent = c.whole("moe_latent_size")
    if not experts or experts == 1 or (key == "nemotron_h" and not _has_experts(c)):
        return None
    if key == "gemma4" and c.get("enable_moe_block") is False:
        return None
    if top_k is None:
        c.need("num_experts_per_tok")
    if width is None:
        width = c.need("intermediate_size")  # Mixtral and its kin: the only width is the experts'
    moe: dict[str, Any] = {"experts": experts, "top_k": top_k, "expert_ffn": width}
    if key == "llama4":
        moe["expert_ffn"] = moe["shared_expert_ffn"] = c.need("intermediate_size")
        if interleave and interleave > 1:
            moe |= {"every": interleave, "offset": interleave - 1}
    elif shared_width:
        moe["shared_expert_ffn"] = shared_width
    elif shared:
        moe |= {"shared_expert_ffn": shared * width, "shared_experts": shared}
    if types:
        dense = sum(1 for kind in types if kind == "dense")
        if any(kind == "dense" for kind in types[dense:]):
            raise UnsupportedModel(
                "dense layers after the first expert layer", where=c.where, key="mlp_layer_types"
            )
    if only:
        if sorted(only) != list(range(len(only))):
            raise UnsupportedModel("dense layers among the expert ones", where=c.where, key="mlp_only_layers")
        dense = len(only)
    if dense:
        moe["dense_layers"] = dense
    if period:
        moe |= {"every": period, "offset": offset or 0}
    elif sparse_step and sparse_step > 1:
        moe |= {"every": sparse_step, "offset": sparse_step - 1}
    if latent:
        moe["latent"] = latent
    return moe


def _has_experts(c: _Reader) -> bool:
    kinds = c.listing("layers_block_type", "hybrid_override_pattern")
    return "moe" in kinds or "E" in kinds


def _state(c: _Reader, key: str, fields: dict[str, Any]) -> None:
    if c.get("use_conv_bias", "mamba_conv_bias") is False or c.get("mamba_proj_bias") is True:
        raise UnsupportedModel(
            "Mamba layers with other biases than the published ones", where=c.where, key="use_conv_bias"
        )
    if key in ("mamba", "falcon_mamba", "mamba2"):
        inner = c.whole("intermediate_size")
        expand = c.whole("expand") or 2
        if inner is not None and key != "mamba2":
            expand = inner // fields["hidden"]
        fields["ssm"] = {"state": c.need("state_size"), "conv": c.need("conv_kernel"), "expand": expand}
        rank = c.get("time_step_rank")
        if key == "mamba2":
            fields["ssm"] |= {
                "heads": c.need("num_heads"),
                "head_dim": c.need("head_dim"),
                "groups": c.need("n_groups"),
            }
        elif isinstance(rank, int):
            fields["ssm"]["dt_rank"] = rank
    elif key in ("nemotron_h", "bamba"):
        fields["ssm"] = {
            "state": c.need("ssm_state_size", "mamba_d_state"),
            "conv": c.need("conv_kernel", "mamba_d_conv"),
            "heads": c.need("mamba_num_heads", "mamba_n_heads"),
            "head_dim": c.need("mamba_head_dim", "mamba_d_head"),
            "groups": c.need("n_groups", "mamba_n_groups"),
        }
    elif key == "jamba":
        fields["ssm"] = {
            "state": c.need("mamba_d_state"),
            "conv": c.need("mamba_d_conv"),
            "expand": c.need("mamba_expand"),
        }
        rank = c.get("mamba_dt_rank")
        if isinstance(rank, int):
            fields["ssm"]["dt_rank"] = rank
    elif key in ("qwen3_next", "qwen3_5"):
        fields["linear_attention"] = {
            "kind": "gated_deltanet",
            "key_heads": c.need("linear_num_key_heads"),
            "value_heads": c.need("linear_num_value_heads"),
            "key_dim": c.need("linear_key_head_dim"),
            "value_dim": c.need("linear_value_head_dim"),
            "conv": c.need("linear_conv_kernel_dim"),
        }
    elif key == "kimi_linear":
        heads, width = c.need("linear_num_heads"), c.need("linear_head_dim")
        fields["linear_attention"] = {
            "kind": "kda",
            "key_heads": heads,
            "value_heads": heads,
            "key_dim": width,
            "value_dim": width,
            "conv": c.need("linear_conv_kernel_dim"),
        }
    elif key == "minimax":
        width = fields["head_dim"] or fields["hidden"] // fields["heads"]
        fields["linear_attention"] = {
            "kind": "lightning",
            "key_heads": fields["heads"],
            "value_heads": fields["heads"],
            "key_dim": width,
            "value_dim": width,
        }


def _pattern(c: _Reader, key: str, layers: int) -> tuple[str | None, int | None]:
    kinds = c.listing("layer_types", "layers_block_type", "hybrid_override_pattern") or None
    window = c.get("sliding_window", "attention_chunk_size", "local_attention")
    use = c.get("use_sliding_window")
    skip = c.whole("max_window_layers")
    every = c.whole("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    period, offset = c.whole("attn_layer_period"), c.whole("attn_layer_offset")
    indices = c.listing("attn_layer_indices")
    freq, first = c.whole("index_topk_freq"), c.whole("index_skip_topk_offset")
    shares = c.listing("indexer_types")
    if use is False or not isinstance(window, int) or window <= 0:
        window = None
    if kinds is None and key == "mimo_v2_flash":
        marks = c.listing("hybrid_layer_pattern")
        kinds = ["sliding_attention" if mark else "full_attention" for mark in marks] or None
    if kinds is None and key == "deepseek_v4":
        names = {
            0: "sliding_attention",
            4: "compressed_sparse_attention",
            128: "heavily_compressed_attention",
        }
        kinds = [
            names.get(ratio) if isinstance(ratio, int) else None
            for ratio in c.listing("compress_ratios")[:layers]
        ] or None
        if kinds is None:  # which layers compress, and how far, is the architecture
            raise InputError("missing (or layer_types)", where=c.where, key=c.prefix + "compress_ratios")
    if kinds is not None:
        letters = [_letter(c, key, kind) for kind in kinds]
        if window is None:
            letters = ["F" if letter == "S" else letter for letter in letters]
    elif key == "jamba":
        letters = ["F" if i % (period or 8) == (offset or 0) else "M" for i in range(layers)]
    elif key == "bamba":
        letters = ["F" if i in indices else "M" for i in range(layers)]
    elif key in ("gemma3", "gemma2", "modernbert") and window:
        step = every or {"gemma3": 6, "gemma2": 2, "modernbert": 3}[key]
        if every is None:
            c.assumed.append(f"layer types not stated: every {step}th layer full, the {key} pattern")
        full = 0 if key == "modernbert" else step - 1
        letters = ["F" if i % step == full else "S" for i in range(layers)]
    elif key == "llama4":
        letters = ["F" if i % 4 == 3 else "K" for i in range(layers)]
        window = window or 8192
        c.assumed.append("layer types not stated: every 4th layer full, chunks of 8192 elsewhere")
    elif key == "qwen3_next" or key == "qwen3_5":
        step = c.whole("full_attention_interval") or 4
        letters = ["F" if i % step == step - 1 else "L" for i in range(layers)]
    elif key == "gpt_oss" and window:
        letters = ["S" if i % 2 == 0 else "F" for i in range(layers)]
        c.assumed.append("layer types not stated: sliding and full layers alternate")
    elif key in ("deepseek_v32", "glm_moe_dsa"):
        letters = ["D"] * layers
    elif window:
        start = skip if use and skip is not None else 0  # Qwen's first layers keep full attention
        letters = ["F" if i < start else "S" for i in range(layers)]
    else:
        return None, None
    if shares:
        letters = ["D" if share == "full" else "F" for share in shares]
    elif freq and freq > 1 and "D" in letters:
        start = 2 if first is None else first
        letters = ["D" if max(i - start + 1, 0) % freq == 0 else "F" for i in range(layers)]
    if len(letters) != layers:
        raise InputError(
            f"{len(letters)} layer types for {layers} layers", where=c.where, key=c.prefix + "layer_types"
        )
    needs = any(letter in "SKCH" for letter in letters)
    return "".join(letters), window if needs else None


def _letter(c: _Reader, key: str, kind: Any) -> str:
    if kind == "linear_attention":
        return "M" if key in ("nemotron_h", "bamba", "jamba") else "L"
    letter = _LAYER_TYPES.get(kind) if isinstance(kind, str) else None
    if letter is None:
        raise UnsupportedModel("unknown layer type", where=c.where, key=c.prefix + "layer_types", given=kind)
    return letter


def _gemma4(c: _Reader, fields: dict[str, Any]) -> None:
    if c.whole("hidden_size_per_layer_input") or c.whole("num_kv_shared_layers"):
        raise UnsupportedModel(
            "Gemma 4 with per-layer inputs or key-value sharing between layers has no drawing",
            where=c.where,
            key=c.prefix + "hidden_size_per_layer_input",
        )
    wide = c.whole("global_head_dim")
    shared = bool(c.get("attention_k_eq_v"))
    kv = c.whole("num_global_key_value_heads") if shared else None
    per_layer = c.get("per_layer_config")
    if wide is None and isinstance(per_layer, Mapping):
        entries = [entry for entry in per_layer.values() if isinstance(entry, Mapping)]
        if entries and all(entry == entries[0] for entry in entries):
            wide, kv = entries[0].get("head_dim"), entries[0].get("num_key_value_heads", kv)
    if wide is None:
        raise InputError("missing", where=c.where, key=c.prefix + "global_head_dim")
    fields["global_attention"] = {
        "kv_heads": kv or fields["kv_heads"],
        "head_dim": wide,
        "shared_kv": shared,
    }


def _tower(c: _Reader, key: str) -> dict[str, Any]:
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


def _contrastive(c: _Reader) -> dict[str, Any]:
    sight, text = c.group("vision_config"), c.group("text_config")
    if sight is None or text is None:
        missing = "vision_config" if sight is None else "text_config"
        raise InputError("missing", where=c.where, key=missing)
    width = c.whole("projection_dim")

    def tower(part: _Reader) -> dict[str, Any]:
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


def _tops(c: _Reader, key: str, fields: dict[str, Any]) -> None:
    """What stands on an encoder, from the class the weights were saved as."""
    names = c.config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    c.used.add("architectures")
    if any(word in name for word in ("MaskedLM", "PreTraining", "LMHead", "CausalLM")):
        fields["head"] = "mlm"
    elif "Classification" in name:
        fields["head"] = "classifier"
        labels = c.config.get("id2label")
        fields["classes"] = c.whole("num_labels") or (len(labels) if isinstance(labels, Mapping) else None)
        if fields["classes"] is None:
            fields["classes"] = 2
            c.assumed.append("num_labels not stated: 2, the library's default")
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
        fields["pattern"], fields["window"] = _pattern(c, key, fields["layers"])
        c.get("norm_bias", "attention_bias", "mlp_bias", "decoder_bias", "classifier_bias")
    if key == "dinov2" and c.get("use_swiglu_ffn"):
        raise UnsupportedModel("DINOv2 with gated feed-forward parts", where=c.where, key="use_swiglu_ffn")
    c.get("qkv_bias", "num_channels", "use_mask_token")


# What a quantised checkpoint holds its matrices in, by the method its configuration names.
_HELD = {
    "awq": "awq", "gptq": "gptq", "fbgemm_fp8": "fbgemm-fp8", "fp8": "fp8",
    "mxfp4": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip


def _quantization(c: _Reader) -> tuple[str | None, str | None]:
    """The quantisation in words, and the element type its matrices are stored in where that is clear."""
    inner = c.group("quantization_config", "compression_config")
    if inner is None:
        return None, None
    method = inner.get("quant_method", "quant_type", "quant_algo")
    algorithm = inner.get("quant_algo")
    bits = inner.whole("bits", "w_bit", "num_bits")
    kind = None
    if bits is None and inner.get("load_in_4bit", "_load_in_4bit"):
        bits, kind = 4, "nf4"
    if bits is None and inner.get("load_in_8bit", "_load_in_8bit"):
        bits, kind = 8, "int8"
    groups = inner.group("config_groups")
    named: str | None = None
    if groups is not None:
        for group in list(groups.config):
            part = groups.group(group)
            weights = part.group("weights") if part is not None else None
            if weights is None or bits is not None:
                continue
            bits, named = weights.whole("num_bits"), str(weights.get("type") or "int")
            weights.used.update(weights.config)
        groups.used.update(groups.config)
        for part in groups.inner:
            part.used.update(part.config)
    words = str(algorithm or method or "").lower()
    held = kind or next((ours for word, ours in _HELD.items() if word in words), None)
    if held == "gptq" and bits == 8:
        held = "int8"
    if held is None and named is not None and bits is not None:
        held = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "w4a16", ("float", 4): "nvfp4"}.get(
            (named, bits)
        )
        spared = inner.config.get("ignore")
        if held == "w4a16" and isinstance(spared, list) and any("attn" in str(name) for name in spared):
            held = "int4 experts"
    inner.used.update(
        ("ignore", "producer", "kv_cache_scheme", "activation_scheme", "fmt", "scale_fmt", "format", "sym",
         "weight_block_size", "modules_to_not_convert", "group_size", "zero_point", "version", "desc_act")
    )  # fmt: skip
    text = " ".join(str(part) for part in (method, f"{bits}-bit" if bits else None) if part)
    return text or "stated, method unknown", held
