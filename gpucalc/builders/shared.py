"""Blocks whose weights serve several layers: all of a layer (ALBERT), or the attention and feed-forward part
beside a layer's own state space (Zamba).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from gpucalc.builders import state
from gpucalc.builders.parts import Draft, attention, family_mlp, norm
from gpucalc.errors import InputError
from gpucalc.graph import Attention, Block, Linear, Mlp, Norm, Shard, Vector

W = TypeVar("W", Linear, Vector, Norm)


def _serving_all(weights: tuple[W, ...]) -> tuple[W, ...]:
    return tuple(replace(weight, shared=True) for weight in weights)


def whole(block: Block) -> Block:
    """A layer of attention and a dense part, all of whose weights are those of every layer of its kind."""
    mixer, ffn = block.mixer, block.ffn
    assert isinstance(mixer, Attention)
    assert isinstance(ffn, Mlp)
    return replace(
        block,
        mixer=replace(mixer, linears=_serving_all(mixer.linears), vectors=_serving_all(mixer.vectors)),
        ffn=replace(ffn, linears=_serving_all(ffn.linears), vectors=_serving_all(ffn.vectors)),
        norms=_serving_all(block.norms),
    )


def numbered(name: str, turn: int, sets: int) -> str:
    """A part's name, told apart from its kind's other sets of weights."""
    return name if sets == 1 else f"{name}_{turn + 1}"


def beside_state(d: Draft, hidden: int, turn: int) -> Block:
    """Zamba's hybrid layer: a transformer of shared weights that reads the stream and the embedding side by
    side, a map of the layer's own to what its state space reads, and its own low-rank additions.
    """
    given = d.spec.shared
    assert given is not None
    heads, ffn = d.need("heads", "ffn")
    width = given.reads or 2 * hidden
    head_dim = d.spec.head_dim or width // heads
    if heads % (d.spec.kv_heads or heads):
        problem = f"{heads} heads cannot share {d.spec.kv_heads} key-value heads evenly"
        raise InputError(problem, key="model.kv_heads", given=d.spec.kv_heads)
    core = attention(d, hidden=width, heads=heads, kv_heads=d.spec.kv_heads or heads, head_dim=head_dim)
    feed = family_mlp(d, hidden, ffn)
    plain = Block(
        "", core, feed, (norm("input", d.traits.norm, width), norm("pre_ffn", d.traits.norm, hidden))
    )
    block = whole(plain)
    mixer, dense = block.mixer, block.ffn
    assert isinstance(mixer, Attention)
    assert isinstance(dense, Mlp)
    attends = tuple(
        replace(linear, outputs=hidden) if linear.name == "o" else linear for linear in mixer.linears
    )
    own: tuple[Linear, ...] = ()
    if given.adapter is not None:
        feeds = sum(linear.outputs for linear in dense.linears if linear.inputs == hidden)
        own = _low_rank("gate_up", hidden, given.adapter, feeds)
        if given.attention_adapters:
            for name in ("q", "k", "v"):
                attends = (*_low_rank(name, width, given.adapter, width), *attends)
    onward = Linear("onward", hidden, hidden, shard=Shard.REPLICATED)
    return Block(
        name=f"{numbered('full', turn, given.blocks)}+mamba+mlp",
        mixer=replace(mixer, linears=attends),
        ffn=replace(dense, linears=(*own, *dense.linears, onward)),
        norms=(*block.norms, norm("state", d.traits.norm, hidden)),
        state=state.mamba(d, hidden),
    )


def _low_rank(name: str, inputs: int, rank: int, outputs: int) -> tuple[Linear, ...]:
    return (
        Linear(f"{name}_adapter_in", inputs, rank, shard=Shard.REPLICATED),
        Linear(f"{name}_adapter_out", rank, outputs),
    )
