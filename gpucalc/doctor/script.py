"""A launch script, environment dump, Dockerfile or code as lines and the settings in them.

Nothing is run. Comments are cut off, lines continued with a backslash are joined, and every setting keeps
the line it stands in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# NAME=value as in shells, `env`, docker -e, mpirun -x, --export=ALL,NAME=value, Dockerfiles, nccl.conf.
_ASSIGNED = re.compile(
    r"""(?<![\w$\-.{])([A-Z][A-Z0-9_]{2,})="""
    r"""("[^"\n]*"|'[^'\n]*'|(?:(?!,[A-Z][A-Z0-9_]*=)[^\s;&|)"'])*)"""
)
_SPACED = re.compile(r"""(?:\bsetenv|^\s*ENV)\s+([A-Z][A-Z0-9_]{2,})\s+("[^"]*"|'[^']*'|[^\s;&|=]\S*)""")
_PYTHON = re.compile(
    r"""(?:environ\s*\[\s*["'](\w+)["']\s*\]\s*=(?!=)|(?:setdefault|putenv)\(\s*["'](\w+)["']\s*,)\s*"""
    r"""(?:str\()?("[^"\n]*"|'[^'\n]*'|[\w.+-]+)"""
)
_MAPPED = re.compile(r"""^\s*-?\s*["']?([A-Z][A-Z0-9_]{2,})["']?\s*:\s*("[^"\n]*"|'[^'\n]*'|[^\s"'{\[,]+)""")
_NAMED = re.compile(r"""^\s*-\s*(?:\{\s*)?name:\s*["']?([A-Z][A-Z0-9_]{2,})["']?(.*)$""")
_VALUE = re.compile(r"""\bvalue:\s*("[^"\n]*"|'[^'\n]*'|[^\s"'},]+)""")
_PASSED = re.compile(r"""(?:-x|--env|-e)\s+([A-Z][A-Z0-9_]{2,})(?=\s|$)""")
_UNSET = re.compile(r"""\bunset\s+((?:[A-Z][A-Z0-9_]*\s*)+)""")


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A line as it is run: without comment, continuations joined."""

    text: str
    starts: tuple[tuple[int, int], ...]  # where each line of the file begins in it, with its number

    def number(self, at: int) -> int:
        """The line of the file a position stands in."""
        return [line for start, line in self.starts if start <= at][-1]


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable as the text sets it; value None where it is only passed on or taken back."""

    name: str
    value: str | None
    line: int
    written: str
    unset: bool = False

    @property
    def known_value(self) -> str | None:
        """The value, None where only a run would tell it."""
        if self.value is None or re.search(r"[$`<{]", self.value):
            return None
        return self.value


def lines(text: str) -> tuple[ScriptLine, ...]:
    """The lines of a text that hold anything."""
    found: list[ScriptLine] = []
    held, starts = "", []
    for number, raw in enumerate(text.splitlines(), 1):
        starts.append((len(held), number))
        bare = _without_comment(raw)
        if bare.endswith("\\") and not bare.endswith("\\\\"):
            held += bare[:-1] + " "
            continue
        held += bare
        if held.strip():
            found.append(ScriptLine(held, tuple(starts)))
        held, starts = "", []
    if held.strip():
        found.append(ScriptLine(held, tuple(starts)))
    return tuple(found)


def _without_comment(raw: str) -> str:
    quote = ""
    for at, sign in enumerate(raw):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign == "#" and (at == 0 or raw[at - 1].isspace()) and not raw.startswith("#SBATCH"):
            return raw[:at].rstrip()
    return raw.rstrip()


def settings(script: tuple[ScriptLine, ...]) -> tuple[Setting, ...]:
    """Every variable the text sets, passes on or takes back, in its order."""
    found: list[Setting] = []
    named: tuple[str, int] | None = None
    for line in script:
        if named is not None and (value := _VALUE.search(line.text)):
            found.append(Setting(named[0], _bare(value[1]), named[1], f"{named[0]}: {value[1]}"))
        named = None
        if entry := _NAMED.match(line.text):
            number = line.number(entry.start(1))
            if value := _VALUE.search(entry[2]):
                found.append(Setting(entry[1], _bare(value[1]), number, f"{entry[1]}: {value[1]}"))
            else:
                named = (entry[1], number)
            continue
        here = sorted(_in_line(line), key=lambda item: item[0])
        found += [setting for _, setting in here]
    return tuple(found)


def _in_line(line: ScriptLine) -> Iterator[tuple[int, Setting]]:
    taken: set[str] = set()
    for pattern in (_PYTHON, _ASSIGNED, _SPACED, _MAPPED):
        for match in pattern.finditer(line.text):
            name, value = next(part for part in match.groups()[:-1] if part), match.groups()[-1]
            if pattern is not _ASSIGNED and name in taken:
                continue
            taken.add(name)
            at = match.start()
            written = match[0].strip()
            yield at, Setting(name, _bare(value), line.number(at), written)
    for match in _PASSED.finditer(line.text):
        yield match.start(), Setting(match[1], None, line.number(match.start()), match[0])
    for match in _UNSET.finditer(line.text):
        for name in match[1].split():
            number = line.number(match.start())
            yield match.start(), Setting(name, None, number, match[0].strip(), unset=True)


def _bare(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] in "\"'" and value[-1] == value[0] else value
