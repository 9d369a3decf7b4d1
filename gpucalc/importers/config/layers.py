"""Which layer is what: full, sliding, linear, state-space, experts; and how far a window reaches."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader

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


def pattern_of(c: Reader, key: str, layers: int) -> tuple[str | None, int | None]:
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


def _letter(c: Reader, key: str, kind: Any) -> str:
    if kind == "linear_attention":
        return "M" if key in ("nemotron_h", "bamba", "jamba") else "L"
    letter = _LAYER_TYPES.get(kind) if isinstance(kind, str) else None
    if letter is None:
        raise UnsupportedModel("unknown layer type", where=c.where, key=c.prefix + "layer_types", given=kind)
    return letter
