"""A network known by its totals, run forward alone: memory, one pass over a batch, images per second.

There are no tokens and no cache: every GPU holds a copy and answers batches of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_memory as mem
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.allowances import CUDA_CONTEXT
from gpucalc.plan.answer import Assumption, Level, Plan, Verdict
from gpucalc.plan.device import Device
from gpucalc.plan.economics import Economics, cost_line
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, fleet_notes, level_rank, model_line
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.network_time import forward_pass
from gpucalc.plan.resolve import resolve_layout, resolve_recipe
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, WeightFormat
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

PHASE = "forward"
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
# No published measurement of this class is at hand: the band in which a plan is called marginal.
ERROR = 0.10
ERROR_BASIS = "assumed: no published measurement of a network run forward alone"
LEGAL = ("framework", "dtype", "concurrency", "memory_in_use_gib", "task")


def evaluate_network(subject: Subject, run: ServeRun, cluster: Cluster, terms: Terms) -> Plan:
    """The plan of a network that answers batches of images. Raises InputError, UnsupportedModel."""
    network = subject.graph.network
    assert network is not None
    _refuse_tokens(run)
    size, batch = DTYPES[run.dtype], run.concurrency or 1
    memory, told = _memory(subject, batch, size)
    layout = ServeLayout(tp=1, pp=1, dp=1, ep=1, replicas=cluster.count, gpus=cluster.count)
    recipe = _recipe(run, batch, size)
    verdict = _verdict(memory, cluster, recipe)
    step = rates = cost = None
    binds = "memory capacity"
    if (terms.always_time or verdict.level is not Level.DOES_NOT_FIT) and network.forward_flops:
        step = _slowest(subject, run, cluster, batch)
        rates = _rates(step, batch, cluster.count, network.forward_flops)
        binds = _binds(step)
        cost = _cost(cluster, rates, terms.economics)
    known = terms.errors or ErrorTable()
    return Plan(
        name=terms.name,
        model=model_line(subject.counts),
        fleet=terms.fleet,
        gpus=cluster.count,
        recipe=recipe,
        layout=layout,
        verdict=verdict,
        memory=memory,
        time=step,
        throughput=rates,
        cost=cost,
        speed_error=known.time_error("ddp") if step is not None else None,
        binds=binds,
        assumptions=(*terms.assumptions, *(Assumption("gpus", "", text) for text in cluster.assumptions)),
        actions=(),
        notes=(*subject.graph.notes, *terms.notes, *told, *fleet_notes(cluster)),
    )


def _refuse_tokens(run: ServeRun) -> None:
    """Refuse what only a language model has. Raises InputError."""
    if run.framework != "hf":
        problem = "serves tokens; a network known by its totals is run by PyTorch alone"
        raise InputError(problem, key="run.framework", given=run.framework, legal="hf")
    if run.dtype not in DTYPES:
        raise InputError("no plan", key="run.dtype", given=run.dtype, legal=", ".join(DTYPES))
    stated = [key for key in sorted(run.model_fields_set) if key not in LEGAL]
    unlike = [key for key in stated if getattr(run, key) != type(run).model_fields[key].default]
    if unlike:
        problem = "does not apply to a network known by its totals, which has neither tokens nor a cache"
        raise InputError(problem, key=f"run.{unlike[0]}", legal=", ".join(LEGAL[:4]))


def _memory(subject: Subject, batch: int, size: int) -> tuple[Line, tuple[str, ...]]:
    """Bytes of one GPU by part, and what was assumed of them."""
    network = subject.graph.network
    assert network is not None
    params = subject.counts.total
    parts = [compute("weights", mem.served_weight_bytes, params=params, bytes_per_param=size)]
    if network.buffers:
        parts.append(
            compute("buffers", mem.served_weight_bytes, params=network.buffers, bytes_per_param=size)
        )
    told: tuple[str, ...] = ()
    live, kind = network.live_elements, Kind.MODELLED
    if live is None:
        live, kind = network.saved_elements, Kind.ASSUMED
        if live is None:
            raise UnsupportedModel(f"{subject.graph.name}: what lives in a forward pass is not known")
        told = ("activations are taken as all that training would keep: the model file has no other trace",)
    parts.append(
        compute(
            "activation_peak",
            mem.network_live_bytes,
            kind=kind,
            images=batch,
            live_elements=live,
            element_bytes=size,
        )
    )
    parts.append(replace(CUDA_CONTEXT, name="cuda_context"))
    return total("memory", tuple(parts), unit="bytes"), told


def _verdict(memory: Line, cluster: Cluster, recipe: ServeRecipe) -> Verdict:
    capacity = cluster.usable_memory(recipe.in_use_bytes)
    return Verdict(
        level=tuple(Level)[int(level_rank(memory.value, capacity.value, ERROR))],
        needed=memory,
        capacity=capacity,
        margin_bytes=capacity.value - memory.value,
        expected_error=ERROR,
        error_basis=ERROR_BASIS,
        binds=max(memory.children, key=lambda line: line.value).name,
        phase=PHASE,
        stage=0,
    )


def _recipe(run: ServeRun, batch: int, size: int) -> ServeRecipe:
    weights = WeightFormat(run.dtype, size, size, size, size, size, math=run.dtype)
    return ServeRecipe(
        engine=run.framework, version=run.version or "", weights=weights, dtype=run.dtype, dtype_bytes=size,
        kv_dtype="none", kv_bytes=0, max_model_len=0, max_num_seqs=batch, max_num_batched_tokens=0,
        block_size=1, gpu_memory_utilization=None, mem_fraction_static=None, enforce_eager=True,
        in_use_bytes=(run.memory_in_use_gib or 0) * 2**30, isl=0, osl=0, concurrency=batch,
        request_rate=None,
    )  # fmt: skip


def _slowest(subject: Subject, run: ServeRun, cluster: Cluster, batch: int) -> Line:
    """One forward pass of a batch on the slowest kind of card."""
    layout, recipe = _as_trained(subject, run, batch)
    passes = [
        forward_pass(subject.graph, layout, recipe, Device.of(pool.gpu, pool.kernels, recipe))
        for pool in cluster.pools
    ]
    return max(passes, key=lambda line: line.value)


def _as_trained(subject: Subject, run: ServeRun, batch: int) -> tuple[Layout, Recipe]:
    """The layout and recipe whose forward pass this is: that of one card, weights in the type served."""
    keys: dict[str, Any] = {
        "task": "train", "framework": "ddp", "micro_batch": batch, "global_batch": batch, "grad_accum": 1,
        "precision": run.dtype if run.dtype == "fp32" else f"{run.dtype}-pure", "optimizer": "sgd",
    }  # fmt: skip
    train = TrainRun.model_validate(keys)
    layout, _ = resolve_layout(train, subject.graph, gpus=1)
    return layout, resolve_recipe(train, subject.graph)


def _rates(step: Line, batch: int, cards: int, flops: float) -> Line:
    images = compute("images_per_s", f.network_rate_per_s, images=batch, cards=cards, seconds=step)
    per_card = compute("images_per_s_per_gpu", f.network_rate_per_s, images=batch, cards=1, seconds=step)
    latency = replace(step, name="latency", children=())
    work = compute("forward_flops", f.network_flops, images=batch, flops_per_image=flops, direct_share=1.0)
    return replace(images, children=(per_card, latency, work))


def _cost(cluster: Cluster, rates: Line, economics: Economics | None) -> Line:
    """Hours, energy and rent of a day; there are no tokens to divide them by."""
    cost = cost_line(cluster, rates, economics.money if economics is not None else None, serves=True)
    return replace(cost, children=tuple(line for line in cost.children if "tokens" not in line.name))


def _binds(step: Line) -> str:
    """What most of a pass is: launches, elementwise traffic or products."""
    named = {"launch": "latency", "convolutions": "compute"}
    leaves = [leaf for child in step.children for leaf in (child.children or (child,))]
    return named.get(max(leaves, key=lambda line: line.value).name, "memory bandwidth")
