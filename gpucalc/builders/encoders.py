"""Encoders, encoder-decoders, and decoders with recurrence: BERT, T5, BART, Whisper, Transformer-XL."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from gpucalc.builders import shared
from gpucalc.builders.parts import Draft, attention, family_mlp, norm
from gpucalc.errors import InputError
from gpucalc.graph import Attention, Block, Embedding, Graph, Head, Linear, Norm, Shard, Stack, Vector
from gpucalc.spec.model import layer_letters

T5_BUCKETS = 32  # relative position buckets, a constant of the family
WHISPER_FRAMES = 1500  # encoder positions for 30 s of audio


def _head_dim(d: Draft, hidden: int, heads: int) -> int:
    if d.spec.head_dim is None and hidden % heads:
        raise InputError(
            f"hidden {hidden} is not a multiple of {heads} heads", key="model.heads", given=heads
        )
    return d.spec.head_dim or hidden // heads


def _plain(d: Draft, hidden: int, *, causal: bool, kind: str = "full") -> Attention:
    (heads,) = d.need("heads")
    return attention(
        d,
        hidden=hidden,
        heads=heads,
        kv_heads=d.spec.kv_heads or heads,
        head_dim=_head_dim(d, hidden, heads),
        causal=causal,
        kind=kind,
    )


def _norms(d: Draft, hidden: int, *names: str) -> tuple[Norm, ...]:
    return tuple(norm(name, d.traits.norm, hidden) for name in names)


def _pair(d: Draft, hidden: int) -> tuple[Norm, ...]:
    names = ("post_mixer", "post_ffn") if d.traits.post_norm else ("input", "pre_ffn")
    return _norms(d, hidden, *names)


def bert(d: Draft) -> Graph:
    """BERT, RoBERTa, DeBERTa and ModernBERT: one bidirectional stack and what stands on it."""
    spec, t = d.spec, d.traits
    layers, hidden = d.need("layers", "hidden")
    vocab, ffn = d.vocab(), d.ffn()
    modern, relative = d.key == "modernbert", d.key == "deberta_v2"
    width = spec.embedding_width or hidden
    vectors = []
    if t.position_kind == "learned":
        vectors.append(Vector("positions", d.positions() * width))
    if t.token_types:
        vectors.append(Vector("token_types", t.token_types * width))
    if t.embedding_norm:
        vectors.append(Vector("embedding_norm", norm("embedding", t.norm, width).params))
    letters = layer_letters(spec.pattern) if spec.pattern else "F" * layers
    full = Block("full+mlp", _plain(d, hidden, causal=False), family_mlp(d, hidden, ffn), _pair(d, hidden))
    blocks, order = [full], [0] * layers
    if "S" in letters:
        (window,) = d.need("window")
        assert isinstance(full.mixer, Attention)
        near = replace(full.mixer, kind="sliding", span=window)
        blocks.append(replace(full, name="sliding+mlp", mixer=near))
        order = [1 if letter == "S" else 0 for letter in letters]
    if spec.shared is not None:
        sets = spec.shared.blocks
        whole = shared.whole(full)
        blocks = [replace(whole, name=f"{shared.numbered('full', i, sets)}+mlp") for i in range(sets)]
        order = [layer * sets // layers for layer in range(layers)]
    if modern:  # the embedding norm takes the place of the first layer's
        first = replace(full, name="first", norms=full.norms[1:])
        blocks.append(first)
        order[0] = len(blocks) - 1
    stack_vectors: tuple[Vector, ...] = ()
    if relative:
        stack_vectors = (
            Vector("relative_positions", d.need("positions")[0] * hidden),
            Vector("relative_norm", 2 * hidden),
        )
    elif d.key == "mpnet":
        stack_vectors = (Vector("relative_positions", T5_BUCKETS * d.need("heads")[0], Shard.COLUMN),)
    factorised = width != hidden or d.key == "albert"
    widened = (Linear("embedding_in", width, hidden, True, Shard.REPLICATED),) if factorised else ()
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=(
            Stack(
                name="encoder",
                role="encoder",
                hidden=hidden,
                blocks=tuple(blocks),
                layers=tuple(order),
                vectors=stack_vectors,
                final_norm=None if t.post_norm else norm("final", t.norm, hidden),
            ),
        ),
        embedding=Embedding(vocab, width, tuple(vectors), widened),
        head=_bert_head(d, vocab, hidden, width, biased=not modern),
        notes=tuple(d.notes),
    )


def _bert_head(d: Draft, vocab: int, hidden: int, width: int, *, biased: bool) -> Head:
    t = d.traits
    if t.head in ("mlm", "lm"):
        return Head(
            vocab=vocab,
            hidden=width,
            tied=t.tied_embeddings,
            linears=(Linear("transform", hidden, width, biased, Shard.REPLICATED),),
            vectors=(Vector("transform_norm", norm("transform", t.norm, width).params),),
            bias=True,
        )
    linears: tuple[Linear, ...] = ()
    if t.head == "pooler":
        linears = (Linear("pooler", hidden, hidden, True, Shard.REPLICATED),)
    elif t.head == "classifier":
        (classes,) = d.need("classes")
        linears = (
            Linear("pooler", hidden, hidden, True, Shard.REPLICATED),
            Linear("classifier", hidden, classes, True, Shard.REPLICATED),
        )
    return Head(vocab=0, hidden=hidden, tied=True, linears=linears)


def _answering(d: Draft, hidden: int, own: Attention, cross: Attention, *names: str) -> Block:
    """A layer that attends to its own stream, then to the encoder's output."""
    feed = family_mlp(d, hidden, d.spec.decoder_ffn or d.ffn())
    return Block("full+cross+mlp", own, feed, _norms(d, hidden, *names), cross=cross)


