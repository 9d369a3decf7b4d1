"""Measuring on a CPU by the code for GPUs: sums are checked, a lost rank is named, no process stays."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import H100, RTX4090, FakeNvml
from processes import ENVIRONMENT, LONG_S, STANDALONE

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import CannotMeasure, InputError
from gpucalc.probe import comm, command
from gpucalc.probe.device import BUSY_LOAD, doubtful, summary
from gpucalc.probe.launch import Outcome, launch
from gpucalc.probe.place import place
from gpucalc.probe.sweeps import sweep
from gpucalc.probe.worker import Config
from gpucalc.spec.calibration import read_calibration

QUICK = ["probe", "--device", "cpu", "--quick"]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def measured(ranks: int, *, at: int = 0, send: int | None = None, timeout_s: float = 20.0) -> tuple[Any, ...]:
    """Collectives by so many processes; the signal goes to rank 1 when `at` points are there."""
    pids: list[int] = []
    seen: list[dict[str, Any]] = []
    sent = [0.0]

    def told(point: dict[str, Any]) -> None:
        seen.append(point)
        if send is not None and len(seen) == at:
            sent[0] = time.monotonic()
            os.kill(pids[1], send)

    config = Config("cpu", ("comm",), True, ranks, "", timeout_s, "")
    outcome: Outcome = launch(config, on_point=told, on_start=pids.extend)
    return outcome, pids, time.monotonic() - sent[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_gives_the_right_result(ranks: int) -> None:
    pytest.importorskip("torch")
    outcome, pids, _ = measured(ranks)
    assert outcome.failure is None
    points = [point for point in outcome.points if point["kind"] == "comm"]
    sizes = len(sweep("cpu", quick=True).message_bytes)
    assert {point["op"] for point in points} == set(comm.OPERATIONS)
    assert len(points) == sizes * len(comm.OPERATIONS)
    assert all(point["correct"] for point in points)
    for point in points:
        factor = comm.bus_factor(point["op"], ranks)
        assert point["busbw_gb_per_s"] == pytest.approx(point["bytes"] * factor / point["seconds"] / 1e9)
    assert gone(pids)


def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    pytest.importorskip("torch")
    outcome, pids, waited = measured(4, at=4, send=signal.SIGKILL)
    assert "rank 1 was killed (SIGKILL) during all_reduce of" in str(outcome.failure)
    assert waited < 30
    assert len(outcome.points) >= 4
    assert gone(pids)


def test_a_stopped_rank_is_named_before_torch_gives_up() -> None:
    pytest.importorskip("torch")
    outcome, pids, waited = measured(2, at=3, send=signal.SIGSTOP, timeout_s=9.0)
    assert "rank 1 is stopped for 6 s during all_reduce of" in str(outcome.failure)
    assert waited < 30
    assert gone(pids)


def test_a_rank_that_cannot_start_is_named_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card")
    outcome, pids, _ = measured(2, timeout_s=9.0)
    assert "failed (" in str(outcome.failure)
    assert "during the meeting of the ranks" in str(outcome.failure)
    assert gone(pids)


def test_the_quick_probe_writes_a_calibration_that_plans_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(QUICK) == 0
    (file,) = tmp_path.glob("calibration-cpu-*.yaml")
    said = capsys.readouterr()
    assert "a CPU: no plan takes these for a GPU" in said.out
    assert file.name in said.out
    assert said.err == ""  # nobody watches
    found = read_calibration(file)
    assert (found.machine.device, found.machine.gpu, found.machine.backend) == ("cpu", None, "gloo")
    assert found.incomplete is None
    assert {point["kind"] for point in found.points} == {"matmul", "copy", "comm"}
    assert set(found.matmul) == {"fp32"}
    assert found.collectives is not None
    assert set(found.collectives.ops) == set(comm.OPERATIONS)
    assert main(["plan", "llama-3-8b", "--gpus", "8xH100-SXM", "--calibration", str(file)]) == 0
    assert "not used: everything: measured on a CPU" in capsys.readouterr().out


class Watched:
    """The command with a terminal to tell its progress to, as a user runs it."""

    def __init__(self, words: list[str]) -> None:
        ours, theirs = pty.openpty()
        env = {**ENVIRONMENT, "TERM": "xterm", "CI": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpucalc", *words], stdout=subprocess.DEVNULL, stderr=theirs, env=env
        )
        os.close(theirs)
        self.terminal = open(ours, "rb", buffering=0)  # noqa: SIM115  # closed by rest

    def line(self) -> str:
        """The next line it says."""
        return self.terminal.readline().decode().rstrip()

    def rest(self) -> list[str]:
        """The lines until it ends."""
        lines = []
        with self.terminal:
            try:
                while said := self.line():
                    lines.append(said)
            except OSError:  # how a terminal says that nobody writes to it any more
                pass
        self.process.wait()
        return lines


def test_a_killed_rank_of_the_command_exits_4_and_keeps_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "partial.yaml"
    command = Watched([*QUICK, "--comm", "--ranks", "4", "-o", str(file)])
    for _ in range(7):  # enough points for constants of the first operation
        assert "all_reduce" in command.line()
    pids = children(command.process.pid)
    assert len(pids) == 4
    start = time.monotonic()
    os.kill(pids["2"], signal.SIGKILL)
    last = command.rest()[-1]
    assert command.process.returncode == 4
    assert time.monotonic() - start < 30
    assert last.startswith("gpucalc: rank 2 was killed (SIGKILL) during ")
    assert str(file) in last
    found = read_calibration(file)
    assert "rank 2 was killed" in str(found.incomplete)
    assert len(found.points) >= 7
    assert gone(list(pids.values()))


def test_no_worker_outlives_a_killed_command() -> None:
    pytest.importorskip("torch")
    command = Watched([*QUICK, "--comm", "--ranks", "2", "-o", "/dev/null"])
    command.line()
    pids = list(children(command.process.pid).values())
    assert pids
    command.process.kill()
    command.rest()
    end = time.monotonic() + 60
    while not all(map(dead, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert all(map(dead, pids))


def children(parent: int) -> dict[str, int]:
    """The workers of a command by rank, from the last word of their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if above == parent and b"gpucalc.probe.worker" in words:
            found[words[-2].decode()] = int(folder.name)
    return found


