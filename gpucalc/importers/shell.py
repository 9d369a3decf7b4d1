"""Command lines and launch scripts as words, without running anything.

A script's own variables and arrays are filled in where they are assigned to plain words; `$(...)` is
never run, a variable nobody assigned stays open. `parse_flags` then turns a command's words into flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpucalc.errors import InputError

MAX_WORDS = 20_000
MAX_SHELLS = 3  # of shells that start shells
_ASSIGN = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+)?([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$\{([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$([A-Za-z_]\w*)|\$\{[^}]*\}|\$\d|\$\(\([^)]*\)\)"
)
_CUTS = re.compile(r"\\.|'|\"|&&|\|\||;|\s\|\s|\s&\s")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
OPEN = "\0open"  # stands where a value is not known


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command and the flags among them."""

    words: tuple[str, ...]

    def place(self, *names: str) -> int | None:
        """Where one of these programs stands, by its last path component; an image's tag does not count."""
        for index, word in enumerate(self.words):
            last = word.rsplit("/", 1)[-1]
            if last in names or last.partition(":")[0] in names:
                return index
        return None

    def starts(self, *names: str) -> bool:
        """Whether one of the words is one of these programs."""
        return self.place(*names) is not None


def commands(text: str, where: str, depth: int = 0) -> list[Command]:
    """The commands of a script or the one on a line, longest variables filled in."""
    known: dict[str, str] = {}
    found: list[Command] = []
    for line in _logical_lines(text):
        match = _ASSIGN.fullmatch(line.strip())
        if match and not _is_prefix(match[3]):
            name, operator, value = match.groups()
            value = value.strip()
            if value.startswith("("):
                value = value[1:].rstrip().removesuffix(")")
            elif value[:1] in "\"'" and value[-1:] == value[:1]:
                value = value[1:-1]
            filled = _fill(value, known)
            known[name] = f"{known.get(name, '')} {filled}" if operator == "+=" else filled
            continue
        for part in _apart(line):
            words = _split(_fill(part, known), where)
            while words and _ASSIGN.fullmatch(words[0]):
                name, _, value = _ASSIGN.fullmatch(words[0]).groups()  # type: ignore[union-attr]
                known[name] = value
                words = words[1:]
            if words:
                found.append(Command(tuple(words)))
                inner = _inner_script(words)
                if inner is not None and depth < MAX_SHELLS:
                    found += commands(inner, where, depth + 1)
    if not any(word.startswith("-") for command in found for word in command.words):
        lone = [word for value in known.values() for word in _split(value, where)]
        if any(word.startswith("-") for word in lone):
            found.append(Command(tuple(lone)))
    return found


def _apart(line: str) -> list[str]:
    """The commands of one line, cut at `&&`, `||`, `;`, `|` and `&` that no quotes hold."""
    parts: list[str] = []
    start, quote = 0, ""
    for match in _CUTS.finditer(line):
        found = match[0]
        if quote:
            quote = "" if found == quote else quote
        elif found in ("'", '"'):
            quote = found
        elif not found.startswith("\\"):
            parts.append(line[start : match.start()])
            start = match.end()
    return [*parts, line[start:]]


def _inner_script(words: Sequence[str]) -> str | None:
    """What `bash -c "..."` runs, also behind other words."""
    for shell, flag, script in zip(words, words[1:], words[2:], strict=False):
        if shell.rsplit("/", 1)[-1] in ("bash", "sh", "zsh") and flag in ("-c", "-lc", "-ec"):
            return script
    return None


def parse_flags(
    words: Sequence[str], short: Mapping[str, str] | None = None, switches: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], list[str]]:
    """Flags by name (`--a-b` is a_b) and the words that belong to none.

    A flag without a value is True; given twice, the last wins as in argparse. `short` names what
    `-x` stands for; `switches` take no value even where a word follows.
    """
    flags: dict[str, Any] = {}
    loose: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        is_flag = word.startswith("--") and len(word) > 2
        brief = word.startswith("-") and not is_flag and not _NUMBER.fullmatch(word) and len(word) > 1
        if not is_flag and not brief:
            loose.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if brief:
            name = (short or {}).get(name, name)
        if equals:
            flags[name] = _open(value)
            continue
        values: list[str] = []
        # A script's own name ends what belongs to its launcher's flags.
        while (
            i < len(words)
            and name not in switches
            and not _is_flag(words[i])
            and not words[i].endswith(".py")
        ):
            values.append(words[i])
            i += 1
        flags[name] = True if not values else _open(values[0]) if len(values) == 1 else values
    return flags, loose


def _open(value: str) -> Any:
    return None if OPEN in value else value


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _is_prefix(value: str) -> bool:
    """`A=1 command ...`: an assignment in front of a command, not one on its own."""
    value = value.strip()
    return not value.startswith(("(", '"', "'")) and bool(re.search(r"\S\s+\S", value))


def _logical_lines(text: str) -> list[str]:
    """Lines with continuations joined and comments gone; an array in parentheses is one line."""
    lines: list[str] = []
    held, depth = "", 0
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw)
        more = line.rstrip().endswith("\\")
        line = line.rstrip().removesuffix("\\")
        depth += line.count("(") - line.count(")")
        quoted = (held + line).count('"') % 2 == 1
        held = f"{held} {line}" if held else line
        if more or depth > 0 or quoted:
            continue
        if held.strip():
            lines.append(held)
        held, depth = "", 0
    if held.strip():
        lines.append(held)
    return lines


def _fill(text: str, known: Mapping[str, str]) -> str:
    text = re.sub(r'"(\$\{[A-Za-z_]\w*\[[@*]\]\})"', r"\1", text)  # an array's words stay apart

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name is None:
            return OPEN
        return known.get(name, match[2] if match[2] is not None else OPEN)

    return _VARIABLE.sub(value, text.replace("$(", f"{OPEN}("))


def _split(text: str, where: str) -> list[str]:
    try:
        words = shlex.split(text, comments=False)
    except ValueError as error:
        raise InputError(f"not a command line: {error}", where=where) from None
    if len(words) > MAX_WORDS:
        raise InputError(f"more than {MAX_WORDS:,} words in one command", where=where)
    return words
