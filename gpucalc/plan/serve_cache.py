"""The cache of a pipeline stage: what a token and a request cost in it, and how engines cut it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Attention, StateMixer
from gpucalc.line import Line, compute, total
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.plan.stages import Stage
from gpucalc.spec.engine import EngineEra

PAGE_STEP = 16  # attention blocks grow in steps of this where state pages are larger
CLOSE_SIZES = 1.25  # groups this close in size are padded to the larger
# Keys of a sparse index are kept in 8 bits with an fp32 scale for each 128, whatever the cache's own type:
# vllm-project/vllm 0.19.0 model_executor/models/deepseek_v2.py (DeepseekV32IndexerCache), sgl-project/sglang
# 0.5.6 srt/model_executor/model_runner.py (indexer_size_per_token).
INDEX_BYTES = 1 + 4 / 128
EIGHT_BIT_INDEX = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The layers of a stage whose cache works alike. token, fixed: bytes of one layer."""

    name: str  # full | sliding | chunked | compressed | state
    layers: int
    token: Line  # per token of context, 0 for states
    fixed: Line  # per request whatever its length: states, windows of compressed layers
    window: int | None = None

    def request(self, tokens: int) -> float:
        """Bytes all these layers hold for a request, windows applied, pages not rounded."""
        grown = min(tokens, self.window) if self.window is not None else tokens
        return self.layers * (grown * float(self.token.value) + float(self.fixed.value))


def cache_kinds(stage: Stage, layout: ServeLayout, recipe: ServeRecipe, engine: EngineEra) -> list[CacheKind]:
    """What the stage's layers keep, by kind."""
    found: dict[tuple[str, int | None, float, float], CacheKind] = {}
    windows = engine.hybrid_groups is not None
    mixers = [
        (run, mixer)
        for run in stage.layers
        for mixer in (run.block.mixer, run.block.state)
        if run.in_trunk and mixer is not None
    ]
    for run, mixer in mixers:
        if isinstance(mixer, StateMixer):
            kind = _state(mixer, run.count, layout, recipe, engine)
        else:
            kind = _attention(mixer, run.count, layout, recipe, windows=windows)
        key = (kind.name, kind.window, float(kind.token.value), float(kind.fixed.value))
        known = found.get(key)
        if known is not None:
            layers = known.layers + kind.layers
            kind = CacheKind(kind.name, layers, kind.token, kind.fixed, kind.window)
        found[key] = kind
    return list(found.values())


def joined(kinds: list[CacheKind], draft: list[CacheKind], *, blocks: bool) -> list[CacheKind]:
    """A stage's kinds with those of the model that drafts.

    blocks: its keys and values lie in the blocks of the model's layers that see everything; its own windows
    save nothing there.
    """
    own = next((index for index, kind in enumerate(kinds) if kind.name == "full"), None)
    if not draft or own is None or not blocks:
        return [*kinds, *draft]
    kind = kinds[own]
    token = compute(
        "per_token",
        mem.joined_token_bytes,
        own_bytes=kind.token,
        draft_bytes=sum(one.layers * float(one.token.value) for one in draft),
        layers=kind.layers,
    )
    return [*kinds[:own], replace(kind, token=token), *kinds[own + 1 :]]


_NOTHING = Line("per_request", 0, "bytes", source="all of it grows with the context")
_NO_GROWTH = Line("per_token", 0, "bytes", source="nothing grows with the context")


def _attention(
    mixer: Attention, layers: int, layout: ServeLayout, recipe: ServeRecipe, *, windows: bool
) -> CacheKind:
    each = recipe.kv_bytes
    if mixer.kv_lora is not None:
        token = compute(
            "per_token",
            mem.latent_token_bytes,
            layers=1,
            latent=mixer.kv_lora,
            rope_width=mixer.rope_dim or 0,
            element_bytes=each,
        )
        if mixer.index_dim:
            keys = compute(
                "index_keys",
                mem.index_token_bytes,
                layers=1,
                index_width=mixer.index_dim,
                element_bytes=INDEX_BYTES if recipe.engine in EIGHT_BIT_INDEX else each,
            )
            token = total("per_token", (token, keys), unit="bytes")
        return CacheKind("full", layers, token, _NOTHING)
    if mixer.shared_kv and mixer.q_lora is not None:
        return _compressed(mixer, layers, each)
    token = compute(
        "per_token",
        mem.kv_token_bytes,
        layers=1,
        kv_heads=mixer.kv_heads,
        tp=layout.tp,
        key_width=mixer.qk_dim,
        value_width=mixer.v_dim,
        element_bytes=each,
    )
    if windows and mixer.kind in ("sliding", "chunked") and mixer.span is not None:
        return CacheKind(mixer.kind, layers, token, _NOTHING, mixer.span)
    return CacheKind("full", layers, token, _NOTHING)


