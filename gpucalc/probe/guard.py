"""A rank that somebody else started, watched from inside: it does not hang, and what it knows is kept.

Ranks tell each other through a store how far they have come, so that the one which is behind can be named.
A thread notices that this rank stands still, or that its starter wants it gone, while the main thread
waits inside a library that cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from time import monotonic, sleep
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from gpucalc.probe.place import Place

SOONER = 2 / 3  # of torch's own timeout: after that NCCL ends the process without a word
_POLL_S = 0.25
_STORE_S = 5.0
_SETTLE_S = 1.0  # for the signs of other ranks to arrive
_START_S = 120.0  # to import torch and meet, from a cold disk
_MEETING = "the meeting of the ranks"


class Guard:
    """`give_up` is called with the reason from the watching thread, and does not return."""

    def __init__(
        self,
        where: Place,
        timeout_s: float,
        give_up: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.where, self.limit_s, self.give_up = where, SOONER * timeout_s, give_up
        self.environment = os.environ if environment is None else environment
        self.count, self.what, self.moved = 0, "starting", monotonic()
        self._store: Any = None
        self._beaten = 0
        self._closed = threading.Event()
        self._ends = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._watch, name="gpucalc-guard", daemon=True)
        self._before: Any = None

    def __enter__(self) -> Guard:
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ends:
            self._closed.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def say(self, what: str) -> None:
        """What this rank is about to do: a sign of life, told to the others once they have met."""
        met = self.what == _MEETING
        self.count, self.what, self.moved = self.count + 1, what, monotonic()
        if met:
            self._store = self._connected()
        self._tell(f"sign/{self.where.rank}", [self.count, what])

    def behind(self) -> str | None:
        """The ranks that are gone, else those that have come least far; None where nobody is behind."""
        if self._store is None:
            return None
        before = self._beats()
        for _ in range(round(_SETTLE_S / _POLL_S)):
            sleep(_POLL_S)
            self._beat()
        after = self._beats()
        everyone = range(self.where.ranks)
        gone = [rank for rank in everyone if rank != self.where.rank and before[rank] == after[rank]]
        if gone and len(gone) < self.where.ranks:
            return f"{_ranks(gone)} of {self.where.ranks} {'is' if len(gone) == 1 else 'are'} gone"
        signs = {rank: self._sign(rank) for rank in everyone}
        least = min(count for count, _ in signs.values())
        slow = [rank for rank, (count, _) in signs.items() if count == least]
        if len(slow) == self.where.ranks:
            return None
        return f"{_ranks(slow)} of {self.where.ranks} came least far, to {signs[slow[0]][1]}"

    def _beats(self) -> list[Any]:
        return [self._told(f"beat/{rank}") for rank in range(self.where.ranks)]

    def _sign(self, rank: int) -> tuple[int, str]:
        if rank == self.where.rank:
            return self.count, self.what
        count, what = self._told(f"sign/{rank}") or (0, _MEETING)
        return int(count), str(what)

    def _tell(self, name: str, value: Any) -> None:
        """Put a value where all ranks can read it."""
        if self._store is not None:
            try:
                self._store.set(f"gpucalc/{name}", json.dumps(value))
            except Exception:  # the host of the store is gone: others will notice
                self._store = None

    def _told(self, name: str) -> Any:
        store, key = self._store, f"gpucalc/{name}"
        with suppress(Exception):
            if store.check([key]):
                return json.loads(store.get(key))
        return None

    def _beat(self) -> None:
        self._beaten += 1
        self._tell(f"beat/{self.where.rank}", self._beaten)

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._beat()
            ready, _, _ = select.select([self._read], [], [], _POLL_S)
            if ready and signal.SIGTERM in os.read(self._read, 1024):
                self._end(f"rank {self.where.rank} was told to stop during {self.what}")
            limit = self.limit_s if self.what not in ("starting", _MEETING) else max(self.limit_s, _START_S)
            if monotonic() - self.moved > limit:
                self._end(f"rank {self.where.rank} waited {limit:.0f} s during {self.what}")

    def _end(self, why: str) -> None:
        named = self.behind()
        with self._ends:
            if not self._closed.is_set():
                self.give_up(f"{named}; {why}" if named else why)

    def _connected(self) -> Any:
        """A connection of our own to the store the ranks met at; theirs may be busy waiting."""
        host, port = self.environment.get("MASTER_ADDR"), self.environment.get("MASTER_PORT")
        if self.where.rendezvous.startswith("tcp://"):
            address = urlsplit(self.where.rendezvous)
            host, port = address.hostname, str(address.port)
        try:
            store = import_module("torch.distributed").TCPStore
            return store(str(host), int(port or 0), is_master=False, timeout=timedelta(seconds=_STORE_S))
        except Exception:  # ranks are then not named; the test itself does not need it
            return None


@contextmanager
def unhurried() -> Iterator[None]:
    """A wish that this rank stop waits until the block is left: what is measured is being written.

    torchrun, srun and mpirun stop all ranks as soon as one has ended, and the one that writes ends last.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def leave(words: str, code: int) -> None:
    """End the process at once, whatever its other threads wait for, with one line."""
    print(f"gpucalc: {words}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
