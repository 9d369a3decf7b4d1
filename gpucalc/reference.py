"""Every formula the answers are made of, with what it takes, where it is from and who uses it.

Read from the program itself: the registry, the source of the functions and the files that call
them. `gpucalc formulas` shows it, and the committed reference is its markdown.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpucalc import formulas
from gpucalc.catalog import Catalog
from gpucalc.errors import UnknownName, nearest
from gpucalc.formula import FORMULAS, Formula, unit_of
from gpucalc.spec.claims import ClaimGroupSpec

_PACKAGE = Path(__file__).parent
_FORMULAS = "gpucalc.formulas"


@dataclass(frozen=True, slots=True)
class Entry:
    """One formula as the reference shows it."""

    formula: Formula
    module: str  # of gpucalc.formulas
    line: int
    text: str  # the docstring
    expression: str  # as written, lines broken
    parameters: tuple[tuple[str, str | None], ...]  # name, unit; None: a count, a share or a choice
    used_by: tuple[str, ...]  # files of the package, from its folder
    claims: tuple[str, ...]  # ids of claims worked out with it

    @property
    def name(self) -> str:
        """The quantity it yields."""
        return self.formula.name

    def document(self) -> dict[str, Any]:
        """The same for a JSON document."""
        return {
            "name": self.name,
            "unit": self.formula.unit,
            "module": self.module,
            "text": self.text,
            "expression": self.formula.expression,
            "parameters": [{"name": name, "unit": unit} for name, unit in self.parameters],
            "source": self.formula.source,
            "used_by": list(self.used_by),
            "claims": list(self.claims),
        }


@dataclass(frozen=True, slots=True)
class Module:
    """The formulas of one file, in its order, under what its docstring says of them."""

    name: str
    text: str
    entries: tuple[Entry, ...]


def reference(catalog: Catalog, *, module: str | None = None) -> tuple[Module, ...]:
    """Every module of formulas, or the one of that name. Raises UnknownName."""
    names = sorted(info.name for info in pkgutil.iter_modules(formulas.__path__))
    if module is not None and module not in names:
        near = nearest(module, names)
        raise UnknownName("no such module", where="--module", given=module, legal=names, near=near)
    loaded = {name: importlib.import_module(f"{_FORMULAS}.{name}") for name in names}
    claimed = _claims(catalog)
    used = _uses()
    return tuple(
        Module(
            name,
            inspect.getdoc(loaded[name]) or "",
            tuple(
                _entry(formula, used.get(formula.name, ()), claimed.get(formula.name, ()))
                for formula in FORMULAS.values()
                if formula.function.__module__ == f"{_FORMULAS}.{name}"
            ),
        )
        for name in names
        if module in (None, name)
    )


def entry(catalog: Catalog, name: str) -> Entry:
    """The formula of that name. Raises UnknownName with near ones."""
    entries = {entry.name: entry for module in reference(catalog) for entry in module.entries}
    if name not in entries:
        legal, near = "`gpucalc formulas` lists them", nearest(name, entries)
        raise UnknownName("unknown formula", where="NAME", given=name, legal=legal, near=near)
    return entries[name]


def _entry(formula: Formula, used: tuple[str, ...], claims: tuple[str, ...]) -> Entry:
    return Entry(
        formula=formula,
        module=formula.function.__module__.removeprefix(f"{_FORMULAS}."),
        line=inspect.getsourcelines(formula.function)[1],
        text=inspect.getdoc(formula.function) or "",
        expression=_written(formula),
        parameters=tuple((name, unit_of(name)) for name in inspect.signature(formula.function).parameters),
        used_by=used,
        claims=claims,
    )


def _written(formula: Formula) -> str:
    """The returned expression with the line breaks of its file."""
    source = textwrap.dedent(inspect.getsource(formula.function))
    returned = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return))
    assert returned.value is not None
    lines = source.splitlines()[returned.lineno - 1 : returned.end_lineno]
    return textwrap.dedent("\n".join(lines)).removeprefix("return ")


def _claims(catalog: Catalog) -> dict[str, tuple[str, ...]]:
    """The claims that are worked out with each formula."""
    found: dict[str, list[str]] = {}
    for topic in catalog.names("claims"):
        for claim in catalog.load("claims", topic, ClaimGroupSpec).claims:
            for item in claim.computed:
                if item.formula is not None:
                    found.setdefault(item.formula, []).append(claim.id)
    return {name: tuple(sorted(set(ids))) for name, ids in found.items()}


@cache
def _uses() -> dict[str, tuple[str, ...]]:
    """The files of the package that name each formula; a formula does not use itself."""
    found: dict[str, set[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        where = path.relative_to(_PACKAGE).as_posix()
        for name in _named(ast.parse(path.read_text(encoding="utf-8")), path):
            found.setdefault(name, set()).add(where)
    return {name: tuple(sorted(files)) for name, files in found.items()}


def _named(tree: ast.Module, path: Path) -> Iterator[str]:
    """The formulas a file reaches through what it imports from their package."""
    modules: set[str] = set()  # local names of modules of formulas
    direct: dict[str, str] = {}  # local names of formulas, and their own
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == _FORMULAS:
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{_FORMULAS}."):
            direct |= {alias.asname or alias.name: alias.name for alias in node.names}
    own = path.parent == _PACKAGE / "formulas"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in direct:
                yield direct[node.id]
            elif own and node.id in FORMULAS:
                yield node.id
