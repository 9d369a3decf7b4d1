"""A small plan made by hand, for tests of what reads plans. Its numbers are round, not right."""

from __future__ import annotations

from dataclasses import fields

from gpucalc.formulas.memory import gradient_bytes, optimizer_state_bytes, weight_bytes
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan.answer import Action, Assumption, Level, Plan, Verdict
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.units import GIB

PARAMS = Line("params", 8 * 2**30, "count", source="counted from the architecture")
SHARD = Line("shard", 8, "count", Kind.ASSUMED, note="dp")
CAPACITY = Line("usable_memory", 79 * GIB, "bytes", Kind.MEASURED, source="driver report")

STATED = {
    "framework": "fsdp",
    "precision": "bf16",
    "math": "bf16",
    "optimizer": "adamw",
    "optimizer_bytes": 8,
    "attention": "flash",
    "kernels": "eager",
    "recompute": "full",
    "seq_len": 8192,
    "loss": "unfused",
    "method": "full",
}
NEUTRAL = {"int": 4, "float": 4.0, "str": "none", "bool": False, "tuple[str, ...]": ()}
RECIPE = Recipe(**{f.name: STATED.get(f.name, NEUTRAL.get(str(f.type))) for f in fields(Recipe)})  # type: ignore[arg-type]
LAYOUT = Layout(
    tp=1,
    pp=2,
    vpp=1,
    cp=1,
    ep=1,
    etp=1,
    dp=8,
    shard=8,
    zero_stage=3,
    micro_batch=1,
    micro_batches=16,
    sequence_parallel=False,
    schedule="1f1b",
)


def _phase(name: str, activations_gib: float) -> Line:
    weights = compute("weights", weight_bytes, params=PARAMS, parameter_bytes=4, shard=SHARD, zero_stage=3)
    gradients = compute(
        "gradients", gradient_bytes, params=PARAMS, element_bytes=4, shard=SHARD, zero_stage=3
    )
    states = compute(
        "optimizer_states", optimizer_state_bytes, params=PARAMS, bytes_per_param=8, shard=SHARD, zero_stage=3
    )
    activations = total(
        "activations",
        (
            Line("attention", activations_gib * GIB * 0.75, "bytes", Kind.MODELLED, source="made up"),
            Line("feed_forward", activations_gib * GIB * 0.25, "bytes", Kind.MODELLED, source="made up"),
        ),
        unit="bytes",
    )
    return total(name, (weights, gradients, states, activations), unit="bytes")


def _stage(index: int, activations_gib: float) -> Line:
    phases = (_phase("forward", activations_gib / 2), _phase("backward", activations_gib))
    return Line(f"stage_{index}", phases[-1].value, "bytes", Kind.MODELLED, children=phases)


def plan(level: Level = Level.FITS) -> Plan:
    """A two-stage training plan at the given verdict."""
    activations = {Level.FITS: 32.0, Level.MARGINAL: 60.0, Level.DOES_NOT_FIT: 96.0}[level]
    stages = (_stage(0, activations), _stage(1, activations / 2))
    needed = stages[0].children[-1]
    runs = level is not Level.DOES_NOT_FIT
    step = Line(
        "step_time",
        2.5,
        "s",
        Kind.MODELLED,
        children=(
            Line("matmuls", 1.5, "s", Kind.MODELLED, source="made up"),
            Line("attention", 0.75, "s", Kind.MODELLED, source="made up"),
            Line("all_gather", 0.25, "s", Kind.MODELLED, source="made up"),
        ),
    )
    rates = Line(
        "throughput",
        6.4,
        "samples/s",
        Kind.MODELLED,
        children=(
            Line("tokens_per_s", 52_428.8, "tokens/s", Kind.MODELLED, source="made up"),
            Line("mfu", 0.41, "fraction", Kind.MODELLED, source="made up", note="of the dense bf16 peak"),
        ),
    )
    cost = Line(
        "cost",
        384.0,
        "GPU h",
        Kind.ASSUMED,
        children=(
            Line("gpu_hours", 384.0, "GPU h", source="made up"),
            Line("rental", 960.0, "USD", Kind.ASSUMED, source="made up"),
        ),
        note="of one day",
    )
    return Plan(
        name="made-up-8b",
        model=Line("params_total", PARAMS.value, "count", children=(PARAMS,)),
        fleet="16x H100-SXM",
        gpus=16,
        recipe=RECIPE,
        layout=LAYOUT,
        verdict=Verdict(
            level=level,
            needed=needed,
            capacity=CAPACITY,
            margin_bytes=CAPACITY.value - needed.value,
            expected_error=0.05,
            error_basis="made up",
            binds="activations",
            phase="backward",
            stage=0,
        ),
        memory=Line("memory", needed.value, "bytes", Kind.MODELLED, children=stages),
        time=step if runs else None,
        throughput=rates if runs else None,
        cost=cost if runs else None,
        speed_error=(0.1, "made up") if runs else None,
        binds="compute" if runs else "memory capacity",
        assumptions=(Assumption("run.dropout", False, "most recipes of this size train without"),),
        actions=(
            Action(
                "run.micro_batch = 2",
                {"run.micro_batch": 2},
                Level.MARGINAL,
                Line("backward", 76 * GIB, "bytes"),
                Line("step", 2.4, "s"),
                Line("tokens_per_s", 54_000.0, "tokens/s"),
            ),
            Action("run.tp = 2", {"run.tp": 2}, Level.FITS, Line("backward", 40 * GIB, "bytes"), None, None),
        ),
        notes=("a note with \x1b[31mcolour\x1b[0m in it",),
    )
