"""The product's own error: every published run against its estimate, per point and in summary.

A point is one quantity of one run; its ratio is estimated over measured, its error the ratio less one.
Rows of a group (one source) are not independent, so the headline statistics give every group the same
weight; row-weighted ones stand beside them. What is compared and how, `validate_training`,
`validate_collectives` and `validate_serving` say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.estimate_serving import ServingPlanner
from gpucalc.estimate_training import TrainingPlanner
from gpucalc.measured import COLLECTIVES, SERVING, TRAINING, Conventions, Row, read_rows, shipped
from gpucalc.measured_collectives import LARGE, SMALL, CollectivePlanner, is_collective
from gpucalc.measured_deployments import ServingNormaliser
from gpucalc.measured_runs import Normaliser, conventions_of
from gpucalc.measured_serving import is_serving
from gpucalc.plan.evaluate import ErrorTable
from gpucalc.points import Point, Skipped, Statistics, statistics, tally
from gpucalc.validate_collectives import compare_collectives
from gpucalc.validate_serving import QUANTITIES as SERVING_QUANTITIES
from gpucalc.validate_serving import Start, compare_serving, promises_broken, start_counts
from gpucalc.validate_training import QUANTITIES as TRAINING_QUANTITIES
from gpucalc.validate_training import Estimator, FitCase, compare_training, fit_counts

SCHEMA_VERSION = 1
QUANTITIES = (*TRAINING_QUANTITIES, "collective", *SERVING_QUANTITIES)
PARTS = ("group", "framework", "arch", "gpu", "model", "quant", "op", "link", "size")
_SUMMARY_PARTS = {
    "collective": ("size", "op", "link", "arch", "group"),
    **dict.fromkeys(SERVING_QUANTITIES, ("framework", "arch", "gpu", "quant", "group")),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the estimates promise over groups of equal weight; `skipped` is a share of all rows.

    Collectives promise a mean, over groups and over values alike: 1 MB and more, and below.
    """

    peak_memory_median: float = 0.08
    throughput_median: float = 0.10
    collective_large_mean: float = 0.10
    collective_small_mean: float = 0.20
    skipped: float = 0.20


@dataclass(frozen=True, slots=True)
class Report:
    """Every comparison made, every one that was not, and the statistics of both."""

    rows: int  # read and selected
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]
    fits: tuple[FitCase, ...]
    quantities: tuple[str, ...] = QUANTITIES
    files: tuple[str, ...] = field(default=())
    undecided: tuple[Skipped, ...] = ()  # known to fit or not, but without a fact the verdict needs
    starts: tuple[Start, ...] = ()  # deployments known to have started or not

    def of(self, quantity: str) -> tuple[Point, ...]:
        """The points of one quantity."""
        return tuple(point for point in self.points if point.quantity == quantity)

    def summary(self, quantity: str) -> Statistics:
        """The statistics of one quantity over everything."""
        left_out = sum(1 for one in self.skipped if one.quantity == quantity)
        return statistics(self.of(quantity), skipped=left_out)

    def breakdown(self, quantity: str, part: str) -> dict[str, Statistics]:
        """The statistics by one of PARTS, the largest error first; empty where it says nothing."""
        cells: dict[str, list[Point]] = {}
        for point in self.of(quantity):
            if name := getattr(point, part):
                cells.setdefault(name, []).append(point)
        found = {name: statistics(points) for name, points in cells.items()}
        return dict(sorted(found.items(), key=lambda item: -(item[1].median_abs or 0.0)))

    def reasons(self, quantity: str | None = None) -> dict[str, int]:
        """How many rows were skipped for each reason, the commonest first."""
        return tally(one for one in self.skipped if quantity is None or one.quantity == quantity)

    @property
    def rows_skipped(self) -> int:
        """Rows with something measured of which nothing was compared."""
        compared = {point.id for point in self.points} | {start.id for start in self.starts}
        return len({one.id for one in self.skipped} - compared)

    def broken(self, bounds: Bounds | None = None) -> tuple[str, ...]:
        """The promises these comparisons break, as sentences."""
        promised = bounds or Bounds()
        out = []
        for quantity, limit in (
            ("peak_memory", promised.peak_memory_median),
            ("throughput", promised.throughput_median),
        ):
            median = self.summary(quantity).median_abs
            if quantity in self.quantities and median is not None and median > limit:
                out.append(f"{quantity}: median error {median:.1%} is above {limit:.0%}")
        if "collective" in self.quantities:
            by_size = self.breakdown("collective", "size")
            for size, limit in (
                (LARGE, promised.collective_large_mean),
                (SMALL, promised.collective_small_mean),
            ):
                found = by_size.get(size)
                mean = max(found.mean_abs or 0.0, found.mean_abs_rows or 0.0) if found else 0.0
                if mean > limit:
                    out.append(f"collective {size}: mean error {mean:.1%} is above {limit:.0%}")
        out += promises_broken({name: self.summary(name) for name in self.quantities}, self.starts)
        if self.rows and self.rows_skipped > promised.skipped * self.rows:
            out.append(f"{self.rows_skipped} of {self.rows} rows skipped, above {promised.skipped:.0%}")
        return tuple(out)

    def document(self) -> dict[str, Any]:
        """The report as a JSON document. Ratios and errors are fractions."""
        summary: dict[str, Any] = {}
        for quantity in self.quantities:
            summary[quantity] = self.summary(quantity).document() | {
                f"by_{part}": {
                    name: found.document() for name, found in sorted(self.breakdown(quantity, part).items())
                }
                for part in _SUMMARY_PARTS.get(quantity, ("framework", "arch", "group"))
            }
        if "verdict" in summary:
            summary["verdict"] = start_counts(self.starts) | {"skipped": self.summary("verdict").skipped}
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": self.rows,
            "rows_skipped": self.rows_skipped,
            "summary": summary,
            "fits": fit_counts(self.fits),
            "skip_reasons": {quantity: self.reasons(quantity) for quantity in self.quantities},
            "undecided_reasons": tally(self.undecided),
            "points": [point.document() for point in self.points],
            "starts": [start.document() for start in self.starts],
            "skipped": [
                {"id": one.id, "quantity": one.quantity, "reason": one.reason, "group": one.group}
                for one in self.skipped
            ],
        }


