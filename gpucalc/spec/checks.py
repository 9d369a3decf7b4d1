"""What is known to be wrong in launch scripts: names of settings, their readings, commands, flags.

These are tables of other programs' behaviour, with sources, kept in the catalogue and not in code.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gpucalc.spec.base import Spec, refuse


class Severity(StrEnum):
    """What a finding means for the job."""

    ERROR = "error"  # it fails, or does not do what is written
    WARNING = "warning"  # it works, and costs something
    NOTE = "note"  # worth knowing


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(f"not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
Sources = Annotated[tuple[str, ...], Field(min_length=1)]


class Remark(Spec):
    """Why something is wrong, how much, and the right form; `claims` are the documents' lines it answers."""

    severity: Severity
    reason: str
    right: str
    source: Sources
    claims: tuple[str, ...] = ()


class ValueRemark(Remark):
    """A remark on values of a variable that fit a pattern whole."""

    value: Pattern


class VariableSpec(Spec):
    """One variable with the values it takes and what some of them do."""

    name: str
    values: tuple[str, ...] = ()  # the legal ones; empty: any
    exact: bool = False  # capitals count
    keys: tuple[str, ...] = ()  # of a value that is key:value,key:value
    source: Sources
    remarks: tuple[ValueRemark, ...] = ()


class OldName(Spec):
    """A name that is gone or has another one now."""

    name: str
    to: str | None = None
    severity: Severity
    reason: str
    right: str | None = None
    source: Sources
    claims: tuple[str, ...] = ()
    unless: Pattern | None = None  # in the same line, where the name is right after all

    @model_validator(mode="after")
    def _says_what_instead(self) -> OldName:
        if self.to is None and self.right is None:
            raise refuse(f"{self.name} needs a new name or what to do instead")
        return self


class Conflict(Remark):
    """Variables that must not be set together. A name may have alternatives: `NEW|OLD`."""

    variables: dict[str, Pattern]


class SettingsSpec(Spec):
    """The environment variables of one library."""

    id: str
    name: str
    prefixes: tuple[str, ...]  # names that begin so and are not listed are unknown
    source: Sources
    integers: tuple[str, ...]
    integer_reading: str
    texts: tuple[str, ...]
    others: tuple[str, ...] = ()
    other_prefixes: tuple[str, ...] = ()
    old_names: tuple[OldName, ...] = ()
    variables: tuple[VariableSpec, ...] = ()
    conflicts: tuple[Conflict, ...] = ()


class CommandRule(Remark):
    """A command or call that does not work, by its form."""

    id: str
    pattern: Pattern


class CommandsSpec(Spec):
    """Commands and calls that do not work."""

    id: str
    name: str
    rules: tuple[CommandRule, ...]


class FlagConflict(Remark):
    """Flags that must not stand together."""

    flags: tuple[str, ...]


class LauncherSpec(Spec):
    """A program that starts ranks, and the flags it takes before the script."""

    name: str
    pattern: Pattern
    source: Sources
    switches: tuple[str, ...]
    flags: dict[str, Pattern]  # what the value has to be, whole
    old_flags: tuple[OldName, ...] = ()
    conflicts: tuple[FlagConflict, ...] = ()


class LaunchersSpec(Spec):
    """Programs that start ranks."""

    id: str
    name: str
    launchers: tuple[LauncherSpec, ...]


class MonitorSpec(Spec):
    """One command to run beside a job, and on which machines it tells something."""

    id: str
    command: str
    shows: str
    needs: tuple[Literal["several", "nvlink", "ecc", "profiling"], ...] = ()
    source: Sources
    claims: tuple[str, ...] = ()


class MonitorsSpec(Spec):
    """Commands to run beside a job."""

    id: str
    name: str
    commands: tuple[MonitorSpec, ...]
