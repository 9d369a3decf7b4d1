"""Seconds of serving a model: a forward pass over a batch, and what many requests make of it.

`forward_pass` gives the time of one pass as lines that add up: products, attention, elementwise work,
gaps, communication, the host. `serving_time` finds the steady state of a constant number of requests in
flight; `pareto` repeats it over loads and `at_targets` finds the largest load within the targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas import comm
from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_time as g
from gpucalc.graph import Attention, Block, Graph, Linear, Mlp, Moe, Shard, Stack, StateMixer
from gpucalc.line import Kind, Line, compute, total, value_of, worst_kind
from gpucalc.plan.links import Links
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingTime, Traffic
from gpucalc.plan.stages import block_linears
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.engine_speed import EngineSpeed, WeightSpeed, weight_class
from gpucalc.spec.figure import Figure
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster, KernelRate, KernelSpec
from gpucalc.spec.version import version_key

# Reads and writes of the residual stream per layer in fused kernels: two norms with their additions,
# rotation, the output of attention. Of the feed-forward width: gate and value read, product written.
STREAM_PASSES = 8
GATE_PASSES = 3
# Routers send ranks of whole experts unequal work, and all wait for the one with most.
BALANCE = Line(
    "balance",
    0.6,
    "fraction",
    Kind.MEASURED,
    source="fitted to TensorRT-LLM 1.0 runs of Qwen3-235B-A22B and Llama 4 Maverick on eight GPUs",
)
STATE_BYTES = 4  # recurrent state is kept in fp32
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What one pass computes on the ranks of one cache.

    tokens: one for each of `requests` (or more, verified drafts), at `context` cached tokens each.
    chunk: prompt tokens beside them, after `before` others, of `prompts` prompts.
    """

    requests: float = 0.0
    context: float = 0.0
    tokens: float | None = None
    chunk: float = 0.0
    before: float = 0.0
    prompts: float = 0.0

    @property
    def decoded(self) -> float:
        """Rows of decoding."""
        return self.requests if self.tokens is None else self.tokens

    @property
    def rows(self) -> float:
        """Rows of every product."""
        return self.decoded + self.chunk


@dataclass(slots=True)
class _Pass:
    """Lines of one pass, by what they are."""

    products: list[Line] = field(default_factory=list)
    attention: list[Line] = field(default_factory=list)
    elementwise: list[Line] = field(default_factory=list)
    gaps: list[Line] = field(default_factory=list)
    tensor: list[Line] = field(default_factory=list)
    expert: list[Line] = field(default_factory=list)

    @property
    def device_s(self) -> float:
        """Seconds of everything so far."""
        lists = (self.products, self.attention, self.elementwise, self.gaps, self.tensor, self.expert)
        return float(sum(line.value for lines in lists for line in lines))


