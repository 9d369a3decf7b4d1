"""What `--set KEY=VALUE` changes: the words read, and put into a job's or a model's data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.base import Name, keys_of
from gpucalc.spec.job import Job
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun
from gpucalc.spec.yamlio import parse_scalar


@dataclass(frozen=True, slots=True)
class Change:
    """One key set by a flag."""

    key: str
    value: Any
    text: str


def read_change(text: str) -> Change:
    """The change that KEY=VALUE asks for. Raises InputError or UnknownName."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError("is not KEY=VALUE", where="--set", given=text, legal="such as run.seq_len=4096")
    first = key.split(".", 1)[0]
    if first not in keys_of(Job):
        runs = {**TrainRun.model_fields, **ServeRun.model_fields}
        near = (
            (f"run.{key}",) if first in runs else nearest(key, [*keys_of(Job), *(f"run.{k}" for k in runs)])
        )
        raise UnknownName("no such key", where="--set", key=key, legal=keys_of(Job), near=near)
    found = parse_scalar(value, "--set")
    if key in _texts() and found is not None and not isinstance(found, str):
        found = value.strip()  # version=0.10 is no number
    return Change(key, found, text)


def _texts() -> set[str]:
    """Keys that hold nothing but text."""
    groups = (("", Job), ("run.", TrainRun), ("run.", ServeRun))
    return {
        f"{group}{key}"
        for group, spec in groups
        for key, field in spec.model_fields.items()
        if field.annotation in (str | None, Name | None)
    }


def apply_changes(data: dict[str, Any], changes: Sequence[Change]) -> None:
    """Put changes into parsed data; an empty value takes the key out."""
    for change in changes:
        *groups, last = change.key.split(".")
        inside = data
        for depth, group in enumerate(groups, start=1):
            part = inside.setdefault(group, {})
            if not isinstance(part, dict):
                raise InputError(
                    f"{'.'.join(groups[:depth])} is a single value here",
                    where="--set",
                    key=change.key,
                    given=part,
                )
            inside = part
        if change.value is None:
            inside.pop(last, None)
        else:
            inside[last] = change.value
