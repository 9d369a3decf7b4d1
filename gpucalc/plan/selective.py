"""What a layer keeps under selective recomputation: of one operation in two, or of Megatron's modules."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.formulas import activations as act
from gpucalc.graph import Attention, Block, Mlp, Moe, Shard
from gpucalc.line import Line, compute, total
from gpucalc.plan.activation import experts_line, layer_line
from gpucalc.plan.layout import Recipe


def selective_line(block: Block, recipe: Recipe, *, seq_len: int) -> Line:
    """Bytes per token kept under selective recomputation of the recipe's scope.

    core: attention scores are recomputed, so unfused attention keeps what flash attention keeps.
    modules (Megatron-Core): what the named parts do not make again.
    op (torchtitan): outputs of every second matrix multiplication and of attention, and the layer input.
    """
    if recipe.recompute_scope == "modules":
        return _without_modules(block, recipe, seq_len)
    if recipe.recompute_scope != "op":
        return layer_line(block, _with_flash(recipe), seq_len=seq_len)
    size = recipe.activation_bytes
    parts = [
        compute(
            "layer_input", act.linear_input_saved_bytes, width=block.hidden, element_bytes=size, copies=1
        )
    ]
    linears = [
        linear
        for part in (block.mixer, block.state, block.ffn)
        if part is not None
        for linear in part.linears
        if linear.shard.value != "replicated"
    ]
    # torchtitan's policy keeps the 1st, 3rd, 5th ... matrix result of a layer. Compiled, it keeps none
    # that is only added to the residual stream, as no gradient is made of it (AOTAutograd, torch 2.13,
    # a Llama layer, to the byte); written out, they stay.
    compiled, named = recipe.kernels != "eager", recipe.math != "fp4"
    for linear in linears[::2] if named else ():  # the policy names aten.mm and not torchao's NVFP4 products
        if compiled and linear.shard is Shard.ROW:
            continue
        parts.append(
            compute(
                f"{linear.name}_output",
                act.linear_input_saved_bytes,
                width=linear.outputs,
                element_bytes=size,
                copies=linear.active,
            )
        )
    if isinstance(block.mixer, Attention):
        out = block.mixer.heads * block.mixer.v_dim
        parts.append(
            compute("attention_output", act.linear_input_saved_bytes, width=out, element_bytes=size, copies=1)
        )
        parts.append(
            compute(
                "log_sum_exp",
                act.linear_input_saved_bytes,
                width=block.mixer.heads,
                element_bytes=4,
                copies=1,
            )
        )
    return total("saved_per_token", tuple(parts), unit="bytes/token")


# What of a layer's kept parts a module of Megatron-Core makes again.
_MODULE_PARTS = {
    "layernorm": {"mixer_input", "state_input", "mlp_input", "moe_input"},
    "mlp": {"mlp"},
    "moe": {"experts", "router", "router_input", "shared_experts"},
    "shared_experts": {"shared_experts"},
}


def _without_modules(block: Block, recipe: Recipe, seq_len: int) -> Line:
    """A layer without what Megatron-Core's named modules make again.

    Read in megatron/core/transformer: transformer_layer.py, moe/experts.py, multi_latent_attention.py.
    layernorm: norms' results, unless a whole module is made again from one. moe_act: the activation's
    result. mla_up_proj: q, k and v, made of the latents; attention's own result stays.
    """
    modules = recipe.recompute_modules
    whole = layer_line(block, _with_flash(recipe) if "core_attn" in modules else recipe, seq_len=seq_len)
    gone = set().union(*(_MODULE_PARTS.get(module, set()) for module in modules))
    if isinstance(block.ffn, Mlp) and "mlp" in modules:
        gone -= {"mlp_input"}
    if isinstance(block.ffn, Moe) and "moe" in modules:
        gone -= {"moe_input"}
    parts = [part for part in whole.children if part.name not in gone]
    for index, part in enumerate(parts):
        if part.name == "experts" and "moe_act" in modules and isinstance(block.ffn, Moe):
            parts[index] = experts_line(block.ffn, recipe, again=True)
        latent = isinstance(block.mixer, Attention) and block.mixer.kv_lora is not None
        if part.name == "attention" and "mla_up_proj" in modules and latent:
            assert isinstance(block.mixer, Attention)
            parts[index] = compute(
                "attention",
                act.attention_output_saved_bytes,
                heads=block.mixer.heads,
                v_dim=block.mixer.v_dim,
                activation_bytes=recipe.activation_bytes,
            )
    return total("saved_per_token", tuple(parts), unit="bytes/token")


def _with_flash(recipe: Recipe) -> Recipe:
    return replace(recipe, attention="flash")