def _two_stacks(d: Draft, vocab: int, encoder: Stack, decoder: Stack) -> Graph:
    """An encoder, the decoder that reads it, and one vocabulary."""
    return Graph(
        name=d.spec.label,
        family=d.spec.family or d.key,
        stacks=(encoder, decoder),
        embedding=Embedding(vocab, decoder.hidden),
        head=Head(vocab=vocab, hidden=decoder.hidden, tied=d.traits.tied_embeddings),
        notes=tuple(d.notes),
    )


def t5(d: Draft) -> Graph:
    """T5 and its relatives: biasless, relative positions kept once per stack."""
    layers, hidden, heads = d.need("layers", "hidden", "heads")
    relative: tuple[Vector, ...] = (Vector("relative_positions", T5_BUCKETS * heads, Shard.COLUMN),)
    each: tuple[Vector, ...] = ()
    if d.key == "umt5":  # a table in every layer instead of one a stack
        relative, each = (), relative
    both_ways = _plain(d, hidden, causal=False)
    reading = Block("full+mlp", both_ways, family_mlp(d, hidden, d.ffn()), _pair(d, hidden), vectors=each)
    own, cross = _plain(d, hidden, causal=True), _plain(d, hidden, causal=False, kind="cross")
    answering = _answering(d, hidden, own, cross, "input", "pre_cross", "pre_ffn")
    answering = replace(answering, vectors=each)
    final = norm("final", d.traits.norm, hidden)
    depth = d.spec.decoder_layers or layers
    return _two_stacks(
        d,
        d.vocab(),
        Stack("encoder", "encoder", hidden, (reading,), (0,) * layers, None, (), relative, final),
        Stack("decoder", "decoder", hidden, (answering,), (0,) * depth, None, (), relative, final),
    )


def bart(d: Draft) -> Graph:
    """BART and its relatives: a position table in each stack, norms after each part or before it."""
    t = d.traits
    layers, hidden = d.need("layers", "hidden")
    vectors: tuple[Vector, ...] = ()
    positions = d.positions()
    if positions:
        vectors = (Vector("positions", positions * hidden),)
    if t.embedding_norm:
        vectors = (*vectors, Vector("embedding_norm", norm("embedding", t.norm, hidden).params))
    at = "post" if t.post_norm else "pre"
    final = None if t.post_norm else norm("final", t.norm, hidden)
    both_ways = _plain(d, hidden, causal=False)
    reading = Block("full+mlp", both_ways, family_mlp(d, hidden, d.ffn()), _pair(d, hidden))
    own, cross = _plain(d, hidden, causal=True), _plain(d, hidden, causal=False, kind="cross")
    answering = _answering(d, hidden, own, cross, f"{at}_mixer", f"{at}_cross", f"{at}_ffn")
    depth = d.spec.decoder_layers or layers
    return _two_stacks(
        d,
        d.vocab(),
        Stack("encoder", "encoder", hidden, (reading,), (0,) * layers, None, (), vectors, final),
        Stack("decoder", "decoder", hidden, (answering,), (0,) * depth, None, (), vectors, final),
    )


