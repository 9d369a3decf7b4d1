"""What makes a layout legal. Every broken rule is found at once, with its equation and nearest values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gpucalc.graph import Attention, Graph, Mlp, Moe, StateMixer
from gpucalc.num import Num, where

DUAL_PIPES = ("dualpipe", "dualpipe-v")  # schedules that give every rank a stage from each end
MOST_LISTED = 12  # legal values written out; of more, the nearest


@dataclass(frozen=True, slots=True)
class Degrees:
    """The numbers a layout is built from, before they are known to be legal.

    The rules of sequences and batches take columns too.
    """

    gpus: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    micro_batch: int
    global_batch: int
    seq_len: int
    sequence_parallel: bool
    even_pipeline: bool


def broken_rules(graph: Graph, d: Degrees) -> tuple[str, ...]:
    """Every rule this layout breaks, in words; empty when it is legal."""
    rules: list[str] = []
    product = d.tp * d.cp * d.pp * d.dp
    if product != d.gpus:
        fixed = d.tp * d.cp * d.pp
        if d.gpus % fixed == 0:
            hint = f"dp {d.gpus // fixed} would use all {d.gpus}"
        else:
            hint = f"tp x cp x pp must divide {d.gpus}: {_nearest(fixed, divisors(d.gpus))} would"
        rules.append(
            f"tp {d.tp} x cp {d.cp} x pp {d.pp} x dp {d.dp} = {product}, but there are {d.gpus} GPUs ({hint})"
        )
    rules += model_rules(graph, d)
    if uneven_batch(d):
        step = step_of(d)
        rules.append(
            f"global_batch {d.global_batch} is not a multiple of dp {d.dp} x micro_batch {d.micro_batch}"
            f" = {step} (nearest: {_multiples(d.global_batch, step)})"
        )
    elif uneven_rounds(d):
        rules.append(
            f"interleaved schedule: {d.global_batch // step_of(d)} micro-batches are not a multiple of"
            f" pp {d.pp} (nearest global_batch: {_multiples(d.global_batch, d.pp * step_of(d))})"
        )
    if d.vpp > 1 and d.pp == 1:
        rules.append(f"vpp {d.vpp} needs pp > 1; use vpp 1")
    split = d.tp if d.sequence_parallel else 1
    legal = math.lcm(2 * d.cp if d.cp > 1 else 1, d.cp * split)
    if uneven_halves(d):
        rules.append(
            f"seq_len {d.seq_len} is not a multiple of 2 x cp {d.cp}"
            f" (nearest: {_multiples(d.seq_len, legal)})"
        )
    elif uneven_tokens(d):
        rules.append(
            f"sequence parallel: seq_len {d.seq_len} / cp {d.cp} is not a multiple of tp {d.tp}"
            f" (nearest seq_len: {_multiples(d.seq_len, legal)})"
        )
    return tuple(rules)


def shard_rules(d: Degrees, dp_shard: int) -> tuple[str, ...]:
    """What hybrid sharding asks: whole copies, each with every expert (Megatron-LM, torchtitan)."""
    if d.dp % dp_shard:
        return (_divides("dp_shard", dp_shard, "data parallel ranks", d.dp),)
    held = d.tp * d.cp * dp_shard
    if held % (d.ep * d.etp):
        experts = f"ep {d.ep}" + (f" x etp {d.etp}" if d.etp > 1 else "")
        near = [shard for shard in divisors(d.dp) if not split_experts(d, shard)]
        return (
            f"{experts} does not divide the {held} GPUs that dp_shard {dp_shard} lets share one copy"
            f" (nearest dp_shard: {_nearest(dp_shard, near)})",
        )
    return ()


def split_experts(d: Degrees, dp_shard: Num) -> Num:
    """Whether a copy of the sharded state would not hold every expert."""
    return (d.tp * d.cp * dp_shard) % (d.ep * d.etp) > 0


def uneven_batch(d: Degrees) -> Num:
    """Whether ranks or micro-batches would not be given the same number of sequences."""
    return d.global_batch % (d.dp * d.micro_batch) > 0


def uneven_rounds(d: Degrees) -> Num:
    """Whether an interleaved schedule would not be given whole rounds of micro-batches."""
    return (d.vpp > 1) & ((d.global_batch // (d.dp * d.micro_batch)) % d.pp > 0)


def uneven_halves(d: Degrees) -> Num:
    """Whether context parallelism, which gives a rank one piece of each half, would split unevenly."""
    return (d.cp > 1) & (d.seq_len % (2 * d.cp) > 0)


def uneven_tokens(d: Degrees) -> Num:
    """Whether sequence parallelism would give ranks different numbers of tokens."""
    return (d.seq_len // d.cp) % where(d.sequence_parallel, d.tp, 1) > 0


def too_few_to_fold(pp: int, micro_batches: Num) -> Num:
    """Whether a DualPipe schedule has too few micro-batches to fill a pipeline from both ends."""
    return micro_batches < 2 * pp


def uneven_ends(schedule: str, micro_batches: Num) -> Num:
    """Whether DualPipe would not send as many micro-batches from one end as from the other."""
    return (schedule == "dualpipe") & (micro_batches % 2 > 0)


def schedule_rules(graph: Graph, schedule: str, *, pp: int, vpp: int, micro_batches: int) -> tuple[str, ...]:
    """What a pipeline's schedule asks of a layout beyond the rules for all."""
    rules = []
    if schedule != "1f1b" and vpp > 1:
        chunks = "two stages, one from each end," if schedule in DUAL_PIPES else "one chunk of layers"
        rules.append(f"schedule {schedule} runs {chunks} per rank, but vpp is {vpp} (nearest: 1)")
    if schedule == "dualpipe" and pp % 2:
        rules.append(f"schedule dualpipe pairs the stages of both ends: pp {pp} is odd (nearest: {pp + 1})")
    if schedule in DUAL_PIPES and too_few_to_fold(pp, micro_batches):
        rules.append(
            f"schedule {schedule} takes 2 x pp {pp} = {2 * pp} micro-batches a step or more, here"
            f" {micro_batches}: raise global_batch"
        )
    elif uneven_ends(schedule, micro_batches):
        rules.append(
            f"schedule dualpipe sends half of the micro-batches from each end: {micro_batches} is odd"
        )
    layers = len(graph.trunk.layers) if graph.stacks else 1
    if schedule == "dualpipe-v" and 2 * pp > layers:
        rules.append(
            f"schedule dualpipe-v cuts {layers} layers into 2 x pp {pp} stages: use pp {layers // 2}"
        )
    return tuple(rules)


