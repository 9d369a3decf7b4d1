"""What one layer of a kind keeps for backward without recomputation, as lines per token.

This module only chooses formulas by the shape of the layer and the code path; the arithmetic is in
`formulas.activations`.
"""

from __future__ import annotations

from gpucalc.formulas import activations as act
from gpucalc.formulas import optimizers as opt
from gpucalc.graph import Attention, Block, FeedForward, Linear, Mlp, Moe, Norm, Shard, StateMixer
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan import allowances
from gpucalc.plan.layout import Adapters, Recipe

# Tensors of width ffn that a two-matrix MLP keeps, by activation, written out and fused.
PLAIN_MLP_TENSORS = {"relu": 1, "relu2": 2, "gelu": 2, "gelu_tanh": 2, "gelu_new": 5, "silu": 2}
# The same for gated experts written out: gpt-oss clamps gate and up and adds one before the product.
GATED_EXPERT_TENSORS = {"swiglu_clamped": 7}
WEIGHED_INSIDE_YEAR = 2025  # Megatron-Core weighs experts' results inside their MLP since April
CHUNK_TOKENS = 256  # tokens per saved state in Mamba-2 and flash-linear-attention kernels


def layer_line(block: Block, recipe: Recipe, *, seq_len: int, memory_tokens: float = 1.0) -> Line:
    """Bytes per token one layer keeps without recomputation; children are its parts.

    memory_tokens: encoder tokens per decoder token, for cross attention. A layer whose parts tensor
    parallelism does not divide alike has the parts' note `replicated`.
    """
    parts: list[Line] = []
    frozen = recipe.adapters is not None
    trains_norms = recipe.adapters is not None and recipe.adapters.kind == "adapter_v2"
    parts.extend(_norm_lines(block, recipe, frozen and not trains_norms))
    if block.mixer is not None:
        parts.extend(_mixer_lines(block.mixer, recipe, seq_len, frozen, _norm_kind(block)))
    if block.state is not None:
        parts.extend(_mixer_lines(block.state, recipe, seq_len, frozen, _norm_kind(block), "state_input"))
    if block.cross is not None:
        parts.extend(_cross_lines(block.cross, recipe, seq_len, memory_tokens, frozen))
    for ffn in (block.ffn, block.beside):
        if ffn is not None:
            parts.extend(_ffn_lines(ffn, block, recipe, frozen))
    if block.streams > 1:  # hyper-connections keep every copy of the residual stream
        parts.append(
            compute(
                "residual_streams",
                act.linear_input_saved_bytes,
                width=block.streams * block.hidden,
                element_bytes=recipe.activation_bytes,
                copies=2,
            )
        )
    if recipe.dropout:
        masks = 2 if block.cross is None else 3
        parts.append(compute("dropout_masks", act.dropout_mask_saved_bytes, width=block.hidden, masks=masks))
    if recipe.adapters is not None:
        parts.extend(_adapter_lines(block, recipe.adapters, recipe))
        if recipe.adapters.keeps_frozen_inputs:
            parts.extend(_frozen_input_lines(block, recipe))
    return total("saved_per_token", tuple(parts), unit="bytes/token")


def _norm_kind(block: Block) -> str:
    """How norms inside the mixer are written: as the block's own where those are RMS norms."""
    kinds = [norm.kind for norm in block.norms if norm.kind.startswith("rmsnorm")]
    return kinds[0] if kinds else "rmsnorm"


def _norm_lines(block: Block, recipe: Recipe, frozen: bool) -> list[Line]:
    return [norm_line(norm, recipe, frozen=frozen) for norm in block.norms if norm.kind != "none"]


