"""What server lines say of speculative decoding; the share accepted is on no line, so it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpucalc.importers.words import Words


def vllm_drafts(words: Words) -> None:
    """vLLM's --speculative-config, or the flags before it."""
    stated = words.take("speculative_config")
    told: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    if isinstance(stated, str):
        try:
            read = json.loads(stated)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            raise words.wrong(("speculative_config",), "is not a JSON object", stated)
        told = read
    model = words.text("speculative_model") or told.get("model")
    tokens = words.degree("num_speculative_tokens") or told.get("num_speculative_tokens")
    method = str(told.get("method") or "draft_model")
    _asked(words, model if method == "draft_model" and model != "[ngram]" else None, tokens)


def sglang_drafts(words: Words) -> None:
    """SGLang's --speculative-algorithm and what goes with it."""
    algorithm = (words.text("speculative_algorithm", "speculative_algo") or "").upper()
    model = words.text("speculative_draft_model_path", "speculative_draft_model")
    tokens = words.degree("speculative_num_steps")
    words.skip("speculative_eagle_topk", "speculative_num_draft_tokens")
    if algorithm or model:
        _asked(words, model if algorithm == "STANDALONE" else None, tokens)


def llama_drafts(words: Words) -> None:
    """llama.cpp's -md and --draft-max."""
    model = words.text("model_draft")
    tokens = words.degree("draft_max", "draft")
    words.skip("gpu_layers_draft", "n_gpu_layers_draft", "draft_min", "draft_p_min", "ctx_size_draft")
    if model:
        _asked(words, model, tokens)


def _asked(words: Words, model: Any, tokens: Any) -> None:
    """Ask for what a line leaves open; nothing drafts until it is said."""
    if model is None and tokens is None:
        return
    what = (
        f"--set run.draft_model={model}" if model is not None else "--set run.draft_head_gib=GIB for a head"
    )
    count = tokens if tokens is not None else "N"
    words.ask(
        f"drafting is left out, as what share is accepted is yours to measure; with {what}"
        f" --set run.num_speculative_tokens={count} it is planned",
        "run.acceptance_rate",
    )
