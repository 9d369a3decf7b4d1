"""Config files: renamed keys, nulls, windows, ties, quantisation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpucalc.counts import count
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.graph import build_graph
from gpucalc.importers.huggingface import from_config, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_a_file_and_its_folder_read_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_file, by_folder = read_config(tmp_path / "config.json"), read_config(tmp_path)
    assert by_file == by_folder
    assert count(build_graph(by_file.spec)).total.value == 8_030_261_248
    assert by_file.spec.name == tmp_path.name


def test_null_key_value_heads_mean_one_per_head() -> None:
    assert from_config({**LLAMA, "num_key_value_heads": None}).spec.kv_heads == 32


def test_head_dim_is_taken_as_written() -> None:
    spec = from_config({**LLAMA, "model_type": "qwen3", "head_dim": 64}).spec
    assert spec.head_dim == 64


def test_a_missing_tie_takes_the_family_default_and_says_so() -> None:
    bare = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    imported = from_config(bare)
    assert imported.spec.tied_embeddings is False
    assert "tie_word_embeddings" in imported.assumed[0]
    assert from_config({**bare, "model_type": "gemma", "head_dim": 256}).spec.tied_embeddings is True


def test_a_window_counts_only_when_it_is_used() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    assert from_config({**qwen, "use_sliding_window": False}).spec.window is None
    used = from_config({**qwen, "use_sliding_window": True}).spec
    assert used.window == 4096
    assert used.pattern == "F" * 28 + "S" * 4
    assert from_config({**LLAMA, "model_type": "mistral", "sliding_window": 4096}).spec.window == 4096


def test_a_nested_text_config_is_read() -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "model_type"} | {
        "model_type": "gemma3_text",
        "head_dim": 128,
    }
    spec = from_config({"model_type": "gemma3", "text_config": inner}).spec
    assert (spec.hidden, spec.layers, spec.vision_tower) == (4096, 32, None)


def test_quantisation_is_kept() -> None:
    spec = from_config({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}).spec
    assert spec.quantization == "gptq 4-bit"


def test_a_missing_key_names_file_and_key(tmp_path: Path) -> None:
    broken = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"config\.json: vocab_size: missing"):
        read_config(tmp_path)


def test_unknown_keys_are_reported() -> None:
    assert from_config({**LLAMA, "warp_factor": 9}).ignored == ("warp_factor",)


def test_an_unknown_model_type_gets_near_names() -> None:
    with pytest.raises(UnsupportedModel, match=r"did you mean .*llama"):
        from_config({**LLAMA, "model_type": "llamma"})
    with pytest.raises(UnsupportedModel, match="RWKV"):
        from_config({**LLAMA, "model_type": "rwkv"})


@pytest.mark.parametrize(
    "config",
    [
        [],
        {},
        {"model_type": 3},
        {**LLAMA, "hidden_size": "4096"},
        {**LLAMA, "hidden_act": "sine"},
        {**LLAMA, "num_hidden_layers": True},
        {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention"]},
        {**LLAMA, "model_type": "qwen3", "layer_types": ["what"] * 32},
        {**LLAMA, "num_hidden_layers": 10**9},
    ],
)
def test_broken_configs_are_input_errors(config: Any) -> None:
    with pytest.raises(InputError):
        from_config(config)


def test_broken_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_config(tmp_path)
