"""Bytes that taking a loss keeps and passes through: logits, their copies and gradients.

Per token of the micro-batch unless a name says otherwise. Evidence as of `formulas.activations`: saved-tensor
hooks on torch 2.13 and transformers 5.24; what was only read says so.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.formulas.activations import SAVED_TENSORS, TE
from gpucalc.num import Num, ceil_div, maximum, where


@formula(unit="bytes/token", source=SAVED_TENSORS)
def unfused_loss_saved_bytes(*, vocab: Num, loss_bytes: Num) -> Num:
    """Log-softmax kept by cross entropy in the type the loss is taken in (mostly fp32), and the labels."""
    return loss_bytes * vocab + 8


@formula(unit="bytes/token", source=SAVED_TENSORS)
def loss_forward_bytes(*, vocab: Num, activation_bytes: Num, loss_bytes: Num) -> Num:
    """Logits in the compute type and their copy in the loss's type while it is taken; none outlives it.

    The shift by one token copies them where the types agree in 16 bit.
    """
    return where(activation_bytes == 4, 4, activation_bytes + loss_bytes) * vocab


@formula(unit="bytes/token", source=SAVED_TENSORS)
def loss_backward_bytes(*, vocab: Num, activation_bytes: Num, loss_bytes: Num, logits_kept: Num) -> Num:
    """Beyond the kept log-softmax: gradients of the loss and of the log-softmax in the loss's type.

    logits_kept 1 adds the logits where the caller keeps them alive.
    """
    return 2 * loss_bytes * vocab + logits_kept * activation_bytes * vocab


@formula(
    unit="bytes/token",
    source="Megatron-Core@d98e8a64 tensor_parallel/cross_entropy.py: exponentials written over the logits,"
    " the gradient over the softmax; Megatron-DeepSpeed alike; read",
)
def overwriting_loss_bytes(*, vocab: Num, activation_bytes: Num, logits_kept: Num) -> Num:
    """Megatron's unfused loss beside the fp32 softmax it keeps, which it makes in place.

    The logits in the compute type, then their gradient; DeepSpeed's pipeline keeps the logits too
    (logits_kept 1).
    """
    return (1 + logits_kept) * activation_bytes * vocab


@formula(
    unit="bytes/token",
    source="torch.distributed.tensor.parallel.loss: gradient, exponential and sum in fp32; read, not run",
)
def loss_parallel_backward_bytes(*, vocab: Num) -> Num:
    """PyTorch's vocabulary-parallel loss: three logit-sized fp32 tensors beyond the kept log-softmax."""
    return 12 * vocab


@formula(unit="bytes/token", source=TE)
def fused_loss_bytes(*, vocab: Num, activation_bytes: Num, chunks: Num) -> Num:
    """Cross entropy in one kernel (Megatron fusion, torch.compile): logits and their gradient.

    In chunks, the logits of a chunk are freed when its gradient is made, before the next chunk's.
    """
    return (1 + 1 / chunks) * activation_bytes * vocab


@formula(
    unit="bytes", source="Liger fused linear cross entropy: chunk rule read in its source; not measured here"
)
def chunked_loss_bytes(
    *, tokens: Num, vocab: Num, hidden: Num, activation_bytes: Num, head_trained: Num
) -> Num:
    """Linear and cross entropy together: input gradient, weight gradient and one chunk of logits.

    Chunk rows are ceil(tokens / ceil(vocab / hidden)), in compute type and fp32. head_trained 0: the
    output matrix is frozen and has no gradient.
    """
    return (
        activation_bytes * hidden * tokens
        + head_trained * activation_bytes * vocab * hidden
        + ceil_div(tokens, ceil_div(vocab, hidden)) * vocab * (activation_bytes + 4)
    )


@formula(
    unit="bytes",
    source="losses of open-mmlab/mmyolo@8c4d9dc5 run on CPU over random boxes, torch 2.13: live storages of"
    " their forward and backward, per image and once",
)
def detection_loss_bytes(
    *, images: Num, loss_bytes: Num, once_bytes: Num, head_elements: Num, activation_bytes: Num
) -> Num:
    """Boxes matched with places of the grid, or the gradients of the head's results: the larger.

    loss_bytes: fp32 scores and 64-bit indexes of every image, as many boxes as the fullest has; once_bytes:
    of the fullest alone, where images are matched one by one. head_elements: results and gradients.
    """
    return maximum(images * loss_bytes + once_bytes, images * head_elements * activation_bytes)
