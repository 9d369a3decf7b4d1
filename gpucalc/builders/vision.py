"""Image transformers: classifiers and contrastive pairs."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.builders.parts import Draft, attention, family_mlp, norm
from gpucalc.errors import InputError
from gpucalc.graph import Block, Embedding, Graph, Head, Linear, Norm, Shard, Stack, Vector
from gpucalc.spec.model import TowerSpec

RGB = 3


def image_block(d: Draft, t: TowerSpec, *, causal: bool = False) -> Block:
    """A layer of an image transformer with the family's traits."""
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


def patches(d: Draft, t: TowerSpec) -> int:
    """Patches of an image. Raises InputError where its size or theirs is not stated."""
    if t.patch is None or t.image is None:
        raise InputError(
            f"{d.spec.label}: an image stack needs patch and image size",
            key="model.patch" if t.patch is None else "model.image_size",
            legal="a whole number of pixels",
        )
    return (t.image // t.patch) ** 2


def patch_side(t: TowerSpec) -> int:
    """Pixels along a patch of a tower. Raises InputError where they are not stated."""
    if t.patch is None:
        raise InputError("is not stated", key="model.vision_tower.patch", legal="a whole number of pixels")
    return t.patch


def patch_map(t: TowerSpec, *, bias: bool) -> Linear:
    """The convolution that makes tokens of patches, as a matrix. Raises InputError."""
    return Linear("patch", RGB * patch_side(t) ** 2, t.hidden, bias, Shard.REPLICATED)


def vit(d: Draft) -> Graph:
    """ViT and DINOv2: patches and a class token, a classifier or nothing on top."""
    spec = d.spec
    layers, hidden, heads, patch = d.need("layers", "hidden", "heads", "patch")
    image = spec.image_size
    if image is None:
        (image,) = d.need("image_size")
    t = TowerSpec(layers=layers, hidden=hidden, heads=heads, ffn=d.ffn(), patch=patch, image=image)
    tokens = patches(d, t) + (2 if d.key == "deit" else 1)
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
        blocks=(image_block(d, t),),
        layers=(0,) * layers,
        tokens=tokens,
        inputs=(patch_map(t, bias=True),),
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
    spec = d.spec
    sight, text = spec.vision_tower, spec.text_tower
    if sight is None or text is None or text.vocab is None:
        raise InputError(
            f"{spec.label} needs a vision_tower and a text_tower with its vocab",
            key="model.vision_tower" if sight is None else "model.text_tower",
        )
    siglip = d.key == "siglip"
    tokens = patches(d, sight)
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
            blocks=(image_block(d, sight),),
            layers=(0,) * sight.layers,
            tokens=tokens,
            inputs=(patch_map(sight, bias=siglip),),
            vectors=own,
            final_norm=final,
        ),
        Stack(
            name="text",
            role="text",
            hidden=text.hidden,
            blocks=(image_block(d, text, causal=not siglip),),
            layers=(0,) * text.layers,
            tokens=context,
            final_norm=norm("final", kind, text.hidden),
        ),
    )
    if siglip:  # attention pooling over patches, a linear map over text, scale and bias of the loss
        pool = image_block(d, sight)
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
