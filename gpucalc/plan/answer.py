"""What a plan says: the tree of lines and the words decided from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpucalc.line import Line
from gpucalc.plan.layout import Layout

# A plan of training holds a Layout and a Recipe, one of serving a ServeLayout and a ServeRecipe. Readers
# ask for one task or the other (`Plan.serves`); a union would make each of them prove it at every use.
AnyLayout = Any
AnyRecipe = Any

HOST = "host_memory"  # what binds when the host's memory decides


class Level(StrEnum):
    """Does it fit: yes beyond the expected error, perhaps, no."""

    FITS = "fits"
    MARGINAL = "marginal"
    DOES_NOT_FIT = "does_not_fit"

    @property
    def verb(self) -> str:
        """What a job of this level does, in words."""
        return {"fits": "fits", "marginal": "is marginal", "does_not_fit": "does not fit"}[self.value]


@dataclass(frozen=True, slots=True)
class HostFit:
    """What one node's host needs and has. capacity is None where nobody knows."""

    needed: Line
    capacity: Line | None
    level: Level  # fits where the capacity is not known
    phase: str  # load | step


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and the numbers it was taken on."""

    level: Level
    needed: Line  # bytes the worst GPU needs at its peak
    capacity: Line  # bytes that GPU has
    margin_bytes: float  # capacity - needed
    expected_error: float  # fraction of needed; the band that makes a plan marginal
    error_basis: str  # where the expected error comes from
    binds: str  # the memory line that is largest at the peak
    phase: str  # load | forward | loss | backward | step
    stage: int  # pipeline stage of the worst GPU
    host: HostFit | None = None  # None: the host holds nothing of note

    @property
    def host_decides(self) -> bool:
        """Whether the host's memory, not the GPU's, set the level."""
        return self.binds == HOST


@dataclass(frozen=True, slots=True)
class Assumption:
    """A default nobody stated, and the key that changes it."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Action:
    """A change worth making and what it would bring, found by planning again with it.

    needed, step and rate are lines of that plan; a plan that cannot run has no step and no rate.
    """

    title: str
    changes: Mapping[str, Any]
    level: Level
    needed: Line
    step: Line | None
    rate: Line | None  # tokens per second, of a deployment output tokens

    @classmethod
    def of(cls, title: str, changes: Mapping[str, Any], plan: Plan) -> Action:
        """The change that led to a plan."""
        rate = plan.throughput
        if rate is not None and not plan.serves:
            rate = rate.child("tokens_per_s")
        return cls(title, changes, plan.verdict.level, plan.verdict.needed, plan.time, rate)

    @property
    def needed_bytes(self) -> float:
        """Bytes the worst GPU needs at its peak."""
        return float(self.needed.value)

    @property
    def step_s(self) -> float | None:
        """A step, or the time between two tokens."""
        return None if self.step is None else float(self.step.value)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all GPUs."""
        return None if self.rate is None else float(self.rate.value)

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "title": self.title,
            "changes": dict(self.changes),
            "level": self.level.value,
            "needed_bytes": self.needed_bytes,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What a deployment does at one number of requests in flight: one point of speed against throughput."""

    concurrency: int
    line: Line  # the load; its children are what a user and a GPU see of it
    binds: str
    meets_targets: bool | None  # None: the job states none
    is_job: bool  # the job's own concurrency
    is_most: bool  # the most in flight within the targets
    layout: str = ""  # another one than the plan's, in words

    @property
    def tokens_per_s_per_user(self) -> float:
        """Output tokens a second that one request gets."""
        return float(self.line.child("tokens_per_s_per_user").value)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens a second of all requests, over the GPUs."""
        return float(self.line.child("tokens_per_s_per_gpu").value)

    @property
    def ttft_s(self) -> float:
        """Time to first token once admitted."""
        return float(self.line.child("ttft").value)

    @property
    def tpot_s(self) -> float:
        """Time between two tokens."""
        return float(self.line.child("tpot").value)

    @property
    def queue_s(self) -> float:
        """Mean wait for room in the cache, before the time to first token begins."""
        return float(self.line.child("queue").value)

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "concurrency": self.concurrency,
            "tokens_per_s_per_user": self.tokens_per_s_per_user,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "queue_s": self.queue_s,
            "binds": self.binds,
            "meets_targets": self.meets_targets,
            "is_job": self.is_job,
            "is_most": self.is_most,
            "layout": self.layout,
        }


@dataclass(frozen=True, slots=True)
class PoolShare:
    """What the cards of one kind do in a mixed fleet."""

    gpu: str
    gpus: int
    micro_batch: int
    micro_batches: int
    layers: tuple[int, ...]  # of each of its pipeline stages; empty without a pipeline
    needed_bytes: float
    capacity_bytes: float
    level: Level
    busy_s: float | None  # of a step, without waiting for others


@dataclass(frozen=True, slots=True)
class Split:
    """One way of running on unlike cards; without parts it is not possible, `why` says why not."""

    how: str  # equal | proportional | pipeline | leave out
    fleet: str  # the cards in use
    framework: str
    precision: str
    recompute: str
    parts: tuple[PoolShare, ...] = ()
    level: Level = Level.DOES_NOT_FIT
    global_batch: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    left_out: str | None = None
    wins: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one job on one fleet.

    memory: per-GPU bytes, the largest of the pipeline stages' phases. time: one optimizer step, the
    sum of its parts; of a deployment, the time between two tokens of a request. throughput: samples
    (output tokens) per second; its children are the other rates, utilisation and FLOPs. cost:
    GPU-hours, energy and money of the token budget, or of a day. time, throughput and cost are None
    for a plan that cannot run.
    """

    name: str
    model: Line  # parameters total; children: active and parts
    fleet: str
    gpus: int
    recipe: AnyRecipe
    layout: AnyLayout
    verdict: Verdict
    memory: Line
    time: Line | None
    throughput: Line | None
    cost: Line | None
    speed_error: tuple[float, str] | None  # expected error of time and rates, and what it rests on
    binds: str  # compute | memory bandwidth | link | latency | bubble | data loading | memory capacity
    assumptions: tuple[Assumption, ...]
    actions: tuple[Action, ...]
    notes: tuple[str, ...] = ()
    cache: Line | None = None  # serving: what the cache holds; children: pool, tokens, requests, per token
    loads: tuple[LoadPoint, ...] = ()  # serving: other concurrencies beside the job's own, fewest first
    splits: tuple[Split, ...] = ()  # a mixed fleet: the ways of dividing the run over it, the best first
    reliability: Line | None = None  # goodput of a long run, and what it rests on
    launch: str | None = None  # serving: the engine's own command for this plan

    @property
    def serves(self) -> bool:
        """Whether this is a deployment, not a training run."""
        return not isinstance(self.layout, Layout)

    @property
    def root(self) -> Line:
        """The whole tree under one line."""
        host = self.verdict.host.needed if self.verdict.host is not None else None
        speed = (self.time, self.throughput, self.reliability, self.cost)
        parts = (self.model, self.memory, host, self.cache, *speed)
        held = tuple(line for line in parts if line is not None)
        return Line(name="plan", value=self.verdict.level.value, unit="verdict", children=held)