def dead(pid: int) -> bool:
    """Gone, or only not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_torchrun_starts_the_same_program(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "torchrun.yaml"
    probe = ["-m", "gpucalc", *QUICK, "--comm", "-o", str(file), "--json"]
    done = subprocess.run(
        [sys.executable, *STANDALONE, *probe], capture_output=True, text=True, env=ENVIRONMENT, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # of the first rank alone
    found = read_calibration(file)
    assert found.collectives is not None
    assert (found.collectives.ranks, found.collectives.nodes) == (2, 1)
    assert document["calibration"]["collectives"]["ranks"] == 2
    assert all(point["correct"] for point in found.points)


def test_a_first_rank_told_to_stop_still_writes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun stops every rank as soon as one has ended, and the one that writes may be the last to end.
    pytest.importorskip("torch")
    software = {"kind": "software", "name": "a CPU", "torch": "2", "backend": "gloo", "busy": None}
    write, stopped = command._written, list[bool]()

    def ended(*_: Any) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        return Outcome((software,), "rank 1 is slow")

    def written(*words: Any) -> command.Result:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(*words)

    before = signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    try:
        monkeypatch.setattr(command, "_started_elsewhere", ended)
        monkeypatch.setattr(command, "_written", written)
        file = tmp_path / "c.yaml"
        options = command.Options(("comm",), "cpu", output=file)
        torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        found = command.measure(options, open_catalog(), environment=torchrun)
        assert found is not None
        assert read_calibration(file).incomplete == "rank 1 is slow"
        assert stopped == []
        os.kill(os.getpid(), signal.SIGTERM)  # afterwards a wish to stop is heard again
        assert stopped == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_places_among_ranks() -> None:
    assert place({}) is None
    assert place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    assert place(batch) is None  # the script itself, not a step of srun
    slurm = {**batch, "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[01-04,07],login", "SLURM_JOB_ID": "123456"}
    found = place(slurm)
    assert found is not None
    assert (found.rank, found.ranks, found.local_rank, found.nodes) == (9, 16, 1, 2)
    assert found.rendezvous == "tcp://gpu01:23456"
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    found = place(torchrun)
    assert found is not None
    assert (found.rendezvous, found.nodes) == ("env://", None)
    assert place({**torchrun, "LOCAL_WORLD_SIZE": "4"}).nodes == 2  # type: ignore[union-attr]
    for broken in ({"RANK": "8"}, {"RANK": "x"}, {"MASTER_ADDR": ""}):
        with pytest.raises(InputError):
            place({**torchrun, **broken})


TORCHRUN = {
    "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
RAY = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "NODE_RANK": "1",
       "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "41233"}  # fmt: skip
OPERATOR = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "probe-master-0", "MASTER_PORT": "23456",
            "KUBERNETES_PORT": "tcp://10.0.0.1:443", "PYTHONUNBUFFERED": "0"}  # fmt: skip
INDEXED = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "probe-0.probe",
           "KUBERNETES_PORT": "tcp://10.0.0.1:443"}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "11", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "node0"}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "rank", "ranks", "local", "nodes", "meeting"),
    [
        (TORCHRUN, 11, 16, 3, 2, "env://"),
        (RAY, 11, 16, 3, 2, "env://"),
        (OPERATOR, 1, 2, 0, None, "env://"),
        (INDEXED, 1, 2, 0, None, "tcp://probe-0.probe:20000"),
        (MPIRUN, 11, 16, 3, 2, "tcp://node0:20000"),
    ],
    ids=["torchrun", "ray", "kubernetes operator", "kubernetes indexed job", "mpirun"],
)
def test_what_each_starter_tells(
    environment: dict[str, str], rank: int, ranks: int, local: int, nodes: int | None, meeting: str
) -> None:
    found = place(environment)
    assert found is not None
    assert (found.rank, found.ranks, found.local_rank) == (rank, ranks, local)
    assert (found.nodes, found.rendezvous) == (nodes, meeting)


def test_samples_say_what_is_doubtful() -> None:
    steady = summary([1.0, 1.01, 0.99, 1.02, 0.98], 10)
    assert steady.median_s == pytest.approx(0.1)
    assert steady.doubts() == []
    assert summary([1, 2, 3, 4, 5], 1).doubts() == ["spread 67%"]
    assert summary([0.0] * 5, 1).doubts() == ["no time measured"]
    assert doubtful({"throttled_by": ["power cap"]}) == []  # how a GPU runs flat out
    assert doubtful({"throttled_by": ["power brake"]}) == ["throttled: power brake"]
    assert 0 < BUSY_LOAD < 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "tpu"], "unknown device"),
        (["--device", "cpu", "--ranks", "0"], "no number of ranks"),
        (["--device", "cpu", "--ranks", "1000"], "no number of ranks"),
        (["--device", "cpu", "--timeout", "0"], "no time to wait"),
        (["--device", "cpu", "-o", "/no/such/folder/x.yaml"], "is in no folder"),
        (["--inventory", "--matmul"], "stands alone"),
    ],
)
def test_flags_nothing_can_be_measured_with(words: list[str], problem: str, capsys: Any) -> None:
    assert main(["probe", *words]) == 2
    said = capsys.readouterr()
    assert problem in said.err
    assert said.err.count("\n") == 1


def test_without_a_gpu_or_torch_one_line_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeNvml([], init="LibraryNotFound")
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: fake)
    assert main(["probe"]) == 4
    assert "--device cpu" in capsys.readouterr().err
    hidden = FakeNvml([H100])
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: hidden)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["probe"]) == 4
    assert "CUDA_VISIBLE_DEVICES is empty" in capsys.readouterr().err
    monkeypatch.setattr("gpucalc.probe.command.find_spec", lambda _: None)
    assert main(QUICK) == 4
    said = capsys.readouterr().err
    assert "pip install 'gpucalc[probe]'" in said
    assert said.count("\n") == 1


def test_one_gpu_has_nobody_to_exchange_with(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpucalc.catalog import open_catalog
    from gpucalc.probe.command import Options, measure

    fake = FakeNvml([H100])
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: fake)
    monkeypatch.setattr("gpucalc.probe.command.find_spec", lambda _: True)
    with pytest.raises(CannotMeasure, match="need two GPUs"):
        measure(Options(tasks=("comm",)), open_catalog(), environment={})
    with pytest.raises(InputError, match="more than the visible GPUs"):
        measure(Options(ranks=2), open_catalog(), environment={})


def test_two_gpus_are_measured_by_two_processes_and_named_as_the_catalogue_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way from the driver to the file, with the devices' own part replaced by its points."""
    from gpucalc.catalog import open_catalog
    from gpucalc.probe.command import Options, measure

    started: list[Config] = []
    software = {"kind": "software", "torch": "2.13.0", "name": "NVIDIA H100 80GB HBM3", "backend": "nccl"}
    sizes = sweep("cuda", quick=True).message_bytes

    def stands_in(config: Config, *, on_point: Any) -> Outcome:
        started.append(config)
        points: list[dict[str, Any]] = [{**software, "nccl": "2.27.3", "cuda": "12.8", "busy": None}]
        if config.tasks == ("comm",):
            for size in sizes:
                one = {"kind": "comm", "op": "all_reduce", "ranks": 2, "bytes": size, "doubts": []}
                points.append({**one, "seconds": 9e-6 + size / 300e9})
        for point in points:
            on_point(point)
        return Outcome(tuple(points), None)

    fake = FakeNvml([RTX4090, H100, H100])
    parted = FakeNvml([{**H100, "MigMode": [1, 1]}] * 2)
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: fake)
    monkeypatch.setattr("gpucalc.probe.command.find_spec", lambda _: True)
    monkeypatch.setattr("gpucalc.probe.command.launch", stands_in)
    options = Options(ranks=2, output=tmp_path / "h100.yaml")
    result = measure(options, open_catalog(), environment={})
    assert result is not None
    assert [(config.tasks, config.ranks) for config in started] == [(("matmul", "copy"), 1), (("comm",), 2)]
    found = read_calibration(result.path)
    assert (found.machine.gpu, found.machine.gpus) == ("h100-sxm-80gb", 2)
    assert (found.machine.driver, found.machine.nccl) == ("570.124.06", "2.27.3")
    assert found.collectives is not None
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: parted)
    part = measure(replace(options, output=tmp_path / "mig.yaml"), open_catalog(), environment={})
    assert part is not None
    assert part.calibration.machine.gpu is None  # a MIG instance's rates are no card's
    held = open_catalog().cluster([(None, 2, "h100-sxm-80gb")]).intra.ramp.value
    assert found.collectives.ops["all_reduce"].ramp.value == held  # a curve does not tell it
