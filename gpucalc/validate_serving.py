"""Published serving runs beside their estimates: memory, tokens of cache, speed, and whether they start.

Every figure a row gives becomes one value of one quantity. Tokens of cache are estimated twice: with
the activations the log reports (`kv_tokens`, which tests the cache alone), and with everything
predicted (`kv_tokens_predicted`). A row that was refused or ran out of memory tests the verdict, as
does one that started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpucalc.errors import GpucalcError
from gpucalc.estimate_serving import Memory
from gpucalc.measured import Row, Skip
from gpucalc.measured_deployments import Deployment, ServingNormaliser
from gpucalc.measured_serving import Logged, Rate, meaningless, rates_of, undecided
from gpucalc.points import Point, Skipped, Statistics
from gpucalc.spec.serve_run import ServeRun

# Memory, then speed; `verdict` counts starts that were refused or ran out of memory, and those that ran.
QUANTITIES = (
    "weights", "kv_tokens", "kv_tokens_predicted", "activation_peak", "kv_cache", "total_memory",
    "decode_speed", "batched_speed", "prefill", "verdict",
)  # fmt: skip
PAGED = ("vllm", "sglang")  # engines that print how many tokens their cache holds


@dataclass(frozen=True, slots=True)
class Bound:
    """What one quantity promises: limits of the absolute error, or the least share of right verdicts."""

    median: float | None = None
    p90: float | None = None
    p95: float | None = None
    right: float | None = None


BOUNDS = {
    "weights": Bound(median=0.01, p95=0.04),
    "kv_tokens": Bound(median=0.01, p90=0.04),
    "kv_tokens_predicted": Bound(median=0.03, p90=0.08),
    "decode_speed": Bound(median=0.12, p90=0.30),
    "batched_speed": Bound(median=0.20, p90=0.45),
    "verdict": Bound(right=0.90),
}


@dataclass(frozen=True, slots=True)
class Start:
    """A run known to have started or not, and what the estimate says of it."""

    id: str
    group: str
    engine: str
    refused: bool
    why: str | None  # why the engine would refuse, in its own terms, by the estimate
    needed_bytes: float
    capacity_bytes: float
    uncertain_bytes: float  # the expected error of `needed_bytes`

    @property
    def said_refused(self) -> bool:
        """Whether the estimate says it cannot start."""
        return self.why is not None or self.needed_bytes > self.capacity_bytes

    @property
    def marginal(self) -> bool:
        """Whether the estimate is too close to tell, as a plan would say."""
        return abs(self.needed_bytes - self.capacity_bytes) <= self.uncertain_bytes

    @property
    def right(self) -> bool:
        """Whether the estimate agrees; marginal, within the stated margin, agrees with either."""
        return self.said_refused == self.refused or self.marginal

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "id": self.id,
            "group": self.group,
            "framework": self.engine,
            "refused": self.refused,
            "estimated_refused": self.said_refused,
            "marginal": self.marginal,
            "right": self.right,
            "why": self.why,
            "needed_bytes": self.needed_bytes,
            "capacity_bytes": self.capacity_bytes,
            "uncertain_bytes": self.uncertain_bytes,
        }


class Estimator(Protocol):
    """Where estimates come from. Both methods raise GpucalcError."""

    def memory(self, deployment: Deployment, logged: Logged) -> Memory:
        """The memory of a deployment."""
        ...

    def speed(self, deployment: Deployment, rate: Rate, logged: Logged) -> tuple[float, str]:
        """The speed a rate counts, in tokens per second, and the architecture it is of."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything compared, everything that was not, and the starts."""

    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    starts: tuple[Start, ...]


def compare_serving(
    rows: Iterable[Row], normaliser: ServingNormaliser, estimator: Estimator, quantities: Sequence[str]
) -> Comparison:
    """Every figure of every row against its estimate."""
    found: list[Point | Skipped | Start] = []
    for row in rows:
        found += _compare(row, normaliser, estimator, frozenset(quantities))
    return Comparison(
        tuple(one for one in found if isinstance(one, Point)),
        tuple(one for one in found if isinstance(one, Skipped)),
        tuple(one for one in found if isinstance(one, Start)),
    )


def start_counts(starts: Sequence[Start]) -> dict[str, Any]:
    """How often the verdict agrees, over all starts and over those that failed."""
    failed = [start for start in starts if start.refused]
    right = sum(start.right for start in failed)
    return {
        "rows": len(starts),
        "right": sum(start.right for start in starts),
        "refused": len(failed),
        "refused_right": right,
        "refused_right_share": round(right / len(failed), 6) if failed else None,
        "marginal": sum(start.marginal for start in starts),
        "says_refused_ran": sum(not start.right and not start.refused for start in starts),
    }


def promises_broken(summaries: Mapping[str, Statistics], starts: Sequence[Start]) -> list[str]:
    """The promises that these errors break, as sentences."""
    out = []
    for quantity, bound in BOUNDS.items():
        found = summaries.get(quantity)
        if found is None:
            continue
        limits = (
            ("median", found.median_abs, bound.median),
            ("90th percentile of the", found.p90_abs, bound.p90),
            ("95th percentile of the", found.p95_abs, bound.p95),
        )
        for words, error, limit in limits:
            if limit is not None and error is not None and error > limit:
                out.append(f"{quantity}: {words} error {error:.1%} is above {limit:.0%}")
        counts = start_counts(starts)
        if bound.right is not None and counts["refused"]:
            share = counts["refused_right"] / counts["refused"]
            if share < bound.right:
                out.append(f"{quantity}: right on {share:.0%} of the failed starts, below {bound.right:.0%}")
    return out


