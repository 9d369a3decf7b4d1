"""Causal decoders: dense, mixture of experts, hybrid and state-space, with or without a vision tower."""

from __future__ import annotations

from gpucalc.builders import state
from gpucalc.builders.parts import Draft, attention, experts, family_mlp, is_moe, norm
from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.graph import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Graph,
    Head,
    Linear,
    Mixer,
    Norm,
    Shard,
    Stack,
    Vector,
)
from gpucalc.spec.model import layer_letters

_WORDS = {
    "F": "full",
    "S": "sliding",
    "K": "chunked",
    "D": "indexed",
    "C": "compressed",
    "H": "heavily_compressed",
}


def decoder(d: Draft) -> Graph:
    """The graph of a decoder-only model."""
    spec, t = d.spec, d.traits
    layers, hidden = d.need("layers", "hidden")
    vocab = d.vocab()
    letters = _letters(d, layers)
    single = t.norms_per_block == 1 and not t.parallel_block  # one part a layer, as Mamba and Nemotron-H
    blocks: dict[tuple[str, bool, int], int] = {}
    order: list[int] = []
    drawn: list[Block] = []
    both = 0  # layers so far that have attention and a state space
    for layer, letter in enumerate(letters):
        routed = letter == "E" or (letter != "-" and not single and is_moe(d, layer))
        turn = both % spec.shared.blocks if spec.shared is not None and letter == "B" else 0
        both += letter == "B"
        kind = (letter, routed, turn)
        if kind not in blocks:
            blocks[kind] = len(drawn)
            drawn.append(_block(d, letter, routed, hidden, turn))
        order.append(blocks[kind])
    width = spec.embedding_width or hidden
    vectors = []
    positions = d.positions()
    if positions:
        vectors.append(Vector("positions", positions * hidden))
    if t.embedding_norm:
        vectors.append(Vector("embedding_norm", norm("embedding", t.norm, hidden).params))
    projections: tuple[Linear, ...] = ()
    if width != hidden:
        projections = (
            Linear("embedding_in", width, hidden, shard=Shard.REPLICATED),
            Linear("embedding_out", hidden, width, shard=Shard.REPLICATED),
        )
    head_linears: tuple[Linear, ...] = ()
    head_vectors: tuple[Vector, ...] = ()
    streams = spec.compressed.residual_streams if spec.compressed else 1
    if streams > 1:
        head_linears = (Linear("merge_streams", streams * hidden, streams, True, Shard.REPLICATED),)
        head_vectors = (Vector("merge_scale", 1),)
    trunk = Stack(
        name="decoder",
        role="decoder",
        hidden=hidden,
        blocks=tuple(drawn),
        layers=tuple(order),
        final_norm=norm("final", t.norm, hidden) if t.final_norm else None,
    )
    stacks: tuple[Stack, ...] = (trunk,)
    linears: tuple[Linear, ...] = ()
    extra: tuple[Vector, ...] = ()
    if spec.vision_tower is not None:
        from gpucalc.builders.towers import tower

        sight, linears, extra = tower(d, hidden)
        stacks = (trunk, sight)
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=stacks,
        embedding=Embedding(vocab, width, tuple(vectors), projections),
        head=_head(d, vocab, width, head_linears, head_vectors),
        linears=linears,
        vectors=extra,
        notes=tuple(d.notes),
    )


def _head(d: Draft, vocab: int, width: int, linears: tuple[Linear, ...], vectors: tuple[Vector, ...]) -> Head:
    """The vocabulary matrix, or what stands in its place."""
    t = d.traits
    if t.head == "lm":
        return Head(vocab, width, t.tied_embeddings, linears, vectors, t.head_bias)
    if t.head == "classifier":
        (classes,) = d.need("classes")
        linears = (*linears, Linear("classifier", width, classes, shard=Shard.REPLICATED))
    return Head(vocab=0, hidden=width, tied=True, linears=linears, vectors=vectors)


def _letters(d: Draft, layers: int) -> str:
    spec = d.spec
    if spec.pattern is None:
        if spec.ssm is not None and spec.heads is None:
            return "M" * layers
        return ("D" if spec.indexer is not None and spec.compressed is None else "F") * layers
    letters = layer_letters(spec.pattern)
    if len(letters) != layers:
        raise InputError(
            f"the layer pattern has {len(letters)} letters for {layers} layers",
            key="model.pattern",
            given=spec.pattern,
        )
    return letters


