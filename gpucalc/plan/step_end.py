"""What a step does once: gradients summed and weights gathered, the optimizer, and copies to the host."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.formulas import comm
from gpucalc.formulas import compute as f
from gpucalc.graph import Graph
from gpucalc.line import Kind, Line, compute, total
from gpucalc.num import Num, is_scalar, present, where
from gpucalc.plan import kept
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.links import Links
from gpucalc.plan.rank import Rank
from gpucalc.plan.stage_time import StageTime, rank_params
from gpucalc.plan.stages import Stage, block_linears, block_tensors
from gpucalc.plan.step_rates import (
    ABOVE,
    CONTENTION,
    COPY_CONTENTION,
    DEFAULT_PCIE_GENERATION,
    FOREACH_YEAR,
    HOST_BANDWIDTH,
    MASTER_GRADIENT_BYTES,
    NETWORK_CONTENTION,
    NO_OVERLAP,
    NVME_BANDWIDTH,
    OPTIMIZER_PASSES,
    OVERLAP,
    TENSOR_CALLS,
)
from gpucalc.plan.work_ffn import has_experts


def _trained(stage: Stage, layout: Layout, recipe: Recipe) -> tuple[Num, Num]:
    """Trained parameters of a rank, dense and expert."""
    if recipe.adapters is None:
        return rank_params(stage.params, layout)
    trained: Num = 0
    for run in stage.layers:
        for linear in block_linears(run.block):
            if linear.name in recipe.adapters.targets:
                each = recipe.adapters.rank * (linear.inputs + linear.outputs)
                trained = trained + run.sets(linear) * each
    return trained / layout.tp, 0


def data_parallel_lines(time: StageTime, layout: Layout, recipe: Recipe, links: Links) -> list[Line]:
    """Gradients reduced and weights gathered over the ranks that hold the same parameters."""
    replicas = layout.dp * layout.cp
    if is_scalar(replicas) and replicas == 1:
        return []
    dense, expert = _trained(time.stage, layout, recipe)
    held_dense, held_expert = _gathered(time.stage, dense, expert, layout, recipe)
    groups = [("dense", dense, held_dense, replicas, layout.shard, layout.tp)]
    if any(has_experts(run.block) for run in time.stage.layers):
        stride = layout.ep * layout.etp
        held = (layout.expert_replicas, layout.expert_shard, stride)
        groups.append(("expert", expert, held_expert, *held))
    units = max(time.stage.depth, 1)
    lines: list[Line] = []
    for name, trained, held, ranks, shard, stride in groups:
        if is_scalar(ranks) and ranks == 1:
            continue
        lines.append(_group_sync(name, trained, held, ranks, shard, stride, units, layout, recipe, links))
    if not lines:
        return []
    communication = total("communication", tuple(lines), unit="s")
    device = Line("micro_batch_compute", time.device_s, "s", Kind.MODELLED, source=ABOVE)
    if layout.zero_stage >= 2:
        beside = compute("beside", f.repeated_s, each_s=device, times=layout.micro_batches)
    else:
        # Gradients travel beside the last backward; gathered weights beside the first forward.
        beside = compute("beside", f.shared_s, whole_s=device, share=0.67 if layout.zero_stage == 0 else 1.0)
    return [
        compute(
            "data_parallel",
            comm.exposed_s,
            communication_s=communication,
            compute_s=beside,
            overlap=OVERLAP[recipe.framework] if recipe.overlap else NO_OVERLAP,
            contention=_contention(replicas, layout, links),
            children=(communication,),
        )
    ]


def _contention(ranks: Num, layout: Layout, links: Links) -> Line:
    """What hidden data-parallel communication costs: less where the network sets its pace."""
    nodes = comm.group_nodes(ranks=ranks, stride=layout.tp, domain=links.island)
    if is_scalar(nodes):
        return NETWORK_CONTENTION if nodes > 1 else CONTENTION
    return replace(CONTENTION, value=where(nodes > 1, NETWORK_CONTENTION.value, CONTENTION.value))


def _gathered(stage: Stage, dense: Num, expert: Num, layout: Layout, recipe: Recipe) -> tuple[Num, Num]:
    """Parameters a rank gathers, dense and expert: all at stage 3, else what the optimizer stepped.

    A base that no stage divides (quantised, under DeepSpeed) is never gathered.
    """
    if layout.zero_stage < 3:
        return dense, expert
    if recipe.adapters is not None and not recipe.adapters.base_sharded:
        tables, _ = rank_params(stage.embedding + stage.head, layout)
        return tables + dense, expert
    return rank_params(stage.params, layout)


def _group_sync(
    name: str,
    trained: Num,
    held: Num,
    ranks: Num,
    shard: Num,
    stride: Num,
    units: int,
    layout: Layout,
    recipe: Recipe,
    links: Links,
) -> Line:
    """Data-parallel traffic of one group of parameters over a step, unit by unit.

    `shard` of the `ranks` that hold the same parameters share one copy of what is sharded.
    """
    gradient = compute(
        "gradients", comm.gradient_message_bytes, params=trained / units, element_bytes=recipe.reduce_bytes
    )
    if layout.zero_stage == 0:
        reduce = links.collective("all_reduce", "all_reduce", gradient, ranks=ranks, stride=stride)
        return compute(name, f.repeated_s, each_s=reduce, times=units)
    weights = compute(
        "weights", comm.weight_message_bytes, params=held / units, element_bytes=recipe.compute_bytes
    )
    scatter = links.collective("reduce_scatter", "reduce_scatter", gradient, ranks=shard, stride=stride)
    gather = links.collective("all_gather", "all_gather", weights, ranks=shard, stride=stride)
    if present(ranks - shard):  # hybrid sharding: every share of the gradients is summed over the copies
        share = compute("share", comm.gradient_share_bytes, message_bytes=gradient, shard=shard)
        copies = links.collective(
            "all_reduce", "all_reduce", share, ranks=ranks / shard, stride=stride * shard
        )
        scatter = total("reduce", (scatter, copies), unit="s")
    # Stage 3 gathers for forward and again for backward; from stage 2 on gradients are divided, so every
    # micro-batch reduces them. Stage 1 does both once per step.
    gathers, scatters = 1, 1
    if layout.zero_stage >= 2:
        scatters = layout.micro_batches
    if layout.zero_stage >= 3:
        gathers = layout.micro_batches * (2 if recipe.reshard else 1)
    return compute(
        name,
        comm.sharded_sync_s,
        all_gather_s=gather,
        reduce_scatter_s=scatter,
        gathers=gathers,
        scatters=scatters,
        units=units,
    )


def _host_link(device: Device) -> Line:
    """One-way rate between a GPU and its host: the superchip's link, else PCIe."""
    gpu = device.gpu
    if gpu.c2c_bandwidth is not None:
        both = gpu.c2c_bandwidth.line("host_link")
        return Line("host_link", both.value / 2, both.unit, both.kind, source=both.source, note="one way")
    known = gpu.pcie_gen is not None
    line = compute(
        "host_link",
        f.pcie_bytes_per_s,
        generation=gpu.pcie_gen if known else DEFAULT_PCIE_GENERATION,
        lanes=gpu.pcie_lanes or 16,
    )
    return line if known else replace(line, kind=Kind.ASSUMED, note="PCIe generation not known")


