"""Faults of other tools that came from reading inputs, restated: what we say to the same inputs.

Each case is a public report; its number is that of the case in the list the reports were collected in.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from field_cases import biggest, parts

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import GpucalcError, InputError, UnsupportedModel
from gpucalc.formulas.memory import (
    host_buffer_bytes,
    host_offload_bytes,
    optimizer_state_bytes,
    weight_bytes,
)
from gpucalc.formulas.params import padded_table_rows
from gpucalc.formulas.serving_memory import kv_token_bytes, padded_vocab
from gpucalc.graph import Attention
from gpucalc.importers.huggingface import from_config
from gpucalc.jobs import resolve, resolve_data
from gpucalc.oom import diagnose
from gpucalc.planner import plan_job
from gpucalc.spec.model import ModelSpec

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])
GIB = 2**30


def kv_bytes(spec: Any, tokens: int, element: int = 2) -> float:
    """Cache of one sequence: every attention layer of the trunk holds what it may look back at."""
    total = 0.0
    trunk = build_graph(spec).trunk
    for index, block in enumerate(trunk.blocks):
        mixer = block.mixer
        if not isinstance(mixer, Attention):
            continue
        latent = mixer.kv_lora is not None
        each = kv_token_bytes(
            layers=trunk.count(index),
            kv_heads=1 if latent else mixer.kv_heads,
            tp=1,
            key_width=(mixer.kv_lora or 0) + (mixer.rope_dim or 0) if latent else mixer.qk_dim,
            value_width=0 if latent else mixer.v_dim,
            element_bytes=element,
        )
        total += each * min(tokens, mixer.span or tokens)
    return total


def config(**keys: Any) -> dict[str, Any]:
    """A config.json with what every decoder needs and the case's own keys."""
    base = {
        "model_type": "llama",
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    return {**base, **keys}


DEEPSEEK = config(
    model_type="deepseek_v3", num_hidden_layers=61, hidden_size=7168, num_attention_heads=128,
    num_key_value_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    q_lora_rank=1536, vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    moe_intermediate_size=2048, first_k_dense_replace=3,
)  # fmt: skip


def test_001_and_002_a_latent_cache_is_latent_and_rope() -> None:
    spec = from_config(DEEPSEEK).spec
    assert kv_bytes(spec, 1) == 70_272
    assert kv_bytes(spec, 65_536) / GIB == pytest.approx(4.29, rel=0.01)


def test_003_the_stated_head_width_wins() -> None:
    spec = from_config(
        config(model_type="qwen3", hidden_size=2560, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128)
    ).spec  # fmt: skip
    assert kv_bytes(spec, 1) == 147_456


def test_004_heads_may_be_wider_than_the_hidden_size() -> None:
    graph = build_graph(from_config(
        config(model_type="gemma3_text", hidden_size=640, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=1, head_dim=256)
    ).spec)  # fmt: skip
    mixer = graph.trunk.blocks[0].mixer
    assert isinstance(mixer, Attention)
    shapes = {linear.name: (linear.outputs, linear.inputs) for linear in mixer.linears}
    assert (shapes["q"], shapes["o"]) == ((1024, 640), (640, 1024))


SEVEN_B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


@pytest.mark.parametrize(("heads", "wanted"), [(None, 524_288), (8, 131_072)])
def test_006_and_007_key_value_heads(heads: int | None, wanted: int) -> None:
    assert kv_bytes(from_config(config(**SEVEN_B, num_key_value_heads=heads)).spec, 1) == wanted


def test_008_a_gated_part_has_three_matrices() -> None:
    spec = from_config(config(**SEVEN_B, num_key_value_heads=32, hidden_act="silu")).spec
    assert count(build_graph(spec)).total.value == 6_738_415_616


def test_009_experts_are_counted_and_so_is_the_head() -> None:
    spec = from_config(
        config(**SEVEN_B, model_type="mixtral", num_key_value_heads=8, intermediate_size=14336,
               num_local_experts=8, num_experts_per_tok=2)
    ).spec  # fmt: skip
    counts = count(build_graph(spec))
    assert counts.total.value == 46_702_792_704
    assert counts.active.value / 1e9 == pytest.approx(12.88, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [("gemma-3-27b", 131_072, 10.41), ("qwen3-0.6b", 40_960, 4.38), ("qwen3.5-27b", 262_144, 16.0),
     ("deepseek-v3.1", 163_840, 10.72)],
)  # fmt: skip
def test_012_each_family_has_its_own_cache(name: str, tokens: int, gib: float) -> None:
    assert kv_bytes(CATALOG.model(name), tokens) / GIB == pytest.approx(gib, rel=0.01)


def test_016_old_names_are_read_and_nothing_becomes_zero() -> None:
    old = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    spec = from_config(old).spec
    assert kv_bytes(spec, 1024) / 2**20 == 36
    assert count(build_graph(spec)).total.value / 1e6 == pytest.approx(124.4, rel=0.01)
    with pytest.raises(InputError, match="n_layer"):
        from_config({key: value for key, value in old.items() if key != "n_layer"})


def test_019_a_model_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"config\.json cannot be read .*--hub") as caught:
        resolve("acme/gated-7b", CATALOG, gpus="1xA100")
    assert caught.value.exit_code == 2


