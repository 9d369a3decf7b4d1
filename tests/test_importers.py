"""Other programs' files: what each says comes through, what is open is asked for, the rest is listed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exports import CASES, MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError, UnknownName
from gpucalc.importers.formats import FORMATS, format_of, read_data, read_line, read_toml
from gpucalc.importers.load import load
from gpucalc.importers.shell import commands, parse_flags
from gpucalc.importers.words import ImportedJob
from gpucalc.jobs import resolve, resolve_data
from gpucalc.line import Line
from gpucalc.plan.answer import Plan
from gpucalc.planner import plan_job

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])


# -- every format there and back ------------------------------------------------------------------


def figures(plan: Plan) -> tuple[Any, ...]:
    """The headline numbers of a plan, and its verdict."""
    lines = (plan.memory, plan.time, plan.throughput)
    return (plan.verdict.level, *(line.value for line in lines if isinstance(line, Line)))


@pytest.mark.parametrize("name", CASES)
def test_a_job_planned_from_its_export_is_planned_the_same(name: str, tmp_path: Path) -> None:
    file, export, strategy, both = CASES[name]
    model = both.get("model", MODEL)
    sets = {key: value for key, value in both.items() if key != "model"}

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(strategy)
    def check(run: dict[str, Any]) -> None:
        (tmp_path / file).write_text(export(run))
        ours = {"model": model, "gpus": "4xA100-SXM-80GB", "run": {"task": "train", **run, **sets}}
        wanted = resolve_data(ours, CATALOG, where="ours")
        named = isinstance(model, str) and name in ("deepspeed", "accelerate", "llama-server")
        found = resolve(
            tmp_path / file, CATALOG, gpus="4xA100-SXM-80GB", model=MODEL if named else None,
            sets=[f"run.{key}={value}" for key, value in sets.items()],
        )  # fmt: skip
        assert found.model == wanted.model or name == "megatron"
        stated = {**run, **sets}
        got = found.run.model_dump(mode="json")
        for key, value in stated.items():
            assert got[key] == value or (key == "lora" and got[key].items() >= value.items()), key
        first, second = (plan_job(job, CATALOG, advice=False) for job in (wanted, found))
        assert figures(first) == figures(second)

    check()


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_known_by_its_content_and_printed_as_ours(name: str, tmp_path: Path) -> None:
    file, export, strategy, _ = CASES[name]
    run = _first(strategy)
    (tmp_path / file).write_text(export(run))
    loaded = load(str(tmp_path / file))
    assert (loaded.kind, loaded.format) == ("job", name.removesuffix("-yaml"))
    printed = tmp_path / "job.yaml"
    printed.write_text(loaded.yaml())
    model = None if "model" in loaded.data and name != "llama-server" else MODEL
    again = resolve(printed, CATALOG, gpus="4xA100-SXM-80GB", model=model)
    direct = resolve(tmp_path / file, CATALOG, gpus="4xA100-SXM-80GB", model=model)
    length = ("max_model_len",) if direct.run.task == "serve" else ()
    assert again.run.model_dump(exclude=set(length)) == direct.run.model_dump(exclude=set(length))


def _first(strategy: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    @settings(max_examples=1, derandomize=True, database=None)
    @given(strategy)
    def take(run: dict[str, Any]) -> None:
        found.append(run)

    take()
    return found[0]


# -- "auto", unknown flags, missing and contradictory keys -----------------------------------------


def deepspeed(**keys: Any) -> ImportedJob:
    return read_data({"zero_optimization": {"stage": 2}, **keys}, "ds.json")


def test_auto_stays_open_and_is_asked_for(tmp_path: Path) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    job = deepspeed(**dict.fromkeys(keys, "auto"), bf16={"enabled": "auto"})
    assert job.data["run"] == {"task": "train", "framework": "deepspeed", "zero_stage": 2, "offload": "none"}
    assert [text.split(" ")[0] for text in job.asked] == [*keys, "bf16.enabled"]
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, keys[1]: "auto"}))
    found = resolve(tmp_path / "ds.json", CATALOG, gpus="8xA100", model=MODEL)
    assert any("run.micro_batch" in note for note in found.notes)
    said = resolve(tmp_path / "ds.json", CATALOG, gpus="8xA100", model=MODEL, sets=["run.micro_batch=2"])
    assert not any("run.micro_batch" in note for note in said.notes)


def test_unknown_flags_are_listed_as_ignored() -> None:
    assert deepspeed(warp=9, zero_hpz=1).ignored == ("warp", "zero_hpz")
    job = read_line("vllm serve m --warp-drive --tp-mode 3", "line")
    assert set(job.ignored) == {"warp_drive", "tp_mode"}


def test_a_file_without_model_or_gpus_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(InputError, match=r"ds\.json: model: is missing; legal: --model"):
        resolve(tmp_path / "ds.json", CATALOG, gpus="8xA100")
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: '8'\n")
    with pytest.raises(InputError, match="--gpus 8xNAME"):
        resolve(tmp_path / "acc.yaml", CATALOG, model=MODEL)
    with pytest.raises(InputError, match="JOB is a model already"):
        resolve(MODEL, CATALOG, gpus="8xA100", model=MODEL)


def test_a_count_of_gpus_that_differs_is_said(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    job = resolve(tmp_path / "acc.yaml", CATALOG, gpus="4xA100", model=MODEL)
    assert any("starts 8 processes; planned for 4 GPUs" in note for note in job.notes)


@pytest.mark.parametrize("word", ["no", "'no'", "false", "'off'"])
def test_no_is_a_word_and_not_a_boolean(word: str, tmp_path: Path) -> None:
    """accelerate's `mixed_precision: no` became false and crashed there."""
    (tmp_path / "a.yaml").write_text(
        f"distributed_type: FSDP\nmixed_precision: {word}\nfsdp_config:\n  fsdp_offload_params: no\n"
        "  fsdp_activation_checkpointing: on\n"
    )
    if word in ("'off'",):
        with pytest.raises(InputError, match="mixed_precision"):
            load(str(tmp_path / "a.yaml"))
        return
    run = load(str(tmp_path / "a.yaml")).data["run"]
    assert (run["precision"], run.get("offload", "none"), run["recompute"]) == ("fp32", "none", "full")