def _nvme(recipe: Recipe) -> Line:
    """Rate of a node's drives, reading or writing."""
    if recipe.nvme_bytes_per_s is None:
        return NVME_BANDWIDTH
    return Line("nvme_bandwidth", recipe.nvme_bytes_per_s, "bytes/s", source="run.nvme_gb_per_s")


def offload_lines(
    graph: Graph, time: StageTime, layout: Layout, recipe: Recipe, device: Device, ranks_per_node: int
) -> list[Line]:
    """Copies of offloaded parameters and activations that computation cannot hide."""
    copies: list[Line] = []
    link = _host_link(device) if recipe.offload else None
    if "parameters" in recipe.offload:
        dense, expert = rank_params(time.stage.params, layout)
        moved = compute(
            "bytes",
            comm.weight_message_bytes,
            params=dense / layout.shard + expert / layout.expert_shard,
            element_bytes=recipe.compute_bytes,
        )
        if "nvme" in recipe.offload:
            link = compute(
                "nvme_link",
                f.nvme_link_bytes_per_s,
                link_bytes_per_s=link,
                nvme_bytes_per_s=_nvme(recipe),
                ranks_per_node=ranks_per_node,
            )
        copy = compute("parameters", f.host_copy_s, bytes_moved=moved, link_bytes_per_s=link)
        copies.append(compute("parameters", f.repeated_s, each_s=copy, times=2 * layout.micro_batches))
    if "activations" in recipe.offload and time.stage.depth:
        # Of one micro-batch: all that would stay for backward, whatever recomputation leaves of it.
        single = Rank(graph, time.stage, replace(layout, micro_batches=1), replace(recipe, offload=()))
        moved = compute("bytes", f.offloaded_activation_bytes, kept_bytes=kept.activations(single)[0])
        copy = compute("activations", f.host_copy_s, bytes_moved=moved, link_bytes_per_s=link)
        copies.append(compute("activations", f.repeated_s, each_s=copy, times=layout.micro_batches))
    if not copies:
        return []
    computed = compute(
        "compute",
        f.repeated_s,
        each_s=Line("micro_batch_compute", time.device_s, "s", Kind.MODELLED, source=ABOVE),
        times=layout.micro_batches,
    )
    copied = total("copies", tuple(copies), unit="s")
    return [
        compute(
            "offload",
            comm.exposed_s,
            communication_s=copied,
            compute_s=computed,
            overlap=OVERLAP[recipe.framework],
            contention=COPY_CONTENTION,
            children=(copied,),
        )
    ]


