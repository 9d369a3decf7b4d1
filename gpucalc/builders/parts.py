"""Pieces every builder uses: merged traits, and attention, feed-forward and norm parts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.families import FAMILIES, Family, canonical
from gpucalc.graph import Attention, FeedForward, Linear, Mlp, Moe, Norm, Shard, Vector
from gpucalc.spec.model import ModelSpec

_ROPE = {"rope": "full", "rope_partial": "partial"}


@dataclass(slots=True)
class Draft:
    """A description with its family's traits merged in, and what had to be assumed on the way."""

    spec: ModelSpec
    key: str
    traits: Family
    notes: list[str]

    def need(self, *names: str) -> tuple[int, ...]:
        """The whole numbers of these fields. Raises InputError naming every missing one."""
        missing = [name for name in names if getattr(self.spec, name) is None]
        if missing:
            raise InputError(
                f"{self.spec.label} ({self.key}) cannot be drawn without {', '.join(missing)}",
                key=f"model.{missing[0]}",
                legal="a whole number, or a catalogue id for the whole model",
            )
        return tuple(getattr(self.spec, name) for name in names)

    def assume(self, text: str) -> None:
        """Record something the description left open."""
        if text not in self.notes:
            self.notes.append(text)

    def ffn(self) -> int:
        """Feed-forward width, or the family's usual multiple of hidden, noted."""
        if self.spec.ffn is None and self.traits.ffn_ratio and self.spec.hidden:
            self.assume(f"ffn not stated: {self.traits.ffn_ratio} x hidden, as {self.key} models have it")
            return self.traits.ffn_ratio * self.spec.hidden
        return self.need("ffn")[0]

    def vocab(self) -> int:
        """Vocabulary, or the family's usual one, noted."""
        if self.spec.vocab is None and self.traits.vocab:
            self.assume(f"vocab not stated: {self.traits.vocab}, as the published {self.key} has it")
            return self.traits.vocab
        return self.need("vocab")[0]

    def positions(self) -> int:
        """Entries of the learned position table, 0 when there is none."""
        if self.traits.position_kind != "learned":
            return self.spec.positions or 0
        stated = self.spec.positions if self.spec.positions is not None else self.traits.positions
        if stated is None:
            return self.need("positions")[0]
        if self.spec.positions is None:
            self.assume(f"positions not stated: a table of {stated}, as the published {self.key} has it")
        return stated + self.traits.position_offset


def draft(spec: ModelSpec) -> Draft:
    """The description merged with its family. Raises UnsupportedModel for an unknown or refused one."""
    name = spec.architecture or spec.family
    if name is None:
        raise InputError(
            f"{spec.label} states neither architecture nor family, so its layers are unknown",
            key="model.architecture",
            legal="the model_type of a config.json, or a catalogue id for the whole model",
        )
    key = canonical(name)
    # Inline mappings name a family alone; these three hold more than one architecture.
    if spec.architecture is None:
        if key == "deepseek_v3" and spec.mla is None:
            key = "llama"
        elif key == "qwen2" and spec.moe is not None:
            key = "qwen2_moe"
        elif key == "llama" and spec.moe is not None:
            key = "mixtral"
    family = FAMILIES.get(key)
    if family is None:
        from gpucalc.errors import nearest

        raise UnsupportedModel(
            "no drawing for this architecture",
            key="model.architecture",
            given=name,
            near=nearest(key, [known for known, row in FAMILIES.items() if not row.refused]),
        )
    if family.refused:
        raise UnsupportedModel(f"{name}: {family.refused}", key="model.architecture")
    return Draft(spec=spec, key=key, traits=merged(family, spec), notes=[])


_TRAITS = (
    "norm",
    "qk_norm",
    "activation",
    "gated_mlp",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "parallel_block",
    "layer_scale",
    "norms_per_block",
    "post_norm",
    "final_norm",
    "head_bias",
    "position_kind",
    "tied_embeddings",
    "token_types",
    "head",
)
assert set(_TRAITS) <= {f.name for f in fields(Family)}


def merged(family: Family, spec: ModelSpec) -> Family:
    """The family with the traits that the description states in their place."""
    stated = {name: getattr(spec, name) for name in _TRAITS if getattr(spec, name) is not None}
    if spec.norm_bias is False and family.norm == "layernorm":
        stated.setdefault("norm", "layernorm_nobias")
    return replace(family, **stated) if stated else family


def norm(name: str, kind: str, width: int) -> Norm:
    """A norm of that kind; only a plain layer norm has a bias, and some have no weight either."""
    weights = 2 if kind == "layernorm" else 0 if kind.endswith("_noweight") else 1
    return Norm(name, kind, width, weights * width)


