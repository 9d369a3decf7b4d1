"""The vision towers of multimodal decoders, and the way from each to its decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpucalc.builders.parts import Draft, norm
from gpucalc.builders.vision import RGB, image_block, patch_map, patch_side, patches
from gpucalc.errors import UnsupportedModel
from gpucalc.families import Family
from gpucalc.graph import Linear, Shard, Stack, Vector
from gpucalc.spec.model import TowerSpec

Tower = tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]  # with its projector and the projector's vectors
# A plain biased ViT unless said.
_PLAIN = Family(
    norm="layernorm",
    position_kind="none",
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
FRAMES = 2  # that Qwen's towers take at once
SHUFFLED = 2  # Idefics 3: so many patches by so many become one token, unless the file says
DEEPSTACK_MERGERS = 3  # tower layers whose output is merged into early decoder layers as well


def tower(d: Draft, hidden: int) -> Tower:
    """The vision tower of a multimodal decoder, its projector, and the projector's vectors."""
    t = d.spec.vision_tower
    assert t is not None
    draw = _DRAWN.get(t.kind or d.traits.vision)
    if draw is None:
        raise UnsupportedModel(
            f"{d.spec.label}: no vision tower is drawn for {d.key}", key="model.vision_tower"
        )
    return draw(Draft(spec=d.spec, key=d.key, traits=_PLAIN, notes=d.notes), t, hidden)


def _stack(d: Draft, t: TowerSpec, tokens: int, patch: Linear, *vectors: Vector, final: bool = True) -> Stack:
    """The tower's layers: what patches pass first, what is added to them, a norm at the end."""
    return Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(image_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(patch,),
        vectors=vectors,
        final_norm=norm("final", "layernorm", t.hidden) if final else None,
    )


