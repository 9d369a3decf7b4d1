"""gpucalc: does a model fit these GPUs, how fast will it run, what binds, and what would help.

    import gpucalc

    answer = gpucalc.plan("llama-3-8b", gpus="8xH100-SXM")

`plan`, `Plan` and the errors are the public API; importing the package alone loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucalc.api import Plan, plan
    from gpucalc.errors import GpucalcError, Infeasible, InputError, UnknownName, UnsupportedModel

__version__ = "0.1.0"

__all__ = [
    "GpucalcError",
    "Infeasible",
    "InputError",
    "Plan",
    "UnknownName",
    "UnsupportedModel",
    "__version__",
    "plan",
]


def __getattr__(name: str) -> Any:
    """The public names, loaded when first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "plan":
        return import_module("gpucalc.plan")  # a package that can be called; it says why
    return getattr(import_module("gpucalc.api" if name == "Plan" else "gpucalc.errors"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