def _block(d: Draft, letter: str, routed: bool, hidden: int, turn: int = 0) -> Block:
    t, spec = d.traits, d.spec
    if letter == "B" and spec.shared is not None:
        from gpucalc.builders import shared

        return shared.beside_state(d, hidden, turn)
    mixer: Mixer | None = None
    ffn: FeedForward | None = None
    if letter == "M":
        mixer = state.mamba(d, hidden)
    elif letter == "L":
        mixer = state.linear_attention(d, hidden)
    elif letter in _WORDS or letter == "B":
        mixer = _attention(d, letter, hidden)
    beside: FeedForward | None = None
    single = t.norms_per_block == 1 and not t.parallel_block  # one part a layer
    if routed:
        ffn = experts(d, hidden)
        if t.dense_beside_moe:
            beside = family_mlp(d, hidden, d.ffn())
    elif mixer is None or not single:
        ffn = family_mlp(d, hidden, d.ffn())
    mixed = mixer.kind if mixer is not None and letter in "ML" else _WORDS.get(letter, "")
    if letter == "B":
        mixed = "full+mamba"
    fed = ("moe" if routed else "mlp") if ffn is not None else ""
    streams = spec.compressed.residual_streams if spec.compressed else 1
    linears: tuple[Linear, ...] = ()
    vectors: tuple[Vector, ...] = ()
    if streams > 1:
        # Per part: maps that read from, write to and mix the residual streams, and three scales.
        maps = streams * streams + 2 * streams
        linears = tuple(
            Linear(f"{part}_streams", streams * hidden, maps, True, Shard.REPLICATED)
            for part in ("mixer", "ffn")
        )
        vectors = (Vector("stream_scales", 6),)
    return Block(
        name="+".join(part for part in (mixed, fed) if part),
        mixer=mixer,
        ffn=ffn,
        norms=_norms(d, hidden, mixer is not None, ffn is not None, beside is not None),
        vectors=vectors,
        parallel=t.parallel_block,
        beside=beside,
        linears=linears,
        streams=streams,
        state=state.mamba(d, hidden) if letter == "B" else None,
    )


def _norms(d: Draft, hidden: int, mixer: bool, ffn: bool, beside: bool) -> tuple[Norm, ...]:
    t = d.traits
    if t.norms_per_block == 1 or not (mixer and ffn):
        names = ["input"]
    elif t.norms_per_block == 4:
        names = ["input", "post_mixer", "pre_ffn", "post_ffn"]
    elif t.post_norm:
        names = ["post_mixer", "post_ffn"]
    else:
        names = ["input", "pre_ffn"]
    if beside:
        names += ["pre_experts", "post_dense", "post_experts"]
    return tuple(norm(name, t.norm, hidden) for name in names)


def _attention(d: Draft, letter: str, hidden: int) -> Attention:
    spec, t = d.spec, d.traits
    if spec.compressed is not None:
        return _compressed(d, letter, hidden)
    if letter in "CH":
        raise UnsupportedModel(
            f"{spec.label}: compressed attention layers need a `compressed` group", key="model.compressed"
        )
    if spec.mla is not None:
        return _latent(d, letter, hidden)
    if spec.heads is None and t.ffn_ratio and hidden % 128 == 0:
        heads = hidden // 128
        d.assume(f"heads not stated: {heads} of width 128")
    else:
        (heads,) = d.need("heads")
    kv_heads = spec.kv_heads
    if kv_heads is None:
        kv_heads = heads
        if t.gated_mlp:
            d.assume("kv_heads not stated: as many as heads")
    head_dim = spec.head_dim
    if head_dim is None:
        if hidden % heads:
            raise InputError(
                f"hidden {hidden} is not a multiple of {heads} heads; state the head width",
                key="model.head_dim",
                legal="a whole number",
            )
        head_dim = hidden // heads
    if heads % kv_heads:
        raise InputError(
            f"{heads} heads cannot share {kv_heads} key-value heads evenly",
            key="model.kv_heads",
            given=kv_heads,
        )
    v_dim, shared_kv = spec.v_head_dim, False
    wide = spec.global_attention
    if letter == "F" and wide is not None:
        kv_heads, head_dim, v_dim, shared_kv = wide.kv_heads, wide.head_dim, wide.v_head_dim, wide.shared_kv
    span = None
    if letter in "SK":
        (span,) = d.need("window")
    return attention(
        d,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=v_dim,
        kind=_WORDS.get(letter, "full"),
        span=span,
        shared_kv=shared_kv,
        sinks=t.sinks == "all" or (t.sinks == "sliding" and letter == "S"),
    )


