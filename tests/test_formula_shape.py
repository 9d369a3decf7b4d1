"""What every formula looks like: one expression of keyword-only quantities, with unit, source and a test."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from gpucalc.formula import FORMULAS

ROOT = Path(__file__).parents[1]
FAMILIES = sorted(path for path in (ROOT / "gpucalc" / "formulas").glob("*.py") if path.stem != "__init__")
for _path in FAMILIES:
    importlib.import_module(f"gpucalc.formulas.{_path.stem}")

DEFINITIONS = {
    node.name: (path, node)
    for path in FAMILIES
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
TESTED = {
    word
    for path in (ROOT / "tests").rglob("test_*.py")
    for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
}
FORBIDDEN = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.BoolOp, ast.Try, ast.With, ast.Match, ast.Lambda,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr,
)  # fmt: skip
ENDINGS = {
    "bytes": "_bytes",
    "s": "_s",
    "FLOP": "_flops",
    "bytes/s": "_bytes_per_s",
    "FLOP/s": "_flops_per_s",
}


def test_every_function_of_a_family_is_a_registered_formula() -> None:
    assert set(DEFINITIONS) == set(FORMULAS)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_one_returned_expression_of_keyword_only_quantities(name: str) -> None:
    path, node = DEFINITIONS[name]
    place = f"{path.name}:{node.lineno}: {name}"
    arguments = node.args
    assert not arguments.args, place
    assert not arguments.posonlyargs, place
    assert arguments.vararg is None, place
    assert arguments.kwarg is None, place
    assert all(default is None for default in arguments.kw_defaults), f"{place}: nothing is assumed silently"
    assert len(node.body) == 2, f"{place}: a docstring and one return"
    assert ast.get_docstring(node), place
    assert isinstance(node.body[1], ast.Return), place
    for inner in ast.walk(node.body[1]):
        assert not isinstance(inner, FORBIDDEN), f"{place}: {type(inner).__name__} works on scalars only"
        if isinstance(inner, ast.Compare):
            assert len(inner.ops) == 1, f"{place}: a chained comparison works on scalars only"
            assert not isinstance(inner.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn), place
        if isinstance(inner, ast.UnaryOp):
            assert not isinstance(inner.op, ast.Not), place


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_unit_source_and_printed_expression(name: str) -> None:
    formula = FORMULAS[name]
    assert formula.source.strip()
    assert formula.summary.endswith((".", ":")), "the docstring's first line is a sentence"
    assert formula.expression
    if ending := ENDINGS.get(formula.unit):
        assert f"_{name}".removesuffix("_per_gpu").endswith(ending), f"{name} yields {formula.unit}"


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_every_formula_has_a_hand_worked_test(name: str) -> None:
    assert name in TESTED, f"no test names {name}"