def _compressed(mixer: Attention, layers: int, each: float) -> CacheKind:
    """One shared vector a token in a window, and one a group of tokens beyond it."""
    entry = compute(
        "per_window_token",
        mem.compressed_token_bytes,
        layers=1,
        entry_width=mixer.qk_dim,
        index_width=0,
        ratio=1,
        element_bytes=each,
    )
    fixed = compute("window", mem.window_request_bytes, token_bytes=entry, window=mixer.span or 0)
    token = _NO_GROWTH
    if mixer.compress_ratio is not None:
        token = compute(
            "per_token",
            mem.compressed_token_bytes,
            layers=1,
            entry_width=mixer.qk_dim,
            index_width=mixer.index_dim or 0,
            ratio=mixer.compress_ratio,
            element_bytes=each,
        )
    return CacheKind("compressed", layers, token, fixed)


def _state(
    mixer: StateMixer, layers: int, layout: ServeLayout, recipe: ServeRecipe, engine: EngineEra
) -> CacheKind:
    state = compute(
        "per_request",
        mem.recurrent_state_bytes,
        layers=1,
        heads=mixer.heads,
        key_width=mixer.key_dim,
        value_width=mixer.value_dim,
        state_bytes=engine.line("state_element_bytes"),
        conv_width=mixer.conv_width,
        conv_steps=mixer.conv,
        element_bytes=min(recipe.dtype_bytes, 4),
        tp=layout.tp,
    )
    return CacheKind("state", layers, _NO_GROWTH, state)


@dataclass(frozen=True, slots=True)
class Paging:
    """How a pool is cut: groups of layers share blocks of equal size, each block one group's tokens."""

    slots: int  # layers a group has room for
    groups: int
    page: float  # bytes of one layer's page
    block_tokens: dict[int, int]  # per kind, by index in the list: tokens a block of it holds
    counts: dict[int, int]  # per kind: groups


def paging(kinds: list[CacheKind], block_size: int) -> Paging:
    """vLLM's groups: as many slots as the rarest kind has layers; pages of one size."""
    if not kinds:
        return Paging(0, 1, 0.0, {}, {})
    sizes = [kind.layers for kind in kinds]
    slots = max(sizes) if max(sizes) < CLOSE_SIZES * min(sizes) else min(sizes)
    tokens = [float(kind.token.value) for kind in kinds]
    widest = max(tokens)
    page = widest * block_size
    state = max((float(kind.fixed.value) for kind in kinds if kind.name == "state"), default=0.0)
    if state > page and widest:
        steps = -(-state // (widest * PAGE_STEP))
        page = steps * PAGE_STEP * widest
    elif state:
        page = max(page, state)
    blocks = {
        index: int(page // each) // PAGE_STEP * PAGE_STEP or block_size if each else 0
        for index, each in enumerate(tokens)
    }
    if state <= widest * block_size:
        blocks = {
            index: int(block_size * (widest // each)) if each else 0 for index, each in enumerate(tokens)
        }
    counts = {index: -(-kind.layers // slots) for index, kind in enumerate(kinds)}
    return Paging(slots, sum(counts.values()), page, blocks, counts)


def request_blocks(kinds: list[CacheKind], cut: Paging, recipe: ServeRecipe) -> int:
    """Blocks one request of the longest context holds, over all groups."""
    held = 0
    for index, kind in enumerate(kinds):
        size = cut.block_tokens[index]
        if kind.name == "state":
            each = 1
        elif kind.name == "sliding":
            each = mem.sliding_request_blocks(
                tokens=recipe.max_model_len,
                window=kind.window,
                batched_tokens=recipe.max_num_batched_tokens,
                block_size=size,
            )
        elif kind.name == "chunked":
            each = mem.chunked_request_blocks(
                tokens=recipe.max_model_len,
                window=kind.window,
                batched_tokens=recipe.max_num_batched_tokens,
                block_size=size,
            )
        else:
            each = mem.full_request_blocks(tokens=recipe.max_model_len, block_size=size)
        held += cut.counts[index] * each
    return held


def growing(kinds: list[CacheKind]) -> Line:
    """Bytes a token adds to a long request on one GPU: layers without a window."""
    parts = tuple(
        compute(
            f"{kind.name}_layers",
            mem.repeated_layer_bytes,
            layers=kind.layers,
            layer_bytes=kind.token,
        )
        for kind in kinds
        if kind.window is None and kind.token.value
    )
    return total("kv_bytes_per_token", parts, unit="bytes")


def standing(kinds: list[CacheKind]) -> Line:
    """Bytes of a request that do not grow with it: states, and windows once they are full."""
    parts: list[Line] = []
    for kind in kinds:
        layer = kind.fixed
        if kind.window is not None:
            layer = compute("window", mem.window_request_bytes, token_bytes=kind.token, window=kind.window)
        if layer.value:
            parts.append(
                compute(
                    f"{kind.name}_layers", mem.repeated_layer_bytes, layers=kind.layers, layer_bytes=layer
                )
            )
    return total("state_bytes", tuple(parts), unit="bytes")


def windowed(kinds: list[CacheKind]) -> float:
    """Bytes per token of the layers that have a window."""
    return sum(kind.layers * float(kind.token.value) for kind in kinds if kind.window is not None)
