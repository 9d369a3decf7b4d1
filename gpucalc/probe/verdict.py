"""What the records of a feasibility test come to: predicted against measured, findings, a verdict.

The limits are conventions, not measurements; each is named here and said with what it judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

from gpucalc.formulas import calibration as f
from gpucalc.probe.device import DOUBTFUL_THROTTLES
from gpucalc.probe.lag import RUNNING
from gpucalc.units import percent, seconds

Record = Mapping[str, Any]

# Assumed: beyond run-to-run noise of a healthy machine, short of what a job would notice by itself.
DRIFT = 0.05  # of throughput between the first and last quarter of a soak
FRAGMENTATION = 0.10  # of reserved memory, more idle at the end than after the start
APART_C = 10.0  # between the medians of the hottest and the coolest card
UNLIKE = 0.10  # a card slower than the median of all by more
_QUARTER = 4  # windows a soak needs to show a drift

ROWS = (
    ("peak_allocated_bytes", "peak memory, tensors", "bytes", "memory"),
    ("peak_reserved_bytes", "peak memory, reserved", "bytes", "memory"),
    ("step_s", "step", "s", "time"),
    ("tokens_per_s", "throughput", "tokens/s", ""),  # the step in other words
    ("sync_s", "gradient exchange", "s", ""),
    ("sync_exposed_s", "added to the step", "s", ""),
    ("sync_share", "share of the step", "fraction", ""),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity, as planned and as measured; `within` is None where no error is known."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None
    deviation: float | None
    expected_error: float | None
    within: bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something the test showed: `fail` ends in a no, `look` asks for a look."""

    level: str
    stage: str
    text: str


@dataclass(slots=True)
class Soak:
    """A soak in numbers. Fields stay None where nothing was read."""

    hours: float
    asked_hours: float
    windows: int
    tokens_per_s: float
    planned_tokens_per_s: float | None = None
    drift: float | None = None
    fragmentation_first: float | None = None
    fragmentation_last: float | None = None
    process_growth_bytes: int | None = None
    temperature_max_c: float | None = None
    temperature_apart_c: float | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    throttled: dict[str, int] = field(default_factory=dict)  # windows by reason
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    xid: list[int] | None = None
    not_read: dict[str, str] = field(default_factory=dict)
    failure_free_gpu_h: float | None = None  # mean time between failures shown at 95 %


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a test, whole or in part."""

    job: str
    device: str
    ranks: int
    card: str
    changes: tuple[str, ...]
    stages: tuple[tuple[str, str, tuple[Row, ...]], ...]  # name, what was trained, rows
    soak: Soak | None
    findings: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """passed | look (passed, with findings) | failed | incomplete."""
        if any(item.level == "fail" for item in self.findings):
            return "failed"
        if self.missing:
            return "incomplete"
        return "look" if self.findings else "passed"

    def document(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "job": self.job,
            "device": self.device,
            "ranks": self.ranks,
            "card": self.card,
            "verdict": self.verdict,
            "changes": list(self.changes),
            "stages": [
                {"stage": name, "trained": words, "rows": [asdict(row) for row in rows]}
                for name, words, rows in self.stages
            ],
            "soak": asdict(self.soak) if self.soak is not None else None,
            "findings": [asdict(item) for item in self.findings],
            "missing": list(self.missing),
        }


def summary(records: Sequence[Record], *, soak_s: float) -> Summary:
    """What the records show of the test their first line describes."""
    head = next(record for record in records if record["kind"] == "stages")
    findings: list[Finding] = []
    stages, missing = [], []
    for name, told in head["predicted"].items():
        found = next((r for r in records if r["kind"] == "stage" and r["stage"] == name), None)
        if found is None:
            missing.append(name)
            continue
        rows = tuple(_rows(told, found))
        stages.append((name, head["trained"][name], rows))
        findings += _of_stage(name, found, rows)
    timed = head["device"] == "cuda"  # ranks on one CPU take each other's cores
    for record in records:
        if record["kind"] == "cards":
            findings += _unlike(record, timed=timed)
    windows = [record for record in records if record["kind"] == "window"]
    soak = None
    if windows:
        soak = _soak(windows, head["ranks"] if head["device"] == "cuda" else 0, soak_s)
        soak.planned_tokens_per_s = list(head["predicted"].values())[-1].get("tokens_per_s")
        findings += _of_soak(soak, windows, timed=timed)
    if soak_s and (soak is None or soak.hours < soak.asked_hours):
        done = seconds(windows[-1]["elapsed_s"]) if windows else "nothing"
        missing.append(f"soak: {done} of {seconds(soak_s)}")
    ended = [record for record in records if record["kind"] == "failure"]
    findings += [Finding("fail", "run", str(record["why"])) for record in ended]
    return Summary(
        job=head["job"],
        device=head["device"],
        ranks=head["ranks"],
        card=head["card"],
        changes=tuple(head["changes"]),
        stages=tuple(stages),
        soak=soak,
        findings=tuple(findings),
        missing=tuple(missing),
    )


def _rows(told: Record, found: Record) -> Iterator[Row]:
    for key, name, unit, error in ROWS:
        predicted, measured = told.get(key), found.get(key)
        if predicted is None and measured is None:
            continue
        off = float(f.deviation(measured=measured, predicted=predicted)) if predicted and measured else None
        expected = told.get(f"{error}_error_fraction") if error else None
        within = None if off is None or expected is None else abs(off) <= expected
        yield Row(name, unit, predicted, measured, off, expected, within)


def _of_stage(name: str, found: Record, rows: Iterable[Row]) -> Iterator[Finding]:
    if not found["finite"]:
        yield Finding("fail", name, f"the loss is not finite ({found['last_loss']})")
    for row in rows:
        if row.within is False and row.deviation is not None and row.expected_error is not None:
            side = "above" if row.deviation > 0 else "below"
            yield Finding(
                "look",
                name,
                f"{row.name} is {percent(abs(row.deviation), 0)} {side} the plan,"
                f" which expects to be off by {percent(row.expected_error, 0)}",
            )


def _unlike(record: Record, *, timed: bool) -> Iterator[Finding]:
    """Cards whose step takes longer than the others' when each works alone."""
    ranks = record["ranks"]
    if len(ranks) < 2 or record["stage"] != "alone":
        return
    usual = median(one["step_s"] for one in ranks)
    for one in ranks:
        if not one["finite"]:
            yield Finding("fail", "alone", f"rank {one['rank']}: the loss is not finite")
        off = float(f.deviation(measured=one["step_s"], predicted=usual))
        if timed and off > UNLIKE:
            yield Finding(
                "look", "alone", f"rank {one['rank']} takes {percent(off, 0)} longer than the median card"
            )


