"""Faults made on purpose: a rank that dies, a rank that lags, to see that each is noticed and named.

Only the test's own process is touched, never a GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from time import sleep

from gpucalc.errors import InputError, UnknownName, nearest

FAULTS = ("kill-rank", "slow-rank")
PAUSE_S = 0.5  # a lagging rank's delay before each piece of work
_AFTER = 8  # pieces of work done in good order first, so that something is there to be kept


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong on which rank."""

    kind: str
    rank: int

    @classmethod
    def parse(cls, text: str, ranks: int) -> Fault:
        """`kill-rank`, which takes the last rank, or `kill-rank=2`. Raises InputError."""
        kind, equals, number = text.partition("=")
        if kind not in FAULTS:
            raise UnknownName(
                "unknown fault", where="--inject", given=text, legal=FAULTS, near=nearest(kind, FAULTS)
            )
        if ranks < 2:
            raise InputError("needs two ranks: the others notice", where="--inject", given=text)
        if equals and not (number.isascii() and number.isdigit() and int(number) < ranks):
            legal = f"{kind}=0 to {kind}={ranks - 1}"
            raise InputError("names no rank", where="--inject", given=text, legal=legal)
        return cls(kind, int(number) if equals else ranks - 1)

    def into(self, say: Callable[[str], None], rank: int) -> Callable[[str], None]:
        """What a rank says, with the fault happening on the one it is meant for."""
        if rank != self.rank:
            return say
        count = 0

        def faulty(what: str) -> None:
            nonlocal count
            say(what)
            count += 1 if what.startswith(ARMED) else 0
            if count > _AFTER:
                if self.kind == "kill-rank":
                    os.kill(os.getpid(), signal.SIGKILL)
                sleep(PAUSE_S)

        return faulty


# Work that all ranks share: before it nobody would miss one.
ARMED = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv", "soak")
