"""Counting parameters.

Checked by instantiating 169 public models on torch's meta device (transformers 5.24.0): every
architecture this package draws agrees to the parameter.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.num import Num, ceil_div, where

_COUNT = "parameters"


@formula(unit=_COUNT, source="a matrix and its bias; exact")
def linear_params(*, inputs: Num, outputs: Num, copies: Num, bias: Num) -> Num:
    """Parameters of `copies` matrices [inputs, outputs], each with a bias per output if it has one."""
    return copies * outputs * (inputs + where(bias, 1, 0))


@formula(unit=_COUNT, source="a token meets `active` of the copies; exact")
def linear_active_params(*, inputs: Num, outputs: Num, active: Num, bias: Num) -> Num:
    """Parameters one token passes in a linear layer: all of a single copy, top-k of an expert's."""
    return active * outputs * (inputs + where(bias, 1, 0))


@formula(unit=_COUNT, source="a token meets `active` of the copies; biases multiply nothing; exact")
def linear_matmul_params(*, inputs: Num, outputs: Num, active: Num) -> Num:
    """Weights one token is multiplied by in a linear layer: its FLOPs forward are twice this."""
    return active * inputs * outputs


@formula(unit=_COUNT, source="layers of one kind are equal; exact")
def repeated_params(*, layers: Num, params_per_layer: Num) -> Num:
    """Parameters of all layers of one kind."""
    return layers * params_per_layer


@formula(unit=_COUNT, source="one row per vocabulary entry; exact")
def embedding_params(*, vocab: Num, width: Num) -> Num:
    """Parameters of the input table."""
    return vocab * width


@formula(unit=_COUNT, source="a tied head is the input table, counted there; exact")
def vocabulary_head_params(*, vocab: Num, width: Num, tied: Num, bias: Num) -> Num:
    """Parameters the output projection adds to those of the input table."""
    return vocab * (where(tied, 0, width) + where(bias, 1, 0))


@formula(unit=_COUNT, source="top-k of the experts work on a token; both vocabulary tables counted; exact")
def active_params(*, total: Num, idle_routed: Num) -> Num:
    """Parameters a token passes: all but those of the routed experts it skips.

    Publishers differ: some leave out the input table, some both tables.
    """
    return total - idle_routed


@formula(
    unit="rows",
    source="NVIDIA/Megatron-LM megatron/training/tokenizer (make-vocab-size-divisible-by 128, times tp);"
    " hpcaitech/ColossalAI pull 6124 (64 x tp: 128,256 rows at tp 8 are stored as 128,512)",
)
def padded_table_rows(*, vocab: Num, multiple: Num, tp: Num) -> Num:
    """Rows a trainer holds a vocabulary table as, so that tensor ranks hold equal, aligned shares."""
    return ceil_div(vocab, multiple * tp) * multiple * tp
