"""What an engine holds on one GPU beside its cache: weights, activations, graphs, what lies outside torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Graph, Mlp, Moe
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.serve_cache import CacheKind, cache_kinds, joined
from gpucalc.plan.serve_draft import alone
from gpucalc.plan.serve_weights import routed, stage_weights
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.plan.stages import Stage, stages
from gpucalc.spec.engine import EngineEra
from gpucalc.spec.hardware import Cluster
from gpucalc.units import GIB

# Expected error of what a start needs, by part: published start-up logs of vLLM.
WEIGHTS_ERROR = 0.01
SET_ASIDE_ERROR = 0.15
ERROR_BASIS = "1 % of the weights, 15 % of what the engine sets aside: published start-up logs"


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


class Parts:
    """One stage on one GPU, part by part."""

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
        self.draft = self._draft()
        self.total = logged_line("gpu_memory", logged.total) or cluster.usable_memory()
        self.weights = logged_line("weights", logged.weights) or stage_weights(
            graph, stage, layout, recipe, engine
        )
        self.vocab = graph.head.vocab if graph.head is not None else 0
        self.hidden = graph.trunk.hidden
        self.draft_weights, self.draft_kinds = self._drafted()
        if not engine.number("drafts_outside_pool", 0):
            if self.draft_weights.value and logged.weights is None:
                self.weights = total("weights", (*self.weights.children, self.draft_weights), unit="bytes")
            self.kinds = joined(self.kinds, self.draft_kinds, blocks=recipe.engine in ("vllm", "trtllm"))

    def _draft(self) -> Parts | None:
        """The model that drafts, as far as this GPU holds it; engines with a pool load it on the last."""
        own = alone(self.layout, self.recipe)
        if own is None:
            return None
        graph, layout, recipe = own
        parts = stages(graph, pp=layout.pp, vpp=1)
        index = self.stage.index if layout.pp > 1 else 0
        if index >= len(parts) or (layout.pp == 1 and not self.stage.last):
            return None
        return type(self)(graph, parts[index], layout, recipe, self.engine, self.cluster, NOTHING_LOGGED)

    def _drafted(self) -> tuple[Line, list[CacheKind]]:
        """Weights of what drafts on this GPU, and what its layers cache."""
        if self.draft is not None:
            return replace(self.draft.weights, name="draft_weights"), self.draft.kinds
        found = self.recipe.drafter
        if found is None or not found.head_bytes or not self.stage.last:
            return nothing("draft_weights"), []
        weights = compute(
            "draft_weights", mem.draft_head_rank_bytes, head_bytes=found.head_bytes, tp=self.layout.tp
        )
        alike = [kind for kind in self.kinds if kind.name == "full"][:1]
        return weights, [replace(kind, layers=1) for kind in alike]

    def activation_peak(self) -> Line:
        """The larger of the two regimes, with what stays allocated through both."""
        known = logged_line("activation_peak", self.logged.activation_peak)
        if known is not None:
            return known
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
        known = logged_line("non_torch", self.logged.non_torch)
        if known is not None:
            return known
        return self._of_ranks("non_torch")

    def pre_existing(self) -> Line:
        """In use before the engine measures what is free."""
        return logged_line("pre_existing", self.logged.pre_existing) or self._of_ranks("pre_existing")

    def in_use(self) -> Line:
        """What others hold on the card."""
        return Line("in_use", self.recipe.in_use_bytes, "bytes", source="run.memory_in_use_gib")

    def _of_ranks(self, name: str) -> Line:
        """The engine's figure for as many ranks, that for ranks without NVLink where there is one."""
        apart = self.cluster.nvlink_domain <= 1 and self.layout.tp > 1
        found = self.engine.of_ranks(f"{name}_pcie", self.layout.tp) if apart else None
        found = found or self.engine.of_ranks(name, self.layout.tp)
        return replace(found, name=name) if found is not None else nothing(name)

    def graphs(self) -> Line:
        """Captured CUDA graphs."""
        known = logged_line("graphs", self.logged.graphs)
        if known is not None:
            return known
        if self.recipe.enforce_eager or self.engine.graph_base is None:
            return nothing("graphs")
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
            return nothing("sampler_warmup")
        return compute(
            "sampler_warmup",
            mem.sampler_warmup_bytes,
            sequences=min(self.recipe.max_num_seqs, self.recipe.max_num_batched_tokens),
            vocab=self.vocab,
            bytes_per_logit=self.engine.line("warmup_bytes_per_logit"),
            kind=Kind.MODELLED,
        )


def capture_sizes(max_num_seqs: int) -> int:
    """How many batch sizes vLLM captures: 1, 2, 4, every 8 below 256, every 16 up to twice the sequences."""
    top = min(2 * max_num_seqs, 512)
    return sum(1 for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= top)


def logged_line(name: str, value: float | None) -> Line | None:
    """A figure of the start-up log; None where it says nothing."""
    return None if value is None else Line(name, value, "bytes", Kind.MEASURED, source="the start-up log")


def nothing(name: str) -> Line:
    """A part that is not there."""
    return Line(name, 0, "bytes", source="the engine has no such thing")


def setting(name: str, value: float | None) -> Line:
    """A fraction the run states."""
    return Line(name, 0.0 if value is None else value, "fraction", source=f"run.{name}")


def minus(line: Line) -> Line:
    """What is taken away from a sum."""
    return Line(
        line.name, -line.value, line.unit, line.kind, inputs=line.inputs, formula=None, source=line.source
    )
