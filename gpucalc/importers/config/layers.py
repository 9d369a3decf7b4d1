"""Which layer is what: full, sliding, linear, state-space, experts; and how far a window reaches."""

from __future__ import annotations

from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader

_LAYER_TYPES = {
    "full_attention": "F",
    "attention": "F",
    "global": "F",
    "*": "F",
    "sliding_attention": "S",
    "local": "S",
    "chunked_attention": "K",
    "indexed_attention": "D",
    "deepseek_sparse_attention": "D",
    "compressed_sparse_attention": "C",
    "heavily_compressed_attention": "H",
    "mamba": "M",
    "hybrid": "B",  # attention and a state space in one layer
    "M": "M",
    "conv": "L",
    "moe": "E",
    "E": "E",
    "mlp": "-",
    "-": "-",
}
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attention_layers")
_WINDOWS = (
    "sliding_window", "attention_chunk_size", "local_attention", "window_size", "attention_window_size",
)  # fmt: skip
_MAMBA = frozenset({"nemotron_h", "bamba", "jamba", "granitemoehybrid", "zamba", "zamba2"})
# DeepSeek-V4: tokens a layer compresses into one entry, and what such a layer is called.
_COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
# Families whose every n-th layer is full and the rest slide, where the file does not say: n, and which.
_EVERY = {"gemma3": (6, -1), "gemma2": (2, -1), "vaultgemma": (2, -1), "modernbert": (3, 0)}


def pattern_of(c: Reader, key: str, layers: int) -> tuple[str | None, int | None]:
    """A letter for every layer, None where all are full; and the window of those that have one."""
    window = _window(c)
    kinds = _stated(c, key, layers)
    if kinds is not None:
        letters: list[str] | None = [_letter(c, key, kind) for kind in kinds]
    else:
        letters, window = _implied(c, key, layers, window)
    _tick(c)
    if letters is None:
        return None, None
    letters = _indexers(c, letters)
    if kinds is not None and window is None and any(letter in "SK" for letter in letters):
        if not any(name in c.config for name in _WINDOWS):
            raise InputError("missing, beside sliding layers", where=c.where, key=c.prefix + _WINDOWS[0])
        letters = ["F" if letter in "SK" else letter for letter in letters]
    if len(letters) != layers:
        raise InputError(
            f"{len(letters)} layer types for {layers} layers", where=c.where, key=c.prefix + "layer_types"
        )
    needs = any(letter in "SKCH" for letter in letters)
    return "".join(letters), window if needs else None


def _window(c: Reader) -> int | None:
    window = c.get(*_WINDOWS)
    if c.get("use_sliding_window") is False or not isinstance(window, int) or window <= 0:
        return None
    return window


def _stated(c: Reader, key: str, layers: int) -> list[Any] | None:
    """What the file calls each layer."""
    kinds = c.listing(*_LISTS) or None
    if kinds is None and key == "mimo_v2_flash":
        marks = c.listing("hybrid_layer_pattern")
        kinds = ["sliding_attention" if mark else "full_attention" for mark in marks] or None
    if kinds is None and key == "deepseek_v4":
        ratios = c.listing("compress_ratios")[:layers]
        kinds = [_COMPRESSED.get(ratio) if isinstance(ratio, int) else None for ratio in ratios] or None
        if kinds is None:  # which layers compress, and how far, is the architecture
            raise InputError("missing (or layer_types)", where=c.where, key=c.prefix + "compress_ratios")
    if kinds is None and key == "minimax":
        marks = c.listing("attn_type_list")
        kinds = ["full_attention" if mark else "linear_attention" for mark in marks] or None
    inner = c.group("linear_attn_config") if kinds is None and key == "kimi_linear" else None
    if inner is not None:  # layers are counted from one
        full = inner.listing("full_attn_layers")
        inner.get("kda_layers")
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(layers)]
    if kinds is None and key == "recurrent_gemma":
        names = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        cycle = [names.get(kind) if isinstance(kind, str) else None for kind in c.listing("block_types")]
        kinds = [cycle[i % len(cycle)] for i in range(layers)] if cycle else None
    if kinds is None and key == "gpt_neo":
        kinds = _written_out(c, layers)
    return kinds


def _written_out(c: Reader, layers: int) -> list[Any] | None:
    """GPT-Neo: [[["global", "local"], 12]] is that pair twelve times."""
    found: list[Any] = []
    for entry in c.listing("attention_types"):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)):
            raise InputError("is no list of kinds and repeats", where=c.where, key="attention_types")
        if type(entry[1]) is not int or not 0 < entry[1] <= layers:
            raise InputError("repeats more layers than there are", where=c.where, key="attention_types")
        found += entry[0] * entry[1]
    return found or None