class Server:
    """One deployment as formula inputs: a model's shapes, a layout, an engine's and a GPU's rates."""

    def __init__(
        self, graph: Graph, layout: ServeLayout, recipe: ServeRecipe, engine: EngineSpec, cluster: Cluster
    ) -> None:
        if engine.speed is None:
            raise InputError("this engine's speed is not known", where=engine.id)
        decoders = [stack for stack in graph.stacks if stack.role == "decoder"]
        if not decoders:
            raise UnsupportedModel(f"{graph.name} is no decoder; only decoders generate tokens")
        self.stack: Stack = max(decoders, key=lambda stack: len(stack.layers))  # what every token passes
        self.graph = graph
        self.layout = layout
        self.recipe = recipe
        self.speed: EngineSpeed = engine.speed
        self.links = Links(cluster)
        pool = min(cluster.pools, key=lambda pool: pool.gpu.memory_bandwidth.si)  # the slowest sets the pace
        self.gpu: GpuSpec = pool.gpu
        self.kernels: KernelSpec = pool.kernels
        self.bandwidth = self.gpu.memory_bandwidth.line("memory_bandwidth")
        self.wide = self._wide_math()
        self.at_once = recipe.max_num_batched_tokens
        micro = engine.at(recipe.version).micro_batch_tokens
        if micro is not None:
            self.at_once = min(self.at_once, int(micro.value))
        self.eager = self.speed.eager or (recipe.enforce_eager and bool(self.speed.host_layer))
        self._rates: dict[tuple[float, bool], dict[str, Any]] = {}

    # --- rates -------------------------------------------------------------------------------------

    def _wide_math(self) -> str:
        """The precision products run at when activations are not quantised."""
        stated = self.recipe.dtype
        if self.speed.multiplies_in is not None and stated != "fp32":
            # cuBLAS may accumulate in 16 bits, which gaming cards do at twice the rate.
            stated = "fp16_fp16acc" if "fp16_fp16acc" in self.gpu.peaks else self.speed.multiplies_in
        if self.gpu.peak(stated) is None:
            raise InputError(
                "this GPU does not multiply in that type",
                where=self.gpu.id,
                given=stated,
                legal=sorted(self.gpu.peaks),
            )
        return stated

    def _gemm(self, math: str) -> KernelRate:
        name = "fp16" if math == "fp16_fp16acc" else math
        if name not in self.kernels.gemm:
            raise InputError(
                "no kernel rate for that precision",
                where=self.kernels.id,
                given=name,
                legal=sorted(self.kernels.gemm),
            )
        return self.kernels.gemm[name]

    def weight_speed(self, bytes_per_param: float, *, quantised: bool) -> tuple[WeightSpeed, bool]:
        """The engine's constants for weights of so many bytes, and whether activations are quantised."""
        weights = self.recipe.weights
        low = quantised and weights.computes_quantised and self.gpu.peak(weights.math) is not None
        name = weight_class(bytes_per_param, quantised=low, name=weights.name)
        own = self.speed.of_class(name, self.recipe.version)
        if own is None:
            raise InputError(
                "this engine's speed with such weights is not known",
                where=self.recipe.engine,
                given=name,
                legal=sorted(self.speed.weights),
            )
        return own, low and name != "w16"

    def product_rates(self, bytes_per_param: float, *, quantised: bool) -> dict[str, Any]:
        """Inputs of a product's two times, for weights stored in so many bytes."""
        key = (bytes_per_param, quantised)
        if key not in self._rates:
            own, low = self.weight_speed(bytes_per_param, quantised=quantised)
            math = self.recipe.weights.math if low else self.wide
            rate = self._gemm(math)
            peak = self.gpu.peak(math)
            assert peak is not None
            self._rates[key] = {
                "rate": self._read_rate(own, rate),
                "peak": peak,
                "mfu_max": rate.mfu_max.line("mfu_max"),
                "compute_share": own.compute_share.line("compute_share"),
                "p": rate.p.line("p"),
                "low": low,
            }
        return self._rates[key]

    def _read_rate(self, own: WeightSpeed, kernel: KernelRate) -> Line:
        known = own.per_multiprocessor is not None and self.gpu.sm_count is not None
        each = own.per_multiprocessor.line("per_multiprocessor") if own.per_multiprocessor else self.bandwidth
        return compute(
            "read_rate",
            g.weight_read_bytes_per_s,
            bandwidth_bytes_per_s=self.bandwidth,
            kernel_share=1.0 if self.speed.own_kernels else kernel.hbm_efficiency.line("kernel_share"),
            read_share=own.read_share.line("read_share"),
            multiprocessors=self.gpu.sm_count if known else 1,
            each_bytes_per_s=each if known else self.bandwidth,
            note=None
            if known
            else "what a multiprocessor can have in flight is not known and bounds nothing",
        )

    # --- a pass ------------------------------------------------------------------------------------

    def forward_pass(self, load: Load, name: str = "pass") -> Line:
        """Time of one pass over all stages, the sum of its children."""
        work = _Pass()
        expert_rows = load.rows * self.layout.dp
        for index, block in enumerate(self.stack.blocks):
            layers = self.stack.count(index)
            if layers:
                self._layer(work, block, layers, load, expert_rows)
        self._head(work, load)
        parts = [
            total(part, tuple(lines), unit="s")
            for part, lines in (
                ("products", work.products),
                ("attention", work.attention),
                ("elementwise", work.elementwise),
                ("gaps", work.gaps),
                ("tensor_parallel", work.tensor),
                ("expert_parallel", work.expert),
            )
            if lines
        ]
        if self.layout.pp > 1:
            parts.append(self._handoffs(load))
        if self.eager:
            parts.append(self._launch(work.device_s))
        parts.append(
            compute(
                "between_passes",
                g.between_passes_s,
                step_s=self.speed.step.line("step"),
                requests=load.requests + load.prompts,
                request_s=self.speed.request.line("request"),
            )
        )
        return total(name, tuple(parts), unit="s", kind=_modelled(parts))

    def _layer(self, work: _Pass, block: Block, layers: int, load: Load, expert_rows: float) -> None:
        def add(lines: list[Line], each: Iterable[Line]) -> None:
            for line in each:
                lines.append(_times(f"{block.name}.{line.name}", line, layers))

        add(work.products, (self._product(linear, load, expert_rows) for linear in block_linears(block)))
        add(work.attention, self._mixer(block, load))
        add(work.elementwise, (self._elementwise(block, load.rows),))
        if not self.eager:
            add(work.gaps, self._gaps(block))
        add(work.tensor, self._reductions(block, load.rows))
        add(work.expert, self._exchange(block, load.rows))

    def _product(self, linear: Linear, load: Load, expert_rows: float) -> Line:
        expert = linear.shard is Shard.EXPERT
        stored = self.recipe.weights.bytes_of(linear.name, expert=expert)
        rates = self.product_rates(stored, quantised=linear.shard is not Shard.REPLICATED)
        ranks: float = 1
        matrices: Any = linear.copies
        rows = load.rows * linear.active
        outputs: float = linear.outputs
        inputs: float = linear.inputs
        if expert:
            ranks = self.layout.expert_ranks
            matrices = compute(
                "experts",
                g.experts_touched,
                experts=linear.copies,
                top_k=linear.active,
                tokens=expert_rows,
            )
            rows = expert_rows * linear.active
        elif linear.shard is Shard.ROW:
            inputs = inputs / self.layout.tp
        elif linear.shard is not Shard.REPLICATED:
            outputs = outputs / self.layout.tp
        # Experts lie whole or in slices over their ranks; either way a rank reads and multiplies its share.
        moved = compute(
            "bytes",
            g.product_bytes,
            matrices=value_of(matrices) / ranks if expert else matrices,
            inputs=inputs,
            outputs=outputs,
            bytes_per_param=stored,
            rows=rows / ranks,
            operand_bytes=stored if rates["low"] else self.recipe.dtype_bytes,
            result_bytes=self.recipe.dtype_bytes,
        )
        return self._joined(linear.name, rows / ranks, inputs, outputs, moved, rates, grouped=expert)

    def _joined(
        self,
        name: str,
        rows: float,
        inputs: float,
        outputs: float,
        moved: Line,
        rates: Mapping[str, Any],
        *,
        grouped: bool = False,
    ) -> Line:
        flops = compute("flops", f.linear_flops, tokens=rows, inputs=inputs, outputs=outputs, active=1)
        share: Any = self.speed.grouped_share.line("kernel_share") if grouped else 1.0
        if grouped and self.layout.ep > 1:
            share = compute("kernel_share", f.in_step_efficiency, alone=share, training_efficiency=BALANCE)
        return compute(
            name,
            g.product_s,
            multiply_s=compute(
                "multiply",
                g.multiply_s,
                flops=flops,
                peak_flops_per_s=rates["peak"],
                mfu_max=rates["mfu_max"],
                compute_share=rates["compute_share"],
            ),
            read_s=compute("read", g.read_s, bytes_moved=moved, rate_bytes_per_s=rates["rate"]),
            p=rates["p"],
            kernel_share=share,
        )

    def _head(self, work: _Pass, load: Load) -> None:
        head = self.graph.head
        if head is None or not head.vocab:
            return
        rows = load.decoded + load.prompts
        stored = self.recipe.weights.head
        outputs = head.vocab / self.layout.tp
        moved = compute(
            "bytes",
            g.product_bytes,
            matrices=1,
            inputs=head.hidden,
            outputs=outputs,
            bytes_per_param=stored,
            rows=rows,
            operand_bytes=self.recipe.dtype_bytes,
            result_bytes=self.recipe.dtype_bytes,
        )
        rates = self.product_rates(stored, quantised=False)
        work.products.append(self._joined("vocabulary", rows, head.hidden, outputs, moved, rates))
        logits = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=rows,
            width=head.vocab,
            passes=2,
            element_bytes=LOGIT_BYTES,
        )
        work.elementwise.append(self._move("logits", logits))
        if self.layout.tp > 1:
            message = compute(
                "message",
                comm.tensor_parallel_message_bytes,
                tokens=rows,
                hidden=head.vocab,
                element_bytes=self.recipe.dtype_bytes,
            )
            gather = self.links.collective(
                "logits_gather", "all_gather", message, ranks=self.layout.tp, stride=1
            )
            work.tensor.append(gather)

    def _move(self, name: str, moved: Line) -> Line:
        return compute(
            name,
            f.traffic_s,
            bytes_moved=moved,
            bandwidth_bytes_per_s=self.bandwidth,
            hbm_efficiency=self.kernels.elementwise_hbm_efficiency.line("hbm_efficiency"),
        )

    def _elementwise(self, block: Block, rows: float) -> Line:
        hidden = self.stack.hidden
        widths: list[float] = [STREAM_PASSES * hidden * block.streams]
        ffn = block.ffn
        if isinstance(ffn, Mlp):
            widths.append(GATE_PASSES * ffn.ffn / self.layout.tp)
        elif isinstance(ffn, Moe):
            # Kernels of grouped products gather their rows; what is left is the weighted sum.
            routed = ffn.top_k * (GATE_PASSES * ffn.expert_ffn + (ffn.latent or hidden))
            widths.append(routed / self.layout.tp + GATE_PASSES * ffn.shared_ffn / self.layout.tp)
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=rows,
            width=sum(widths),
            passes=1,
            element_bytes=self.recipe.dtype_bytes,
        )
        return self._move("elementwise", moved)

    def _gaps(self, block: Block) -> list[Line]:
        linears = [linear for linear in block_linears(block) if linear.shard is not Shard.EXPERT]
        largest = max(linears, key=lambda linear: linear.inputs * linear.outputs, default=None)
        stored = (
            self.recipe.weights.bytes_of(largest.name, expert=False)
            if largest is not None
            else self.recipe.weights.linear
        )
        own, _ = self.weight_speed(stored, quantised=True)
        lines = [compute("gaps", g.gaps_s, layers=1, layer_s=own.layer_gap.line("layer_gap"))]
        if isinstance(block.ffn, Moe):
            lines.append(compute("moe_gaps", g.gaps_s, layers=1, layer_s=self.speed.moe_gap.line("moe_gap")))
        return lines

    def _launch(self, device_s: float) -> Line:
        """What the host needs beyond the device, where kernels are launched one by one."""
        figure = since(self.speed.host_layer or {}, self.recipe.version)
        own, _ = self.weight_speed(self.recipe.weights.linear, quantised=True)
        layer = total("layer", (figure.line("host_layer"), own.layer_gap.line("layer_gap")), unit="s")
        host = compute("host", g.gaps_s, layers=len(self.stack.layers), layer_s=layer)
        device = Line("device", device_s, "s", Kind.MODELLED, source="the pass's other lines")
        return compute("launch", f.exposed_launch_s, device_s=device, host_s=host)

    # --- attention and state -----------------------------------------------------------------------

    def _mixer(self, block: Block, load: Load) -> list[Line]:
        part = block.mixer
        if isinstance(part, StateMixer):
            return [self._state(part, load)]
        if part is None:
            return []
        lines = []
        if load.requests:
            lines.append(self._decode_attention(part, load))
        if load.chunk:
            lines.append(self._chunk_attention(part, load))
        return lines

    def _ungrouped(self) -> bool:
        """Whether this version's decode attention reads keys and values once per query head."""
        first = self.speed.grouped_since
        version = version_key(self.recipe.version)
        return first is not None and version is not None and version < (version_key(first) or ())

    def _heads(self, part: Attention) -> float:
        return max(part.heads / self.layout.tp, 1)

    def cached(self, part: Attention, context: float) -> tuple[float, float, float]:
        """Cached tokens one query reads, bytes of one of them, tokens of index keys read beside."""
        tokens = context
        if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
            tokens = tokens / part.compress_ratio
        index = 0.0
        if part.index_topk is not None:
            index, tokens = tokens, min(tokens, part.index_topk)
        elif part.span is not None:
            tokens = min(tokens, part.span)
        if part.kv_lora:
            width: float = part.kv_lora + (part.rope_dim or 0)
        else:
            sides = part.qk_dim if part.shared_kv else part.qk_dim + part.v_dim
            width = max(part.kv_heads / self.layout.tp, 1) * sides
        share = self.layout.decode_context
        return tokens / share, width * self.recipe.kv_bytes, index / share

    def _decode_attention(self, part: Attention, load: Load) -> Line:
        tokens, token_bytes, index = self.cached(part, load.context)
        moved = compute(
            "bytes", g.cache_read_bytes, requests=load.requests, context=tokens, token_bytes=token_bytes
        )
        heads = self._heads(part)
        if self.speed.rewrites_cache and not part.kv_lora:
            moved = compute(
                "bytes",
                g.rewritten_cache_bytes,
                cache_bytes=moved,
                heads_per_kv=part.heads / max(part.kv_heads, 1),
            )
        elif self._ungrouped():
            moved = compute(
                "bytes",
                g.ungrouped_cache_bytes,
                cache_bytes=moved,
                heads_per_kv=part.heads / max(part.kv_heads, 1),
            )
        qk, v = part.qk_dim, part.v_dim
        if part.kv_lora:  # the projections are folded into query and output: both see the latent
            qk, v = part.kv_lora + (part.rope_dim or 0), part.kv_lora
        flops = compute(
            "flops",
            g.decode_attention_flops,
            requests=load.decoded,
            heads=heads,
            context=tokens,
            qk_dim=qk,
            v_dim=v,
        )
        line = self._attention("decode_attention", self.kernels.attention_decode, flops, moved, decode=True)
        if not (part.index_heads and part.index_dim):
            return line
        keys = compute(
            "bytes", g.cache_read_bytes, requests=load.requests, context=index, token_bytes=part.index_dim
        )
        score = compute(
            "flops",
            g.decode_attention_flops,
            requests=load.decoded,
            heads=part.index_heads,
            context=index,
            qk_dim=part.index_dim,
            v_dim=0,
        )
        indexer = self._attention("indexer", self.kernels.attention_decode, score, keys, decode=True)
        return total("decode_attention", (line, indexer), unit="s")

    def _chunk_attention(self, part: Attention, load: Load) -> Line:
        span = load.before + load.chunk
        if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
            span = span / part.compress_ratio
        if part.index_topk is not None:
            span = min(span, part.index_topk)
        elif part.span is not None:
            span = min(span, part.span)
        prompts = max(load.prompts, 1)
        pairs = compute("pairs", g.chunk_pairs, tokens=load.chunk / prompts, before=load.before, span=span)
        flops = compute(
            "flops",
            f.attention_core_flops,
            sequences=prompts,
            heads=self._heads(part),
            qk_dim=part.qk_dim,
            v_dim=part.v_dim,
            pairs=pairs,
        )
        moved = compute(
            "bytes",
            f.attention_io_bytes,
            tokens=load.chunk + prompts * load.before,
            heads=self._heads(part),
            kv_heads=max(part.kv_heads / self.layout.tp, 1),
            qk_dim=part.qk_dim,
            v_dim=part.v_dim,
            element_bytes=self.recipe.dtype_bytes,
        )
        line = self._attention("prompt_attention", self.kernels.attention, flops, moved, decode=False)
        if not (part.index_heads and part.index_dim):
            return line
        score = compute(
            "flops",
            f.attention_core_flops,
            sequences=prompts,
            heads=part.index_heads,
            qk_dim=part.index_dim,
            v_dim=0,
            pairs=compute(
                "pairs",
                g.chunk_pairs,
                tokens=load.chunk / prompts,
                before=load.before,
                span=load.before + load.chunk,
            ),
        )
        indexer = self._attention("indexer", self.kernels.attention, score, moved, decode=False)
        return total("prompt_attention", (line, indexer), unit="s")

    def _attention(self, name: str, rate: KernelRate, flops: Line, moved: Line, *, decode: bool) -> Line:
        peak = self.gpu.peak("fp16" if self.wide == "fp16_fp16acc" else self.wide)
        if peak is None:  # cards that only state the rate with 16-bit accumulation
            peak = self.gpu.peak(self.wide)
        assert peak is not None
        hbm = rate.hbm_efficiency.line("alone")
        if decode:
            hbm = compute(
                "hbm_efficiency",
                f.in_step_efficiency,
                alone=hbm,
                training_efficiency=self.speed.attention_share.line("attention_share"),
            )
        return compute(
            name,
            f.attention_s,
            flops=flops,
            bytes_moved=moved,
            peak_flops_per_s=peak,
            efficiency=rate.mfu_max.line("mfu_max"),
            bandwidth_bytes_per_s=self.bandwidth,
            hbm_efficiency=hbm,
            p=rate.p.line("p"),
            overhead_s=0.0 if decode else rate.overhead.line("overhead"),
        )

    def _state(self, part: StateMixer, load: Load) -> Line:
        heads = max(part.heads / self.layout.tp, 1)
        moved = compute(
            "bytes",
            g.state_bytes,
            requests=load.requests + load.prompts,
            heads=heads,
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            element_bytes=STATE_BYTES,
        )
        flops = compute(
            "flops",
            f.state_mixer_flops,
            tokens=load.rows,
            heads=heads,
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            chunk=1 if not load.chunk else 256,
        )
        return self._attention("state", self.kernels.attention_decode, flops, moved, decode=True)

    # --- communication -----------------------------------------------------------------------------

    def _reductions(self, block: Block, rows: float) -> list[Line]:
        if self.layout.tp == 1:
            return []
        parts = [part for part in (block.mixer, block.ffn) if part is not None]
        count = 1 if block.parallel else len(parts)
        if isinstance(block.ffn, Moe) and self.layout.expert_ranks > self.layout.tp:
            count -= 1  # experts take and return their tokens by exchange
        if not count:
            return []
        message = compute(
            "message",
            comm.tensor_parallel_message_bytes,
            tokens=rows,
            hidden=self.stack.hidden,
            element_bytes=self.recipe.dtype_bytes,
        )
        nccl = self.links.collective("all_reduce", "all_reduce", message, ranks=self.layout.tp, stride=1)
        reduce = compute(
            "all_reduce",
            g.engine_all_reduce_s,
            collective_s=nccl,
            alpha_s=nccl.inputs["alpha_s"],
            latency_share=self.speed.all_reduce_latency.line("latency_share"),
        )
        return [compute("all_reduce", f.repeated_s, each_s=reduce, times=count)]

    def _exchange(self, block: Block, rows: float) -> list[Line]:
        part = block.ffn
        if not isinstance(part, Moe) or self.layout.expert_ranks <= self.layout.tp:
            return []
        dispatch = self.links.dispatch(
            "dispatch",
            tokens=rows / self.layout.tp,
            top_k=part.top_k,
            hidden=part.latent or part.hidden,
            element_bytes=self.recipe.dtype_bytes,
            ranks=self.layout.expert_ranks,
            stride=1,
        )
        return [compute("exchange", f.repeated_s, each_s=dispatch, times=2)]

    def _handoffs(self, load: Load) -> Line:
        message = compute(
            "message",
            comm.stage_message_bytes,
            tokens=load.rows,
            hidden=self.stack.hidden,
            element_bytes=self.recipe.dtype_bytes,
            divided_by=1,
        )
        return compute(
            "pipeline",
            g.handoffs_s,
            boundaries=self.layout.pp - 1,
            send_s=self.links.send("send", message, world=self.layout.engine_gpus),
            handoff_s=self.speed.handoff.line("handoff"),
        )