def validate(
    paths: Iterable[str | Path] = (),
    *,
    catalog: Catalog,
    quantities: Sequence[str] = QUANTITIES,
    where: Mapping[str, str] | None = None,
    estimator: Estimator | None = None,
    conventions: Conventions | None = None,
    errors: ErrorTable | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare what was measured in these files, by default in the shipped ones, with its estimate.

    `where` keeps the rows whose field has the value (text may hold *): group, framework, gpu, model,
    quality, or any dotted path. `errors`: the margins of the verdicts, a cautious one where none is given.
    `progress` is told how many rows are done, of how many.
    Raises InputError for files or filters that cannot be used.
    """
    for quantity in quantities:
        if quantity not in QUANTITIES:
            near = nearest(quantity, QUANTITIES)
            raise UnknownName(
                "no such quantity", where="--quantity", given=quantity, legal=QUANTITIES, near=near
            )
    files = [Path(path) for path in paths] or _shipped(catalog, quantities)
    if not files:
        raise InputError("the catalogue holds no measurements", legal="files of measured runs")
    every = list(read_rows(files))
    read = [row for row in every if _selected(row, where or {})]
    if not read:
        raise _none_selected(every, where or {})
    rows = [row for row in read if not is_collective(row) and not is_serving(row)]
    served = [row for row in read if is_serving(row)] if set(quantities) & set(SERVING_QUANTITIES) else []
    curves = [row for row in read if is_collective(row)] if "collective" in quantities else []
    done = 0

    def each(rows: Sequence[Row]) -> Iterator[Row]:
        nonlocal done
        for row in rows:
            yield row
            done += 1
            if progress is not None:
                progress(done, len(compared))

    compared = (*rows, *served, *curves)
    known = conventions if conventions is not None else conventions_of(catalog)
    trained = compare_training(
        each(rows),
        normaliser=Normaliser(catalog, known),
        estimator=estimator or TrainingPlanner(catalog),
        quantities=quantities,
        errors=errors,
    )
    points, skipped = compare_collectives(each(curves), CollectivePlanner(catalog))
    serving = compare_serving(
        each(served), ServingNormaliser.of(catalog), ServingPlanner(catalog), quantities
    )
    return Report(
        len(compared),
        trained.points + points + serving.points,
        trained.skipped + skipped + serving.skipped,
        trained.fits,
        tuple(quantities),
        tuple(str(path) for path in files),
        trained.undecided,
        serving.starts,
    )


def _shipped(catalog: Catalog, quantities: Sequence[str]) -> list[Path]:
    runs = shipped(catalog, TRAINING) if any(name in TRAINING_QUANTITIES for name in quantities) else ()
    curves = shipped(catalog, COLLECTIVES) if "collective" in quantities else ()
    served = shipped(catalog, SERVING) if any(name in SERVING_QUANTITIES for name in quantities) else ()
    return [*runs, *curves, *served]


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """The filters in `--where key=value` flags. Raises InputError."""
    out: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise InputError("is not KEY=VALUE", where="--where", given=text, legal="such as group=lfoundry")
        out[key.strip()] = value.strip()
    return out


_OWN = ("group", "gpu", "model")  # said in several ways; a row knows them by these names
MOST_NAMED = 20  # values that an error lists
_SHORT = {key: f"run.{key}" for key in ("framework", "precision", "stack", "quant")}


def _selected(row: Row, where: Mapping[str, str]) -> bool:
    return all(fnmatchcase(_field(row, key).casefold(), value.casefold()) for key, value in where.items())


def _none_selected(rows: Sequence[Row], where: Mapping[str, str]) -> InputError:
    """Which filter no run meets: its key is not one of theirs, or none has the value."""
    for key, wanted in where.items():
        values = sorted({_field(row, key) for row in rows} - {""})
        if not values:
            keys = sorted({*_SHORT, *_OWN, *(key for row in rows for key in row.data)})
            return UnknownName("no run has this key", where="--where", given=key, near=nearest(key, keys))
        if not any(fnmatchcase(value.casefold(), wanted.casefold()) for value in values):
            legal = values if len(values) <= MOST_NAMED else f"one of {len(values)} values, * for any letters"
            near = nearest(wanted, values)
            return UnknownName(
                "no run has this value", where="--where", key=key, given=wanted, legal=legal, near=near
            )
    given = " ".join(f"{key}={value}" for key, value in where.items())
    return InputError("no run meets all of these", where="--where", given=given)


def _field(row: Row, key: str) -> str:
    if key == "group":
        return row.group
    if key == "gpu":
        return row.gpu
    if key == "model":
        return row.model
    value = row.get(_SHORT.get(key, key))
    return "" if value is None else str(value)
