"""Seconds of a layer's state mixer: the chunked scan of Mamba-2 and linear attention, and what it moves."""

from __future__ import annotations

from gpucalc.formulas import compute as f
from gpucalc.graph import StateMixer
from gpucalc.line import Kind, Line, compute
from gpucalc.num import maximum
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.work_counts import SCAN_PASSES
from gpucalc.plan.work_lines import LayerWork, Shape, add_elementwise

SCAN_CHUNK = 256  # tokens per chunk in Mamba-2 and flash-linear-attention kernels
SCAN_EFFICIENCY = Line(
    "scan_efficiency",
    0.5,
    "fraction",
    Kind.MODELLED,
    source="fitted to the published Nemotron 3 Nano runs; small chunk products, against attention's rate",
)


def add_state_mixer(
    work: LayerWork, part: StateMixer, shape: Shape, layout: Layout, recipe: Recipe, device: Device
) -> None:
    """The scan and its traffic, forward and backward."""
    flops = compute(
        "flops",
        f.state_mixer_flops,
        tokens=shape.tokens,
        heads=maximum(part.heads / layout.tp, 1),
        key_dim=part.key_dim,
        value_dim=part.value_dim,
        chunk=SCAN_CHUNK,
    )
    work.call(10)
    share = compute(
        "efficiency",
        f.in_step_efficiency,
        alone=device.attention["efficiency"],
        training_efficiency=SCAN_EFFICIENCY,
    )
    rates = device.attention | {"efficiency": share}
    for lines, times in ((work.attention, 1), (work.attention_back, 2)):
        line = compute("scan", f.attention_s, flops=flops, bytes_moved=0.0, **rates)
        lines.extend([line] * times)
    add_elementwise(
        work,
        "scan_traffic",
        shape.tokens,
        part.inner / layout.tp,
        SCAN_PASSES[recipe.kernels],
        recipe.activation_bytes,
        device,
    )
