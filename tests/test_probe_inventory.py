"""NVML facts field by field: what a driver does not answer is said, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import H100, RTX4090, FakeNvml

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import CannotMeasure
from gpucalc.probe.inventory import Inventory, inventory, surroundings
from gpucalc.probe.visible import visible
from gpucalc.report import probe as report
from gpucalc.report.screen import render


def take(fake: Any, environment: dict[str, str] | None = None, root: Path = Path("/nowhere")) -> Inventory:
    found = inventory(fake, open_catalog(), environment or {}, root)
    assert fake.open == 0  # every session is shut down
    json.dumps(found.document())
    render(report.inventory(found), color=False)
    return found


def test_a_dgx_of_eight_reads_every_field() -> None:
    found = take(FakeNvml([H100] * 8))
    assert found.driver.value == "570.124.06"
    assert found.cuda.value == "12.8"
    assert found.visible == tuple(range(8))
    card = found.cards[3]
    assert card.entry == "h100-sxm-80gb"
    assert card.value("architecture") == "hopper"
    assert card.value("compute_capability") == "9.0"
    assert card.value("memory_reserved") == 539 * 2**20
    assert card.value("power_limit") == 700
    assert card.value("nvlink")["up"] == 18
    assert len(card.value("nvlink")["peers"]) == 4
    assert card.value("throttled_by") == []  # idle is no throttling
    assert card.facts["numa_node"].reason == "not supported by this card or driver"


def test_sixteen_cards() -> None:
    assert len(take(FakeNvml([H100] * 16)).cards) == 16


def test_fields_a_geforce_does_not_have_say_so() -> None:
    card = take(FakeNvml([RTX4090])).cards[0]
    assert card.entry == "rtx-4090"
    for field in ("ecc", "mig", "mig_instances", "nvlink", "ecc_uncorrected"):
        assert card.value(field) is None
        assert card.facts[field].reason == "not supported by this card or driver"


def test_no_permission_for_single_fields() -> None:
    card = take(FakeNvml([{**H100, "ComputeRunningProcesses": "NoPermission"}])).cards[0]
    assert "no permission" in str(card.facts["processes"].reason)
    assert card.value("memory_total") == 85520809984


def test_a_lost_gpu_leaves_the_others() -> None:
    found = take(FakeNvml([H100] * 4, lost=(2,)))
    assert "lost" in str(found.cards[2].facts["name"].reason)
    assert found.cards[2].entry is None
    assert found.cards[3].entry == "h100-sxm-80gb"


def test_a_gpu_lost_between_two_questions() -> None:
    card = take(FakeNvml([{**H100, "Temperature": "GpuIsLost", "PowerUsage": "GpuIsLost"}])).cards[0]
    assert "lost" in str(card.facts["temperature"].reason)
    assert "lost" in str(card.facts["power"].reason)


def test_mig_instances_are_listed() -> None:
    part = {
        "Name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "UUID": "MIG-1234",
        "MemoryInfo": SimpleNamespace(total=42 * 10**9),
    }
    card = take(FakeNvml([{**H100, "MigMode": [1, 1], "instances": [part, part]}])).cards[0]
    assert card.value("mig") is True
    assert [one["uuid"] for one in card.value("mig_instances")] == ["MIG-1234", "MIG-1234"]
    assert card.value("mig_instances")[0]["memory_bytes"] == 42 * 10**9
    one = take(
        FakeNvml([{**H100, "MigMode": [1, 1], "instances": [part]}]), {"CUDA_VISIBLE_DEVICES": "MIG-12"}
    )
    assert one.visible == (0,)
    assert "one MIG instance of GPU 0" in one.notes[0]


def test_an_old_driver_answers_under_the_old_name() -> None:
    old = {**H100, "CurrentClocksEventReasons": "FunctionNotFound", "CurrentClocksThrottleReasons": 0x44}
    assert take(FakeNvml([old])).cards[0].value("throttled_by") == ["power cap", "hardware thermal slowdown"]


def test_memory_decides_between_entries_of_one_name_and_is_said_when_it_differs() -> None:
    v100 = {**H100, "Name": "Tesla V100-SXM2-32GB", "MemoryInfo": SimpleNamespace(total=16 * 2**30, used=0)}
    card = take(FakeNvml([v100])).cards[0]
    assert card.entry == "v100-sxm2-32gb"
    assert "where the catalogue has" in str(card.entry_note)


def test_an_unknown_card_is_named_with_its_neighbours() -> None:
    card = take(FakeNvml([{**H100, "Name": "GRID A100D-80C"}])).cards[0]
    assert card.entry is None
    assert "unknown GPU" in str(card.entry_note)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LibraryNotFound", "no NVIDIA driver library"),
        ("DriverNotLoaded", "not loaded"),
        ("NoPermission", "no permission"),
        ("LibRmVersionMismatch", "different versions: reboot"),
        ("GpuIsLost", "lost"),
        ("Unknown", "does not start"),
    ],
)
def test_without_a_driver_one_line_says_what_is_missing_and_what_can_be_done(error: str, words: str) -> None:
    with pytest.raises(CannotMeasure, match=words) as raised:
        take(FakeNvml([H100], init=error))
    assert "--device cpu" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 4


def test_a_driver_without_gpus() -> None:
    with pytest.raises(CannotMeasure, match="sees no GPU"):
        take(FakeNvml([]))


def test_where_it_runs_is_told_and_hinted(tmp_path: Path) -> None:
    assert surroundings(tmp_path) is None
    (tmp_path / ".dockerenv").touch()
    assert surroundings(tmp_path) == "container"
    with pytest.raises(CannotMeasure, match="--gpus all"):
        take(FakeNvml([], init="LibraryNotFound"), root=tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 5.15.90-microsoft-standard-WSL2")
    assert surroundings(tmp_path) == "WSL"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").touch()
    assert surroundings(tmp_path) == "Jetson"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("NotSupported", "not supported by this card or driver"),  # Jetson answers little else
        ("NoPermission", "no permission"),
        ("Unknown", "unknown error"),  # WSL, for what Windows keeps
        ("GpuIsLost", "lost"),
        ("Timeout", "did not answer in time"),
        ("FunctionNotFound", "too old to know it"),
    ],
)
def test_a_card_that_answers_nothing_but_its_name_still_has_every_field(error: str, words: str) -> None:
    known = ("Name", "UUID", "instances", "socket")
    silent = {field: value if field in known else error for field, value in H100.items()}
    found = take(FakeNvml([silent, silent]))
    card = found.cards[0]
    assert card.entry == "h100-sxm-80gb"
    read = {name for name, fact in card.facts.items() if fact.reason is None}
    assert read == {"name", "uuid"}
    asked_twice = {"throttled_by"} if error == "FunctionNotFound" else set()  # under its old name too
    for name, fact in card.facts.items():
        assert name in read | asked_twice or words in str(fact.reason), name
    assert words in str(found.pairs[0].access.reason)
    assert all("not_read" in found.document()["cards"][0][key] for key in ("ecc", "temperature_C", "power_W"))


def test_a_vgpu_is_said_and_what_its_host_keeps() -> None:
    share = {**H100, "VirtualizationMode": 2, "TotalEccErrors": "VgpuEccNotSupported"}
    found = take(FakeNvml([share]))
    assert found.cards[0].value("virtualization") == "vGPU"
    assert found.cards[0].facts["ecc_uncorrected"].reason == "not supported on a vGPU"
    assert "GPU 0: a vGPU" in found.notes[0]


def test_the_node_of_a_card_is_the_systems_where_the_driver_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:18:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert take(FakeNvml([H100]), root=tmp_path).cards[0].value("numa_node") == 1
    assert take(FakeNvml([{**H100, "NumaNodeId": 0}]), root=tmp_path).cards[0].value("numa_node") == 0


def test_how_cards_reach_each_other() -> None:
    joined = take(FakeNvml([H100] * 16))
    assert len(joined.pairs) == 120
    assert {(pair.path.value, pair.access.value) for pair in joined.pairs} == {("NV", "direct")}
    slots = [{**RTX4090, "socket": index // 2} for index in range(4)]
    apart = take(FakeNvml(slots))
    paths = {(pair.first, pair.second): pair.path.value for pair in apart.pairs}
    assert paths == {(0, 1): "PHB", (2, 3): "PHB", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"}
    assert {pair.access.value for pair in apart.pairs} == {"not supported by the chipset"}
    said = render(report.inventory(apart), color=False)
    assert "0-1 to 2-3" in said
    assert len(take(FakeNvml([H100] * 3, lost=(1,))).pairs) == 1


UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", None, "GPU-cccc-4"]


@pytest.mark.parametrize(
    ("variable", "seen", "said"),
    [
        (None, (0, 1, 2, 3), None),
        ("3,1", (3, 1), None),
        ("GPU-cc, GPU-aabb", (3, 1), None),
        ("", (), "empty"),
        ("-1", (), "'-1' names no GPU"),
        ("0,9,1", (0,), "'9' names no GPU"),
        ("GPU-aa", (), "names no GPU"),  # fits two cards
        ("1,1", (1,), "twice the same"),
        ("MIG-77", (), "is no MIG instance of these cards"),
        ("MIG-aa", (2,), "one MIG instance of GPU 2"),
        ("0,MIG-aa", (0,), "one more, a MIG instance"),
    ],
)
def test_cuda_visible_devices_reads_as_cuda_reads_it(
    variable: str | None, seen: tuple[int, ...], said: str | None
) -> None:
    found, note = visible(variable, UUIDS, {"MIG-aa-1": 2})
    assert found == seen
    assert (note is None) if said is None else said in str(note)


def test_the_variable_of_the_environment_is_honoured() -> None:
    found = take(FakeNvml([H100] * 4), {"CUDA_VISIBLE_DEVICES": "GPU-00000002,0"})
    assert found.visible == (2, 0)
    mixed = take(FakeNvml([H100, RTX4090]))
    assert any("CUDA_DEVICE_ORDER" in note for note in mixed.notes)


def test_the_command_prints_the_document(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: FakeNvml([H100, H100]))
    assert main(["probe", "--inventory", "--json"]) == 0
    cards = json.loads(capsys.readouterr().out)["inventory"]["cards"]
    assert [card["catalogue"] for card in cards] == ["h100-sxm-80gb"] * 2
    assert cards[0]["memory_total_bytes"] == 85520809984
    assert cards[0]["numa_node"] == {"not_read": "not supported by this card or driver"}
    assert main(["probe", "--inventory"]) == 0
    assert "2 GPUs, driver 570.124.06, CUDA 12.8" in capsys.readouterr().out


def test_without_a_gpu_the_command_exits_4_in_one_line(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("gpucalc.probe.command.library", lambda: FakeNvml([], init="LibraryNotFound"))
    assert main(["probe", "--inventory"]) == 4
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