def _compare(
    row: Row, normaliser: ServingNormaliser, estimator: Estimator, wanted: frozenset[str]
) -> Iterator[Point | Skipped | Start]:
    def left(quantity: str, reason: str) -> Skipped:
        return Skipped(row.id, quantity, reason, row.group)

    logged = Logged.of(row)
    memory_asked = [name for name in _memory_quantities(row, logged) if name in wanted]
    if "verdict" in wanted and isinstance(row.measured.get("oom"), bool):
        memory_asked.append("verdict")
    run = normaliser.run_of(row)
    rates = {name: rate for name, rate in rates_of(row, run, normaliser.conventions) if name in wanted}
    if not (memory_asked or rates):
        return
    deployment = normaliser.deployment_of(row)
    if isinstance(deployment, Skip):
        yield from (left(name, deployment.reason) for name in (*memory_asked, *rates))
        return
    if memory_asked:
        try:
            memory = estimator.memory(deployment, logged)
        except GpucalcError as error:
            yield from (left(name, f"not estimated: {error}") for name in memory_asked)
        else:
            for name in memory_asked:
                yield _memory_outcome(row, deployment, name, logged, memory, normaliser.meter_of(row))
    for name, rate in rates.items():
        if isinstance(rate, Skip):
            yield left(name, rate.reason)
        elif deployment.known != "all":
            yield left(name, "gpus not stated")
        else:
            try:
                estimated, arch = estimator.speed(deployment, rate, logged)
            except GpucalcError as error:
                yield left(name, f"not estimated: {error}")
            else:
                meter = f"{rate.source}, {rate.kind}"
                yield _value(row, deployment, name, rate.value, estimated, "tokens/s", meter, arch)


def _memory_quantities(row: Row, logged: Logged) -> Iterator[str]:
    for name in ("weights", "activation_peak", "kv_cache", "total_memory"):
        if getattr(logged, name) is not None:
            yield name
    if logged.kv_tokens is not None and str(row.run.get("framework")).casefold() in PAGED:
        yield from ("kv_tokens", "kv_tokens_predicted")


def _memory_outcome(
    row: Row, deployment: Deployment, name: str, logged: Logged, memory: Memory, meter: str
) -> Point | Skipped | Start:
    static = deployment.job.run.framework not in PAGED  # a cache as long as was asked for
    lacking = meaningless(row, name)
    if lacking is None and name in ("kv_tokens", "kv_tokens_predicted", "kv_cache", "verdict"):
        on_card = name == "verdict" or not (
            static or (name == "kv_tokens" and logged.activation_peak is None)
        )
        if on_card and deployment.known == "tensors":
            lacking = "gpus not stated"
        elif on_card and (name != "verdict" or not row.measured["oom"]):
            lacking = undecided(row)
    if lacking is not None:
        return Skipped(row.id, name, lacking, row.group)
    if name == "verdict":
        return Start(
            id=row.id,
            group=row.group,
            engine=deployment.job.run.framework,
            refused=bool(row.measured["oom"]),
            why=memory.refusal,
            needed_bytes=memory.needed,
            capacity_bytes=memory.capacity,
            uncertain_bytes=memory.uncertain,
        )
    if name.startswith("kv_tokens"):
        assert logged.kv_tokens is not None
        if name == "kv_tokens" and memory.kv_tokens_given is None:
            return Skipped(
                row.id, name, "neither the activation peak nor the cache's bytes are logged", row.group
            )
        given = memory.kv_tokens_given if name == "kv_tokens" else memory.kv_tokens
        assert given is not None
        words = "cache tokens, " + (_given(logged) if name == "kv_tokens" else "all predicted")
        return _value(row, deployment, name, logged.kv_tokens, given, "tokens", words, memory.arch)
    measured = getattr(logged, name)
    if name == "total_memory":
        estimated, words = memory.totals[meter], f"over all GPUs, {meter}"
    else:
        estimated, words = getattr(memory, name), "per GPU, rank 0"
    return _value(row, deployment, name, measured, estimated, "bytes", words, memory.arch)


def _given(logged: Logged) -> str:
    if logged.activation_peak is None:
        return "bytes of cache as logged"
    return "activations as logged" + ("" if logged.non_torch is None else ", other memory too")


def _value(
    row: Row,
    deployment: Deployment,
    quantity: str,
    measured: float,
    estimated: float,
    unit: str,
    meter: str,
    arch: str,
) -> Point:
    gpu = row.gpu or "not named"
    run = deployment.job.run
    assert isinstance(run, ServeRun)
    return Point(
        id=row.id,
        group=row.group,
        quantity=quantity,
        measured=measured,
        estimated=estimated,
        unit=unit,
        meter=meter,
        framework=str(row.run.get("framework")),
        stack=f"{row.run.get('framework')} {row.run.get('version') or ''}".strip(),
        quant=run.quant or run.dtype,
        gpu=gpu,
        arch=arch,
        model=row.model,
        quality=str(row.data.get("quality") or ""),
        notes=deployment.notes,
        cell=f"{row.group}, {row.model}, {gpu}",
    )