def _latent(d: Draft, letter: str, hidden: int) -> Attention:
    mla, indexer, t = d.spec.mla, d.spec.indexer, d.traits
    assert mla is not None
    (heads,) = d.need("heads")
    qk = mla.qk_nope + mla.qk_rope
    linears: list[Linear] = []
    vectors: list[Vector] = []
    if mla.q_lora is None:
        linears.append(Linear("q", hidden, heads * qk))
    else:
        linears += [
            Linear("q_a", hidden, mla.q_lora, t.qkv_bias, Shard.REPLICATED),
            Linear("q_b", mla.q_lora, heads * qk),
        ]
        vectors.append(Vector("q_a_norm", mla.q_lora))
    linears += [
        Linear("kv_a", hidden, mla.kv_lora + mla.qk_rope, t.qkv_bias, Shard.REPLICATED),
        Linear("kv_b", mla.kv_lora, heads * (mla.qk_nope + mla.v_head)),
        Linear("o", heads * mla.v_head, hidden, t.o_bias, Shard.ROW),
    ]
    vectors.append(Vector("kv_a_norm", mla.kv_lora))
    if letter == "D" and indexer is not None:
        if mla.q_lora is None:
            raise InputError("an indexer reads the low-rank query", key="model.mla.q_lora")
        linears += [
            Linear("index_q", mla.q_lora, indexer.heads * indexer.head_dim, shard=Shard.REPLICATED),
            Linear("index_k", hidden, indexer.head_dim, shard=Shard.REPLICATED),
            Linear("index_weights", hidden, indexer.heads, shard=Shard.REPLICATED),
        ]
        vectors.append(Vector("index_k_norm", 2 * indexer.head_dim))
    own = indexer is not None and letter == "D"
    return Attention(
        kind="sparse_indexed" if indexer is not None else "full",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        qk_dim=qk,
        v_dim=mla.v_head,
        linears=tuple(linears),
        vectors=tuple(vectors),
        rope="partial" if d.traits.position_kind != "none" else "none",
        q_lora=mla.q_lora,
        kv_lora=mla.kv_lora,
        rope_dim=mla.qk_rope,
        index_heads=indexer.heads if indexer and own else None,
        index_dim=indexer.head_dim if indexer and own else None,
        index_topk=indexer.topk if indexer else None,
    )


def _compressed(d: Draft, letter: str, hidden: int) -> Attention:
    """DeepSeek-V4: one shared key-value vector per token, or per compressed group of tokens."""
    spec, c = d.spec, d.spec.compressed
    assert c is not None
    heads, head_dim, window = d.need("heads", "head_dim", "window")
    group = heads * head_dim // c.o_groups
    linears = [
        Linear("q_a", hidden, c.q_lora, shard=Shard.REPLICATED),
        Linear("q_b", c.q_lora, heads * head_dim),
        Linear("kv", hidden, head_dim, shard=Shard.REPLICATED),
        Linear("o_a", group, c.o_groups * c.o_lora),  # one map per group of heads
        Linear("o_b", c.o_groups * c.o_lora, hidden, shard=Shard.ROW),
    ]
    vectors = [
        Vector("q_a_norm", c.q_lora),
        Vector("kv_norm", head_dim),
        Vector("sinks", heads, Shard.COLUMN),
    ]
    ratio = None
    indexed = letter == "C"
    if letter in "CH":
        # Sparse layers pool over two overlapping groups, hence twice the width.
        ratio, width = (c.sparse_ratio, 2 * head_dim) if indexed else (c.heavy_ratio, head_dim)
        linears += [
            Linear("compress_kv", hidden, width, shard=Shard.REPLICATED),
            Linear("compress_gate", hidden, width, shard=Shard.REPLICATED),
        ]
        vectors += [Vector("compress_positions", ratio * width), Vector("compress_norm", head_dim)]
    index = spec.indexer
    if indexed:
        if index is None:
            raise InputError("compressed sparse layers need an indexer", key="model.indexer")
        wide = 2 * index.head_dim
        linears += [
            Linear("index_q", c.q_lora, index.heads * index.head_dim, shard=Shard.REPLICATED),
            Linear("index_kv", hidden, wide, shard=Shard.REPLICATED),
            Linear("index_gate", hidden, wide, shard=Shard.REPLICATED),
            Linear("index_weights", hidden, index.heads, shard=Shard.REPLICATED),
        ]
        vectors += [
            Vector("index_positions", c.sparse_ratio * wide),
            Vector("index_norm", index.head_dim),
        ]
    return Attention(
        kind=_WORDS[letter],
        hidden=hidden,
        heads=heads,
        kv_heads=1,
        qk_dim=head_dim,
        v_dim=head_dim,
        linears=tuple(linears),
        vectors=tuple(vectors),
        span=window,
        rope="partial",
        q_lora=c.q_lora,
        rope_dim=c.rope_dim,
        compress_ratio=ratio,
        index_heads=index.heads if index and indexed else None,
        index_dim=index.head_dim if index and indexed else None,
        index_topk=index.topk if index and indexed else None,
        shared_kv=True,
        sinks=True,
    )
