"""Weights files as models: exact bytes by part and type, and the architecture that GGUF metadata states."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.gguf import Gguf, read_gguf
from gpucalc.importers.huggingface import Imported, from_config
from gpucalc.importers.safetensors import Tensor, read_header, read_index
from gpucalc.spec.model import WeightsSpec

INDEX = ".safetensors.index.json"
_INDEX_NAMES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
_SINGLE_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
# Stored beside weights and no parameters: rotary tables, counters, scales of quantised tensors.
_NO_PARAMETERS = (
    "rope_freqs.weight", "rotary_emb.inv_freq", "num_batches_tracked", "position_ids", "masked_bias",
    "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "weight_shape", "qzeros", "scales",
    "g_idx", "weight_zero_point", "k_scale", "v_scale", "absmax", "quant_map", "_scales",
)  # fmt: skip
_PACKED = ("qweight", "weight_packed")


def beside(folder: Path) -> Path | None:
    """The safetensors file or index of a model folder, None without one."""
    return next(
        (folder / name for name in (*_INDEX_NAMES, *_SINGLE_NAMES) if (folder / name).is_file()), None
    )


def read_weights(path: str | Path) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors of a weights file or index, and what in it does not agree. Raises InputError."""
    name = Path(path).name.lower()
    if name.endswith(INDEX):
        return read_index(path)
    if name.endswith(".gguf"):
        return read_gguf(path).tensors, ()
    if name.endswith(".safetensors"):
        return read_header(path), ()
    raise InputError(
        "is no weights file with a reader", where=str(path), legal=".safetensors, its index, .gguf"
    )


def measured(tensors: Iterable[Tensor], bits: int | None = None) -> WeightsSpec:
    """Bytes of the tensors by element type and by part of the model; `bits` of what is packed in integers."""
    types: dict[str, int] = {}
    parts: dict[str, int] = {}
    params: dict[str, int] = {}
    for tensor in tensors:
        types[tensor.dtype] = types.get(tensor.dtype, 0) + tensor.bytes
        part = part_of(tensor)
        parts[part] = parts.get(part, 0) + tensor.bytes
        params[part] = params.get(part, 0) + parameters((tensor,), bits)
    return WeightsSpec(
        total_bytes=sum(types.values()), bytes_by_type=types, bytes_by_part=parts, params_by_part=params
    )


def packed_bits(quantization: str | None) -> int | None:
    """The bits in a quantisation's words: `gptq 4-bit` is 4."""
    match = re.search(r"(\d)-bit", quantization or "")
    return int(match[1]) if match else None


def part_of(tensor: Tensor) -> str:
    """vision | experts | embedding | head | linear | rest, by the names published checkpoints use."""
    name = tensor.name
    if name.startswith(("vision", "visual", "model.vis", "v.", "mm.", "multi_modal", "model.multi_modal")):
        return "vision"
    if (".experts." in name or "_exps." in name) and "shared_expert" not in name:
        return "experts"
    if any(word in name for word in ("embed_tokens", "token_embd", "wte.", "word_embeddings", "embed_in")):
        return "embedding"
    if name.startswith(("lm_head", "output.weight", "embed_out", "language_model.lm_head")):
        return "head"
    return "linear" if len([side for side in tensor.shape if side > 1]) > 1 else "rest"


def parameters(tensors: Iterable[Tensor], bits: int | None = None) -> int:
    """Parameters the tensors hold: packed integers count as what is packed, scales and tables not at all."""
    total = 0.0
    for tensor in tensors:
        if tensor.name.endswith(_NO_PARAMETERS):
            continue
        packed = tensor.name.endswith(_PACKED) and tensor.dtype in ("I32", "U32") and bits
        total += tensor.elements * 32 / bits if packed and bits else tensor.elements
    return round(total)


# -- GGUF -----------------------------------------------------------------------------------------