def test_hybrid_sharding_asks_for_the_size_of_a_copy() -> None:
    group = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    job = read_data({"distributed_type": "FSDP", "fsdp_config": group}, "a.yaml")
    assert "run.dp_shard" in job.asked[0]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"distributed_type": "TPU"}, "has no plan"),
        ({"distributed_type": "FSDP"}, "fsdp_config: missing"),
        ({"zero_optimization": {"stage": "two"}}, "whole number"),
        ({"zero_optimization": {}, "train_batch_size": 1.5}, "whole number"),
        ({"zero_optimization": {}, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both on"),
        ({"zero_optimization": {}, "optimizer": {"type": "Quantum"}}, "not known"),
        ({"zero_optimization": {}, "bf16": {"enabled": "maybe"}}, "neither true nor false"),
        ({"finetuning_type": "freeze"}, "has no plan"),
        ({"base_model": "m", "sequence_len": 8, "adapter": "galore"}, "has no plan"),
        ({"base_model": "m", "sequence_len": 8, "sequence_parallel_degree": 4}, "no plan"),
        ({"what": 1}, "no format"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_key(data: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_data(data, "file")


def test_options_of_several_trainers_that_hold_memory() -> None:
    base = {"base_model": "m", "sequence_len": 8, "micro_batch_size": 1, "bf16": True}
    run = read_data({**base, "gradient_checkpointing": "offload"}, "a.yaml").data["run"]
    assert (run["recompute"], run["offload"]) == ("full", "activations-cpu")
    run = read_data({**base, "attn_implementation": "kernels-community/vllm-flash-attn3"}, "a.yaml").data[
        "run"
    ]
    assert run["attention"] == "flash"
    axes = {
        "distributed_type": "FSDP",
        "fsdp_config": {},
        "parallelism_config": {"parallelism_config_tp_size": 4},
    }
    with pytest.raises(InputError, match="parallelism_config_tp_size"):
        read_data(axes, "a.yaml")
    line = 'A=(\n --x 1\n)\nB=( "${A[@]}" --y 2 )\nrun "${B[@]}"'
    assert parse_flags(commands(line, "s.sh")[0].words)[0] == {"x": "1", "y": "2"}


def test_python_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("import os")
    with pytest.raises(InputError, match="never run"):
        load(str(tmp_path / "config.py"))


def test_a_models_configuration_is_no_trainers_though_it_keeps_its_words() -> None:
    """Zamba2's says num_query_groups, as Megatron-LM does."""
    assert format_of({"model_type": "zamba2", "hidden_size": 2560, "num_query_groups": 32}) is None
    assert format_of({"hidden_size": 2560, "num_query_groups": 32}) == "megatron"


def test_unknown_formats_get_near_names() -> None:
    with pytest.raises(UnknownName, match="deepspeed"):
        read_data({}, "f", "deepsped")
    assert {"deepspeed", "accelerate", "transformers", "megatron", "torchtitan"} <= set(FORMATS)


def test_a_named_deepspeed_file_is_read_beside_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "z3.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}})
    )
    arguments = {"per_device_train_batch_size": 2, "bf16": True, "deepspeed": "configs/z3.json"}
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    run = load(str(tmp_path / "args.json")).data["run"]
    assert (run["framework"], run["zero_stage"], run["precision"], run["micro_batch"]) == (
        "deepspeed",
        3,
        "bf16",
        2,
    )
    (tmp_path / "z3.json").unlink()
    absent = load(str(tmp_path / "args.json"))
    assert absent.data["run"]["zero_stage"] == 3
    assert any("from its name" in text for text in absent.assumed)


# -- command lines --------------------------------------------------------------------------------


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = f"N=$(touch {mark})\ntouch {mark}\nvllm serve m --max-num-seqs `touch {mark}` --seed $UNSET\n"
    with pytest.raises(InputError):
        read_line(script, "s.sh")
    read_line(f"$(touch {mark})\nvllm serve m --port $(touch {mark})", "s.sh")
    assert not mark.exists()


def test_variables_arrays_and_continuations_are_filled_in() -> None:
    text = 'A=4\nexport B="--x 1"\nC=(--y ${A}\n  --z ${D:-7} # note\n)\nrun $B \\\n ${C[@]} --w $E\n'
    (command,) = commands(text, "s.sh")
    flags, loose = parse_flags(command.words)
    assert flags == {"x": "1", "y": "4", "z": "7", "w": None}
    assert loose == ["run"]


def test_a_node_count_left_to_a_variable_leaves_the_ranks_open() -> None:
    line = "torchrun --nproc_per_node 8 --nnodes {} t.py --per_device_train_batch_size 1 --bf16"
    assert read_line(line.format("2"), "l").ranks == 16
    assert read_line(line.format("$N"), "l").ranks is None


def test_data_parallel_attention_is_counted_inside_the_tensor_group() -> None:
    job = read_line("python -m sglang.launch_server --model m --tp 16 --dp 4 --enable-dp-attention", "l")
    assert (job.data["run"]["tp"], job.data["run"]["dp"], job.ranks) == (4, 4, 16)


def test_a_served_model_without_a_length_takes_its_longest() -> None:
    job = resolve("vllm serve meta-llama/Llama-3.2-1B", CATALOG, gpus="1xA100")
    assert job.run.model_dump()["max_model_len"] == job.model.max_context


def test_llama_server_divides_its_context_over_slots() -> None:
    job = read_line("llama-server -m a-Q4_K_M.gguf -c 32768 -np 4 -ngl 99", "l")
    run = job.data["run"]
    assert (run["max_model_len"], run["max_num_seqs"], run["quant"]) == (8192, 4, "q4_k_m")
    with pytest.raises(InputError, match="host"):
        read_line("llama-server -m a.gguf --n-cpu-moe 10", "l")


def test_megatron_patterns_are_read_and_not_evaluated() -> None:
    base = {"num_layers": 61, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8,
    "micro_batch_size": 1,
            "num_experts": 8, "tensor_model_parallel_size": 1, "vocab_size": 100,
            "max_position_embeddings": 8}  # fmt: skip
    job = read_data({**base, "moe_layer_freq": "([0]*3+[1]*58)"}, "m.yaml")
    assert job.data["model"]["moe"]["dense_layers"] == 3
    for bad in ("__import__('os')", "[0]*9999999", "([1]*3+[0]*58)"):
        with pytest.raises(InputError):
            read_data({**base, "moe_layer_freq": bad}, "m.yaml")


def test_megatron_without_a_vocabulary_asks_for_it() -> None:
    line = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
        " --max-position-embeddings 8 --micro-batch-size 1"
    )
    assert any("model.vocab" in text for text in read_line(line, "l").asked)
    with pytest.raises(InputError, match="seq_length: missing"):
        read_line(line.replace("--seq-length 8", ""), "l")


def test_old_torchtitan_is_read_and_broken_toml_refused() -> None:
    text = (
        '[model]\nname="llama3"\nflavor="8B"\n[training]\nbatch_size=1\ntensor_parallel_degree=2\n'
        "[experimental]\npipeline_parallel_degree=2"
    )
    job = read_toml(text, "t.toml")
    assert (job.data["run"]["tp"], job.data["run"]["pp"], job.data["run"]["seq_len"]) == (2, 2, 2048)
    with pytest.raises(InputError, match="not TOML"):
        read_toml("[", "t.toml")


@pytest.mark.parametrize("file", ["config.json", "ds_config.json"])
def test_a_foreign_file_is_planned_without_loading_what_is_slow(file: str, tmp_path: Path) -> None:
    shapes = {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shapes}))
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = ["plan", str(tmp_path / file), "--gpus", "2x8xH100-SXM", "--json"]
    words += ["--model", str(tmp_path / "config.json")] if file == "ds_config.json" else []
    code = (
        "import sys\nfrom gpucalc.__main__ import main\n"
        f"print(main({words!r}), *sys.modules, file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *loaded = out.stderr.split()
    assert status == "0"
    assert not {"numpy", "torch", "rich", "tomllib", "huggingface_hub"} & set(loaded)
    assert json.loads(out.stdout)["verdict"]


def test_deepspeeds_buffer_sizes_are_taken() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": True, "sub_group_size": 1e9}
    run = deepspeed(zero_optimization={**zero, "stage3_max_live_parameters": 1e8}).data["run"]
    assert run["reduce_bucket_size"] == "auto"
    assert (run["max_live_parameters"], run["sub_group_size"]) == (100_000_000, 1_000_000_000)
    second = deepspeed(zero_optimization={"stage": 2, "reduce_bucket_size": 2e8}).data["run"]
    assert second["reduce_bucket_size"] == 200_000_000
    assert "sub_group_size" not in second


@pytest.mark.parametrize(
    ("named", "keys"),
    [
        ("1F1B", {}),
        ("Interleaved1F1B", {"vpp": 2}),
        ("GPipe", {"schedule": "gpipe"}),
        ("DualPipeV", {"schedule": "dualpipe-v"}),
        ("ZBVZeroBubble", {"schedule": "zero-bubble"}),
    ],
)
def test_torchtitans_schedules(named: str, keys: dict[str, Any], tmp_path: Path) -> None:
    def run(schedule: str, pp: int = 4) -> dict[str, Any]:
        file = tmp_path / "titan.toml"
        file.write_text(
            f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = {pp}\n'
            f'pipeline_parallel_schedule = "{schedule}"\n'
        )
        return dict(load(file).data["run"])

    found = run(named)
    assert {key: found[key] for key in ("vpp", "schedule") if key in found} == keys
    assert "schedule" not in run(named, pp=1)
    with pytest.raises(InputError, match="has no plan"):
        run("LoopedBFS2")


def test_megatrons_types_of_moments_and_weights_are_taken() -> None:
    line = (
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
        " --micro-batch-size 1 --vocab-size 128 --position-embedding-type rope --bf16"
        " --fp8-format hybrid --fp8-param-gather"
        " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        " --recompute-granularity selective --recompute-modules moe_act layernorm"
    )
    run = read_line(line, "l").data["run"]
    assert (run["state_dtype"], run["fp8_params"]) == ("bf16", True)
    assert run["recompute_modules"] == ["moe_act", "layernorm"]
    with pytest.raises(InputError, match="one type here"):
        read_line(line.replace("--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype fp8"), "l")
    with pytest.raises(InputError, match="attn has no plan"):
        read_line(line.replace("moe_act layernorm", "attn"), "l")


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("", None),
        ("--cuda-graph-impl none --cuda-graph-scope attn", None),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router", ["attn", "moe_router"]),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn,mlp", ["attn", "mlp"]),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", ["full"]),
        ("--cuda-graph-impl full_iteration", ["full"]),
        ("--enable-cuda-graph", ["attn", "mlp"]),
        ("--enable-cuda-graph --num-experts 8", ["attn"]),
        ("--external-cuda-graph --cuda-graph-scope attn", ["attn"]),
        ("--enable-cuda-graph --num-experts 8 --moe-pad-expert-input-to-capacity", ["attn", "moe"]),
    ],
)
def test_megatrons_captured_graphs_are_taken(flags: str, graphs: list[str] | None) -> None:
    line = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
        f" --micro-batch-size 1 --vocab-size 128 --position-embedding-type rope --bf16 {flags}"
    )
    assert read_line(line, "l").data["run"].get("cuda_graphs") == graphs
    with pytest.raises(InputError, match="no way of capturing"):
        read_line(f"{line} --cuda-graph-impl inductor", "l")
    with pytest.raises(InputError, match="rope has no plan"):
        read_line(f"{line} --cuda-graph-impl local --cuda-graph-modules rope", "l")


def test_megatron_says_how_experts_and_tensors_overlap() -> None:
    line = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048"
        " --max-position-embeddings 2048 --micro-batch-size 1 --bf16 --vocab-size 32000 --num-experts 8"
        " --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4"
        " --moe-token-dispatcher-type flex --moe-expert-capacity-factor 1.25"
        " --moe-pad-expert-input-to-capacity --tp-comm-overlap --overlap-moe-expert-parallel-comm"
    )
    run = resolve(line, CATALOG, gpus="8xH100-SXM").run
    assert (run.moe_dispatcher, run.expert_imbalance) == ("deepep", 1.25)  # type: ignore[union-attr]
    assert (run.tp_overlap, run.ep_overlap) == (True, True)  # type: ignore[union-attr]
