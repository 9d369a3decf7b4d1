"""What a layer keeps for backward, against layers that were measured.

tests/data/activations.csv: saved_tensors_hooks on torch 2.13 / transformers 5.24 (and peft 0.21), storages
counted once, one layer's bytes. `flash` is an attention function that keeps what the GPU kernels keep. The
CPU differs from CUDA in two ways, which the measured numbers are corrected for here: 16-bit layer norms
keep their statistics in 16 bit, and attention is not under autocast.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.errors import InputError
from gpucalc.formulas.memory import autocast_weight_bytes
from gpucalc.graph import Block
from gpucalc.plan.activation import layer_line
from gpucalc.plan.layout import Recipe
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.plan.selective import selective_line
from gpucalc.plan.stages import block_params
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

ROWS = list(csv.DictReader((Path(__file__).parent / "data" / "activations.csv").read_text().splitlines()))

LAYER_NORMS = {"gpt2", "opt", "bert", "starcoder2", "gpt_neox"}
# Gemma multiplies by 1 + weight: a constant of 4 h per norm, whatever the tokens. Routers: up to 50 bytes
# of indexes and scores per token, by family.
BOUNDS = {
    "gemma": 0.002,
    "gemma2": 0.002,
    "gemma3": 0.002,
    "cohere": 0.002,
    "mixtral": 0.002,
    "qwen3_moe": 0.002,
    "deepseek_v3": 0.002,
    "gpt_oss": 0.002,
}
EXACT = 1e-9


def layer(row: dict[str, str]) -> tuple[Block, Recipe]:
    """The block of a row and the recipe it ran under."""
    family, variant = row["family"], row["variant"].split()
    spec: dict[str, Any] = {
        "name": family,
        "architecture": family,
        "layers": 4,
        "vocab": 1024,
        **{key: int(row[key]) for key in ("hidden", "heads", "kv_heads", "head_dim", "ffn")},
    }
    if family in ("gpt2", "opt", "bert"):
        spec["positions"] = 1024
    if row["experts"]:
        spec["moe"] = {key: int(row[key]) for key in ("experts", "top_k", "expert_ffn")}
    if family == "deepseek_v3":
        spec["moe"]["shared_expert_ffn"] = spec["moe"]["expert_ffn"]
        spec["mla"] = {"q_lora": 96, "kv_lora": 64, "qk_nope": 32, "qk_rope": 16, "v_head": 32}
    lora = "lora" in variant
    run: dict[str, Any] = {
        "framework": "ddp",
        "precision": "fp32" if row["dtype"] == "fp32" else "bf16" if "autocast" in variant else "bf16-pure",
        "seq_len": int(row["seq"]),
        "micro_batch": int(row["batch"]),
        "attention": row["attention"],
        "dropout": "dropout" in variant and not lora,
    }
    if lora:
        run["method"] = "lora"
        run["lora"] = {
            "rank": 16,
            "targets": "all-linear" if "all" in variant else ["q_proj", "v_proj"],
            "dropout": 0.05 if "dropout" in variant else 0.0,
            "dtype": "bf16" if "bf16" in variant else "fp32",
        }
    graph = build_graph(ModelSpec.read(spec))
    settled, _ = settle(TrainRun.read(run))
    return graph.trunk.blocks[0], resolve_recipe(settled, graph)


def corrected(row: dict[str, str], block: Block, recipe: Recipe) -> float:
    """Measured bytes of the layer, as CUDA would have kept them, without weights cast by autocast."""
    measured = float(row["bytes_per_layer"])
    tokens = int(row["batch"]) * int(row["seq"])
    if row["family"] in LAYER_NORMS:
        measured += tokens * len(block.norms) * 4  # mean and rstd in fp32 instead of bf16
    if recipe.autocast:
        measured -= autocast_weight_bytes(linear_params=block_params(block).linear)
        query, kv = int(row["heads"]) * int(row["head_dim"]), int(row["kv_heads"]) * int(row["head_dim"])
        measured -= tokens * 2 * (query + kv + query)  # q, k and the output were fp32
        measured -= tokens * 2 * query  # so the output projection cast its input
    elif "lora" in row["variant"] and "autocast" in row["variant"]:
        hidden, ffn = int(row["hidden"]), int(row["ffn"])
        kv = int(row["kv_heads"]) * int(row["head_dim"])
        assert hidden == int(row["heads"]) * int(row["head_dim"])
        adapters = 16 * (2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + ffn))
        measured -= autocast_weight_bytes(linear_params=adapters)
    return measured


def name(row: dict[str, str]) -> str:
    words = (row["family"], row["attention"], row["dtype"], *row["variant"].split(), f"h{row['hidden']}")
    return "-".join((*words, f"s{row['seq']}", f"a{row['heads']}", f"e{row['experts'] or 0}"))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_measured_layer(row: dict[str, str]) -> None:
    block, recipe = layer(row)
    tokens = int(row["batch"]) * int(row["seq"])
    line = layer_line(block, recipe, seq_len=int(row["seq"]))
    bound = BOUNDS.get(row["family"], EXACT)
    assert line.value * tokens == pytest.approx(corrected(row, block, recipe), rel=bound), line.children


def test_every_code_path_is_among_the_rows() -> None:
    assert {row["attention"] for row in ROWS} == {"flash", "eager"}
    assert {row["dtype"] for row in ROWS} == {"bf16", "fp32"}
    families = {
        "llama", "qwen3", "gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "starcoder2", "bert",
        "phi3", "olmo2", "cohere", "granite", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
    }  # fmt: skip
    assert {row["family"] for row in ROWS} == families
    exact = sum(1 for row in ROWS if row["family"] not in BOUNDS)
    assert (exact, len(ROWS)) == (39, 72)


def recipe_of(run: dict[str, Any], spec: dict[str, Any]) -> tuple[Block, Recipe]:
    graph = build_graph(ModelSpec.read(spec))
    settled, _ = settle(TrainRun.read(run))
    return graph.trunk.blocks[0], resolve_recipe(settled, graph)


LLAMA_3_8B = {
    "name": "llama-3-8b",
    "architecture": "llama",
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
}


@pytest.mark.parametrize(
    ("run", "per_token"),
    [
        # 16h + 8 + 4D + 4K + 4a + 8f with D = 4096, K = 1024, a = 32, f = 14,336
        ({"framework": "fsdp", "attention": "flash"}, 65536 + 8 + 16384 + 4096 + 128 + 114688),
        # scores: 6 bytes x 32 heads x 4,096 keys; keys and values repeated to all heads: 8D
        ({"framework": "fsdp", "attention": "eager"}, 65536 + 8 + 32768 + 786432 + 114688),
        # Megatron: 8h + 4D + 4K + 6f + 4a + 8
        ({"framework": "megatron"}, 32768 + 16384 + 4096 + 86016 + 128 + 8),
        # compiled: as Megatron, norms and SwiGLU fused
        ({"framework": "fsdp", "compile": True}, 32768 + 16384 + 4096 + 86016 + 128 + 8),
    ],
)
def test_closed_forms_of_llama_3_8b(run: dict[str, Any], per_token: int) -> None:
    block, recipe = recipe_of({"seq_len": 4096, "micro_batch": 1, "precision": "bf16", **run}, LLAMA_3_8B)
    assert layer_line(block, recipe, seq_len=4096).value == per_token


def test_the_34_h_of_the_paper() -> None:
    """GPT layers without flash attention keep s b h (34 + 5 a s / h) bytes with dropout in 16 bit."""
    gpt = {"name": "gpt", "architecture": "gpt2", "layers": 2, "hidden": 1024, "heads": 16, "vocab": 51200}
    run = {
        "framework": "megatron",
        "precision": "fp16",
        "seq_len": 512,
        "micro_batch": 1,
        "attention": "eager",
        "dropout": True,
    }
    block, recipe = recipe_of(run, gpt)
    paper = 34 * 1024 + 5 * 16 * 512
    statistics = 2 * 8  # of the two norms; the paper leaves them out
    assert layer_line(block, recipe, seq_len=512).value == paper + statistics


def test_autocast_keeps_five_casts_where_bf16_keeps_two_inputs() -> None:
    mixed = recipe_of(
        {"framework": "ddp", "precision": "bf16", "seq_len": 512, "micro_batch": 1, "attention": "flash"},
        LLAMA_3_8B,
    )
    parts = {line.name: line.value for line in layer_line(*mixed, seq_len=512).children}
    assert parts["mixer_input"] == 3 * 2 * 4096  # q, k, v
    assert parts["mlp_input"] == 2 * 2 * 4096  # gate, up
    assert parts["input"] == 8 * 4096 + 4  # the residual stream is fp32


@pytest.mark.parametrize(
    ("precision", "ffn", "encoder", "decoder"),
    [
        ("bf16-pure", {"gated_mlp": True, "activation": "gelu_new"}, 923_136, 845_312),
        ("bf16-pure", {"gated_mlp": False, "activation": "relu"}, 554_496, 599_552),
        ("fp32", {"gated_mlp": True, "activation": "gelu_new"}, 1_648_128, 1_492_480),
    ],
)
def test_measured_t5_blocks(precision: str, ffn: dict[str, Any], encoder: int, decoder: int) -> None:
    """Middle blocks of transformers 5.24's T5, two sequences of 96 encoder, 64 decoder tokens, no dropout."""
    spec = {
        "name": "t5", "architecture": "t5", "layers": 3, "decoder_layers": 3, "hidden": 64, "heads": 4,
        "kv_heads": 4, "head_dim": 16, "ffn": 160, "vocab": 320, **ffn,
    }  # fmt: skip
    for stack, tokens, measured in zip(
        build_graph(ModelSpec.read(spec)).stacks, (96, 64), (encoder, decoder), strict=True
    ):
        run = {"framework": "ddp", "precision": precision, "attention": "eager", "dropout": False}
        _, recipe = recipe_of({**run, "seq_len": tokens, "micro_batch": 2}, spec)
        line = layer_line(stack.blocks[0], recipe, seq_len=tokens, memory_tokens=96 / 64)
        assert line.value * 2 * tokens == measured, line.children


