"""Image transformers: classifiers, contrastive pairs, and the towers of multimodal models."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.builders.parts import Draft, attention, family_mlp, norm
from gpucalc.families import Family
from gpucalc.graph import Block, Embedding, Graph, Head, Linear, Norm, Shard, Stack, Vector
from gpucalc.spec.model import TowerSpec

RGB = 3
# Towers of multimodal models: a plain biased ViT unless said.
_PLAIN = Family(
    norm="layernorm",
    position_kind="none",
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)


def _block(d: Draft, t: TowerSpec, *, causal: bool = False) -> Block:
    layer_scale = (Vector("layer_scale", 2 * t.hidden),) if d.traits.layer_scale else ()
    return Block(
        "full+mlp",
        attention(
            d,
            hidden=t.hidden,
            heads=t.heads,
            kv_heads=t.heads,
            head_dim=t.hidden // t.heads,
            causal=causal,
        ),
        family_mlp(d, t.hidden, t.ffn),
        _norms(d, t.hidden),
        vectors=layer_scale,
    )


def _norms(d: Draft, hidden: int) -> tuple[Norm, ...]:
    names = ["input", "pre_ffn"]
    if d.traits.norms_per_block == 4:
        names = ["input", "post_mixer", "pre_ffn", "post_ffn"]
    return tuple(norm(name, d.traits.norm, hidden) for name in names)


def _patches(d: Draft, t: TowerSpec) -> int:
    from gpucalc.errors import InputError

    if t.patch is None or t.image is None:
        raise InputError(
            f"{d.spec.label}: an image stack needs patch and image size",
            key="model.patch" if t.patch is None else "model.image_size",
            legal="a whole number of pixels",
        )
    return (t.image // t.patch) ** 2


def _patch_map(t: TowerSpec, *, bias: bool) -> Linear:
    assert t.patch is not None
    return Linear("patch", RGB * t.patch**2, t.hidden, bias, Shard.REPLICATED)


def vit(d: Draft) -> Graph:
    """ViT and DINOv2: patches and a class token, a classifier or nothing on top."""
    spec = d.spec
    layers, hidden, heads, patch = d.need("layers", "hidden", "heads", "patch")
    image = spec.image_size
    if image is None:
        (image,) = d.need("image_size")
    t = TowerSpec(layers=layers, hidden=hidden, heads=heads, ffn=d.ffn(), patch=patch, image=image)
    tokens = _patches(d, t) + (2 if d.key == "deit" else 1)
    table = spec.positions or tokens  # a checkpoint may hold a larger grid than it is run at
    mask = (Vector("mask_token", hidden),) if d.traits.mask_token else ()
    linears: tuple[Linear, ...] = ()
    if d.traits.head == "classifier":
        classes = spec.classes
        if classes is None:
            classes = 1000
            d.assume("classes not stated: 1000, as ImageNet has them")
        read = 2 * hidden if d.key == "dinov2" else hidden  # DINOv2's reads the patches' mean as well
        linears = (Linear("classifier", read, classes, True, Shard.REPLICATED),)
    elif d.traits.head == "pooler":
        linears = (Linear("pooler", hidden, hidden, True, Shard.REPLICATED),)
    stack = Stack(
        name="vision",
        role="vision",
        hidden=hidden,
        blocks=(_block(d, t),),
        layers=(0,) * layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=True),),
        vectors=(
            Vector("class_token", hidden),
            Vector("positions", table * hidden),
            *mask,
            *((Vector("distillation_token", hidden),) if d.key == "deit" else ()),
        ),
        final_norm=norm("final", d.traits.norm, hidden),
    )
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=(stack,),
        head=Head(vocab=0, hidden=hidden, tied=True, linears=linears),
        notes=tuple(d.notes),
    )


def contrastive(d: Draft) -> Graph:
    """CLIP and SigLIP: an image tower and a text tower that meet in one space."""
    from gpucalc.errors import InputError

    spec = d.spec
    sight, text = spec.vision_tower, spec.text_tower
    if sight is None or text is None or text.vocab is None:
        raise InputError(
            f"{spec.label} needs a vision_tower and a text_tower with its vocab",
            key="model.vision_tower" if sight is None else "model.text_tower",
        )
    siglip = d.key == "siglip"
    tokens = _patches(d, sight)
    kind = d.traits.norm
    final = norm("final", kind, sight.hidden)
    if siglip:
        own: tuple[Vector, ...] = (Vector("positions", tokens * sight.hidden),)
    else:
        tokens += 1
        own = (
            Vector("class_token", sight.hidden),
            Vector("positions", tokens * sight.hidden),
            Vector("embedding_norm", norm("embedding", kind, sight.hidden).params),
        )
    context = text.positions or d.traits.positions
    assert context is not None
    stacks = (
        Stack(
            name="vision",
            role="vision",
            hidden=sight.hidden,
            blocks=(_block(d, sight),),
            layers=(0,) * sight.layers,
            tokens=tokens,
            inputs=(_patch_map(sight, bias=siglip),),
            vectors=own,
            final_norm=final,
        ),
        Stack(
            name="text",
            role="text",
            hidden=text.hidden,
            blocks=(_block(d, text, causal=not siglip),),
            layers=(0,) * text.layers,
            tokens=context,
            final_norm=norm("final", kind, text.hidden),
        ),
    )
    if siglip:  # attention pooling over patches, a linear map over text, scale and bias of the loss
        pool = _block(d, sight)
        assert pool.mixer is not None
        assert pool.ffn is not None
        linears = (
            *(replace(part, name=f"pool_{part.name}") for part in (*pool.mixer.linears, *pool.ffn.linears)),
            Linear("text_projection", text.hidden, text.hidden, True, Shard.REPLICATED),
        )
        vectors: tuple[Vector, ...] = (
            Vector("pool_probe", sight.hidden),
            Vector("pool_norm", final.params),
            Vector("logit_scale_bias", 2),
        )
    else:
        width = text.projection or text.hidden
        linears = (
            Linear("visual_projection", sight.hidden, width, shard=Shard.REPLICATED),
            Linear("text_projection", text.hidden, width, shard=Shard.REPLICATED),
        )
        vectors = (Vector("logit_scale", 1),)
    return Graph(
        name=spec.label,
        family=spec.family or d.key,
        stacks=stacks,
        embedding=Embedding(text.vocab, text.hidden, (Vector("positions", context * text.hidden),)),
        head=Head(vocab=0, hidden=text.hidden, tied=True, linears=linears, vectors=vectors),
        notes=tuple(d.notes),
    )


def tower(d: Draft, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """The vision tower of a multimodal decoder, its projector, and the projector's vectors."""
    from gpucalc.errors import UnsupportedModel

    t = d.spec.vision_tower
    assert t is not None
    draw = {
        "clip": _clip,
        "gemma3": _gemma3,
        "gemma4": _gemma4,
        "llama4": _llama4,
        "moonvit": _moonvit,
        "pixtral": _pixtral,
        "idefics3": _idefics3,
        "internvl": _internvl,
        "llava": _clip,
        "llava_next": _llava_next,
        "paligemma": _paligemma,
        "qwen2_vl": _qwen2_vl,
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen3_5": _qwen,
        "qwen3_vl": _qwen3_vl,
    }.get(t.kind or d.traits.vision)
    if draw is None:
        raise UnsupportedModel(
            f"{d.spec.label}: no vision tower is drawn for {d.key}", key="model.vision_tower"
        )
    return draw(Draft(spec=d.spec, key=d.key, traits=_PLAIN, notes=d.notes), t, hidden)


