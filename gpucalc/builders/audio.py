"""Encoders of raw audio: convolutions over samples, then a transformer over the frames they leave."""

from __future__ import annotations

from math import prod

from gpucalc.builders.parts import Draft, attention, family_mlp, norm
from gpucalc.errors import InputError
from gpucalc.graph import Block, Graph, Head, Linear, Shard, Stack, Vector
from gpucalc.spec.model import AudioSpec

SAMPLES_PER_S = 16_000  # of every published encoder of the family
GATES = 8  # outputs of the map that gates WavLM's relative positions, a constant of the family


def wav2vec2(d: Draft) -> Graph:
    """wav2vec 2.0, HuBERT and WavLM. A token of the stack is one frame; convolutions run at higher rates."""
    spec, t = d.spec, d.traits
    layers, hidden, heads = d.need("layers", "hidden", "heads")
    if hidden % heads:
        raise InputError(f"hidden {hidden} is no multiple of {heads} heads", key="model.heads", given=heads)
    audio = spec.audio
    if audio is None:
        raise InputError(
            f"{spec.label} states no convolutions over samples",
            key="model.audio",
            legal="widths, kernels, strides, ...",
        )
    samples = prod(audio.strides)
    d.assume(f"a token is a frame of {samples} samples: {SAMPLES_PER_S / samples:g} a second at 16 kHz")
    mixer = attention(d, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, causal=False)
    each: tuple[Vector, ...] = ()
    if audio.buckets:  # WavLM gates relative positions by the query of each head
        each = (Vector("position_gates", heads + GATES * (hidden // heads + 1)),)
    names = ("post_mixer", "post_ffn") if t.post_norm else ("input", "pre_ffn")
    block = Block(
        "full+mlp",
        mixer,
        family_mlp(d, hidden, d.ffn()),
        tuple(norm(name, t.norm, hidden) for name in names),
        vectors=each,
    )
    inputs, vectors = _front(audio, hidden)
    if t.post_norm:  # before the first layer in place of after the last
        vectors.append(Vector("input_norm", norm("input", t.norm, hidden).params))
    if audio.buckets:
        vectors.append(Vector("relative_positions", audio.buckets * heads, Shard.COLUMN))
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=(
            Stack(
                name="encoder",
                role="encoder",
                hidden=hidden,
                blocks=(block,),
                layers=(0,) * layers,
                inputs=inputs,
                vectors=tuple(vectors),
                final_norm=None if t.post_norm else norm("final", t.norm, hidden),
            ),
        ),
        head=_head(d, audio, hidden, layers),
        notes=tuple(d.notes),
    )


def _front(audio: AudioSpec, hidden: int) -> tuple[tuple[Linear, ...], list[Vector]]:
    """The convolutions, the map to the transformer's width and the convolution that says where a frame is."""
    linears: list[Linear] = []
    vectors: list[Vector] = []
    channels = 1
    for i, (width, kernel) in enumerate(zip(audio.widths, audio.kernels, strict=True)):
        rate = prod(audio.strides[i + 1 :])  # results per frame of the last one
        linears.append(
            Linear(f"conv_{i}", kernel * channels, width, audio.bias, Shard.REPLICATED, active=rate)
        )
        if audio.norm == "layer" or i == 0:
            vectors.append(Vector(f"conv_{i}_norm", 2 * width))
        channels = width
    if audio.projection_norm:
        vectors.append(Vector("projection_norm", 2 * channels))
    linears.append(Linear("projection", channels, hidden, True, Shard.REPLICATED))
    grouped = audio.position_kernel * hidden // audio.position_groups
    linears.append(Linear("positions", grouped, hidden, True, Shard.REPLICATED))
    vectors.append(Vector("positions_scale", audio.position_kernel))  # weights are kept as size and direction
    if audio.mask:
        vectors.append(Vector("mask", hidden))
    return tuple(linears), vectors


def _head(d: Draft, audio: AudioSpec, hidden: int, layers: int) -> Head:
    if d.traits.head == "lm":  # characters of a frame, for connectionist temporal classification
        return Head(vocab=d.vocab(), hidden=hidden, tied=False, bias=True)
    linears: tuple[Linear, ...] = ()
    vectors: tuple[Vector, ...] = ()
    if d.traits.head == "classifier":
        (classes,) = d.need("classes")
        width = audio.classifier_width or hidden
        linears = (
            Linear("projector", hidden, width, True, Shard.REPLICATED),
            Linear("classifier", width, classes, True, Shard.REPLICATED),
        )
        if audio.weighted_layers:
            vectors = (Vector("layer_weights", layers + 1),)
    return Head(vocab=0, hidden=hidden, tied=True, linears=linears, vectors=vectors)