# Blocks of litgpt 0.3.0 in bf16: 256 wide, 8 heads of 32, feed-forward of 688, 64 tokens; storages saved per
# token, without tables of angles and of adapters' columns. Attention keeps what the flash kernel keeps, its
# output in the layout of the concatenated queries; a quantised matrix keeps its input, as bitsandbytes' did
# until July 2024.
LITGPT = [
    ("full", 8, 13_224), ("full", 2, 12_200),
    ("lora", 8, 11_112), ("lora", 2, 9_704),
    ("lora nf4", 8, 14_024), ("lora nf4", 2, 12_616),
    ("adapter_v2", 8, 15_624), ("adapter_v2", 2, 13_832),
    ("adapter_v2 nf4", 8, 18_536), ("adapter_v2 nf4", 2, 16_744),
]  # fmt: skip


@pytest.mark.parametrize(("method", "kv_heads", "measured"), LITGPT)
def test_measured_litgpt_blocks(method: str, kv_heads: int, measured: int) -> None:
    spec = {
        "name": "litgpt", "architecture": "llama", "layers": 3, "hidden": 256, "heads": 8,
        "kv_heads": kv_heads, "head_dim": 32, "ffn": 688, "vocab": 512,
    }  # fmt: skip
    run: dict[str, Any] = {
        "framework": "ddp", "precision": "bf16-pure", "attention": "flash", "seq_len": 64, "micro_batch": 1,
        "fused_qkv": True,
    }  # fmt: skip
    if method != "full":
        lora: dict[str, Any] = {"kind": method.split()[0]}
        if lora["kind"] == "lora":
            lora |= {"rank": 8, "targets": ["q_proj", "v_proj"], "dropout": 0.05}
        run |= {"method": "lora", "lora": lora}
    if method.endswith("nf4"):
        run |= {"quantization": "nf4", "year": 2023}
    block, recipe = recipe_of(run, spec)
    line = layer_line(block, recipe, seq_len=64)
    assert line.value == measured, line.children


