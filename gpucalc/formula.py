"""What a formula is: one small keyword-only function with a unit and a source.

    @formula(unit="bytes", source="Rajbhandari et al. 2020, section 3.1")
    def gradient_bytes(*, params, bytes_per_gradient):
        '''Bytes of gradients one rank holds.'''
        return params * bytes_per_gradient

The decorator registers the function and keeps it callable as before. `expression` prints the
returned expression from the function's own source, so that what `explain` shows is what ran.
`tracing` records the calls made while it is open, nested ones included; closed, a call costs
one comparison.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Formula:
    """A registered formula: its name is the quantity it yields."""

    name: str
    unit: str
    source: str
    function: Callable[..., Any]

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]

    @property
    def expression(self) -> str:
        """The returned expression as source text."""
        return ast.unparse(_returned(self.function))

    def substituted(self, values: Mapping[str, str]) -> str:
        """The returned expression with parameter names replaced by the given texts."""
        tree = _Substitute(values).visit(copy.deepcopy(_returned(self.function)))
        return ast.unparse(ast.fix_missing_locations(tree))


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded evaluation."""

    formula: Formula
    inputs: Mapping[str, Any]
    result: Any
    depth: int


FORMULAS: dict[str, Formula] = {}

# How a name ends, and what it is then measured in; the longest ending counts. Names without one are
# counts, shares or choices.
_ENDINGS = {
    "bytes_per_s": "bytes/s",
    "flops_per_s": "FLOP/s",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "transfers_per_s": "1/s",
    "per_s": "1/s",
    "s_per_byte": "s/byte",
    "usd_per_gpu_hour": "USD/(GPU h)",
    "usd_per_kwh": "USD/kWh",
    "usd_per_h": "USD/h",
    "usd_per_gpu": "USD/GPU",
    "kg_per_kwh": "kg/kWh",
    "gpu_hours": "GPU h",
    "hours": "h",
    "years": "year",
    "bytes": "bytes",
    "bytes2": "bytes^2",
    "bytes_s": "bytes s",
    "s": "s",
    "flops": "FLOP",
    "hz": "Hz",
    "kwh": "kWh",
    "usd": "USD",
    "bits": "bits",
    "w": "W",
    "rise_k": "K",
}


def unit_of(name: str) -> str | None:
    """The unit a quantity's name says, None for a count, a share or a choice."""
    words = name.split("_")
    endings = ("_".join(words[start:]) for start in range(len(words)))
    return next((_ENDINGS[ending] for ending in endings if ending in _ENDINGS), None)


_trace: list[Call] | None = None
_depth = 0


def formula(*, unit: str, source: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a keyword-only function as the formula of the quantity it is named after."""
    if not unit or not source:
        raise ValueError("a formula needs a unit and a source")

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        if name in FORMULAS:
            raise ValueError(f"formula {name!r} is defined twice")
        info = Formula(name=name, unit=unit, source=source, function=function)
        FORMULAS[name] = info

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _trace is None:
                return function(*args, **kwargs)
            return _recorded(info, function, args, kwargs)

        call.formula = info  # type: ignore[attr-defined]  # functions carry attributes; typing has no word for it
        return call

    return register


def formula_of(function: Callable[..., Any]) -> Formula:
    """The registered formula behind a decorated function.

    Raises TypeError for a function that is not a formula.
    """
    info = getattr(function, "formula", None)
    if not isinstance(info, Formula):
        raise TypeError(f"{function!r} is not a formula")
    return info


@contextmanager
def tracing() -> Iterator[list[Call]]:
    """Record every formula call made inside the block, in order of completion."""
    global _trace
    before, _trace = _trace, []
    try:
        yield _trace
    finally:
        _trace = before


def _recorded(info: Formula, function: Callable[..., R], args: Any, kwargs: Any) -> R:
    global _depth
    _depth += 1
    try:
        result = function(*args, **kwargs)
    finally:
        _depth -= 1
    assert _trace is not None
    _trace.append(Call(formula=info, inputs=dict(kwargs), result=result, depth=_depth))
    return result


@functools.cache
def _returned(function: Callable[..., Any]) -> ast.expr:
    """The returned expression, read from the source once: a page explains hundreds of numbers."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0].value is None:
        raise TypeError(f"{function.__qualname__} must return exactly one expression")
    return returns[0].value


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(id=self.values[node.id], ctx=ast.Load()) if node.id in self.values else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        # Argument names stay; only the values handed over are replaced.
        node.args = [self.visit(arg) for arg in node.args]
        node.keywords = [ast.keyword(arg=kw.arg, value=self.visit(kw.value)) for kw in node.keywords]
        return node
