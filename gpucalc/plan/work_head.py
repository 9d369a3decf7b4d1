"""Seconds of the output matrix and the loss."""

from __future__ import annotations

from gpucalc.formulas import compute as f
from gpucalc.graph import Block, Linear, Shard
from gpucalc.line import compute
from gpucalc.num import Num
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_counts import LOSS_BYTES
from gpucalc.plan.work_linears import add_linears, linear_lines
from gpucalc.plan.work_lines import LayerWork


def head_work(
    hidden: int,
    vocab: int,
    linears: tuple[Linear, ...],
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> LayerWork:
    """The output matrix and the loss, as one layer's work."""
    work = LayerWork(Block(name="head", mixer=None, ffn=None, norms=()))
    add_linears(work, linears, tokens, layout, recipe, device, low=False)
    if vocab:
        matrix = Linear("vocabulary", hidden, vocab, shard=Shard.VOCAB)
        forward, backward = linear_lines(matrix, tokens, layout, recipe, device, low=False)
        work.matrix.append(forward)
        work.matrix_back.extend(backward)
        code = recipe.kernels if recipe.loss == "unfused" else "fused"
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=tokens,
            width=vocab / layout.tp,
            passes=1,
            element_bytes=LOSS_BYTES[code],
        )
        work.traffic.append(device.move("loss", moved))
        work.call(8)
    return work
