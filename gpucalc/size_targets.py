"""What a fleet has to reach: tokens by a deadline, a rate, requests, money. Words in, misses out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gpucalc.errors import InputError
from gpucalc.formulas import cost as money
from gpucalc.jobs import ResolvedJob
from gpucalc.plan.answer import Level, Plan
from gpucalc.spec.run_values import MAX_TOKENS
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import parse_count, percent, seconds

HOUR_S = 3600.0
_UNITS_S = {"s": 1.0, "min": 60.0, "h": HOUR_S, "d": 24 * HOUR_S, "w": 7 * 24 * HOUR_S}
_WORDS = {"seconds": "s", "second": "s", "minutes": "min", "minute": "min", "hours": "h", "hour": "h"}
_WORDS |= {"days": "d", "day": "d", "weeks": "w", "week": "w"}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]{1,3})?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Targets:
    """What is asked of a fleet; None for what is not."""

    tokens: int | None = None  # to train on
    by_s: float | None = None  # wall time of them
    per_s: float | None = None  # tokens (samples of models without tokens) a second
    requests_per_s: float | None = None
    budget_usd: float | None = None  # for all the tokens
    usd_per_hour: float | None = None  # of the whole fleet

    @property
    def required_per_s(self) -> float | None:
        """The tokens per second that the rate and the deadline come to."""
        paced = self.tokens / self.by_s if self.tokens is not None and self.by_s is not None else None
        return max((rate for rate in (self.per_s, paced) if rate is not None), default=None)

    @property
    def asks_money(self) -> bool:
        """Whether a fleet without a price cannot be said to meet them."""
        return self.budget_usd is not None or self.usd_per_hour is not None

    def document(self) -> dict[str, float | int | None]:
        """The same for a JSON document."""
        return {
            "tokens": self.tokens,
            "by_s": self.by_s,
            "tokens_per_s": self.per_s,
            "requests_per_s": self.requests_per_s,
            "budget_usd": self.budget_usd,
            "usd_per_hour": self.usd_per_hour,
        }


def parse_targets(
    job: ResolvedJob,
    *,
    tokens: str | None = None,
    by: str | None = None,
    throughput: str | None = None,
    requests: float | None = None,
    budget: float | None = None,
    max_price: float | None = None,
) -> Targets:
    """The targets the flags state for a job. Raises InputError for what says nothing of its task."""
    run = job.run
    trains = isinstance(run, TrainRun)
    for flag, value, of_training in (
        ("--tokens", tokens, True),
        ("--by", by, True),
        ("--budget", budget, True),
        ("--requests", requests, False),
    ):
        if value is not None and trains != of_training:
            task = "training" if of_training else "serving"
            raise InputError(f"says nothing of a {run.task} run", where=flag, legal=f"a {task} job")
    for flag, number in (("--requests", requests), ("--budget", budget), ("--max-price", max_price)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise InputError("must be a number above 0", where=flag, given=number)
    stated = run.tokens if isinstance(run, TrainRun) else None
    total = stated if tokens is None else _count(tokens, "--tokens")
    for flag, value in (("--by", by), ("--budget", budget)):
        if value is not None and total is None:
            raise InputError("goes with a token budget", where=flag, legal="--tokens N, or run.tokens")
    if total is not None and not 1 <= total <= MAX_TOKENS:
        raise InputError("must be a token budget", where="--tokens", given=tokens, legal=f"1 to {MAX_TOKENS}")
    return Targets(
        tokens=None if total is None else int(total),
        by_s=None if by is None else parse_duration(by, "--by"),
        per_s=None if throughput is None else _count(throughput, "--throughput"),
        requests_per_s=requests,
        budget_usd=budget,
        usd_per_hour=max_price,
    )


def parse_duration(text: str, where: str) -> float:
    """Seconds of a duration such as 36h, 30 days, 2.5d. Raises InputError."""
    legal = "a number with s, min, h, days or weeks, such as 36h or 30 days"
    match = _AMOUNT.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    unit = _WORDS.get(unit, unit)
    if match is None or unit not in _UNITS_S or float(match[1]) <= 0 or math.isinf(float(match[1])):
        raise InputError("is not a duration", where=where, given=text, legal=legal)
    return float(match[1]) * _UNITS_S[unit]


def _count(text: str, where: str) -> float:
    value = parse_count(text)
    if value is None or not 0 < value < math.inf:
        legal = "a number, which may end in k, M, B or T: 15T, 1.5e12"
        raise InputError("is not a count", where=where, given=text, legal=legal)
    return value


# -- what a plan reaches --------------------------------------------------------------------------


def rate_of(plan: Plan) -> float:
    """Tokens per second: trained, or put out within the latencies asked for, where some load is."""
    assert plan.throughput is not None
    if not plan.serves:
        return float(plan.throughput.child("tokens_per_s").value)
    return _child(plan, "tokens_per_s_at_targets") or float(plan.throughput.value)


def wall_s(plan: Plan, tokens: int, slower: float = 1.0) -> float:
    """Wall time of whole steps for so many tokens, each step `slower` times the estimate.

    With the time that failures and checkpoints take, where the plan of the budget says it.
    """
    assert plan.time is not None
    assert plan.throughput is not None
    per_step = float(_value(plan.throughput.child("tokens_per_s").inputs["tokens"]))
    step = float(plan.time.value) * slower
    training = float(money.training_s(tokens=tokens, tokens_per_step=per_step, step_s=step))
    if plan.reliability is None:
        return training
    kept = float(plan.reliability.child("goodput").value)
    return float(money.wall_clock_s(training_s=training, goodput=kept)) if kept else math.inf


def misses(plan: Plan, run: TrainRun | ServeRun, targets: Targets, slower: float = 1.0) -> tuple[str, ...]:
    """The targets of speed a plan misses where everything takes `slower` times the estimate, in words."""
    if plan.verdict.level is Level.DOES_NOT_FIT:
        return ("does not fit",)
    if plan.throughput is None or plan.time is None:
        # A run whose speed nobody can tell is mostly one the card has no arithmetic for.
        return ("its speed is not known",)
    found: list[str] = []
    if targets.tokens is not None and targets.by_s is not None:
        wall = wall_s(plan, targets.tokens, slower)
        if wall > targets.by_s:
            if math.isinf(wall):
                found.append("is interrupted before it gets anywhere")
            else:
                over = percent(wall / targets.by_s - 1, 1)
                found.append(f"takes {seconds(wall)}, {over} more than the {seconds(targets.by_s)} allowed")
    rate = rate_of(plan) / slower
    if targets.per_s is not None and rate < targets.per_s:
        found.append(f"{rate:,.0f} tokens/s, {targets.per_s:,.0f} asked")
    if isinstance(run, ServeRun):
        found += _serving_misses(plan, run, targets, slower)
    return tuple(found)


def run_asked(run: TrainRun | ServeRun) -> tuple[str, ...]:
    """What is run, in words: what the size of a fleet hangs on beside the model."""
    if isinstance(run, ServeRun):
        said = [run.framework, run.quant or run.dtype]
        lengths = [(run.isl, "tokens in"), (run.osl, "tokens out")]
        return ("serve", *said, *(f"{count:,} {what}" for count, what in lengths if count is not None))
    said = [run.framework, *([run.method] if run.method != "full" else []), run.precision, run.optimizer]
    return ("train", *said, *([f"seq_len {run.seq_len}"] if run.seq_len is not None else []))


def latencies_asked(run: TrainRun | ServeRun) -> tuple[str, ...]:
    """What a serving job itself asks, in words; nothing of a training run."""
    if isinstance(run, TrainRun):
        return ()
    asked = [] if run.concurrency is None else [f"{run.concurrency:,} requests in flight"]
    if run.ttft_ms is not None:
        asked.append(f"first token within {run.ttft_ms:g} ms")
    if run.tpot_ms is not None:
        asked.append(f"{run.tpot_ms:g} ms a token")
    return tuple(asked)


def _serving_misses(plan: Plan, run: ServeRun, targets: Targets, slower: float) -> list[str]:
    found: list[str] = []
    names = ("requests_per_s_at_targets", "requests_per_s_at_most", "requests_per_s")
    served = next((rate for name in names if (rate := _child(plan, name)) is not None), None)
    if targets.requests_per_s is not None and (served is None or served / slower < targets.requests_per_s):
        told = "requests/s not known" if served is None else f"{served / slower:,.2f} requests/s"
        found.append(f"{told}, {targets.requests_per_s:g} asked")
    running = _child(plan, "running_requests")
    if run.concurrency is not None and running is not None and running < run.concurrency:
        found.append(f"{running:,.0f} requests in flight, {run.concurrency:,} asked")
    # Queueing belongs to the first token: a request waits for the prompts before it.
    first = ((_child(plan, "ttft") or 0.0) + (_child(plan, "queue") or 0.0)) * slower * 1e3
    if run.ttft_ms is not None and first > run.ttft_ms:
        found.append(f"first token after {first:,.0f} ms, {run.ttft_ms:g} allowed")
    token = (_child(plan, "tpot") or 0.0) * slower * 1e3
    if run.tpot_ms is not None and token > run.tpot_ms:
        found.append(f"{token:,.1f} ms a token, {run.tpot_ms:g} allowed")
    return found


def _child(plan: Plan, name: str) -> float | None:
    """The number of a rate by name, None where the plan has none."""
    assert plan.throughput is not None
    return next((float(line.value) for line in plan.throughput.children if line.name == name), None)


def _value(item: object) -> float:
    return float(getattr(item, "value", item))  # type: ignore[arg-type]
