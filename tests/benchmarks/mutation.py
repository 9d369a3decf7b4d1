"""Mutation score of the formulas: which changes of a constant or an operator no test notices.

    python tests/benchmarks/mutation.py [--operators] [NAME...]

Each number written in a formula, or in the constants of its module, is changed by a tenth (a zero
becomes a tenth); with `--operators` also + and -, * and /, < and <=, minimum and maximum are swapped,
one at a time. In a child process the changed formula meets the tests that name it, then the other
tests of those files, until one fails. NAME: formulas to look at; all when none is given. Prints the
survivors and the score; exits 1 below 95 %.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpucalc.formula import FORMULAS

ROOT = Path(__file__).parents[2]
TARGET = 0.95
SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum"}
# A file's other tests are asked only where the formula's own say nothing.
MOST_OTHERS = 150


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: where it is, in words, and what makes it."""

    formula: str
    words: str
    apply: Callable[[], None]


def modules() -> list[ModuleType]:
    """The families of formulas."""
    paths = sorted((ROOT / "gpucalc" / "formulas").glob("*.py"))
    return [importlib.import_module(f"gpucalc.formulas.{path.stem}") for path in paths]


def mutants(wanted: set[str], *, operators: bool) -> Iterator[Mutant]:
    """Every change to every wanted formula."""
    for name, info in FORMULAS.items():
        if wanted and name not in wanted:
            continue
        function = info.function
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        docstring = definition.body[0]
        places = [
            index
            for index, node in enumerate(ast.walk(tree))
            if node is not docstring and _mutable(node, operators)
        ]
        for index in places:
            changed = copy.deepcopy(tree)
            words = _change(list(ast.walk(changed))[index])
            yield Mutant(name, words, _replacing(function, changed))
        module = importlib.import_module(function.__module__)
        for constant in sorted(set(_globals(tree)) & set(vars(module))):
            value = getattr(module, constant)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield Mutant(name, f"{constant} = {value}", _setting(module, constant, _tenth_more(value)))


def _mutable(node: ast.AST, operators: bool) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if not operators:
        return False
    if isinstance(node, ast.BinOp):
        return type(node.op) in SWAPS
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    return isinstance(node, ast.Name) and node.id in NAMES


def _change(node: ast.AST) -> str:
    """Change the node where it stands; what it was and is."""
    before = ast.unparse(node)
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int | float)
        node.value = _tenth_more(node.value)
    elif isinstance(node, ast.BinOp):
        node.op = SWAPS[type(node.op)]()  # type: ignore[index,abstract]  # only kinds of the table come here
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[index,abstract]  # as above
    elif isinstance(node, ast.Name):
        node.id = NAMES[node.id]
    return f"{before} -> {ast.unparse(node)}"


def _tenth_more(value: float) -> float:
    return value * 1.1 if value else 0.1


def _replacing(function: Callable[..., Any], tree: ast.Module) -> Callable[[], None]:
    def apply() -> None:
        space: dict[str, Any] = {}
        code = compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec")
        exec(code, function.__globals__, space)  # our own source, changed by a constant
        function.__code__ = space[function.__name__].__code__

    return apply


def _setting(module: ModuleType, name: str, value: float) -> Callable[[], None]:
    return lambda: setattr(module, name, value)


def _globals(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id.isupper():
            yield node.id


class Hunt:
    """A pytest plugin that runs the collected tests against each mutant instead of once."""

    def __init__(self, found: list[Mutant]) -> None:
        self.found = found
        self.survivors: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Ask the tests about every mutant."""
        by_file: dict[Path, list[pytest.Function]] = {}
        for item in session.items:
            if isinstance(item, pytest.Function):
                by_file.setdefault(item.path, []).append(item)
        texts = {path: path.read_text(encoding="utf-8") for path in by_file}
        sources = {item: inspect.getsource(item.function) for items in by_file.values() for item in items}
        for name in sorted({mutant.formula for mutant in self.found}):
            same = Mutant(name, "unchanged", lambda: None)
            if self._noticed(same, [item for item, text in sources.items() if name in text]):
                raise pytest.UsageError(f"the tests of {name} fail without a change")
        for done, mutant in enumerate(self.found, 1):
            word = mutant.formula
            own = [item for item, text in sources.items() if word in text]
            beside = [
                item for path, items in by_file.items() if word in texts[path]
                for item in items if word not in sources[item]
            ]  # fmt: skip
            if not self._noticed(mutant, [*own, *beside[:MOST_OTHERS]]):
                self.survivors.append(mutant)
                print(f"{done}/{len(self.found)} survives: {word}: {mutant.words}", flush=True)
        return True

    def _noticed(self, mutant: Mutant, items: list[pytest.Function]) -> bool:
        child = os.fork()
        if child == 0:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            if reporter := items and items[0].config.pluginmanager.get_plugin("terminalreporter"):
                items[0].config.pluginmanager.unregister(reporter)
            mutant.apply()
            for item in items:
                try:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    if item.session.testsfailed:
                        os._exit(1)
                except BaseException:  # whatever a changed formula raises is noticed
                    os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0


def main() -> int:
    """Run the mutants; 0 when enough of them are noticed."""
    operators = "--operators" in sys.argv
    wanted = {word for word in sys.argv[1:] if not word.startswith("-")}
    modules()
    if unknown := wanted - set(FORMULAS):
        print(f"no such formula: {', '.join(sorted(unknown))}")
        return 2
    found = list(mutants(wanted, operators=operators))
    names = {mutant.formula for mutant in found}
    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        if any(name in path.read_text(encoding="utf-8") for name in names)
    ]
    hunt = Hunt(found)
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *files], plugins=[hunt])
    score = 1 - len(hunt.survivors) / len(found)
    print(f"{len(found)} mutants of {len(names)} formulas, {len(hunt.survivors)} survive: score {score:.1%}")
    return 0 if score >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
