"""What the ways of running on unlike cards have in common: the run, how a way is judged, how ways compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpucalc.formulas import compute as f
from gpucalc.plan.answer import Level, PoolShare, Split
from gpucalc.plan.evaluate import Subject, level_of
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.rates import sample_tokens
from gpucalc.plan.unlike import needed_bytes
from gpucalc.spec.hardware import Cluster, Pool
from gpucalc.spec.train_run import TrainRun

BATCH_OFF = 0.2  # shares that miss the batch by more are another run
LEVELS = {Level.FITS: 0, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 2}


@dataclass(frozen=True, slots=True)
class Case:
    """One run on one cluster, its recipe made."""

    subject: Subject
    run: TrainRun
    cluster: Cluster
    recipe: Recipe
    error: float
    batch: int  # samples a step to come near to
    exact: bool  # the job states them

    def capacity(self, pool: Pool) -> float:
        """Bytes a kind has beside what others hold on each card."""
        return float(pool.gpu.usable_memory().value) - self.recipe.in_use_bytes

    def level(self, needed: float, pool: Pool) -> Level:
        """Whether a kind holds so much."""
        return level_of(needed, self.capacity(pool), self.error)

    def share(
        self,
        pool: Pool,
        layout: Layout,
        *,
        layers: tuple[int, ...] = (),
        stages: tuple[int, ...] | None = None,
        micro_batch_s: float,
    ) -> PoolShare:
        """What a kind does of the run: all of it in its layout, or the stages it holds."""
        needed = float(needed_bytes(self.subject.graph, layout, self.recipe, pool, stages).value)
        return PoolShare(
            gpu=pool.gpu.id,
            gpus=pool.count,
            micro_batch=layout.micro_batch,
            micro_batches=layout.micro_batches,
            layers=layers,
            needed_bytes=needed,
            capacity_bytes=self.capacity(pool),
            level=self.level(needed, pool),
            busy_s=layout.micro_batches * micro_batch_s,
        )

    def rate(self, samples: int, step_s: float) -> float:
        """Tokens a second, samples of models without tokens."""
        tokens = samples * sample_tokens(self.subject.graph, self.recipe)
        return float(f.tokens_per_s(tokens=tokens, step_s=step_s))


def order_of(split: Split) -> tuple[int, float]:
    """What fits first, then the fastest; of what does not fit, what lacks least."""
    if split.tokens_per_s is not None:
        return LEVELS[split.level], -split.tokens_per_s
    return LEVELS[split.level], max(
        (part.needed_bytes / part.capacity_bytes for part in split.parts), default=0.0
    )


def near(case: Case, at_once: int) -> int | None:
    """How often so many samples make the batch, None where they do not come near."""
    times = max(1, round(case.batch / at_once))
    off = abs(times * at_once / case.batch - 1)
    return None if off > (0 if case.exact else BATCH_OFF) else times


def split_of(
    case: Case, how: str, parts: Sequence[PoolShare], samples: int, step: Callable[[], float]
) -> Split:
    """The way these parts are; the step is timed where all of them may fit."""
    level = max((part.level for part in parts), key=LEVELS.__getitem__)
    seconds = step() if level is not Level.DOES_NOT_FIT else None
    return Split(
        how,
        fleet_of(case.cluster.pools),
        case.run.framework,
        case.run.precision,
        case.run.recompute,
        parts=tuple(parts),
        level=level,
        global_batch=samples,
        step_s=seconds,
        tokens_per_s=None if seconds is None else case.rate(samples, seconds),
    )


def fleet_of(pools: Sequence[Pool]) -> str:
    """The words that plan so many of each."""
    return "+".join(f"{pool.count}x{pool.gpu.id}" for pool in pools)
