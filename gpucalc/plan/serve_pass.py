"""Seconds of one forward pass over a batch, as lines that add up.

Products, attention, elementwise work, gaps between kernels, communication and the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.errors import InputError
from gpucalc.formulas import comm
from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_time as g
from gpucalc.graph import Block, Graph, Linear, Mlp, Moe, Shard
from gpucalc.line import Kind, Line, compute, total, value_of, worst_kind
from gpucalc.plan.serve_attention import Mixers
from gpucalc.plan.serve_draft import alone
from gpucalc.plan.serve_rates import Load
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.plan.stages import block_linears
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.figure import Figure
from gpucalc.spec.hardware import Cluster
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
LOGIT_BYTES = 4
FEW_ROWS = 8  # are multiplied row by row, without tiles
WIDENED_ROWS = 65  # up to 64 rows are multiplied as stored
# Kernels of attention that is not fused beyond those of one that is: input converted, pointers of the heads,
# product, result converted, twice; softmax; rows put together (ggml-org/llama.cpp b2833 ggml-cuda.cu).
SCORE_LAUNCHES = 8


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


class Server(Mixers):
    """One deployment that computes passes; the model that drafts for it is another one."""

    def __init__(
        self, graph: Graph, layout: ServeLayout, recipe: ServeRecipe, engine: EngineSpec, cluster: Cluster
    ) -> None:
        super().__init__(graph, layout, recipe, engine, cluster)
        own = alone(layout, recipe)
        self.drafter = Server(*own, engine, cluster) if own is not None else None

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
        add(work.attention, self.mixer(block, load))
        add(work.elementwise, (self._elementwise(block, load.rows),))
        if self.widens and load.rows >= WIDENED_ROWS:
            add(work.elementwise, self._widening(block, expert_rows))
        if not self.speed.eager:  # small kernels take their time with graphs and without
            add(work.gaps, self._gaps(block, expert_rows))
        add(work.tensor, self._reductions(block, load.rows))
        add(work.expert, self._exchange(block, load.rows))

    def _product(self, linear: Linear, load: Load, expert_rows: float) -> Line:
        expert = linear.shard is Shard.EXPERT
        stored = self.recipe.weights.bytes_of(linear.name, expert=expert)
        if self.widens and load.rows >= WIDENED_ROWS:
            stored = max(stored, self.recipe.dtype_bytes)
        rates = self.product_rates(stored, quantised=linear.shard is not Shard.REPLICATED)
        ranks: float = 1
        matrices: Any = linear.copies
        rows = load.rows * linear.active
        computed: Any = rows
        outputs: float = linear.outputs
        inputs: float = linear.inputs
        if expert:
            ranks = self.layout.expert_ranks
            matrices = _touched(linear.copies, linear.active, expert_rows)
            rows = expert_rows * linear.active
            computed = self._tiled(rows, matrices, expert_rows)
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
        each = value_of(computed) / ranks if expert else rows
        return self._joined(linear.name, each, inputs, outputs, moved, rates, grouped=expert)

    def _tiled(self, rows: float, experts: Line, tokens: float) -> Line | float:
        """Rows that a product with many experts computes, whole tiles of them once there are many."""
        tile = self.speed.grouped_tile
        if tile is None or self.one_by_one or tokens <= FEW_ROWS:
            return rows
        return compute(
            "rows", g.tiled_rows, rows=rows, experts=experts, tokens=tokens, tile=tile.line("tile")
        )

    def _widening(self, block: Block, expert_rows: float) -> Iterator[Line]:
        """Weights of fewer bits written out in 16 bit, matrix by matrix."""
        for linear in block_linears(block):
            expert = linear.shard is Shard.EXPERT
            stored = self.recipe.weights.bytes_of(linear.name, expert=expert)
            if stored >= self.recipe.dtype_bytes:
                continue
            matrices: Any = linear.copies
            if expert:
                matrices = _touched(linear.copies, linear.active, expert_rows)
            moved = compute(
                "bytes",
                g.widened_bytes,
                matrices=matrices,
                inputs=linear.inputs,
                outputs=linear.outputs,
                bytes_per_param=stored,
            )
            yield self.move(f"{linear.name}_widened", moved)

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
        work.elementwise.append(self.move("logits", logits))
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
        return self.move("elementwise", moved)

    def _gaps(self, block: Block, expert_rows: float) -> list[Line]:
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
            if self.one_by_one and self.speed.expert_launch is not None:
                touched = _touched(block.ffn.experts, block.ffn.top_k, expert_rows)
                lines.append(
                    compute(
                        "expert_launches",
                        g.expert_launches_s,
                        experts=touched,
                        matrices=3 if block.ffn.gated else 2,
                        launch_s=self.speed.expert_launch.line("expert_launch"),
                    )
                )
        return lines

    def _launch(self, device_s: float) -> Line:
        """What the host needs beyond the device, where kernels are launched one by one."""
        figure = since(self.speed.host_layer or {}, self.recipe.version)
        own, _ = self.weight_speed(self.recipe.weights.linear, quantised=True)
        layer = total("layer", (figure.line("host_layer"), own.layer_gap.line("layer_gap")), unit="s")
        host = compute("host", g.gaps_s, layers=len(self.stack.layers), layer_s=layer)
        device = Line("device", device_s, "s", Kind.MODELLED, source="the pass's other lines")
        return compute("launch", f.exposed_launch_s, device_s=device, host_s=host)

    # --- prompts -----------------------------------------------------------------------------------

    def chunked(self, name: str, chunks: float, chunk: Line) -> Line:
        """Time of a prompt computed in so many passes like one: stages work on several at once."""
        queue, pp = self.speed.launch_queue, self.layout.pp
        if queue is None or pp == 1:
            return compute(name, g.prefill_s, chunks=chunks, chunk_s=chunk, pp=pp)
        if self.one_by_one and any(isinstance(block.ffn, Moe) for block in self.stack.blocks):
            # The host reads which experts were chosen in every layer, so that it runs ahead of nothing.
            return compute(name, g.prefill_s, chunks=chunks, chunk_s=chunk, pp=1)
        queued = compute(
            "queued",
            g.chunks_queued,
            launches=self._launches(),
            queue=queue.line("queue"),
            copies=self.speed.figure("chunk_copies").line("copies"),
        )
        return compute(name, g.queued_prefill_s, chunks=chunks, chunk_s=chunk, pp=pp, queued=queued)

    def _launches(self) -> Line:
        widening = self.widens and self.recipe.weights.linear < self.recipe.dtype_bytes
        return compute(
            "launches",
            g.stage_launches,
            layers=len(self.stack.layers),
            pp=self.layout.pp,
            products=max(len(tuple(block_linears(block))) for block in self.stack.blocks),
            product_launches=self.speed.figure("product_launches").value + widening,
            layer_launches=self.speed.figure("layer_launches").value + self.unfused * SCORE_LAUNCHES,
        )

    # --- communication -----------------------------------------------------------------------------

    def _reductions(self, block: Block, rows: float) -> list[Line]:
        if self.layout.tp == 1:
            return []
        parts = [part for part in (block.mixer, block.state, block.ffn) if part is not None]
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
            element_bytes=self.speed.stream_bytes.value
            if self.speed.stream_bytes
            else self.recipe.dtype_bytes,
            divided_by=1,
        )
        send = self.links.send("send", message, world=self.layout.engine_gpus)
        if self.speed.stages_whole and not self.links.cluster.intra.peer_to_peer:
            send = compute("send", f.repeated_s, each_s=send, times=2)
        return compute(
            "pipeline",
            g.handoffs_s,
            boundaries=self.layout.pp - 1,
            send_s=send,
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


def _touched(experts: int, top_k: float, tokens: float) -> Line:
    """How many of the experts the tokens of a pass reach."""
    return compute("experts", g.experts_touched, experts=experts, top_k=top_k, tokens=tokens)


def _times(name: str, each: Line, count: int) -> Line:
    line = compute(name, f.repeated_s, each_s=each, times=count)
    return replace(line, children=(each,))


def _modelled(parts: Iterable[Line]) -> Kind:
    return Kind.ASSUMED if worst_kind(list(parts)) is Kind.ASSUMED else Kind.MODELLED