@pytest.mark.parametrize(
    ("run", "bytes_each"),
    [
        # weight, gradient, states and masters of an adapter's parameter
        ({"framework": "hf", "precision": "bf16"}, (4, 4, 8)),  # PEFT holds adapters in fp32
        ({"framework": "fsdp", "precision": "bf16-pure"}, (2, 2, 4)),
        ({"framework": "deepspeed", "precision": "bf16"}, (2, 2, 12)),  # its engine casts all there is
        ({"framework": "megatron", "precision": "bf16"}, (2, 4, 12)),
        ({"framework": "deepspeed", "precision": "bf16", "lora": {"dtype": "fp32"}}, (4, 4, 8)),
    ],
)
def test_types_adapters_are_held_in(run: dict[str, Any], bytes_each: tuple[int, int, int]) -> None:
    _, recipe = recipe_of({"method": "lora", "seq_len": 64, "micro_batch": 1, **run}, LLAMA_3_8B)
    assert recipe.adapters is not None
    assert (recipe.adapters.element_bytes, recipe.gradient_bytes, recipe.optimizer_bytes) == bytes_each


def test_fsdp_casts_adapters_and_not_their_input() -> None:
    run = {"method": "lora", "precision": "bf16", "seq_len": 64, "micro_batch": 1}
    for framework, element, read in (("fsdp", 4, 2), ("torchtitan", 4, 2), ("hf", 4, 2)):
        _, recipe = recipe_of({**run, "framework": framework}, LLAMA_3_8B)
        assert recipe.adapters is not None
        assert (recipe.adapters.element_bytes, recipe.adapters.input_bytes) == (element, read)
        assert recipe.adapters.casts == (framework == "hf")  # autocast makes a copy per adapter


