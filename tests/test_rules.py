"""Layouts that cannot run: every broken rule at once, with the nearest legal values, on one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from gpucalc.__main__ import main
from gpucalc.builders.build import build_graph
from gpucalc.errors import ExitCode, Infeasible
from gpucalc.graph import Graph
from gpucalc.plan.resolve import resolve_layout, settle
from gpucalc.plan.rules import Degrees, broken_rules, divisors
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

SHAPE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128_256}


def graph_of(**changes: Any) -> Graph:
    return build_graph(ModelSpec.read({"name": "model", "architecture": "llama", **SHAPE, **changes}))


LLAMA = graph_of()
EIGHT_EXPERTS = graph_of(architecture="mixtral", moe={"experts": 8, "top_k": 2, "expert_ffn": 14336})
LEGAL = Degrees(
    gpus=64,
    tp=4,
    pp=4,
    vpp=1,
    cp=1,
    ep=1,
    etp=1,
    dp=4,
    micro_batch=1,
    global_batch=64,
    seq_len=8192,
    sequence_parallel=False,
    even_pipeline=True,
)


def broken(graph: Graph = LLAMA, **changes: Any) -> tuple[str, ...]:
    return broken_rules(graph, replace(LEGAL, **changes))


def test_a_legal_layout_breaks_nothing() -> None:
    assert broken() == ()
    assert broken(sequence_parallel=True) == ()
    assert broken(EIGHT_EXPERTS, ep=8) == ()
    assert broken(vpp=4) == ()
    assert broken(tp=16, pp=1) == ()  # 16 is a multiple of 8 KV heads, which are then repeated


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"dp": 5, "global_batch": 65},
            "tp 4 x cp 1 x pp 4 x dp 5 = 80, but there are 64 GPUs (dp 4 would use all 64)",
        ),
        (
            {"gpus": 24, "dp": 2, "cp": 2},
            "tp 4 x cp 2 x pp 4 x dp 2 = 64, but there are 24 GPUs (tp x cp x pp must divide 24: 24 would)",
        ),
        (
            {"gpus": 48, "tp": 12},
            "tp 12 does not divide 32 attention heads (legal: 1, 2, 4, 8, 16, 32)",
        ),
        (
            {"gpus": 48, "tp": 12},
            "tp 12 does not divide the MLP width, 14336 (nearest: 8 or 14)",
        ),
        (
            {"pp": 8, "dp": 2, "vpp": 3},
            "32 layers are not divisible by pp 8 x vpp 3 = 24"
            " (nearest: vpp 2 or 4; run.pipeline_split: uneven allows it)",
        ),
        (
            {"gpus": 48, "pp": 3},
            "32 layers are not divisible by pp 3 x vpp 1 = 3"
            " (nearest: pp 2 or 4; run.pipeline_split: uneven allows it)",
        ),
        (
            {"gpus": 64, "tp": 1, "pp": 64, "dp": 1},
            "pp 64 x vpp 1 = 64 chunks, but there are 32 layers (nearest: pp 32)",
        ),
        (
            {"global_batch": 66},
            "global_batch 66 is not a multiple of dp 4 x micro_batch 1 = 4 (nearest: 64 or 68)",
        ),
        (
            {"global_batch": 3},
            "global_batch 3 is not a multiple of dp 4 x micro_batch 1 = 4 (nearest: 4)",
        ),
        (
            {"vpp": 2, "global_batch": 24},
            "interleaved schedule: 6 micro-batches are not a multiple of pp 4"
            " (nearest global_batch: 16 or 32)",
        ),
        ({"tp": 16, "pp": 1, "vpp": 2}, "vpp 2 needs pp > 1; use vpp 1"),
        (
            {"cp": 4, "dp": 1, "seq_len": 8190},
            "seq_len 8190 is not a multiple of 2 x cp 4 (nearest: 8184 or 8192)",
        ),
        (
            {"sequence_parallel": True, "seq_len": 8190},
            "sequence parallel: seq_len 8190 / cp 1 is not a multiple of tp 4"
            " (nearest seq_len: 8188 or 8192)",
        ),
        ({"ep": 2}, "ep 2: model has no experts; use ep 1"),
    ],
)
def test_one_broken_rule(changes: dict[str, Any], rule: str) -> None:
    assert rule in broken(**changes)


def test_key_value_heads_are_divided_or_repeated() -> None:
    graph = graph_of(heads=24, kv_heads=6, head_dim=128, ffn=12_288)
    assert not [rule for rule in broken(graph, gpus=48, tp=3) if "KV" in rule]
    assert not [rule for rule in broken(graph, gpus=192, tp=12) if "KV" in rule]
    assert ("tp 4 neither divides nor is a multiple of 6 KV heads (legal: 1, 2, 3, 6, 12, 24)") in broken(
        graph
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"ep": 3}, "ep 3 does not divide 8 experts (legal: 1, 2, 4, 8)"),
        ({"ep": 3}, "ep 3 x etp 1 = 3 does not divide the 16 GPUs of a pipeline stage (nearest: 2 or 4)"),
        (
            {"ep": 8, "etp": 4},
            "ep 8 x etp 4 = 32 does not divide the 16 GPUs of a pipeline stage (nearest: 16)",
        ),
        ({"etp": 3}, "etp 3 does not divide the width of an expert, 14336 (nearest: 2 or 4)"),
    ],
)
def test_experts(changes: dict[str, Any], rule: str) -> None:
    assert rule in broken(EIGHT_EXPERTS, **changes)


def test_a_network_known_by_its_totals_cannot_be_cut() -> None:
    network = build_graph(
        ModelSpec.read(
            {"name": "net", "architecture": "resnet", "kind": "cnn", "params_total": 25_557_032,
             "gflops_forward": 8.178, "saved_elements": 2.2e7, "image_size": 224}
        )
    )  # fmt: skip
    assert "tp 2: net is known by its totals and cannot be cut; use tp 1" in broken(
        network, gpus=8, tp=2, pp=1
    )


def test_an_uneven_split_allows_what_an_even_one_does_not() -> None:
    assert broken(gpus=48, pp=3, even_pipeline=False) == ()
    # The ends may hold the embedding and the head alone.
    assert broken(gpus=34, tp=1, pp=34, dp=1, even_pipeline=False) == ()
    assert broken(gpus=35, tp=1, pp=35, dp=1, even_pipeline=False) != ()


def test_each_rule_is_said_once() -> None:
    """Several kinds of layer break the same rule; the reader needs it once."""
    mixed = graph_of(architecture="gemma2", pattern="[S F]*16", window=4096, head_dim=128)
    rules = broken(mixed, gpus=48, tp=3)
    assert len(rules) == len(set(rules))
    assert sum("attention heads" in rule for rule in rules) == 1


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
    assert divisors(13) == [1, 13]


# --- as one error ------------------------------------------------------------------------------------------


def run_of(**changes: Any) -> TrainRun:
    stated = {"framework": "megatron", "seq_len": 8192, "micro_batch": 1, "global_batch": 64, **changes}
    return settle(TrainRun.read(stated))[0]


def test_one_error_carries_every_broken_rule() -> None:
    with pytest.raises(Infeasible) as caught:
        resolve_layout(run_of(tp=3, pp=5, dp=7, ep=2, global_batch=65), LLAMA, gpus=64)
    rules = caught.value.rules
    assert len(rules) == 7
    for word in ("GPUs", "attention heads", "MLP width", "experts", "layers", "global_batch", "sequence"):
        assert any(word in rule for rule in rules), word
    assert caught.value.exit_code is ExitCode.USAGE


def test_accumulation_and_global_batch_must_agree() -> None:
    with pytest.raises(Infeasible, match="grad_accum 4 x micro_batch 1 x dp 8 = 32, but global_batch is 64"):
        resolve_layout(run_of(dp=8, grad_accum=4), LLAMA, gpus=8)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dp_shard": 3}, "dp_shard 3 does not divide 16 data parallel ranks (legal: 1, 2, 4, 8, 16)"),
        (
            {"dp_shard": 4, "ep": 8},
            "ep 8 does not divide the 4 GPUs that dp_shard 4 lets share one copy (nearest dp_shard: 8)",
        ),
    ],
)
def test_copies_of_sharded_state_are_whole(changes: dict[str, Any], rule: str) -> None:
    run = run_of(**changes, dp=16)
    with pytest.raises(Infeasible) as caught:
        resolve_layout(run, EIGHT_EXPERTS, gpus=16)
    assert caught.value.rules == (rule,)


COMMANDS = {
    "tensor": ["llama-3-70b", "run.vpp=1", "run.tp=12"],
    "pipeline": ["llama-3-70b", "run.vpp=7"],
    "batch": ["llama-3-70b", "run.global_batch=129"],
    "world": ["llama-3-70b", "run.dp=3"],
    "experts": ["mixtral-8x7b", "run.ep=3"],
    "many": ["llama-3-70b", "run.vpp=7", "run.tp=3", "run.dp=5", "run.global_batch=129", "run.ep=2"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flags", [[], ["--json"], ["--strict"]], ids=["table", "json", "strict"])
def test_the_command_line_says_it_on_one_line(
    name: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job, *sets = COMMANDS[name]
    code = main(["plan", f"jobs/{job}", *(part for item in sets for part in ("--set", item)), *flags])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("gpucalc: this layout cannot run: ")
    assert err.count("\n") == 1
    assert "legal:" in err or "nearest" in err or "would" in err
    assert "Traceback" not in err


def test_the_process_exits_with_two_and_no_traceback() -> None:
    command = [sys.executable, "-m", "gpucalc", "plan", "jobs/llama-3-70b", "--set", "run.tp=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "tp 12 does not divide 64 attention heads (legal: 1, 2, 4, 8, 16, 32, 64)" in done.stderr
    assert done.stderr.count("\n") == 1