def step_of(d: Degrees) -> int:
    """Sequences that all data-parallel ranks take in one micro-batch."""
    return d.dp * d.micro_batch


def model_rules(graph: Graph, d: Degrees) -> list[str]:
    """Broken rules of the model's shape: what can be divided by which degree."""
    rules: list[str] = []
    if not graph.stacks:
        for name, value in (("tp", d.tp), ("pp", d.pp), ("cp", d.cp), ("ep", d.ep)):
            if value > 1:
                rules.append(
                    f"{name} {value}: {graph.name} is known by its totals and cannot be cut; use {name} 1"
                )
        return rules
    seen: set[str] = set()

    def add(rule: str) -> None:
        if rule not in seen:
            seen.add(rule)
            rules.append(rule)

    for stack in graph.stacks:
        for block in stack.blocks:
            for mixer in (block.mixer, block.state, block.cross):
                if isinstance(mixer, Attention):
                    if mixer.heads % d.tp:
                        add(_divides("tp", d.tp, "attention heads", mixer.heads))
                    elif mixer.kv_lora is None and mixer.kv_heads % d.tp and d.tp % mixer.kv_heads:
                        legal = [
                            t
                            for t in divisors(mixer.heads)
                            if not mixer.kv_heads % t or not t % mixer.kv_heads
                        ]
                        add(
                            f"tp {d.tp} neither divides nor is a multiple of {mixer.kv_heads} KV heads"
                            f" (legal: {_listed(legal)})"
                        )
                elif isinstance(mixer, StateMixer) and mixer.heads % d.tp:
                    add(_divides("tp", d.tp, f"{mixer.kind} heads", mixer.heads))
            if isinstance(block.ffn, Mlp) and block.ffn.ffn % d.tp:
                add(_divides("tp", d.tp, "the MLP width", block.ffn.ffn))
            if isinstance(block.ffn, Moe) and block.ffn.experts % d.ep:
                add(_divides("ep", d.ep, "experts", block.ffn.experts))
            if isinstance(block.ffn, Moe) and block.ffn.expert_ffn % d.etp:
                add(_divides("etp", d.etp, "the width of an expert", block.ffn.expert_ffn))
    moe = any(isinstance(block.ffn, Moe) for stack in graph.stacks for block in stack.blocks)
    if d.ep > 1 and not moe:
        add(f"ep {d.ep}: {graph.name} has no experts; use ep 1")
    ranks = d.gpus // d.pp if d.pp and d.gpus % d.pp == 0 else None
    if ranks is not None and ranks % (d.ep * d.etp):
        near = _nearest(d.ep * d.etp, divisors(ranks))
        add(
            f"ep {d.ep} x etp {d.etp} = {d.ep * d.etp} does not divide the {ranks} GPUs of a pipeline stage"
            f" (nearest: {near})"
        )
    layers = len(graph.trunk.layers)
    chunks = d.pp * d.vpp
    # An uneven split may give the first and last chunk the embedding and the head alone.
    if chunks > layers + (0 if d.even_pipeline else 2):
        add(
            f"pp {d.pp} x vpp {d.vpp} = {chunks} chunks, but there are {layers} layers"
            f" (nearest: {_nearest_chunks(d, layers)})"
        )
    elif d.even_pipeline and layers % chunks:
        add(
            f"{layers} layers are not divisible by pp {d.pp} x vpp {d.vpp} = {chunks}"
            f" (nearest: {_nearest_chunks(d, layers)}; run.pipeline_split: uneven allows it)"
        )
    return rules


def _nearest_chunks(d: Degrees, layers: int) -> str:
    """The nearest degrees that divide the layers: vpp where pp alone does, else pp."""
    if d.vpp > 1 and layers % d.pp == 0:
        return f"vpp {_nearest(d.vpp, divisors(layers // d.pp))}"
    return f"pp {_nearest(d.pp, divisors(layers))}" + (" with vpp 1" if d.vpp > 1 else "")


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _divides(key: str, value: int, what: str, number: int) -> str:
    legal = divisors(number)
    if len(legal) > MOST_LISTED:
        return f"{key} {value} does not divide {what}, {number} (nearest: {_nearest(value, legal)})"
    return f"{key} {value} does not divide {number} {what} (legal: {_listed(legal)})"


def _nearest(value: int, legal: list[int]) -> str:
    below = [v for v in legal if v <= value]
    above = [v for v in legal if v > value]
    return " or ".join(str(v) for v in [*below[-1:], *above[:1]])


def _multiples(value: int, step: int) -> str:
    """The multiples of `step` on either side of a value."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(v) for v in values)
