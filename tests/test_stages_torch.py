"""Stages trained for real on CPU processes: what is built is what is planned, faults are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import ENVIRONMENT, LONG_S, STANDALONE, free_port

from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.counts import count
from gpucalc.errors import UnsupportedModel
from gpucalc.probe.device import Device
from gpucalc.probe.journal import read
from gpucalc.probe.modules import BUILT, Make, cut, decoder, keep, language_model, refuse_unbuilt
from gpucalc.probe.training import Peak, Trainer
from gpucalc.probe.trials import narrowed
from gpucalc.spec.calibration import read_calibration

torch = pytest.importorskip("torch")
KNOWN = open_catalog()
# One of each way to build a decoder: grouped heads, fused projections, latent attention, windows, soft
# caps, sinks, norms before and after, parallel parts, learned positions, gates, experts.
BUILDABLE = (
    "llama-3-8b", "qwen2.5-7b", "qwen3-8b", "phi-3-mini-4k", "gpt2", "opt-1.3b", "gpt-neox-20b", "gemma-2-9b",
    "olmo-2-7b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "llama-4-scout", "falcon-7b",
)  # fmt: skip


def spec_of(name: str) -> Any:
    return KNOWN.model(name)


@pytest.mark.parametrize("name", [name for name in BUILDABLE if name in KNOWN.names("models")])
def test_what_is_built_has_the_planned_parameters_and_learns(name: str) -> None:
    whole = build_graph(spec_of(name))
    refuse_unbuilt(whole)
    small = build_graph(narrowed(spec_of(name))[0])
    for graph, number in ((cut(whole, keep(whole, 2)), 0), (cut(small, keep(small, 4)), 1)):
        make = Make(torch, "cpu" if number else "meta", torch.float32)
        model = language_model(make, graph)
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held == count(graph).total.value
    tokens = torch.randint(0, 1024, (2, 64))
    logits = model(tokens)
    assert logits.shape == (2, 64, small.head.vocab)  # type: ignore[union-attr]
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert torch.isfinite(parameter.grad).all(), label


def test_every_model_of_the_catalogue_is_built_whole_or_refused_by_name() -> None:
    built = 0
    for name in KNOWN.names("models"):
        try:
            graph = build_graph(spec_of(name))
            stack = decoder(graph)
        except UnsupportedModel:
            continue
        kinds = len(set(stack.layers))
        with suppress(UnsupportedModel):  # anything else is a fault
            language_model(Make(torch, "meta", torch.float32), cut(graph, keep(graph, kinds)))
            built += 1
    assert built > 100, BUILT


def test_a_query_sees_itself_and_what_came_before_within_its_window() -> None:
    graph = build_graph(narrowed(spec_of("gemma-2-9b"))[0])
    graph = cut(graph, keep(graph, 2))
    model = language_model(Make(torch, "cpu", torch.float32), graph)
    tokens = torch.randint(0, 1024, (1, 16))
    other = tokens.clone()
    other[0, 12] = (other[0, 12] + 1) % 1024
    with torch.no_grad():
        first, second = model(tokens), model(other)
    assert torch.equal(first[0, :12], second[0, :12])  # nothing looks ahead
    assert not torch.equal(first[0, 12:], second[0, 12:])


def trainer(**more: Any) -> Trainer:
    spec = narrowed(spec_of("llama-3-8b"))[0]
    given = {
        "model": spec.model_dump(mode="json", exclude_none=True), "layers": [0, 1, 2, 3], "micro_batch": 1,
        "micro_batches": 1, "strategy": "none", "precision": "bf16", "optimizer": "adamw", "recompute": False,
        "eager_attention": False, "seq_len": 128, "reshard": True, "reduce_bytes": 4, **more,
    }  # fmt: skip
    return Trainer(Device("cpu"), given, lambda: None)


def test_the_loss_of_one_batch_falls() -> None:
    made = trainer()
    losses = [made.step() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_tensors_are_counted_while_they_live() -> None:
    device = Device("cpu")
    with Peak(device) as most:
        kept = torch.zeros(1000)  # 4,000 bytes
        torch.zeros(2000)  # gone at once
        view = kept[:10]
        assert (most.now, most.allocated) == (4000, 12000)
        most.restart()
        assert most.allocated == 4000
        del kept
        assert most.now == 4000  # a view keeps what it looks at
        del view
        emptied = torch.zeros(3000)
        emptied.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
        most.restart()
        assert most.allocated == 0
        torch.zeros(4000)
        assert most.allocated == 16000
    assert most.held.keys() == {emptied.untyped_storage()._cdata}


@pytest.mark.parametrize("more", [{}, {"recompute": True}, {"precision": "fp32"}, {"optimizer": "sgd"}])
def test_a_step_alone_takes_the_planned_bytes(more: dict[str, Any]) -> None:
    from gpucalc.plan.evaluate import Subject, Terms, evaluate
    from gpucalc.probe.trials import Trial
    from gpucalc.spec.defaults import with_defaults
    from gpucalc.spec.train_run import TrainRun

    made_with = {"precision": "bf16", "optimizer": "adamw", "recompute": False, **more}
    run = TrainRun.read(
        {"framework": "ddp", "seq_len": 128, "micro_batch": 1, "grad_accum": 1, "zero_stage": 0,
         "precision": made_with["precision"], "optimizer": made_with["optimizer"],
         "recompute": "full" if made_with["recompute"] else "none"}
    )  # fmt: skip
    spec = narrowed(spec_of("llama-3-8b"))[0]
    graph = cut(build_graph(spec), (0, 1, 2, 3))
    one = KNOWN.cluster([(None, 1, "h100-sxm-80gb")])
    plan = evaluate(Subject(spec, graph, count(graph)), with_defaults(run)[0], one, Terms("", ""))
    planned = Trial("alone", spec, (0, 1, 2, 3), 32, 1, 1, "none", plan, True).predicted()
    device = Device("cpu")
    with Peak(device) as most:
        made = trainer(**made_with)
        most.restart()
        for _ in range(2):
            made.step()
    assert most.allocated == pytest.approx(planned["peak_allocated_bytes"], rel=0.05)


# -- the command ----------------------------------------------------------------------------------


def probe(*words: str, ranks: int = 2) -> tuple[int, str, str]:
    """The command on so many CPU processes: exit code, and what it said."""
    line = [sys.executable, "-m", "gpucalc", "probe", "--device", "cpu", "--quick", "--ranks", str(ranks)]
    done = subprocess.run([*line, *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=LONG_S)
    return done.returncode, done.stdout, done.stderr


def workers() -> list[str]:
    """Measuring processes of this user that are still there, dead ones aside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            above = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"gpucalc.probe.worker" in words and f"GPUCALC_TEST={os.getpid()}".encode() in above:
            found.append(words.replace(b"\0", b" ").decode())
    return found