def _clip(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """CLIP's image tower as LLaVA takes it, with a projector of two matrices."""
    tokens = _patches(d, t) + 1
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=False),),
        vectors=(
            Vector("class_token", t.hidden),
            Vector("positions", tokens * t.hidden),
            Vector("embedding_norm", norm("embedding", "layernorm", t.hidden).params),
        ),
        final_norm=norm("final", "layernorm", t.hidden),
    )
    projector = (
        Linear("vision_projector_1", t.hidden, hidden, True, Shard.REPLICATED),
        Linear("vision_projector_2", hidden, hidden, True, Shard.REPLICATED),
    )
    return stack, projector, ()


def _llava_next(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """As LLaVA, with a learned mark where a line of image tiles ends."""
    stack, projector, _ = _clip(d, t, hidden)
    return stack, projector, (Vector("image_newline", hidden),)


def _siglip(d: Draft, t: TowerSpec) -> Stack:
    """SigLIP's image tower without its pooling head."""
    d.traits = replace(d.traits, activation="gelu_tanh")
    tokens = _patches(d, t)
    return Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=True),),
        vectors=(Vector("positions", tokens * t.hidden),),
        final_norm=norm("final", "layernorm", t.hidden),
    )


def _paligemma(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """SigLIP and one map."""
    width = t.projection or hidden
    return _siglip(d, t), (Linear("vision_projector", t.hidden, width, True, Shard.REPLICATED),), ()


SHUFFLED = 2  # Idefics 3: so many patches by so many become one token, unless the file says


def _idefics3(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """SigLIP; a square of patches is put into one token, and mapped once."""
    square = (t.merge or SHUFFLED) ** 2
    projector = (Linear("vision_projector", square * t.hidden, hidden, shard=Shard.REPLICATED),)
    return _siglip(d, t), projector, ()


def _internvl(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """A class token, layer scale; 2 x 2 patches are put into one token and mapped twice."""
    d.traits = replace(d.traits, layer_scale=True, qkv_bias=bool(t.qkv_bias))
    tokens = _patches(d, t) + 1
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=True),),
        vectors=(Vector("class_token", t.hidden), Vector("positions", tokens * t.hidden)),
    )
    merged = 4 * t.hidden
    projector = (
        Linear("vision_projector_1", merged, hidden, True, Shard.REPLICATED),
        Linear("vision_projector_2", hidden, hidden, True, Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_projector_norm", 2 * merged),)


def _qwen2_vl(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """A plain biased ViT over frames in pairs with rotary positions; 2 x 2 patches become one token."""
    assert t.patch is not None
    d.traits = replace(d.traits, qkv="fused", position_kind="rope")
    if t.image is None:
        d.assume("image size not stated: a vision sample is taken as 1,024 patches")
    merged = 4 * t.hidden
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=_patches(d, t) if t.image else 1024,
        inputs=(Linear("patch", RGB * 2 * t.patch**2, t.hidden, shard=Shard.REPLICATED),),
    )
    projector = (
        Linear("vision_merger_1", merged, merged, True, Shard.REPLICATED),
        Linear("vision_merger_2", merged, t.projection or hidden, True, Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_merger_norm", 2 * t.hidden),)


def _gemma3(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """SigLIP; 4 x 4 patches are averaged into one token."""
    projector = (Linear("vision_projector", t.hidden, hidden, shard=Shard.REPLICATED),)
    return _siglip(d, t), projector, (Vector("vision_projector_norm", t.hidden),)


def _gemma4(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Biasless gated blocks with four norms and per-head norms; two position tables, for rows and columns."""
    table = t.positions or 10240
    d.traits = Family(norm="rmsnorm_fp32_weight", norms_per_block=4, qk_norm="head", activation="gelu_tanh")
    if t.image is None:
        d.assume("image size not stated: a vision sample is taken as 2,520 patches, the model's own limit")
    assert t.patch is not None
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=_patches(d, t) if t.image else 2520,
        inputs=(_patch_map(t, bias=False),),
        vectors=(Vector("positions", 2 * table * t.hidden),),
    )
    return stack, (Linear("vision_projector", t.hidden, hidden, shard=Shard.REPLICATED),), ()


def _llama4(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Patches and a class token; four patches are shuffled into one and mapped twice."""
    shuffled = 4 * t.hidden
    width = t.projection or 4096
    tokens = _patches(d, t) + 1
    d.traits = replace(d.traits, position_kind="rope")
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=False),),
        vectors=(
            Vector("class_token", t.hidden),
            Vector("positions", tokens * t.hidden),
            Vector("embedding_norm", 2 * t.hidden),
        ),
        final_norm=norm("final", "layernorm", t.hidden),
    )
    projector = (
        Linear("vision_adapter_1", shuffled, width, shard=Shard.REPLICATED),
        Linear("vision_adapter_2", width, width, shard=Shard.REPLICATED),
        Linear("vision_projector", width, hidden, shard=Shard.REPLICATED),
    )
    return stack, projector, ()


def _grid_tower(d: Draft, t: TowerSpec, positions: int, patch: Linear) -> Stack:
    """A tower with a learned table of positions and rotary ones, whole where no image size is stated."""
    d.traits = replace(d.traits, qkv="fused", position_kind="rope", activation="gelu_tanh")
    if t.image is None:
        d.assume(f"image size not stated: a vision sample is taken as the full grid of {positions} patches")
    return Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=_patches(d, t) if t.image else positions,
        inputs=(patch,),
        vectors=(Vector("positions", positions * t.hidden),),
    )


def _qwen(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Frames in pairs, rotary and learned positions; 2 x 2 patches are merged into one token."""
    assert t.patch is not None
    stack = _grid_tower(
        d, t, t.positions or 2304, Linear("patch", RGB * 2 * t.patch**2, t.hidden, True, Shard.REPLICATED)
    )
    merged = 4 * t.hidden
    projector = (
        Linear("vision_merger_1", merged, merged, True, Shard.REPLICATED),
        Linear("vision_merger_2", merged, t.projection or hidden, True, Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_merger_norm", 2 * t.hidden),)


DEEPSTACK_MERGERS = 3  # tower layers whose output is merged into early decoder layers as well


def _qwen3_vl(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Qwen's tower, with mergers of its own for the layers that feed early decoder layers."""
    stack, projector, _ = _qwen(d, t, hidden)
    merged = 4 * t.hidden
    deep = tuple(
        Linear(f"{part.name}_{index}", part.inputs, part.outputs, part.bias, part.shard)
        for index in range(DEEPSTACK_MERGERS)
        for part in projector
    )
    norms = 2 * t.hidden + DEEPSTACK_MERGERS * 2 * merged
    return stack, (*projector, *deep), (Vector("vision_merger_norms", norms),)


def _pixtral(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Biasless gated blocks with rotary positions; 2 x 2 patches are merged into one token."""
    d.traits = Family(norm="rmsnorm", position_kind="rope", activation="silu")
    tokens = _patches(d, t)
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=tokens,
        inputs=(_patch_map(t, bias=False),),
        vectors=(Vector("embedding_norm", t.hidden),),
    )
    projector = (
        Linear("vision_merger", 4 * t.hidden, t.hidden, shard=Shard.REPLICATED),
        Linear("vision_projector_1", t.hidden, hidden, shard=Shard.REPLICATED),
        Linear("vision_projector_2", hidden, hidden, shard=Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_projector_norm", t.hidden),)


def _qwen2_5_vl(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Gated blocks with biases and rotary positions over frames in pairs; 2 x 2 patches become one token."""
    assert t.patch is not None
    d.traits = replace(
        d.traits, norm="rmsnorm", qkv="fused", position_kind="rope", activation="silu", gated_mlp=True
    )
    if t.image is None:
        d.assume("image size not stated: a vision sample is taken as 1,024 patches")
    merged = 4 * t.hidden
    stack = Stack(
        name="vision",
        role="vision",
        hidden=t.hidden,
        blocks=(_block(d, t),),
        layers=(0,) * t.layers,
        tokens=_patches(d, t) if t.image else 1024,
        inputs=(Linear("patch", RGB * 2 * t.patch**2, t.hidden, shard=Shard.REPLICATED),),
    )
    projector = (
        Linear("vision_merger_1", merged, merged, True, Shard.REPLICATED),
        Linear("vision_merger_2", merged, t.projection or hidden, True, Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_merger_norm", t.hidden),)


def _moonvit(d: Draft, t: TowerSpec, hidden: int) -> tuple[Stack, tuple[Linear, ...], tuple[Vector, ...]]:
    """Learned and rotary positions; 2 x 2 patches are merged into one token."""
    stack = replace(
        _grid_tower(d, t, t.positions or 4096, _patch_map(t, bias=True)),
        final_norm=norm("final", "layernorm", t.hidden),
    )
    merged = 4 * t.hidden
    projector = (
        Linear("vision_projector_1", merged, merged, True, Shard.REPLICATED),
        Linear("vision_projector_2", merged, hidden, True, Shard.REPLICATED),
    )
    return stack, projector, (Vector("vision_projector_norm", 2 * t.hidden),)
