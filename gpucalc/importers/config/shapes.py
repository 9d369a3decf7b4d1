"""The shapes every model has: widths, heads, vocabulary, positions, ties, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES
from gpucalc.importers.config.audio import audio_of
from gpucalc.importers.config.biases import biases
from gpucalc.importers.config.experts import experts_of
from gpucalc.importers.config.images import totals_of
from gpucalc.importers.config.layers import pattern_of
from gpucalc.importers.config.mixers import state_of
from gpucalc.importers.config.needed import check_needed
from gpucalc.importers.config.quantization import quantization
from gpucalc.importers.config.reader import TEXT_KEYS, Reader
from gpucalc.importers.config.tops import decoder_top, tops, two_stack_top
from gpucalc.importers.config.towers import contrastive, tower_of

# Families whose feed-forward part is 4 x hidden where its width is not stated.
_FOUR_TIMES = frozenset({"gpt2", "gptj", "codegen", "gpt_neo", "bloom", "gpt_bigcode", "rwkv"})
# Families whose class never ties its tables, whatever the file says.
_NEVER_TIED = frozenset({"kimi_linear", "nemotron_h"})
MAX_LAYERS = 10_000


ACTIVATIONS = {
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
    "xielu": "gelu_new",  # a learned curve in as many steps
}


def fields_of(top: Reader, key: str, tower: str | None = None) -> dict[str, Any]:
    """The fields of a model description; `tower` names a vision tower that its family does not have."""
    form = FAMILIES[key].form
    if form == "clip":
        return contrastive(top)
    if form == "totals":
        return totals_of(top, key)
    text = top.group(*TEXT_KEYS) or top
    check_needed(text, key)
    fields = _shape(text, key)
    tie = top.get("tie_word_embeddings")
    if tie is None and text is not top:
        tie = text.get("tie_word_embeddings")
    elif text is not top:
        text.used.add("tie_word_embeddings")
    if tie is None and FAMILIES[key].head == "lm":
        tie = FAMILIES[key].tied_embeddings
        top.assumed.append(f"tie_word_embeddings not stated: {str(tie).lower()}, the {key} default")
    if tie is True and key in _NEVER_TIED:
        raise UnsupportedModel(
            f"{key} models do not tie their tables", where=top.where, key="tie_word_embeddings"
        )
    if tie is False and key in ("zamba", "zamba2"):  # the library then ties no blocks either
        raise UnsupportedModel(
            f"{key} models share tables as they share blocks", where=top.where, key="tie_word_embeddings"
        )
    fields["tied_embeddings"] = tie
    stored = top.get("torch_dtype", "dtype") or text.get("torch_dtype", "dtype")
    if isinstance(stored, str):
        fields["native_dtype"] = stored.removeprefix("torch.")
    fields["quantization"], held = quantization(top)
    if held is None and text is not top:
        fields["quantization"], held = quantization(text)
    fields["native_dtype"] = held or fields.get("native_dtype")
    if form == "decoder":
        _decoder(text, key, fields)
        sight = top.group("vision_config")
        if sight is not None:
            kind = tower or FAMILIES[key].vision
            if not kind:
                raise UnsupportedModel(
                    f"the vision tower of {key} models has no drawing",
                    where=top.where,
                    key="vision_config",
                )
            fields["vision_tower"] = tower_of(sight, top, kind)
            if tower:
                fields["vision_tower"]["kind"] = tower
    elif form == "vit":
        fields["patch"] = top.need("patch_size")
        fields["image_size"] = top.need("image_size")
    plain = fields.get("moe") is None and fields.get("ssm") is None
    if fields["ffn"] is None and plain and FAMILIES[key].ffn_ratio is None:
        text.need("intermediate_size", "ffn_dim", "d_ff")
    if form in ("bert", "vit"):
        tops(top, key, fields)
    elif form == "decoder":
        decoder_top(top, key, fields)
    elif form in ("t5", "bart", "whisper"):
        two_stack_top(top, fields)
    elif form == "wav2vec2":
        audio_of(top, key, fields)
    if form == "whisper":
        fields["mel_bins"] = top.need("num_mel_bins")
        fields["positions"] = top.need("max_target_positions")
        if top.whole("max_source_positions") not in (None, 1500):
            raise _other(top, "max_source_positions", "Whisper of other than 1500 frames")
    if form in ("bart", "whisper") and fields["decoder_layers"] is None:
        top.need("decoder_layers")
    if form in ("bert", "bart") and fields["tied_embeddings"] is False and key != "modernbert":
        raise _other(top, "tie_word_embeddings", f"{key} with tables of its own for input and output")
    if key == "marian" and top.whole("decoder_vocab_size") not in (None, fields["vocab"]):
        raise _other(top, "decoder_vocab_size", "Marian with two vocabularies")
    if key == "marian" and top.get("share_encoder_decoder_embeddings") is False:
        raise _other(top, "share_encoder_decoder_embeddings", "Marian with a table on each side")
    if form == "bart" and key in ("marian", "pegasus") and fields["positions"] is None:
        top.need("max_position_embeddings")
    return fields


def _other(c: Reader, key: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"no drawing of {what}", where=c.where, key=c.prefix + key)


def _shape(c: Reader, key: str) -> dict[str, Any]:
    form = FAMILIES[key].form
    hidden = c.need("hidden_size", "d_model", "n_embd", *(("dim",) if key == "distilbert" else ()))
    table = ("padded_vocab_size", "vocab_size") if key == "chatglm" else ("vocab_size",)
    listed = c.config.get("layers_block_type") or c.config.get("hybrid_override_pattern")
    layers = c.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
    if layers is None and isinstance(listed, list | str):
        layers = len(listed)  # hybrids list their layers instead of counting them
    fields: dict[str, Any] = {
        "hidden": hidden,
        "layers": c.need("num_hidden_layers", "n_layer", "num_layers") if layers is None else layers,
        "decoder_layers": c.whole("num_decoder_layers", "decoder_layers"),
        "heads": c.whole(
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "encoder_attention_heads",
        ),
        "head_dim": c.whole("head_dim", "d_kv", "attention_head_dim", "kv_channels"),
        "ffn": c.whole(
            "intermediate_size_mlp" if key == "llama4" else "intermediate_size",
            "n_inner",
            "ffn_dim",
            "d_ff",
            "ffn_hidden_size",
            "encoder_ffn_dim",
            "hidden_dim",
        ),
        "decoder_ffn": c.whole("decoder_ffn_dim"),
        "max_context": c.whole(
            "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "model_max_length"
        ),
    }
    if form == "wav2vec2":
        fields["vocab"] = c.whole("vocab_size")
    elif form != "vit":
        fields["vocab"] = c.need(*table)
    if key in ("mamba", "mamba2", "falcon_mamba"):
        fields["heads"] = fields["head_dim"] = fields["ffn"] = None
    elif key == "rwkv":
        fields["heads"] = fields["head_dim"] = None
    elif fields["heads"] is None:
        c.need("num_attention_heads", "n_head", "num_heads")
    c.get("decoder_attention_heads")
    ratio = c.whole("expansion_ratio", "mlp_ratio")
    if fields["ffn"] is None and ratio is not None:
        fields["ffn"] = ratio * hidden
    if key in ("zamba", "zamba2"):
        fields["head_dim"] = c.whole("attention_head_dim")
    if fields["ffn"] is not None and key in ("recurrent_gemma", "qwen"):
        fields["ffn"] //= 2  # these count gate and value together
    if key == "lfm2":
        fields["ffn"] = _lfm2_width(c, fields["ffn"])
    if fields["ffn"] is None and key in _FOUR_TIMES:
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
        if act not in ACTIVATIONS:
            raise InputError("unknown activation", where=c.where, key=c.prefix + "hidden_act", given=act)
        if form != "t5" and key != "gpt_oss":
            fields["activation"] = ACTIVATIONS[act]
    if form == "t5":
        kind = c.get("feed_forward_proj") or "relu"
        fields["gated_mlp"] = str(kind).startswith("gated")
        fields["activation"] = "gelu_new" if "gelu" in str(kind) else "relu"
        gated = c.get("is_gated_act")
        if isinstance(gated, bool):
            fields["gated_mlp"] = gated
        if c.whole("relative_attention_num_buckets") not in (None, 32):
            raise _other(c, "relative_attention_num_buckets", "other than 32 buckets of positions")
        c.get("relative_attention_max_distance")
        if fields["decoder_layers"] is None:
            fields["decoder_layers"] = fields["layers"]
    if FAMILIES[key].position_kind == "learned" and form in ("decoder", "bert", "bart"):
        fields["positions"] = fields["max_context"]
    fields["kv_heads"] = _kv_heads(c, key, fields["heads"])
    return fields


def _kv_heads(c: Reader, key: str, heads: int | None) -> int | None:
    if heads is None:
        return None
    if key == "falcon":
        kv = c.whole("num_kv_heads", "n_head_kv")
        many, new = c.get("multi_query"), c.get("new_decoder_architecture")
        return (kv or heads) if new else (1 if many else heads)
    if key == "gpt_bigcode":
        return 1 if c.get("multi_query") else heads
    if key == "chatglm":
        groups = c.whole("multi_query_group_num")
        return groups or heads if c.get("multi_query_attention") else heads
    inner = c.group("attn_config") if key == "dbrx" else None
    if inner is not None:
        c.get("num_key_value_heads")
        return inner.need("kv_n_heads")
    kv = c.whole("num_key_value_heads")
    return heads if kv is None else kv  # null or absent means one per head in transformers too


def _lfm2_width(c: Reader, ffn: int | None) -> int | None:
    """LFM2 narrows the stated width to two thirds, in whole blocks, unless told otherwise."""
    scale, block = c.get("block_ffn_dim_multiplier"), c.whole("block_multiple_of")
    if ffn is None or not c.get("block_auto_adjust_ff_dim"):
        return ffn
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not block or block < 1:
        key = c.prefix + "block_multiple_of"
        raise InputError("missing, beside block_auto_adjust_ff_dim", where=c.where, key=key)
    return -(-int(scale * int(2 * ffn / 3)) // block) * block


def _decoder(c: Reader, key: str, fields: dict[str, Any]) -> None:
    layers = fields["layers"]
    fields["embedding_width"] = c.whole("word_embed_proj_dim")
    c.get("attn_logit_softcapping")  # the family says whether scores are capped
    fields["moe"] = experts_of(c, key)
    biases(c, key, fields)
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
    state_of(c, key, fields)
    if layers > MAX_LAYERS:
        raise InputError("more layers than any model has", where=c.where, key=c.prefix + "num_hidden_layers")
    fields["pattern"], fields["window"] = pattern_of(c, key, layers)
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
        gemma4(c, fields)


def gemma4(c: Reader, fields: dict[str, Any]) -> None:
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