def whisper(d: Draft) -> Graph:
    """Whisper: two convolutions and 1500 frames into the encoder; keys have no bias."""
    layers, hidden, heads, mel = d.need("layers", "hidden", "heads", "mel_bins")

    def attend(kind: str, causal: bool) -> Attention:
        return attention(
            d,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            kind=kind,
            causal=causal,
            key_bias=False,
        )

    reading = Block("full+mlp", attend("full", False), family_mlp(d, hidden, d.ffn()), _pair(d, hidden))
    answering = _answering(
        d, hidden, attend("full", True), attend("cross", False), "input", "pre_cross", "pre_ffn"
    )
    final = norm("final", d.traits.norm, hidden)
    depth = d.spec.decoder_layers or layers
    convolutions = (
        Linear("conv_1", 3 * mel, hidden, True, Shard.REPLICATED),
        Linear("conv_2", 3 * hidden, hidden, True, Shard.REPLICATED),
    )
    frames = (Vector("positions", WHISPER_FRAMES * hidden),)
    words = (Vector("positions", d.positions() * hidden),)
    return _two_stacks(
        d,
        d.vocab(),
        Stack(
            "encoder",
            "encoder",
            hidden,
            (reading,),
            (0,) * layers,
            WHISPER_FRAMES,
            convolutions,
            frames,
            final,
        ),
        Stack("decoder", "decoder", hidden, (answering,), (0,) * depth, None, (), words, final),
    )


def transformer_xl(d: Draft) -> Graph:
    """Transformer-XL: a map of relative positions in every layer, adaptive embedding and softmax.

    Every word is embedded; the softmax multiplies each token by the frequent words and, for tail
    words, by one rare cluster: only the frequent part counts as the head's work.
    """
    spec = d.spec
    layers, hidden, heads = d.need("layers", "hidden", "heads")
    vocab, ffn = d.vocab(), d.ffn()
    head_dim = _head_dim(d, hidden, heads)
    inner = heads * head_dim
    core = attention(d, hidden=hidden, heads=heads, kv_heads=heads, head_dim=head_dim)
    position = Linear("relative", hidden, inner)
    block = Block(
        "full+mlp",
        replace(core, linears=(*core.linears, position)),
        family_mlp(d, hidden, ffn),
        _pair(d, hidden),
    )
    cutoffs = spec.adaptive.cutoffs if spec.adaptive else ()
    div = spec.adaptive.div if spec.adaptive else 1
    edges = (0, *cutoffs, vocab)
    frequent, width = edges[1], hidden
    rare: list[Vector] = []
    maps: list[Linear] = []
    for cluster, (low, high) in enumerate(pairwise(edges[1:]), start=1):
        width = hidden // div**cluster
        rare.append(Vector(f"cluster_{cluster}", (high - low) * width, Shard.VOCAB))
        if div > 1:
            maps.append(Linear(f"cluster_{cluster}_map", width, hidden, shard=Shard.REPLICATED))
    if div > 1:
        maps.insert(0, Linear("cluster_0_map", hidden, hidden, shard=Shard.REPLICATED))
    biases: tuple[Vector, ...] = (Vector("word_biases", vocab),)
    if cutoffs:
        biases = (*biases, Vector("clusters", len(cutoffs) * (hidden + 1)))
        d.assume("the softmax is adaptive: its work is counted over the frequent words")
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=(
            Stack(
                name="decoder",
                role="decoder",
                hidden=hidden,
                blocks=(block,),
                layers=(0,) * layers,
                vectors=(Vector("content_position_bias", 2 * inner, Shard.COLUMN),),
            ),
        ),
        embedding=Embedding(frequent, hidden, tuple(rare), tuple(maps)),
        head=Head(vocab=frequent, hidden=hidden, tied=d.traits.tied_embeddings, vectors=biases),
        notes=tuple(d.notes),
    )
