"""Networks known by their totals: convolutional, detection, diffusion pipelines."""

from __future__ import annotations

from gpucalc.errors import InputError
from gpucalc.graph import Graph, ImageNetwork
from gpucalc.spec.model import ModelSpec


def network(spec: ModelSpec) -> Graph:
    """An image network from the totals a trace or a publication states.

    Raises InputError naming the totals that are missing.
    """
    params = spec.params_total if spec.params_total is not None else spec.params
    missing = [
        name
        for name, value in (
            ("params_total", params),
            ("image_size", spec.image_size),
            ("gflops_forward", spec.gflops_forward),
        )
        if value is None
    ]
    if params is None or (missing and not spec.components):
        raise InputError(
            f"{spec.label} is a network given by its totals and lacks {', '.join(missing)}",
            key=f"model.{missing[0]}",
            legal="a number; `trace` measures all of them from the module",
        )
    traced = spec.trace
    notes = ["a pipeline of networks: only parameters are known"] if missing else []
    return Graph(
        name=spec.label,
        family=spec.family or "image network",
        network=ImageNetwork(
            params=int(params),
            image=spec.image_size or 0,
            forward_flops=(spec.gflops_forward or 0.0) * 1e9,
            saved_elements=spec.saved_elements,
            traffic_elements=spec.traffic_elements,
            layers=spec.layers,
            live_elements=spec.live_elements,
            loss_bytes=spec.loss_bytes or 0.0,
            loss_once_bytes=spec.loss_once_bytes or 0.0,
            head_elements=spec.head_elements or 0.0,
            buffers=traced.buffers if traced is not None else 0,
        ),
        notes=tuple(notes),
    )
