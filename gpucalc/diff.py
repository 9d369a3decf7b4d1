"""What moved between two plans: the verdict first, then every line, with how much and which way.

Plans are read alike from a job that was just planned and from the JSON document of an earlier
plan, so that either side may be old.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.catalog_names import KINDS
from gpucalc.errors import InputError
from gpucalc.jobs import ResolvedJob, resolve, resolve_data
from gpucalc.line import Line
from gpucalc.plan.answer import Level, Plan
from gpucalc.planner import plan_job
from gpucalc.spec.yamlio import MAX_BYTES, parse_yaml, read_text

SAME = 1e-9  # relative: below it a number did not move
WORSE = 0.01  # of speed and cost: what counts as a regression
MAX_PLAN_BYTES = 64 * 2**20

# Lines a reader looks at first, by the end of their path; of those with a better way, that way.
HEADLINES: dict[str, int] = {
    "step": 0,
    "throughput": 1,
    "tokens_per_s": 1,
    "output_tokens_per_s": 1,
    "ttft": -1,
    "tpot": -1,
    "kv_tokens": 1,
    "max_concurrency": 1,
    "rental_per_million_tokens": -1,
}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two plans, flat: what was chosen and every line by its path."""

    label: str
    level: str
    verdict: Mapping[str, Any]
    choices: Mapping[str, Any]  # layout, recipe, fleet, assumptions
    lines: Mapping[str, tuple[Any, str]]  # path -> value, unit


@dataclass(frozen=True, slots=True)
class Move:
    """A line that moved. None: the line is on one side only."""

    path: str
    unit: str
    old: Any
    new: Any

    @property
    def delta(self) -> float | None:
        """How far, in the unit."""
        return self.new - self.old if self.old is not None and self.new is not None else None

    @property
    def ratio(self) -> float | None:
        """new / old."""
        return self.new / self.old if self.delta is not None and self.old else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything that moved between two plans."""

    old: Side
    new: Side
    verdict_changed: bool
    choices: tuple[tuple[str, Any, Any], ...]
    headlines: tuple[Move, ...]
    moves: tuple[Move, ...]
    regressions: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing moved."""
        return not (self.verdict_changed or self.choices or self.moves)


def compare(old: Side, new: Side) -> Difference:
    """What moved from the old side to the new one."""
    moves = tuple(_moves(old.lines, new.lines))
    keys = dict.fromkeys([*old.choices, *new.choices])
    choices = tuple(
        (key, old.choices.get(key), new.choices.get(key))
        for key in keys
        if old.choices.get(key) != new.choices.get(key)
    )
    by_path = {move.path: move for move in moves}
    headlines = [_needed(old, new), *(by_path[path] for path in _headline_paths(old, new) if path in by_path)]
    changed = old.level != new.level
    return Difference(
        old=old,
        new=new,
        verdict_changed=changed,
        choices=choices,
        headlines=tuple(move for move in headlines if move is not None),
        moves=moves,
        regressions=tuple(_regressions(old, new)),
    )


def _moves(old: Mapping[str, tuple[Any, str]], new: Mapping[str, tuple[Any, str]]) -> Iterator[Move]:
    for path in dict.fromkeys([*old, *new]):
        before, after = old.get(path), new.get(path)
        if before is None or after is None:
            unit = (before or after or (None, ""))[1]
            yield Move(path, unit, before[0] if before else None, after[0] if after else None)
        elif before[1] != after[1]:
            yield Move(path, before[1], before[0], None)
            yield Move(path, after[1], None, after[0])
        elif abs(after[0] - before[0]) > SAME * max(abs(before[0]), abs(after[0])):
            yield Move(path, before[1], before[0], after[0])


def _needed(old: Side, new: Side) -> Move | None:
    before, after = old.verdict.get("needed_bytes"), new.verdict.get("needed_bytes")
    if before is None or after is None or abs(after - before) <= SAME * abs(before):
        return None
    return Move("verdict.needed", "bytes", before, after)


