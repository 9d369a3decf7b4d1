"""Architectures beyond the catalogue's: counted as their public classes build them, or refused by name.

Every class that has a drawing is here by its own default configuration, then published shapes; the
counts are of the instantiated classes. Those without a drawing must say so.
"""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import GpucalcError, InputError, UnsupportedModel
from gpucalc.families import FAMILIES, SYNONYMS, canonical
from gpucalc.graph import StateMixer
from gpucalc.importers.config.needed import NEEDED
from gpucalc.importers.huggingface import from_config
from gpucalc.jobs import resolve_data
from gpucalc.planner import plan_job
from gpucalc.spec.model import ModelSpec

DATA = json.loads((Path(__file__).parent / "data" / "params_classes.json").read_text())
MODELS: list[dict[str, Any]] = DATA["models"]
REFUSED: list[dict[str, Any]] = DATA["refused"]
CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])


def total(config: dict[str, Any]) -> float:
    return float(count(build_graph(from_config(config).spec)).total.value)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m["name"])
def test_a_class_counts_as_it_is_built(model: dict[str, Any]) -> None:
    assert total(model["config"]) == model["total"]


@pytest.mark.parametrize("model", REFUSED, ids=lambda m: m["name"])
def test_a_class_without_a_drawing_is_refused_by_name(model: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"config\.json: ") as caught:
        from_config(model["config"])
    assert isinstance(caught.value, UnsupportedModel) or "missing" in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_drawn_family_is_counted_here_or_in_the_catalogue() -> None:
    """A row of the table that nothing was counted against is a guess."""
    named = {canonical(model["config"]["model_type"]) for model in MODELS}
    others = json.loads((Path(__file__).parent / "data" / "params.json").read_text())["models"]
    named |= {canonical(model["config"]["model_type"]) for model in others}
    apart = json.loads((Path(__file__).parent / "data" / "params_apart.json").read_text())["models"]
    named |= {canonical(model["config"]["model_type"]) for model in apart}
    specs = (CATALOG.model(name) for name in CATALOG.names("models"))
    named |= {canonical(spec.architecture) for spec in specs if spec.architecture}
    # Classes that their publishers ship themselves, counted in test_published_totals below.
    named |= {"baichuan", "chatglm", "deepseek_moe", "internlm2", "qwen", "yi"}
    drawn = {name for name, row in FAMILIES.items() if not row.refused and row.form != "totals"}
    # dots1: below, on small widths; minicpm and kimi_k2: as llama and deepseek_v3.
    assert drawn - named <= {"dots1", "minicpm", "kimi_k2"}
    assert set(SYNONYMS.values()) <= FAMILIES.keys()


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "chatglm3-6b": (
        6_243_584_000,
        {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "add_bias_linear": False,
         "add_qkv_bias": True, "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32,
         "num_layers": 28, "padded_vocab_size": 65024, "post_layer_norm": True, "rmsnorm": True,
         "seq_length": 8192, "tie_word_embeddings": False},
    ),
    "qwen-7b": (
        7_721_324_544,
        {"model_type": "qwen", "architectures": ["QWenLMHeadModel"], "hidden_size": 4096,
         "intermediate_size": 22016, "kv_channels": 128, "max_position_embeddings": 32768, "no_bias": True,
         "num_attention_heads": 32, "num_hidden_layers": 32, "tie_word_embeddings": False,
         "vocab_size": 151936},
    ),
    "deepseek-moe-16b": (
        16_375_728_128,
        {"model_type": "deepseek", "architectures": ["DeepseekForCausalLM"], "first_k_dense_replace": 1,
         "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
         "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
         "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16,
         "tie_word_embeddings": False, "vocab_size": 102400},
    ),
    "baichuan2-13b": (
        13_896_668_160,
        {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "hidden_act": "silu",
         "hidden_size": 5120, "intermediate_size": 13696, "model_max_length": 4096,
         "num_attention_heads": 40, "num_hidden_layers": 40, "tie_word_embeddings": False,
         "vocab_size": 125696},
    ),
    "internlm2-20b": (
        19_861_149_696,
        {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": False,
         "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
         "num_hidden_layers": 48, "num_key_value_heads": 8, "tie_word_embeddings": False,
         "vocab_size": 92544},
    ),
    "yi-34b": (
        34_388_917_248,
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
         "hidden_size": 7168, "intermediate_size": 20480, "num_attention_heads": 56, "num_hidden_layers": 60,
         "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 64000},
    ),
    "dots1, small": (
        3_467_200,  # Dots1ForCausalLM on a CPU: it cannot be built on the meta device
        {"model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "vocab_size": 1000,
         "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 8, "num_key_value_heads": 4, "n_shared_experts": 2, "n_routed_experts": 8,
         "num_experts_per_tok": 2, "first_k_dense_replace": 1, "layer_types": ["full_attention"] * 3,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    """Models whose class is not in the library: against the totals on their pages."""
    wanted, config = PUBLISHED[name]
    assert total(config) == wanted


@pytest.mark.parametrize("model", DATA["published"], ids=lambda m: m["name"])
def test_published_spellings(model: dict[str, Any]) -> None:
    """Files in the words of a publisher's own code, before the library had the class: the same totals."""
    assert total(model["config"]) == model["total"]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m["name"])
def test_a_key_that_matters_is_an_error_when_it_is_missing(model: dict[str, Any]) -> None:
    config = model["config"]
    place = next((k for k in ("text_config", "llm_config") if isinstance(config.get(k), dict)), None)
    key = canonical(config["model_type"])
    if key not in NEEDED and place is not None:
        key = canonical(config[place].get("model_type", ""))
    for wanted in NEEDED.get(key, ()):
        names = wanted.split("|")
        broken = copy.deepcopy(config)
        part = broken[place] if place is not None else broken
        if not any(name in part for name in names):
            continue
        for name in names:
            part.pop(name, None)
        with pytest.raises(InputError, match=names[0]):
            from_config(broken)


def test_shapes_alone_are_errors_when_they_are_missing() -> None:
    config = next(m["config"] for m in MODELS if m["name"] == "mistral")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "intermediate_size", "vocab_size"):  # fmt: skip
        with pytest.raises(InputError, match=key):
            from_config({name: value for name, value in config.items() if name != key})


