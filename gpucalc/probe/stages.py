"""`gpucalc probe --stages JOB`: the three-stage feasibility test, from flags to a record and its summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import CannotMeasure, InputError
from gpucalc.jobs import ResolvedJob, resolve
from gpucalc.probe.inventory import Inventory
from gpucalc.probe.journal import VERSION, Journal, Record
from gpucalc.probe.launch import Outcome
from gpucalc.probe.trials import Trials, trials
from gpucalc.probe.verdict import Summary, summary
from gpucalc.probe.worker import Config
from gpucalc.spec.hardware import Cluster

SOAK_S = 72 * 3600.0  # the documents' stability run
LONGEST_SOAK_S = 90 * 86400.0
# On a CPU only the bytes of tensors are planned, which are the same on any card; this one is as good.
CPU_CARD = "h100-sxm-80gb"
Told = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """The job to be tried, and for how long. Raises InputError for a time that is none."""

    job: str
    soak_s: float = SOAK_S
    gpus: str | None = None
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.soak_s <= LONGEST_SOAK_S:
            raise InputError("is no length of a soak", where="--soak", given=self.soak_s, legal="0 to 90 d")


@dataclass(frozen=True, slots=True)
class Tried:
    """A test's summary and its record; `failure` is what ended it early."""

    summary: Summary
    path: Path
    failure: str | None


def prepared(
    asked: Asked, catalog: Catalog, cards: Inventory | None, *, ranks: int, nodes: int | None
) -> Trials:
    """The job's stages for the cards at hand. Raises what planning raises."""
    entries = _entries(cards, ranks, nodes)
    fleet = "+".join(f"{entries.count(name)}x{name}" for name in dict.fromkeys(entries))
    job = _job(asked, catalog, fleet)
    one = min(
        (catalog.cluster([(None, 1, name)]) for name in dict.fromkeys(entries)),
        key=lambda cluster: cluster.pools[0].gpu.usable_memory().value,
    )
    return trials(job, catalog, _cluster(catalog, entries, nodes), one, ranks=ranks, on_cpu=cards is None)


def _job(asked: Asked, catalog: Catalog, fleet: str) -> ResolvedJob:
    """The job on its own cards; one that names none is for those at hand."""
    found = resolve(asked.job, catalog, gpus=asked.gpus, sets=asked.sets, need_gpus=False)
    if found.job.gpus is None:
        found = resolve(asked.job, catalog, gpus=fleet, sets=asked.sets)
    return found


def _entries(cards: Inventory | None, ranks: int, nodes: int | None) -> list[str]:
    """The catalogue's name of every rank's card; nodes are taken to be alike."""
    if cards is None:
        return [CPU_CARD] * ranks
    each = max(1, ranks // (nodes or 1))
    seen = [cards.cards[index] for index in cards.visible[:each]]
    for card in seen:
        if card.entry is None:
            why = f"{card.entry_note}; describe it in --catalog"
        elif card.value("mig"):
            why = "MIG is on, and a part of a card is in no catalogue"
        else:
            continue
        raise CannotMeasure(f"nothing can be planned for GPU {card.index}: {why}")
    names = [str(card.entry) for card in seen]
    return (names * ranks)[:ranks]


def _cluster(catalog: Catalog, entries: Sequence[str], nodes: int | None) -> Cluster:
    if nodes and nodes > 1 and len(set(entries)) == 1:
        return catalog.cluster([(nodes, len(entries) // nodes, entries[0])])
    return catalog.cluster([(None, entries.count(name), name) for name in dict.fromkeys(entries)])


def header(tried: Trials, asked: Asked, *, device: str, ranks: int, card: str) -> Record:
    """The first line of a record: what is tested, and what the plan says of it."""
    parts = [tried.alone, *([tried.together] if tried.together is not None else [])]
    return {
        "kind": "stages",
        "version": VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "job": tried.job,
        "fleet": tried.fleet,
        "device": device,
        "card": card,
        "ranks": ranks,
        "soak_s": asked.soak_s,
        "changes": list(tried.changes),
        "trained": {part.name: part.words for part in parts},
        "predicted": {part.name: part.predicted() for part in parts},
        "settings": tried.settings(),
    }


_SAME = ("version", "job", "device", "card", "ranks", "settings")  # what a test that goes on must agree in


def opened(path: Path, head: Record) -> Journal:
    """The record to write, new or to go on with. Raises InputError when it is of another test."""
    journal = Journal(path)
    if not journal.records:
        journal.add(head)
        return journal
    first = journal.records[0]
    for key in _SAME:
        if first.get(key) != head[key]:
            differs = key if key == "settings" else f"{key} {first.get(key)!r}, here {head[key]!r}"
            raise InputError(
                f"is the record of another test: {differs}", where=str(path), legal="another --output"
            )
    return journal


Start = Callable[[Config, Told, Callable[[Outcome], str]], Outcome]


def run(
    asked: Asked, head: Record, path: Path, start: Start, config: Config, *, told: Told, writes: bool
) -> Tried | None:
    """Do what the record still lacks. `start` runs the ranks; `writes`: this is the one that keeps it.

    None on the other ranks. Raises CannotMeasure where not even the software could be told.
    """
    journal = opened(path, head) if writes else None
    settings = {**head["settings"], **_left(journal, asked)}
    failure: str | None = None
    if not settings.pop("complete"):

        def added(point: dict[str, Any]) -> None:
            if journal is not None and point["kind"] != "failure":
                journal.add(point)
            told(point)

        def kept(outcome: Outcome) -> str:
            if journal is not None:
                _finished(journal, asked, outcome.failure)
            return str(path)

        failure = start(replace(config, stages=settings), added, kept).failure
    if journal is not None:
        return Tried(_finished(journal, asked, failure), path, failure)
    if failure is not None:
        raise CannotMeasure(failure)
    return None


def _left(journal: Journal | None, asked: Asked) -> dict[str, Any]:
    """What a record holds already, for the ranks to go on from."""
    records = journal.records if journal is not None else []
    done = {record["stage"]: record for record in records if record["kind"] == "stage"}
    windows = [record for record in records if record["kind"] == "window"]
    over = windows[-1]["elapsed_s"] if windows else 0.0
    wanted = set(records[0]["predicted"]) if records else {"alone"}
    return {
        "done": done,
        "soak_s": asked.soak_s,
        "done_s": over,
        "windows": len(windows),
        "complete": bool(records) and wanted <= set(done) and over >= asked.soak_s,
    }


def _finished(journal: Journal, asked: Asked, failure: str | None) -> Summary:
    """The summary, in the record too. Failures of earlier starts, told then, are not held against it."""
    earlier = [record for record in journal.records if record["kind"] != "failure"]
    if failure is not None:
        ended = {"kind": "failure", "why": failure}
        journal.add(ended)
        earlier.append(ended)
    found = summary(earlier, soak_s=asked.soak_s)
    journal.add({"kind": "summary", **found.document()})
    return found


def fresh_name(job: str, device: str) -> Path:
    """A name no earlier test has."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe = "".join(char if char.isalnum() or char in "-." else "-" for char in job)
    return Path(f"stages-{safe}-{device}-{stamp}.jsonl")
