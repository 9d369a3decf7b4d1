"""The way from a description to a graph: pick the module that draws that form of network."""

from __future__ import annotations

from gpucalc.builders.parts import draft
from gpucalc.graph import Graph
from gpucalc.spec.model import ModelSpec


def build_graph(spec: ModelSpec) -> Graph:
    """The graph of a model description.

    Raises UnsupportedModel for an architecture that is not drawn, InputError naming the fields
    that a description lacks.
    """
    if spec.kind in ("cnn", "detector", "diffusion"):
        from gpucalc.builders.totals import network

        return network(spec)
    d = draft(spec)
    form = d.traits.form
    if form == "decoder":
        from gpucalc.builders.decoder import decoder

        return decoder(d)
    if form == "wav2vec2":
        from gpucalc.builders.audio import wav2vec2

        return wav2vec2(d)
    if form in ("vit", "clip"):
        from gpucalc.builders import vision

        return vision.vit(d) if form == "vit" else vision.contrastive(d)
    if form == "totals":
        from gpucalc.builders.totals import network

        return network(spec)
    from gpucalc.builders import encoders

    draw = {
        "bert": encoders.bert,
        "t5": encoders.t5,
        "bart": encoders.bart,
        "whisper": encoders.whisper,
        "transformer_xl": encoders.transformer_xl,
    }
    return draw[form](d)
