"""Engines that make a pool of what their budget leaves: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

from gpucalc.formulas import serving_memory as mem
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.serve_cache import (
    growing,
    paging,
    request_blocks,
    standing,
    windowed,
)
from gpucalc.plan.serve_parts import (
    SET_ASIDE_ERROR,
    WEIGHTS_ERROR,
    Parts,
    logged_line,
    minus,
    nothing,
    setting,
)
from gpucalc.plan.serving_layout import ServingMemory
from gpucalc.units import GIB


class Pooled(Parts):
    """A stage whose cache takes what is left."""

    def memory(self) -> ServingMemory:
        """The stage's answer."""
        recipe, engine = self.recipe, self.engine
        activation, non_torch, graphs = self.activation_peak(), self.non_torch(), self.graphs()
        before, others = self.pre_existing(), self.in_use()
        subtracted = graphs if engine.number("graphs_subtracted", 0) else nothing("graphs_not_subtracted")
        static: list[Line]  # what must fit in the budget beside the cache
        if recipe.engine == "vllm":
            budget = compute(
                "budget",
                mem.budget_bytes,
                total_bytes=self.total,
                fraction=setting("gpu_memory_utilization", recipe.gpu_memory_utilization),
            )
            if others.value and engine.number("others_in_budget", 0):
                budget = total("budget", (budget, minus(before), minus(others)), unit="bytes")
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
            free = total("free_before", (self.total, *self._taken(before, others)), unit="bytes")
            fraction = setting("mem_fraction_static", recipe.mem_fraction_static)
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
            loaded = map(minus, (self.weights, activation, non_torch, graphs))
            used = (self.total, *self._taken(before, others), *loaded)
            free = total("free_when_loaded", used, unit="bytes")
            fraction = setting("free_gpu_memory_fraction", recipe.gpu_memory_utilization)
            pool = compute("pool", mem.trtllm_pool_bytes, free_bytes=free, fraction=fraction)
            budget = Line("budget", self.total.value, "bytes", self.total.kind, source=self.total.source)
            static = [
                *([others] if others.value else []),
                self.weights,
                activation,
                non_torch,
                graphs,
                before,
            ]
        pool = logged_line("pool", self.logged.pool) or pool
        found = self._with_pool(budget, pool, static, activation, non_torch, graphs, (before, others))
        if engine.number("budget_must_be_free", 0):
            return self._asked_for(found, before, others)
        return found

    @staticmethod
    def _taken(before: Line, others: Line) -> tuple[Line, ...]:
        """What the engine finds in use, as it lessens a sum."""
        return tuple(minus(line) for line in (before, others) if line is before or line.value)

    def _asked_for(self, found: ServingMemory, before: Line, others: Line) -> ServingMemory:
        """The answer of an engine that only starts where its whole budget is free."""
        free = total("free", (self.total, *self._taken(before, others)), unit="bytes")
        over = found.budget.value - free.value
        if over <= SET_ASIDE_ERROR * before.value or self.logged.pool is not None:
            return found
        # Graphs and the sampler's dry run may lie outside the budget and need room of their own.
        outside = max(found.tree.value - before.value - others.value - found.budget.value, 0.0)
        share = (free.value - outside - SET_ASIDE_ERROR * before.value) / self.total.value
        return replace(
            found,
            needed=replace(found.budget, name="asked_for"),
            capacity=free,
            binds=others.name if others.value else before.name,
            uncertain_bytes=SET_ASIDE_ERROR * before.value,
            refusal=f"{free.value / GIB:.2f} of {self.total.value / GIB:.2f} GiB are free, less than the"
            f" {found.budget.value / GIB:.2f} GiB asked for; gpu_memory_utilization"
            f" {math.floor(100 * share) / 100:g} would leave room",
        )

    def _with_pool(
        self,
        budget: Line,
        pool: Line,
        static: list[Line],
        activation: Line,
        non_torch: Line,
        graphs: Line,
        in_use: tuple[Line, Line],
    ) -> ServingMemory:
        recipe = self.recipe
        tokens, blocks, most = self._capacity(pool)
        seats = most
        if recipe.context != recipe.max_model_len:
            own = copy(self)
            own.recipe = replace(recipe, max_model_len=recipe.context)
            seats = own._capacity(pool)[2]
        request = self._request()
        needed = total("needed_to_start", (*static, request), unit="bytes", kind=Kind.MODELLED)
        held = max(float(pool.value), 0.0)
        cache = Line("kv_cache", held, "bytes", Kind.MODELLED, formula=pool.formula, inputs=pool.inputs)
        warmup = self.warmup()
        last = max((activation, warmup), key=lambda line: line.value)
        parts = (*in_use, self.weights, non_torch, graphs, last, cache, *self._drafted_outside(tokens))
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
            others = in_use[1]
            mine = last.name if last is warmup else "graphs"
            binds = others.name if over <= others.value else mine
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
            seats=replace(seats, name="requests_in_cache", note="of isl + osl tokens, in one cache"),
            peak=tree,
            needed=decided,
            capacity=capacity,
            binds=binds,
            uncertain_bytes=uncertain,
            stage=self.stage.index,
            refusal=refusal,
        )

    def _drafted_outside(self, tokens: Line) -> tuple[Line, ...]:
        """What drafts, where the pool is made before it is loaded."""
        if not self.engine.number("drafts_outside_pool", 0) or not self.draft_weights.value:
            return ()
        cache = compute(
            "draft_cache", mem.draft_cache_bytes, tokens=tokens, token_bytes=growing(self.draft_kinds)
        )
        return (self.draft_weights, cache)

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
            return endless, Line("kv_blocks", 0, "count", source="no cache"), nothing("max_concurrency")
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
