"""From what a user types for JOB to a job whose every default is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpucalc.catalog import Catalog, shipped
from gpucalc.errors import InputError, UnknownName
from gpucalc.jobs import ResolvedJob, resolve, resolve_data
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun
from gpucalc.spec.yamlio import load_yaml

SHIPPED = sorted(path.stem for path in (shipped() / "jobs").glob("*.yaml"))
JOB = """\
model: llama-3-8b
gpus: 8xh100-sxm-80gb
run:
  task: train
  framework: fsdp
  precision: bf16
  seq_len: 8192
  micro_batch: 1
  global_batch: 128
"""


def defaults(job: ResolvedJob) -> dict[str, Any]:
    return {default.key: default.value for default in job.defaults}


def refused(argument: str | Path, catalog: Catalog, **flags: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolve(argument, catalog, **flags)
    message = str(caught.value)
    assert message.isprintable()
    assert caught.value.exit_code == 2
    return message


def test_there_are_shipped_jobs() -> None:
    assert {"llama-3-8b", "llama-3-70b", "gpt3-175b-full", "mixtral-8x7b", "bert-large"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_job_resolves(name: str, catalog: Catalog) -> None:
    job = resolve(name, catalog)
    assert job.name == name
    assert job.job == resolve(f"{name}.yaml", catalog).job
    assert Path(job.where).is_file()
    if name.startswith("serve-"):
        assert isinstance(job.run, ServeRun)
        assert job.run.max_model_len is not None
    else:
        assert isinstance(job.run, TrainRun)
        assert job.run.zero_stage is not None
        assert job.run.seq_len is not None
    text = Path(job.where).read_text()
    assert text.startswith("# "), "a shipped job says what it is"
    assert ("measured:" in text) == ("source:" in text), "a published figure has a source"


def test_a_job_file_is_read_from_its_path(tmp_path: Path, catalog: Catalog) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(JOB)
    job = resolve(path, catalog)
    assert (job.name, job.where, job.fleet.count) == ("mine", str(path), 8)
    assert job.model.layers == 32
    assert defaults(job)["run.zero_stage"] == 3
    assert "run.precision" not in defaults(job)


def test_flags_win(tmp_path: Path, catalog: Catalog) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(JOB)
    job = resolve(
        path, catalog, gpus="2x8xA100", sets=["run.seq_len=1e3", "run.compile=true", "run.global_batch=null"]
    )
    assert str(job.fleet) == "2x8xA100"
    assert isinstance(job.run, TrainRun)
    assert (job.run.seq_len, job.run.compile, job.run.global_batch) == (1000, True, None)
    lora = resolve(path, catalog, sets=["run.method=lora", "run.lora.rank=8", "run.lora.targets=[q, v]"])
    assert isinstance(lora.run, TrainRun)
    assert lora.run.lora is not None
    assert (lora.run.lora.rank, lora.run.lora.targets) == (8, ("q", "v"))


def test_what_is_text_stays_as_it_is_written(catalog: Catalog) -> None:
    job = resolve("serve-llama-3.1-8b", catalog, sets=["run.version=0.10", "name=2024"])
    assert (job.run.version, job.name) == ("0.10", "2024")
    assert resolve("serve-llama-3.1-8b", catalog, sets=["run.version="]).run.version != ""
    assert resolve("serve-llama-3.1-8b", catalog, sets=['run.version="0.10"']).run.version == "0.10"


def test_any_key_of_the_model_can_be_set(catalog: Catalog) -> None:
    job = resolve("llama-3-8b", catalog, sets=["model.layers=4"])
    assert job.model.layers == 4
    assert job.model.hidden == 4096
    assert job.model_where.endswith("changed by --set")
    assert "did you mean layers" in refused("llama-3-8b", catalog, sets=["model.layerz=4"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "--set: is not KEY=VALUE"),
        ("=3", "--set: is not KEY=VALUE"),
        ("seq_len=4096", "--set: seq_len: no such key; legal: name, model"),
        ("seq_len=4096", "did you mean run.seq_len?"),
        ("run.seqlen=4096", "did you mean seq_len"),
        ("run.seq_len=0", "--set: run.seq_len: must not be zero, got 0"),
        ("run.seq_len=nan", "must be a number, not text"),
        ("run.seq_len=.nan", "not NaN"),
        ("run.compile=no", "`no` is text, not a boolean"),
        ("run.tp=2", "--set: run.tp: does not apply to fsdp"),
        ("run.isl=2", "is a key of serving runs"),
        ("run.seq_len.x=2", "run.seq_len is a single value here"),
        ("gpus=8 H100", "gpus: write 8xH100"),
        ("run.lora=[", "--set: not valid YAML"),
        ("model=nobody", "unknown model"),
    ],
)
def test_a_bad_set_is_refused(text: str, words: str, catalog: Catalog) -> None:
    assert words in refused("llama-3-8b", catalog, sets=[text])


def test_a_bare_model_gets_the_documented_run(catalog: Catalog) -> None:
    job = resolve("qwen3-8b", catalog, gpus="4xA100")
    assert isinstance(job.run, TrainRun)
    listed = defaults(job)
    assert listed == listed | {
        "run.task": "train",
        "run.framework": "fsdp",
        "run.precision": "bf16",
        "run.optimizer": "adamw",
        "run.seq_len": 4096,
        "run.micro_batch": 1,
        "run.recompute": "none",
        "run.zero_stage": 3,
    }
    assert all(default.why for default in job.defaults)
    assert len(listed) == len(job.defaults), "no key is listed twice"
    assert resolve("qwen3-8b", catalog, gpus="A100").run.framework == "hf"


def test_the_context_of_the_model_bounds_the_length(catalog: Catalog) -> None:
    job = resolve("bert-large-uncased", catalog, gpus="A100")
    assert defaults(job)["run.seq_len"] == 512


def test_image_networks_have_no_sequences(catalog: Catalog) -> None:
    job = resolve("resnet-50", catalog, gpus="8xA100")
    assert "run.seq_len" not in defaults(job)
    assert job.run.framework == "ddp"


def test_the_task_flag_picks_the_default_run(catalog: Catalog) -> None:
    job = resolve("qwen3-8b", catalog, gpus="1xA100", task="serve")
    assert isinstance(job.run, ServeRun)
    listed = defaults(job)
    assert (listed["run.framework"], listed["run.max_model_len"]) == ("vllm", 8192)
    assert "run.gpu_memory_utilization" not in listed  # the release decides, when it is planned
    assert "did you mean train" in refused("qwen3-8b", catalog, gpus="1xA100", task="trian")


def test_a_name_that_is_both_is_the_job_unless_the_task_says_otherwise(catalog: Catalog) -> None:
    assert resolve("llama-3-8b", catalog).where.endswith("jobs/llama-3-8b.yaml")
    assert resolve("llama-3-8b", catalog, gpus="1xH100", task="serve").where == "model llama-3-8b"
    assert resolve("models/llama-3-8b", catalog, gpus="1xH100").where == "model llama-3-8b"
    assert resolve("jobs/llama-3-8b", catalog).where.endswith("jobs/llama-3-8b.yaml")
    path = shipped() / "jobs" / "llama-3-8b.yaml"
    assert "its keys mean nothing to serve" in refused(path, catalog, task="serve")


def test_gpus_are_asked_for(catalog: Catalog) -> None:
    assert "gpus: no GPUs given; legal: --gpus [NODESx]COUNTxGPU" in refused("qwen3-8b", catalog)
    assert resolve("qwen3-8b", catalog, need_gpus=False).job.gpus is None
    assert "--gpus: write 8xH100" in refused("qwen3-8b", catalog, gpus="8 H100")


def test_a_model_file_is_a_job(tmp_path: Path, catalog: Catalog) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("name: small\nfamily: llama\nlayers: 2\nhidden: 64\nheads: 4\nffn: 128\nvocab: 1000\n")
    job = resolve(path, catalog, gpus="4xA100")
    assert (job.name, job.model.layers, job.fleet.count) == ("small", 2, 4)
    path.write_text("name: small\nlayers: 2\nhiden: 64\n")
    assert f"{path}: hiden: no such key" in refused(path, catalog, gpus="4xA100")
    path.write_text("name: small\nlayers: -2\n")
    assert "layers: must be at least 1" in refused(path, catalog, gpus="4xA100")


def test_a_model_may_be_inline_or_a_path_beside_the_job(
    tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "run: {task: train, framework: fsdp, seq_len: 128}\n"
    (tmp_path / "job.yaml").write_text("model: {family: llama, layers: 2, hidden: 64}\ngpus: 1xA100\n" + run)
    assert resolve(tmp_path / "job.yaml", catalog).model.hidden == 64
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.yaml").write_text("family: llama\nlayers: 3\nhidden: 64\n")
    (tmp_path / "sub" / "job.yaml").write_text("model: m.yaml\ngpus: 1xA100\n" + run)
    assert resolve(tmp_path / "sub" / "job.yaml", catalog).model.layers == 3
    (tmp_path / "job.yaml").write_text("model: {layers: 0, hidden: 64}\ngpus: 1xA100\n" + run)
    assert "model.layers: must be at least 1" in refused(tmp_path / "job.yaml", catalog)
    (tmp_path / "job.yaml").write_text("model: sub/m.yaml\ngpus: 1xA100\n" + run)
    monkeypatch.chdir("/")
    assert resolve(tmp_path / "job.yaml", catalog).model.layers == 3
    (tmp_path / "job.yaml").write_text("model: job.yaml\ngpus: 1xA100\n" + run)
    assert "is a job, not a model" in refused(tmp_path / "job.yaml", catalog)


def test_problems_of_a_file_carry_the_line(tmp_path: Path, catalog: Catalog) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("seq_len: 8192", "seq_len: -8192"))
    assert f"{path}:7: run.seq_len: must be positive, got -8192" in refused(path, catalog)
    path.write_text(JOB + "  presicion: bf16\n")
    assert f"{path}:10: run.presicion: no such key" in refused(path, catalog)
    path.write_text(JOB.replace("llama-3-8b", "llama-3-8c"))
    message = refused(path, catalog)
    assert "model: unknown model" in message
    assert "llama-3-8b" in message
    path.write_text(JOB.replace("8xh100-sxm-80gb", "8x"))
    assert "gpus: the GPU name is missing" in refused(path, catalog)
    path.write_text("gpus: 8xH100\nrun: {task: train}\n")
    assert "model: is missing" in refused(path, catalog)
    path.write_text(JOB.replace("  task: train\n", ""))
    assert "run.task: is missing; legal: train, serve" in refused(path, catalog)
    path.write_text("model: llama-3-8b\ngpus: 8xH100\nrun: 5\n")
    assert "run: must be a group of keys" in refused(path, catalog)


def test_a_job_without_a_framework_or_run_gets_one_said(tmp_path: Path, catalog: Catalog) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("  framework: fsdp\n", ""))
    assert defaults(resolve(path, catalog))["run.framework"] == "fsdp"
    path.write_text("model: llama-3-8b\ngpus: 8xH100\n")
    assert defaults(resolve(path, catalog))["run.task"] == "train"


def test_names_that_do_not_exist(catalog: Catalog) -> None:
    message = refused("llama-3-8c", catalog)
    assert "neither a file, nor a shipped job, nor a catalogue model, got 'llama-3-8c'" in message
    assert "did you mean llama-3-8b" in message
    assert "./x/llama-3-8b.yaml: no such file" in refused("./x/llama-3-8b.yaml", catalog)
    with pytest.raises(UnknownName):
        resolve("jobs/nothing", catalog)
    for argument in ("", " ", "a" * 5000, "x\0y", "\x1b[31m", "../../etc/passwd\n"):
        refused(argument, catalog)


def test_files_that_are_no_jobs(tmp_path: Path, catalog: Catalog) -> None:
    def write(name: str, raw: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    assert "the file is empty" in refused(write("empty.yaml", b""), catalog)
    assert "binary file" in refused(write("binary.yaml", b"\x7fELF\0\0"), catalog)
    assert "the folder holds no config.json" in refused(tmp_path, catalog)
    assert "found a list" in refused(write("list.yaml", b"- 1\n"), catalog)
    assert "is neither a job" in refused(write("other.yaml", b"a: 1\n"), catalog)
    assert "not valid JSON" in refused(write("bad.json", b"{"), catalog)
    assert "bad.json:1" in refused(tmp_path / "bad.json", catalog)
    assert "expected keys and values" in refused(write("list.json", b"[1]"), catalog)
    assert "a: the key is given twice" in refused(write("twice.json", b'{"a": 1, "a": 2}'), catalog)
    assert "nested too deeply" in refused(write("deep.json", b'{"a":' * 100_000), catalog)
    assert "is a pickle" in refused(write("pytorch_model.bin", b"\x80\x04"), catalog)
    assert "config.json beside it" in refused(write("model.safetensors", b"{}"), catalog)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in refused(tmp_path / "pipe.yaml", catalog)
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(100 * 2**20)
    assert "too large" in refused(large, catalog)
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    assert "aliases expand" in refused(write("bomb.yaml", bomb.encode()), catalog)
    job = JOB.replace("  seq_len", "  seq_len: 1\n  seq_len")
    assert "twice.yaml:8: seq_len: the key is given twice" in refused(
        write("twice.yaml", job.encode()), catalog
    )


def test_parsed_data_resolves_alike(catalog: Catalog) -> None:
    data = load_yaml(shipped() / "jobs" / "llama-3-8b.yaml").data
    assert resolve_data(data, catalog, where="rows.yaml").job == resolve("llama-3-8b", catalog).job
    assert data == load_yaml(shipped() / "jobs" / "llama-3-8b.yaml").data, "the data is left as it was"


def test_a_hugging_face_config_is_a_job(tmp_path: Path, catalog: Catalog) -> None:
    pytest.importorskip("gpucalc.importers.huggingface")
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent="\t"))
    header = b'{"lm_head.weight":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for argument in (folder, folder / "config.json", folder / "model.safetensors"):
        job = resolve(argument, catalog, gpus="4xA100")
        assert (job.name, job.model.layers, job.model.kv_heads) == ("my-model", 2, 2)
        assert defaults(job)["run.seq_len"] == 2048
    (tmp_path / "job.yaml").write_text("model: my-model/\ngpus: 1xA100\n")
    assert resolve(tmp_path / "job.yaml", catalog).model.hidden == 64