def _headline_paths(old: Side, new: Side) -> list[str]:
    known = dict.fromkeys([*old.lines, *new.lines])
    return [path for path in known if path.rpartition(".")[2] in HEADLINES and path.count(".") < 2]


def _regressions(old: Side, new: Side) -> Iterator[str]:
    """What got worse. Speed lost to make a job fit is its price, not a regression."""
    order = [level.value for level in Level]
    if order.index(new.level) > order.index(old.level):
        yield f"the verdict went from {_said(old.level)} to {_said(new.level)}"
    if order.index(new.level) < order.index(old.level):
        return
    named: set[str] = set()
    for path in _headline_paths(old, new):
        name = path.rpartition(".")[2]
        before, after = old.lines.get(path), new.lines.get(path)
        if name in named or before is None or after is None or not before[0]:
            continue
        if (after[0] / before[0] - 1) * HEADLINES[name] < -WORSE:
            named.add(name)
            yield f"{path} went from {before[0]:.5g} to {after[0]:.5g} {after[1]}"


def _said(level: str) -> str:
    return level.replace("_", " ")


# -- sides ----------------------------------------------------------------------------------------


def side(
    argument: str,
    catalog: Catalog,
    *,
    gpus: str | None = None,
    sets: tuple[str, ...] = (),
    task: str | None = None,
) -> Side:
    """The plan an argument stands for: a plan's JSON, REVISION:FILE of git, or a JOB. Raises InputError."""
    path = Path(argument)
    if path.suffix == ".json" and os.path.isfile(path) and (found := _document(path)) is not None:
        if gpus is not None or sets or task is not None:
            raise InputError("is a plan already; flags cannot change it", where=argument)
        return found
    there = os.path.exists(path)  # False for names no file can have
    if ":" in argument and not there:
        if gpus is not None or sets or task is not None:
            raise InputError("flags cannot change a file of a revision", where=argument)
        job = _at_revision(argument, catalog)
    else:
        # A shipped job stays that job when its GPUs change: the other side is read without the flag.
        shipped = gpus is not None and not there and argument.casefold() in catalog.names("jobs")
        name = f"jobs/{argument.casefold()}" if shipped else argument
        job = resolve(name, catalog, gpus=gpus, task=task, sets=sets)
    return of_plan(argument, plan_job(job, catalog, advice=False))


def with_calibration(folder: str, job: str, catalog: Catalog) -> Side:
    """The plan of a job where a folder's figures come before the catalogue's. Raises InputError."""
    path = Path(folder)
    if not any(os.path.isdir(path / kind) for kind in KINDS):
        raise InputError(
            "holds no catalogue files", where=folder, legal=f"a folder with any of {', '.join(KINDS)}"
        )
    over = Catalog((path, *catalog.roots))
    return of_plan(f"{job} with {folder}", plan_job(resolve(job, over), over, advice=False))


def of_plan(label: str, plan: Plan) -> Side:
    """A plan that was just made."""
    verdict = plan.verdict
    flat: dict[str, tuple[Any, str]] = {}
    for child in plan.root.children:
        _flatten(child, "", flat)
    return Side(
        label=label,
        level=verdict.level.value,
        verdict={
            "needed_bytes": float(verdict.needed.value),
            "capacity_bytes": float(verdict.capacity.value),
            "phase": verdict.phase,
            "binds": verdict.binds,
        },
        choices=_choices(
            plan.fleet,
            plan.gpus,
            _fields(plan.layout),
            _fields(plan.recipe),
            {item.key: item.value for item in plan.assumptions if item.key.startswith("run.")},
        ),
        lines=flat,
    )


def _flatten(line: Line, above: str, found: dict[str, tuple[Any, str]]) -> None:
    path = f"{above}.{line.name}" if above else line.name
    _add(found, path, line.value, line.unit)
    for child in line.children:
        _flatten(child, path, found)