# llama.cpp's architectures that are a known architecture under another name.
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3", "phi2": "phi",
    "starcoder2": "starcoder2", "falcon": "falcon", "gpt2": "gpt2", "bloom": "bloom", "mpt": "mpt",
    "stablelm": "stablelm", "command-r": "cohere", "deepseek2": "deepseek_v3", "granite": "granite",
    "olmo2": "olmo2", "glm4": "glm4", "smollm3": "smollm3", "gpt-oss": "gpt_oss", "internlm2": "internlm2",
    "olmoe": "olmoe", "nemotron": "nemotron", "mistral": "mistral",
}  # fmt: skip
# general.file_type, as llama.cpp numbers its mixes.
FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s",
    12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k",
    19: "iq2_xxs", 20: "iq2_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 30: "iq4_xs",
    32: "bf16",
}  # fmt: skip


def from_gguf(path: str | Path) -> tuple[Imported, str | None]:
    """The model a GGUF file describes, with its exact bytes, and the name of its quantisation.

    Raises InputError, UnsupportedModel for an architecture without a drawing.
    """
    read = read_gguf(path)
    where = str(path)
    config, assumed = _config(read, where)
    imported = from_config(
        config, where=where, name=str(read.metadata.get("general.name") or Path(path).stem)
    )
    kind = read.metadata.get("general.file_type")
    quant = FILE_TYPES.get(kind) if isinstance(kind, int) else None
    update = {"weights": measured(read.tensors), "quantization": quant}
    spec = imported.spec.model_copy(update=update)
    notes = [note for note in imported.assumed if "tie_word" not in note]
    return Imported(spec, tuple(read.metadata), (*assumed, *notes), ()), quant


def _config(read: Gguf, where: str) -> tuple[dict[str, Any], list[str]]:
    """GGUF metadata in the words of a config.json."""
    facts = read.metadata
    name = facts.get("general.architecture")
    if not isinstance(name, str):
        raise InputError("missing", where=where, key="general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            "no drawing for this architecture", where=where, key="general.architecture", given=name,
            legal=", ".join(ARCHITECTURES),
        )  # fmt: skip

    def fact(key: str) -> Any:
        value = facts.get(f"{name}.{key}")
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise UnsupportedModel("differs from layer to layer", where=where, key=f"{name}.{key}")
            return value[0] if value else None
        return value

    shapes = {tensor.name: tensor.shape for tensor in read.tensors}
    heads, experts = fact("attention.head_count"), fact("expert_count")
    model_type = ARCHITECTURES[name]
    if model_type == "llama" and experts:
        model_type = "mixtral"
    table = shapes.get("token_embd.weight")
    vocab = table[0] if table is not None and len(table) == 2 else fact("vocab_size")
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": fact("embedding_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv"),
        "head_dim": fact("attention.key_length"),
        "intermediate_size": fact("feed_forward_length"),
        "max_position_embeddings": fact("context_length"),
        "vocab_size": vocab,
        "sliding_window": fact("attention.sliding_window"),
        "num_local_experts": experts or None,
        "num_experts_per_tok": fact("expert_used_count"),
        "moe_intermediate_size": fact("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fact("expert_shared_feed_forward_length"),
        "n_shared_experts": fact("expert_shared_count"),
        "first_k_dense_replace": fact("leading_dense_block_count"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "qkv_bias": any(f"blk.0.{part}.bias" in shapes for part in ("attn_q", "attn_qkv")),
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }
    if model_type == "qwen2":
        config["use_sliding_window"] = False
    if model_type == "falcon":  # two norms before a layer's parts: the second architecture
        kv = fact("attention.head_count_kv")
        config |= {
            "multi_query": kv == 1,
            "parallel_attn": True,
            "new_decoder_architecture": "blk.0.attn_norm_2.weight" in shapes,
            "num_kv_heads": kv,
        }
    assumed: list[str] = []
    low = fact("attention.kv_lora_rank")
    if low:
        rope = fact("rope.dimension_count")
        width, value = fact("attention.key_length_mla"), fact("attention.value_length_mla")
        width = width or fact("attention.key_length")
        value = value or fact("attention.value_length")
        config |= {
            "kv_lora_rank": low,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": width - rope if width and rope else None,
            "v_head_dim": value,
        }
    stated = {key: value for key, value in config.items() if value is not None}
    for key, other in (("q_lora_rank", "attention.q_lora_rank"), ("n_shared_experts", "expert_shared_count")):
        stated.setdefault(key, fact(other))  # left out of a file means none
    return stated, assumed
