"""The top of a page: what was asked, the verdict, and the figures people came for."""

from __future__ import annotations

from collections.abc import Iterator

from gpucalc import units
from gpucalc.line import Line
from gpucalc.plan.answer import Level, Plan
from gpucalc.report.html.ledger import Ledger
from gpucalc.report.markup import Content, Html, join, short, tag
from gpucalc.report.table import run_words, size_words, verdict_words

_WORDS = {
    Level.FITS: ("Fits", "fits", "✓"),
    Level.MARGINAL: ("Marginal", "marginal", "≈"),
    Level.DOES_NOT_FIT: ("Does not fit", "no", "✕"),
}


def title(answer: Plan) -> str:
    """The page's title."""
    return f"{short(answer.name)} on {short(answer.fleet)}: {_WORDS[answer.verdict.level][0].lower()}"


def head(answer: Plan) -> Html:
    """The job, its recipe and its layout."""
    recipe, layout = run_words(answer)
    return tag(
        "header",
        tag("p", "gpucalc plan", class_="kicker"),
        tag("h1", short(answer.name), " ", tag("span", "on ", short(answer.fleet))),
        tag("p", size_words(answer.model), class_="lead"),
        tag("p", recipe, tag("br"), layout, class_="recipe"),
    )


def verdict(answer: Plan, ledger: Ledger | None = None) -> Html:
    """The decision in a word and a sign, the numbers it rests on, and the key figures."""
    word, class_, sign = _WORDS[answer.verdict.level]
    held, *rest = verdict_words(answer.verdict)
    banner = tag(
        "p",
        tag("span", sign, aria_hidden="true", class_="sign"),
        tag("strong", word),
        " ",
        tag("span", held),
        class_=f"banner {class_}",
    )
    why = tag("ul", (tag("li", words) for words in rest), class_="why")
    figures = tag("dl", (_tile(*tile) for tile in tiles(answer, ledger)), class_="tiles")
    return join(banner, why, figures)


def tiles(answer: Plan, ledger: Ledger | None) -> Iterator[tuple[str, Content, str]]:
    """The key figures: name, number, what qualifies it."""

    def shown(line: Line, unit: str = "") -> Content:
        unit = unit or line.unit
        return Ledger().value(line.value, unit) if ledger is None else ledger.link(line, unit)

    decided = answer.verdict
    yield "memory per GPU", shown(decided.needed), f"of {units.gib(decided.capacity.value)}"
    if answer.time is None or answer.throughput is None:
        yield "GPUs", Html(f"{answer.gpus:,}"), "speed is not shown for a plan that cannot run"
        return
    error = f"±{units.percent(answer.speed_error[0], 0)}" if answer.speed_error else ""
    rates = {line.name: line for line in answer.throughput.children}
    yield ("time per token" if answer.serves else "step"), shown(answer.time), f"bound by {answer.binds}"
    wanted = (
        ("ttft", "time to first token"),
        ("tokens_per_s", "all GPUs, tokens/s"),
        ("tokens_per_s_per_gpu", "per GPU, tokens/s"),
        ("tokens_per_s_per_user", "per user, tokens/s"),
        ("mfu", "MFU"),
    )
    for name, words in wanted:
        if name in rates:
            unit = "count" if name.startswith("tokens") else ""
            yield words, shown(rates[name], unit), error if name == "tokens_per_s" else ""
    prices = {line.name: line for line in answer.cost.children} if answer.cost is not None else {}
    if (price := prices.get("rental_per_million_tokens")) is not None:
        yield "a million tokens", shown(price, "USD"), "rental"


def _tile(name: str, number: Content, more: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", number, tag("span", more) if more else ""))