def norm_line(norm: Norm, recipe: Recipe, *, frozen: bool, rows: int = 1) -> Line:
    """Bytes per token a norm keeps; frozen: its weight is not trained; rows: heads it normalises apart."""
    name = norm.name
    width = norm.width
    size = recipe.stream_bytes
    if norm.kind.startswith("layernorm") and norm.kind != "layernorm_cohere":
        return compute(name, act.layernorm_saved_bytes, width=width, activation_bytes=size)
    if recipe.fused_norms:
        return compute(name, act.fused_rmsnorm_saved_bytes, width=width, rows=rows, activation_bytes=size)
    if frozen:  # a frozen weight needs no normalised tensor: the fp32 copy and rstd stay
        return compute(name, act.fused_rmsnorm_saved_bytes, width=width, rows=rows, activation_bytes=4)
    if norm.kind == "layernorm_cohere":
        return compute(name, act.cohere_layernorm_saved_bytes, width=width)
    if norm.kind == "rmsnorm_fp32_weight":
        return compute(name, act.rmsnorm_fp32_weight_saved_bytes, width=width, rows=rows)
    if norm.kind == "rmsnorm_keeps_input":
        return compute(name, act.rmsnorm_keeping_input_saved_bytes, width=width)
    return compute(name, act.rmsnorm_saved_bytes, width=width, rows=rows, activation_bytes=size)


def _inputs(
    name: str, linears: tuple[Linear, ...], width: int, recipe: Recipe, *, distinct: int = 1
) -> list[Line]:
    """The input that linears of that width read: one tensor, or one cast copy each under autocast.

    Output projections read what the part itself made, which is kept with it.
    """
    readers = sum(1 for linear in linears if linear.inputs == width and linear.shard is not Shard.ROW)
    if readers == 0:
        return []
    copies = readers if recipe.autocast else distinct
    size = _stored_input_bytes(recipe)
    return [compute(name, act.linear_input_saved_bytes, width=width, element_bytes=size, copies=copies)]


def _mixer_lines(
    mixer: Attention | StateMixer,
    recipe: Recipe,
    seq_len: int,
    frozen: bool,
    norm_kind: str,
    reads: str = "mixer_input",
) -> list[Line]:
    size = recipe.activation_bytes
    lines: list[Line] = []
    if not frozen:
        lines += _inputs(reads, mixer.linears, mixer.hidden, recipe)
    if isinstance(mixer, StateMixer):
        projected = sum(linear.outputs for linear in mixer.linears if linear.inputs == mixer.hidden)
        if mixer.kind == "mamba2":
            lines.append(
                compute(
                    "state_mixer",
                    act.mamba2_saved_bytes,
                    kind=Kind.ASSUMED,
                    projected_width=projected,
                    inner=mixer.inner,
                    activation_bytes=size,
                )
            )
            return lines
        lines.append(
            compute(
                "state_mixer",
                act.state_mixer_saved_bytes,
                kind=Kind.ASSUMED,
                projected_width=projected,
                inner=mixer.inner,
                conv_width=mixer.conv_width,
                state_per_head=mixer.key_dim * mixer.value_dim,
                heads=mixer.heads,
                chunk=CHUNK_TOKENS,
                activation_bytes=size,
            )
        )
        return lines
    return lines + _attention_lines(mixer, recipe, seq_len, norm_kind)


def softmax_bytes(mixer: Attention, recipe: Recipe) -> int:
    """Element size written-out attention takes its softmax in: fp32 in Llama's code and under CUDA's autocast
    (softmax is among its fp32 functions, aten/src/ATen/autocast_mode.h).
    """
    fp32 = recipe.autocast or (recipe.kernels == "eager" and mixer.rope != "none")
    return 4 if fp32 else recipe.activation_bytes


def probability_bytes(mixer: Attention, recipe: Recipe) -> int:
    """Bytes a score that softmax and its cast keep, without dropout's own."""
    size, wide = recipe.activation_bytes, softmax_bytes(mixer, recipe)
    cast = size if wide != size and not recipe.dropout else 0
    return wide + cast + (size if mixer.softcap else 0)


