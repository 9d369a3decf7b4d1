"""The only wiring of formulas: a graph, a run and a fleet in, a tree of lines and a verdict out.

The Python API has a function of the same name, and a package and a function cannot both be
`gpucalc.plan`. So the package can be called: `gpucalc.plan("llama-3-8b")` is `gpucalc.api.plan`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package, handing a call on to the API. Loads it only then: plans know nothing of it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("gpucalc.api").plan(*arguments, **options)

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("gpucalc.api").plan)


sys.modules[__name__].__class__ = _Callable