def since(by_version: Mapping[str, Figure], version: str) -> Figure:
    """The figure of the latest listed version not after the given one; the newest where it is no number."""
    if not by_version:
        raise InputError("no host time is known for this engine", key="enforce_eager")
    ordered = sorted(by_version, key=lambda key: version_key(key) or ())
    given = version_key(version)
    held = [key for key in ordered if given is None or (version_key(key) or ()) <= given]
    return by_version[held[-1] if held else ordered[0]]


def _times(name: str, each: Line, count: int) -> Line:
    line = compute(name, f.repeated_s, each_s=each, times=count)
    return replace(line, children=(each,))


def _modelled(parts: Iterable[Line]) -> Kind:
    return Kind.ASSUMED if worst_kind(list(parts)) is Kind.ASSUMED else Kind.MODELLED


# --- many requests ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steady:
    """The steady state of one cache's engine ranks, before it is said in rates of the deployment."""

    running: Line  # requests with room in the cache
    group: float  # of them in one pass: pipeline stages work on groups in turn
    groups: int
    passes: tuple[tuple[Line, float], ...]  # kinds of pass, and how many of each give all a token
    period: Line  # mean time between two tokens of a request
    first: Line  # time to first token once admitted
    prompt: Line  # time to compute one prompt with the engine idle
    starved: bool
    most: Line | None = None  # requests per second that prompts computed elsewhere allow


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts computed together, in one pass or several."""

    chunk: Line  # the mean pass
    tokens: float  # of prompts in it
    time: Line  # of all chunks


def _prompts(server: Server, computed: float, before: float, beside: Load, arriving: float = 1.0) -> _Prompts:
    """Prompts of `computed` tokens beside what decodes, as many in a pass as arrive and have room."""
    room = max(server.at_once - beside.decoded, 1)
    together = min(max(arriving, 1.0), max(room / computed, 1.0))
    tokens = computed * together
    chunks = max(-(-tokens // room), 1)
    earlier = (computed - tokens / chunks) / 2 if computed > room else 0.0
    load = replace(beside, chunk=tokens / chunks, before=before + earlier, prompts=together / chunks)
    chunk = server.forward_pass(load, "chunk")
    time = compute("prompt", g.prefill_s, chunks=chunks, chunk_s=chunk, pp=server.layout.pp)
    return _Prompts(chunk, tokens / chunks, time)


def _steady(
    server: Server, *, offered: float, isl: int, osl: int, kv_tokens: Any, traffic: Traffic
) -> _Steady:
    speed, recipe, layout = server.speed, server.recipe, server.layout
    held = compute("held", g.held_tokens, isl=isl, osl=osl, reserves=speed.reserves)
    cache = compute("cache", g.cache_requests, kv_tokens=kv_tokens, held=held)
    if cache.value < 1:
        raise InputError(
            "one request does not fit the cache",
            key="isl + osl",
            given=isl + osl,
            legal=f"at most {int(value_of(kv_tokens))} tokens",
        )
    running = compute("running", g.running_requests, offered=offered, cache=cache, limit=recipe.max_num_seqs)
    requests = float(running.value)
    groups = max(min(layout.pp, int(requests)), 1)
    group = requests / groups
    computed = compute("computed", g.computed_tokens, isl=isl, prefix_hit=traffic.prefix_hit)
    before = isl - computed.value
    verified = group * (1 + traffic.drafts)
    decoding = Load(requests=group, context=isl + osl / 2, tokens=verified)
    decode = server.forward_pass(decoding, "decode")
    alone = _prompts(server, computed.value, before, Load()).time
    token = decode
    if traffic.drafts:
        token = _speculated(decode, traffic)
    steady = _Steady(
        running=running,
        group=group,
        groups=groups,
        passes=((decode, 1.0),),
        period=_renamed(token, "tpot"),
        first=_renamed(alone, "ttft"),
        prompt=alone,
        starved=requests < min(offered, recipe.max_num_seqs),
    )
    if traffic.prefill_replicas:
        return _disaggregated(server, steady, isl=isl, traffic=traffic)
    # A request that runs alone has no other's prompt beside it.
    followers = group * (1 - 1 / requests) if requests > 1 else 0.0
    beside = decoding if speed.mixes_prefill else Load()
    prompts = _prompts(server, computed.value, before, beside, arriving=followers * groups / osl)
    passes = compute(
        "chunk_passes",
        g.chunk_passes,
        requests=followers if speed.mixes_prefill else followers * groups,
        computed=computed,
        osl=osl,
        chunk=prompts.tokens,
    )
    if speed.mixes_prefill:
        mixed = _speculated(prompts.chunk, traffic) if traffic.drafts else prompts.chunk
        period = compute("tpot", g.mixed_period_s, decode_s=token, mixed_s=mixed, chunk_passes=passes)
        alone_share = max(1 - passes.value, 0.0)
    else:
        chunk = compute("chunk", f.shared_s, whole_s=prompts.chunk, share=1 / groups)
        period = compute("tpot", g.alternating_period_s, decode_s=token, chunk_s=chunk, chunk_passes=passes)
        alone_share = 1.0
    beside_others = speed.mixes_prefill and requests > 1
    return replace(
        steady,
        passes=((decode, alone_share), (prompts.chunk, float(passes.value))),
        period=replace(period, children=(token,)),
        first=_renamed(prompts.time if beside_others else alone, "ttft"),
    )


def _disaggregated(server: Server, steady: _Steady, *, isl: int, traffic: Traffic) -> _Steady:
    """The steady state of a copy that only decodes: prompts come with their cache from other copies."""
    layout = server.layout
    token_bytes = sum(
        server.stack.count(index) * server.cached(block.mixer, 1.0)[1]
        for index, block in enumerate(server.stack.blocks)
        if isinstance(block.mixer, Attention)
    )
    moved = compute("message", g.cache_transfer_bytes, isl=isl, token_bytes=token_bytes)
    send = server.links.send("cache_transfer", moved, world=layout.gpus)
    return replace(
        steady,
        first=total("ttft", (steady.prompt, send, steady.period), unit="s", kind=Kind.MODELLED),
        most=compute(
            "prompts_per_s",
            g.prompts_per_s,
            caches=traffic.prefill_replicas * layout.dp,
            pp=layout.pp,
            prefill_s=steady.prompt,
        ),
    )


def _renamed(line: Line, name: str) -> Line:
    return replace(line, name=name)


def _speculated(verify: Line, traffic: Traffic) -> Line:
    accepted = compute("accepted", g.accepted_tokens, acceptance=traffic.acceptance, drafts=traffic.drafts)
    draft = compute("draft", f.shared_s, whole_s=verify, share=traffic.draft_share)
    return compute(
        verify.name,
        g.speculative_period_s,
        verify_s=verify,
        draft_s=draft,
        drafts=traffic.drafts,
        accepted=accepted,
        children=(verify,),
    )


def serving_time(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    concurrency: float | None = None,
    isl: int | None = None,
    osl: int | None = None,
    kv_tokens: Any,
    traffic: Traffic | None = None,
) -> ServingTime:
    """What requests of one kind see when `concurrency` of them are in flight over the whole deployment.

    `kv_tokens` is what one cache holds; requests beyond its room queue.
    Raises InputError where one request does not fit the cache or a rate is not known.
    """
    server = Server(graph, layout, recipe, engine, cluster)
    return _served(server, concurrency, isl, osl, kv_tokens, traffic or recipe.traffic)


def _served(
    server: Server,
    concurrency: float | None,
    isl: int | None,
    osl: int | None,
    kv_tokens: Any,
    traffic: Traffic,
) -> ServingTime:
    layout, recipe = server.layout, server.recipe
    isl = recipe.isl if isl is None else isl
    osl = recipe.osl if osl is None else osl
    load = recipe.concurrency if concurrency is None else concurrency
    caches = layout.dp * (layout.replicas - traffic.prefill_replicas)
    # Fewer requests than caches leave some caches idle.
    busy = min(float(load), float(caches))
    steady = _steady(server, offered=load / busy, isl=isl, osl=osl, kv_tokens=kv_tokens, traffic=traffic)
    request = compute("request", g.request_s, first_token_s=steady.first, period_s=steady.period, osl=osl)
    notes = []
    if steady.most is None:
        each = compute("each", g.output_tokens_per_s, requests=steady.running, osl=osl, request_s=request)
    else:
        own = compute("decoded", g.decoded_tokens_per_s, requests=steady.running, period_s=steady.period)
        each = compute("each", g.paced_tokens_per_s, decoded=own, prompts=steady.most, caches=busy, osl=osl)
        if each.value < own.value:
            notes.append("the copies that compute prompts set the pace; those that decode wait for them")
    output = compute("output_tokens_per_s", g.repeated_rate_tokens_per_s, each_tokens_per_s=each, times=busy)
    queue = compute("queue", g.queue_s, offered=load / busy, running=steady.running, request_s=request)
    if steady.starved:
        notes.append(
            f"the cache keeps {steady.running.value:,.0f} of {load / busy:,.0f} requests running;"
            f" a request waits {queue.value:,.1f} s for room"
        )
    return ServingTime(
        prefill_s=steady.first,
        decode_step_s=steady.period,
        output_tokens_per_s=output,
        tokens_per_s_per_gpu=compute(
            "tokens_per_s_per_gpu", f.tokens_per_s_per_gpu, tokens_per_s=output, gpus=layout.gpus
        ),
        tokens_per_s_per_user=compute(
            "tokens_per_s_per_user", g.tokens_per_s_per_user, period_s=steady.period
        ),
        concurrency=int(steady.running.value * busy),
        binds="cache" if steady.starved else binding(steady.passes),
        notes=tuple(notes),
        request_s=request,
        requests_per_s=compute("requests_per_s", g.requests_per_s, tokens_per_s=output, osl=osl),
        queue_s=queue,
        burst_first_token_s=compute(
            "burst_ttft", g.burst_first_token_s, requests=load / busy, prefill_s=steady.prompt
        ),
    )


def binding(passes: Iterable[tuple[Line, float]]) -> str:
    """What takes most of the passes: compute, memory bandwidth, link or latency."""
    sums = {"compute": 0.0, "memory bandwidth": 0.0, "link": 0.0, "latency": 0.0}
    for line, times in passes:
        for part in line.children:
            if part.name in ("gaps", "launch", "between_passes"):
                sums["latency"] += times * part.value
            elif part.name in ("tensor_parallel", "expert_parallel", "pipeline"):
                sums["link"] += times * part.value
            elif part.name == "products":
                for product in part.children:
                    inner = product.inputs.get("each_s", product)
                    computes = inner.inputs["multiply_s"].value > inner.inputs["read_s"].value
                    sums["compute" if computes else "memory bandwidth"] += times * product.value
            else:
                sums["memory bandwidth"] += times * part.value
    return max(sums, key=sums.__getitem__)


# --- loads side by side ----------------------------------------------------------------------------

LOADS = tuple(2**power for power in range(13))


def pareto(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    kv_tokens: Any,
    isl: int | None = None,
    osl: int | None = None,
    loads: Iterable[int] = LOADS,
    traffic: Traffic | None = None,
) -> tuple[ServingTime, ...]:
    """Rates over loads, until more requests no longer run: throughput per GPU against speed per user."""
    server = Server(graph, layout, recipe, engine, cluster)
    points: list[ServingTime] = []
    for load in loads:
        point = _served(server, load * layout.caches, isl, osl, kv_tokens, traffic or recipe.traffic)
        points.append(point)
        if point.binds == "cache" or load >= recipe.max_num_seqs:
            break
    return tuple(points)


def at_targets(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    kv_tokens: Any,
    isl: int | None = None,
    osl: int | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    traffic: Traffic | None = None,
) -> ServingTime | None:
    """The largest load whose mean time to first token and per token meet the targets, None for no load.

    A load at which requests wait for room meets no target of time to first token.
    """
    server = Server(graph, layout, recipe, engine, cluster)

    def meets(load: int) -> ServingTime | None:
        point = _served(server, load * layout.caches, isl, osl, kv_tokens, traffic or recipe.traffic)
        assert point.queue_s is not None
        first = point.prefill_s.value + point.queue_s.value
        if ttft_ms is not None and first * 1e3 > ttft_ms:
            return None
        if tpot_ms is not None and point.decode_step_s.value * 1e3 > tpot_ms:
            return None
        return point if point.binds != "cache" else None

    best = meets(1)
    if best is None:
        return None
    low, high = 1, 2
    while high <= recipe.max_num_seqs and (point := meets(high)) is not None:
        best, low, high = point, high, high * 2
    high = min(high, recipe.max_num_seqs + 1)
    while high - low > 1:
        middle = (low + high) // 2
        point = meets(middle)
        if point is None:
            high = middle
        else:
            best, low = point, middle
    return best
