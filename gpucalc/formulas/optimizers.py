"""Optimizer states that depend on the shapes of weights, and what weight-decomposed adapters hold.

What every parameter has alike is `memory.optimizer_state_bytes`; these are the states beside it.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, minimum, where

MUON = "Muon keeps a momentum for matrices and leaves the rest to AdamW: torch.optim.Muon of 2.13, run on CPU"
SOAP = (
    "nikhilvyas/SOAP@a1e5535:soap.py, lines 133 to 147 and 215 to 236: GG and Q, fp32; the SOAP of"
    " pytorch_optimizer 4.1.0 run on CPU, to the byte"
)
SHAMPOO = (
    "facebookresearch/optimizers@4b06b239:distributed_shampoo/preconditioner/shampoo_preconditioner_list.py,"
    " factor_matrices and inv_factor_matrices of every block, read; the Shampoo of pytorch_optimizer 4.1.0,"
    " which takes sides whole, run on CPU, to the byte"
)
ADAFACTOR = (
    "torch.optim.Adafactor of 2.13 run on CPU, to the byte; transformers' without a first moment alike"
)
DORA = "DoRA layers of peft 0.21.2 (tuners/lora/dora.py), saved and live tensors on CPU, to the byte"


@formula(unit="bytes", source=MUON)
def muon_second_moment_bytes(*, other_params: Num, element_bytes: Num, shard: Num, zero_stage: Num) -> Num:
    """AdamW's second moment of what Muon does not step: tables, norms and biases."""
    return other_params * element_bytes / where(zero_stage >= 1, shard, 1)


@formula(unit="bytes", source=ADAFACTOR)
def adafactor_state_bytes(
    *, sides: Num, other_params: Num, element_bytes: Num, shard: Num, zero_stage: Num
) -> Num:
    """The factored second moment: a mean for every row and column of a matrix, and one for all the rest.

    sides: rows and columns of every matrix, summed.
    """
    return (sides + other_params) * element_bytes / where(zero_stage >= 1, shard, 1)


@formula(
    unit="bytes",
    source="transformers' trainer.py, create_optimizer: register_module_override of every nn.Embedding to 32"
    " bit where bitsandbytes steps in 8, read",
)
def wide_embedding_state_bytes(
    *, params: Num, wide_bytes: Num, narrow_bytes: Num, shard: Num, zero_stage: Num
) -> Num:
    """What fp32 states of the token table add to those counted for it in 8 bit."""
    return params * (wide_bytes - narrow_bytes) / where(zero_stage >= 1, shard, 1)


@formula(unit="count", source=SOAP)
def soap_preconditioner_elements(*, rows: Num, columns: Num, limit: Num) -> Num:
    """Elements of the square matrices SOAP keeps for one weight; a side above the limit has none.

    limit: max_precond_dim, 10,000 by default. Vectors have none (precondition_1d is off).
    """
    return where(rows <= limit, rows**2, 0) + where(columns <= limit, columns**2, 0)


@formula(unit="count", source=SHAMPOO)
def shampoo_preconditioner_elements(*, rows: Num, columns: Num, block: Num) -> Num:
    """Elements of the square matrices Shampoo keeps for one weight, cut into blocks.

    block: max_preconditioner_dim, 1,024 by default. Sides that blocks divide give 2 x rows x columns in
    all, however large the block is.
    """
    return rows * minimum(rows, block) * ceil_div(columns, block) + columns * minimum(
        columns, block
    ) * ceil_div(rows, block)


@formula(unit="count", source=SHAMPOO)
def shampoo_vector_elements(*, size: Num, block: Num) -> Num:
    """The same for a vector: one square matrix a block."""
    return size * minimum(size, block)


@formula(unit="bytes", source=SOAP + "; " + SHAMPOO)
def preconditioner_bytes(*, elements: Num, shard: Num, zero_stage: Num) -> Num:
    """Second-moment matrices and their eigenbases (SOAP) or inverse roots (Shampoo), fp32 each."""
    return 2 * 4 * elements / where(zero_stage >= 1, shard, 1)


@formula(unit="bytes/token", source=DORA)
def dora_saved_bytes(*, outputs: Num, base_bytes: Num, element_bytes: Num) -> Num:
    """What the magnitude of a DoRA adapter keeps beyond a LoRA one: both results it scales.

    base_bytes: of the frozen layer's result; the adapter's own type with dropout, where that result is
    taken anew of the dropped input.
    """
    return outputs * (base_bytes + element_bytes)


@formula(unit="bytes", source=DORA)
def dora_weight_bytes(*, weight_elements: Num, element_bytes: Num) -> Num:
    """Copies of frozen weights in the adapters' type, kept for backward where DoRA has dropout."""
    return weight_elements * element_bytes


@formula(unit="bytes", source=DORA)
def dora_norm_bytes(*, inputs: Num, outputs: Num, element_bytes: Num, cast: Num) -> Num:
    """While a weight's norm is taken: an identity, the adapter's product, that scaled, and the sum.

    cast 1: the frozen weight too is copied into the adapters' type.
    """
    return element_bytes * (inputs**2 + (3 + cast) * inputs * outputs)
