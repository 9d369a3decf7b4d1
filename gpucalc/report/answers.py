"""Differences and diagnoses as text, JSON and markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpucalc import units
from gpucalc.diff import Difference, Move
from gpucalc.oom import Diagnosis
from gpucalc.oom_changes import Change
from gpucalc.oom_message import Amount
from gpucalc.plan.answer import Level
from gpucalc.report.formats import MARKDOWN_BYTES, inside_code, inside_text
from gpucalc.report.json import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 0.005  # of the largest line of its tree: smaller moves are counted, not listed, unless all are asked
_LEVELS = {"fits": "fits", "marginal": "marginal", "does_not_fit": "does not fit"}


# -- differences ----------------------------------------------------------------------------------


def difference_document(found: Difference) -> dict[str, Any]:
    """A difference for programs."""
    return {
        "old": found.old.label,
        "new": found.new.label,
        "verdict": {
            "old": found.old.level,
            "new": found.new.level,
            "changed": found.verdict_changed,
            "old_needed_bytes": plain(found.old.verdict["needed_bytes"]),
            "new_needed_bytes": plain(found.new.verdict["needed_bytes"]),
            "old_capacity_bytes": plain(found.old.verdict["capacity_bytes"]),
            "new_capacity_bytes": plain(found.new.verdict["capacity_bytes"]),
        },
        "regressions": list(found.regressions),
        "choices": [{"key": key, "old": plain(old), "new": plain(new)} for key, old, new in found.choices],
        "lines": [
            {
                "path": move.path,
                "unit": move.unit,
                "old": plain(move.old),
                "new": plain(move.new),
                "delta": plain(move.delta),
                "ratio": move.ratio,
            }
            for move in found.moves
        ],
    }


def telling(found: Difference) -> tuple[Move, ...]:
    """The moves large enough to be listed: half a percent of the tree they stand in."""
    tops: dict[str, float] = {}
    for side in (found.old, found.new):
        for path, (value, unit) in side.lines.items():
            tree = f"{path.partition('.')[0]} {unit}"
            tops[tree] = max(tops.get(tree, 0.0), abs(value))
    return tuple(
        move
        for move in found.moves
        if _far(move) >= SHOWN * tops.get(f"{move.path.partition('.')[0]} {move.unit}", 0.0)
    )


def _far(move: Move) -> float:
    far = move.delta if move.delta is not None else move.new or move.old or 0.0
    return abs(float(far))


def difference_table(found: Difference, *, every: bool = False) -> RenderableType:
    """A difference for a terminal: verdict, what was chosen otherwise, headlines, lines."""
    from rich.console import Group
    from rich.text import Text

    from gpucalc.report.screen import HEADING, clean, columns, heading, indent

    parts: list[RenderableType] = [Text(clean(f"{found.old.label} -> {found.new.label}"), style=HEADING)]
    parts.append(Text(_verdict_line(found), style=HEADING if found.verdict_changed else ""))
    if found.same:
        return Group(*parts, Text("nothing moved"))
    parts += [Text(clean(f"worse: {words}")) for words in found.regressions]
    if found.choices:
        table = columns("chosen", "old", "new")
        for key, old, new in found.choices:
            table.add_row(clean(key), clean(_word(old)), clean(_word(new)))
        parts += [Text(), heading("Chosen otherwise"), indent(table)]
    listed = found.moves if every else telling(found)
    for title, moves in (("Headlines", found.headlines), ("Lines", listed)):
        if moves:
            table = columns("line", "old", "new", "change", right=(1, 2, 3), whole=(1, 2, 3))
            for name, move in _nested(moves):
                table.add_row(clean(name), *_cells(move))
            parts += [Text(), heading(title), indent(table)]
    if left := len(found.moves) - len(listed):
        parts.append(
            indent(Text(f"{left} lines that moved by less than half a percent: --all, --format json"))
        )
    return Group(*parts)


def difference_markdown(found: Difference, *, every: bool = False) -> str:
    """A difference as a comment for a merge request."""
    mark = ":warning: " if found.regressions else ""
    lines = [f"### {mark}gpucalc: `{inside_code(found.old.label)}` to `{inside_code(found.new.label)}`", ""]
    bold = "**" if found.verdict_changed else ""
    lines += [f"{bold}{inside_text(_verdict_line(found))}{bold}", ""]
    if found.same:
        return "\n".join([*lines, "Nothing moved."])
    lines += [f"- worse: {inside_text(words)}" for words in found.regressions]
    if found.choices:
        lines += ["", "| chosen | old | new |", "|---|---|---|"]
        lines += [
            f"| `{inside_code(key)}` | {inside_text(_word(old))} | {inside_text(_word(new))} |"
            for key, old, new in found.choices
        ]
    listed = found.moves if every else telling(found)
    for title, moves in (("Headlines", found.headlines), ("Lines", listed)):
        if moves:
            fold = title == "Lines"
            lines += ["", f"<details><summary>{title}</summary>" if fold else f"**{title}**", ""]
            lines += ["| line | old | new | change |", "|---|--:|--:|--:|"]
            room = MARKDOWN_BYTES - len("\n".join(lines).encode())
            rows = [f"| `{inside_code(move.path)}` | {' | '.join(_cells(move))} |" for move in moves]
            kept = _within(rows, room)
            lines += kept
            if len(kept) < len(rows):
                lines += ["", f"{len(rows) - len(kept)} more lines are left out; see the JSON."]
            lines += ["", "</details>"] if fold else []
    if left := len(found.moves) - len(listed):
        lines += ["", f"{left} lines moved by less than half a percent."]
    return "\n".join(lines)


def _nested(moves: tuple[Move, ...]) -> Iterator[tuple[str, Move]]:
    """Each move by its name, set in below the nearest line above it that is listed too."""
    above: list[str] = []
    for move in moves:
        while above and not move.path.startswith(above[-1] + "."):
            above.pop()
        name = move.path.removeprefix(above[-1] + ".") if above else move.path
        yield "  " * len(above) + name, move
        above.append(move.path)


def _within(rows: list[str], room: int) -> list[str]:
    kept: list[str] = []
    for row in rows:
        room -= len(row.encode()) + 1
        if room < 200:
            break
        kept.append(row)
    return kept


def _verdict_line(found: Difference) -> str:
    old, new = found.old, found.new
    words = _LEVELS[new.level]
    if found.verdict_changed:
        words = f"{_LEVELS[old.level]} -> {_LEVELS[new.level]}"
    needs = [units.gib(side.verdict["needed_bytes"]) for side in (old, new)]
    has = [units.gib(side.verdict["capacity_bytes"]) for side in (old, new)]
    return f"verdict: {words}; needs {_arrow(needs)} of {_arrow(has)} per GPU"


def _arrow(texts: list[str]) -> str:
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} -> {texts[1]}"


def _cells(move: Move) -> tuple[str, str, str]:
    old, new = _shown(move.old, move.unit), _shown(move.new, move.unit)
    if move.delta is None:
        return old, new, "new" if move.old is None else "gone"
    if move.ratio is not None:
        return old, new, f"{100 * (move.ratio - 1):+.1f} %"
    return old, new, f"{'+' if move.delta > 0 else '-'}{_shown(abs(move.delta), move.unit)}"


def _shown(value: float | None, unit: str) -> str:
    """A value as short as a column needs: the line's name says per what."""
    from gpucalc.report.screen import quantity

    return "-" if value is None else quantity(value, unit).removesuffix(" per 1e6 tokens")


