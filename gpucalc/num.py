"""Arithmetic helpers that take one number or a numpy column alike.

Formulas use these instead of `if`, `min`, `max` and `//`, so that the same function answers
for one plan and for a million. numpy is imported only when a column is handed in; integers
stay Python integers on the scalar path.
"""

from __future__ import annotations

import math
from typing import Any

# A number or a float64 column. Kept as Any: formulas are polymorphic over both, and a Protocol
# for the arithmetic operators would say less than the word "number" does.
Num = Any

_SCALAR = (int, float)  # bool is an int


class Mixed(Exception):
    """A condition that decides what there is to compute holds for a part of a column only."""

    def __init__(self, condition: Num) -> None:
        super().__init__("a condition holds for a part of a column only")
        self.condition = condition


def is_scalar(value: Num) -> bool:
    """Whether a number is one number and not a column."""
    return isinstance(value, _SCALAR)


def holds(condition: Num) -> bool:
    """Whether a condition that decides what there is to compute is met, by all of a column or by none.

    Raises Mixed where it is met by a part; whoever made the column splits it and asks again.
    """
    if isinstance(condition, _SCALAR):
        return bool(condition)
    found = bool(condition.any())
    if found and not condition.all():
        raise Mixed(condition)
    return found


def present(value: Num) -> bool:
    """Whether a number, or any of a column, is not zero."""
    if isinstance(value, _SCALAR):
        return bool(value)
    return bool(value.item(0)) or bool(value.any())  # the first settles it most often


def where(condition: Num, then: Num, otherwise: Num) -> Num:
    """`then` where the condition holds, else `otherwise`."""
    if isinstance(condition, _SCALAR):
        return then if condition else otherwise
    import numpy as np

    return np.where(condition, then, otherwise)


def minimum(a: Num, b: Num) -> Num:
    """The smaller of two numbers, element by element for columns."""
    if isinstance(a, _SCALAR) and isinstance(b, _SCALAR):
        return a if a <= b else b
    import numpy as np

    return np.minimum(a, b)


def maximum(a: Num, b: Num) -> Num:
    """The larger of two numbers, element by element for columns."""
    if isinstance(a, _SCALAR) and isinstance(b, _SCALAR):
        return a if a >= b else b
    import numpy as np

    return np.maximum(a, b)


def ceil_div(a: Num, b: Num) -> Num:
    """`a / b` rounded up to a whole number; exact for Python integers of any size."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    if isinstance(a, _SCALAR) and isinstance(b, _SCALAR):
        return math.ceil(a / b)
    import numpy as np

    return np.ceil(a / b)


def floor_div(a: Num, b: Num) -> Num:
    """`a / b` rounded down to a whole number."""
    return a // b


def sqrt(a: Num) -> Num:
    """Square root."""
    if isinstance(a, _SCALAR):
        return math.sqrt(a)
    import numpy as np

    return np.sqrt(a)


def log2(a: Num) -> Num:
    """Logarithm to base two."""
    if isinstance(a, _SCALAR):
        return math.log2(a)
    import numpy as np

    return np.log2(a)


def exp(a: Num) -> Num:
    """The exponential function."""
    if isinstance(a, _SCALAR):
        return math.exp(a)
    import numpy as np

    return np.exp(a)
