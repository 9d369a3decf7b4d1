"""Seconds of attention and of recurrent state: decoding reads every request's cache, prompts multiply."""

from __future__ import annotations

from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_time as g
from gpucalc.graph import Attention, Block, StateMixer
from gpucalc.line import Line, compute, total
from gpucalc.plan.serve_rates import Load, Rates, older
from gpucalc.spec.hardware import KernelRate

STATE_BYTES = 4  # recurrent state is kept in fp32
# Attention that is not fused writes and reads its scores in 16 bit and fp32, and their softmax in fp32 and
# 16 bit: 24 bytes a score (ggml-org/llama.cpp b2900 ggml-cuda.cu, products by batched cuBLAS and soft_max).
SCORE_PASSES = 6
SCORE_BYTES = 4


class Mixers(Rates):
    """The part of a pass that mixes tokens, on top of a deployment's rates."""

    def mixer(self, block: Block, load: Load) -> list[Line]:
        part = block.mixer
        if isinstance(part, StateMixer):
            return [self._state(part, load)]
        if part is None:
            return []
        lines = [self._state(block.state, load)] if block.state is not None else []
        if load.requests:
            lines.append(self._decode_attention(part, load))
        if load.chunk:
            lines.append(self._chunk_attention(part, load))
        return lines

    def _ungrouped(self) -> bool:
        """Whether this version's decode attention reads keys and values once per query head."""
        return older(self.recipe.version, self.speed.grouped_since)

    def move(self, name: str, moved: Line) -> Line:
        """Time of plain traffic to and from memory."""
        return compute(
            name,
            f.traffic_s,
            bytes_moved=moved,
            bandwidth_bytes_per_s=self.bandwidth,
            hbm_efficiency=self.kernels.elementwise_hbm_efficiency.line("hbm_efficiency"),
        )

    def _heads(self, part: Attention) -> float:
        return max(part.heads / self.layout.tp, 1)

    def cached(self, part: Attention, context: float) -> tuple[float, float, float]:
        """Cached tokens one query reads, bytes of one of them, tokens of index keys read beside."""
        tokens = context
        if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
            tokens = tokens / part.compress_ratio
        index = 0.0
        if part.index_topk is not None:
            index, tokens = tokens, min(tokens, part.index_topk)
        elif part.span is not None:
            tokens = min(tokens, part.span)
        if part.kv_lora:
            width: float = part.kv_lora + (part.rope_dim or 0)
        else:
            sides = part.qk_dim if part.shared_kv else part.qk_dim + part.v_dim
            width = max(part.kv_heads / self.layout.tp, 1) * sides
        share = self.layout.decode_context
        return tokens / share, width * self.recipe.kv_bytes, index / share

    def _decode_attention(self, part: Attention, load: Load) -> Line:
        tokens, token_bytes, index = self.cached(part, load.context)
        moved = compute(
            "bytes", g.cache_read_bytes, requests=load.requests, context=tokens, token_bytes=token_bytes
        )
        heads = self._heads(part)
        if self.speed.rewrites_cache and not part.kv_lora:
            moved = compute(
                "bytes",
                g.rewritten_cache_bytes,
                cache_bytes=moved,
                heads_per_kv=part.heads / max(part.kv_heads, 1),
            )
        elif self._ungrouped():
            moved = compute(
                "bytes",
                g.ungrouped_cache_bytes,
                cache_bytes=moved,
                heads_per_kv=part.heads / max(part.kv_heads, 1),
            )
        qk, v = part.qk_dim, part.v_dim
        if part.kv_lora:  # the projections are folded into query and output: both see the latent
            qk, v = part.kv_lora + (part.rope_dim or 0), part.kv_lora
        flops = compute(
            "flops",
            g.decode_attention_flops,
            requests=load.decoded,
            heads=heads,
            context=tokens,
            qk_dim=qk,
            v_dim=v,
        )
        line = self._attention("decode_attention", self.kernels.attention_decode, flops, moved, decode=True)
        if not (part.index_heads and part.index_dim):
            return line
        keys = compute(
            "bytes", g.cache_read_bytes, requests=load.requests, context=index, token_bytes=part.index_dim
        )
        score = compute(
            "flops",
            g.decode_attention_flops,
            requests=load.decoded,
            heads=part.index_heads,
            context=index,
            qk_dim=part.index_dim,
            v_dim=0,
        )
        indexer = self._attention("indexer", self.kernels.attention_decode, score, keys, decode=True)
        return total("decode_attention", (line, indexer), unit="s")

    def _chunk_attention(self, part: Attention, load: Load) -> Line:
        span = load.before + load.chunk
        if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
            span = span / part.compress_ratio
        if part.index_topk is not None:
            span = min(span, part.index_topk)
        elif part.span is not None:
            span = min(span, part.span)
        prompts = max(load.prompts, 1)
        pairs = compute("pairs", g.chunk_pairs, tokens=load.chunk / prompts, before=load.before, span=span)
        flops = compute(
            "flops",
            f.attention_core_flops,
            sequences=prompts,
            heads=self._heads(part),
            qk_dim=part.qk_dim,
            v_dim=part.v_dim,
            pairs=pairs,
        )
        moved = compute(
            "bytes",
            f.attention_io_bytes,
            tokens=load.chunk + prompts * load.before,
            heads=self._heads(part),
            kv_heads=max(part.kv_heads / self.layout.tp, 1),
            qk_dim=part.qk_dim,
            v_dim=part.v_dim,
            element_bytes=self.recipe.dtype_bytes,
        )
        line = self._attention("prompt_attention", self.kernels.attention, flops, moved, decode=False)
        if self.unfused:
            scores = compute(
                "bytes",
                f.score_traffic_bytes,
                sequences=prompts,
                heads=self._heads(part),
                queries=load.chunk / prompts,
                keys=load.before + load.chunk / prompts,
                passes=SCORE_PASSES,
                score_bytes=SCORE_BYTES,
            )
            line = total("prompt_attention", (line, self.move("scores", scores)), unit="s")
        if not (part.index_heads and part.index_dim):
            return line
        score = compute(
            "flops",
            f.attention_core_flops,
            sequences=prompts,
            heads=part.index_heads,
            qk_dim=part.index_dim,
            v_dim=0,
            pairs=compute(
                "pairs",
                g.chunk_pairs,
                tokens=load.chunk / prompts,
                before=load.before,
                span=load.before + load.chunk,
            ),
        )
        indexer = self._attention("indexer", self.kernels.attention, score, moved, decode=False)
        return total("prompt_attention", (line, indexer), unit="s")

    def _attention(self, name: str, rate: KernelRate, flops: Line, moved: Line, *, decode: bool) -> Line:
        peak = self.gpu.peak("fp16" if self.wide == "fp16_fp16acc" else self.wide)
        if peak is None:  # cards that only state the rate with 16-bit accumulation
            peak = self.gpu.peak(self.wide)
        assert peak is not None
        hbm = rate.hbm_efficiency.line("alone")
        if decode:
            hbm = compute(
                "hbm_efficiency",
                f.in_step_efficiency,
                alone=hbm,
                training_efficiency=self.speed.attention_share.line("attention_share"),
            )
        return compute(
            name,
            f.attention_s,
            flops=flops,
            bytes_moved=moved,
            peak_flops_per_s=peak,
            efficiency=rate.mfu_max.line("mfu_max"),
            bandwidth_bytes_per_s=self.bandwidth,
            hbm_efficiency=hbm,
            p=rate.p.line("p"),
            overhead_s=0.0 if decode else rate.overhead.line("overhead"),
        )

    def _state(self, part: StateMixer, load: Load) -> Line:
        heads = max(part.heads / self.layout.tp, 1)
        moved = compute(
            "bytes",
            g.state_bytes,
            requests=load.requests + load.prompts,
            heads=heads,
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            element_bytes=STATE_BYTES,
        )
        flops = compute(
            "flops",
            f.state_mixer_flops,
            tokens=load.rows,
            heads=heads,
            key_dim=part.key_dim,
            value_dim=part.value_dim,
            chunk=1 if not load.chunk else 256,
        )
        return self._attention("state", self.kernels.attention_decode, flops, moved, decode=True)
