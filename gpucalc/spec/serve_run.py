"""A serving deployment: its keys, and which of their values contradict each other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gpucalc.spec.base import Spec, refuse
from gpucalc.spec.run_keys import SERVE_KEYS, belongs
from gpucalc.spec.run_values import (
    FLOAT_NAMES,
    KV_DTYPES,
    MAX_DEGREE,
    SERVE_DTYPES,
    SERVE_FRAMEWORKS,
    Degree,
    Flag,
    Quant,
    Tokens,
    named,
    real,
    whole,
)


class ServeRun(Spec):
    """One serving deployment."""

    task: Literal["serve"] = "serve"
    framework: Annotated[
        Literal["vllm", "sglang", "trtllm", "llamacpp", "hf"],
        named(SERVE_FRAMEWORKS, {"llama.cpp": "llamacpp", "tensorrt-llm": "trtllm", "transformers": "hf"}),
    ]
    version: str | None = None
    dtype: Annotated[str, named(SERVE_DTYPES, FLOAT_NAMES)] = "bf16"
    quant: Quant | None = None
    kv_dtype: Annotated[str, named(KV_DTYPES, FLOAT_NAMES)] = "auto"
    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    ep: Degree = 1
    decode_context_parallel: Annotated[int, whole(MAX_DEGREE)] = Field(
        default=1, description="ranks of a tensor group that share one sequence's cache"
    )
    max_model_len: Tokens | None = None
    block_size: Annotated[int, whole(4096)] | None = Field(default=None, description="tokens per cache block")
    max_num_seqs: Annotated[int, whole(10**6)] | None = None
    max_num_batched_tokens: Tokens | None = None
    gpu_memory_utilization: (
        Annotated[float, real(0, 1, "a fraction above 0, at most 1: 0.9 is 90 %")] | None
    ) = None
    mem_fraction_static: Annotated[float, real(0, 1, "a fraction above 0, at most 1")] | None = None
    enforce_eager: Flag = False
    memory_in_use_gib: Annotated[float, real(0, 1e6, "GiB above 0")] | None = Field(
        default=None, description="memory the display and other processes hold on each card"
    )
    isl: Tokens | None = Field(default=None, description="input tokens per request")
    osl: Tokens | None = Field(default=None, description="output tokens per request")
    concurrency: Annotated[int, whole(10**6)] | None = Field(default=None, description="requests in flight")
    request_rate: Annotated[float, real(0, 1e6, "requests per second above 0")] | None = Field(
        default=None, description="requests per second that arrive; how many are in flight follows"
    )
    ttft_ms: Annotated[float, real(0, 1e9, "milliseconds above 0")] | None = Field(
        default=None, description="target: time to first token"
    )
    tpot_ms: Annotated[float, real(0, 1e9, "milliseconds above 0")] | None = Field(
        default=None, description="target: time per output token"
    )
    prefix_hit_rate: Annotated[float, real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="share of prompt tokens found in the prefix cache"
    )
    num_speculative_tokens: Annotated[int, whole(64)] | None = Field(
        default=None, description="tokens drafted per pass of the model"
    )
    acceptance_rate: Annotated[float, real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="probability that a drafted token is accepted, those before it being so"
    )
    draft_model: str | None = Field(
        default=None, description="smaller model that drafts: a catalogue id or a path, as of model"
    )
    draft_head_gib: Annotated[float, real(0, 1e4, "GiB above 0")] | None = Field(
        default=None, description="weights of a head that drafts (EAGLE, MTP), over the tensor group"
    )
    draft_cost: Annotated[float, real(0, 1, "a share above 0, at most 1")] | None = Field(
        default=None, description="time of one draft pass over that of a pass of the model"
    )
    prefill_replicas: Annotated[int, whole(10**6)] | None = Field(
        default=None, description="copies of the engine that only compute prompts; the others only decode"
    )

    @field_validator("*", mode="after")
    @classmethod
    def _agrees(cls, value: Any, info: ValidationInfo) -> Any:
        belongs(info.field_name or "", value, info.data.get("framework"), SERVE_KEYS)
        return value

    @model_validator(mode="after")
    def _one_load(self) -> ServeRun:
        if self.concurrency is not None and self.request_rate is not None:
            raise refuse("concurrency and request_rate each say how much is asked", legal="one of the two")
        return self

    @model_validator(mode="after")
    def _speculation(self) -> ServeRun:
        given = [self.num_speculative_tokens, self.acceptance_rate]
        if any(item is not None for item in given) and None in given:
            raise refuse(
                "num_speculative_tokens and acceptance_rate say together what speculation brings",
                legal="both, or neither",
            )
        for key in ("draft_cost", "draft_model", "draft_head_gib"):
            if getattr(self, key) is not None and self.num_speculative_tokens is None:
                raise refuse(f"{key} says nothing without num_speculative_tokens", legal="both, or neither")
        if self.draft_model is not None and self.draft_head_gib is not None:
            raise refuse("draft_model and draft_head_gib each say what drafts", legal="one of the two")
        if self.draft_model is not None and self.draft_cost is not None:
            raise refuse("draft_cost is worked out from draft_model", legal="one of the two")
        return self

    @classmethod
    def explain_unknown(cls, key: str) -> str | None:
        """Why a key that is unknown here may have been meant."""
        from gpucalc.spec.train_run import TrainRun  # error path only: each kind of run knows the other

        return "is a key of training runs, not of serving" if key in TrainRun.model_fields else None