def _add(found: dict[str, tuple[Any, str]], path: str, value: Any, unit: str) -> None:
    """Equal names side by side are told apart by their place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name, count = path, 2
    while name in found:
        name, count = f"{path}#{count}", count + 1
    found[name] = (float(value), unit)


def _fields(item: Any) -> dict[str, Any]:
    """What a record or a mapping holds; what a record's repr leaves out is in no document either."""
    if is_dataclass(item) and not isinstance(item, type):
        return {one.name: getattr(item, one.name) for one in fields(item) if one.repr}
    return dict(item)


def _choices(
    fleet: str, gpus: int, layout: Mapping[str, Any], recipe: Mapping[str, Any], assumed: Mapping[str, Any]
) -> dict[str, Any]:
    chosen: dict[str, Any] = {"gpus": fleet, "gpu_count": gpus}
    chosen |= {f"layout.{key}": _plain(value) for key, value in layout.items()}
    chosen |= {f"recipe.{key}": _plain(value) for key, value in recipe.items()}
    return chosen | {f"assumed.{key}": _plain(value) for key, value in assumed.items()}


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(_fields(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _document(path: Path) -> Side | None:
    """The plan in a JSON document; None when it is another kind of file. Raises InputError."""
    where = str(path)
    try:
        data = json.loads(read_text(path, max_bytes=MAX_PLAN_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not {"verdict", "lines", "schema_version"} <= data.keys():
        return None
    if data["schema_version"] != 1:
        raise InputError(
            "is a plan of another schema",
            where=where,
            key="schema_version",
            given=data["schema_version"],
            legal="1",
        )
    try:
        flat: dict[str, tuple[Any, str]] = {}
        for line in data["lines"]:
            _flatten_document(line, "", flat)
        verdict = data["verdict"]
        return Side(
            label=where,
            level=Level(verdict["level"]).value,
            verdict={key: verdict[key] for key in ("needed_bytes", "capacity_bytes", "phase", "binds")},
            choices=_choices(
                data["fleet"],
                data["gpus"],
                data["layout"],
                data["recipe"],
                {
                    item["key"]: item["value"]
                    for item in data["assumptions"]
                    if item["key"].startswith("run.")
                },
            ),
            lines=flat,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"is not a whole plan: {error}", where=where) from None


def _flatten_document(line: Mapping[str, Any], above: str, found: dict[str, tuple[Any, str]]) -> None:
    path = f"{above}.{line['name']}" if above else str(line["name"])
    _add(found, path, line["value"], line["unit"])
    for child in line.get("children", ()):
        _flatten_document(child, path, found)


def _at_revision(argument: str, catalog: Catalog) -> ResolvedJob:
    """The job in a file as it was in a revision of git."""
    revision, _, file = argument.partition(":")
    text = _git_show(revision, file, argument)
    document = parse_yaml(text, argument)
    name = Path(file).stem
    data = {"name": name, **document.data} if isinstance(document.data, dict) else document.data
    return resolve_data(data, catalog, where=argument, folder=Path(file).parent)


def _git_show(revision: str, file: str, argument: str) -> str:
    if not revision or not file or revision.startswith("-"):
        raise InputError(
            "no such file", where=argument, legal="a job, a plan's JSON, or REVISION:FILE of git"
        )
    # A path is relative to where the user is, as for every other file here; ./ says so to git.
    asked = file if file.startswith(("./", "../", "/")) else f"./{file}"
    problem = ""
    for name in dict.fromkeys((asked, file)):
        command = ["git", "show", "--no-textconv", "--end-of-options", f"{revision}:{name}"]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        except FileNotFoundError:
            raise InputError("git is not installed", where=argument) from None
        except subprocess.TimeoutExpired:
            raise InputError("git did not answer", where=argument) from None
        if done.returncode == 0:
            if len(done.stdout) > MAX_BYTES:
                raise InputError("is too large to be read", where=argument)
            return done.stdout.decode("utf-8", "replace")
        problem = problem or done.stderr.decode("utf-8", "replace").strip().removeprefix("fatal: ")
    raise InputError(f"git: {problem}", where=argument)
