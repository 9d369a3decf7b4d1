"""A machine held against the checks: what is computed is worked out by hand, what is unknown is asked."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import H100, RTX4090, FakeNvml

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog, shipped
from gpucalc.doctor import box as boxes
from gpucalc.doctor import command, host
from gpucalc.doctor.examine import examine
from gpucalc.doctor.finding import Finding, Report
from gpucalc.doctor.monitor import monitor
from gpucalc.doctor.software import number
from gpucalc.errors import CannotMeasure, ExitCode, InputError, UnknownName
from gpucalc.formulas.machine import lanes_left, standing_supply_w, training_disk_bytes
from gpucalc.probe.inventory import inventory
from gpucalc.spec.checks import MonitorsSpec, Severity
from gpucalc.spec.server import ServerSpec

CATALOG = Catalog([shipped()])
GIB = 2**30

# The documents' 4U server: ten cards, two supplies of 1600 W.
OFFER: dict[str, Any] = {
    "gpus": "10xA100-PCIe-80GB",
    "sockets": 2,
    "placement": [5, 5],
    "lanes": 64,
    "cores": 64,
    "cpu_power_w": 225,
    "other_power_w": 300,
    "psu": "2x1600",
}


def judged(plan_of: str | None = None, **keys: Any) -> Report:
    box = boxes.described(ServerSpec.read(keys, where="offer"), CATALOG, where="offer")
    plan = None if plan_of is None else command.plan_on(plan_of, box, CATALOG, task=None, sets=())
    return examine(box, CATALOG, plan)


def of(report: Report, check: str) -> Finding:
    return next(item for item in report.findings if item.check == check)


def has(report: Report, check: str) -> bool:
    return any(item.check == check for item in report.findings)


def numbers(item: Finding) -> dict[str, float]:
    return {line.name: line.value for line in item.numbers}


def test_formulas_by_hand() -> None:
    assert standing_supply_w(supplies=2, spare=1, each_w=1600, load_share=0.8) == 1280
    assert standing_supply_w(supplies=6, spare=2, each_w=3300, load_share=1) == 13_200
    assert lanes_left(lanes=64, gpus=5, width=16) == -16
    assert training_disk_bytes(weight_bytes=14e9, checkpoint_bytes=98e9) == 210e9


def test_ten_cards_on_two_supplies() -> None:
    report = judged(**OFFER)
    both, one = of(report, "psu"), of(report, "psu-redundancy")
    # 10 x 300 + 2 x 225 + 300 = 3750 W; 2 x 1600 = 3200, at 80 % 2560: (2560 - 750) / 300 = 6 cards.
    assert numbers(both) == {"full_load": 3750, "label": 3200, "usable": 2560}
    assert both.severity is Severity.ERROR
    assert both.right is not None
    assert both.right.startswith("6 of the 10 cards")
    # One alone: 1280 - 750 = 530 W: one card.
    assert one.severity is Severity.WARNING
    assert one.right is not None
    assert one.right.startswith("1 of the 10 cards")
    assert of(judged(**OFFER | {"psu": "2x1600:redundant"}), "psu-redundancy").severity is Severity.ERROR
    assert not has(judged(**OFFER | {"psu": "2x1600:shared"}), "psu-redundancy")


def test_four_cards_on_850_w() -> None:
    keys = {"gpus": "4xA100-PCIe-80GB", "cpu_power_w": 105, "other_power_w": 100, "psu": "1x850"}
    item = of(judged(**keys), "psu")
    assert item.severity is Severity.ERROR
    assert numbers(item)["full_load"] == 1405  # 1200 + 105 + 100
    enough = of(judged(**keys | {"psu": "1x1800"}), "psu")  # 1405 / 0.8 = 1756
    assert enough.severity is Severity.NOTE
    tight = of(judged(**keys | {"psu": "1x1700"}), "psu")  # 80 % of 1700 is 1360
    assert tight.severity is Severity.WARNING


def test_the_12_v_rail() -> None:
    keys = {"gpus": "2xRTX4090", "cpu_power_w": 250, "other_power_w": 100, "psu": "1x1700:12v=1200"}
    item = of(judged(**keys), "psu-12v")
    assert item.severity is Severity.ERROR
    assert numbers(item) == {"full_load": 1250, "rail": 1200}  # 900 + 250 + 100
    assert not has(judged(**keys | {"psu": "1x1700:12v=1600"}), "psu-12v")


def test_lanes_by_processor() -> None:
    item = of(judged(**OFFER), "lanes")
    assert numbers(item) == {"each": 12, "needed": 80}  # 64 lanes under 5 cards: x8
    assert "so x8" in item.problem
    desktop = {"gpus": "4xRTX4090", "lanes": 16}
    item = of(judged(**desktop), "lanes")
    assert item.severity is Severity.ERROR
    assert "4 a card, so x4" in item.problem
    assert of(judged(**desktop | {"lanes": 128}), "lanes").severity is Severity.NOTE


@pytest.mark.parametrize(
    ("keys", "check", "severity", "says"),
    [
        ({"cards": {"pcie_gen": 4, "pcie_lanes": 8}}, "pcie-width", "warning", "15.8 GB/s"),
        ({"cards": {"pcie_gen": 4, "pcie_lanes": 4}}, "pcie-width", "error", "7.9 GB/s"),
        ({"cards": {"pcie_gen": 3, "pcie_lanes": 16}}, "pcie-generation", "warning", "15.8 GB/s"),
        ({"cards": {"bar1": "256 MiB"}}, "bar1", "warning", "Resizable BAR"),
        ({"above_4g": False}, "above-4g", "error", "800 GiB"),
        ({"placement": [5, 5]}, "across-sockets", "warning", "5 + 5"),
        ({"cards": {"power_limit_w": 200}}, "power-limit", "warning", "A100"),
        ({"cards": {"eight_pins": 1}}, "connectors", "error", "1 x 8-pin"),
        ({"inlet_c": 38, **OFFER}, "inlet", "error", "329 CFM"),
        ({"inlet_c": 30}, "inlet", "note", "CFM"),
        ({"slots": 10, "cards": {"slots_wide": 2}}, "slots", "error", "10 x 2 = 20"),
        ({"cores": 16}, "cores", "warning", "40"),
        ({"host_ram": "256 GB"}, "host-memory", "warning", "800.00 GiB"),
        ({"peer_to_peer": False}, "no-peer-access", "warning", "peer access off"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "costly-value", "warning", "NCCL_P2P_DISABLE=1"),
        ({"environment": {"NCCL_BOGUS": "1"}}, "unknown-variable", "error", "NCCL_BOGUS=1"),
        ({"cards": {"ecc_pending": True}}, "ecc-pending", "warning", "pending"),
        ({"gpus": "4xA100-PCIe-80GB+4xRTX3090"}, "mixed-cards", "warning", "4 x rtx-3090"),
    ],
)
def test_each_check(keys: dict[str, Any], check: str, severity: str, says: str) -> None:
    item = of(judged(**{"gpus": "10xA100-PCIe-80GB", **keys}), check)
    assert item.severity == severity
    assert says in item.evidence
    assert item.sources


@pytest.mark.parametrize(
    ("keys", "check", "severity"),
    [
        ({"driver": "535.154.02", "cuda": "12.1"}, "driver-cuda", "note"),
        ({"driver": "525.60.13", "cuda": "12.8"}, "driver-cuda", "warning"),  # from 525.60.13 on, no PTX
        ({"driver": "470.82.01", "cuda": "12.1"}, "driver-cuda", "error"),
        ({"driver": "515.65.01", "cuda": "11.7"}, "driver-architecture", "error"),  # Hopper came with 520
        ({"driver": "580.65.06", "cuda": "11.4"}, "cuda-architecture", "error"),
        ({"cuda": "12.8", "torch": "2.1.2"}, "torch-cuda", "warning"),
        ({"gpus": "8xV100-SXM2-32GB", "cuda": "13.0"}, "cuda-architecture", "error"),
        ({"gpus": "8xRTX5090", "cuda": "12.6", "torch": "2.7"}, "torch-architecture", "error"),
    ],
)
def test_versions_against_each_other(keys: dict[str, Any], check: str, severity: str) -> None:
    item = of(judged(**{"gpus": "8xH100-SXM", **keys}), check)
    assert item.severity == severity
    assert item.claims


def test_pairs_that_go_together() -> None:
    report = judged(gpus="8xH100-SXM", driver="535.154.02", cuda="12.1", torch="2.1")
    assert {item.severity for item in report.findings} == {Severity.NOTE}
    assert number("12.10") > number("12.9")


def test_geforce_cards_have_no_peer_access_as_a_rule() -> None:
    item = of(judged(gpus="8xRTX4090"), "no-peer-access")
    assert "15.0 GB/s" in item.evidence
    assert not has(judged(gpus="8xRTX4090", peer_to_peer=True), "no-peer-access")
    assert not has(judged(gpus="8xH100-SXM"), "no-peer-access")


def test_a_job_brings_its_own_needs() -> None:
    report = judged("llama-2-7b", gpus="8xA100-PCIe-80GB", host_ram="1 TB", nvme="100 GB")
    item = of(report, "disk")
    # 6,738,415,616 parameters: 2 bytes of weights and two checkpoints of 14 bytes each.
    assert item.numbers[0].value == 6_738_415_616 * (2 + 2 * 14)
    assert item.severity is Severity.ERROR
    assert of(report, "job").severity is Severity.NOTE
    assert of(judged("llama-3.1-405b", gpus="8xA100-PCIe-80GB"), "job").severity is Severity.ERROR


def test_what_is_not_known_is_asked() -> None:
    asked = {question.about for question in judged(gpus="4xRTX4090").questions}
    assert {
        "driver", "CUDA", "slots", "lanes", "peer access", "NUMA", "BAR1", "Above 4G Decoding",
        "power supplies", "connectors", "inlet temperature", "hot spots", "host memory", "disk",
        "processor cores", "slots and size",
    } <= asked  # fmt: skip
    told = judged(
        **OFFER, driver="535.154.02", cuda="12.1", inlet_c=25, host_ram="1 TB", nvme="4 TB", slots=20,
        above_4g=True, peer_to_peer=True,
        cards={"pcie_gen": 4, "pcie_lanes": 16, "bar1": "128 GiB", "slots_wide": 2, "eight_pins": 2},
    )  # fmt: skip
    assert {question.about for question in told.questions} == {"supply derating", "12 V", "hot spots"}


def test_a_catalogue_system_needs_no_file() -> None:
    box = command.server("dgx-h100", CATALOG)
    assert len(box.cards) == 8
    report = examine(box, CATALOG)
    assert numbers(of(report, "power-need")) == {"full_load": 10_200}  # the maker's own maximum
    assert not {"connectors", "slots and size", "lanes"} & {item.about for item in report.questions}
    assert len(command.server("gb200-nvl72", CATALOG).cards) == 4  # one machine of the rack


def attached(nvml: FakeNvml, tmp_path: Path, **facts: Any) -> Report:
    found = inventory(nvml, CATALOG, environment={}, root=tmp_path)
    return examine(boxes.attached(found, CATALOG, environment={}, host=facts), CATALOG)


def test_the_live_machine(tmp_path: Path) -> None:
    sick = {
        **H100,
        "CurrPcieLinkWidth": 8,
        "EccMode": [1, 0],
        "TotalEccErrors": 3,
        "PersistenceMode": 0,
        "CurrentClocksEventReasons": 0x40,
        "EnforcedPowerLimit": 500_000,
    }
    report = attached(FakeNvml([H100, sick]), tmp_path, torch="2.9.0", cuda="12.8")
    held = {item.check: item for item in report.findings}
    assert held["pcie-width"].about == "GPU 1"
    assert held["ecc-errors"].severity is Severity.ERROR
    assert held["ecc-pending"].severity is Severity.WARNING
    assert held["throttled"].severity is Severity.ERROR
    assert held["power-limit"].problem == "is held to 500 W of 700 W"
    assert "persistence" in held
    assert "bar1" not in held


def test_a_slot_of_an_older_generation(tmp_path: Path) -> None:
    # NVML's maximum is that of card and slot together.
    older = {**H100, "CurrPcieLinkGeneration": 4, "MaxPcieLinkGeneration": 4}
    idle = {**H100, "CurrPcieLinkGeneration": 1}
    assert of(attached(FakeNvml([older]), tmp_path), "pcie-generation").severity is Severity.WARNING
    item = of(attached(FakeNvml([idle]), tmp_path), "pcie-generation")
    assert item.severity is Severity.NOTE
    assert "under load" in item.problem


def test_what_the_driver_keeps_to_itself_is_asked(tmp_path: Path) -> None:
    report = attached(FakeNvml([RTX4090, RTX4090]), tmp_path)
    why = {question.about: question.ask for question in report.questions}["ecc"]
    assert why == "not supported by this card or driver (GPU 0, 1)"
    lost = attached(FakeNvml([H100, H100], lost=(1,)), tmp_path)
    assert any("GPU 1" in question.ask for question in lost.questions)


def test_the_jobs_host_is_this_machines() -> None:
    offloaded = {"gpus": "8xA100-PCIe-80GB"}
    small, large = (
        command.plan_on(
            "llama-2-7b",
            boxes.described(ServerSpec(host_ram=ram, **offloaded), CATALOG, where="w"),
            CATALOG,
            task=None,
            sets=["run.framework=deepspeed", "run.zero_stage=3", "run.offload=optimizer"],
        )
        for ram in ("32 GB", "512 GB")
    )
    assert small.verdict.host is not None
    assert small.verdict.host.capacity is not None
    assert small.verdict.host.capacity.value == 32e9
    assert small.verdict.host_decides
    assert not large.verdict.host_decides


def test_a_geforce_answers_less(tmp_path: Path) -> None:
    report = attached(FakeNvml([RTX4090, RTX4090]), tmp_path)
    assert of(report, "bar1").severity is Severity.WARNING
    item = of(report, "no-peer-access")
    assert item.severity is Severity.WARNING
    assert "not supported by the chipset between 1 pair" in item.evidence
    assert not has(report, "ecc-errors")
    open_ = [{**RTX4090, "p2p": 0, "socket": index} for index in range(2)]  # as a changed driver has it
    report = attached(FakeNvml(open_), tmp_path)
    assert not has(report, "no-peer-access")
    assert "peer access" not in {question.about for question in report.questions}
    across = of(report, "across-sockets")  # no NUMA node is known: the driver's topology tells
    assert across.problem.startswith("1 pair of cards")


def test_where_cards_are_plugged(tmp_path: Path) -> None:
    for address, node in (("0000:18:00.0", 0), ("0000:9a:00.0", 1), ("0000:00:01.0", -1)):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    assert host.numa_nodes(tmp_path) == {"0000:18:00.0": 0, "0000:9a:00.0": 1}
    assert boxes.pci_address("00000000:9A:00.0") == "0000:9a:00.0"
    assert host.facts(tmp_path)["cores"]


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> Any:
        raise CannotMeasure("no driver; `gpucalc probe --device cpu` measures the CPU")

    with pytest.raises(CannotMeasure, match="no driver; --system FILE judges a described server"):
        command.this_machine(none, CATALOG)
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        assert main(["doctor"]) == ExitCode.CANNOT_MEASURE
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--psu", "2x"], ["--psu", "1x850:redundant"], ["--psu", "2x1600:maybe"], ["--inlet", "300"],
        ["--lint", "x.sh"], ["--set", "run.tp=2"],
    ],
)  # fmt: skip
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--system", "dgx-h100", *flags]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gpus": "8xH100", "colour": "red"},
        {"gpus": "8xH100", "psu": "big"},
        {"gpus": "8xH100", "host_ram": "much"},
        {"gpus": "8xH100", "driver": "new"},
        {"gpus": "8xH100", "placement": [4, 3]},
        {"gpus": "128xH100-SXM"},
        {"gpus": "2x8xH100-SXM"},
        {"gpus": "8xH100", "lanes": -1},
        {"gpus": "8xH100", "inlet_c": "warm"},
    ],
)
def test_a_wrong_description_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        judged(**keys)


def test_names_that_are_nothing() -> None:
    with pytest.raises(UnknownName, match="neither a file nor a system"):
        command.server("dgx-h1000", CATALOG)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offer = tmp_path / "offer.yaml"
    offer.write_text("gpus: 10xA100-PCIe-80GB\ncpu_power_w: 450\nother_power_w: 300\n")
    assert main(["doctor", "--system", str(offer), "--psu", "2x1600"]) == ExitCode.NO
    shown = capsys.readouterr().out
    assert "exceed 3,200 W" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["doctor", "--system", str(offer), "--psu", "2x3000", "--json"]) == ExitCode.ANSWERED
    body = json.loads(capsys.readouterr().out)
    assert body["schema_version"]
    assert body["counts"]["error"] == 0
    assert body["ask_the_vendor"]
    assert main(["doctor", "llama-2-7b", "--system", str(offer)]) == ExitCode.ANSWERED
    assert "llama-2-7b: fits" in capsys.readouterr().out


def test_monitoring_for_the_machine_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    held = {item.id for item in monitor(command.server("dgx-h100", CATALOG), CATALOG).commands}
    assert {"dmon", "xid", "nvlink-status", "ecc", "dcgm-work", "dcgm-nvlink", "nccl-start"} <= held
    desk = monitor(command.server("ws-4090x4", CATALOG), CATALOG)
    assert {item.id for item, _ in desk.left_out} >= {"nvlink-status", "ecc", "dcgm-work"}
    single = boxes.described(ServerSpec(gpus="1xL40S"), CATALOG, where="w")
    assert "topology" in {item.id for item, _ in monitor(single, CATALOG).left_out}
    for item in CATALOG.load("checks", "monitor", MonitorsSpec).commands:
        assert len(item.command) <= 80, "a command has to be copied whole"
    assert main(["doctor", "--monitor", "--system", "dgx-h100"]) == ExitCode.ANSWERED
    assert "nvidia-smi dmon -s pucvmet -d 5 -o DT >> gpu.log\n" in capsys.readouterr().out
    assert main(["doctor", "--monitor", "--system", "dgx-h100", "--json"]) == ExitCode.ANSWERED
    assert json.loads(capsys.readouterr().out)["monitor"][0]["id"] == "dmon"
    assert main(["doctor", "--monitor", "--system", "mi300x-8"]) == ExitCode.USAGE
    assert "NVIDIA" in capsys.readouterr().err


def test_the_commands_we_print_pass_our_own_lint() -> None:
    from gpucalc.doctor.lint import lint

    for item in CATALOG.load("checks", "monitor", MonitorsSpec).commands:
        found = lint(item.command, CATALOG, where=item.id).findings
        assert not [one for one in found if one.severity is Severity.ERROR], item.id


def test_other_vendors_are_judged_by_what_is_not_nvidias() -> None:
    report = examine(command.server("mi300x-8", CATALOG), CATALOG)
    assert not report.severe
    assert "ROCm" in " ".join(question.ask for question in report.questions)


def test_what_others_hold_on_the_cards_is_left_to_them(tmp_path: Path) -> None:
    """A job is planned beside the 15.94 GiB another process holds, and the report says so."""
    taken = int(15.94 * GIB)
    used = SimpleNamespace(total=85520809984, used=taken + 539 * 2**20, free=0)
    busy = {**H100, "MemoryInfo": used}
    idle, shared = (
        boxes.attached(
            inventory(FakeNvml(cards), CATALOG, environment={}, root=tmp_path),
            CATALOG,
            environment={},
            host={},
        )
        for cards in ([H100], [H100, busy])
    )
    assert [card.in_use_bytes for card in shared.cards] == [3 * 2**20, taken]
    assert command.plan_on("qwen3-0.6b", idle, CATALOG, task="serve", sets=()).recipe.in_use_bytes == 0
    plan = command.plan_on("qwen3-0.6b", shared, CATALOG, task="serve", sets=())
    assert plan.recipe.in_use_bytes == pytest.approx(taken, rel=0.001)
    assert "15.94 GiB a card are in use by others" in of(examine(shared, CATALOG, plan), "job").evidence
    said = command.plan_on("qwen3-0.6b", shared, CATALOG, task="serve", sets=("run.memory_in_use_gib=2",))
    assert said.recipe.in_use_bytes == 2 * GIB