def attention(
    d: Draft,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_dim: int | None = None,
    kind: str = "full",
    span: int | None = None,
    causal: bool = True,
    shared_kv: bool = False,
    sinks: bool = False,
    key_bias: bool | None = None,
) -> Attention:
    """Multi-head, grouped-query or multi-query attention with the family's biases and norms."""
    t = d.traits
    v_dim = head_dim if v_dim is None else v_dim
    q, k, v = heads * head_dim, kv_heads * head_dim, kv_heads * v_dim
    packed = t.qkv != "split"
    if packed:
        linears = [Linear("qkv", hidden, q + k + v, t.qkv_bias)]
    else:
        linears = [
            Linear("q", hidden, 2 * q if t.query_gate else q, t.qkv_bias),
            Linear("k", hidden, k, t.qkv_bias if key_bias is None else key_bias),
        ]
        if not shared_kv:
            linears.append(Linear("v", hidden, v, t.qkv_bias))
    linears.append(Linear("o", heads * v_dim, hidden, t.o_bias, Shard.ROW))
    vectors: list[Vector] = []
    if t.qk_norm == "head":
        vectors += [Vector("q_norm", head_dim), Vector("k_norm", head_dim)]
    elif t.qk_norm == "head_layernorm":
        vectors += [Vector("q_norm", 2 * head_dim), Vector("k_norm", 2 * head_dim)]
    elif t.qk_norm == "width":
        vectors += [Vector("q_norm", q), Vector("k_norm", k)]
    if sinks:
        vectors.append(Vector("sinks", heads, Shard.COLUMN))
    rotated = kind != "cross"
    return Attention(
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=head_dim,
        v_dim=v_dim,
        linears=tuple(linears),
        vectors=tuple(vectors),
        causal=causal,
        span=span,
        qk_norm=t.qk_norm,
        qkv=t.qkv,
        rope=_ROPE.get(t.position_kind, "none") if rotated else "none",
        softcap=t.softcap,
        shared_kv=shared_kv,
        gated=t.query_gate,
        sinks=sinks,
    )


def mlp(
    hidden: int, ffn: int, *, gated: bool, activation: str, bias: bool = False, fused: bool = False
) -> Mlp:
    """A dense feed-forward part; `fused` keeps gate and up in one matrix."""
    if gated and fused:
        first = [Linear("gate_up", hidden, 2 * ffn, bias)]
    elif gated:
        first = [Linear("gate", hidden, ffn, bias), Linear("up", hidden, ffn, bias)]
    else:
        first = [Linear("up", hidden, ffn, bias)]
    return Mlp(hidden, ffn, gated, activation, (*first, Linear("down", ffn, hidden, bias, Shard.ROW)))


def family_mlp(d: Draft, hidden: int, ffn: int) -> Mlp:
    """The dense part with the family's activation and biases."""
    t = d.traits
    part = mlp(
        hidden, ffn, gated=t.gated_mlp, activation=t.activation, bias=t.mlp_bias, fused=t.fused_gate_up
    )
    if t.receptance:
        gate = Linear("receptance", hidden, hidden, shard=Shard.REPLICATED)
        return replace(part, linears=(*part.linears, gate), vectors=(Vector("time_mix", 2 * hidden),))
    if t.mlp_scalars:
        return replace(part, vectors=(Vector("activation", t.mlp_scalars),))
    return part


def experts(d: Draft, hidden: int) -> Moe:
    """Router, routed experts and the shared part, if any. Raises InputError."""
    t, moe = d.traits, d.spec.moe
    if moe is None:
        raise InputError(
            f"{d.spec.label} has layers of experts, but its experts are not described",
            key="model.moe",
            legal="experts, top_k and expert_ffn",
        )
    width = moe.expert_ffn or d.spec.ffn
    if width is None:
        raise InputError(
            f"{d.spec.label} has experts but not their width",
            key="model.moe.expert_ffn",
            legal="a whole number",
        )
    if moe.expert_ffn is None:
        d.assume("moe.expert_ffn not stated: ffn is taken as the width of one expert")
    if moe.top_k > moe.experts:
        raise InputError(
            "a token cannot pass more experts than there are",
            key="model.moe.top_k",
            given=moe.top_k,
            legal=f"1 to {moe.experts}",
        )
    inner = moe.latent or hidden
    linears = [Linear("router", hidden, moe.experts, t.router_bias, Shard.REPLICATED)]

    def expert(name: str, inputs: int, outputs: int) -> Linear:
        return Linear(name, inputs, outputs, t.expert_bias, Shard.EXPERT, moe.experts, moe.top_k)

    if moe.latent:
        linears.append(Linear("latent_down", hidden, inner, shard=Shard.REPLICATED))
    if t.gated_mlp:
        linears.append(expert("expert_gate", inner, width))
    linears += [expert("expert_up", inner, width), expert("expert_down", width, inner)]
    if moe.latent:
        linears.append(Linear("latent_up", inner, hidden, shard=Shard.REPLICATED))
    shared = moe.shared_expert_ffn
    if shared:
        if t.gated_mlp:
            linears.append(Linear("shared_gate", hidden, shared))
        linears += [
            Linear("shared_up", hidden, shared),
            Linear("shared_down", shared, hidden, shard=Shard.ROW),
        ]
        if t.shared_expert_gate:
            linears.append(Linear("shared_expert_gate", hidden, 1, shard=Shard.REPLICATED))
    vectors: tuple[Vector, ...] = ()
    if t.dense_beside_moe:
        vectors = (Vector("router_scale", hidden), Vector("expert_scale", moe.experts))
    if t.router_correction:
        vectors = (*vectors, Vector("router_correction", moe.experts))
    return Moe(
        hidden=hidden,
        experts=moe.experts,
        top_k=moe.top_k,
        expert_ffn=width,
        shared_ffn=shared,
        gated=t.gated_mlp,
        activation="swiglu_clamped" if t.clamped_experts else t.activation,
        linears=tuple(linears),
        vectors=vectors,
        fp32_router=t.fp32_router,
        latent=moe.latent,
    )


def is_moe(d: Draft, layer: int) -> bool:
    """Whether that layer's feed-forward part is made of experts."""
    moe = d.spec.moe
    return moe is not None and layer >= moe.dense_layers and layer % moe.every == moe.offset


__all__ = ["Draft", "FeedForward", "attention", "draft", "experts", "family_mlp", "is_moe", "mlp", "norm"]