def test_021_packed_bits_are_found_where_they_are() -> None:
    quantised = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
    }
    spec = from_config(
        {"model_type": "deepseek_v3", "text_config": {**DEEPSEEK, "quantization_config": quantised}}
    ).spec
    assert spec.quantization == "compressed-tensors 4-bit"
    assert count(build_graph(spec)).total.value == count(build_graph(from_config(DEEPSEEK).spec)).total.value


# -- illegal jobs ---------------------------------------------------------------------------------


def planned(gpus: str, model: Any, **run: Any) -> Any:
    job = {
        "model": model,
        "gpus": gpus,
        "run": {"task": "train", "framework": "megatron", "seq_len": 512, **run},
    }
    return plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)


def llama(**keys: Any) -> dict[str, Any]:
    return {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 32000, **keys}


@pytest.mark.parametrize(
    ("gpus", "model", "run", "words"),
    [
        ("8xA100", llama(layers=30), {"pp": 4}, ["30", "4"]),  # 025
        (
            "32xA100",
            llama(layers=46),
            {"pp": 4, "tp": 8, "micro_batch": 2, "global_batch": 16},
            ["46", "4"],
        ),  # 026
        (
            "8xA100",
            llama(heads=28, kv_heads=4, hidden=3584, ffn=18944, vocab=152064),
            {"tp": 8},
            ["28", "8"],
        ),  # 027
        ("7xA100", llama(), {"micro_batch": 2, "global_batch": 256}, ["256", "252", "266"]),  # 034
        ("8xA100", llama(), {"micro_batch": 1, "global_batch": 4, "grad_accum": 1}, ["4"]),  # 035
    ],
    ids=["025", "026", "027", "034", "035"],
)
def test_illegal_layouts_are_refused_with_their_numbers(
    gpus: str, model: dict[str, Any], run: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(GpucalcError) as caught:
        planned(gpus, model, **run)
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "8 "])
def test_036_a_batch_is_a_whole_number_above_zero(value: Any) -> None:
    with pytest.raises(InputError, match=r"run\.micro_batch"):
        planned("1xA100", llama(), micro_batch=value)


def test_039_bf16_on_a_v100_is_refused_or_said() -> None:
    try:
        plan = planned("8xV100-32GB", llama(), precision="bf16", micro_batch=1)
    except GpucalcError as error:
        said = str(error)
    else:
        said = " ".join((*plan.notes, *(f"{item.key} {item.value} {item.why}" for item in plan.assumptions)))
    assert "bf16" in said
    gpu, _ = CATALOG.gpu("V100-32GB")
    assert gpu.peak("bf16") is None
    fp16 = gpu.peak("fp16")
    assert fp16 is not None
    assert fp16.value == pytest.approx(125e12, rel=0.01)


def test_058_an_unknown_class_is_drawn_with_its_assumptions_or_refused() -> None:
    unknown = {
        "architectures": ["NewForCausalLM"],
        **SEVEN_B,
        "intermediate_size": 11008,
        "vocab_size": 50000,
    }
    imported = from_config(unknown)
    assert imported.spec.family == "llama"
    assert imported.spec.architecture is None
    assert any("approximate" in text and "NewForCausalLM" in text for text in imported.assumed)
    for key, value in (("num_experts", 8), ("kv_lora_rank", 512), ("ssm_state", 16), ("num_memory_heads", 4)):
        with pytest.raises(UnsupportedModel, match="NewForCausalLM"):
            from_config({**unknown, key: value})
    with pytest.raises(UnsupportedModel, match="gelu"):
        from_config({**unknown, "hidden_act": "gelu"})
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        with pytest.raises(InputError, match=key):
            from_config({name: value for name, value in unknown.items() if name != key})


def test_a_read_fault_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    command = [sys.executable, "-m", "gpucalc", "plan", str(tmp_path), "--gpus", "1xA100"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout, out.stderr.count("\n")) == (2, "", 1)
    assert "config.json: num_hidden_layers" in out.stderr.replace(", num_layers", "")


# -- what a fleet holds, case by case --------------------------------------------------------------


def test_023_terms_of_an_estimator_in_gib() -> None:
    """4N + 16N/8 and 2N are GiB; the host's 1.5 x 16 bytes a parameter are kept as terms of their own."""
    params, ranks = 2_851e6, 8
    whole = weight_bytes(params=params, parameter_bytes=2, shard=ranks, zero_stage=2)
    stage_2 = 2 * whole + optimizer_state_bytes(params=params, bytes_per_param=16, shard=ranks, zero_stage=2)
    assert stage_2 / GIB == pytest.approx(15.93, rel=0.005)
    assert whole / GIB == pytest.approx(5.31, rel=0.005)  # the states on the host
    held = host_offload_bytes(params=params, bytes_per_param=max(4 * ranks, 16))
    buffers = host_buffer_bytes(offloaded_bytes=held, buffer_fraction=0.5)
    assert (held + buffers) / GIB == pytest.approx(127.45, rel=0.005)


