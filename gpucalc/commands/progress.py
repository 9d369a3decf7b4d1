"""A bar on standard error for what takes longer than a second.

    with progress.shown("fleets") as progress:
        size(job, ..., progress=progress)

The code below the commands knows a plain callback of what is done and of how much, or None.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 1.0  # what ends sooner shows nothing
PER_SECOND = 10  # drawings

Callback = Callable[[int, int], None]


def wanted() -> bool:
    """Whether somebody watches: standard error is a terminal that can move its cursor, and no CI log."""
    if os.environ.get("TERM", "dumb") in ("", "dumb", "unknown") or os.environ.get("CI"):
        return False
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no such stream, or closed
        return False


@contextmanager
def shown(what: str) -> Iterator[Callback | None]:
    """A callback to be told how many are done, of how many (0: not known); None when nobody watches.

    The bar is gone when the block is left, whichever way.
    """
    if not wanted():
        yield None
        return
    bar = _Bar(what)
    try:
        yield bar.told
    finally:
        bar.close()


class _Bar:
    """Drawn by whoever reports, in the same thread: nothing runs beside the work, or outlives it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.drawn: Any = None  # the bar of rich; loading it takes 50 ms, so only when it is needed
        self.task: Any = None
        self.next = time.monotonic() + PATIENCE_S

    def told(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + 1 / PER_SECOND
        if self.drawn is None:
            self.open(done, of)
        self.drawn.update(self.task, completed=done, total=of or None, refresh=True)

    def open(self, done: int, of: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        parts = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        console = Console(file=sys.stderr, highlight=False)
        self.drawn = Progress(*parts, console=console, transient=True, auto_refresh=False)
        self.task = self.drawn.add_task(self.what, completed=done, total=of or None)
        self.drawn.start()

    def close(self) -> None:
        if self.drawn is not None:
            self.drawn.stop()
