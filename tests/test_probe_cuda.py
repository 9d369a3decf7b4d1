"""The paths of a CUDA card, run against a stand-in for torch.cuda: what is asked of it, in which order."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import STEP_S, FakeCuda, FakeTorch
from fake_nvml import H100, FakeNvml

from gpucalc.catalog import open_catalog
from gpucalc.errors import CannotMeasure
from gpucalc.jobs import resolve
from gpucalc.probe import copy, matmul, rehearsal
from gpucalc.probe.comm import Group
from gpucalc.probe.device import Device
from gpucalc.probe.sweeps import sweep
from gpucalc.probe.trials import trials
from gpucalc.probe.worker import Config, points

torch = pytest.importorskip("torch")
OWN, NOBODY = os.getpid(), 2**22 + 7  # beyond the largest number Linux gives
SMALL = replace(
    sweep("cuda", quick=True),
    shapes=((64, 64, 64), (128, 64, 64), (16, 128, 64), (16, 16, 16), (32, 32, 32)),
    dtypes=("fp32", "tf32", "fp16", "bf16", "fp8"),
    copy_bytes=(2**10, 2**12, 2**14, 2**16, 2**18),
    target_s=2 * STEP_S,
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setitem(rehearsal._SIDE, "cuda", 64)
    monkeypatch.setattr("gpucalc.probe.device.torch_module", lambda: FakeTorch(torch, made))
    cards = [{**H100, "UUID": f"GPU-{index:08x}-aa"} for index in range(2)]
    monkeypatch.setattr("gpucalc.probe.device.library", lambda: FakeNvml(cards))
    return made


def test_products_are_timed_by_events_over_a_recorded_graph(cuda: FakeCuda) -> None:
    device = Device("cuda", 1)
    assert cuda.log[0] == "set_device 1"
    found = list(matmul.measure(device, SMALL))
    skipped = [point for point in found if point["kind"] == "skipped"]
    assert {point["dtype"] for point in found if point["kind"] == "matmul"} >= {"fp32", "tf32", "bf16"}
    assert all("fp8" in point["what"] for point in skipped)  # a host may not know these products
    assert cuda.log.count("captured") == len([p for p in found if p["kind"] == "matmul"])
    for point in found:
        if point["kind"] == "matmul":
            # One step took half of STEP_S, so four reach the target; their replay takes STEP_S and that half.
            assert point["seconds"] == pytest.approx(1.5 * STEP_S / 4)
            assert point["tflops_per_s"] == pytest.approx(point["flops"] / point["seconds"] / 1e12)
            assert point["sm_clock_mhz"] == 345
            assert point["doubts"] == []


def test_copies_go_every_way_a_card_with_a_neighbour_has(cuda: FakeCuda) -> None:
    found = list(copy.measure(Device("cuda", 0), SMALL))
    ways = list(dict.fromkeys(point["direction"] for point in found))
    assert ways == ["device", "host_to_device", "device_to_host", "peer"]
    assert all(point["peer_access"] for point in found if point["direction"] == "peer")
    twice = next(point for point in found if point["direction"] == "device")
    assert twice["gb_per_s"] == pytest.approx(2 * twice["bytes"] / twice["seconds"] / 1e9)
    cuda.cards = 1
    alone = {point["direction"] for point in copy.measure(Device("cuda", 0), SMALL)}
    assert alone == {"device", "host_to_device", "device_to_host"}


def test_a_card_torch_does_not_see_is_said(cuda: FakeCuda) -> None:
    cuda.cards = 0
    with pytest.raises(CannotMeasure, match="torch sees no CUDA GPU"):
        Device("cuda", 0)


def test_the_software_is_told_first(cuda: FakeCuda) -> None:
    first = next(points(Config("cuda", (), True, 1, "", 30.0, ""), 0, 0))
    assert (first["name"], first["nccl"], first["backend"]) == ("NVIDIA H100 80GB HBM3", "2.27.3", "nccl")
    assert first["busy"] is None
    assert cuda.log


@pytest.mark.parametrize(
    ("pids", "said"),
    [
        ((OWN,), None),
        ((OWN, 1), "processes 1 run on it"),
        ((NOBODY,), None),  # a container's own process, by its number outside
        ((NOBODY, NOBODY + 1), f"processes {NOBODY + 1} run on it"),
        ((1,), "processes 1 run on it"),
    ],
)
def test_a_card_with_other_work_is_busy(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, pids: tuple[int, ...], said: str | None
) -> None:
    running = [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in pids]
    cards = [{**H100, "UUID": "GPU-00000000-aa", "ComputeRunningProcesses": running}]
    monkeypatch.setattr("gpucalc.probe.device.library", lambda: FakeNvml(cards))
    assert Device("cuda", 0).busy() == said
    assert cuda.cards == 2


def settings() -> dict[str, Any]:
    known = open_catalog()
    job = resolve("models/gpt2", known, gpus="1xH100-SXM")
    one = known.cluster([(None, 1, "H100-SXM")])
    return trials(job, known, one, one, ranks=1, on_cpu=True).alone.settings()


def test_a_stage_reads_the_allocator_and_a_soak_reads_the_card(cuda: FakeCuda) -> None:
    device = Device("cuda", 0)
    said: list[str] = []
    found = rehearsal.alone(device, settings(), said.append, 2)
    assert found["finite"] is True
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (cuda.held, cuda.peak)
    made, measured = cuda.log.index("reset"), len(cuda.log) - cuda.log[::-1].index("reset")
    assert made < measured  # making the model is no part of training it
    assert said[0] == "one card: making the model"
    soaked = list(
        rehearsal.soak(Group(device, 0, 1, said.append), settings(), rehearsal.Span(0.5, 0.0, 0, 30.0))
    )
    last = soaked[-1]
    assert (last["kind"], last["window"]) == ("window", len(soaked))
    assert last["elapsed_s"] >= 0.5
    card = last["ranks"][0]
    assert card["fragmentation"] == pytest.approx(1 / 6)  # 10 of 12 GiB are in tensors
    assert (card["temperature_c"], card["power_w"], card["xid"], card["ecc_uncorrected"]) == (31, 71.5, [], 0)


def test_a_soak_that_goes_on_counts_from_where_it_was(cuda: FakeCuda) -> None:
    group = Group(Device("cuda", 0), 0, 1, lambda _: None)
    (only,) = rehearsal.soak(group, settings(), rehearsal.Span(100.0, 99.9, 41, 30.0))
    assert only["window"] == 42
    assert only["elapsed_s"] >= 100.0
    assert cuda.log
