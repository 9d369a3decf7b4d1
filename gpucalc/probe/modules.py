"""Plain torch modules from our own graph: what a stage of the feasibility test trains.

Every linear, norm and table of the graph becomes a parameter, so that what is trained has exactly the
planned parameters; what cannot be built is refused by name. The arithmetic between them is that of the
public modelling code (norms in fp32, rotary halves concatenated, one product per expert), because
that decides which tensors live until backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from gpucalc.counts import count
from gpucalc.errors import UnsupportedModel
from gpucalc.graph import Attention, Block, FeedForward, Graph, Linear, Mlp, Moe, Norm, Stack

_ROPE_BASE = 10_000.0
_EPSILON = 1e-6
_CLAMP = 7.0  # of clamped experts, as gpt-oss has it
_KNOWN_VECTORS = {"q_norm", "k_norm", "sinks", "q_a_norm", "kv_a_norm"}
_KINDS = ("full", "sliding", "chunked")


@dataclass(frozen=True, slots=True)
class Make:
    """What parts are made with: torch, where and in which type parameters lie, how attention is run."""

    torch: Any
    device: Any
    dtype: Any
    eager_attention: bool = False

    def part(self, run: Callable[..., Any], **children: Any) -> Any:
        """A module of these children whose forward pass is `run(module, *inputs)`."""
        nn = self.torch.nn
        kind = type("Part", (nn.Module,), {"forward": run})
        module = kind()
        for name, child in children.items():
            setattr(module, name, child)  # torch files parameters and modules by their class
        return module

    def linear(self, item: Linear) -> Any:
        """A linear layer, small random weights."""
        made = self.torch.nn.Linear(
            item.inputs, item.outputs, bias=item.bias, device=self.device, dtype=self.dtype
        )
        self._small(made.weight)
        if item.bias:
            self.torch.nn.init.zeros_(made.bias)
        return made

    def copies(self, item: Linear) -> Any:
        """The matrices of all experts in one parameter, and their biases."""
        weight = self.weight(item.copies, item.outputs, item.inputs)
        parts = {"weight": weight}
        if item.bias:
            parts["bias"] = self.weight(item.copies, item.outputs)

        def run(module: Any, x: Any, expert: int) -> Any:
            bias = module.bias[expert] if item.bias else None
            return self.torch.nn.functional.linear(x, module.weight[expert], bias)

        return self.part(run, **parts)

    def weight(self, *shape: int) -> Any:
        """A parameter of small random numbers."""
        made = self.torch.nn.Parameter(self.torch.empty(*shape, device=self.device, dtype=self.dtype))
        self._small(made)
        return made

    def ones(self, size: int) -> Any:
        """A parameter of ones, as norms start."""
        return self.torch.nn.Parameter(self.torch.ones(size, device=self.device, dtype=self.dtype))

    def _small(self, weight: Any) -> None:
        self.torch.nn.init.normal_(weight, std=0.02)


def refuse_unbuilt(graph: Graph) -> None:
    """Raises UnsupportedModel naming the first thing the stages cannot build; needs no torch."""
    decoder(graph)
    for block in decoder(graph).blocks:
        problem = _unbuilt(block)
        if problem is not None:
            raise UnsupportedModel(
                f"the stages cannot build {problem}, which {graph.name} has", key="model", legal=BUILT
            )


BUILT = "decoders of attention (grouped, latent, windowed), gated or plain MLPs and experts"


def decoder(graph: Graph) -> Stack:
    """The decoder that is trained. Raises UnsupportedModel for models that are none."""
    stacks = [stack for stack in graph.stacks if stack.role == "decoder"]
    others = [stack for stack in graph.stacks if stack.role == "encoder"]
    if len(stacks) != 1 or others or graph.embedding is None or graph.head is None or not graph.head.vocab:
        raise UnsupportedModel(
            f"the stages train language models; {graph.name} is none", key="model", legal=BUILT
        )
    return stacks[0]


def cut(graph: Graph, kept: tuple[int, ...]) -> Graph:
    """The decoder of a graph with these of its layers, without towers beside it."""
    stack = decoder(graph)
    order = tuple(stack.layers[index] for index in kept)
    blocks = sorted(set(order))
    left = replace(
        stack,
        blocks=tuple(stack.blocks[block] for block in blocks),
        layers=tuple(blocks.index(block) for block in order),
    )
    return replace(graph, stacks=(left,), linears=(), vectors=())


def keep(graph: Graph, number: int) -> tuple[int, ...]:
    """The positions of so many layers, every kind in its share and once at least, the first of each."""
    layers = decoder(graph).layers
    kinds = list(dict.fromkeys(layers))
    number = max(number, len(kinds))
    shares = {kind: layers.count(kind) * number / len(layers) for kind in kinds}
    quota = {kind: max(1, int(shares[kind])) for kind in kinds}
    while sum(quota.values()) > number:
        quota[max(quota, key=quota.__getitem__)] -= 1
    while sum(quota.values()) < number:
        open_kinds = [kind for kind in kinds if quota[kind] < layers.count(kind)]
        quota[max(open_kinds, key=lambda kind: shares[kind] - quota[kind])] += 1
    chosen = []
    for place, kind in enumerate(layers):
        if quota[kind]:
            quota[kind] -= 1
            chosen.append(place)
    return tuple(chosen)


def _unbuilt(block: Block) -> str | None:
    """What of a layer cannot be built, in words."""
    if block.mixer is not None and not isinstance(block.mixer, Attention):
        return f"{block.mixer.kind} layers"
    if block.mixer is None or block.ffn is None:
        return "layers of one part"
    mixer = block.mixer
    if mixer.kind not in _KINDS or mixer.compress_ratio is not None or mixer.index_topk is not None:
        return f"{mixer.kind} attention"
    unknown = [vector.name for vector in mixer.vectors if vector.name not in _KNOWN_VECTORS]
    unknown += [vector.name for part in (block, block.ffn) for vector in part.vectors]
    if block.cross is not None:
        return "cross attention"
    if block.state is not None:
        return "a state space beside attention"
    if any(weight.shared for weight in block.weights):
        return "weights that serve several layers"
    if block.beside is not None:
        return "a dense part beside experts"
    if block.streams > 1 or block.linears:
        return "several residual streams"
    if unknown:
        return f"parameters called {', '.join(unknown)}"
    return None


def language_model(make: Make, graph: Graph, *, recompute: bool = False) -> Any:
    """The graph's decoder as a module from token numbers to logits. Raises UnsupportedModel.

    `recompute`: each layer's activations are made again in backward.
    """
    refuse_unbuilt(graph)
    stack, table, head = decoder(graph), graph.embedding, graph.head
    assert table is not None
    assert head is not None
    torch = make.torch
    children: dict[str, Any] = {"embedding": _table(make, table.vocab, table.width)}
    for linear in table.projection:
        children[linear.name] = make.linear(linear)
    positions = sum(vector.params for vector in table.vectors if vector.name == "positions")
    if positions:
        children["positions"] = _table(make, positions // stack.hidden, stack.hidden)
    scales = [vector for vector in table.vectors if vector.name == "embedding_norm"]
    if scales:
        kind = "layernorm" if scales[0].params == 2 * stack.hidden else "rmsnorm"
        children["embedding_norm"] = _norm(make, Norm("embedding", kind, stack.hidden, scales[0].params))
    layers = torch.nn.ModuleList([_block(make, stack.blocks[index]) for index in stack.layers])
    children["layers"] = layers
    if stack.final_norm is not None:
        children["final_norm"] = _norm(make, stack.final_norm)
    if not head.tied:
        children["head"] = make.linear(Linear("head", head.hidden, head.vocab, head.bias))
    elif head.bias:
        children["head_bias"] = make.weight(head.vocab)

    again = import_module("torch.utils.checkpoint").checkpoint

    def run(module: Any, tokens: Any) -> Any:
        x = module.embedding(tokens)
        if table.projection:
            x = module.embedding_in(x)
        if positions:
            x = x + module.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if scales:
            x = module.embedding_norm(x)
        rotation = _rotation(make, stack, tokens.shape[1])
        for layer in module.layers:
            x = again(layer, x, rotation, use_reentrant=False) if recompute else layer(x, rotation)
        if stack.final_norm is not None:
            x = module.final_norm(x)
        if table.projection:
            x = module.embedding_out(x)
        if not head.tied:
            return module.head(x)
        bias = module.head_bias if head.bias else None
        return torch.nn.functional.linear(x, module.embedding.weight, bias)

    model = make.part(run, **children)
    built = sum(parameter.numel() for parameter in model.parameters())
    planned = int(count(graph).total.value)
    if built != planned:
        raise UnsupportedModel(
            f"{graph.name} has {planned:,} parameters and {built:,} of them can be built", key="model"
        )
    return model


def _table(make: Make, rows: int, width: int) -> Any:
    table = make.torch.nn.Embedding(rows, width, device=make.device, dtype=make.dtype)
    make.torch.nn.init.normal_(table.weight, std=0.02)
    return table


# -- layers ---------------------------------------------------------------------------------------


def _block(make: Make, block: Block) -> Any:
    """One layer, by the names of its norms: before its parts, after them, or both."""
    mixer, ffn = block.mixer, block.ffn
    assert isinstance(mixer, Attention)
    assert ffn is not None
    children = {f"{norm.name}_norm": _norm(make, norm) for norm in block.norms}
    children |= {"mixer": _attention(make, mixer), "ffn": _feed_forward(make, ffn)}
    named = {norm.name for norm in block.norms}

    def normed(module: Any, name: str, x: Any) -> Any:
        return getattr(module, f"{name}_norm")(x) if name in named else x

    def run(module: Any, x: Any, rotation: Any) -> Any:
        before = normed(module, "input", x)
        mixed = normed(module, "post_mixer", module.mixer(before, rotation))
        if block.parallel:
            fed = module.ffn(normed(module, "pre_ffn", x) if "pre_ffn" in named else before)
            return x + mixed + fed
        x = x + mixed
        return x + normed(module, "post_ffn", module.ffn(normed(module, "pre_ffn", x)))

    return make.part(run, **children)


def _norm(make: Make, norm: Norm) -> Any:
    torch = make.torch
    if norm.kind.startswith("layernorm"):
        return torch.nn.LayerNorm(
            norm.width, bias=norm.params == 2 * norm.width, device=make.device, dtype=make.dtype
        )
    in_fp32 = norm.kind == "rmsnorm_fp32_weight"

    def run(module: Any, x: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
        if in_fp32:
            return (wide * module.weight.float()).to(x.dtype)
        return module.weight * wide.to(x.dtype)

    return make.part(run, weight=make.ones(norm.params))


def _rotation(make: Make, stack: Stack, length: int) -> Any:
    """Cosines and sines by the width that is rotated; layers share them."""
    torch = make.torch
    widths = {_rotated(b.mixer) for b in stack.blocks if isinstance(b.mixer, Attention)} - {0}
    made = {}
    for width in sorted(widths):
        steps = torch.arange(0, width, 2, device=make.device, dtype=torch.float32) / width
        angles = torch.outer(
            torch.arange(length, device=make.device, dtype=torch.float32), _ROPE_BASE**-steps
        )
        angles = torch.cat((angles, angles), -1)
        made[width] = (angles.cos(), angles.sin())
    return made


def _rotated(item: Attention) -> int:
    """Width of a head that rotary positions turn: all of it, or half where only part is turned."""
    if item.rope == "none":
        return 0
    if item.rope_dim is not None:
        return item.rope_dim
    return item.qk_dim if item.rope == "full" else max(2, item.qk_dim // 2 // 2 * 2)


def _turn(torch: Any, x: Any, rotation: Any, width: int) -> Any:
    """Rotary positions on the last `width` numbers of each head."""
    if not width:
        return x
    cos, sin = (part.to(x.dtype) for part in rotation[width])
    kept, turned = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return turned if kept.shape[-1] == 0 else torch.cat((kept, turned), -1)


def _attention(make: Make, item: Attention) -> Any:
    torch = make.torch
    children = {linear.name: make.linear(linear) for linear in item.linears}
    for vector in item.vectors:
        if vector.name == "sinks":
            children["sinks"] = make.weight(vector.params)
        else:
            children[vector.name] = _norm(make, Norm(vector.name, "rmsnorm", vector.params, vector.params))
    q_width, k_width, v_width = (
        item.heads * item.qk_dim,
        item.kv_heads * item.qk_dim,
        item.kv_heads * item.v_dim,
    )
    rotated = _rotated(item)

    def heads(x: Any, number: int) -> Any:
        return x.unflatten(-1, (number, -1)).transpose(1, 2)

    def latent(module: Any, x: Any, rotation: Any) -> tuple[Any, Any, Any]:
        low = module.q_a_norm(module.q_a(x)) if item.q_lora else None
        q = heads(module.q(x) if low is None else module.q_b(low), item.heads)
        assert item.kv_lora is not None
        packed, k_turned = module.kv_a(x).split((item.kv_lora, rotated or (item.rope_dim or 0)), -1)
        k_v = heads(module.kv_b(module.kv_a_norm(packed)), item.heads)
        plain = item.qk_dim - k_turned.shape[-1]
        k, v = k_v.split((plain, item.v_dim), -1)
        k_turned = _turn(torch, k_turned[:, None], rotation, rotated).expand(-1, item.heads, -1, -1)
        return _turn(torch, q, rotation, rotated), torch.cat((k, k_turned), -1), v

    def grouped(module: Any, x: Any, rotation: Any) -> tuple[Any, Any, Any, Any]:
        gate = None
        if item.qkv != "split":
            q, k, v = module.qkv(x).split((q_width, k_width, v_width), -1)
        else:
            q, k = module.q(x), module.k(x)
            v = k if item.shared_kv else module.v(x)
        if item.gated:
            q, gate = q.chunk(2, -1)
        if item.qk_norm == "width":
            q, k = module.q_norm(q), module.k_norm(k)
        q, k, v = heads(q, item.heads), heads(k, item.kv_heads), heads(v, item.kv_heads)
        if item.qk_norm == "head":
            q, k = module.q_norm(q), module.k_norm(k)
        elif item.qk_norm == "head_l2":
            q, k = (torch.nn.functional.normalize(part, dim=-1) for part in (q, k))
        return _turn(torch, q, rotation, rotated), _turn(torch, k, rotation, rotated), v, gate

    def run(module: Any, x: Any, rotation: Any) -> Any:
        gate = None
        if item.kv_lora is not None:
            q, k, v = latent(module, x, rotation)
        else:
            q, k, v, gate = grouped(module, x, rotation)
        out = _attend(make, item, q, k, v, getattr(module, "sinks", None))
        out = out.transpose(1, 2).flatten(2)
        return module.o(out if gate is None else out * torch.sigmoid(gate))

    return make.part(run, **children)


def _attend(make: Make, item: Attention, q: Any, k: Any, v: Any, sinks: Any) -> Any:
    """Softmax attention: the fused kernel where one does what the layer does, else scores in full."""
    torch, length = make.torch, q.shape[2]
    windowed = item.span is not None and item.span < length
    fused = not (make.eager_attention or item.softcap or sinks is not None)
    mask = _mask(torch, item, length, q.device) if windowed and fused else None
    groups = item.heads // item.kv_heads if item.kv_lora is None else 1
    # Of the fused kernels flash alone takes grouped heads, in 16 bit and without a mask; others would fall
    # back to scores in full.
    halved = q.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(q.device.type)
    grouped = groups > 1 and fused and mask is None and halved
    if groups > 1 and not grouped:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if fused:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    scores = q @ k.transpose(-1, -2) * item.qk_dim**-0.5
    if item.softcap:
        scores = 50.0 * torch.tanh(scores / 50.0)
    scores = scores.masked_fill(~_mask(torch, item, length, q.device), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(scores.shape[0], -1, length, 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores.float(), -1).to(q.dtype)
    return (weights[..., :length] if sinks is not None else weights) @ v


def _mask(torch: Any, item: Attention, length: int, device: Any) -> Any:
    """Which tokens each query sees."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    seen = back >= 0
    if item.span is not None:
        same = at[:, None] // item.span == at[None, :] // item.span
        seen = seen & (same if item.kind == "chunked" else back < item.span)
    return seen


