"""Errors a user can cause, each carrying where, what was given, what is legal, and the nearest name.

Everything raised on purpose derives from `GpucalcError`; the command line turns it into one
line on stderr and the exit code it carries. Nothing here imports from the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

CLOSE = 0.6  # share of letters that two names must have in common, in their order
BEGINS = 0.9  # what a name counts that only begins alike
FEW = 4  # letters: shorter names begin like too many others
_BETWEEN = str.maketrans("", "", "-_ ./")


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

    def at(self, where: str) -> InputError:
        """The same error, of that file or flag where it names none."""
        if self.where is None:
            self.where = where
            self.args = (self._one_line(),)
        return self

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
    """The closest known names to a mistyped one, best first; empty when nothing is close.

    A name that goes on where the mistyped one ends is close too: llama-3-8b to llama3.
    """
    from difflib import SequenceMatcher  # error path only: keeps start-up short

    wanted = _letters(name)
    if not wanted:
        return ()
    matcher = SequenceMatcher(b=wanted, autojunk=False)

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        quick = min(matcher.real_quick_ratio(), matcher.quick_ratio())
        return matcher.ratio() if quick >= CLOSE else 0.0

    found: list[tuple[float, int, int, str]] = []  # of equals the shortest, then the first
    for place, candidate in enumerate(dict.fromkeys(known)):
        letters = _letters(candidate)
        start = letters[: len(wanted)] if len(wanted) >= FEW else ""
        like = max(likeness(letters), BEGINS * likeness(start))
        if like >= CLOSE:
            found.append((-like, len(letters), place, candidate))
    return tuple(row[-1] for row in sorted(found)[:count])


def _letters(name: str) -> str:
    """A name without what people leave out or add."""
    return name.casefold().translate(_BETWEEN)


def one_line(text: str) -> str:
    """The text on one line, control characters (terminal escapes among them) made visible."""
    return "".join(ch if ch.isprintable() else repr(ch)[1:-1] if ch != "\n" else " " for ch in text)


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
