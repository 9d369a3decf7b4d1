"""Reading the blocks of a page: the files it shows and the commands a reader types, in order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"(?:#|//) ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Shown:
    """A block that is a file: its first line is a comment with the name."""

    name: str
    text: str


@dataclass(frozen=True)
class Typed:
    """One command line of a shell block; a comment may say that it does not exit with 0."""

    line: str

    @property
    def exits(self) -> int:
        """The exit code the page says."""
        said = re.search(r"  # exits (\d)\b", self.line)
        return int(said[1]) if said else 0


@dataclass(frozen=True)
class Coded:
    """A block of Python that is no file: what a reader pastes into an interpreter."""

    text: str


def steps(page: str) -> Iterator[Shown | Typed | Coded]:
    """The files, commands and pieces of Python of a page, in its order."""
    for language, text in _BLOCK.findall(page):
        named = _NAME.match(text)
        if named is not None:
            yield Shown(named[1], text[named.end() :])
        elif language == "sh":
            # A line that ends in a backslash goes on.
            yield from (Typed(line) for line in text.replace("\\\n", " ").splitlines() if line.strip())
        elif language == "python":
            yield Coded(text)
