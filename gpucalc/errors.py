"""Errors a user can cause, each carrying where, what was given, what is legal, and the nearest name.

Everything raised on purpose derives from `GpucalcError`; the command line turns it into one
line on stderr and the exit code it carries. Nothing here imports from the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process says to the shell. Frozen: CI pipelines depend on it."""

    ANSWERED = 0
    NO = 1  # a check failed, or --strict and the plan does not fit
    USAGE = 2  # bad flags or bad input
    INTERNAL = 3  # our fault
    CANNOT_MEASURE = 4  # no device, driver or permission


class GpucalcError(Exception):
    """A problem with a message for the user and an exit code for the shell."""

    exit_code = ExitCode.USAGE


class InputError(GpucalcError):
    """A file, flag or key that cannot be used.

    `where` is the file or flag, `key` the dotted path in it, `given` the offending value,
    `legal` what would be accepted, `near` the closest legal names. All optional; the message
    always reads as one line. `also`: the other errors of the same file, said in that line too.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        key: str | None = None,
        given: object = None,
        legal: str | Iterable[object] | None = None,
        near: Sequence[str] = (),
    ) -> None:
        self.problem = problem
        self.where = where
        self.key = key
        self.given = given
        self.legal = legal
        self.near = tuple(near)
        self.also: tuple[InputError, ...] = ()
        super().__init__(self._one_line())

    def _one_line(self) -> str:
        place = ": ".join(part for part in (self.where, self.key) if part)
        text = f"{place}: {self.problem}" if place else self.problem
        if self.given is not None:
            text += f", got {_short(self.given)}"
        if self.legal is not None:
            legal = self.legal if isinstance(self.legal, str) else ", ".join(str(v) for v in self.legal)
            text += f"; legal: {legal}"
        if self.near:
            text += f"; did you mean {' or '.join(self.near)}?"
        return one_line(text)


class UnknownName(InputError):
    """A catalogue name, key or choice that does not exist; never replaced by a default."""


class UnsupportedModel(InputError):
    """An architecture whose arithmetic is not known; refused by name rather than guessed."""


class Infeasible(GpucalcError):
    """A layout that breaks rules. Carries every broken rule, with the equation and its values."""

    def __init__(self, rules: Sequence[str]) -> None:
        self.rules = tuple(rules)
        super().__init__("this layout cannot run: " + "; ".join(self.rules))


class CannotMeasure(GpucalcError):
    """The machine cannot be measured (no device, driver, permission or package)."""

    exit_code = ExitCode.CANNOT_MEASURE


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """The closest known names to a mistyped one, best first; empty when nothing is close."""
    from difflib import get_close_matches  # error path only: keeps start-up short

    candidates = list(dict.fromkeys(known))
    folded = {candidate.casefold(): candidate for candidate in candidates}
    matches = get_close_matches(name.casefold(), list(folded), n=count, cutoff=0.5)
    return tuple(folded[match] for match in matches)


def one_line(text: str) -> str:
    """The text on one line, control characters (terminal escapes among them) made visible."""
    return "".join(ch if ch.isprintable() else repr(ch)[1:-1] if ch != "\n" else " " for ch in text)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