@pytest.mark.parametrize(
    ("run", "per_token"),
    [
        # layer input 2h, q 2D, v 2K, attention's output 2D and 4a, gate 2f; written out, down's result 2h too
        ({}, 8192 + 8192 + 2048 + 8192 + 128 + 28672 + 8192),
        ({"compile": True}, 8192 + 8192 + 2048 + 8192 + 128 + 28672),
        ({"compile": True, "precision": "nvfp4"}, 8192 + 8192 + 128),
    ],
)
def test_selective_recomputation_of_llama_3_8b(run: dict[str, Any], per_token: int) -> None:
    base = {"framework": "torchtitan", "precision": "bf16", "recompute": "selective-op"}
    block, recipe = recipe_of({**base, "seq_len": 4096, "micro_batch": 1, **run}, LLAMA_3_8B)
    assert selective_line(block, recipe, seq_len=4096).value == per_token


@pytest.mark.parametrize(
    ("modules", "less"),
    [
        (["core_attn"], 0),  # flash attention keeps no scores
        (["layernorm"], 2 * 2 * 4096),
        (["mlp"], 3 * 2 * 14336),
        (["mlp", "layernorm"], 3 * 2 * 14336 + 2 * 4096),  # the feed-forward part needs its input
    ],
)
def test_megatron_modules_of_llama_3_8b(modules: list[str], less: int) -> None:
    base = {"framework": "megatron", "precision": "bf16", "recompute": "selective"}
    run = {**base, "recompute_modules": modules, "seq_len": 4096, "micro_batch": 1}
    block, recipe = recipe_of(run, LLAMA_3_8B)
    whole = layer_line(block, recipe, seq_len=4096).value
    assert whole - selective_line(block, recipe, seq_len=4096).value == less


EXPERTS = {
    "name": "experts", "architecture": "deepseek_v3", "layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 8,
    "ffn": 2048, "vocab": 4096,
    "moe": {"experts": 16, "top_k": 4, "expert_ffn": 512, "shared_expert_ffn": 512},
    "mla": {"q_lora": 256, "kv_lora": 128, "qk_nope": 64, "qk_rope": 32, "v_head": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "less"),
    [
        (["moe_act"], 4 * 2 * 512),
        (["shared_experts"], 3 * 2 * 512),
        # 4 experts' inputs, gate, up and product, indexes; scores and choices; the shared expert
        (["moe"], 4 * (2 * 1024 + 3 * 2 * 512 + 24) + 4 * 16 + 16 * 4 + 3 * 2 * 512),
        # q, k and their up-projection with v: 2 x 96 + 64 + 64 of 8 heads
        (["mla_up_proj"], 2 * 8 * (2 * 96 + 64 + 64)),
    ],
)
def test_megatron_modules_of_experts(modules: list[str], less: int) -> None:
    base = {"framework": "megatron", "precision": "bf16", "recompute": "selective"}
    run = {**base, "recompute_modules": modules, "seq_len": 4096, "micro_batch": 1}
    block, recipe = recipe_of(run, EXPERTS)
    whole = layer_line(block, recipe, seq_len=4096).value
    assert whole - selective_line(block, recipe, seq_len=4096).value == less


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        # 4 experts' inputs in 33/32 bytes, gate and up in two, their product in 33/32, indexes
        ({"precision": "mxfp8"}, 4 * (33 / 32 * (1024 + 512) + 2 * 2 * 512 + 24)),
        (
            {"precision": "mxfp8", "cuda_graphs": "full"},
            1.2 * 4 * (33 / 32 * (1024 + 512) + 2 * 2 * 512 + 24),
        ),
        ({"precision": "bf16"}, 4 * (2 * (1024 + 512) + 2 * 2 * 512 + 24)),
        ({"precision": "bf16", "year": 2024}, 4 * (2 * (2 * 1024 + 512) + 2 * 2 * 512 + 24)),
    ],
)
def test_experts_keep_what_their_products_read(run: dict[str, object], kept: float) -> None:
    base = {"framework": "megatron", "seq_len": 4096, "micro_batch": 1}
    block, recipe = recipe_of({**base, **run}, EXPERTS)
    assert layer_line(block, recipe, seq_len=4096).child("experts").value == pytest.approx(kept)


