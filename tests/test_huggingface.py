"""Config files: renamed keys, nulls, windows, ties, quantisation, and what is refused."""

from __future__ import annotations

import copy
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers import hub
from gpucalc.importers.huggingface import from_config, read_config
from gpucalc.importers.load import load
from gpucalc.jobs import resolve

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
    with pytest.raises(UnsupportedModel, match="residual streams"):
        from_config({**LLAMA, "model_type": "gemma3n"})


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
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_config(tmp_path)


# -- every configuration at hand, whole and broken ------------------------------------------------

DATA = Path(__file__).parent / "data"
APART: list[dict[str, Any]] = json.loads((DATA / "params_apart.json").read_text())["models"]


def test_there_are_configurations_kept_apart() -> None:
    assert len(APART) >= 25


@pytest.mark.parametrize("model", APART, ids=lambda m: m["name"])
def test_a_configuration_kept_apart_counts_as_the_instantiated_model(model: dict[str, Any]) -> None:
    """Shapes no published model has, counted by instantiation; they were not looked at while drawing."""
    imported = from_config(model["config"])
    assert count(build_graph(imported.spec)).total.value == model["total"]


WRONG: list[Any] = [
    None,
    0,
    -1,
    1.5,
    True,
    "x",
    "",
    [],
    {},
    [1, 2],
    {"a": 1},
    10**30,
    float("nan"),
    "auto",
    2**70,
]


def test_a_broken_configuration_is_an_input_error_or_read() -> None:
    configs = [
        model["config"] for model in (*APART, *json.loads((DATA / "params.json").read_text())["models"])
    ]
    chance = random.Random(7)
    for _ in range(800):
        broken = copy.deepcopy(chance.choice(configs))
        for _ in range(chance.randint(1, 2)):
            part = chance.choice(
                [broken, *(item for item in broken.values() if isinstance(item, dict) and item)]
            )
            key = chance.choice(list(part))
            part[key] = chance.choice(WRONG)
            if chance.random() < 0.3:
                del part[key]
        with suppress(InputError):
            count(build_graph(from_config(broken).spec))


def test_lists_that_tell_layers_apart_are_read_or_refused() -> None:
    known = from_config({**LLAMA, "layer_kinds": ["a"] * 32})
    assert known.ignored == ("layer_kinds",)  # the same for every layer
    with pytest.raises(UnsupportedModel, match="layer_kinds: says what each layer is"):
        from_config({**LLAMA, "layer_kinds": ["a", "b"] * 16})


def test_the_text_of_an_unknown_multimodal_model_can_be_taken_alone() -> None:
    outer = {"model_type": "warp_vl", "text_config": LLAMA, "vision_config": {"depth": 3},
             "tie_word_embeddings": True}  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"llama text model can be imported with --text-only"):
        from_config(outer)
    imported = from_config(outer, text_only=True)
    assert count(build_graph(imported.spec)).total.value == 8_030_261_248
    assert any("vision_config" in text for text in imported.assumed)
    with pytest.raises(InputError, match="text_config"):
        from_config(LLAMA, text_only=True)


@pytest.mark.parametrize(
    ("quantised", "held"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fbgemm-fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "nf4"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"],
          "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, "int4 experts"),
    ],
)  # fmt: skip
def test_what_a_quantised_checkpoint_holds(quantised: dict[str, Any], held: str) -> None:
    spec = from_config({**LLAMA, "quantization_config": quantised}).spec
    assert spec.native_dtype == held
    assert spec.quantization


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "mistral"}')
    with pytest.raises(InputError, match="twice"):
        read_config(tmp_path)


# -- the local cache ------------------------------------------------------------------------------


def test_a_cached_model_is_read_by_name_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    for revision, layers in (("a1b2", 2), ("c3d4", 3)):
        (repository / "snapshots" / revision).mkdir(parents=True)
        text = json.dumps({**LLAMA, "num_hidden_layers": layers})
        (repository / "snapshots" / revision / "config.json").write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1b2")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert hub.cached("acme/tiny") == repository / "snapshots" / "a1b2"
    assert hub.cached("acme/tiny@c3d4") == repository / "snapshots" / "c3d4"
    assert hub.cached("acme/tiny@ffff") is None
    assert hub.cached("acme/other") is None
    catalog = Catalog([Path(__file__).parents[1] / "catalogs"])
    job = resolve("acme/tiny", catalog, gpus="8xA100")
    assert (job.name, job.model.layers) == ("acme/tiny", 2)
    assert any("revision a1b2" in note for note in job.notes)
    assert load("acme/tiny").data["layers"] == 2


def test_no_name_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("../etc", "a/../b", "a/b@../x", "/a/b", "a/b/c"):
        assert not hub.is_name(name) or hub.cached(name) is None


def test_the_hub_is_asked_only_with_the_flag_and_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="--hub"):
        load("acme/unknown")
    with pytest.raises(InputError, match=r"gpucalc\[hub\]"):
        load("acme/unknown", use_hub=True)
