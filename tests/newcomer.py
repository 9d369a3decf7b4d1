"""Follow a page as somebody who has just found it: write its files, type its commands, in order, unchanged.

    python tests/newcomer.py README.md

Runs in the current folder with the shell's own PATH, and stops at the first command that does not exit as the
page says. Blocks of shell not marked `sh` need what one machine may lack; they are listed at the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from followed import Coded, Shown, steps


def follow(page: str) -> int:
    """The number of commands that did what the page says. Raises SystemExit at the first that did not."""
    typed = 0
    for step in steps(page):
        if isinstance(step, Shown):
            Path(step.name).write_text(step.text, encoding="utf-8")
            continue
        if isinstance(step, Coded):
            name, command, exits = "python", ["python", "-c", step.text], 0
        else:
            name, command, exits = step.line, ["bash", "-euo", "pipefail", "-c", step.line], step.exits
        print(f"$ {name}", flush=True)
        start = time.monotonic()
        # Answers are kept back until something goes wrong, but not the tests' own progress.
        done = subprocess.run(command, check=False, capture_output="pytest" not in name, text=True)
        if done.returncode != exits:
            sys.exit(f"exit {done.returncode}, the page says {exits}\n{done.stdout or ''}{done.stderr or ''}")
        print(f"  exit {done.returncode} after {time.monotonic() - start:.1f} s", flush=True)
        typed += 1
    return typed


def main(path: str) -> None:
    page = Path(path).read_text(encoding="utf-8")
    print(f"{follow(page)} commands of {path} do what it says")
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if not block.startswith("# "):  # a file, which was written
            print(f"not run, it needs GPUs or several machines:\n{block}", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
