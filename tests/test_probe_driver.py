"""The same cards through pynvml's own wrappers: the stand-in for pynvml tells what the driver would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from fake_driver import Driver, installed
from fake_nvml import H100, RTX4090, FakeNvml

from gpucalc.catalog import open_catalog
from gpucalc.errors import CannotMeasure
from gpucalc.probe.inventory import inventory
from gpucalc.probe.watch import Watch

NOWHERE = Path("/nowhere")
PART = {
    "Name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "UUID": "MIG-1234",
    "MemoryInfo": SimpleNamespace(total=42 * 10**9, used=0, free=0),
}  # fmt: skip
BUSY = SimpleNamespace(pid=4242, usedGpuMemory=3 * 2**30)
SILENT = {field: value if field in ("Name", "UUID", "instances", "socket") else "NoPermission"
          for field, value in H100.items()}  # fmt: skip
MACHINES: dict[str, list[dict[str, Any]]] = {
    "dgx": [H100] * 8,
    "sixteen": [H100] * 16,
    "geforce": [{**RTX4090, "socket": index // 2} for index in range(4)],
    "mig": [{**H100, "MigMode": [1, 1], "instances": [PART, PART]}],
    "busy": [{**H100, "ComputeRunningProcesses": [BUSY, BUSY]}],
    "old": [{**H100, "CurrentClocksEventReasons": "FunctionNotFound", "CurrentClocksThrottleReasons": 0x44}],
    "silent": [SILENT, SILENT],
    "throttled": [{**H100, "CurrentClocksEventReasons": 0xA8}],
    "vgpu": [{**H100, "VirtualizationMode": 2, "TotalEccErrors": "VgpuEccNotSupported"}],
}


@pytest.mark.parametrize("name", MACHINES)
def test_both_ways_tell_the_same(name: str) -> None:
    known = open_catalog()
    expected = inventory(FakeNvml(MACHINES[name]), known, {}, NOWHERE).document()
    driver = Driver(MACHINES[name])
    with installed(driver) as nvml:
        found = inventory(nvml, known, {}, NOWHERE).document()
    assert found == expected
    assert driver.open == 0


def test_a_lost_card_leaves_the_others() -> None:
    with installed(Driver([H100] * 4, lost=(2,))) as nvml:
        found = inventory(nvml, open_catalog(), {}, NOWHERE)
    assert [card.entry for card in found.cards] == [*["h100-sxm-80gb"] * 2, None, "h100-sxm-80gb"]
    assert len(found.pairs) == 3


@pytest.mark.parametrize(
    ("error", "words"),
    [("DriverNotLoaded", "not loaded"), ("LibRmVersionMismatch", "different versions: reboot"),
     ("NoPermission", "no permission"), ("GpuIsLost", "a GPU is lost")],
)  # fmt: skip
def test_a_driver_that_does_not_start(error: str, words: str) -> None:
    with (
        installed(Driver([H100], init=error)) as nvml,
        pytest.raises(CannotMeasure, match=words),
    ):
        inventory(nvml, open_catalog(), {}, NOWHERE)


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> Any:
        raise OSError

    monkeypatch.setattr(pynvml, "CDLL", gone)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    with pytest.raises(CannotMeasure, match="no NVIDIA driver library"):
        inventory(pynvml, open_catalog(), {}, NOWHERE)


def test_a_function_an_old_driver_does_not_have_costs_its_field_alone() -> None:
    class Old(Driver):
        def __getattribute__(self, name: str) -> Any:
            if name in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetP2PStatus"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    with installed(Old([H100, H100])) as nvml:
        found = inventory(nvml, open_catalog(), {}, NOWHERE)
    assert found.cards[0].facts["memory_reserved"].reason == "the driver is too old to know it"
    assert found.cards[0].value("memory_total") == 85520809984
    assert found.pairs[0].access.reason == "the driver is too old to know it"


def test_a_card_is_watched_through_the_wrappers() -> None:
    card = {**H100, "xid": [79], "RemappedRows": (1, 1, 0, 0)}
    with installed(Driver([card])) as nvml:
        nvml.nvmlInit()
        watch = Watch(nvml, nvml.nvmlDeviceGetHandleByUUID("GPU-00000000-aa"))
        found = watch.health()
        again = watch.health()
        nvml.nvmlShutdown()
    assert (found["xid"], again["xid"]) == ([79], [])
    assert (found["remapped_rows"], found["power_w"], found["ecc_corrected"]) == (2, 71.5, 0)
    assert watch.not_read == {}
