"""Whatever stands in a file: an answer that makes sense or one clear message, soon, in little memory.

A seeded few hundred cases here; `GPUCALC_FUZZ=20000 python -m pytest tests/test_fuzz.py` draws that many
of new ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from strategies import damaged, finite, from_schema, torn

from gpucalc.__main__ import main
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.job import Job
from gpucalc.spec.model import ModelSpec

ROOT = Path(__file__).parents[1]
CATALOGS = ROOT / "catalogs"
CASES = int(os.environ.get("GPUCALC_FUZZ", "0"))
SHARES = {"job": 160, "model": 100, "gpu": 60, "overlay": 40, "bytes": 140}  # of 500
LONGEST_S = 2 if CASES else 6  # in the suite what hangs is looked for, not a machine that is busy
MOST_BYTES = 300 * 2**20


def cases(kind: str) -> Any:
    """Settings for a share of the cases: seeded in the suite, new ones in a long run."""
    count = CASES * SHARES[kind] // sum(SHARES.values()) if CASES else SHARES[kind]
    return settings(
        max_examples=count,
        derandomize=not CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class TooLong(BaseException):
    """A case ran past its time; not an Exception, so that nothing on the way handles it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Stop a case that takes too long, and fail one that takes too much memory."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooLong

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGPROF, stop)  # the process's own seconds, however busy the machine is
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_BYTES, f"took {grown / 2**20:.0f} MiB"


def run(*words: str) -> tuple[int, str, str]:
    """A command line in this process: exit code, output and messages."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
    except TooLong:
        raise AssertionError(f"{' '.join(words)} took more than {LONGEST_S} s") from None
    return code, out.getvalue(), err.getvalue()


def sensible(code: int, out: str, err: str) -> None:
    """An answer with finite numbers, or a message that is no traceback."""
    assert "Traceback" not in err, err
    assert "\x1b" not in out + err
    assert code in (0, 1, 2), (code, err)
    if code == 2:
        assert out == ""
        assert 1 <= len(err.strip().splitlines()) <= 40, err
        assert len(err) < 4000, err[:400]
    elif out.startswith("{"):
        document = json.loads(out)
        assert finite(document)
        needed = document["verdict"]["needed_bytes"]
        assert needed > 0
        if document.get("time") is not None:
            assert document["time"]["value"] > 0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(folder: Path, document: Any, name: str = "case.yaml") -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return str(path)


def shipped(kind: str, count: int) -> list[Any]:
    files = sorted((CATALOGS / kind).glob("*.yaml"))
    step = max(1, len(files) // count)
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files[::step]]


def schema(spec: type[BaseModel]) -> dict[str, Any]:
    return spec.model_json_schema()


JOBS = shipped("jobs", 40)
MODELS = shipped("models", 60)
GPUS = shipped("gpus", 40)


@cases("job")
@given(document=st.one_of(damaged(JOBS), from_schema(schema(Job))))
def test_jobs(document: Any, folder: Path) -> None:
    sensible(*run("plan", written(folder, document), "--json"))


@cases("model")
@given(
    document=st.one_of(damaged(MODELS), from_schema(schema(ModelSpec))),
    task=st.sampled_from(["train", "serve"]),
)
def test_models(document: Any, task: str, folder: Path) -> None:
    path = written(folder, document)
    sensible(*run("plan", path, "--gpus", "8xH100-SXM", "--task", task, "--json"))


@cases("gpu")
@given(document=st.one_of(damaged(GPUS), from_schema(schema(GpuSpec))))
def test_gpus_of_an_own_catalogue(document: Any, folder: Path) -> None:
    own = folder / "own"
    (own / "gpus").mkdir(parents=True, exist_ok=True)
    name = document.get("id") if isinstance(document, dict) else None
    plain = isinstance(name, str) and name.isascii() and name.replace("-", "").isalnum() and len(name) < 60
    stem = str(name) if plain else "own-card"
    written(own / "gpus", document, f"{stem}.yaml")
    try:
        sensible(*run("plan", "llama-3-8b", "--gpus", f"8x{stem}", "--catalog", str(own), "--json"))
    finally:
        (own / "gpus" / f"{stem}.yaml").unlink()


OVERLAY = {
    "kind": "calibration",
    "measured": {"date": "2026-01-01", "torch": "2.13.0", "device": "cpu"},
    "gpu": "h100-sxm-80gb",
}


@cases("overlay")
@given(document=damaged([OVERLAY]))
def test_overlays(document: Any, folder: Path) -> None:
    path = written(folder, document, "overlay.yaml")
    sensible(*run("plan", "llama-3-8b", "--calibration", path, "--json"))


def _files() -> dict[str, bytes]:
    """A file of every kind that a command reads, by its name."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    return {
        "job.yaml": (CATALOGS / "jobs" / "mixtral-8x7b.yaml").read_bytes(),
        "serve.yaml": (CATALOGS / "jobs" / "serve-deepseek-r1.yaml").read_bytes(),
        "config.json": json.dumps(config).encode(),
        "ds_config.json": b'{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}',
        "run.sh": b"torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
        b" --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --bf16\n",
        "torchtitan.toml": b"[training]\nlocal_batch_size = 1\nseq_len = 128\n"
        b"[parallelism]\ntensor_parallel_degree = 2\n",
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(16),
        "model.gguf": b"GGUF" + (3).to_bytes(4, "little") + bytes(16),
        "axolotl.yml": b"base_model: llama-3-8b\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: lora\n",
    }


FILES = _files()


@cases("bytes")
@given(data=st.data())
def test_torn_bytes_of_every_file_that_is_read(data: st.DataObject, folder: Path) -> None:
    name = data.draw(st.sampled_from(sorted(FILES)))
    path = folder / name
    path.write_bytes(data.draw(torn([FILES[name]])))
    sensible(*run("plan", str(path), "--gpus", "8xH100-SXM", "--json"))
