"""Launch scripts and environments: settings nobody reads, commands that do not work, flags that do not exist.

What is wrong is written in the catalogue (`checks/`); here is only how a text is held against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpucalc.catalog import Catalog
from gpucalc.doctor.finding import Finding, Report, report
from gpucalc.doctor.launcher import flags_wrong
from gpucalc.doctor.script import ScriptLine, Setting, lines, settings
from gpucalc.errors import CannotMeasure, nearest
from gpucalc.spec.checks import (
    CommandRule,
    CommandsSpec,
    Conflict,
    LaunchersSpec,
    OldName,
    SettingsSpec,
    Severity,
    VariableSpec,
)

MAX_TEXT = 4 * 2**20
LONGEST_LINE = 20_000  # what a pattern is tried on; longer lines hold data, not commands
_INTEGER = re.compile(r"[+-]?(0x[0-9a-f]+|[0-9]+)", re.IGNORECASE)
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Tables:
    """What the catalogue knows to be wrong."""

    settings: tuple[SettingsSpec, ...]
    commands: CommandsSpec
    launchers: LaunchersSpec


def tables(catalog: Catalog) -> Tables:
    """The tables of a catalogue."""
    return Tables(
        tuple(catalog.load("checks", name, SettingsSpec) for name in ("nccl", "torch")),
        catalog.load("checks", "commands", CommandsSpec),
        catalog.load("checks", "launchers", LaunchersSpec),
    )


def lint(text: str, catalog: Catalog, *, where: str) -> Report:
    """Every finding in a text. Raises CannotMeasure for one that holds nothing."""
    script = tuple(line for line in lines(text) if len(line.text) <= LONGEST_LINE)
    if not script:
        raise CannotMeasure(f"{where}: holds no line to look at; give a launch script or the output of env")
    known, found = tables(catalog), settings(script)
    items = [
        *settings_wrong(found, known.settings),
        *(item for line in script for item in _commands(line, known.commands.rules)),
        *(item for line in script for item in flags_wrong(line, known.launchers.launchers)),
    ]
    facts = (("lines", str(len(script))), ("settings", str(len({item.name for item in found}))))
    return report(where, items, catalog, facts=facts)


def settings_wrong(found: Iterable[Setting], known: Iterable[SettingsSpec]) -> Iterator[Finding]:
    """What is wrong with settings, each by itself and together."""
    held, libraries = tuple(found), tuple(known)
    old = {item.name: item for library in libraries for item in library.old_names}
    variables = {item.name: item for library in libraries for item in library.variables}
    told: set[tuple[str, str | None]] = set()
    for setting in held:
        if setting.unset or (setting.name, setting.value) in told:
            continue
        told.add((setting.name, setting.value))
        if setting.name in old:
            yield _renamed(setting, old[setting.name])
        for library in libraries:
            if _unknown(setting.name, library, old):
                yield _no_such(setting, library, libraries)
            elif setting.name in library.integers:
                yield from _not_whole(setting, library)
        if setting.name in variables:
            yield from _value(setting, variables[setting.name])
    for library in libraries:
        for conflict in library.conflicts:
            yield from _together(held, conflict)


def _unknown(name: str, library: SettingsSpec, old: dict[str, OldName]) -> bool:
    if not name.startswith(library.prefixes) or name in old or name.startswith(library.other_prefixes):
        return False
    return name not in {*library.integers, *library.texts, *library.others}


def _no_such(setting: Setting, library: SettingsSpec, libraries: tuple[SettingsSpec, ...]) -> Finding:
    names = [name for other in libraries for name in (*other.integers, *other.texts)]
    # The same words under another library's prefix are the likelier slip than a similar word.
    moved = [name for name in names if name in (f"TORCH_{setting.name}", setting.name.removeprefix("TORCH_"))]
    near = tuple(moved) or nearest(setting.name, names, count=2)
    right = f"did you mean {' or '.join(near)}?" if near else "leave it out"
    problem = f"no such variable in {library.name.removesuffix(' environment variables')}: nothing reads it"
    return Finding(
        "unknown-variable", Severity.ERROR, setting.name, problem, _shown(setting.written), right,
        library.source, line=setting.line,
    )  # fmt: skip


def _renamed(setting: Setting, item: OldName) -> Finding:
    new = "" if item.to is None or setting.value is None or "=" in item.to else f"={setting.value}"
    same = item.to is not None and item.to.removeprefix("TORCH_") == item.name
    right = item.right or (f"{item.to}{new if same else ''}")
    return Finding(
        "old-name", item.severity, setting.name, item.reason, _shown(setting.written), right,
        item.source, item.claims, setting.line,
    )  # fmt: skip


def _not_whole(setting: Setting, library: SettingsSpec) -> Iterator[Finding]:
    value = setting.known_value
    if not value or _INTEGER.fullmatch(value.strip()):
        return
    word = value.strip().casefold()
    right = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}.get(word)
    yield Finding(
        "wrong-type", Severity.ERROR, setting.name, f"takes a whole number; {library.integer_reading}",
        _shown(setting.written), f"{setting.name}={right}" if right else "a whole number, without a unit",
        library.source, line=setting.line,
    )  # fmt: skip


def _value(setting: Setting, known: VariableSpec) -> Iterator[Finding]:
    value = setting.known_value
    if value is None:
        return
    legal = {item if known.exact else item.casefold() for item in known.values}
    given = value.strip() if known.exact else value.strip().casefold()
    if legal and given not in legal:
        listed = ", ".join(known.values)
        yield Finding(
            "wrong-value", Severity.ERROR, setting.name, "no value it knows", _shown(setting.written),
            f"one of {listed}", known.source, line=setting.line,
        )  # fmt: skip
        return
    if known.keys:
        for key in re.findall(r"(?:^|,)\s*([\w-]+)\s*:", re.sub(r"\[[^\]]*\]", "", value)):
            if key not in known.keys:
                near = nearest(key, known.keys, count=2)
                yield Finding(
                    "wrong-value", Severity.ERROR, setting.name, f"has no option {key}: torch refuses it",
                    _shown(setting.written), f"did you mean {' or '.join(near)}?" if near else None,
                    known.source, line=setting.line,
                )  # fmt: skip
    for remark in known.remarks:
        if re.fullmatch(remark.value, value, re.IGNORECASE if legal and not known.exact else 0):
            yield Finding(
                "costly-value", remark.severity, setting.name, remark.reason, _shown(setting.written),
                remark.right, remark.source, remark.claims, setting.line,
            )  # fmt: skip
            return


def _together(found: tuple[Setting, ...], conflict: Conflict) -> Iterator[Finding]:
    last: dict[str, Setting] = {}
    for setting in found:  # what is set last holds; what is taken back is gone
        last.pop(setting.name, None)
        if not setting.unset and setting.value is not None:
            last[setting.name] = setting
    held: list[Setting] = []
    for names, pattern in conflict.variables.items():
        fitting = [
            last[name]
            for name in names.split("|")
            if name in last and re.fullmatch(pattern, last[name].value or "")
        ]
        if not fitting:
            return
        held.append(fitting[0])
    line = max(item.line for item in held)
    yield Finding(
        "conflict", conflict.severity, " and ".join(item.name for item in held), conflict.reason,
        _shown("; ".join(f"line {item.line}: {item.written}" for item in held)), conflict.right,
        conflict.source, conflict.claims, line,
    )  # fmt: skip


def _commands(line: ScriptLine, rules: tuple[CommandRule, ...]) -> Iterator[Finding]:
    for rule in rules:
        if match := re.search(rule.pattern, line.text):
            yield Finding(
                rule.id, rule.severity, _shown(match[0].strip(), 40), rule.reason, _shown(line.text.strip()),
                rule.right, rule.source, rule.claims, line.number(match.start()),
            )  # fmt: skip


def _shown(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
