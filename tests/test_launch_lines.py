"""Launch lines as people paste them: prefixes, containers, shells in shells, and files they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpucalc.errors import InputError
from gpucalc.importers.formats import is_line
from gpucalc.importers.load import Loaded, load

SERVED = "Qwen/Qwen3-8B"

LINES: list[tuple[str, dict[str, Any]]] = [
    (f"vllm serve {SERVED} -tp=2 --max_model_len 8k --dtype=half --api-key 'a b'",
     {"framework": "vllm", "tp": 2, "max_model_len": 8000, "dtype": "half"}),
    (f"VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 python3 -m vllm.entrypoints.openai.api_server --model {SERVED}",
     {"framework": "vllm", "tp": 1}),
    (f"uv run vllm serve {SERVED} --tensor-parallel-size 2", {"framework": "vllm", "tp": 2}),
    (f"srun --gpus 8 --nodes=1 vllm serve {SERVED} --tensor-parallel-size 8", {"framework": "vllm", "tp": 8}),
    (f"bash -lc 'source env.sh && vllm serve {SERVED} --tensor-parallel-size 4'", {"tp": 4}),
    (f"kubectl run x -- vllm serve {SERVED}", {"framework": "vllm"}),
    ("docker run --runtime nvidia --gpus all -v ~/.cache:/root/.cache --env \"HF_TOKEN=<secret>\""
     f" -p 8000:8000 --ipc=host vllm/vllm-openai:latest --model {SERVED} --tensor-parallel-size 4"
     " --kv-cache-dtype fp8",
     {"framework": "vllm", "tp": 4, "kv_dtype": "fp8"}),
    (f"docker run --gpus all vllm/vllm-openai:v0.12.0 {SERVED} --max-model-len 4k", {"max_model_len": 4000}),
    ("docker run --gpus all --shm-size 32g -p 30000:30000 lmsysorg/sglang:latest python3 -m"
     f" sglang.launch_server --model-path {SERVED} --quantization fp8 --tp 2",
     {"framework": "sglang", "tp": 2, "quant": "fp8"}),
    (f"nohup python -m sglang.launch_server --model-path \"{SERVED}\" --tp-size=2 > log.txt 2>&1 &",
     {"framework": "sglang", "tp": 2}),
    ("./build/bin/llama-server -hf unsloth/Qwen3-8B-GGUF:Q4_K_M -c 32768 -ngl 99 -fa -ctk q8_0 -ctv q8_0"
     " -np 4",
     {"framework": "llamacpp", "quant": "q4_k_m", "max_model_len": 8192, "kv_dtype": "q8_0"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "wanted"), LINES, ids=[line[:40] for line, _ in LINES])
def test_a_serving_line_is_read_whatever_stands_before_it(line: str, wanted: dict[str, Any]) -> None:
    assert is_line(line)
    found = load(line)
    assert found.data["model"].startswith(SERVED) or "Qwen3-8B" in found.data["model"]
    assert found.data["run"] | wanted == found.data["run"]
    assert not any("docker" in word or word in ("gpus", "v", "p", "runtime") for word in found.ignored)


def test_a_script_with_its_own_names_and_lines_that_go_on(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(
        "#!/usr/bin/env bash\nset -euo pipefail\nexport HF_HOME=/data\nTP=${TP:-8}\nMODEL='org/name'\n"
        "ARGS=(\n  --max-model-len 16384  # tokens\n  --no-enable-prefix-caching\n)\n"
        'CUDA_VISIBLE_DEVICES=0,1 vllm serve "$MODEL" \\\n  --tensor-parallel-size "${TP}" \\\n'
        '  "${ARGS[@]}" --warp-drive 9 2>&1 | tee log\n'
    )
    found = load(str(tmp_path / "serve.sh"))
    assert found.data["model"] == "org/name"
    assert (found.data["run"]["tp"], found.data["run"]["max_model_len"]) == (8, 16384)
    assert found.ignored == ("warp_drive",)


# -- files that a command names --------------------------------------------------------------------


def files(folder: Path) -> None:
    (folder / "lf.yaml").write_text(
        "model_name_or_path: llama-3-8b\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\nbf16: true\n"
        "per_device_train_batch_size: 1\ndeepspeed: ds.json\n"
    )
    (folder / "axo.yml").write_text(
        "base_model: llama-3-8b\nsequence_len: 2048\nmicro_batch_size: 2\nbf16: true\n"
    )
    (folder / "tune.yaml").write_text(
        "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\ntokenizer:\n  path: x\n"
        "batch_size: 2\ndtype: bf16\n"
    )
    (folder / "titan.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        '[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "full"\n'
    )
    (folder / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}})
    )
    (folder / "acc.yaml").write_text(yaml.safe_dump({
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16,
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                        "fsdp_activation_checkpointing": True},
    }))  # fmt: skip
    (folder / "vllm.yaml").write_text(f"model: {SERVED}\ntensor-parallel-size: 2\nmax-model-len: 16k\n")


NAMED: list[tuple[str, str, dict[str, Any]]] = [
    ("llamafactory-cli train lf.yaml cutoff_len=4096", "llama-factory",
     {"seq_len": 4096, "framework": "deepspeed", "zero_stage": 2, "precision": "bf16"}),
    ("axolotl train axo.yml --micro-batch-size 4", "axolotl", {"micro_batch": 4, "seq_len": 2048}),
    ("accelerate launch -m axolotl.cli.train axo.yml", "axolotl", {"micro_batch": 2}),
    ("tune run --nproc_per_node 8 full_finetune_distributed --config tune.yaml batch_size=4"
     " tokenizer.max_seq_len=4096", "torchtune", {"micro_batch": 4, "seq_len": 4096}),
    ("torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file titan.toml --training.seq_len 4096"
     " --training.local-batch-size=2", "torchtitan", {"micro_batch": 2, "seq_len": 4096, "tp": 2}),
    ("accelerate launch --config_file acc.yaml train.py --model_name_or_path llama-3-8b"
     " --per_device_train_batch_size 2 --max_seq_length 4096", "transformers",
     {"framework": "fsdp", "zero_stage": 3, "recompute": "full", "precision": "bf16", "micro_batch": 2}),
    ("deepspeed --num_gpus=8 train.py --deepspeed ds.json --model_name_or_path llama-3-8b --bf16 True"
     " --per_device_train_batch_size 1 --max_seq_length 4096", "transformers",
     {"framework": "deepspeed", "zero_stage": 2, "precision": "bf16"}),
    ("vllm serve --config vllm.yaml --tensor-parallel-size 4", "vllm", {"tp": 4, "max_model_len": 16000}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "format", "wanted"), NAMED, ids=[line[:36] for line, _, _ in NAMED])
def test_a_file_that_a_command_names_is_read_and_the_command_wins(
    line: str, format: str, wanted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path)
    (tmp_path / "run.sh").write_text(line + "\n")
    beside = load(str(tmp_path / "run.sh"))
    monkeypatch.chdir(tmp_path)
    here = load(line)
    for found in (here, beside):
        assert found.format == format
        assert found.data["run"] | wanted == found.data["run"]
    assert here.data == beside.data


def processes(found: Loaded) -> str:
    return next(text for text in found.asked if "names no GPUs" in text)


def test_what_a_launcher_starts_is_asked_for_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "8xNAME: it starts 8 processes" in processes(load(NAMED[3][0]))
    assert "16xNAME" in processes(load(NAMED[5][0]))
    assert "it starts 1 process" in processes(load(f"vllm serve {SERVED}"))


@pytest.mark.parametrize(
    ("line", "words"),
    [("axolotl train missing.yml", "missing.yml"), ("llamafactory-cli train", "names no llama-factory file"),
     ("tune run full_finetune_distributed --config llama3_1/8B_full", "inside torchtune"),
     ("trtllm-serve org/name --tp_size 2", "trtllm-serve"), ("ollama run llama3 --verbose", "ollama"),
     ("make all --jobs 4", "no trainer or server")],
)  # fmt: skip
def test_what_cannot_be_read_is_said(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        load(line)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_here_stays_open() -> None:
    served = load("vllm serve --config nowhere.yaml --model org/name")
    assert any("nowhere.yaml is not here" in text for text in served.asked)
    trained = load("accelerate launch --config_file nowhere.yaml train.py --model_name_or_path llama-3-8b")
    assert any("nowhere.yaml is not here" in text for text in trained.asked)


def test_shells_in_shells_end() -> None:
    line = f"vllm serve {SERVED}"
    for _ in range(6):
        line = f"bash -c {json.dumps(line)}"
    with pytest.raises(InputError):
        load(line)
