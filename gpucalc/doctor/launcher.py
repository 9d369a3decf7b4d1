"""Flags of the programs that start ranks: which exist, what they take, which exclude each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpucalc.doctor.finding import Finding
from gpucalc.doctor.script import ScriptLine
from gpucalc.errors import nearest
from gpucalc.spec.checks import LauncherSpec, Severity

_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|\$\([^()]*\)|`[^`]*`|[^\s;&|"'])+|[;&|]""")
_OPEN = re.compile(r"[$`{<\[]|^[A-Z_]+$")  # what only a run, or the reader, fills in


def flags_wrong(line: ScriptLine, launchers: Iterable[LauncherSpec]) -> Iterator[Finding]:
    """What is wrong with the flags of every launcher a line calls."""
    for launcher in launchers:
        for call in re.finditer(launcher.pattern, line.text):
            yield from _call(line, call.end(), launcher)


def _call(line: ScriptLine, start: int, launcher: LauncherSpec) -> Iterator[Finding]:
    seen: dict[str, int] = {}
    words = list(_WORD.finditer(line.text, start))
    index = 0
    while index < len(words):
        word, at = words[index][0], words[index].start()
        index += 1
        if not word.startswith("-") or not word.strip("-"):
            break  # the script: what follows is its own
        written, equals, value = word.partition("=")
        name = written.lstrip("-").replace("_", "-")
        full = _full(name, launcher)
        old = next((item for item in launcher.old_flags if item.name == name), None)
        if full is None:
            if old is not None and not (old.unless and re.search(old.unless, line.text)):
                right = old.right or f"--{old.to}"
                yield _finding("old-flag", old.severity, written, old.reason, line, at, right, old.source)
            elif old is None and not _OPEN.search(name):
                near = nearest(name, launcher.flags, count=2)
                right = f"did you mean {' or '.join('--' + item for item in near)}?" if near else ""
                yield _finding(
                    "unknown-flag", Severity.ERROR, written, f"{launcher.name} has no such flag and stops",
                    line, at, right or None, launcher.source,
                )  # fmt: skip
            if old is None and not equals and index < len(words) and not _script(words[index][0]):
                index += 1  # its value, unless that looks like the script
            continue
        seen[full] = at
        if full in launcher.switches:
            if full in ("m", "module"):
                break
            continue
        if not equals and index < len(words):
            value = words[index][0]
            index += 1
        value = value.strip("\"'")
        if _OPEN.search(value) or re.fullmatch(launcher.flags[full], value):
            continue
        yield _finding(
            "wrong-type", Severity.ERROR, written, f"cannot be {value or 'empty'}", line, at,
            f"{written} with a value of the form {launcher.flags[full]}", launcher.source,
        )  # fmt: skip
    for conflict in launcher.conflicts:
        if all(flag in seen for flag in conflict.flags):
            yield _finding(
                "flag-conflict", conflict.severity, " and ".join(f"--{flag}" for flag in conflict.flags),
                conflict.reason, line, seen[conflict.flags[-1]], conflict.right, conflict.source,
            )  # fmt: skip


def _script(word: str) -> bool:
    return word.startswith("-") or word.endswith((".py", ".sh")) or word in ";&|"


def _full(name: str, launcher: LauncherSpec) -> str | None:
    known = (*launcher.flags, *launcher.switches)
    if name in known:
        return name
    starting = [flag for flag in known if flag.startswith(name)] if len(name) > 1 else []
    return starting[0] if len(starting) == 1 else None


def _finding(
    check: str,
    severity: Severity,
    about: str,
    problem: str,
    line: ScriptLine,
    at: int,
    right: str | None,
    source: tuple[str, ...],
) -> Finding:
    shown = line.text.strip()
    evidence = shown if len(shown) <= 100 else "..." + line.text[max(0, at - 20) : at + 70].strip() + "..."
    return Finding(check, severity, about, problem, evidence, right, source, line=line.number(at))
