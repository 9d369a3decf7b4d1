"""The sections that are tables: rates, cost, cache, what would help, assumptions, formulas, sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpucalc import units
from gpucalc.documents import Estimate
from gpucalc.formula import FORMULAS
from gpucalc.plan.answer import Level, Plan
from gpucalc.report.html.ledger import BESIDE, Ledger
from gpucalc.report.html.pieces import Row, Section, facts_rows, section, table
from gpucalc.report.markup import Html, join, tag, text
from gpucalc.report.screen import set_word
from gpucalc.report.table import assumed_figures

LEVELS = {Level.FITS: "fits", Level.MARGINAL: "marginal", Level.DOES_NOT_FIT: "does not fit"}


def throughput(answer: Plan, ledger: Ledger) -> Section | None:
    """Rates and utilisation."""
    tree = answer.throughput
    if tree is None:
        return None
    error = ""
    if answer.speed_error is not None:
        share, basis = answer.speed_error
        error = f"Expected error of time and rates: ±{units.percent(share)} ({basis})."
    rows = facts_rows(ledger, (tree, *tree.children))
    rates = _facts("Rates and utilisation", rows)
    return section("throughput", "Throughput", rates, tag("p", error) if error else None)


def cost(answer: Plan, ledger: Ledger) -> Section | None:
    """Hours, energy and money."""
    if answer.cost is None:
        return None
    title = f"Hours, energy and money {answer.cost.note or ''}".rstrip()
    rows = facts_rows(ledger, answer.cost.children)
    return section("cost", "Cost", _facts(title, rows))


def reliability(answer: Plan, ledger: Ledger) -> Section | None:
    """What failures leave of a long run."""
    if answer.reliability is None:
        return None
    rows = facts_rows(ledger, answer.reliability.children)
    return section("reliability", "Reliability", _facts("Goodput and what it rests on", rows))


def cache(answer: Plan, ledger: Ledger) -> Section | None:
    """What the cache of a deployment costs and holds."""
    if answer.cache is None:
        return None
    rows = facts_rows(ledger, answer.cache.children)
    return section("cache", "Cache on one GPU", _facts("What the cache holds", rows))


def _facts(title: str, rows: Iterable[Row]) -> Html:
    """A table of numbers that are no parts of a sum, with what is to be said of each."""
    return table(title, ("item", "value", "what it is"), rows, numbers=1, name="facts")


def launch(answer: Plan) -> Section | None:
    """The engine's own command."""
    if answer.launch is None:
        return None
    copies = answer.layout.replicas
    words = "Start it with" if copies == 1 else f"Start each of the {copies} copies with"
    return section("launch", words, tag("pre", tag("code", answer.launch), tabindex=0))


def actions(answer: Plan, ledger: Ledger) -> Section | None:
    """Changes worth making, each planned again."""
    if not answer.actions:
        return None

    def rows() -> Iterator[Row]:
        for action in answer.actions:
            keys = " ".join(f"{key}={set_word(value)}" for key, value in action.changes.items())
            named = join(action.title, tag("code", keys, class_="eq more"))
            numbers = (("needs", action.needed), ("step", action.step), ("tokens_per_s", action.rate))
            lines = [(name, line) for name, line in numbers if line is not None]
            yield (
                ledger.several(named, lines, depth=BESIDE),
                ledger.value(action.needed_bytes, "bytes"),
                ledger.value(action.step_s, "s") if action.step_s is not None else "",
                ledger.value(action.tokens_per_s, "count") if action.tokens_per_s is not None else "",
                LEVELS[action.level],
            )

    heads = ("change", "needs", "step", "tokens/s", "verdict")
    changes = table("Each change planned again", heads, rows(), numbers=3, name="wide")
    return section("help", "What would help", changes)


def documents(estimates: Sequence[Estimate], ledger: Ledger) -> Section:
    """What planning documents' rules say of the same."""
    rows = (
        (
            ledger.opened(item.line, text(item.rule), depth=BESIDE),
            ledger.value(item.line.value, item.line.unit),
            "" if item.ours is None else ledger.value(item.ours.value, item.ours.unit),
            item.why,
        )
        for item in estimates
    )
    heads = ("rule", "by the rule", "here", "why they differ")
    beside = table("Rules of thumb beside the arithmetic", heads, rows, numbers=2, name="wide")
    return section("documents", "By planning documents' rules", beside)


def assumptions(answer: Plan, ledger: Ledger) -> Section | None:
    """Everything nobody stated: keys that can be set, and figures that are guesses."""
    keys = [(tag("code", _setting(item.key, item.value)), item.why) for item in answer.assumptions]
    facts = list(facts_rows(ledger, assumed_figures(answer)))
    content: list[Html] = []
    if keys:
        content.append(
            table("Set any of them with --set KEY=VALUE", ("assumed", "because"), keys, name="keys")
        )
    if facts:
        content.append(_facts("Figures nobody measured or stated here", facts))
    return section("assumptions", "Assumptions", content) if content else None


def _setting(key: str, value: object) -> str:
    return key if value == "" else f"{key} = {set_word(value)}"


def notes(answer: Plan) -> Section | None:
    """What else there is to say."""
    if not answer.notes:
        return None
    return section("notes", "Notes", tag("ul", (tag("li", note) for note in answer.notes)))


def formulas(ledger: Ledger) -> Section | None:
    """Every formula this page was worked out with."""
    if not ledger.formulas:
        return None

    def entries() -> Iterator[Html]:
        for name in sorted(ledger.formulas):
            found = FORMULAS[name]
            yield tag("dt", tag("code", name), f" {found.unit}", id=f"f-{name}")
            yield tag(
                "dd",
                found.summary,
                tag("code", f"= {found.expression}", class_="eq"),
                "source ",
                ledger.cite(found.source),
            )

    listed = tag("dl", entries(), class_="formulas")
    words = f"The {len(ledger.formulas)} formulas of this page"
    return section("formulas", "Formulas", _folded(words, listed))


def sources(ledger: Ledger) -> Section | None:
    """Every source cited, by its number."""
    if not ledger.sources:
        return None
    cited = (tag("li", source, id=f"r{number}") for source, number in ledger.sources.items())
    listed = tag("ol", cited, class_="sources")
    return section("sources", "Sources", _folded(f"The {len(ledger.sources)} sources of this page", listed))


def _folded(words: str, content: Html) -> Html:
    """A long list that opens when asked for, or when a link leads into it."""
    return tag("details", tag("summary", words), content)


def provenance(known: Mapping[str, Any]) -> Section | None:
    """Which files, in which revision, the answer came from."""
    if not known:
        return None
    rows: list[Row] = []
    for key, value in known.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, item in inner:
            called = f"{key}: {name}" if name else key
            rows += [(called, _said(one)) for one in (item if isinstance(item, list | tuple) else [item])]
    files = table("Files and revisions", ("what", "which"), rows, name="keys")
    return section("provenance", "Where the figures came from", files)


def _said(item: object) -> str:
    """A value of a document in words."""
    if isinstance(item, Mapping):
        return ", ".join(f"{key} {set_word(value)}" for key, value in item.items())
    return set_word(item)
