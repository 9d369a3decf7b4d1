"""The command line: every command, in the order its help lists them."""

from __future__ import annotations

# Importing a module registers its commands.
from gpucalc.commands import bring, catalogue, checks, machine, plans, validation  # noqa: F401
from gpucalc.commands.base import app, program

__all__ = ["app", "program"]

ORDER = (
    "plan", "size", "explain", "check", "diff", "oom", "schema", "validate", "import", "trace", "claims",
    "formulas", "probe", "doctor",
)  # fmt: skip
app.registered_commands.sort(key=lambda command: ORDER.index(str(command.name)))