def test_024_weights_that_do_not_shrink_with_the_cards_are_whole() -> None:
    """13 GB on two cards and on four is one 16-bit copy and the context: stage 3 would have halved it."""
    model = llama(layers=28, hidden=4096, heads=32, ffn=11008, vocab=130_528, name="6b")

    def weights(cards: int, stage: int) -> float:
        offload = "params+optimizer-cpu" if stage == 3 else "optimizer+gradients-cpu"
        answer = planned(f"{cards}xA100", model, framework="deepspeed", zero_stage=stage, offload=offload,
                         micro_batch=1)  # fmt: skip
        return biggest(answer, "weights")

    copy = 2 * count(build_graph(ModelSpec.read(model))).total.value
    assert weights(2, 2) == weights(4, 2) == pytest.approx(copy, rel=0.02)
    assert weights(4, 3) < copy / 2
    assert copy / GIB + 1.5 == pytest.approx(13, abs=1.5)  # with the context: what was measured
    run = {"task": "train", "framework": "deepspeed", "zero_stage": 3, "offload": "params+optimizer-cpu",
           "micro_batch": 1, "seq_len": 128}  # fmt: skip
    for cards in (2, 4):
        job = resolve({"model": "gpt-j-6b", "gpus": f"{cards}xa100-sxm-40gb", "run": run}, CATALOG)
        said = "; ".join(diagnose("13 GB", job=job, catalog=CATALOG).reading)
        assert "that is about what weights that were not partitioned would take" in said
        assert "a whole 16-bit copy of the weights is 11.27 GiB" in said


def test_028_three_cards_get_a_layout_and_ways_out() -> None:
    job: dict[str, Any] = {
        "model": "llama-2-13b",
        "gpus": "3xRTX-3090",
        "run": {"task": "serve", "framework": "vllm"},
    }
    answer = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)
    assert (answer.layout.tp, answer.layout.pp) == (1, 3)
    assert answer.verdict.level.value == "fits"
    changes = " ".join(str(dict(action.changes)) for action in answer.actions)
    assert "2xrtx-3090" in changes
    assert "awq" in changes
    for degree, words in ((3, ["3", "40", "legal: 1, 2, 4"]), (2, ["3 GPUs", "tp 2"])):
        job["run"]["tp"] = degree
        with pytest.raises(GpucalcError) as caught:
            plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)
        assert caught.value.exit_code == 2
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_029_a_vocabulary_is_padded_and_heads_still_limit() -> None:
    assert padded_vocab(vocab=129_280, tp=24) == 130_560
    assert padded_vocab(vocab=151_552, tp=6) == 151_680
    glm = {
        "model": "glm-4.5-air",
        "gpus": "6xH100-SXM",
        "run": {"task": "serve", "framework": "vllm", "tp": 6},
    }
    with pytest.raises(
        GpucalcError, match=r"tp 6 neither divides nor is a multiple of 8 KV heads \(legal: 1, 2, 4, 8"
    ):
        plan_job(resolve_data(glm, CATALOG, where="job"), CATALOG, advice=False)


def test_030_a_padded_vocabulary_is_shown_beside_the_true_one() -> None:
    assert padded_table_rows(vocab=128_256, multiple=64, tp=8) == 128_512
    assert (128_512 - 128_256) * 4096 == 1_048_576
    model = llama(layers=8, hidden=4096, heads=32, ffn=11008, vocab=128_256)
    answer = planned("8xA100", model, tp=8, micro_batch=1, global_batch=1)
    said = next(note for note in answer.notes if "pads" in note)
    assert "128,256" in said
    assert "129,024" in said
    assert not any("pads" in note for note in planned("8xA100", model, tp=1, micro_batch=1).notes)


def test_055_what_does_not_fit_has_no_speed() -> None:
    job = {
        "model": "llama-3.1-405b",
        "gpus": "1xH100-SXM-80GB",
        "run": {"task": "serve", "framework": "vllm", "tp": 1, "pp": 1},
    }
    answer = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG)
    assert answer.verdict.level.value == "does_not_fit"
    assert answer.time is None
    assert answer.throughput is None
    assert max(line.value for line in parts(answer.memory, "weights")) / GIB == pytest.approx(
        755.96, rel=0.001
    )
    fleets = [str(action.changes["gpus"]) for action in answer.actions if "gpus" in action.changes]
    assert fleets
    assert all(int(fleet.split("x")[0]) >= 10 for fleet in fleets)  # 756 GiB need ten cards at the least
    out = subprocess.run(
        [sys.executable, "-m", "gpucalc", "plan", "llama-3.1-405b", "--gpus", "1xH100-SXM-80GB", "--task",
         "serve", "--set", "run.tp=1", "--strict"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 1
    assert "DOES NOT FIT" in out.stdout
    assert "tokens/s" not in out.stdout.split("What would help")[0]
