"""The benchmarks beside this file, run one after the other and written into the table of README.md.

    python tests/benchmarks/record.py

Seconds are of processor time, the best or the median of several rounds, so that a busy machine lengthens
them little; ratios are taken within one run.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MOST_VALIDATE_S = 5.0

# What is run, the words that say what it should reach, and its arguments.
SCRIPTS = (
    ("startup.py", "at most 1.3 times the libraries", ("llama-3-8b",)),
    ("steptime.py", "5 ms", ()),
    ("search.py", "a million layouts a second; 1T parameters on 4,096 GPUs in 3 s and 500 MB", ()),
    ("checks.py", "200 jobs in 2 s", ()),
    ("tuned.py", "tuned layouts: legal and fitting 95 %, within 15 % of the best 85 %", ("--shares",)),
)

HEAD = """\
# Benchmarks

What the scripts of this folder said last, on {machine}, Python {python}, {day}. Written by
`python tests/benchmarks/record.py`; they are no tests, as machines differ.

| script | target | recorded |
|---|---|---|
"""


def ran(script: str, arguments: tuple[str, ...]) -> str:
    """What a script prints, a line break of the table for each line."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return "<br>".join(re.sub(r" {2,}", " ", line) for line in done.stdout.splitlines())


def validated() -> str:
    """Processor time of comparing every measurement with its estimate, start-up included."""
    command = [sys.executable, "-m", "gpucalc", "validate", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return f"{usage.ru_utime + usage.ru_stime:.1f} s CPU"


def machine() -> str:
    """The processor, by its model."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def main() -> None:
    rows = [f"| `{name}` | {target} | {ran(name, words)} |" for name, target, words in SCRIPTS]
    best = min((validated() for _ in range(3)), key=lambda text: float(text.split()[0]))
    rows.append(f"| `gpucalc validate` over every row | {MOST_VALIDATE_S:g} s | {best} |")
    head = HEAD.format(machine=machine(), python=platform.python_version(), day=date.today().isoformat())
    (FOLDER / "README.md").write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