def _implied(c: Reader, key: str, layers: int, window: int | None) -> tuple[list[str] | None, int | None]:
    """Layers of a file that does not list them: its family's rule, said where it is one."""

    def each(step: int, at: int, one: str, rest: str) -> list[str]:
        return [one if i % step == at % step else rest for i in range(layers)]

    start = c.whole("max_window_layers")
    if key == "jamba":
        period, offset = c.need("attn_layer_period"), c.need("attn_layer_offset")
        return each(max(period, 1), offset, "F", "M"), window
    if key == "bamba":
        indices = c.listing("attn_layer_indices")
        return ["F" if i in indices else "M" for i in range(layers)], window
    if key in ("qwen3_next", "qwen3_5"):
        return each(max(c.whole("full_attention_interval") or 4, 1), -1, "F", "L"), window
    if key == "rwkv":
        return ["L"] * layers, None
    if key == "falcon_h1":
        return ["B"] * layers, None
    if key == "zamba" and "attn_layer_period" in c.config:
        period, offset = c.need("attn_layer_period"), c.need("attn_layer_offset")
        return ["M", "M", "B", *each(max(period, 1), offset, "B", "M")[: layers - 3]], None
    if key in ("lfm2", "lfm2_moe"):
        full = c.listing("full_attn_idxs")
        if not full:
            raise InputError("missing (or layer_types)", where=c.where, key=c.prefix + "full_attn_idxs")
        return ["F" if i in full else "L" for i in range(layers)], window
    if key in ("minimax", "mimo_v2_flash", "kimi_linear", "granitemoehybrid", "recurrent_gemma", "gpt_neo",
               "olmo_hybrid", "zamba", "zamba2"):  # fmt: skip
        raise InputError("missing: what each layer is", where=c.where, key=c.prefix + "layer_types")
    if key in ("deepseek_v32", "glm_moe_dsa"):
        return ["D"] * layers, window
    if key == "llama4":
        window = window or 8192
        c.assumed.append("layer types not stated: every 4th layer full, chunks of 8192 elsewhere")
        return each(4, -1, "F", "K"), window
    if window is None:
        return None, None
    if key in _EVERY or key in ("cohere2", "cohere2_moe", "olmo3", "exaone4", "exaone_moe", "afmoe", "cwm"):
        return _sliding(c, key, layers), window
    if key == "gpt_oss":
        c.assumed.append("layer types not stated: sliding and full layers alternate")
        return each(2, 0, "S", "F"), window
    if c.config.get("use_sliding_window") and start is not None:  # Qwen's first layers keep full attention
        return ["F" if i < start else "S" for i in range(layers)], window
    return ["S"] * layers, window


def _sliding(c: Reader, key: str, layers: int) -> list[str]:
    """Every n-th layer full: n is stated, or the family's and said."""
    name = next(
        (name for name in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
         if c.config.get(name) is not None), None,
    )  # fmt: skip
    if name is not None and isinstance(c.config[name], str):  # LLLG: local and global in turn
        turn = ["F" if letter == "G" else "S" for letter in c.get(name)]
        return [turn[i % len(turn)] for i in range(layers)] if turn else []
    step, at = _EVERY.get(key, (4, 0 if key == "cwm" else -1))
    stated = c.whole(name) if name is not None else None
    if stated is None:
        c.assumed.append(f"layer types not stated: every {step}th layer full, the {key} pattern")
    elif stated < 1:
        raise InputError("is no number of layers", where=c.where, key=f"{c.prefix}{name}", given=stated)
    step = stated or step
    return ["F" if i % step == at % step else "S" for i in range(layers)]


def _indexers(c: Reader, letters: list[str]) -> list[str]:
    """Which layers with an indexer have one of their own and which share the one before."""
    shares = c.listing("indexer_types")
    freq, first = c.whole("index_topk_freq"), c.whole("index_skip_topk_offset")
    if shares:
        return ["D" if share == "full" else "F" for share in shares]
    if freq and freq > 1 and "D" in letters:
        start = 2 if first is None else first
        return ["D" if max(i - start + 1, 0) % freq == 0 else "F" for i in range(len(letters))]
    return letters


def _tick(c: Reader) -> None:
    """Other ways of saying what has been read."""
    c.get(
        "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "attention_types",
        "global_attn_every_n_layers", "full_attention_interval", "full_attn_idxs", "attn_layer_indices",
        "attn_layer_period", "attn_layer_offset", "block_types", "layers_block_type", "attention_layers",
    )  # fmt: skip


def _letter(c: Reader, key: str, kind: Any) -> str:
    if kind == "linear_attention":
        return "M" if key in _MAMBA else "L"
    letter = _LAYER_TYPES.get(kind) if isinstance(kind, str) else None
    if letter is None:
        raise UnsupportedModel("unknown layer type", where=c.where, key=c.prefix + "layer_types", given=kind)
    return letter
