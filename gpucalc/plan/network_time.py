"""Seconds of networks that are known by their totals: operations and bytes, no layers."""

from __future__ import annotations

from gpucalc.errors import UnsupportedModel
from gpucalc.formulas import compute as f
from gpucalc.graph import Graph
from gpucalc.line import Line, compute, total
from gpucalc.plan.device import Device, stated_share
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.stage_time import StageTime
from gpucalc.plan.stages import stages
from gpucalc.plan.step_rates import (
    CONTIGUOUS_PASSES,
    DIRECT_SHARE,
    IMAGE_BYTES_PER_CLOCK,
    NETWORK_BACKWARD,
    WHOLE_SHARE,
)


def whole_network(graph: Graph, layout: Layout, recipe: Recipe, device: Device) -> StageTime:
    """One micro-batch of a network that is one stage, by operations and bytes moved."""
    network = graph.network
    assert network is not None
    if not network.forward_flops:
        raise UnsupportedModel(f"{graph.name} is known by its parameters alone, which say nothing of time")
    time = StageTime(stages(graph, pp=1, vpp=1)[0])
    time.forward.append(_pass("forward", graph, layout, recipe, device, products=1, factor=1.0))
    backward = _pass("backward", graph, layout, recipe, device, products=2, factor=NETWORK_BACKWARD)
    time.backward.append(backward)
    kernels = network.layers or 0
    host = compute("host", f.launch_s, kernels=3 * kernels, kernel_launch_s=device.launch)
    time.launch = compute("launch", f.exposed_launch_s, device_s=time.device_s, host_s=host)
    return time


def forward_pass(graph: Graph, layout: Layout, recipe: Recipe, device: Device) -> Line:
    """One batch through a network without gradients, and the launches its kernels do not hide."""
    network = graph.network
    assert network is not None
    work = _pass("forward", graph, layout, recipe, device, products=1, factor=1.0)
    host = compute("host", f.launch_s, kernels=network.layers or 0, kernel_launch_s=device.launch)
    launch = compute("launch", f.exposed_launch_s, device_s=work, host_s=host)
    return total("pass", (work, launch), unit="s")


def _pass(
    name: str,
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    *,
    products: int,
    factor: float,
) -> Line:
    """The parts of a pass: `products` of every convolution, elementwise layers, copies of layout."""
    network = graph.network
    assert network is not None
    images = layout.micro_batch
    saved = network.saved_elements or 0.0
    traffic = network.traffic_elements if network.traffic_elements is not None else 3 * saved
    size = recipe.activation_bytes if not recipe.autocast else 2
    flops = compute(
        "flops",
        f.network_flops,
        images=images,
        flops_per_image=network.forward_flops,
        direct_share=DIRECT_SHARE if recipe.math == "fp32" else WHOLE_SHARE,
    )
    # A convolution reads what the one before wrote.
    moved = compute("bytes", f.elementwise_bytes, tokens=images, width=saved, passes=1, element_bytes=size)
    convolutions = compute("convolutions", f.gemm_s, flops=flops, bytes_moved=moved, **device.matrix)
    rest = compute(
        "bytes", f.elementwise_bytes, tokens=images, width=traffic, passes=factor, element_bytes=size
    )
    elementwise = _image_traffic("elementwise", rest, device, recipe.clock_share)
    parts = [*(convolutions for _ in range(products)), elementwise]
    if size == 2 and not recipe.channels_last:
        copied = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=images,
            width=saved,
            passes=products * CONTIGUOUS_PASSES,
            element_bytes=size,
        )
        parts.append(_image_traffic("layout_copies", copied, device, recipe.clock_share))
    return total(name, tuple(parts), unit="s")


def _image_traffic(name: str, moved: Line, device: Device, clock_share: float) -> Line:
    """Elementwise layers of image networks; bound by memory alone where the GPU's clock is not known."""
    gpu = device.gpu
    if gpu.sm_count is None or gpu.boost_clock is None:
        return device.move(name, moved)
    clock = gpu.boost_clock.line("boost_clock")
    if clock_share != 1:
        clock = compute("clock", f.sustained_clock_hz, clock_hz=clock, clock_share=stated_share(clock_share))
    return compute(
        name,
        f.image_traffic_s,
        bytes_moved=moved,
        multiprocessors=gpu.sm_count,
        clock_hz=clock,
        bytes_per_clock=IMAGE_BYTES_PER_CLOCK,
        **device.traffic,
    )
