"""Optimizer states that depend on the shapes of a rank's weights: Adafactor, Muon, SOAP, Shampoo."""

from __future__ import annotations

from typing import Any

from gpucalc.formulas import optimizers as opt
from gpucalc.graph import Linear, Shard
from gpucalc.line import Line, compute
from gpucalc.num import maximum
from gpucalc.plan import allowances
from gpucalc.plan.rank import Rank
from gpucalc.plan.stages import block_linears

SHAPED = ("adafactor", "muon", "soap", "shampoo")


# States per parameter of bitsandbytes' 8-bit optimizers.
EIGHT_BIT = {"adamw-8bit": 2, "lion-8bit": 1}
# Until 4.47 (December 2024) the Trainer looked for a class that bitsandbytes' AdamW is not.
WIDE_EMBEDDINGS_YEAR = 2025


def shaped_states(rank: Rank) -> tuple[Line, ...]:
    """States beside those that every parameter has alike."""
    name = rank.recipe.optimizer
    if name in EIGHT_BIT:
        return _embedding_states(rank)
    if name not in SHAPED:
        return ()
    layout = rank.layout
    shards: dict[str, Any] = {"shard": layout.shard, "zero_stage": layout.zero_stage}
    if name == "muon":
        # Tables count as rest though they are matrices, as in every published recipe.
        matrices = sum(count * rows * columns for rows, columns, count in _matrices(rank))
        rest = maximum(rank.trained_params() - matrices, 0)
        return (
            compute(
                "second_moment",
                opt.muon_second_moment_bytes,
                other_params=rest,
                element_bytes=rank.recipe.state_bytes,
                **shards,
            ),
        )
    weights = [*_matrices(rank), *_tables(rank)]
    if name == "adafactor":
        within = sum(count * rows * columns for rows, columns, count in weights)
        return (
            compute(
                "second_moment",
                opt.adafactor_state_bytes,
                sides=sum(count * (rows + columns) for rows, columns, count in weights),
                other_params=maximum(rank.trained_params() - within, 0),
                element_bytes=rank.recipe.state_bytes,
                **shards,
            ),
        )
    limit, block = allowances.SOAP_LARGEST_SIDE.value, allowances.SHAMPOO_BLOCK.value
    if name == "soap":
        elements = sum(
            count * opt.soap_preconditioner_elements(rows=rows, columns=columns, limit=limit)
            for rows, columns, count in weights
        )
    else:
        elements = sum(
            count * opt.shampoo_preconditioner_elements(rows=rows, columns=columns, block=block)
            for rows, columns, count in weights
        ) + sum(count * opt.shampoo_vector_elements(size=size, block=block) for size, count in _vectors(rank))
    return (
        compute(
            "preconditioners",
            opt.preconditioner_bytes,
            elements=elements,
            **shards,
            note=f"whole up to {limit:,.0f} a side" if name == "soap" else f"blocks of {block:,.0f}",
        ),
    )


def _embedding_states(rank: Rank) -> tuple[Line, ...]:
    """The table's states in fp32, which transformers' Trainer asks for, beside all parameters' in 8 bit."""
    recipe, layout = rank.recipe, rank.layout
    table = rank.stage.embedding.sharded / layout.tp
    if recipe.framework != "hf" or recipe.year < WIDE_EMBEDDINGS_YEAR or recipe.adapters is not None:
        return ()
    if not table or "embedding" in recipe.frozen:
        return ()
    return (
        compute(
            "embedding_states",
            opt.wide_embedding_state_bytes,
            params=table,
            wide_bytes=4 * EIGHT_BIT[recipe.optimizer],
            narrow_bytes=recipe.optimizer_bytes,
            shard=layout.shard,
            zero_stage=layout.zero_stage,
        ),
    )


def _matrices(rank: Rank) -> list[tuple[float, float, float]]:
    """Rows, columns and number of a rank's trained matrices in layers."""
    adapters, found = rank.recipe.adapters, []
    for run in rank.stage.layers:
        for linear in block_linears(run.block):
            if adapters is None:
                rows, columns, copies = _held(rank, linear)
                found.append((rows, columns, copies * run.sets(linear)))
            elif linear.name in adapters.targets:
                found.append((linear.inputs, adapters.rank, run.sets(linear)))
                found.append((adapters.rank, linear.outputs, run.sets(linear)))
    return found


def _held(rank: Rank, linear: Linear) -> tuple[float, float, float]:
    layout = rank.layout
    if linear.shard is Shard.EXPERT:
        return linear.inputs, linear.outputs / layout.etp, linear.copies / layout.ep
    rows = linear.inputs / (layout.tp if linear.shard is Shard.ROW else 1)
    columns = linear.outputs / (layout.tp if linear.shard is Shard.COLUMN else 1)
    return rows, columns, linear.copies


def _tables(rank: Rank) -> list[tuple[float, float, float]]:
    """The embedding and the output matrix, where they are trained."""
    if rank.recipe.adapters is not None or not rank.graph.stacks:
        return []
    hidden = rank.graph.trunk.hidden
    held = (rank.stage.embedding.sharded, rank.stage.head.sharded)
    return [(params / rank.layout.tp / hidden, hidden, 1) for params in held if params]


def _vectors(rank: Rank) -> list[tuple[float, float]]:
    """Norm weights of layers: size and number."""
    if rank.recipe.adapters is not None:
        return []
    runs = rank.stage.layers
    return [(norm.params, run.sets(norm)) for run in runs for norm in run.block.norms if norm.params]
