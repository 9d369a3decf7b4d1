"""What importers of other people's files share: keys ticked off as they are read, a job in the making.

A foreign file says many things that have no bearing on memory or speed, and sometimes says "auto".
Each key ends in exactly one list: understood, asked for (said to be automatic, or empty), or ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpucalc.errors import InputError

_TRUE = {"true", "yes", "on", "1", "y", "enabled"}
_FALSE = {"false", "no", "off", "0", "n", "none", "null", "disabled", ""}
_THOUSANDS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}  # as vLLM reads 8k and 8K
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ImportedJob:
    """A job's keys out of a foreign file, and what was made of the rest.

    `data` may lack the model or the GPUs: most such files name neither. `asked`: keys the file leaves
    open, each with the key of ours that settles it. `ranks`: processes the file starts, None where it
    does not say. `engine_length`: the engine takes the model's longest context where none is stated.
    """

    format: str
    where: str
    data: dict[str, Any]
    understood: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    ranks: int | None = None
    engine_length: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan of it repeats: everything assumed, open or ignored."""
        ignored = (f"not used: {', '.join(self.ignored)}",) if self.ignored else ()
        return (*self.assumed, *self.asked, *(f"{self.where}: {text}" for text in ignored))


class Words:
    """The keys of a foreign file. Spelling folds case and `-` to `_`; each key is used once or reported."""

    def __init__(self, words: Mapping[str, Any], where: str, prefix: str = "", top: Words | None = None):
        self.where = where
        self.prefix = prefix
        self.words = {fold(str(key)): (str(key), value) for key, value in words.items()}
        self.used: set[str] = set()
        self.groups: dict[str, Words] = {}
        top = top or self
        self.top = top
        if top is self:
            self.understood: list[str] = []
            self.assumed: list[str] = []
            self.asked: list[str] = []
            self.skipped: list[str] = []
            self.inner: list[Words] = []
        else:
            top.inner.append(self)

    # -- reading ---------------------------------------------------------------------------------

    def has(self, *names: str) -> bool:
        """Whether one of the keys is there and says something."""
        return any(self.words.get(name, ("", None))[1] is not None for name in names)

    def peek(self, name: str) -> Any:
        """The value without ticking it off."""
        return self.words.get(name, ("", None))[1]

    def take(self, *names: str, sets: str | None = None) -> Any:
        """The first of these keys that says something, else None.

        "auto" is not a value: it is noted as asked for when `sets` names the key of ours it would set.
        """
        found = None
        for name in names:
            if name not in self.words:
                continue
            key, value = self.words[name]
            self.used.add(name)
            if value is None or found is not None:
                continue
            if isinstance(value, str) and value.strip().lower() == AUTO and sets:
                self.ask(f'{self.prefix}{key} is "auto"', sets)
                continue
            found = value
            self.top.understood.append(f"{self.prefix}{key}")
        return found

    def whole(self, *names: str, sets: str | None = None) -> int | None:
        """A whole number, also as text: shells and many trainers quote them."""
        value = self.take(*names, sets=sets)
        if value is None:
            return None
        number = _whole(value)
        if number is None:
            raise self.wrong(names, "is not a whole number", value)
        return number

    def degree(self, *names: str, sets: str | None = None) -> int | None:
        """A whole number of at least 1; 0 and -1 (a rank count left open) count as not said."""
        number = self.whole(*names, sets=sets)
        return None if number is None or number < 1 else number

    def real(self, *names: str) -> float | None:
        """A number."""
        value = self.take(*names)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise self.wrong(names, "is not a number", value) from None

    def flag(self, *names: str, sets: str | None = None) -> bool | None:
        """True or false in any spelling; None when not said."""
        value = self.take(*names, sets=sets)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        if word == AUTO:  # settled by whoever the file belongs to
            return None
        raise self.wrong(names, "is neither true nor false", value)

    def text(self, *names: str, sets: str | None = None) -> str | None:
        """A word or path."""
        value = self.take(*names, sets=sets)
        if value is None:
            return None
        if isinstance(value, bool | int | float):
            return str(value).lower() if isinstance(value, bool) else str(value)
        if not isinstance(value, str):
            raise self.wrong(names, "is not text", value)
        return value.strip()

    def group(self, *names: str) -> Words | None:
        """A nested group of keys, None without one."""
        for name in names:
            key, value = self.words.get(name, ("", None))
            if isinstance(value, Mapping):
                self.used.add(name)
                if name not in self.groups:
                    self.groups[name] = Words(value, self.where, f"{self.prefix}{key}.", self.top)
                return self.groups[name]
        return None

    def skip(self, *names: str) -> None:
        """Tick keys off that have no bearing, such as the name of a run."""
        self.used.update(names)

    # -- saying ----------------------------------------------------------------------------------

    def assume(self, text: str) -> None:
        """Note something taken for granted."""
        self.top.assumed.append(text)

    def ask(self, what: str, sets: str) -> None:
        """Note something the file leaves open and the key that settles it."""
        self.top.asked.append(f"{what}; settle it with --set {sets}=VALUE")

    def wrong(self, names: Iterable[str], problem: str, given: Any, legal: str | None = None) -> InputError:
        """An error at the first of these keys that is there."""
        name = next((n for n in names if n in self.words), next(iter(names)))
        key = self.words.get(name, (name, None))[0]
        return InputError(problem, where=self.where, key=f"{self.prefix}{key}", given=given, legal=legal)

    def left_over(self) -> list[str]:
        """Keys nobody read, those of nested groups included."""
        own = [
            f"{self.prefix}{key}"
            for name, (key, value) in self.words.items()
            if name not in self.used and value is not None
        ]
        if self.top is not self:
            return own
        return own + [key for inner in self.inner for key in inner.left_over()]

    # -- the end ---------------------------------------------------------------------------------

    def job(self, format: str, draft: Draft) -> ImportedJob:
        """Everything read so far as a job."""
        data: dict[str, Any] = {}
        if draft.model is not None:
            data["model"] = draft.model
        run = {"task": "train"} | draft.run
        data["run"] = {key: value for key, value in run.items() if value is not None}
        return ImportedJob(
            format=format,
            where=self.where,
            data=data,
            understood=tuple(dict.fromkeys(self.understood)),
            assumed=tuple(dict.fromkeys(self.assumed)),
            asked=tuple(dict.fromkeys(self.asked)),
            ignored=tuple(dict.fromkeys(self.left_over())),
            ranks=draft.ranks,
            engine_length=draft.engine_length,
        )


@dataclass(slots=True)
class Draft:
    """A job in the making; values of None are dropped at the end."""

    run: dict[str, Any] = field(default_factory=dict)
    model: str | dict[str, Any] | None = None
    ranks: int | None = None
    engine_length: bool = False


def fold(name: str) -> str:
    """One spelling of a key: `--Max-Model-Len` is max_model_len."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def precision_of(words: Words, fp16: bool | None, bf16: bool | None) -> str | None:
    """The precision of two switches; both on is an error, both off fp32, neither said None."""
    if fp16 and bf16:
        raise InputError("fp16 and bf16 are both on", where=words.where, key=f"{words.prefix}fp16")
    if fp16 or bf16:
        return "fp16" if fp16 else "bf16"
    return None if fp16 is None and bf16 is None else "fp32"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if not isinstance(value, str) or len(value) > 30:
        return None
    text = value.strip().replace("_", "")
    unit = _THOUSANDS.get(text[-1:], 1)
    if unit != 1:
        text = text[:-1]
    try:
        number = float(text) * unit
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
