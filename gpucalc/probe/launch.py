"""Starts one measuring process per rank and watches them: a lost or stuck rank is named, none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from gpucalc.probe.worker import Config

_POLL_S = 0.05
_START_S = 120.0  # importing torch from a cold disk; only until a rank's first sign of life
_SOONER = 2 / 3  # of torch's own timeout: only who watches all ranks can name the one that stopped
_GRACE_S = 1.0  # for the other ranks' own words about a loss, and for the first one to be told apart


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, and what ended it early; None when nothing did."""

    points: tuple[dict[str, Any], ...]
    failure: str | None


def launch(
    config: Config,
    *,
    on_point: Callable[[dict[str, Any]], None] = lambda _: None,
    on_start: Callable[[list[int]], None] = lambda _: None,
) -> Outcome:
    """Run all ranks on this machine to their end. Stops them all when one is lost or stuck.

    `on_start` is told the process ids by rank, `on_point` every point as it comes.
    """
    with tempfile.TemporaryDirectory(prefix="gpucalc-probe-") as folder:
        config = replace(config, folder=folder, rendezvous=f"file://{folder}/store")
        path = config.write()
        workers = [_start(path, rank, config) for rank in range(config.ranks)]
        try:
            on_start([worker.pid for worker in workers])
            return _watch(workers, Path(folder), _SOONER * config.timeout_s, on_point)
        finally:
            _end(workers)


def _start(path: Path, rank: int, config: Config) -> subprocess.Popen[bytes]:
    """A worker in a session of its own, so that it and what it starts can be ended together."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    if config.ranks > 1 and config.device == "cpu":
        env["OMP_NUM_THREADS"] = "1"
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine, whose name may not resolve
    log = (Path(config.folder) / f"rank-{rank}.log").open("wb")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "gpucalc.probe.worker", str(path), str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )


def _watch(
    workers: list[subprocess.Popen[bytes]],
    folder: Path,
    timeout_s: float,
    on_point: Callable[[dict[str, Any]], None],
) -> Outcome:
    points: list[dict[str, Any]] = []
    lines = _Lines(folder / "points")
    signs: list[tuple[int, str]] = [(0, "starting")] * len(workers)
    moved = monotonic()
    while True:
        codes = [worker.poll() for worker in workers]  # before the points: an ended rank has written all
        for point in lines.fresh():
            points.append(point)
            on_point(point)
        fresh = [_sign(folder, rank) or signs[rank] for rank in range(len(workers))]
        if fresh != signs:
            signs, moved = fresh, monotonic()
        if all(code == 0 for code in codes):
            return Outcome(tuple(points), failure(points))
        if any(code not in (None, 0) for code in codes):
            return Outcome(tuple(points), _lost(workers, folder, signs))
        limit = timeout_s if all(count for count, _ in signs) else max(timeout_s, _START_S)
        if monotonic() - moved > limit:
            return Outcome(tuple(points), _stuck(workers, signs, limit))
        sleep(_POLL_S)


def _lost(workers: list[subprocess.Popen[bytes]], folder: Path, signs: list[tuple[int, str]]) -> str:
    """Which rank ended first, how, and during what: the others fail only because it is gone."""
    seen = [worker.poll() for worker in workers]
    end = monotonic() + _GRACE_S
    while monotonic() < end and not any(code is not None and code < 0 for code in seen):
        sleep(_POLL_S)  # a rank that notices a loss may be collected before the lost one
        seen = [worker.poll() for worker in workers]
    killed = [rank for rank, code in enumerate(seen) if code is not None and code < 0]
    failed = [rank for rank, code in enumerate(seen) if code not in (None, 0)]
    rank = (killed or _first_to_fail(folder, failed))[0]
    code = seen[rank] or 0
    how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"failed ({_words(folder, rank)})"
    return f"rank {rank} {how} during {signs[rank][1]}"


def _first_to_fail(folder: Path, ranks: list[int]) -> list[int]:
    """The ranks by the time of their error files, those without one last."""

    def when(rank: int) -> float:
        path = folder / f"rank-{rank}.error"
        return path.stat().st_mtime if path.exists() else float("inf")

    return sorted(ranks, key=when)


def _words(folder: Path, rank: int) -> str:
    """The last thing a rank said about its failure, on one line."""
    for name in (f"rank-{rank}.error", f"rank-{rank}.log"):
        path = folder / name
        if path.exists() and (text := path.read_text(encoding="utf-8", errors="replace").strip()):
            lines = text.splitlines()
            return (lines[0] if name.endswith("error") else lines[-1])[:300]
    return "without a word"


def _stuck(workers: list[subprocess.Popen[bytes]], signs: list[tuple[int, str]], limit_s: float) -> str:
    """The ranks that hold the others up: stopped ones, else those that have come least far."""
    stopped = [rank for rank, worker in enumerate(workers) if _state(worker.pid) == "T"]
    least = min(count for count, _ in signs)
    slow = stopped or [rank for rank, (count, _) in enumerate(signs) if count == least]
    which = f"rank {slow[0]}" if len(slow) == 1 else f"ranks {', '.join(map(str, slow))}"
    state = "is stopped" if stopped else "made no progress"
    return f"{which} {state} for {limit_s:.0f} s during {signs[slow[0]][1]}"


def _state(pid: int) -> str | None:
    """The kernel's letter for a process: T is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _sign(folder: Path, rank: int) -> tuple[int, str] | None:
    try:
        count, what = json.loads((folder / f"rank-{rank}").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(count), str(what)


class _Lines:
    """A file of JSON lines read as it grows, each complete line once."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0

    def fresh(self) -> list[dict[str, Any]]:
        """The lines written since the last look."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.at)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def failure(points: Sequence[Mapping[str, Any]]) -> str | None:
    """What the ranks themselves say ended the measurement early."""
    return next((str(point["why"]) for point in points if point["kind"] == "failure"), None)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind: a stopped one cannot be asked, so all are killed."""
    for worker in workers:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