def _attention_lines(mixer: Attention, recipe: Recipe, seq_len: int, norm_kind: str) -> list[Line]:
    size = recipe.activation_bytes
    query, kv = mixer.heads * mixer.qk_dim, mixer.kv_heads * mixer.qk_dim
    lines: list[Line] = []
    if mixer.kv_lora is not None:
        rope = mixer.rope_dim or 0
        lines.append(
            compute(
                "attention",
                act.mla_saved_bytes,
                heads=mixer.heads,
                qk_dim=mixer.qk_dim,
                nope_dim=mixer.qk_dim - rope,
                v_dim=mixer.v_dim,
                activation_bytes=size,
            )
        )
        for name, width in (("q_lora", mixer.q_lora), ("kv_lora", mixer.kv_lora)):
            if width:
                norm = Norm(f"{name}_norm", "rmsnorm", width, width)
                lines.append(norm_line(norm, recipe, frozen=False))
                lines += _inputs(f"{name}_input", mixer.linears, width, recipe)
        return lines
    # LitGPT cuts q, k and v out of one result, expands grouped k and v and rotates by concatenation.
    cut = recipe.fused_qkv and mixer.rope != "none"
    expanded = cut and mixer.kv_heads < mixer.heads
    if recipe.attention == "eager":
        span = min(seq_len, mixer.span or seq_len)
        lines.append(
            compute(
                "attention",
                act.eager_attention_saved_bytes,
                query_width=query,
                heads=mixer.heads,
                span=span,
                activation_bytes=size,
                probability_bytes=probability_bytes(mixer, recipe),
                dropout=int(recipe.dropout),
            )
        )
    else:
        lines.append(
            compute(
                "attention",
                act.flash_attention_saved_bytes,
                query_width=query,
                kv_width=query if expanded else kv,
                heads=mixer.heads,
                activation_bytes=size,
            )
        )
    if recipe.kernels == "eager":
        if (mixer.qkv == "fused" or cut) and mixer.rope != "none" and not expanded:
            lines.append(
                compute(
                    "fused_qkv",
                    act.fused_qkv_view_saved_bytes,
                    query_width=query,
                    kv_width=kv,
                    activation_bytes=size,
                )
            )
        if (mixer.rope == "partial" or cut) and _keeps_output_input(mixer, recipe):
            lines.append(
                compute(
                    "rotary_copy", act.partial_rotary_saved_bytes, query_width=query, activation_bytes=size
                )
            )
    if mixer.qk_norm != "none":
        for name, heads in (("q_norm", mixer.heads), ("k_norm", mixer.kv_heads)):
            width = heads * mixer.qk_dim
            rows = 1 if mixer.qk_norm == "width" else heads
            lines.append(norm_line(Norm(name, norm_kind, width, 0), recipe, frozen=False, rows=rows))
    return lines


def _keeps_output_input(mixer: Attention, recipe: Recipe) -> bool:
    """Whether the output projection keeps its input: where its weight or an adapter beside it is trained, or
    its kernel is quantised.
    """
    adapters = recipe.adapters
    if adapters is None or adapters.keeps_frozen_inputs:
        return True
    rows = [linear.name for linear in mixer.linears if linear.shard is Shard.ROW]
    return adapters.kind in ("lora", "dora") and any(name in adapters.targets for name in rows)


def _cross_lines(
    cross: Attention, recipe: Recipe, seq_len: int, memory_tokens: float, frozen: bool
) -> list[Line]:
    size = recipe.activation_bytes
    lines: list[Line] = []
    if not frozen:
        lines += _inputs("cross_input", cross.linears[:1], cross.hidden, recipe)
    kv = cross.kv_heads * cross.qk_dim
    lines.append(
        compute(
            "cross_attention",
            act.flash_attention_saved_bytes,
            query_width=cross.heads * cross.qk_dim,
            kv_width=kv * memory_tokens,
            heads=cross.heads if recipe.attention != "eager" else 0,  # log-sum-exps are flash attention's
            activation_bytes=size,
        )
    )
    if recipe.attention == "eager":
        lines.append(
            compute(
                "cross_scores",
                act.attention_mask_bytes,
                tokens=cross.heads * memory_tokens,
                span=seq_len,
                element_bytes=size + 4 if recipe.kernels == "eager" and cross.rope != "none" else size,
            )
        )
    return lines