def optimizer_line(stage: Stage, layout: Layout, recipe: Recipe, device: Device, ranks_per_node: int) -> Line:
    """Clipping and the update of this rank's share of the parameters."""
    dense, expert = _trained(stage, layout, recipe)
    sharded = layout.zero_stage >= 1
    local = dense / (layout.shard if sharded else 1) + expert / (layout.expert_shard if sharded else 1)
    parts: list[Line] = []
    if recipe.framework == "megatron":  # whole, though each rank steps a share of it
        buffer = compute(
            "buffer_bytes",
            f.gradient_buffer_bytes,
            params=dense + expert,
            gradient_bytes=recipe.gradient_bytes,
        )
        parts.append(device.move("gradient_buffer", buffer))
    offloaded = "optimizer" in recipe.offload
    if not offloaded or recipe.framework == "megatron":  # which clips before it copies
        clip = compute(
            "clip_bytes",
            f.gradient_clip_bytes,
            params=local,
            gradient_bytes=recipe.gradient_bytes,
        )
        parts.append(device.move("clip", clip))
    if offloaded:
        stepped = compute(
            "host",
            f.host_update_s,
            params=local,
            gradient_bytes=recipe.gradient_bytes,
            parameter_bytes=recipe.parameter_bytes,
            state_bytes=recipe.optimizer_bytes,
            link_bytes_per_s=_host_link(device),
            ranks_per_node=ranks_per_node,
            host_bytes_per_s=HOST_BANDWIDTH,
        )
        parts.append(stepped)
        if "nvme" in recipe.offload:
            swapped = compute(
                "nvme",
                f.nvme_update_s,
                params=local,
                state_bytes=recipe.optimizer_bytes,
                gradient_bytes=MASTER_GRADIENT_BYTES,
                ranks_per_node=ranks_per_node,
                nvme_bytes_per_s=_nvme(recipe),
            )
            parts.append(swapped)
        alone = len(parts) == 1
        return replace(stepped, name="optimizer") if alone else total("optimizer", tuple(parts), unit="s")
    update = compute(
        "update_bytes",
        f.optimizer_traffic_bytes,
        params=local,
        gradient_bytes=recipe.gradient_bytes,
        state_bytes=recipe.optimizer_bytes,
        parameter_bytes=recipe.parameter_bytes,
        passes=OPTIMIZER_PASSES[recipe.kernels],
    )
    parts.append(device.move("update", update))
    calls = _optimizer_calls(stage, recipe)
    if calls:
        # The host is the slower side on the many small tensors of the layers, not on the tables.
        in_layers = sum(run.held.total for run in stage.layers) / stage.params.total
        device_s = total("device", tuple(parts), unit="s")
        parts.append(
            compute(
                "launch",
                f.exposed_launch_s,
                device_s=compute("layers", f.shared_s, whole_s=device_s, share=in_layers),
                host_s=compute("host", f.launch_s, kernels=calls, kernel_launch_s=device.launch),
            )
        )
    return total("optimizer", tuple(parts), unit="s")


def _optimizer_calls(stage: Stage, recipe: Recipe) -> int:
    """Host time of an optimizer that goes from tensor to tensor, in kernel launches.

    It shows under loss scaling alone, which reads a flag back before every step; otherwise the host is
    ahead. PyTorch updates all tensors at once since 2.0.
    """
    loops = recipe.framework in ("ddp", "hf") and recipe.year < FOREACH_YEAR and recipe.math == "fp16"
    each = TENSOR_CALLS.get(recipe.optimizer, 0)
    if not loops or not each:
        return 0
    return each * sum(run.count * block_tensors(run.block) for run in stage.layers)