def _word(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- out of memory --------------------------------------------------------------------------------


def diagnosis_document(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis for programs."""
    message = found.message
    amounts = {
        f"{name}_bytes": _amount(getattr(message, name))
        for name in ("tried", "total", "free", "allocated", "in_use", "reserved_idle")
    }
    return {
        "engine": message.engine,
        "phase": found.phase,
        "what": message.what,
        "failed": message.failed,
        "message": {
            **amounts,
            "tokens_held": message.tokens_held,
            "tokens_wanted": message.tokens_wanted,
            "longest_tokens": message.longest,
        },
        "reading": list(found.reading),
        "tensors": [
            {
                "name": match.name,
                "phases": list(match.phases),
                "bytes": plain(match.bytes),
                "exact": match.exact,
                "equation": match.equation,
            }
            for match in found.matches
        ],
        "plan": None
        if found.plan is None
        else {
            "level": found.plan.verdict.level.value,
            "needed_bytes": plain(found.plan.verdict.needed.value),
            "capacity_bytes": plain(found.plan.verdict.capacity.value),
            "phase": found.plan.verdict.phase,
            "binds": found.plan.verdict.binds,
        },
        "changes": [
            {
                "title": change.title,
                "changes": plain(change.changes),
                "level": change.level.value,
                "needed_bytes": plain(change.needed_bytes),
                "capacity_bytes": plain(change.capacity_bytes),
                "tokens_per_s": plain(change.tokens_per_s),
                "kv_tokens": plain(change.kv_tokens),
                "usd_per_hour": plain(change.usd_per_hour),
            }
            for change in found.changes
        ],
    }


def _amount(amount: Amount | None) -> Any:
    return None if amount is None else plain(round(amount.bytes))


def diagnosis_table(found: Diagnosis) -> RenderableType:
    """A diagnosis for a terminal: the tensor first, then what was read, then what would fit."""
    from rich.console import Group
    from rich.text import Text

    from gpucalc.report.screen import HEADING, QUIET, clean, heading, indent

    parts: list[RenderableType] = [Text(clean(_headline(found)), style=HEADING)]
    for match in found.matches:
        word = "is" if match.exact else "is near, within 2 %:"
        parts.append(indent(Text(clean(f"{word} {match.name}, {units.gib(match.bytes, 3)}"))))
        parts.append(indent(Text(clean(match.equation), style=QUIET), 4))
    parts += [Text(), heading("What the message says")]
    parts += [indent(Text(clean(f"- {words}"))) for words in found.reading]
    if found.changes:
        parts += [Text(), heading("What would fit, cheapest first"), *_changes(found.changes)]
    elif found.plan is not None and found.message.failed:
        parts += [Text(), Text("No single change known here would fit.")]
    elif found.plan is None:
        words = "names the tensor by the job's own sizes and finds what would fit"
        if not found.message.failed:
            words = "sets it beside what the job's plan has"
        parts += [Text(), Text(f"--job JOB {words}.")]
    return Group(*parts)


def _headline(found: Diagnosis) -> str:
    if not found.message.failed:
        by = "" if found.message.engine == "stated" else f"{found.message.engine}: "
        return f"{by}memory in use, nothing failed"
    where = f" in the {found.phase} phase" if found.phase else ""
    exact = [match for match in found.matches if match.exact]
    if exact:
        return f"{found.message.engine}: out of memory{where}, making {exact[0].name}"
    if found.message.what:
        return f"{found.message.engine}: out of memory{where}, making {found.message.what}"
    return f"{found.message.engine}: out of memory{where}"


def _changes(changes: tuple[Change, ...]) -> Iterator[RenderableType]:
    from rich.text import Text

    from gpucalc.report.screen import QUIET, clean, indent, set_word

    for change in changes:
        word = "fits" if change.level is Level.FITS else "marginal"
        words = (
            f"{change.title}: {word}, {units.gib(change.needed_bytes)} of {units.gib(change.capacity_bytes)}"
        )
        if change.kv_tokens is not None:
            words += f", cache of {change.kv_tokens:,.0f} tokens"
        if change.tokens_per_s is not None:
            words += f", {change.tokens_per_s:,.0f} tokens/s"
        if change.usd_per_hour is not None:
            words += f", ${change.usd_per_hour:,.2f}/h"
        yield indent(Text(clean(words)))
        settings = " ".join(f"--set {key}={set_word(value)}" for key, value in change.changes.items())
        yield indent(Text(clean(settings), style=QUIET), 4)
