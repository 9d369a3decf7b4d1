"""Engines that allocate for the requests at hand: llama.cpp, Transformers."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Attention
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.serve_cache import (
    growing,
    standing,
)
from gpucalc.plan.serve_parts import (
    SET_ASIDE_ERROR,
    WEIGHTS_ERROR,
    Parts,
    logged_line,
    nothing,
)
from gpucalc.plan.serve_weights import routed
from gpucalc.plan.serving_layout import ServingMemory
from gpucalc.units import GIB

SWA_PAD = 256  # llama.cpp rounds sliding caches up to this many tokens


class Static(Parts):
    """A stage whose cache is as large as what was asked for."""

    def memory(self) -> ServingMemory:
        """The stage's answer."""
        recipe = self.recipe
        slots = recipe.max_num_seqs
        length = recipe.max_model_len if recipe.engine == "llamacpp" else recipe.context
        context = length * slots
        per_token, fixed = growing(self.kinds), self._standing(slots, length)
        cache = compute(
            "kv_cache", mem.request_bytes, tokens=context, token_bytes=per_token, fixed_bytes=fixed
        )
        if recipe.engine == "llamacpp":
            buffer = logged_line("activation_peak", self.logged.activation_peak) or self._compute_buffer(
                context
            )
        else:
            buffer = logged_line("activation_peak", self.logged.activation_peak) or self._temporaries(slots)
        outside = self.non_torch()
        others = self.in_use()
        draft = self._draft_buffer(context)
        parts = (others, self.weights, cache, buffer, draft, outside)
        tree = total("memory", tuple(part for part in parts if part.value), unit="bytes", kind=Kind.MODELLED)
        whole = Line("gpu_memory", self.total.value, "bytes", self.total.kind, source=self.total.source)
        left = (
            self.total.value - others.value - self.weights.value - buffer.value - draft.value - outside.value
        )
        pool = Line("pool", left, "bytes", Kind.MODELLED, note="what weights, buffers and context leave")
        tokens = Line("kv_tokens", context, "tokens", source="the context that was asked for")
        top = max(parts, key=lambda line: line.value).name
        refusal = None
        if tree.value > whole.value:
            refusal = f"needs {tree.value / GIB:.2f} GiB of {whole.value / GIB:.2f} GiB"
        return ServingMemory(
            tree=tree,
            weights=self.weights,
            budget=whole,
            pool=pool,
            kv_bytes_per_token=per_token,
            state_bytes=standing(self.kinds),
            kv_tokens=tokens,
            kv_blocks=Line("kv_blocks", context, "count", source="one token each"),
            max_concurrency=Line("max_concurrency", slots, "requests", source="slots that were asked for"),
            seats=Line("requests_in_cache", slots, "requests", source="slots that were asked for"),
            peak=tree,
            needed=tree,
            capacity=whole,
            binds=top,
            uncertain_bytes=WEIGHTS_ERROR * self.weights.value
            + SET_ASIDE_ERROR * (buffer.value + outside.value),
            stage=self.stage.index,
            refusal=refusal,
        )

    def _standing(self, slots: int, length: int) -> float:
        """States and windows of all slots; windows hold the micro-batch at hand as well."""
        held = 0.0
        batch = int(self.engine.number("micro_batch_tokens", 0))
        for kind in self.kinds:
            each = slots * float(kind.fixed.value)
            if kind.window is not None:
                kept = min(length * slots, _padded(kind.window * slots + batch))
                each += kept * float(kind.token.value)
            held += kind.layers * each
        return held

    def _draft_buffer(self, context: int) -> Line:
        """The compute buffer of the model that drafts, which llama.cpp runs in a context of its own."""
        if not isinstance(self.draft, Static):
            return nothing("draft_activation_peak")
        return replace(self.draft._compute_buffer(context), name="draft_activation_peak")

    def _temporaries(self, slots: int) -> Line:
        """What whole prompts computed at once hold: the feed-forward part, or attention where larger."""
        recipe = self.recipe
        width = compute(
            "activation_peak",
            mem.prefill_temporary_bytes,
            tokens=recipe.isl * slots,
            widest=self._widest() or self._active_width(),
            ffn_copies=self.engine.line("prefill_ffn_copies"),
            hidden=self.hidden,
            stream_copies=self.engine.line("prefill_stream_copies"),
            element_bytes=recipe.dtype_bytes,
            kind=Kind.MODELLED,
        )
        scores = compute(
            "activation_peak",
            mem.eager_score_bytes,
            sequences=slots,
            heads=self._score_heads(),
            queries=recipe.isl,
            keys=recipe.isl,
            kind=Kind.MODELLED,
        )
        return max(width, scores, key=lambda line: line.value)

    def _compute_buffer(self, context: int) -> Line:
        tokens = min(self.recipe.max_num_batched_tokens, int(self.engine.number("micro_batch_tokens", 512)))
        return compute(
            "activation_peak",
            mem.compute_buffer_bytes,
            tokens=tokens,
            vocab=self.vocab if self.stage.last else 0,
            logit_copies=self.engine.line("logit_copies"),
            hidden=self.hidden,
            stream_copies=self.engine.line("forward_stream_copies"),
            score_heads=self._score_heads(),
            context=context,
            kind=Kind.MODELLED,
        )

    def _score_heads(self) -> int:
        """Heads whose scores of a micro-batch against the whole context are held."""
        if not self.engine.number("attention_scores", 0):
            return 0
        mixers = (run.block.mixer for run in self.stage.layers if run.in_trunk)
        return max((mixer.heads for mixer in mixers if isinstance(mixer, Attention)), default=0)

    def _active_width(self) -> int:
        moe = routed(self.stage)
        return moe.top_k * moe.expert_ffn if moe is not None else 0


def _padded(tokens: int) -> int:
    return -(-tokens // SWA_PAD) * SWA_PAD