def _whole(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Linear:
    """A matrix that every tensor rank holds whole, as projectors are."""
    return Linear(name, inputs, outputs, bias, Shard.REPLICATED)


def _two(name: str, inputs: int, middle: int, outputs: int, *, bias: bool = True) -> tuple[Linear, ...]:
    return _whole(f"{name}_1", inputs, middle, bias=bias), _whole(f"{name}_2", middle, outputs, bias=bias)


def _classed(t: TowerSpec, tokens: int) -> tuple[Vector, ...]:
    """A class token and a table of positions."""
    return Vector("class_token", t.hidden), Vector("positions", tokens * t.hidden)


def _seen(d: Draft, t: TowerSpec, usual: int) -> int:
    """Patches of a sample, a usual number where no image size is stated."""
    if t.image is None:
        d.assume(f"image size not stated: a vision sample is taken as {usual:,} patches")
    return patches(d, t) if t.image else usual


def _clip(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """CLIP's image tower as LLaVA takes it, with a projector of two matrices."""
    tokens = patches(d, t) + 1
    before = Vector("embedding_norm", norm("embedding", "layernorm", t.hidden).params)
    stack = _stack(d, t, tokens, patch_map(t, bias=False), *_classed(t, tokens), before)
    return stack, _two("vision_projector", t.hidden, hidden, hidden), ()


def _llava_next(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """As LLaVA, with a learned mark where a line of image tiles ends."""
    stack, projector, _ = _clip(d, t, hidden)
    return stack, projector, (Vector("image_newline", hidden),)


def _siglip(d: Draft, t: TowerSpec) -> Stack:
    """SigLIP's image tower without its pooling head."""
    d.traits = replace(d.traits, activation="gelu_tanh")
    tokens = patches(d, t)
    return _stack(d, t, tokens, patch_map(t, bias=True), Vector("positions", tokens * t.hidden))


def _paligemma(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """SigLIP and one map."""
    return _siglip(d, t), (_whole("vision_projector", t.hidden, t.projection or hidden),), ()


def _idefics3(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """SigLIP; a square of patches is put into one token, and mapped once."""
    width = (t.merge or SHUFFLED) ** 2 * t.hidden
    return _siglip(d, t), (_whole("vision_projector", width, hidden, bias=False),), ()


def _gemma3(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """SigLIP; 4 x 4 patches are averaged into one token."""
    projector = _whole("vision_projector", t.hidden, hidden, bias=False)
    return _siglip(d, t), (projector,), (Vector("vision_projector_norm", t.hidden),)


def _gemma4(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Biasless gated blocks with four norms and per-head norms; two position tables, for rows and columns."""
    d.traits = Family(norm="rmsnorm_fp32_weight", norms_per_block=4, qk_norm="head", activation="gelu_tanh")
    if t.image is None:
        d.assume("image size not stated: a vision sample is taken as 2,520 patches, the model's own limit")
    table = Vector("positions", 2 * (t.positions or 10240) * t.hidden)
    tokens = patches(d, t) if t.image else 2520
    stack = _stack(d, t, tokens, patch_map(t, bias=False), table, final=False)
    return stack, (_whole("vision_projector", t.hidden, hidden, bias=False),), ()


def _internvl(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """A class token, layer scale; 2 x 2 patches are put into one token and mapped twice."""
    d.traits = replace(d.traits, layer_scale=True, qkv_bias=bool(t.qkv_bias))
    tokens = patches(d, t) + 1
    stack = _stack(d, t, tokens, patch_map(t, bias=True), *_classed(t, tokens), final=False)
    merged = 4 * t.hidden
    projector = _two("vision_projector", merged, hidden, hidden)
    return stack, projector, (Vector("vision_projector_norm", 2 * merged),)


def _llama4(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Patches and a class token; four patches are shuffled into one and mapped twice."""
    width = t.projection or 4096
    tokens = patches(d, t) + 1
    d.traits = replace(d.traits, position_kind="rope")
    before = Vector("embedding_norm", 2 * t.hidden)
    stack = _stack(d, t, tokens, patch_map(t, bias=False), *_classed(t, tokens), before)
    adapter = _two("vision_adapter", 4 * t.hidden, width, width, bias=False)
    return stack, (*adapter, _whole("vision_projector", width, hidden, bias=False)), ()


def _grid_tower(d: Draft, t: TowerSpec, positions: int, patch: Linear, *, final: bool) -> Stack:
    """A tower with a learned table of positions and rotary ones, whole where no image size is stated."""
    d.traits = replace(d.traits, qkv="fused", position_kind="rope", activation="gelu_tanh")
    if t.image is None:
        d.assume(f"image size not stated: a vision sample is taken as the full grid of {positions} patches")
    tokens = patches(d, t) if t.image else positions
    return _stack(d, t, tokens, patch, Vector("positions", positions * t.hidden), final=final)


def _frames(t: TowerSpec, *, bias: bool) -> Linear:
    """Patches of two frames at once."""
    return _whole("patch", RGB * FRAMES * patch_side(t) ** 2, t.hidden, bias=bias)


def _merger(t: TowerSpec, hidden: int) -> tuple[Linear, ...]:
    """2 x 2 patches become one token of the decoder's width."""
    return _two("vision_merger", 4 * t.hidden, 4 * t.hidden, t.projection or hidden)


def _qwen(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Frames in pairs, rotary and learned positions; 2 x 2 patches are merged into one token."""
    stack = _grid_tower(d, t, t.positions or 2304, _frames(t, bias=True), final=False)
    return stack, _merger(t, hidden), (Vector("vision_merger_norm", 2 * t.hidden),)


def _qwen3_vl(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Qwen's tower, with mergers of its own for the layers that feed early decoder layers."""
    stack, projector, _ = _qwen(d, t, hidden)
    deep = tuple(
        replace(part, name=f"{part.name}_{index}") for index in range(DEEPSTACK_MERGERS) for part in projector
    )
    norms = 2 * t.hidden + DEEPSTACK_MERGERS * 2 * 4 * t.hidden
    return stack, (*projector, *deep), (Vector("vision_merger_norms", norms),)


def _qwen2_vl(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """A plain biased ViT over frames in pairs with rotary positions."""
    d.traits = replace(d.traits, qkv="fused", position_kind="rope")
    stack = _stack(d, t, _seen(d, t, 1024), _frames(t, bias=False), final=False)
    return stack, _merger(t, hidden), (Vector("vision_merger_norm", 2 * t.hidden),)


def _qwen2_5_vl(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Gated blocks with biases and rotary positions over frames in pairs."""
    d.traits = replace(
        d.traits, norm="rmsnorm", qkv="fused", position_kind="rope", activation="silu", gated_mlp=True
    )
    stack = _stack(d, t, _seen(d, t, 1024), _frames(t, bias=False), final=False)
    return stack, _merger(t, hidden), (Vector("vision_merger_norm", t.hidden),)


def _pixtral(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Biasless gated blocks with rotary positions; 2 x 2 patches are merged into one token."""
    d.traits = Family(norm="rmsnorm", position_kind="rope", activation="silu")
    before = Vector("embedding_norm", t.hidden)
    stack = _stack(d, t, patches(d, t), patch_map(t, bias=False), before, final=False)
    projector = (
        _whole("vision_merger", 4 * t.hidden, t.hidden, bias=False),
        *_two("vision_projector", t.hidden, hidden, hidden, bias=False),
    )
    return stack, projector, (Vector("vision_projector_norm", t.hidden),)


def _moonvit(d: Draft, t: TowerSpec, hidden: int) -> Tower:
    """Learned and rotary positions; 2 x 2 patches are merged into one token."""
    stack = _grid_tower(d, t, t.positions or 4096, patch_map(t, bias=True), final=True)
    merged = 4 * t.hidden
    projector = _two("vision_projector", merged, merged, hidden)
    return stack, projector, (Vector("vision_projector_norm", 2 * t.hidden),)


_DRAWN: dict[str, Callable[[Draft, TowerSpec, int], Tower]] = {
    "clip": _clip,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llama4": _llama4,
    "llava": _clip,
    "llava_next": _llava_next,
    "moonvit": _moonvit,
    "paligemma": _paligemma,
    "pixtral": _pixtral,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_5": _qwen,
    "qwen3_vl": _qwen3_vl,
}
