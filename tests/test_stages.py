"""The three-stage test without devices: what is cut, what is kept on disk, what is found, who lags."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import H100, RTX4090, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.__main__ import main
from gpucalc.builders.build import build_graph
from gpucalc.calibration import CalibratedCatalog
from gpucalc.catalog import open_catalog, roots
from gpucalc.counts import count
from gpucalc.errors import CannotMeasure, InputError, UnsupportedModel
from gpucalc.formulas import calibration as formulas
from gpucalc.jobs import resolve
from gpucalc.plan.answer import Level
from gpucalc.probe import overlay, stages
from gpucalc.probe.command import Options, asked
from gpucalc.probe.inject import Fault
from gpucalc.probe.inventory import inventory
from gpucalc.probe.journal import Journal, read
from gpucalc.probe.lag import HOPELESS, LATE_S, RUNNING, Streak, latest, slowest
from gpucalc.probe.launch import Outcome
from gpucalc.probe.modules import cut, keep, refuse_unbuilt
from gpucalc.probe.trials import CPU_LAYERS, narrowed, trials
from gpucalc.probe.verdict import summary
from gpucalc.probe.watch import Watch
from gpucalc.probe.worker import Config
from gpucalc.report import stages as report
from gpucalc.report.screen import render
from gpucalc.spec.calibration import MeasuredMachine

Document = dict[str, Any]


def test_hand_worked_figures_of_a_test() -> None:
    assert formulas.achieved_tokens_per_s(tokens=8192, elapsed_s=0.5) == 16384
    # 80 GB reserved, 60 of them in tensors
    assert formulas.idle_share(reserved_bytes=80e9, allocated_bytes=60e9) == 0.25
    # 60 ms of 480 are communication that nothing hides
    assert formulas.exposed_share(exposed_s=0.06, step_s=0.48) == 0.125
    assert formulas.drift(first=200, last=190) == pytest.approx(-0.05)
    assert formulas.deviation(measured=66, predicted=60) == pytest.approx(0.1)
    # 72 h x 8 GPUs without failure: MTBF above 192 GPU hours
    assert formulas.mtbf_bound_gpu_h(hours=72, gpus=8) == 192


# -- what is trained ------------------------------------------------------------------------------


def prepared(model: str, fleet: str, ranks: int, *, on_cpu: bool = False, sets: tuple[str, ...] = ()) -> Any:
    known = open_catalog()
    job = resolve(model, known, gpus=fleet, sets=sets)
    card = job.fleet.parts[0].gpu
    cards, one = known.cluster([(None, ranks, card)]), known.cluster([(None, 1, card)])
    return trials(job, known, cards, one, ranks=ranks, on_cpu=on_cpu)


def test_layers_are_cut_to_what_fits_and_one_more_would_not() -> None:
    found = prepared("models/llama-3-8b", "8xH100-SXM", 8)
    assert 1 < len(found.alone.layers) < 32
    assert found.alone.plan.verdict.level is Level.FITS
    # One layer more has 218,112,000 parameters of 16 bytes and their step's temporaries: beyond the margin.
    verdict = found.alone.plan.verdict
    layer = 20 * 218_112_000 * 1.05
    assert (verdict.needed.value + layer) * (1 + verdict.expected_error) > verdict.capacity.value
    assert found.together is not None
    assert len(found.together.layers) == 32  # sharded over eight cards, all of it fits
    assert (found.together.strategy, found.together.plan.layout.zero_stage) == ("fsdp", 3)
    told = found.together.predicted()
    assert told["sync_s"] > told["sync_exposed_s"] > 0
    assert told["parameters"] == 8_030_261_248
    assert found.changes == ()


def test_every_kind_of_layer_is_kept_in_its_share() -> None:
    gemma = build_graph(resolve("models/gemma-3-4b-it", open_catalog(), gpus="1xH100-SXM").model)
    layers = gemma.stacks[0].layers
    kept = keep(gemma, 12)
    assert len(kept) == 12
    assert all(a < b for a, b in pairwise(kept))
    full = [place for place in kept if layers[place] == layers[5]]
    assert len(full) == 2  # one in six is a layer of full attention
    assert len(keep(gemma, 1)) == 2  # one of each kind
    small = cut(gemma, kept)
    assert (len(small.stacks), len(small.stacks[0].layers)) == (1, 12)
    assert count(small).total.value < count(gemma).total.value


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 80))
def test_so_many_layers_are_kept_as_asked_for(kinds: list[int], number: int) -> None:
    first = list(dict.fromkeys(kinds))
    layers = tuple(first.index(kind) for kind in kinds)
    stack = SimpleNamespace(role="decoder", layers=layers)
    graph: Any = SimpleNamespace(stacks=(stack,), name="x", embedding=object(), head=SimpleNamespace(vocab=1))
    kept = keep(graph, min(number, len(layers)))
    assert len(kept) == max(min(number, len(layers)), len(first))
    assert {layers[place] for place in kept} == set(layers)
    assert sorted(set(kept)) == list(kept)


def test_what_the_test_does_not_take_over_is_said() -> None:
    found = prepared(
        "models/llama-3-70b", "64xH100-SXM", 8,
        sets=("run.framework=megatron", "run.tp=8", "run.precision=fp8", "run.optimizer=lion"),
    )  # fmt: skip
    assert "layout: tp 8 -> data parallel over 8 cards" in found.changes
    assert "sharding: of the optimizer -> none" in found.changes
    assert "precision: fp8 -> bf16" in found.changes
    assert "optimizer: lion -> adamw" in found.changes
    assert "cards: 64 -> 8, each with its own share of the batch" in found.changes


def test_experts_are_halved_where_one_layer_is_too_much() -> None:
    found = prepared("models/deepseek-v3", "8xH200-SXM", 8)
    assert found.alone.spec.moe.experts < 256
    assert found.alone.plan.verdict.level is Level.FITS
    assert "experts" in found.alone.words
    with pytest.raises(CannotMeasure, match="not even one layer"):
        prepared("models/llama-3-70b", "2xRTX4090", 2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("models/mamba-2.8b", "mamba layers"),
        ("models/qwen3-next-80b-a3b", "gated_deltanet layers"),
        ("models/bert-base", "train language models"),
        ("models/resnet-50", "train language models"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(model: str, words: str) -> None:
    known = open_catalog()
    with pytest.raises(UnsupportedModel, match=words):
        refuse_unbuilt(build_graph(resolve(model, known, gpus="8xH100-SXM").model))


def test_jobs_that_train_nothing_here_are_refused() -> None:
    known = open_catalog()
    job = resolve("models/llama-3-8b", known, gpus="1xH100-SXM", task="serve")
    one = known.cluster([(None, 1, "H100-SXM")])
    with pytest.raises(InputError, match="serves; the stages train"):
        trials(job, known, one, one, ranks=1, on_cpu=False)
    with pytest.raises(InputError, match="trains by lora"):
        prepared("models/llama-3-8b", "8xH100-SXM", 8, sets=("run.method=lora",))


def test_a_cpu_trains_the_same_parts_at_a_small_width() -> None:
    for name in ("llama-3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "gemma-2-9b"):
        spec = resolve(f"models/{name}", open_catalog(), gpus="1xH100-SXM").model
        small, said = narrowed(spec)
        mine, wide = (build_graph(one).stacks[0] for one in (small, spec))
        assert mine.layers == wide.layers
        for a, b in zip(mine.blocks, wide.blocks, strict=True):
            assert [linear.name for linear in a.mixer.linears] == [linear.name for linear in b.mixer.linears]
            assert [norm.name for norm in a.norms] == [norm.name for norm in b.norms]
        graph = build_graph(small)
        assert count(cut(graph, keep(graph, CPU_LAYERS))).total.value < 3e6
        assert said[0].startswith("width: ")


# -- the record -----------------------------------------------------------------------------------


def test_a_record_survives_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    journal = Journal(path)
    journal.add({"kind": "stages", "job": "x"})
    journal.add({"kind": "window", "window": 1})
    with path.open("a") as file:
        file.write('{"kind": "window", "win')
    again = Journal(path)
    assert [record["kind"] for record in again.records] == ["stages", "window"]
    again.add({"kind": "window", "window": 2})
    assert [record.get("window") for record in read(path)[0]] == [None, 1, 2]
    for text, words in (
        ("somebody's notes", "is no record"),
        ("not json\n", "is no record"),
        ('{"kind": "window"}\n', "is no record"),
        ('{"kind": "stages", "job": "x"}\nnot json\n', "line 2 is not of a record"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            Journal(path)
        assert path.read_text() == text  # nothing is cut off another file
    path.write_text('{"kind": "stag')
    assert Journal(path).records == []


def head(**more: Any) -> Document:
    told = {"peak_allocated_bytes": 60e9, "step_s": 0.5, "tokens_per_s": 12500, "memory_error_fraction": 0.05,
            "time_error_fraction": 0.1}  # fmt: skip
    return {
        "kind": "stages", "version": 1, "job": "llama", "device": "cuda", "card": "h100-sxm-80gb", "ranks": 2,
        "changes": ["layout: tp 8 -> data parallel over 2 cards"],
        "trained": {"alone": "12 of 32 layers", "together": "32 of 32 layers"},
        "predicted": {"alone": told, "together": {**told, "sync_s": 0.2, "sync_exposed_s": 0.05}},
        "settings": {}, **more,
    }  # fmt: skip


def stage(name: str, **more: Any) -> Document:
    found = {"kind": "stage", "stage": name, "finite": True, "last_loss": 2.0, "peak_allocated_bytes": 61e9,
             "step_s": 0.52, "tokens_per_s": 1e4}  # fmt: skip
    return {**found, **more}


def window(number: int, *ranks: Document, **more: Any) -> Document:
    healthy = {"finite": True, "loss": 2.0, "temperature_c": 60, "power_w": 600.0, "throttled_by": [],
               "ecc_corrected": 3, "ecc_uncorrected": 0, "xid": [], "fragmentation": 0.1}  # fmt: skip
    cards = [{"rank": rank, **healthy, **own} for rank, own in enumerate(ranks or ({}, {}))]
    return {"kind": "window", "window": number, "elapsed_s": 900.0 * number, "tokens_per_s": 1e4,
            "slow_ranks": [], "ranks": cards, **more}  # fmt: skip


WINDOWS = [window(number) for number in range(1, 9)]
BOTH = [stage("alone"), stage("together", sync_s=0.21, sync_exposed_s=0.06)]


def test_a_healthy_test_passes_and_says_what_it_proves() -> None:
    found = summary([head(), *BOTH, *WINDOWS], soak_s=7200)
    assert (found.verdict, found.findings, found.missing) == ("passed", (), ())
    rows = {row.name: row for row in found.stages[1][2]}
    assert rows["peak memory, tensors"].deviation == pytest.approx(61 / 60 - 1)
    assert rows["peak memory, tensors"].within is True
    assert rows["gradient exchange"].deviation == pytest.approx(0.05)
    assert found.soak is not None
    assert (found.soak.hours, found.soak.failure_free_gpu_h) == (2.0, pytest.approx(4 / 3))
    assert (found.soak.ecc_corrected, found.soak.temperature_max_c) == (0, 60)
    json.dumps(found.document())
    said = render(report.summary(found), color=False)
    assert "passed: llama on 2 GPUs (h100-sxm-80gb)" in said
    assert "layout: tp 8 -> data parallel over 2 cards" in said
    assert "10,000 tokens/s in the median against 12,500 tokens/s planned (-20 %)" in " ".join(said.split())


@pytest.mark.parametrize(
    ("windows", "verdict", "words"),
    [
        ([window(9, {"xid": [79]}, {})], "failed", "Xid 79"),
        ([window(9, {"ecc_uncorrected": 2}, {})], "failed", "2 uncorrected memory errors"),
        ([window(9, {"finite": False}, {})], "failed", "loss is not finite in window 9"),
        ([window(n, tokens_per_s=9e3) for n in (9, 10, 11)], "look", "throughput fell by 10.0 %"),
        ([window(9, {"fragmentation": 0.3}, {})], "look", "rose from 10.0 % to 30.0 %"),
        ([window(n, {"temperature_c": 85}) for n in range(9, 26)], "look", "25 C apart"),
        ([window(9, {"throttled_by": ["hardware thermal slowdown"]}, {})], "look", "in 1 of 9 windows"),
        ([window(9, {"throttled_by": ["power cap"]}, {})], "passed", ""),  # how a GPU runs flat out
        ([window(n, slow_ranks=[1]) for n in range(9, 13)], "look", "rank 1 lagged in 4 of 12 windows"),
    ],
)
def test_what_a_soak_shows(windows: list[Document], verdict: str, words: str) -> None:
    if words == "25 C apart":
        windows = [{**one, "ranks": [*one["ranks"], {**WINDOWS[0]["ranks"][1]}]} for one in windows]
    found = summary([head(), *BOTH, *WINDOWS, *windows], soak_s=7200)
    assert found.verdict == verdict
    assert words in "; ".join(item.text for item in found.findings)


def test_what_the_plan_missed_and_what_is_missing_is_said() -> None:
    high = summary([head(), stage("alone", peak_allocated_bytes=70e9)], soak_s=3600)
    assert "17 % above the plan, which expects to be off by 5 %" in high.findings[0].text
    assert high.missing == ("together", "soak: nothing of 60.0 min")
    assert high.verdict == "incomplete"
    cards = {"kind": "cards", "stage": "alone", "ranks": [
        {"rank": rank, "finite": True, "step_s": 0.6 if rank == 3 else 0.5} for rank in range(4)
    ]}  # fmt: skip
    slow = summary([head(), *BOTH, cards], soak_s=0)
    assert [item.text for item in slow.findings] == ["rank 3 takes 20 % longer than the median card"]
    lost = summary([head(), *BOTH, {"kind": "failure", "why": "rank 1 is gone"}], soak_s=0)
    assert lost.verdict == "failed"


# -- going on -------------------------------------------------------------------------------------


def run(tmp_path: Path, points: list[Document], *, failure: str | None = None, soak: str = "2h") -> Any:
    """One start of a test whose ranks say these points; gives what they were asked for too."""
    wanted: list[Any] = []
    first = head(settings={"alone": {}, "together": {}})

    def start(config: Config, added: Any, _: Any) -> Outcome:
        wanted.append(config.stages)
        for point in points:
            added(point)
        return Outcome(tuple(points), failure)

    config = Config("cuda", ("stages",), False, 2, "", 30.0, "")
    tried = stages.run(
        asked("llama", soak, None, None), first, tmp_path / "r.jsonl", start, config,
        told=lambda _: None, writes=True,
    )  # fmt: skip
    return tried, wanted


def test_a_test_goes_on_where_it_ended(tmp_path: Path) -> None:
    software = {"kind": "software", "torch": "2"}
    cut_short, wanted = run(tmp_path, [software, BOTH[0]], failure="rank 1 was killed")
    assert cut_short.summary.verdict == "failed"
    assert wanted[0]["done"] == {}
    cut_short, wanted = run(tmp_path, [software, BOTH[1], *WINDOWS[:4]])
    assert set(wanted[0]["done"]) == {"alone"}
    assert (wanted[0]["done_s"], wanted[0]["windows"]) == (0.0, 0)
    assert (cut_short.summary.verdict, cut_short.failure) == ("incomplete", None)
    whole, wanted = run(tmp_path, [software, *WINDOWS[4:]])
    assert set(wanted[0]["done"]) == {"alone", "together"}
    assert (wanted[0]["done_s"], wanted[0]["windows"]) == (3600.0, 4)
    assert whole.summary.verdict == "passed"  # an earlier start's failure is not held against it
    assert whole.summary.soak.windows == 8
    again, wanted = run(tmp_path, [])
    assert wanted == []  # nothing is left to be done
    assert again.summary.verdict == "passed"


def test_a_record_of_another_test_is_refused(tmp_path: Path) -> None:
    run(tmp_path, [])
    other = head(settings={"alone": {}, "together": {}}, ranks=4)
    with pytest.raises(InputError, match="another test: ranks 2, here 4"):
        stages.opened(tmp_path / "r.jsonl", other)


# -- who lags, what breaks ------------------------------------------------------------------------


def test_the_rank_that_waits_least_holds_the_others_up() -> None:
    assert latest([0.5, 0.01, 0.52]) == (1, pytest.approx(0.49))
    assert slowest([1.0, 1.1, 3.3, 1.0]) == (2, pytest.approx(3.3))
    assert slowest([1.0, 1.2]) == (1, pytest.approx(1.2))
    assert slowest([0.01, 0.05], least_s=0.3) == (1, 1.0)
    streak = Streak()
    assert [streak.add(2, 1.0, LATE_S) for _ in range(RUNNING)] == [False] * (RUNNING - 1) + [True]
    streak = Streak()
    assert not any(streak.add(rank % 2, HOPELESS + 1, HOPELESS) for rank in range(20))  # never one alone


@pytest.mark.parametrize("text", ["kill-rank", "slow-rank=0"])
def test_faults_are_read(text: str) -> None:
    fault = Fault.parse(text, 4)
    assert fault.rank == (0 if "=" in text else 3)
    said: list[str] = []
    fault.into(said.append, 1)("all_reduce")  # another rank's words go through
    assert said == ["all_reduce"]


@pytest.mark.parametrize(("text", "words"), [("kill", "unknown fault"), ("kill-rank=4", "names no rank")])
def test_faults_that_are_none(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Fault.parse(text, 4)
    with pytest.raises(InputError, match="needs two ranks"):
        Fault.parse("kill-rank", 1)
    with pytest.raises(InputError, match="needs ranks that meet"):
        Options(tasks=("matmul",), inject="kill-rank")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--stages", "llama-3-8b", "--comm"], "stands alone"),
        (["--stages", "llama-3-8b", "--soak", "often"], "is not a duration"),
        (["--soak", "1h"], "says something of a job"),
        (["--inventory", "--gpus", "8xH100"], "says something of a job"),
        (["--stages", "llama-3-8b", "--calibration", "none.yaml"], "none.yaml"),
        (["--inject", "kill-rank", "--matmul"], "needs ranks that meet"),
        (["--stages", "no-such-job", "--soak", "0"], "no-such-job"),
    ],
)
def test_flags_that_try_nothing(words: list[str], problem: str, capsys: Any) -> None:
    assert main(["probe", "--device", "cpu", *words]) in (2, 4)
    said = capsys.readouterr().err
    assert problem in said or "torch is missing" in said
    assert said.count("\n") == 1


# -- cards of a driver ----------------------------------------------------------------------------


def test_a_calibration_sharpens_what_is_predicted(tmp_path: Path) -> None:
    machine = MeasuredMachine(
        device="cuda", name="H100", gpu="h100-sxm-80gb", gpus=2, torch="2.13.0", backend="nccl"
    )
    slow = [
        {"kind": "comm", "op": "all_reduce", "ranks": 2, "bytes": 2**size, "doubts": [],
         "seconds": 1e-5 + 2**size / 50e9}
        for size in range(10, 30)
    ]  # fmt: skip
    path = tmp_path / "calibration.yaml"
    path.write_text(overlay.calibration(slow, machine, date="2026-11-30").yaml())
    told = []
    for known in (open_catalog(), CalibratedCatalog(roots(), path)):
        cards = inventory(FakeNvml([H100, H100]), known, {}, Path("/nowhere"))
        wanted = asked("models/llama-3.2-1b", "1h", None, ["run.framework=ddp"])
        found = stages.prepared(wanted, known, cards, ranks=2, nodes=1)
        assert found.together is not None
        told.append(found.together.predicted())
    assert told[1]["sync_s"] > 2 * told[0]["sync_s"]
    assert told[1]["peak_allocated_bytes"] == told[0]["peak_allocated_bytes"]


def test_stages_are_planned_for_the_cards_at_hand() -> None:
    known = open_catalog()
    cards = inventory(FakeNvml([H100, H100]), known, {}, Path("/nowhere"))
    found = stages.prepared(asked("models/llama-3-8b", "1h", None, None), known, cards, ranks=2, nodes=1)
    assert found.fleet == "2xh100-sxm-80gb"
    assert found.alone.predicted()["step_s"] > 0
    mixed = inventory(FakeNvml([H100, RTX4090]), known, {}, Path("/nowhere"))
    small = stages.prepared(asked("models/gpt2", "1h", None, None), known, mixed, ranks=2, nodes=1)
    assert small.alone.plan.verdict.capacity.value < 26e9  # the card that holds least sizes it
    unknown = inventory(FakeNvml([{**H100, "Name": "GRID A100D-80C"}]), known, {}, Path("/nowhere"))
    parted = inventory(FakeNvml([{**H100, "MigMode": [1, 1]}]), known, {}, Path("/nowhere"))
    for cards, words in ((unknown, "GPU 0: .*--catalog"), (parted, "GPU 0: MIG is on")):
        with pytest.raises(CannotMeasure, match=words):
            stages.prepared(asked("models/gpt2", "1h", None, None), known, cards, ranks=1, nodes=1)


def test_a_card_is_watched_field_by_field() -> None:
    fake = FakeNvml([{**H100, "xid": [79, 48], "RemappedRows": (1, 2, 0, 0), "PowerUsage": "NotSupported"}])
    watch = Watch(fake, fake.nvmlDeviceGetHandleByIndex(0))
    found = watch.health()
    assert (found["xid"], found["remapped_rows"], found["ecc_uncorrected"]) == ([79, 48], 3, 0)
    assert found["throttled_by"] == []
    assert "power_w" not in found
    assert watch.not_read == {"power_w": "not supported by this card or driver"}
    assert watch.health()["xid"] == []  # told once
    deaf = FakeNvml([{**H100, "xid": "NotSupported"}])
    silent = Watch(deaf, deaf.nvmlDeviceGetHandleByIndex(0))
    assert "xid" not in silent.health()
    assert silent.not_read["xid"] == "not supported by this card or driver"