def _ffn_lines(ffn: FeedForward, block: Block, recipe: Recipe, frozen: bool) -> list[Line]:
    size = recipe.activation_bytes
    lines: list[Line] = []
    if isinstance(ffn, Mlp):
        if not frozen and not block.parallel:
            down = next((i for i, linear in enumerate(ffn.linears) if linear.shard is Shard.ROW), None)
            after = len(ffn.linears[down + 1 :]) if down is not None else 0  # each reads a tensor of its own
            lines += _inputs("mlp_input", ffn.linears, ffn.hidden, recipe, distinct=1 + after)
        lines.append(_mlp_line("mlp", ffn.ffn, ffn.gated, ffn.activation, recipe, frozen))
        return lines
    assert isinstance(ffn, Moe)
    lines.append(experts_line(ffn, recipe))
    lines.append(compute("router", act.router_saved_bytes, experts=ffn.experts, top_k=ffn.top_k))
    if ffn.shared_ffn:
        lines.append(_mlp_line("shared_experts", ffn.shared_ffn, ffn.gated, ffn.activation, recipe, frozen))
    lines += _inputs("moe_input", ffn.linears[:1], ffn.hidden, recipe)
    if ffn.fp32_router and recipe.kernels == "eager" and size == 2:
        lines.append(
            compute(
                "router_input",
                act.linear_input_saved_bytes,
                width=ffn.hidden,
                element_bytes=4,
                copies=1,
            )
        )
    return lines


def experts_line(ffn: Moe, recipe: Recipe, *, again: bool = False) -> Line:
    """What routed experts keep per token; again: their activation's result is made again."""
    return compute(
        "experts",
        act.moe_saved_bytes,
        top_k=ffn.top_k,
        width=ffn.latent or ffn.hidden,
        wide_tensors=1 if recipe.framework == "megatron" and recipe.year >= WEIGHED_INSIDE_YEAR else 2,
        expert_ffn=ffn.expert_ffn,
        expert_tensors=expert_tensors(ffn, recipe) - again,
        input_tensors=0 if again else 1,
        activation_bytes=recipe.activation_bytes,
        input_bytes=_stored_input_bytes(recipe),
        imbalance=recipe.expert_imbalance,
        stash_factor=allowances.PAGED_STASH if "full" in recipe.cuda_graphs else 1,
    )


def expert_tensors(ffn: Moe, recipe: Recipe) -> int:
    if ffn.gated:
        return GATED_EXPERT_TENSORS.get(ffn.activation, 4) if recipe.kernels == "eager" else 3
    return PLAIN_MLP_TENSORS.get(ffn.activation, 2) if recipe.kernels == "eager" else 2


def _stored_input_bytes(recipe: Recipe) -> float:
    """Element size of what a matrix keeps of its input: TransformerEngine keeps its 8- or 4-bit copy."""
    low = recipe.kernels == "fused" and recipe.math in ("fp8", "fp4")
    return recipe.low_precision_bytes if low else recipe.activation_bytes


def _mlp_line(name: str, ffn: int, gated: bool, activation: str, recipe: Recipe, frozen: bool) -> Line:
    size = recipe.activation_bytes
    if gated:
        if recipe.kernels != "eager" or frozen:
            return compute(
                name,
                act.fused_gated_mlp_saved_bytes,
                ffn=ffn,
                activation_bytes=size,
                input_bytes=_stored_input_bytes(recipe),
            )
        # The product and the other factor join what the activation keeps.
        tensors = PLAIN_MLP_TENSORS.get(activation, 2) + 2
        return compute(name, act.gated_mlp_saved_bytes, ffn=ffn, activation_bytes=size, tensors=tensors)
    tensors = PLAIN_MLP_TENSORS.get(activation, 2)
    if recipe.kernels != "eager":
        tensors = min(tensors, 2)
    return compute(name, act.plain_mlp_saved_bytes, ffn=ffn, activation_bytes=size, tensors=tensors)


