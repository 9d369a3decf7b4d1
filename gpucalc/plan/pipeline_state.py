"""What PyTorch's pipelining keeps between stages: buffers to receive in, results until their backward."""

from __future__ import annotations

from gpucalc.formulas import activations as act
from gpucalc.line import Line, compute
from gpucalc.num import Num
from gpucalc.plan.rank import Rank

UNKEPT_OUTPUT_YEAR = 2026  # torchtitan asks for no results since October 2025 (e5ef99aa)


def _pipelined(rank: Rank) -> bool:
    return rank.recipe.framework == "torchtitan" and rank.layout.pp > 1 and bool(rank.graph.stacks)


def _chunks(rank: Rank) -> tuple[Num, Num]:
    """Chunks of layers on a rank that receive their input, and that send their result on."""
    chunks = rank.layout.vpp
    return chunks - int(rank.stage.first), chunks - int(rank.stage.last)


def _message(rank: Rank) -> Line:
    """What one micro-batch takes between two stages."""
    return compute(
        "message",
        act.checkpoint_bytes,
        hidden=rank.graph.trunk.hidden,
        tokens=rank.tokens,
        activation_bytes=rank.recipe.stream_bytes,
        shards=rank.sp,
    )


def receive_buffers(rank: Rank) -> tuple[Line, ...]:
    """Buffers made once for every micro-batch of a step. Inputs in flight lie among the activations."""
    if not _pipelined(rank):
        return ()
    received, sent = _chunks(rank)
    return (
        compute(
            "receive_buffers",
            act.pipeline_receive_bytes,
            message_bytes=_message(rank),
            micro_batches=rank.layout.micro_batches,
            in_flight=rank.in_flight,
            received=received,
            sent=sent,
        ),
    )


def stage_outputs(rank: Rank) -> tuple[Line, ...]:
    """Results of stages, from which their backward begins."""
    if not _pipelined(rank):
        return ()
    return (
        compute(
            "stage_outputs",
            act.pipeline_output_bytes,
            message_bytes=_message(rank),
            in_flight=rank.in_flight,
            sent=_chunks(rank)[1],
        ),
    )


def kept_logits(rank: Rank) -> tuple[Line, ...]:
    """Logits of the micro-batches before, which the last stage kept to return them."""
    if not _pipelined(rank) or not rank.vocab or rank.recipe.year >= UNKEPT_OUTPUT_YEAR:
        return ()
    return (
        compute(
            "kept_logits",
            act.pipeline_logits_bytes,
            tokens=rank.tokens,
            vocab=rank.vocab,
            activation_bytes=rank.recipe.activation_bytes,
            micro_batches=rank.layout.micro_batches,
            tp=rank.layout.tp,
        ),
    )
