"""Mixers whose state does not grow with context."""

from __future__ import annotations

from gpucalc.builders.parts import Draft
from gpucalc.errors import InputError
from gpucalc.graph import Linear, Shard, StateMixer, Vector
from gpucalc.spec.model import LinearAttentionSpec


def mamba(d: Draft, hidden: int) -> StateMixer:
    """Mamba when the description has dt_rank and no heads, Mamba-2 when it has heads."""
    ssm = d.spec.ssm
    if ssm is None:
        raise InputError(
            f"{d.spec.label} has Mamba layers without an ssm group", key="model.ssm", legal="state, conv, ..."
        )
    if ssm.heads is not None:
        return _mamba2(d, hidden)
    inner, state = ssm.expand * hidden, ssm.state
    rank = ssm.dt_rank if ssm.dt_rank is not None else -(-hidden // 16)
    vectors = [
        Vector("conv", inner * (ssm.conv + 1), Shard.COLUMN),
        Vector("a_log", inner * state, Shard.COLUMN),
        Vector("d", inner, Shard.COLUMN),
    ]
    if d.traits.ssm_norms:
        vectors.append(Vector("dt_b_c_norms", rank + 2 * state))
    return StateMixer(
        kind="mamba",
        hidden=hidden,
        inner=inner,
        heads=inner,
        key_dim=state,
        value_dim=1,
        linears=(
            Linear("in", hidden, 2 * inner),
            Linear("x", inner, rank + 2 * state, shard=Shard.ROW),
            Linear("dt", rank, inner, True),
            Linear("out", inner, hidden, shard=Shard.ROW),
        ),
        vectors=tuple(vectors),
        conv=ssm.conv,
        conv_width=inner,
    )


def _mamba2(d: Draft, hidden: int) -> StateMixer:
    ssm = d.spec.ssm
    assert ssm is not None
    assert ssm.heads is not None
    if ssm.head_dim is None:
        raise InputError(
            f"{d.spec.label}: Mamba-2 layers need a head width",
            key="model.ssm.head_dim",
            legal="a whole number",
        )
    inner = ssm.heads * ssm.head_dim
    mixed = inner + 2 * ssm.groups * ssm.state
    return StateMixer(
        kind="mamba2",
        hidden=hidden,
        inner=inner,
        heads=ssm.heads,
        key_dim=ssm.state,
        value_dim=ssm.head_dim,
        linears=(
            Linear("in", hidden, inner + mixed + ssm.heads),
            Linear("out", inner, hidden, shard=Shard.ROW),
        ),
        vectors=(
            Vector("conv", mixed * (ssm.conv + 1), Shard.COLUMN),
            Vector("a_log_d_dt", 3 * ssm.heads, Shard.COLUMN),
            *((Vector("norm", inner, Shard.COLUMN),) if ssm.norm else ()),
        ),
        conv=ssm.conv,
        conv_width=mixed,
    )


def linear_attention(d: Draft, hidden: int) -> StateMixer:
    """Gated delta net, Kimi delta attention, lightning attention, and what keeps numbers per channel."""
    spec = d.spec.linear_attention
    if spec is None:
        raise InputError(
            f"{d.spec.label} has linear-attention layers without their group",
            key="model.linear_attention",
            legal="kind, key_heads, value_heads, key_dim, value_dim, conv",
        )
    if spec.kind in ("short_conv", "rwkv", "rg_lru"):
        return _per_channel(spec, hidden)
    key, value = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    mixed = 2 * key + value
    if spec.kind == "gated_deltanet":
        linears: tuple[Linear, ...] = (
            Linear("qkvz", hidden, mixed + value),
            Linear("ba", hidden, 2 * spec.value_heads),
            Linear("out", value, hidden, shard=Shard.ROW),
        )
        vectors: tuple[Vector, ...] = (
            Vector("conv", mixed * spec.conv, Shard.COLUMN),
            Vector("a_log_dt", 2 * spec.value_heads, Shard.COLUMN),
            Vector("norm", spec.value_dim),
        )
    elif spec.kind == "kda":
        # Forget and output gates go through a bottleneck as wide as one head.
        linears = (
            Linear("q", hidden, key),
            Linear("k", hidden, key),
            Linear("v", hidden, value),
            Linear("forget_a", hidden, spec.key_dim, shard=Shard.REPLICATED),
            Linear("forget_b", spec.key_dim, key),
            Linear("beta", hidden, spec.value_heads),
            Linear("gate_a", hidden, spec.value_dim, shard=Shard.REPLICATED),
            Linear("gate_b", spec.value_dim, value),
            Linear("out", value, hidden, shard=Shard.ROW),
        )
        vectors = (
            Vector("conv", mixed * spec.conv, Shard.COLUMN),
            Vector("a_log_dt", spec.key_heads + key, Shard.COLUMN),
            Vector("norm", spec.value_dim),
        )
    else:
        linears = (
            Linear("qkv", hidden, mixed),
            Linear("gate", hidden, value),
            Linear("out", value, hidden, shard=Shard.ROW),
        )
        vectors = (Vector("norm", value, Shard.COLUMN),)
    return StateMixer(
        kind=spec.kind,
        hidden=hidden,
        inner=value,
        heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        linears=linears,
        vectors=vectors,
        conv=spec.conv,
        conv_width=mixed if spec.conv else 0,
    )


def _per_channel(spec: LinearAttentionSpec, hidden: int) -> StateMixer:
    """Mixers whose channels do not meet: a short convolution (LFM2), RWKV's, RecurrentGemma's."""
    width = spec.value_heads * spec.value_dim
    state = spec.key_dim
    if spec.kind == "short_conv":
        width, state = hidden, 0  # the convolution's own inputs are all there is to keep
        linears: tuple[Linear, ...] = (
            Linear("in", hidden, 3 * hidden),
            Linear("out", hidden, hidden, shard=Shard.ROW),
        )
        vectors: tuple[Vector, ...] = (Vector("conv", hidden * spec.conv, Shard.COLUMN),)
    elif spec.kind == "rwkv":
        linears = (
            *(Linear(name, hidden, width) for name in ("key", "value", "receptance")),
            Linear("out", width, hidden, shard=Shard.ROW),
        )
        vectors = (Vector("decay_first", 2 * width, Shard.COLUMN), Vector("time_mix", 3 * hidden))
    else:
        block = width // spec.key_heads  # the gates are matrices between the channels of one block
        linears = (
            Linear("y", hidden, width, True),
            Linear("x", hidden, width, True),
            Linear("input_gate", block, width, True),
            Linear("recurrent_gate", block, width, True),
            Linear("out", width, hidden, True, Shard.ROW),
        )
        vectors = (
            Vector("conv", width * (spec.conv + 1), Shard.COLUMN),
            Vector("recurrence", width, Shard.COLUMN),
        )
    return StateMixer(
        kind=spec.kind,
        hidden=hidden,
        inner=width,
        heads=width,
        key_dim=state,
        value_dim=1,
        linears=linears,
        vectors=vectors,
        conv=spec.conv,
        conv_width=width if spec.conv else 0,
    )