def _soak(windows: Sequence[Record], gpus: int, asked_s: float) -> Soak:
    rates = [window["tokens_per_s"] for window in windows]
    hours = windows[-1]["elapsed_s"] / 3600
    found = Soak(hours, asked_s / 3600, len(windows), median(rates))
    every = [one for window in windows for one in window["ranks"]]
    part = len(windows) // _QUARTER
    if part:
        found.drift = float(f.drift(first=median(rates[:part]), last=median(rates[-part:])))
    shares = [max((one["fragmentation"] for one in w["ranks"] if "fragmentation" in one), default=None)
              for w in windows]  # fmt: skip
    known = [share for share in shares if share is not None]
    if known:
        found.fragmentation_first, found.fragmentation_last = known[0], known[-1]
    sizes = [sum(one["process_bytes"] for one in w["ranks"]) for w in windows
             if all("process_bytes" in one for one in w["ranks"])]  # fmt: skip
    if sizes:
        found.process_growth_bytes = sizes[-1] - sizes[0]
    if heat := [one["temperature_c"] for one in every if "temperature_c" in one]:
        found.temperature_max_c = max(heat)
        medians = [median(values) for values in _by_rank(windows, "temperature_c") if values]
        found.temperature_apart_c = max(medians) - min(medians)
    if power := [one["power_w"] for one in every if "power_w" in one]:
        found.power_mean_w, found.power_max_w = mean(power), max(power)
    for window in windows:
        for reason in {reason for one in window["ranks"] for reason in one.get("throttled_by", ())}:
            found.throttled[reason] = found.throttled.get(reason, 0) + 1
    found.ecc_corrected = _risen(windows, "ecc_corrected")
    found.ecc_uncorrected = _risen(windows, "ecc_uncorrected")
    found.remapped_rows = _risen(windows, "remapped_rows")
    if any("xid" in one for one in every):
        found.xid = [number for one in every for number in one.get("xid", ())]
    for one in every:
        found.not_read |= one.get("not_read", {})
    if gpus:
        found.failure_free_gpu_h = float(f.mtbf_bound_gpu_h(hours=hours, gpus=gpus))
    return found


def _by_rank(windows: Sequence[Record], key: str) -> list[list[Any]]:
    count = max(len(window["ranks"]) for window in windows)
    return [
        [one[key] for window in windows for one in window["ranks"] if one["rank"] == rank and key in one]
        for rank in range(count)
    ]


def _risen(windows: Sequence[Record], key: str) -> int | None:
    """By how much a counter rose, over all cards. A driver that was started again counts from zero."""
    series = [values for values in _by_rank(windows, key) if values]
    if not series:
        return None
    return sum(max(0, int(after - before)) for values in series for before, after in pairwise(values))


def _of_soak(soak: Soak, windows: Sequence[Record], *, timed: bool) -> Iterator[Finding]:
    def found(level: str, text: str) -> Finding:
        return Finding(level, "soak", text)

    broken = [w["window"] for w in windows if not all(one["finite"] for one in w["ranks"])]
    if broken:
        yield found("fail", f"the loss is not finite in window {broken[0]}")
    if soak.ecc_uncorrected:
        yield found("fail", f"{soak.ecc_uncorrected} uncorrected memory errors")
    if soak.xid:
        numbers = ", ".join(str(number) for number in dict.fromkeys(soak.xid))
        yield found("fail", f"Xid {numbers}: see the kernel log")
    if timed and soak.drift is not None and soak.drift < -DRIFT:
        yield found("look", f"throughput fell by {percent(-soak.drift)} from the first to the last quarter")
    first, last = soak.fragmentation_first, soak.fragmentation_last
    if first is not None and last is not None and last - first > FRAGMENTATION:
        yield found("look", f"idle share of reserved memory rose from {percent(first)} to {percent(last)}")
    if soak.temperature_apart_c is not None and soak.temperature_apart_c > APART_C:
        apart = f"{soak.temperature_apart_c:.0f} C"
        yield found("look", f"the cards are {apart} apart: look at the airflow")
    for reason, count in soak.throttled.items():
        if reason in DOUBTFUL_THROTTLES:
            yield found("look", f"{reason} in {count} of {soak.windows} windows")
    if soak.remapped_rows:
        yield found("look", f"{soak.remapped_rows} memory rows were remapped")
    slow = [rank for window in windows for rank in window["slow_ranks"]]
    for rank in sorted(set(slow)):
        if timed and slow.count(rank) >= max(RUNNING, len(windows) // 10):
            yield found("look", f"rank {rank} lagged in {slow.count(rank)} of {soak.windows} windows")
