"""Follow a page as somebody who has just found it: write its files, type its commands, in order, unchanged.

    python tests/newcomer.py README.md

Runs in the current folder with the shell's own PATH, and stops at the first command that does not exit as the
page says. Blocks of shell that are not marked `sh` need what one machine has not; they are listed at the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from followed import Shown, steps


def follow(page: str) -> int:
    """The number of commands that did what the page says. Raises SystemExit at the first that did not."""
    typed = 0
    for step in steps(page):
        if isinstance(step, Shown):
            Path(step.name).write_text(step.text, encoding="utf-8")
            continue
        print(f"$ {step.line}", flush=True)
        start = time.monotonic()
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", step.line], check=False, **quiet(step.line))
        if done.returncode != step.exits:
            sys.exit(
                f"exit {done.returncode}, the page says {step.exits}\n{done.stdout or ''}{done.stderr or ''}"
            )
        print(f"  exit {done.returncode} after {time.monotonic() - start:.1f} s", flush=True)
        typed += 1
    return typed


def quiet(line: str) -> dict[str, bool]:
    """What is kept back until something goes wrong: answers, but not the tests' own progress."""
    return {} if "pytest" in line else {"capture_output": True, "text": True}


def main(path: str) -> None:
    page = Path(path).read_text(encoding="utf-8")
    print(f"{follow(page)} commands of {path} do what it says")
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if not block.startswith("# "):  # a file, which was written
            print(f"not run, it needs several machines:\n{block}", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
