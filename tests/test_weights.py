"""Header readers: the files' own bytes, and headers that lie or claim too much refused fast and small."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.gguf import TYPES, read_gguf
from gpucalc.importers.safetensors import read_header, read_index
from gpucalc.importers.weights import ARCHITECTURES, from_gguf, measured, parameters
from gpucalc.jobs import resolve
from gpucalc.plan.weight_formats import weight_format
from gpucalc.spec.serve_run import ServeRun

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])
TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip


def tiny_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of the tiny model, by name: type and shape."""
    shapes = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64), "model.norm.weight": (64,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (64 if n in "qo" else 32, 64) for n in "qkvo"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (128, 64) for n in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (64, 128)}
        shapes |= {f"{layer}{n}_layernorm.weight": (64,) for n in ("input", "post_attention")}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


WIDTH = {"BF16": 2, "F32": 4, "I32": 4}


def safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], **changes: Any) -> Path:
    """A file the format allows, but for the changes: header, length (as said), data (bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = WIDTH[dtype]
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header |= changes.get("header", {})
    raw = changes.get("raw") or json.dumps(header).encode()
    said = changes.get("length", len(raw))
    path.write_bytes(said.to_bytes(8, "little") + raw + bytes(changes.get("data", at)))
    return path


def test_a_safetensors_file_is_read_to_the_byte(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "model.safetensors", tiny_tensors())
    tensors = read_header(path)
    spec = measured(tensors)
    assert spec.total_bytes == sum(t.bytes for t in tensors) == 2 * parameters(tensors)
    assert spec.bytes_by_type == {"BF16": spec.total_bytes}
    assert spec.bytes_by_part["embedding"] == spec.bytes_by_part["head"] == 2 * 96 * 64
    assert sum(spec.bytes_by_part.values()) == spec.total_bytes


def test_the_safetensors_package_agrees(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    path = safetensors(tmp_path / "model.safetensors", tiny_tensors())
    with package.safe_open(path, framework="np") as opened:
        theirs = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert theirs == {tensor.name: tensor.shape for tensor in read_header(path)}


ENTRY = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"length": 100 * 2**30}, "said to be 107,374,182,400 bytes"),
        ({"length": 2**64 - 1}, "said to be"),
        ({"length": 5}, "not"),
        ({"raw": b"[1]"}, "not a JSON object"),
        ({"raw": b"{" + b"[" * 5000}, "not JSON"),
        ({"raw": b'{"a":' + b"[" * 5000 + b"}"}, "not a tensor"),
        ({"raw": b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}', "data": 4}, "not JSON"),
        ({"raw": b"\xff\xfe{}"}, "not text"),
        ({"header": {"a": {**ENTRY, "dtype": "Q9"}}}, "unknown element type"),
        ({"header": {"a": {**ENTRY, "shape": [3]}}}, "offsets span"),
        ({"header": {"a": {**ENTRY, "shape": [-2]}}}, "not a whole number"),
        ({"header": {"a": {**ENTRY, "shape": [2.0]}}}, "not a whole number"),
        ({"header": {"a": {**ENTRY, "shape": [2**40, 2**40]}}}, "offsets span"),
        (
            {"header": {"a": {"dtype": "BF16", "shape": [50 * 2**30], "data_offsets": [0, 100 * 2**30]}}},
            "cut off",
        ),
        ({"header": {"a": ENTRY}}, "overlap"),
        ({"data": 3}, "cut off"),
        ({"data": 10**6}, "the file holds"),
    ],
)
def test_false_headers_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = safetensors(tmp_path / "model.safetensors", tiny_tensors(), **changes)
    with pytest.raises(InputError, match=problem):
        read_header(path)


def test_short_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"123")
    with pytest.raises(InputError, match="too short"):
        read_header(tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="no such file"):
        read_header(tmp_path / "b.safetensors")
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    twice = b"{" + one + b"," + one + b"}"
    with pytest.raises(InputError, match="listed twice"):
        read_header(safetensors(tmp_path / "c.safetensors", {}, raw=twice, data=2))


def sharded(folder: Path, total: int | None = None) -> Path:
    """A checkpoint in two shards."""
    names = list(tiny_tensors().items())
    places: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        safetensors(folder / file, dict(part))
        places |= {name: file for name, _ in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total or 0}, "weight_map": places}))
    return index


def test_an_index_reads_every_shard(tmp_path: Path) -> None:
    tensors, notes = read_index(sharded(tmp_path, 3_000_000_000))
    assert {tensor.name for tensor in tensors} == set(tiny_tensors())
    assert "states 3,000,000,000 bytes" in notes[0]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match="shard is missing"):
        read_index(tmp_path / "model.safetensors.index.json")


def test_an_index_reaches_no_other_folder(tmp_path: Path) -> None:
    for shard in ("../a.safetensors", "/etc/passwd", "a.bin", 3):
        (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
        with pytest.raises(InputError, match="not a file beside"):
            read_index(tmp_path / "x.safetensors.index.json")


# -- GGUF -----------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, **changes: Any) -> Path:
    """A tiny Qwen2 in Q4_K and F32, with the changes."""
    types = {kind: number for number, (kind, _, _) in TYPES.items()}
    shapes = {"token_embd.weight": ("Q4_K", (256, 64)), "output_norm.weight": ("F32", (256,))}
    for name, sides in (("attn_q", (256, 256)), ("attn_k", (256, 128)), ("attn_v", (256, 128)),
                        ("attn_output", (256, 256)), ("ffn_gate", (256, 512)), ("ffn_up", (256, 512)),
                        ("ffn_down", (512, 256)), ("attn_norm", (256,)), ("ffn_norm", (256,))):  # fmt: skip
        shapes[f"blk.0.{name}.weight"] = ("Q4_K" if len(sides) > 1 else "F32", sides)
    for name, side in (("attn_q", 256), ("attn_k", 128), ("attn_v", 128)):
        shapes[f"blk.0.{name}.bias"] = ("F32", (side,))
    shapes |= changes.get("tensors", {})
    keys: dict[str, Any] = {"general.architecture": "qwen2", "general.file_type": 15, "qwen2.block_count": 1,
        "qwen2.embedding_length": 256, "qwen2.feed_forward_length": 512, "qwen2.attention.head_count": 4,
        "qwen2.attention.head_count_kv": 2, "qwen2.context_length": 2048}  # fmt: skip
    keys |= changes.get("keys", {})
    raw = b""
    for key, value in keys.items():
        raw += text(key)
        if isinstance(value, bytes):
            raw += value
        else:
            raw += (
                struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
            )
    words = [f"token{i}" for i in range(64)]
    raw += (
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 64) + b"".join(text(word) for word in words)
    )
    at, infos = 0, b""
    for name, (kind, sides) in shapes.items():
        _, block, width = TYPES[types[kind]]
        elements = 1
        for side in sides:
            elements *= side
        size = elements // block * width
        infos += text(name) + struct.pack("<I", len(sides)) + struct.pack(f"<{len(sides)}Q", *sides)
        infos += struct.pack("<IQ", types[kind], changes.get("offset", at))
        at += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", changes.get("version", 3), changes.get("tensor_count", len(shapes)),
                                 changes.get("key_count", len(keys) + 1))  # fmt: skip
    head += raw + infos
    head += bytes(-len(head) % 32)
    path.write_bytes(head + bytes(changes.get("data", at)))
    return path


def test_a_gguf_file_is_read_to_the_byte(tmp_path: Path) -> None:
    path = gguf(tmp_path / "tiny-Q4_K_M.gguf")
    read = read_gguf(path)
    assert read.lengths == {"tokenizer.ggml.tokens": 64}
    sizes = {tensor.name: (tensor.dtype, tensor.bytes) for tensor in read.tensors}
    assert sizes["token_embd.weight"] == ("Q4_K", 256 * 64 // 256 * 144)
    imported, quant = from_gguf(path)
    assert quant == "q4_k_m"
    assert count(build_graph(imported.spec)).total.value == parameters(read.tensors)
    weights = imported.spec.weights
    assert weights is not None
    assert weights.total_bytes == sum(size for _, size in sizes.values())


def test_the_gguf_package_agrees(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    path = gguf(tmp_path / "tiny.gguf")
    theirs = {str(t.name): (t.tensor_type.name, int(t.n_bytes)) for t in package.GGUFReader(path).tensors}
    assert theirs == {tensor.name: (tensor.dtype, tensor.bytes) for tensor in read_gguf(path).tensors}
    sizes = {int(kind): tuple(size) for kind, size in package.constants.GGML_QUANT_SIZES.items()}
    assert {number: (block, size) for number, (_, block, size) in TYPES.items()}.items() <= sizes.items()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_metadata_of_every_known_architecture_describes_a_model(name: str, tmp_path: Path) -> None:
    """What llama.cpp writes for it is enough: no key of a config.json is missed that it does not have."""
    keys: dict[str, Any] = {
        "general.architecture": name, f"{name}.block_count": 2, f"{name}.embedding_length": 256,
        f"{name}.feed_forward_length": 512, f"{name}.attention.head_count": 4,
        f"{name}.attention.head_count_kv": 1 if name == "falcon" else 2, f"{name}.context_length": 2048,
        f"{name}.attention.key_length": 64,
    }  # fmt: skip
    if name in ("gemma2", "gemma3", "gpt-oss"):
        keys[f"{name}.attention.sliding_window"] = 128
    if name in ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "deepseek2"):
        keys |= {f"{name}.expert_count": 8, f"{name}.expert_used_count": 2,
                 f"{name}.expert_feed_forward_length": 128}  # fmt: skip
    if name == "qwen2moe":
        keys[f"{name}.expert_shared_feed_forward_length"] = 256
    if name == "deepseek2":
        keys |= {f"{name}.attention.kv_lora_rank": 32, f"{name}.rope.dimension_count": 16,
                 f"{name}.attention.value_length": 48, f"{name}.leading_dense_block_count": 1}  # fmt: skip
    imported, _ = from_gguf(gguf(tmp_path / "tiny.gguf", keys=keys))
    graph = build_graph(imported.spec)
    assert len(graph.trunk.layers) == 2
    assert graph.embedding is not None
    assert (graph.embedding.vocab, graph.embedding.width) == (64, 256)


def test_a_gguf_file_is_a_job(tmp_path: Path) -> None:
    job = resolve(gguf(tmp_path / "tiny.gguf"), CATALOG, gpus="1xRTX4090")
    assert isinstance(job.run, ServeRun)
    assert (job.run.framework, job.run.quant) == ("llamacpp", "q4_k_m")
    assert job.model.weights is not None


LIST = struct.pack("<IIQ", 9, 8, 10**9)
NESTED = struct.pack("<IIQ", 9, 9, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 0x03000000}, "big-endian"),
        ({"tensor_count": 10**12}, "more than the file can hold"),
        ({"key_count": 2**63}, "more than the file can hold"),
        ({"keys": {"x": LIST}}, "more than 1,500,000"),
        ({"keys": {"x": struct.pack("<IIQ", 9, 4, 2**60)}}, "more than the file can hold"),
        ({"keys": {"x": NESTED}}, "no reader"),
        ({"keys": {"x": struct.pack("<IQ", 8, 2**50)}}, "longer than any"),
        ({"keys": {"general.alignment": 7}}, "alignment"),
        ({"offset": 0}, "overlaps"),
        ({"offset": 7}, "aligned"),
        ({"offset": 2**40}, "cut off"),
        ({"data": 100}, "cut off"),
        ({"tensors": {"w": ("F32", (2**40, 2**30))}, "data": 9}, "claims"),
        ({"tensors": {"w": ("Q4_K", (100, 2))}}, "do not fill"),
    ],
)
def test_false_gguf_headers_are_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_gguf(gguf(tmp_path / "tiny.gguf", **changes))


def test_an_unknown_gguf_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'warp'"):
        from_gguf(gguf(tmp_path / "tiny.gguf", keys={"general.architecture": "warp"}))


def test_every_cut_of_a_file_is_refused_in_our_words(tmp_path: Path) -> None:
    cases = (
        (gguf(tmp_path / "a.gguf"), read_gguf),
        (safetensors(tmp_path / "a.safetensors", tiny_tensors()), read_header),
    )
    for path, read in cases:
        whole = path.read_bytes()
        for at in range(0, len(whole) - 64, max(1, len(whole) // 100)):
            path.write_bytes(whole[:at])
            with pytest.raises(InputError):
                read(path)


def test_a_file_of_100_gb_that_lies_costs_no_time_and_no_memory(tmp_path: Path) -> None:
    """Sparse files of 100 GB: what each claims can be held by its size, so size alone does not refuse it."""
    entries = ",".join(f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' for i in range(60_000))
    cases = {
        "a.safetensors": (99 * 10**9).to_bytes(8, "little"),
        "b.safetensors": (len(entries) + 2).to_bytes(8, "little") + f"{{{entries}}}".encode(),
        "c.gguf": b"GGUF" + struct.pack("<IQQ", 3, 10**6, 1) + text("x") + struct.pack("<IIQ", 9, 8, 10**10),
        "d.gguf": b"GGUF"
        + struct.pack("<IQQ", 3, 10**6, 1)
        + text("x")
        + struct.pack("<IIQ", 9, 8, 1_400_000),
    }
    for name, head in cases.items():
        with open(tmp_path / name, "wb") as file:
            file.write(head)
            try:
                os.truncate(file.fileno(), 100 * 10**9)
            except OSError:
                pytest.skip("no sparse files here")
    script = (
        "import resource, sys, time\n"
        "from gpucalc.errors import InputError\n"
        "from gpucalc.importers.weights import read_weights\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    start = time.process_time()\n"
        "    try:\n"
        "        read_weights(path)\n"
        "        print('read', path)\n"
        "    except InputError:\n"
        "        pass\n"
        "    print(time.process_time() - start)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    paths = [str(tmp_path / name) for name in cases]
    command = [sys.executable, "-c", script, *paths]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "read" not in out.stdout
    *times, grown = map(float, out.stdout.split())
    assert max(times) < 10  # of the processor; to read 100 GB takes longer anywhere
    assert grown < 50 * 1024


def test_a_folder_says_its_weights_and_a_broken_one_that_it_does_not_count_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    sharded(tmp_path)
    job = resolve(tmp_path, CATALOG, gpus="1xA100")
    assert job.model.weights is not None
    assert job.model.weights.total_bytes == 2 * count(build_graph(job.model)).total.value
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"short")
    broken = resolve(tmp_path, CATALOG, gpus="1xA100")
    assert broken.model.weights is None
    assert any("not counted" in note for note in broken.notes)
    with pytest.raises(InputError, match="too short"):
        resolve(tmp_path / "model.safetensors.index.json", CATALOG, gpus="1xA100")


def test_packed_integers_count_as_what_is_packed(tmp_path: Path) -> None:
    packed = {"model.layers.0.mlp.up_proj.weight_packed": ("I32", (128, 8)),
              "model.layers.0.mlp.up_proj.weight_scale": ("BF16", (128, 2))}  # fmt: skip
    tensors = read_header(safetensors(tmp_path / "a.safetensors", packed))
    assert parameters(tensors, bits=4) == 128 * 64
    assert parameters(tensors, bits=3) == round(128 * 8 * 32 / 3)


def test_a_deployment_holds_what_the_files_hold(tmp_path: Path) -> None:
    imported, quant = from_gguf(gguf(tmp_path / "tiny.gguf"))
    spec = imported.spec
    assert spec.weights is not None
    held, why = weight_format(quant, "fp16", spec, build_graph(spec))
    params = spec.weights.params_by_part
    each = {"linear": held.linear, "embedding": held.embedding, "rest": held.rest}
    assert sum(params[part] * size for part, size in each.items()) == pytest.approx(spec.weights.total_bytes)
    assert (held.kind, held.exceptions, why) == ("exact", None, "the file is q4_k_m")
    other = spec.model_copy(update={"layers": 9})  # files of another model than the one that is drawn
    assert weight_format(quant, "fp16", other, build_graph(other))[0].exceptions