def test_modules_are_megatrons_and_of_a_selective_recomputation() -> None:
    base = {"seq_len": 64, "micro_batch": 1, "recompute_modules": ["norm"]}
    with pytest.raises(InputError, match="selective recomputation"):
        TrainRun.read({**base, "framework": "megatron"})
    with pytest.raises(InputError, match="does not apply to fsdp"):
        TrainRun.read({**base, "framework": "fsdp", "recompute": "selective"})
    with pytest.raises(InputError, match="not a legal value"):
        TrainRun.read({**base, "framework": "megatron", "recompute": "selective", "recompute_modules": ["x"]})


def test_autocast_takes_softmax_in_fp32() -> None:
    bert = {"name": "bert", "architecture": "bert", "layers": 2, "hidden": 1024, "heads": 16, "vocab": 30522}
    base = {"framework": "hf", "attention": "eager", "seq_len": 512, "micro_batch": 1, "dropout": True}

    def scores(precision: str) -> float:
        block, recipe = recipe_of({**base, "precision": precision}, bert)
        line = layer_line(block, recipe, seq_len=512).child("attention")
        return float(line.value - 4 * recipe.activation_bytes * 1024) / (16 * 512)

    assert scores("fp16") == 4 + 1 + 2  # softmax's result, dropout's mask, what is left in 16 bit
    assert scores("fp16-pure") == 2 + 1 + 2
    assert scores("fp32") == 4 + 1 + 4


def test_norms_of_one_kernel_beside_layers_written_out() -> None:
    base: dict[str, Any] = {"precision": "bf16", "seq_len": 64, "micro_batch": 1}

    def norms(**run: Any) -> float:
        block, recipe = recipe_of({**base, **run}, LLAMA_3_8B)
        line = layer_line(block, recipe, seq_len=64)
        names = {norm.name for norm in block.norms}
        return float(sum(child.value for child in line.children if child.name in names))

    written_out, fused = 2 * (6 * 4096 + 4), 2 * (2 * 4096 + 4)
    assert norms(framework="fsdp") == norms(framework="torchtitan", year=2024) == written_out
    assert norms(framework="torchtitan") == norms(framework="fsdp", fused_norms=True) == fused
    assert norms(framework="torchtitan", fused_norms=False) == written_out


def test_a_matrix_in_four_bits_keeps_no_input_since_july_2024() -> None:
    run = {"framework": "hf", "precision": "bf16", "seq_len": 64, "micro_batch": 1, "method": "qlora"}
    block, old = recipe_of({**run, "year": 2023}, LLAMA_3_8B)
    _, new = recipe_of(run, LLAMA_3_8B)
    _, wide = recipe_of({**run, "quantization": "int8"}, LLAMA_3_8B)
    # Inputs of q, k, v and of gate and up (4,096 wide), and of down (14,336), 2 bytes each; the output
    # projection's is the attention's result, which its fp32 adapter copies.
    gone = layer_line(block, old, seq_len=64).value - layer_line(block, new, seq_len=64).value
    assert gone == 2 * (4096 + 4096 + 14336)
    assert layer_line(block, wide, seq_len=64).value == layer_line(block, old, seq_len=64).value