ENVIRONMENT["GPUCALC_TEST"] = str(os.getpid())
JOB = ("--stages", "models/gpt2", "--gpus", "2xH100-SXM")


def test_three_stages_on_two_processes(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    code, out, err = probe(*JOB, "--set", "run.framework=ddp", "--soak", "2s", "-o", str(record), "--json")
    assert code == 0, err
    found = json.loads(out)["stages"]
    assert found["verdict"] == "passed", found["findings"]
    rows = {part["stage"]: {row["name"]: row for row in part["rows"]} for part in found["stages"]}
    for stage in ("alone", "together"):
        assert abs(rows[stage]["peak memory, tensors"]["deviation"]) < 0.05
        assert rows[stage]["step"]["predicted"] is None  # nobody plans a CPU
    assert rows["together"]["gradient exchange"]["measured"] > 0
    assert found["soak"]["windows"] >= 2
    assert found["soak"]["process_growth_bytes"] is not None
    lines, _ = read(record)
    assert [line["kind"] for line in lines[:3]] == ["stages", "software", "stage"]
    assert lines[-1]["kind"] == "summary"
    losses = [one["loss"] for line in lines if line["kind"] == "window" for one in line["ranks"]]
    assert len(set(losses)) > 1
    # The same command goes on: the stages are not repeated, only the soak is.
    code, out, err = probe(*JOB, "--set", "run.framework=ddp", "--soak", "3s", "-o", str(record), "--json")
    assert code == 0, err
    assert json.loads(out)["stages"]["soak"]["hours"] >= 3 / 3600
    more, _ = read(record)
    assert more[: len(lines)] == lines
    assert [line["kind"] for line in more].count("stage") == 2
    assert workers() == []


@pytest.mark.parametrize(
    ("fault", "ranks", "words"),
    [("kill-rank", 2, "rank 1 was killed (SIGKILL) during all_reduce"),
     ("kill-rank=2", 4, "rank 2 was killed (SIGKILL) during all_reduce"),
     ("slow-rank", 2, "rank 1 is slow: 0."),
     ("slow-rank=0", 4, "rank 0 is slow: 0.")],
)  # fmt: skip
def test_a_fault_among_collectives_is_named(fault: str, ranks: int, words: str, tmp_path: Path) -> None:
    file = tmp_path / "partial.yaml"
    code, _, err = probe("--comm", "--inject", fault, "-o", str(file), ranks=ranks)
    assert code == 4
    assert words in err.splitlines()[-1]
    found = read_calibration(file)
    assert words in str(found.incomplete)
    assert found.points  # what came before is kept
    assert workers() == []


@pytest.mark.parametrize("fault", ["kill-rank", "slow-rank"])
def test_a_fault_in_a_soak_is_named(fault: str, tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    code, out, err = probe(*JOB, "--soak", "10min", "--timeout", "10", "--inject", fault, "-o", str(record))
    assert code == 4
    assert "failed: gpt2 on 2 processes of a CPU" in out
    words = "rank 1 was killed (SIGKILL) during soak" if fault == "kill-rank" else "rank 1 is slow"
    assert words in err.splitlines()[-1]
    kinds = [line["kind"] for line in read(record)[0]]
    assert kinds.count("stage") == 2
    assert kinds[-2:] == ["failure", "summary"]
    assert workers() == []


@pytest.mark.parametrize("fault", ["kill-rank", "slow-rank"])
def test_a_fault_under_torchrun_is_named_and_what_was_measured_kept(fault: str, tmp_path: Path) -> None:
    file = tmp_path / "partial.yaml"
    asked = ["--quick", "--comm", "--inject", fault, "--timeout", "15", "-o", str(file)]
    done = subprocess.run(
        [sys.executable, *STANDALONE, "-m", "gpucalc", "probe", "--device", "cpu", *asked],
        capture_output=True, text=True, env=ENVIRONMENT, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode != 0
    said = next(line for line in done.stderr.splitlines() if line.startswith("gpucalc: rank 1"))
    assert ("rank 1 of 2 is gone" if fault == "kill-rank" else "rank 1 is slow") in said
    found = read_calibration(file)
    assert "rank 1" in str(found.incomplete)
    assert found.points


def test_stages_start_under_srun_on_every_rank(tmp_path: Path) -> None:
    record = tmp_path / "r.jsonl"
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "127.0.0.1"}
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = [sys.executable, "-m", "gpucalc", "probe", "--device", "cpu", "--quick", *JOB, "--soak", "1s"]
    ranks = [
        subprocess.Popen(
            [*line, "-o", str(record)],
            env={**ENVIRONMENT, **step, **port, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=LONG_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "gpt2 on 2 processes of a CPU" in said[0][0]
    assert said[1] == ("", "")  # the first rank speaks for all
    kinds = [line["kind"] for line in read(record)[0]]
    assert kinds.count("stage") == 2
    assert kinds[-1] == "summary"