@pytest.mark.parametrize("name", ["lfm2-1.2b", "rwkv-4-14b", "recurrentgemma-9b", "granite-4.0-h-tiny",
                                  "olmo", "apertus-8b", "internvl3-8b"])  # fmt: skip
@pytest.mark.parametrize("task", ["train", "serve"])
def test_new_kinds_of_layers_are_planned(name: str, task: str) -> None:
    config = next(m["config"] for m in MODELS if m["name"] == name)
    model = from_config(config).spec.model_dump(exclude_none=True, exclude_defaults=True)
    run = {"task": task, "framework": "fsdp" if task == "train" else "vllm"}
    if task == "train":
        run |= {"seq_len": 2048, "micro_batch": 1}
    job = {"model": model, "gpus": "8xH100-SXM", "run": run}
    plan = plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False)
    assert plan.verdict.level.value in ("fits", "marginal", "does_not_fit")
    assert float(plan.memory.value) > 0


def test_a_state_per_channel_does_not_grow_with_the_context() -> None:
    """LFM2 keeps the inputs of its convolution alone: 2,048 channels, three of them."""
    config = next(m["config"] for m in MODELS if m["name"] == "lfm2-1.2b")
    graph = build_graph(from_config(config).spec)
    mixer = graph.trunk.blocks[0].mixer
    assert isinstance(mixer, StateMixer)
    assert (mixer.kind, mixer.heads * mixer.key_dim, mixer.conv, mixer.conv_width) == (
        "short_conv",
        0,
        3,
        2048,
    )
    assert sum(graph.trunk.count(i) for i, b in enumerate(graph.trunk.blocks) if b.mixer == mixer) == 10


# What traces of the same classes came to at 224 x 224, in training mode: operations in GFLOP, elements
# kept for backward, elements moved by layers without products, kernels.
TRACED = {
    "resnet-50": (8.178368512, 21_477_376, 59_389_813, 227),
    "resnet-18": (3.628146688, 5_544_960, 13_085_780, 88),
    "convnext-tiny": (8.911062528, 27_288_952, 33_924_424, 137),
    "swin-tiny": (8.981133312, 26_658_543, 75_306_193, 507),
}


@pytest.mark.parametrize("name", TRACED)
def test_an_image_network_walked_from_its_configuration_is_what_a_trace_finds(name: str) -> None:
    others = json.loads((Path(__file__).parent / "data" / "params.json").read_text())["models"]
    spec = from_config(next(model["config"] for model in others if model["name"] == name)).spec
    flops, saved, traffic, kernels = TRACED[name]
    assert spec.gflops_forward == pytest.approx(flops, rel=1e-9)
    assert spec.saved_elements == pytest.approx(saved, rel=1e-4)
    assert spec.traffic_elements == pytest.approx(traffic, rel=0.02)
    assert spec.layers == pytest.approx(kernels, rel=0.02)
    for task, run in (("train", {"framework": "ddp", "micro_batch": 32}), ("serve", {"framework": "hf"})):
        job = {"model": spec.model_dump(exclude_none=True, exclude_defaults=True), "gpus": "1xA100-SXM-80GB",
               "run": {"task": task, **run}}  # fmt: skip
        assert plan_job(resolve_data(job, CATALOG, where="job"), CATALOG, advice=False).throughput is not None


def test_a_convolutional_network_says_what_it_lacks() -> None:
    others = json.loads((Path(__file__).parent / "data" / "params.json").read_text())["models"]
    config = next(model["config"] for model in others if model["name"] == "convnext-tiny")
    wrong: list[tuple[str, Any]] = [
        ("depths", None), ("depths", [3, "x"]), ("hidden_sizes", [96, 192]), ("patch_size", None),
        ("num_channels", 4), ("num_stages", 7), ("image_size", -5),
    ]  # fmt: skip
    for key, value in wrong:
        with pytest.raises(InputError, match=key):
            from_config({**config, key: value})
    assert any("224" in text for text in from_config({**config, "image_size": None}).assumed)


def test_a_model_that_lacks_any_one_of_its_keys_is_drawn_or_refused_in_words() -> None:
    tried = 0
    for name in CATALOG.names("models"):
        described = CATALOG.model(name).model_dump(mode="json", exclude_none=True)
        groups = [
            (key, part) for key, value in described.items() if isinstance(value, dict) for part in value
        ]
        for path in [*((key,) for key in described), *groups]:
            lacking = copy.deepcopy(described)
            inside = lacking if len(path) == 1 else lacking[path[0]]
            del inside[path[-1]]
            with contextlib.suppress(GpucalcError):  # anything else is a fault
                build_graph(ModelSpec.read(lacking))
            tried += 1
    assert tried > 2000
