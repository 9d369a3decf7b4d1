"""CPU seconds of a whole `gpucalc plan JOB --json` process beside the least its libraries cost.

    python tests/benchmarks/startup.py JOB [rounds]

The yardstick is a process that imports typer, pydantic and yaml and defines as many pydantic
models, with as many fields, as the files a user may write need. The two are run in turn, so
that a busy machine slows both; target 1.3, at most 1.5. A benchmark, not a test.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import statistics
import subprocess
import sys

import gpucalc.spec
from gpucalc.spec.base import Spec

# An installed program has its byte code; a checkout must be allowed to keep it between runs.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def spec_sizes() -> list[int]:
    """The number of fields of every model of the spec."""
    for module in pkgutil.iter_modules(gpucalc.spec.__path__, "gpucalc.spec."):
        importlib.import_module(module.name)
    found: list[type[Spec]] = []
    waiting = [Spec]
    while waiting:
        waiting += (below := waiting.pop().__subclasses__())
        found += below
    return [len(model.model_fields) for model in found]


def yardstick(sizes: list[int]) -> str:
    """A script that imports the libraries and defines models of these sizes."""
    lines = ["import typer, yaml", "from pydantic import BaseModel, ConfigDict"]
    kinds = ("int", "float | None = None", "str = ''", "tuple[str, ...] = ()", "bool = False")
    for index, size in enumerate(sizes):
        lines.append(f"class M{index}(BaseModel):")
        lines.append("    model_config = ConfigDict(frozen=True, extra='forbid', strict=True)")
        lines += [f"    f{number}: {kinds[number % len(kinds)]}" for number in range(size)]
    return "\n".join(lines)


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one process. Raises CalledProcessError when it fails."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    job = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    sizes = spec_sizes()
    plan = [sys.executable, "-m", "gpucalc", "plan", job, "--json"]
    least = [sys.executable, "-c", yardstick(sizes)]
    cpu_seconds(plan), cpu_seconds(least)  # byte code and file cache
    taken = [(cpu_seconds(plan), cpu_seconds(least)) for _ in range(rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*taken, strict=True))
    ratio = statistics.median(a / b for a, b in taken)
    print(f"gpucalc plan --json            {ours * 1e3:6.0f} ms CPU, median of {rounds}")
    print(f"libraries and {len(sizes):2d} models        {theirs * 1e3:6.0f} ms CPU")
    print(f"ratio                          {ratio:6.2f}")


if __name__ == "__main__":
    main()
