"""One rank of a run: what it holds of the model and how many tokens it sees.

The numbers that the lines of a rank's memory are made from; `plan.model_state`, `plan.kept` and
`plan.transients` turn them into lines, `plan.memory` puts those on a timeline.
"""

from __future__ import annotations

from typing import Any

from gpucalc.formulas import memory as mem
from gpucalc.formulas import pipeline
from gpucalc.graph import Attention, Graph
from gpucalc.line import Line, compute
from gpucalc.num import holds, minimum, where
from gpucalc.plan import allowances
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.stages import LayerRun, Params, Stage, block_linears, frozen_params


class Rank:
    """A GPU of one pipeline stage."""

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        layout: Layout,
        recipe: Recipe,
        *,
        hopper_or_later: bool = True,
        ampere_or_later: bool = True,
        nvlink: bool = True,
        layers: dict[Any, Line] | None = None,
    ) -> None:
        self.graph, self.stage, self.layout, self.recipe = graph, stage, layout, recipe
        self.hopper_or_later, self.ampere_or_later, self.nvlink = hopper_or_later, ampere_or_later, nvlink
        held = stage.params
        self.dense_params = compute(
            "dense_params",
            mem.dense_rank_params,
            sharded=held.sharded,
            replicated=held.replicated,
            tp=layout.tp,
        )
        self.expert_params = compute(
            "expert_params", mem.expert_rank_params, expert=held.expert, ep=layout.ep, etp=layout.etp
        )
        self.dense: float = self.dense_params.value
        self.expert: float = self.expert_params.value
        left = frozen_params(graph, stage, recipe.frozen)
        self.frozen = left.sharded / layout.tp + left.replicated
        self.tokens = layout.micro_batch * recipe.seq_len / layout.cp
        self.sp = where(layout.sequence_parallel, layout.tp, 1)
        self.in_flight = _in_flight(layout, stage)
        # What a layer of each kind keeps: made once for all stages, looked at many times.
        self.layers: dict[Any, Line] = {} if layers is None else layers
        self.beside: tuple[Line, ...] = ()  # what every phase has beside its tensors

    @property
    def accumulates(self) -> bool:
        """Whether gradients add up over several micro-batches."""
        return holds(self.layout.micro_batches > 1)

    def trained(self) -> tuple[float, float]:
        """Dense and expert parameters of the model on this rank that are trained."""
        return self.dense - self.frozen, self.expert

    def trained_parts(self) -> tuple[tuple[str, float, int], ...]:
        """Adapters, and the tables where they are trained too: name, parameters, element size.

        Trained copies of the tables keep the base's type; adapters have their own.
        """
        recipe, adapters = self.recipe, self.recipe.adapters
        assert adapters is not None
        parts: tuple[tuple[str, float, int], ...] = (
            ("adapters", self.adapter_params(), adapters.element_bytes),
        )
        if adapters.trained_embeddings:
            tables = (self.stage.embedding.sharded + self.stage.head.sharded) / self.layout.tp
            parts += (("tables", tables, recipe.compute_bytes),)
        return parts

    def adapter_params(self) -> float:
        """Parameters of this stage's LoRA matrices."""
        adapters = self.recipe.adapters
        assert adapters is not None
        return sum(
            run.sets(linear)
            * (
                adapters.rank * (linear.inputs + linear.outputs)
                + (linear.outputs if adapters.kind == "dora" else 0)
            )
            for run in self.stage.layers
            for linear in block_linears(run.block)
            if linear.name in adapters.targets
        )

    def trained_params(self) -> float:
        """Parameters that get gradients."""
        if self.recipe.adapters is None:
            return sum(self.trained())
        return sum(params for _, params, _ in self.trained_parts())

    def largest_tensor(self) -> float:
        """Elements of the largest single weight of the stage, on this rank."""
        sizes = [
            linear.inputs * linear.outputs for run in self.stage.layers for linear in block_linears(run.block)
        ]
        return max(*sizes, self.stage.embedding.sharded, self.stage.head.sharded, 0) / self.layout.tp

    def distinct_shapes(self) -> int:
        """Elements of one weight of each kind, told apart by name: Megatron fuses q, k, v and gate, up."""
        shapes = {
            (linear.name, linear.inputs, linear.outputs)
            for run in self.stage.layers
            for linear in block_linears(run.block)
            if linear.name != "router"
        }
        return sum(inputs * outputs for _, inputs, outputs in shapes)

    def layer_linear_params(self, *, one_layer: bool = False) -> float:
        layout = self.layout
        if one_layer:
            layer = self.stage.layers[0].params
            return layer.linear / layout.tp + layer.expert / (layout.ep * layout.etp)
        dense = sum(run.held.linear for run in self.stage.layers) / layout.tp
        return dense + self.expert

    def run_tokens(self, run: LayerRun) -> float:
        if run.stack.tokens is not None:
            return self.layout.micro_batch * run.stack.tokens
        return self.tokens

    def memory_ratio(self, run: LayerRun) -> float:
        others = [stack for stack in self.graph.stacks if stack.role == "encoder"]
        if run.block.cross is None or not others:
            return 1.0
        return (others[0].tokens or self.recipe.seq_len) / self.recipe.seq_len

    def rotary_dim(self) -> int:
        """Width of the rotation tables, 0 without rotary positions."""
        for run in self.stage.layers:
            mixer = run.block.mixer
            if isinstance(mixer, Attention) and mixer.rope != "none":
                return mixer.rope_dim or mixer.qk_dim
        return 0

    def idle(self, run: LayerRun) -> bool:
        """A vision tower beside a language model: a run over text alone does not pass it."""
        return run.stack.role == "vision" and self.graph.trunk.role == "decoder"

    @property
    def vocab(self) -> int:
        head = self.graph.head
        return head.vocab if head is not None and self.stage.last else 0

    @property
    def gathers(self) -> bool:
        if "parameters" in self.recipe.offload:  # fetched from the host, on one GPU too
            return True
        return self.layout.zero_stage >= 3 and holds(self.layout.shard > 1)

    def layer_params(self) -> float:
        widest = self.stage.widest
        if widest is None:
            return minimum(self.dense, allowances.SIZE_BASED_WRAP.value)  # type: ignore[no-any-return]
        held: Params = widest.params
        layout, adapters = self.layout, self.recipe.adapters
        if adapters is not None:  # gathered as stored, in the units of the compute type
            stored = adapters.base_bytes_per_param / self.recipe.compute_bytes
            return (held.sharded / layout.tp + held.replicated) * stored
        return held.sharded / layout.tp + held.replicated + held.expert / (layout.ep * layout.etp)

    def root_params(self) -> float:
        tables = (self.stage.embedding.sharded, self.stage.head.sharded)
        held = sum(tables) if self.recipe.wrapped_root else max(tables)
        return held / self.layout.tp


def _in_flight(layout: Layout, stage: Stage) -> Line:
    """Micro-batches a rank holds at its peak, in units of all its layers."""
    name, m = "in_flight", layout.micro_batches
    if layout.schedule == "gpipe":
        return compute(name, pipeline.gpipe_in_flight, micro_batches=m)
    if layout.schedule == "zero-bubble":
        return compute(name, pipeline.zero_bubble_in_flight, pp=layout.pp, micro_batches=m)
    if layout.schedule == "zb-h2":
        return compute(name, pipeline.fuller_zero_bubble_in_flight, pp=layout.pp, micro_batches=m)
    if layout.schedule in ("dualpipe", "dualpipe-v"):
        return compute(name, pipeline.dual_pipe_in_flight, pp=layout.pipeline_stages)
    return compute(
        name,
        pipeline.in_flight_micro_batches,
        pp=layout.pp,
        vpp=layout.vpp,
        rank=stage.index,
        micro_batches=m,
    )
