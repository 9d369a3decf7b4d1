"""What a step time comes to: tokens and samples per second, FLOP/s and their share of the peak."""

from __future__ import annotations

from typing import Any

from gpucalc.formulas import compute as f
from gpucalc.graph import Attention, Graph, Linear, Shard, StateMixer
from gpucalc.line import Line, compute, total, worst_kind
from gpucalc.num import Num
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.stage_time import stack_shape
from gpucalc.plan.stages import block_linears
from gpucalc.plan.work_attention import attention_pairs
from gpucalc.plan.work_lines import WHOLE_RECOMPUTE
from gpucalc.plan.work_state import SCAN_CHUNK
from gpucalc.spec.hardware import Cluster


def sample_flops(graph: Graph, recipe: Recipe) -> tuple[Num, Num]:
    """Forward FLOPs of one sample, whole model: matrices, attention (causal counted half)."""
    if graph.network is not None and not graph.stacks:
        return graph.network.forward_flops, 0.0
    linear: Num = 0.0
    attention: Num = 0.0
    one = Layout(
        tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, dp=1, shard=1, zero_stage=0, micro_batch=1, micro_batches=1,
        sequence_parallel=False, schedule="none",
    )  # fmt: skip
    for stack in graph.stacks:
        shape = stack_shape(graph, stack, one, recipe)
        for index, block in enumerate(stack.blocks):
            layers = stack.count(index)
            linear = linear + layers * _linear_flops(block.linears, shape.tokens)
            for part in block.parts:
                linear = linear + layers * _linear_flops(part.linears, shape.tokens)
                if isinstance(part, Attention):
                    attention = attention + layers * f.attention_core_flops(
                        sequences=1,
                        heads=part.heads,
                        qk_dim=part.qk_dim,
                        v_dim=part.v_dim,
                        pairs=attention_pairs(part, part is block.cross, shape).value,
                    )
                elif isinstance(part, StateMixer):
                    attention = attention + layers * f.state_mixer_flops(
                        tokens=shape.tokens,
                        heads=part.heads,
                        key_dim=part.key_dim,
                        value_dim=part.value_dim,
                        chunk=SCAN_CHUNK,
                    )
        linear = linear + _linear_flops(stack.inputs, shape.tokens)
    trunk = stack_shape(graph, graph.trunk, one, recipe).tokens
    linear = linear + _linear_flops(graph.linears, trunk)
    if graph.embedding is not None:
        linear = linear + _linear_flops(graph.embedding.projection, trunk)
    if graph.head is not None:
        rows = trunk if graph.head.vocab else 1
        linear = linear + _linear_flops(graph.head.linears, rows)
        linear = linear + 2 * rows * graph.head.vocab * graph.head.hidden
    return linear, attention


def _linear_flops(linears: tuple[Linear, ...], tokens: Num) -> Num:
    result: Num = 0.0
    for linear in linears:
        result = result + f.linear_flops(
            tokens=tokens,
            inputs=linear.inputs,
            outputs=linear.outputs,
            # `active` of the copies for experts; every copy of a matrix tokens pass through one after another
            active=linear.active if linear.shard is Shard.EXPERT else linear.copies * linear.active,
        )
    return result


def _layer_flops(graph: Graph, recipe: Recipe) -> tuple[Num, Num]:
    """Forward FLOPs of one sample in the matrices of layers, and in each layer's last one."""
    layers: Num = 0.0
    last: Num = 0.0
    for stack in graph.stacks:
        tokens = stack.tokens if stack.tokens is not None else recipe.seq_len
        for index, block in enumerate(stack.blocks):
            parts = block.parts
            count = stack.count(index)
            layers = layers + count * _linear_flops(block_linears(block), tokens)
            if parts and parts[-1].linears:
                last = last + count * _linear_flops(parts[-1].linears[-1:], tokens)
    return layers, last


def sample_tokens(graph: Graph, recipe: Recipe) -> Num:
    """Tokens of the trunk in one sample."""
    if not graph.stacks:
        return 1
    trunk = graph.trunk
    return trunk.tokens if trunk.tokens is not None else recipe.seq_len


def _mean_peak(cluster: Cluster, math: str) -> Line:
    """Peak rate of a GPU of the fleet; of several kinds the mean, so that utilisation is the fleet's."""
    peaks = []
    for pool in cluster.pools:
        peak = pool.gpu.peak(math)
        assert peak is not None  # refused before, where a kind has no such rate
        peaks.append(peak)
    if len(peaks) == 1:
        return peaks[0]
    summed = sum(pool.count * peak.value for pool, peak in zip(cluster.pools, peaks, strict=True))
    return Line(
        "peak",
        summed / cluster.count,
        peaks[0].unit,
        worst_kind(peaks),
        source="mean of the fleet's GPU kinds, by count",
    )


def throughput(graph: Graph, layout: Layout, recipe: Recipe, cluster: Cluster, step: Line) -> Line:
    """Rates of a step: the value is samples per second of the whole run, the children say the rest.

    Conventions: model FLOPs are 3 x forward with causal attention counted half; hardware FLOPs add
    what is computed twice. MFU and HFU divide by the dense peak of the recipe's matrix precision.
    """
    batch = layout.global_batch
    linear, attention = sample_flops(graph, recipe)
    layers, last = _layer_flops(graph, recipe)
    again: Num = 0.0
    if recipe.recompute == "full":
        again = compute(
            "recompute_flops",
            f.full_recompute_flops,
            layer_forward_flops=batch * (layers + attention),
            last_matmul_flops=batch * last,
            stops_early=recipe.framework not in WHOLE_RECOMPUTE,
        )
    elif recipe.recompute == "selective" and recipe.recompute_scope == "core":
        again = batch * attention
    model = compute(
        "model_flops",
        f.model_flops,
        linear_forward_flops=batch * linear,
        attention_forward_flops=batch * attention,
        note="3 x forward, causal attention counted half",
    )
    backward = (
        compute(
            "matrices",
            f.linear_backward_flops,
            forward_flops=batch * linear,
            input_gradients=1,
            weight_gradients=1 if recipe.adapters is None else 0,
        ),
        compute(
            "attention",
            f.attention_backward_flops,
            forward_flops=batch * attention,
            recomputes_scores=recipe.attention != "eager",
        ),
    )
    hardware = compute(
        "hardware_flops",
        f.hardware_flops,
        forward_flops=batch * (linear + attention),
        backward_flops=total("backward_flops", backward, unit="FLOP"),
        recompute_flops=again,
        note="forward, backward with scores recomputed, and recomputed layers",
    )
    peak = _mean_peak(cluster, recipe.math)
    gpus = layout.world
    shared: dict[str, Any] = {"step_s": step, "gpus": gpus}
    tokens = compute("tokens_per_s", f.tokens_per_s, tokens=batch * sample_tokens(graph, recipe), step_s=step)
    children = (
        tokens,
        compute("tokens_per_s_per_gpu", f.tokens_per_s_per_gpu, tokens_per_s=tokens, gpus=gpus),
        model,
        compute("model_flops_per_s_per_gpu", f.flops_per_s_per_gpu, flops=model, **shared),
        compute("mfu", f.flops_utilisation, flops=model, peak_flops_per_s=peak, **shared),
        hardware,
        compute("hfu", f.flops_utilisation, flops=hardware, peak_flops_per_s=peak, **shared),
    )
    return compute("throughput", f.samples_per_s, samples=batch, step_s=step, children=children)
