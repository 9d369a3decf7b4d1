"""Seconds of what comes before the layers, its matrices apart: convolutions over the samples of audio."""

from __future__ import annotations

from gpucalc.graph import Stack
from gpucalc.num import Num
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Recipe
from gpucalc.plan.work_counts import LAYERNORM_PASSES, PLAIN_PASSES
from gpucalc.plan.work_lines import LayerWork, add_elementwise


def convolution_traffic(work: LayerWork, stack: Stack, tokens: Num, recipe: Recipe, device: Device) -> None:
    """Activations, and norms before them, of convolutions at higher rates than tokens."""
    for linear in stack.convolutions:
        rows, code, size = tokens * linear.active, recipe.kernels, recipe.activation_bytes
        name, width = linear.name, linear.outputs
        add_elementwise(work, f"{name}_activation", rows, width, PLAIN_PASSES[code], size, device)
        if stack.normed(linear):
            add_elementwise(work, f"{name}_norm", rows, width, LAYERNORM_PASSES, size, device)
