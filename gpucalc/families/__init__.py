"""What a family implies beyond the shapes: the one table to extend when a new architecture appears.

A row is named by the `model_type` of a public config.json and says what transformers 5.24.0 builds
for it, checked by instantiating on the meta device. A trait written in a model file wins.
"""

from __future__ import annotations

from gpucalc.families.decoders import EXPERTS, HYBRIDS, PLAIN
from gpucalc.families.encoders import ENCODERS, IMAGES
from gpucalc.families.family import Family

# Known by name and not drawn: better a plain word than a number that is near.
_REFUSED = {
    "grok_1": "no public class that a drawing could be counted against",
    "gemma3n": "per-layer inputs and alternating updates of several residual streams",
    "mllama": "layers that look across at an image have no drawing beside the decoder's own",
}
FAMILIES: dict[str, Family] = {
    **PLAIN,
    **EXPERTS,
    **HYBRIDS,
    **ENCODERS,
    **IMAGES,
    **{name: Family(refused=why) for name, why in _REFUSED.items()},
}

# Other names people use for a row: names in papers and logs, nested model types, renamed classes.
SYNONYMS: dict[str, str] = {
    "gpt": "gpt2",
    "gpt3": "gpt2",
    "gpt_sw3": "gpt2",
    "megatron_gpt": "gpt2",
    "camembert": "roberta",
    "command_r": "cohere",
    "deepseek": "deepseek_v3",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm_4": "glm4",
    "granitemoe_hybrid": "granitemoehybrid",
    "grok": "grok_1",
    "hunyuan": "hunyuan_v1_moe",
    "internlm": "internlm2",
    "kimi": "deepseek_v3",
    "llama4_text": "llama4",
    "mimo": "mimo_v2_flash",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "ministral": "mistral",
    "mllama_text_model": "mllama",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "refinedwebmodel": "falcon",
    "xlm_roberta": "roberta",
}


def canonical(name: str) -> str:
    """The table's spelling of a family or model type."""
    key = name.strip().lower().replace("-", "_").replace(".", "_").replace(" ", "_")
    return SYNONYMS.get(key, key)


__all__ = ["FAMILIES", "SYNONYMS", "Family", "canonical"]