# -- feed-forward parts ---------------------------------------------------------------------------


def _activation(torch: Any, name: str) -> Callable[[Any], Any]:
    f = torch.nn.functional
    known: dict[str, Callable[[Any], Any]] = {
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_new": lambda x: f.gelu(x, approximate="tanh"),
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "relu": f.relu,
        "relu2": lambda x: f.relu(x).square(),
        "swiglu_clamped": lambda x: x * torch.sigmoid(1.702 * x),
    }
    if name not in known:
        raise UnsupportedModel(f"the stages cannot build the activation {name}", key="model.activation")
    return known[name]


def _feed_forward(make: Make, item: FeedForward) -> Any:
    return _experts(make, item) if isinstance(item, Moe) else _mlp(make, item)


def _mlp(make: Make, item: Mlp) -> Any:
    act = _activation(make.torch, item.activation)
    names = [linear.name for linear in item.linears]

    def run(module: Any, x: Any) -> Any:
        if "gate_up" in names:
            gate, up = module.gate_up(x).chunk(2, -1)
            return module.down(act(gate) * up)
        return module.down(act(module.gate(x)) * module.up(x) if item.gated else act(module.up(x)))

    return make.part(run, **{linear.name: make.linear(linear) for linear in item.linears})


def _experts(make: Make, item: Moe) -> Any:
    """Routed experts one after another over the tokens that chose them, and the shared part."""
    torch = make.torch
    act = _activation(torch, item.activation)
    clamped = item.activation == "swiglu_clamped"
    children = {
        linear.name: make.copies(linear) if linear.name.startswith("expert_") else make.linear(linear)
        for linear in item.linears
    }

    def expert(module: Any, x: Any, number: int) -> Any:
        up = module.expert_up(x, number)
        if not item.gated:
            return module.expert_down(act(up), number)
        gate = module.expert_gate(x, number)
        if clamped:
            gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP) + 1
        return module.expert_down(act(gate) * up, number)

    def run(module: Any, x: Any) -> Any:
        flat = x.flatten(0, 1)
        logits = module.router(flat)
        share, chosen = torch.topk(torch.softmax(logits.float(), -1), item.top_k, -1)
        share = (share / share.sum(-1, keepdim=True)).to(x.dtype)
        inner = module.latent_down(flat) if item.latent else flat
        out = torch.zeros_like(inner)
        for number in range(item.experts):
            token, place = torch.where(chosen == number)
            made = expert(module, inner[token], number) * share[token, place, None]
            out = out.index_add(0, token, made.to(out.dtype))
        if item.latent:
            out = module.latent_up(out)
        if item.shared_ffn:
            up = module.shared_up(flat)
            beside = module.shared_down(act(module.shared_gate(flat)) * up if item.gated else act(up))
            if "shared_expert_gate" in children:
                beside = beside * torch.sigmoid(module.shared_expert_gate(flat))
            out = out + beside
        return out.view_as(x)

    return make.part(run, **children)
