"""What a deployment's kernels run at: rates from an engine's and a GPU's constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas import serving_time as g
from gpucalc.graph import Graph, Stack
from gpucalc.line import Line, compute
from gpucalc.plan.links import Links
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.engine_speed import EngineSpeed, WeightSpeed, weight_class
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster, KernelRate, KernelSpec
from gpucalc.spec.version import version_key

WIDE_CACHE = 2  # bytes of an element; a quantised cache needs fused attention


def older(version: str, than: str | None) -> bool:
    """Whether a version comes before another one, false where either has no numbers."""
    own, other = version_key(version), version_key(than) if than is not None else None
    return own is not None and other is not None and own < other


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


class Rates:
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
        era = engine.at(recipe.version)
        micro = era.micro_batch_tokens
        if micro is not None:
            self.at_once = min(self.at_once, int(micro.value))
        self.eager = self.speed.eager or (recipe.enforce_eager and bool(self.speed.host_layer))
        self.unfused = bool(era.number("attention_scores", 0)) and recipe.kv_bytes >= WIDE_CACHE
        self.widens = older(recipe.version, self.speed.widens_before) and not self.speed.own_kernels_on(
            self.gpu.vendor
        )
        self.one_by_one = older(recipe.version, self.speed.experts_together)  # experts
        self._rates: dict[tuple[float, bool], dict[str, Any]] = {}

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
        own = self.speed.of_class(name, self.recipe.version, self.gpu.vendor)
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
