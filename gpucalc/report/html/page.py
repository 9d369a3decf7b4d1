"""A plan as one page: no script, nothing from a network, its numbers those of the JSON document.

`page` is the whole document, `fragment` what a notebook shows in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gpucalc.documents import Estimate, headline
from gpucalc.errors import GpucalcError
from gpucalc.layouts import Layouts
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.report.html import curves, head, machine, memory, tables, time
from gpucalc.report.html.ledger import DEPTHS, Ledger
from gpucalc.report.html.pieces import Section
from gpucalc.report.markup import Html, join, tag
from gpucalc.scale import Scaling
from gpucalc.spec.hardware import Cluster

LARGEST = 300_000  # bytes of a page


@dataclass(frozen=True, slots=True)
class Beside:
    """What a page shows beside the plan, each where it is known.

    cluster: roofline and topology. scaling: the curve. search: the layouts it weighed. rules: planning
    documents' estimates, one where none are given. provenance: files and revisions.
    """

    cluster: Cluster | None = None
    scaling: Scaling | None = None
    search: Layouts | None = None
    rules: Sequence[Estimate] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def page(answer: Plan, beside: Beside | None = None) -> str:
    """The document, within `LARGEST` bytes: a plan of very many numbers explains them less deep."""
    found: str | None = None
    ways = [(DEPTHS[0], True), *((depth, False) for depth in DEPTHS)]  # each shorter than the one before
    low, high = 0, len(ways)
    while low < high:
        middle = (low + high) // 2 if found is not None or low else low  # most plans fit as they are
        depth, full = ways[middle]
        document = _document(answer, Ledger(depth, full=full), beside or Beside())
        if len(document.encode()) <= LARGEST:
            found, high = document, middle
        else:
            low = middle + 1
    if found is None:
        raise GpucalcError(f"this plan's page would be larger than {LARGEST:,} bytes")
    return found


def fragment(answer: Plan) -> str:
    """The verdict, the key figures and the memory's stack, for a cell of a notebook."""
    body = join(head.head(answer), head.verdict(answer), memory.pictures(answer))
    return str(join(_style(), tag("div", body, class_="gpucalc fragment")))


def _document(answer: Plan, ledger: Ledger, beside: Beside) -> str:
    verdict = Section("verdict", "Verdict", head.verdict(answer, ledger), hidden=True)
    sections = [verdict, *_sections(answer, ledger, beside)]
    links = (tag("li", tag("a", part.title, href=f"#{part.id}")) for part in sections)
    nav = tag("nav", tag("ul", links), aria_label="Sections")
    main = tag("main", (part.markup for part in sections))
    foot = _foot(beside.provenance, ledger)
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#verdict", class_="skip"),
        tag("div", head.head(answer), nav, main, foot, class_="gpucalc page"),
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    meta = join(
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("title", head.title(answer)),
        _style(),
    )
    return f"<!doctype html>\n{tag('html', tag('head', meta), body, lang='en')}"


def _sections(answer: Plan, ledger: Ledger, beside: Beside) -> Iterator[Section]:
    found = (
        memory.memory(answer, ledger),
        tables.cache(answer, ledger),
        tables.launch(answer),
        time.time(answer, ledger),
        time.roofline(answer, ledger, _bandwidth(beside.cluster)),
        tables.throughput(answer, ledger),
        curves.loads(answer, ledger),
        curves.scaling(answer, beside.scaling, ledger),
        curves.layouts(answer, beside.search, ledger),
        tables.reliability(answer, ledger),
        tables.cost(answer, ledger),
        machine.unlike(answer),
        tables.actions(answer, ledger),
        machine.machine(answer, beside.cluster, ledger),
        tables.documents(beside.rules or (headline(answer),), ledger),
        tables.assumptions(answer, ledger),
        tables.notes(answer),
        tables.formulas(ledger),
        tables.sources(ledger),
        tables.provenance(beside.provenance),
    )
    yield from (part for part in found if part is not None)


def _bandwidth(cluster: Cluster | None) -> Line | None:
    """The slowest card's memory bandwidth."""
    if cluster is None:
        return None
    slowest = min((pool.gpu.memory_bandwidth for pool in cluster.pools), key=lambda figure: figure.si)
    return slowest.line("memory_bandwidth")


def _foot(known: Mapping[str, Any], ledger: Ledger) -> Html:
    version = known.get("gpucalc_version")
    made = f"Made by gpucalc {version}" if version else "Made by gpucalc"
    words = f"{made}. What has an arrow opens into its formula and source."
    if ledger.cut:
        words += " This plan has more numbers than a page explains: gpucalc explain JOB LINE tells the rest."
    return tag("footer", words)


@cache
def _style() -> Html:
    css = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    kept = " ".join(line.strip() for line in css.splitlines() if not line.strip().startswith("/*"))
    return Html(f"<style>{kept}</style>")