def _frozen_input_lines(block: Block, recipe: Recipe) -> list[Line]:
    """Inputs of quantised linears: bitsandbytes keeps them though the weight is frozen, once per tensor."""
    lines: list[Line] = []
    for part, name in ((block.mixer, "mixer"), (block.state, "state"), (block.ffn, "mlp")):
        if part is None:
            continue
        for width in dict.fromkeys(linear.inputs for linear in part.linears):
            if isinstance(part, Attention) and width == part.heads * part.v_dim != part.hidden:
                continue  # the attention output is kept already
            lines.append(
                compute(
                    f"{name}_frozen_input_{width}",
                    act.linear_input_saved_bytes,
                    width=width,
                    element_bytes=recipe.activation_bytes,
                    copies=1,
                )
            )
    return lines


def _adapter_lines(block: Block, adapters: Adapters, recipe: Recipe) -> list[Line]:
    activation_bytes = recipe.activation_bytes
    lines: list[Line] = []
    # An adapter in the activations' type reads the input its neighbours read, and the output projection's
    # reads the attention output; one of another type, or with dropout, makes a copy of its own.
    shares = adapters.input_bytes == activation_bytes and not adapters.casts and not adapters.dropout
    for part in (block.mixer, block.state, block.ffn):
        if part is None:
            continue
        # A quantised kernel keeps the same tensor.
        seen = {linear.inputs for linear in part.linears} if adapters.keeps_frozen_inputs else set()
        linears = part.linears
        if isinstance(part, Attention) and recipe.fused_qkv and adapters.kind == "lora":
            lines += _fused_adapter_lines(part, adapters, kept=shares and bool(seen))
            linears = tuple(linear for linear in linears if linear.shard is Shard.ROW)
        for linear in linears:
            if linear.name in adapters.targets:
                if adapters.kind == "adapter_v2":  # a scale and a bias on the output
                    lines.append(
                        compute(
                            f"scaled_{linear.name}",
                            act.linear_input_saved_bytes,
                            width=linear.outputs,
                            element_bytes=adapters.element_bytes,
                            copies=1,
                        )
                    )
                    continue
                attended = isinstance(part, Attention) and linear.shard is Shard.ROW
                kept = shares and (attended or linear.inputs in seen)
                if not attended:
                    seen.add(linear.inputs)
                lines.append(
                    compute(
                        f"lora_{linear.name}",
                        act.lora_saved_bytes,
                        inputs=0 if kept else linear.inputs,
                        rank=adapters.rank,
                        element_bytes=adapters.input_bytes,
                        dropout=int(adapters.dropout),
                    )
                )
                if adapters.kind == "dora":
                    lines.append(
                        compute(
                            f"dora_{linear.name}",
                            opt.dora_saved_bytes,
                            outputs=linear.outputs,
                            base_bytes=adapters.input_bytes if adapters.dropout else activation_bytes,
                            element_bytes=adapters.input_bytes,
                        )
                    )
    return lines


def _fused_adapter_lines(mixer: Attention, adapters: Adapters, *, kept: bool) -> list[Line]:
    """LitGPT's adapters of one fused matrix: one input for all, and their results where some are left out.

    kept: the input is kept by another already.
    """
    fused = [linear for linear in mixer.linears if linear.shard is not Shard.ROW]
    adapted = [linear for linear in fused if linear.name in adapters.targets]
    if not adapted:
        return []
    lines = [
        compute(
            "lora_qkv",
            act.lora_saved_bytes,
            inputs=0 if kept else mixer.hidden,
            rank=adapters.rank * len(adapted),
            element_bytes=adapters.input_bytes,
            dropout=int(adapters.dropout),
        )
    ]
    if len(adapted) < len(fused):
        lines.append(
            compute(
                "padded_adapters",
                act.linear_input_saved_bytes,
                width=sum(linear.outputs for linear in adapted),
                element_bytes=adapters.input_bytes,
                copies=1,
            )
        )
    return lines
