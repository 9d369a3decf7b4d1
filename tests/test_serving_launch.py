"""The line that starts a planned deployment: flags its engine has in that release, and formats it reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from served import CATALOG, ENGINES, FLAG, served

from gpucalc.errors import InputError
from gpucalc.report import table
from gpucalc.report.screen import render
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.yamlio import load_yaml


@pytest.mark.parametrize("name", ENGINES)
def test_launch_lines_use_listed_flags_alone(name: str) -> None:
    spec = CATALOG.load("engines", name, EngineSpec)
    if not spec.launch:
        assert name == "hf"
        return
    plan = served("llama-3.1-8b", "2xh100-sxm-80gb", f"run.framework={name}")
    assert plan.launch
    launch = spec.launch_at(spec.default_version)
    assert launch is not None
    given = [word for word in plan.launch.split() if FLAG.match(word)]
    start = launch.command.format(model="M", file="M").split()
    assert set(given) <= {flag.flag for flag in launch.flags} | {word for word in start if FLAG.match(word)}
    assert plan.launch.startswith(start[0])


FLAGS = load_yaml(Path(__file__).parent / "data" / "launch_flags.yaml").data
RELEASES = [(engine, release) for engine, data in FLAGS.items() for release in data["lacks"]]


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_a_release_is_given_flags_it_has(engine: str, release: str) -> None:
    """As many settings as an engine takes at once, on eight GPUs in every layout it divides a model by."""
    sets = [f"run.framework={engine}", f"run.version={release}", "run.max_num_seqs=64"]
    if engine == "llamacpp":
        plans = [served("llama-3.1-8b", "2xrtx-4090", *sets, "run.quant=q8_0", "run.kv_dtype=q8_0")]
    else:
        sets += ["run.kv_dtype=fp8"]
        if engine != "trtllm":
            sets += ["run.quant=fp8", "run.enforce_eager=true"]
        else:
            sets += ["run.block_size=64"]
        layouts = ("run.tp=8", "run.tp=4 run.pp=2", "run.tp=2 run.dp=4", "run.tp=2 run.dp=4 run.ep=8")
        plans = [served("mixtral-8x7b", "8xh100-sxm-80gb", *sets, *one.split()) for one in layouts]
        if engine == "vllm":
            more = (*sets, "run.tp=8", "run.decode_context_parallel=8", "run.block_size=32")
            plans.append(served("deepseek-v3", "8xh200-sxm-141gb", *more))
    known, lacking = set(FLAGS[engine]["all"]), set(FLAGS[engine]["lacks"][release])
    used: set[str] = set()
    for plan in plans:
        assert plan.launch is not None
        used |= {word for word in plan.launch.split()[1:] if FLAG.match(word)} - {"-m"}
    assert used <= known - lacking
    left = known - lacking - used - {"-m", "--model", "--model-path", "-fa", "--enable-ep-moe"}
    assert not left, "every setting is given to a release that takes it"


def test_flags_newer_than_the_version_are_left_out_and_said() -> None:
    plan = served("mixtral-8x7b", "8xh100-sxm-80gb", "run.version=0.7.3", "run.tp=2", "run.dp=4", "run.ep=8")
    assert "vLLM 0.7.3 has no --data-parallel-size yet, which dp needs" in plan.notes
    old = served("llama-3.1-8b", "1xrtx-4090", "run.framework=llamacpp", "run.quant=q8_0",
                 "run.kv_dtype=q8_0", "run.version=b3400")  # fmt: skip
    new = served(
        "llama-3.1-8b", "1xrtx-4090", "run.framework=llamacpp", "run.quant=q8_0", "run.kv_dtype=q8_0"
    )
    assert " -fa" in (old.launch or "")
    assert " -fa" not in (new.launch or "")


def test_attention_ranks_are_a_part_of_the_tensor_group_of_two_engines() -> None:
    sets = ("run.tp=2", "run.dp=4", "run.ep=8", "run.kv_dtype=fp8")
    sglang = served("deepseek-v3", "8xh200-sxm-141gb", "run.framework=sglang", *sets)
    assert "--tp-size 8 --dp-size 4 --enable-dp-attention --ep-size 8" in (sglang.launch or "")
    trtllm = served("deepseek-v3", "8xh200-sxm-141gb", "run.framework=trtllm", *sets)
    assert "--tp_size 8 --ep_size 8" in (trtllm.launch or "")
    assert (trtllm.launch or "").startswith(
        "echo '{enable_attention_dp: true, kv_cache_config: {dtype: fp8}}'"
    )
    assert "--extra_llm_api_options options.yaml" in (trtllm.launch or "")
    both = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.framework=trtllm", "run.kv_dtype=fp8",
                  "run.block_size=64")  # fmt: skip
    assert "'{kv_cache_config: {dtype: fp8, tokens_per_block: 64}}'" in (both.launch or "")
    plain = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.framework=trtllm")
    assert (plain.launch or "").startswith("trtllm-serve")


def test_what_one_command_cannot_say_is_said() -> None:
    wide = served("deepseek-r1", "2x8xh100-sxm-80gb", "run.tp=8", "run.pp=2")
    assert any(note.startswith("a copy spans 2 nodes: start Ray on every node") for note in wide.notes)
    inside = served("deepseek-r1", "8xh200-sxm-141gb", "run.tp=8")
    assert not any("a copy spans" in note for note in inside.notes)
    split = served("llama-3.1-8b", "4xh100-sxm-80gb", "run.tp=1", "run.prefill_replicas=1")
    assert any("copies that compute prompts: 1, that decode: 3" in note for note in split.notes)
    sets = ("run.num_speculative_tokens=3", "run.acceptance_rate=0.7")
    drafted = served("llama-3.1-8b", "1xh100-sxm-80gb", *sets)
    assert any("its weights and cache are not counted" in note for note in drafted.notes)
    shown = render(table.plan(drafted), color=False)
    assert "tensor" not in shown
    assert re.search(r"products +\d", shown), "the pass that verifies is shown part by part"


def test_flags_newer_than_the_version_are_left_out() -> None:
    sets = ("run.tp=8", "run.decode_context_parallel=8")
    old = served("deepseek-r1", "8xh200-sxm-141gb", *sets, "run.version=0.9.0")
    new = served("deepseek-r1", "8xh200-sxm-141gb", *sets, "run.version=0.19.0")
    assert "--decode-context-parallel-size" not in (old.launch or "")
    assert "--decode-context-parallel-size 8" in (new.launch or "")


def test_mxfp4_holds_the_experts_of_a_model_that_has_them_and_every_matrix_of_another() -> None:
    dense = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.quant=mxfp4")
    # 8.03B less 2 x 0.525B of tables in 4.25 bits, those in 16; rotary tables beside them
    assert dense.memory.child("weights").value / 1e9 == pytest.approx(
        6.98 * 4.25 / 8 + 1.05 * 2 + 0.034, rel=0.01
    )
    published = served("gpt-oss-20b", "1xh100-sxm-80gb")
    stated = served("gpt-oss-20b", "1xh100-sxm-80gb", "run.quant=mxfp4")
    assert stated.memory.child("weights").value == published.memory.child("weights").value


@pytest.mark.parametrize(
    ("engine", "quant", "said"),
    [
        ("trtllm", "q4_k_m", "reads no GGUF files"),
        ("trtllm", "nf4", "reads no bitsandbytes checkpoints"),
        ("hf", "q4_k_m", "widens GGUF files as it loads them"),
    ],
)
def test_formats_an_engine_does_not_read_are_refused(engine: str, quant: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        served("llama-3.1-8b", "1xh100-sxm-80gb", f"run.framework={engine}", f"run.quant={quant}")


def test_a_quantised_checkpoint_has_to_be_named() -> None:
    awq = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.quant=awq")
    assert any("put a checkpoint in awq in its place" in note for note in awq.notes)
    fp8 = served("llama-3.1-8b", "1xh100-sxm-80gb", "run.quant=fp8")
    assert "--quantization fp8" in (fp8.launch or "")
    native = served("gpt-oss-20b", "1xh100-sxm-80gb")
    assert "--quantization" not in (native.launch or "")
