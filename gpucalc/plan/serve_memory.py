"""Memory of one GPU of a deployment, as its engine divides the card, and what the cache then holds.

Engines that make a pool (vLLM, SGLang, TensorRT-LLM) take what their budget leaves; llama.cpp and
Transformers allocate for the requests at hand. The stage of a pipeline that holds least decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Attention, Graph, Mlp, Moe
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.serve_cache import (
    cache_kinds,
    growing,
    paging,
    request_blocks,
    standing,
    windowed,
)
from gpucalc.plan.serve_weights import routed, stage_weights
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingMemory
from gpucalc.plan.stages import Stage, stages
from gpucalc.spec.engine import EngineEra
from gpucalc.spec.hardware import Cluster
from gpucalc.units import GIB

POOLED = ("vllm", "sglang", "trtllm")
# Expected error of what a start needs, by part: published start-up logs of vLLM.
WEIGHTS_ERROR = 0.01
SET_ASIDE_ERROR = 0.15
ERROR_BASIS = "1 % of the weights, 15 % of what the engine sets aside: published start-up logs"
SWA_PAD = 256  # llama.cpp rounds sliding caches up to this many tokens


@dataclass(frozen=True, slots=True)
class Logged:
    """What a start-up log states, in bytes, taken in place of what would be worked out."""

    total: float | None = None
    weights: float | None = None
    activation_peak: float | None = None
    non_torch: float | None = None
    graphs: float | None = None
    pool: float | None = None  # of keys and values, as printed
    pre_existing: float | None = None


NOTHING_LOGGED = Logged()


def serving_memory(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineEra,
    cluster: Cluster,
    *,
    logged: Logged = NOTHING_LOGGED,
    stage_index: int | None = None,
) -> ServingMemory:
    """The memory of the GPU that decides, and the cache it leaves; of one stage where its index is given."""
    parts = stages(graph, pp=layout.pp, vpp=1)
    if stage_index is not None:
        parts = (parts[stage_index],)
    alike: dict[tuple[object, ...], Stage] = {}
    for stage in parts:
        held = tuple((id(run.block), run.count) for run in stage.layers)
        alike.setdefault((held, stage.first, stage.last), stage)
    found = [
        _Stage(graph, stage, layout, recipe, engine, cluster, logged).memory() for stage in alike.values()
    ]
    # The pool is as small as its smallest rank; between equals the one nearer its limit decides.
    return min(found, key=lambda m: (m.refusal is None, m.kv_tokens.value, m.capacity.value - m.needed.value))


class _Stage:
    """One stage on one GPU."""

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        layout: ServeLayout,
        recipe: ServeRecipe,
        engine: EngineEra,
        cluster: Cluster,
        logged: Logged,
    ) -> None:
        self.graph, self.stage, self.layout, self.recipe = graph, stage, layout, recipe
        self.engine, self.cluster, self.logged = engine, cluster, logged
        self.kinds = cache_kinds(stage, layout, recipe, engine)
        self.total = _given("gpu_memory", logged.total) or min(
            (pool.gpu.usable_memory() for pool in cluster.pools), key=lambda line: line.value
        )
        self.weights = _given("weights", logged.weights) or stage_weights(
            graph, stage, layout, recipe, engine
        )
        self.vocab = graph.head.vocab if graph.head is not None else 0
        self.hidden = graph.trunk.hidden

    def memory(self) -> ServingMemory:
        """The stage's answer."""
        return self._pooled() if self.recipe.engine in POOLED else self._static()

    # -- parts ------------------------------------------------------------------------------------

    def activation_peak(self) -> Line:
        """The larger of the two regimes, with what stays allocated through both."""
        given = _given("activation_peak", self.logged.activation_peak)
        if given is not None:
            return given
        recipe, engine = self.recipe, self.engine
        tokens = recipe.max_num_batched_tokens
        if engine.number("profiles_longest_prompt", 0) and recipe.max_model_len <= engine.number(
            "longest_profiled_prompt", math.inf
        ):
            tokens = max(tokens, recipe.max_model_len)
        regimes = [self._forward(tokens)]
        if self.stage.last and self.vocab and engine.sampler_bytes_per_logit is not None:
            regimes.append(
                compute(
                    "sampler",
                    mem.sampler_peak_bytes,
                    sequences=min(recipe.max_num_seqs, tokens),
                    vocab=self.vocab,
                    bytes_per_logit=engine.line("sampler_bytes_per_logit"),
                    tokens=tokens,
                    hidden=self.hidden,
                    element_bytes=recipe.dtype_bytes,
                    stream_copies=engine.line("sampler_stream_copies"),
                )
            )
        top = max(regimes, key=lambda line: line.value)
        kept = [top, *self._kept(tokens)]
        note = f"the {top.name} decides" + "".join(
            f"; {line.name} {line.value / GIB:.2f} GiB" for line in regimes if line is not top
        )
        return total("activation_peak", tuple(kept), unit="bytes", kind=Kind.MODELLED, note=note)

    def _forward(self, tokens: int) -> Line:
        return compute(
            "forward",
            mem.forward_peak_bytes,
            tokens=tokens,
            widest=self._widest(),
            tp=self.layout.tp,
            hidden=self.hidden,
            element_bytes=self.recipe.dtype_bytes,
            stream_copies=self.engine.line("forward_stream_copies"),
        )

    def _kept(self, tokens: int) -> list[Line]:
        """Buffers that stay: workspaces of fused experts, embeddings of images."""
        kept: list[Line] = []
        moe = routed(self.stage)
        if (
            moe is not None
            and self.engine.number("moe_workspaces", 0)
            and self.recipe.weights.name != "mxfp4"
        ):
            kept.append(
                compute(
                    "expert_workspaces",
                    mem.expert_workspace_bytes,
                    tokens=tokens,
                    top_k=moe.top_k,
                    expert_width=moe.expert_ffn,
                    hidden=moe.latent or moe.hidden,
                    ranks=self.layout.tp if self.layout.ep == 1 else 1,
                    element_bytes=self.recipe.dtype_bytes,
                )
            )
        sees = any(stack.role == "vision" for stack in self.graph.stacks if stack is not self.graph.trunk)
        if sees and self.stage.first and self.engine.encoder_cache_copies is not None:
            kept.append(
                compute(
                    "encoder_cache",
                    mem.encoder_cache_bytes,
                    tokens=tokens,
                    hidden=self.hidden,
                    element_bytes=self.recipe.dtype_bytes,
                    copies=self.engine.line("encoder_cache_copies"),
                )
            )
        return kept

    def _widest(self) -> int:
        """The widest dense feed-forward part a token passes; shared experts count as one."""
        widths = [0]
        for run in self.stage.layers:
            for part in (run.block.ffn, run.block.beside):
                if not run.in_trunk:
                    continue
                if isinstance(part, Mlp):
                    widths.append(part.ffn)
                elif isinstance(part, Moe):
                    widths.append(part.shared_ffn)
        return max(widths)

    def non_torch(self) -> Line:
        """Communicators, context growth and kernels outside the tensors."""
        given = _given("non_torch", self.logged.non_torch)
        if given is not None:
            return given
        return self._of_ranks("non_torch")

    def pre_existing(self) -> Line:
        """In use before the engine measures what is free."""
        return _given("pre_existing", self.logged.pre_existing) or self._of_ranks("pre_existing")

    def _of_ranks(self, name: str) -> Line:
        """The engine's figure for as many ranks, that for ranks without NVLink where there is one."""
        apart = self.cluster.nvlink_domain <= 1 and self.layout.tp > 1
        found = self.engine.of_ranks(f"{name}_pcie", self.layout.tp) if apart else None
        found = found or self.engine.of_ranks(name, self.layout.tp)
        return replace(found, name=name) if found is not None else _nothing(name)

    def graphs(self) -> Line:
        """Captured CUDA graphs."""
        given = _given("graphs", self.logged.graphs)
        if given is not None:
            return given
        if self.recipe.enforce_eager or self.engine.graph_base is None:
            return _nothing("graphs")
        experts = "graph_mxfp4" if self.recipe.weights.name == "mxfp4" else "graph_moe"
        routes = routed(self.stage) is not None and getattr(self.engine, experts) is not None
        seen = self.engine.graph_sizes
        return compute(
            "graphs",
            mem.graph_pool_bytes,
            base_bytes=self.engine.line("graph_base"),
            per_layer_bytes=self.engine.line("graph_per_layer"),
            layers=sum(run.count for run in self.stage.layers if run.in_trunk),
            experts_bytes=self.engine.line(experts) if routes else 0,
            tp=self.layout.tp,
            sizes=capture_sizes(self.recipe.max_num_seqs) if seen is not None else 1,
            seen_sizes=self.engine.line("graph_sizes") if seen is not None else 1,
            kind=Kind.MODELLED,
        )

    def warmup(self) -> Line:
        """The sampler's dry run beside the whole cache."""
        if not self.engine.number("warmup_bytes_per_logit", 0) or not self.stage.last:
            return _nothing("sampler_warmup")
        return compute(
            "sampler_warmup",
            mem.sampler_warmup_bytes,
            sequences=min(self.recipe.max_num_seqs, self.recipe.max_num_batched_tokens),
            vocab=self.vocab,
            bytes_per_logit=self.engine.line("warmup_bytes_per_logit"),
            kind=Kind.MODELLED,
        )

    # -- engines that make a pool -------------------------------------------------------------------

    def _pooled(self) -> ServingMemory:
        recipe, engine = self.recipe, self.engine
        activation, non_torch, graphs = self.activation_peak(), self.non_torch(), self.graphs()
        before = self.pre_existing()
        subtracted = graphs if engine.number("graphs_subtracted", 0) else _nothing("graphs_not_subtracted")
        static: list[Line]  # what must fit in the budget beside the cache
        if recipe.engine == "vllm":
            budget = compute(
                "budget",
                mem.budget_bytes,
                total_bytes=self.total,
                fraction=_setting("gpu_memory_utilization", recipe.gpu_memory_utilization),
            )
            pool = compute(
                "pool",
                mem.vllm_pool_bytes,
                budget_bytes=budget,
                weights_bytes=self.weights,
                activation_peak_bytes=activation,
                non_torch_bytes=non_torch,
                graphs_bytes=subtracted,
            )
            static = [self.weights, activation, non_torch, *([graphs] if subtracted.value else [])]
        elif recipe.engine == "sglang":
            free = total("free_before", (self.total, _minus(before)), unit="bytes")
            fraction = _setting("mem_fraction_static", recipe.mem_fraction_static)
            budget = compute("budget", mem.budget_bytes, total_bytes=free, fraction=fraction)
            pool = compute(
                "pool",
                mem.sglang_pool_bytes,
                free_before_bytes=free,
                weights_bytes=self.weights,
                static_fraction=fraction,
            )
            static = [self.weights]
        else:
            used = (self.total, *map(_minus, (before, self.weights, activation, non_torch, graphs)))
            free = total("free_when_loaded", used, unit="bytes")
            fraction = _setting("free_gpu_memory_fraction", recipe.gpu_memory_utilization)
            pool = compute("pool", mem.trtllm_pool_bytes, free_bytes=free, fraction=fraction)
            budget = Line("budget", self.total.value, "bytes", self.total.kind, source=self.total.source)
            static = [self.weights, activation, non_torch, graphs, before]
        pool = _given("pool", self.logged.pool) or pool
        return self._with_pool(budget, pool, static, activation, non_torch, graphs, before)

    def _with_pool(
        self,
        budget: Line,
        pool: Line,
        static: list[Line],
        activation: Line,
        non_torch: Line,
        graphs: Line,
        before: Line,
    ) -> ServingMemory:
        recipe = self.recipe
        tokens, blocks, most = self._capacity(pool)
        request = self._request()
        needed = total("needed_to_start", (*static, request), unit="bytes", kind=Kind.MODELLED)
        held = max(float(pool.value), 0.0)
        cache = Line("kv_cache", held, "bytes", Kind.MODELLED, formula=pool.formula, inputs=pool.inputs)
        warmup = self.warmup()
        last = max((activation, warmup), key=lambda line: line.value)
        parts = (before, self.weights, non_torch, graphs, last, cache)
        tree = total(
            "memory",
            tuple(part for part in parts if part.value),
            unit="bytes",
            kind=Kind.MODELLED,
            note="everything allocated, the cache as large as the engine makes it",
        )
        aside = (activation, non_torch, *([graphs] if recipe.engine != "vllm" else []))
        uncertain = WEIGHTS_ERROR * self.weights.value + SET_ASIDE_ERROR * sum(
            line.value for line in aside if line in static
        )
        refusal = self._refusal(pool, request, most)
        binds = "kv_cache" if refusal else max((*static, request), key=lambda line: line.value).name
        whole = Line("gpu_memory", self.total.value, "bytes", self.total.kind, source=self.total.source)
        capacity, decided = budget, needed
        over = tree.value - whole.value
        swing = SET_ASIDE_ERROR * (graphs.value + warmup.value)
        if refusal is None and self._outgrows(needed, budget, uncertain, over, swing):
            capacity, decided, uncertain = whole, tree, swing
            binds = last.name if last is warmup else "graphs"
        return ServingMemory(
            tree=tree,
            weights=self.weights,
            budget=budget,
            pool=pool,
            kv_bytes_per_token=growing(self.kinds),
            state_bytes=standing(self.kinds),
            kv_tokens=tokens,
            kv_blocks=blocks,
            max_concurrency=most,
            peak=tree,
            needed=decided,
            capacity=capacity,
            binds=binds,
            uncertain_bytes=uncertain,
            stage=self.stage.index,
            refusal=refusal,
        )

    @staticmethod
    def _outgrows(needed: Line, budget: Line, uncertain: float, over: float, swing: float) -> bool:
        """Whether running out of the whole card is likelier than being refused within the budget."""
        if over + swing <= 0:
            return False
        return (over, swing) > (needed.value - budget.value, uncertain)

    def _refusal(self, pool: Line, request: Line, most: Line) -> str | None:
        if pool.value <= 0:
            return (
                f"no memory is left for the cache: {pool.value / GIB:.2f} GiB;"
                f" raise {self._knob()} or divide the model further"
            )
        if most.value < 1 and self.recipe.engine == "vllm":
            longest = int(self.recipe.max_model_len * pool.value / request.value) if request.value else 0
            return (
                f"one request of max_model_len {self.recipe.max_model_len} needs"
                f" {request.value / GIB:.2f} GiB of cache, {pool.value / GIB:.2f} GiB are there;"
                f" about {longest} tokens would fit"
            )
        return None

    def _knob(self) -> str:
        return {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}.get(
            self.recipe.engine, "the card's memory"
        )

    def _request(self) -> Line:
        """Cache of one request of the longest context, as the pool would hold it."""
        recipe = self.recipe
        if recipe.engine == "vllm" and not self._by_bytes():
            cut = paging(self.kinds, recipe.block_size)
            block = compute("block", mem.cache_block_bytes, slots=cut.slots, page_bytes=cut.page)
            count = request_blocks(self.kinds, cut, recipe)
            return compute("one_request", mem.repeated_layer_bytes, layers=count, layer_bytes=block)
        longest = (
            recipe.max_model_len if recipe.engine == "vllm" else min(recipe.context, recipe.max_model_len)
        )
        return compute(
            "one_request",
            mem.request_bytes,
            tokens=longest,
            token_bytes=growing(self.kinds),
            fixed_bytes=standing(self.kinds),
        )

    def _by_bytes(self) -> bool:
        """Caches whose entries stand for several tokens are counted in bytes, not in blocks."""
        return any(kind.name == "compressed" for kind in self.kinds)

    def _capacity(self, pool: Line) -> tuple[Line, Line, Line]:
        """Tokens, blocks and requests of the longest context the pool holds."""
        recipe, dcp = self.recipe, self.layout.decode_context
        length = recipe.max_model_len
        if self._by_bytes() or recipe.engine == "sglang":
            return self._in_bytes(pool)
        cut = paging(self.kinds, recipe.block_size)
        block = compute("block", mem.cache_block_bytes, slots=cut.slots, page_bytes=cut.page)
        if not block.value:
            endless = Line("kv_tokens", 0, "tokens", source="no layer keeps a cache")
            return endless, Line("kv_blocks", 0, "count", source="no cache"), _nothing("max_concurrency")
        blocks = compute("kv_blocks", mem.cache_blocks, pool_bytes=pool, block_bytes=block)
        most = compute(
            "max_concurrency",
            mem.concurrent_requests,
            blocks=blocks,
            request_blocks=request_blocks(self.kinds, cut, recipe) / dcp,
        )
        sizes = [size for size in cut.block_tokens.values() if size]
        tokens = compute(
            "kv_tokens",
            mem.cache_tokens,
            blocks=blocks,
            groups=cut.groups,
            block_size=min(sizes) if sizes else recipe.block_size,
            decode_context=dcp,
        )
        if self.engine.number("prints_requests", 0) and cut.groups > 1:
            tokens = compute("kv_tokens", mem.request_tokens, requests=most, longest=length)
        return tokens, blocks, most

    def _in_bytes(self, pool: Line) -> tuple[Line, Line, Line]:
        recipe, engine = self.recipe, self.engine
        per_token, fixed = growing(self.kinds), standing(self.kinds)
        states = any(kind.name == "state" for kind in self.kinds)
        share = pool
        if states and engine.state_to_cache is not None and self.logged.pool is None:
            share = compute(
                "cache_share",
                mem.sglang_cache_share_bytes,
                pool_bytes=pool,
                state_to_cache=engine.line("state_to_cache"),
            )
        request = recipe.max_model_len * float(per_token.value)
        if self._by_bytes() or not engine.number("sliding_to_full", 0):
            request += float(fixed.value)
            most = compute(
                "max_concurrency", mem.concurrent_requests, blocks=share, request_blocks=max(request, 1)
            )
            tokens = compute("kv_tokens", mem.request_tokens, requests=most, longest=recipe.max_model_len)
        else:
            tokens = compute(
                "kv_tokens",
                mem.two_pool_tokens,
                pool_bytes=share,
                full_token_bytes=per_token,
                sliding_token_bytes=windowed(self.kinds),
                sliding_share=engine.line("sliding_to_full"),
            )
            most = compute(
                "max_concurrency",
                mem.concurrent_requests,
                blocks=tokens,
                request_blocks=recipe.max_model_len,
            )
        blocks = compute(
            "kv_blocks", mem.cache_blocks, pool_bytes=tokens, block_bytes=max(recipe.block_size, 1)
        )
        return tokens, blocks, most

    # -- engines that allocate for the run ----------------------------------------------------------

    def _static(self) -> ServingMemory:
        recipe = self.recipe
        slots = recipe.max_num_seqs
        length = recipe.max_model_len if recipe.engine == "llamacpp" else recipe.context
        context = length * slots
        per_token, fixed = growing(self.kinds), self._standing(slots, length)
        cache = compute(
            "kv_cache", mem.request_bytes, tokens=context, token_bytes=per_token, fixed_bytes=fixed
        )
        if recipe.engine == "llamacpp":
            buffer = _given("activation_peak", self.logged.activation_peak) or self._compute_buffer(context)
        else:
            buffer = _given("activation_peak", self.logged.activation_peak) or compute(
                "activation_peak",
                mem.prefill_temporary_bytes,
                tokens=recipe.isl * slots,
                widest=self._widest() or self._active_width(),
                ffn_copies=self.engine.line("prefill_ffn_copies"),
                hidden=self.hidden,
                stream_copies=self.engine.line("prefill_stream_copies"),
                element_bytes=recipe.dtype_bytes,
                kind=Kind.MODELLED,
            )
        outside = self.non_torch()
        parts = (self.weights, cache, buffer, outside)
        tree = total("memory", tuple(part for part in parts if part.value), unit="bytes", kind=Kind.MODELLED)
        whole = Line("gpu_memory", self.total.value, "bytes", self.total.kind, source=self.total.source)
        left = self.total.value - self.weights.value - buffer.value - outside.value
        pool = Line("pool", left, "bytes", Kind.MODELLED, note="what weights, buffers and context leave")
        tokens = Line("kv_tokens", context, "tokens", source="the context that was asked for")
        top = max(parts, key=lambda line: line.value).name
        refusal = None
        if tree.value > whole.value:
            refusal = f"needs {tree.value / GIB:.2f} GiB of {whole.value / GIB:.2f} GiB"
        return ServingMemory(
            tree=tree,
            weights=self.weights,
            budget=whole,
            pool=pool,
            kv_bytes_per_token=per_token,
            state_bytes=standing(self.kinds),
            kv_tokens=tokens,
            kv_blocks=Line("kv_blocks", context, "count", source="one token each"),
            max_concurrency=Line("max_concurrency", slots, "requests", source="slots that were asked for"),
            peak=tree,
            needed=tree,
            capacity=whole,
            binds=top,
            uncertain_bytes=WEIGHTS_ERROR * self.weights.value
            + SET_ASIDE_ERROR * (buffer.value + outside.value),
            stage=self.stage.index,
            refusal=refusal,
        )

    def _standing(self, slots: int, length: int) -> float:
        """States and windows of all slots; windows hold the micro-batch at hand as well."""
        held = 0.0
        batch = int(self.engine.number("micro_batch_tokens", 0))
        for kind in self.kinds:
            each = slots * float(kind.fixed.value)
            if kind.window is not None:
                kept = min(length * slots, _padded(kind.window * slots + batch))
                each += kept * float(kind.token.value)
            held += kind.layers * each
        return held

    def _compute_buffer(self, context: int) -> Line:
        tokens = min(self.recipe.max_num_batched_tokens, int(self.engine.number("micro_batch_tokens", 512)))
        return compute(
            "activation_peak",
            mem.compute_buffer_bytes,
            tokens=tokens,
            vocab=self.vocab if self.stage.last else 0,
            logit_copies=self.engine.line("logit_copies"),
            hidden=self.hidden,
            stream_copies=self.engine.line("forward_stream_copies"),
            score_heads=self._score_heads(),
            context=context,
            kind=Kind.MODELLED,
        )

    def _score_heads(self) -> int:
        """Heads whose scores of a micro-batch against the whole context are held."""
        if not self.engine.number("attention_scores", 0):
            return 0
        mixers = (run.block.mixer for run in self.stage.layers if run.in_trunk)
        return max((mixer.heads for mixer in mixers if isinstance(mixer, Attention)), default=0)

    def _active_width(self) -> int:
        moe = routed(self.stage)
        return moe.top_k * moe.expert_ffn if moe is not None else 0


def capture_sizes(max_num_seqs: int) -> int:
    """How many batch sizes vLLM captures: 1, 2, 4, every 8 below 256, every 16 up to twice the sequences."""
    top = min(2 * max_num_seqs, 512)
    return sum(1 for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= top)


def _padded(tokens: int) -> int:
    return -(-tokens // SWA_PAD) * SWA_PAD


def _given(name: str, value: float | None) -> Line | None:
    return None if value is None else Line(name, value, "bytes", Kind.MEASURED, source="the start-up log")


def _nothing(name: str) -> Line:
    return Line(name, 0, "bytes", source="the engine has no such thing")


def _setting(name: str, value: float | None) -> Line:
    return Line(name, 0.0 if value is None else value, "fraction", source=f"run.{name}")


def _minus(line: Line) -> Line:
    return Line(
        line.name, -line.value, line.unit, line.kind, inputs=line.inputs, formula=None, source=line.source
    )
