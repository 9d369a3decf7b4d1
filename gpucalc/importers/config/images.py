"""Networks of stages over images (ResNet, ConvNeXt, Swin) by the totals their configuration implies.

Every layer is walked once at its resolution: parameters, operations, what autograd keeps (inputs of
products and norms, outputs of ReLU, each tensor once), what layers without products move. Parameters
are exact; the rest agrees with traces of the same classes within two percent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpucalc.errors import InputError, UnsupportedModel
from gpucalc.importers.config.reader import Reader
from gpucalc.importers.config.tops import class_of, labels_of

CHANNELS = 3
IMAGE = 224  # of ImageNet, where a configuration says none


@dataclass(slots=True, eq=False)
class _Tensor:
    """An activation of one image: channels at a square resolution."""

    channels: int
    side: int

    @property
    def elements(self) -> int:
        return self.channels * self.side**2


@dataclass(slots=True)
class _Tally:
    """What a forward pass of one image comes to."""

    params: int = 0
    flops: int = 0
    saved: int = 0
    traffic: int = 0
    kernels: int = 0
    kept: set[int] = field(default_factory=set)
    held: list[_Tensor] = field(default_factory=list)  # kept tensors stay, so that none is met twice

    def keep(self, tensor: _Tensor) -> None:
        if id(tensor) not in self.kept:
            self.kept.add(id(tensor))
            self.held.append(tensor)
            self.saved += tensor.elements

    def moves(self, *tensors: _Tensor, kernels: int = 1) -> None:
        self.traffic += sum(tensor.elements for tensor in tensors)
        self.kernels += kernels

    def product(
        self, x: _Tensor, outputs: int, *, kernel: int = 1, stride: int = 1, bias: bool, groups: int = 1
    ) -> _Tensor:
        """A convolution with "same" padding, or a linear layer over channels."""
        y = _Tensor(outputs, -(-x.side // stride))
        weights = outputs * (x.channels // groups) * kernel**2
        self.params += weights + (outputs if bias else 0)
        self.flops += 2 * weights * y.side**2
        self.keep(x)
        self.kernels += 1
        return y

    def norm(self, x: _Tensor, *, batch: bool) -> _Tensor:
        """A batch norm over channels, or a layer norm over each position."""
        y = _Tensor(x.channels, x.side)
        self.params += 2 * x.channels
        self.keep(x)
        if not batch:
            self.saved += 2 * x.side**2  # a mean and a deviation of every position
        self.moves(x, y, kernels=2 if batch else 1)  # a batch norm counts its batches as well
        return y

    def relu(self, x: _Tensor, *, kept_input: bool = False) -> _Tensor:
        """An activation: ReLU keeps what it makes, GELU what it reads."""
        y = _Tensor(x.channels, x.side)
        self.keep(x if kept_input else y)
        self.moves(x, y)
        return y

    def add(self, x: _Tensor, y: _Tensor) -> _Tensor:
        z = _Tensor(x.channels, x.side)
        self.moves(x, y, z)
        return z


def totals_of(c: Reader, key: str) -> dict[str, Any]:
    """The fields of an image network. Raises UnsupportedModel, InputError."""
    name = class_of(c)
    if name and not name.endswith(("Model", "ForImageClassification")):
        raise UnsupportedModel(
            "no drawing of what stands on top", where=c.where, key="architectures", given=name
        )
    classes = labels_of(c) if name.endswith("ForImageClassification") else None
    if not name:
        c.assumed.append(f"architectures not stated: no classifier, as the bare {key} class has it")
    if c.whole("num_channels") not in (None, CHANNELS):
        raise UnsupportedModel("images of other than three channels", where=c.where, key="num_channels")
    image = c.even("image_size")
    if image is None:
        image = IMAGE
        c.assumed.append(
            f"image_size not stated: {IMAGE}, for work and memory; parameters do not depend on it"
        )
    if not 1 <= image <= 2**14:
        raise InputError("is no size of an image", where=c.where, key="image_size", given=image)
    tally = _Tally()
    walk = {"resnet": _resnet, "convnext": _convnext, "swin": _swin}[key]
    walk(c, tally, image, classes)
    return {
        "kind": "cnn",
        "image_size": image,
        "params_total": tally.params,
        "gflops_forward": tally.flops / 1e9,
        "saved_elements": float(tally.saved),
        "traffic_elements": float(tally.traffic),
        "layers": min(tally.kernels, 10_000),
    }


def _numbers(c: Reader, key: str) -> list[int]:
    """A list of whole numbers above zero. Raises InputError."""
    values = c.listing(key)
    if not values or len(values) > 16 or not all(type(v) is int and 0 < v <= 2**16 for v in values):
        raise InputError("is no list of whole numbers", where=c.where, key=key, given=c.config.get(key))
    return [int(value) for value in values]


def _same_length(c: Reader, key: str, one: list[int], other: list[int]) -> None:
    if len(one) != len(other):
        raise InputError("has as many entries as there are stages", where=c.where, key=key, given=len(other))


def _classify(tally: _Tally, x: _Tensor, classes: int | None) -> None:
    if classes is not None:
        tally.product(_Tensor(x.channels, 1), classes, bias=True)


def _resnet(c: Reader, tally: _Tally, image: int, classes: int | None) -> None:
    depths, widths = _numbers(c, "depths"), _numbers(c, "hidden_sizes")
    _same_length(c, "hidden_sizes", depths, widths)
    kind = c.get("layer_type")
    if kind not in ("basic", "bottleneck"):
        raise InputError("missing", where=c.where, key="layer_type", legal="basic, bottleneck")
    early, first = bool(c.get("downsample_in_bottleneck")), bool(c.get("downsample_in_first_stage"))

    def layer(x: _Tensor, outputs: int, kernel: int, stride: int, *, act: bool = True) -> _Tensor:
        y = tally.norm(tally.product(x, outputs, kernel=kernel, stride=stride, bias=False), batch=True)
        return tally.relu(y) if act else y

    x = layer(_Tensor(CHANNELS, image), c.need("embedding_size"), 7, 2)
    pooled = _Tensor(x.channels, -(-x.side // 2))
    tally.saved += 2 * pooled.elements  # where each maximum was, in 8 bytes
    tally.moves(x, pooled, pooled)
    x = pooled
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for place in range(depth):
            stride = 2 if place == 0 and (stage > 0 or first) else 1
            if kind == "basic":
                y = layer(layer(x, width, 3, stride), width, 3, 1, act=False)
            else:
                narrow = width // 4
                y = layer(x, narrow, 1, stride if early else 1)
                y = layer(y, narrow, 3, 1 if early else stride)
                y = layer(y, width, 1, 1, act=False)
            if x.channels != width or stride != 1:
                x = layer(x, width, 1, stride, act=False)
            x = tally.relu(tally.add(x, y))
    tally.moves(x)
    _classify(tally, x, classes)


def _convnext(c: Reader, tally: _Tally, image: int, classes: int | None) -> None:
    depths, widths = _numbers(c, "depths"), _numbers(c, "hidden_sizes")
    _same_length(c, "hidden_sizes", depths, widths)
    if c.whole("num_stages") not in (None, len(depths)):
        raise InputError("is not the number of depths", where=c.where, key="num_stages")
    patch, scale = c.need("patch_size"), c.get("layer_scale_init_value")
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise InputError("missing", where=c.where, key="layer_scale_init_value")
    x = tally.product(_Tensor(CHANNELS, image), widths[0], kernel=patch, stride=patch, bias=True)
    x = tally.norm(x, batch=False)
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage:
            x = tally.product(tally.norm(x, batch=False), width, kernel=2, stride=2, bias=True)
        for _ in range(depth):
            y = tally.norm(tally.product(x, width, kernel=7, bias=True, groups=width), batch=False)
            y = tally.relu(tally.product(y, 4 * width, bias=True), kept_input=True)
            y = tally.product(y, width, bias=True)
            if scale > 0:
                tally.params += width
                tally.keep(y)
                scaled = _Tensor(width, y.side)
                tally.moves(y, scaled)
                y = scaled
            x = tally.add(x, y)
    tally.moves(x)
    tally.norm(_Tensor(x.channels, 1), batch=False)
    _classify(tally, x, classes)


def _swin(c: Reader, tally: _Tally, image: int, classes: int | None) -> None:
    depths, heads = _numbers(c, "depths"), _numbers(c, "num_heads")
    _same_length(c, "num_heads", depths, heads)
    patch, width, window = c.need("patch_size"), c.need("embed_dim"), c.need("window_size")
    ratio, bias = c.get("mlp_ratio"), c.get("qkv_bias")
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not isinstance(bias, bool):
        raise InputError("missing, or qkv_bias is", where=c.where, key="mlp_ratio")
    if c.get("use_absolute_embeddings"):
        raise UnsupportedModel("Swin with absolute positions", where=c.where, key="use_absolute_embeddings")
    x = tally.product(_Tensor(CHANNELS, image), width, kernel=patch, stride=patch, bias=True)
    x = tally.norm(x, batch=False)
    rate = c.get("drop_path_rate")
    drops, first = isinstance(rate, int | float) and rate > 0, True  # the first block is never dropped
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        for place in range(depth):
            shifted = place % 2 == 1 and window < x.side
            x = _swin_block(
                c,
                tally,
                x,
                count,
                window,
                int(ratio * x.channels),
                bias,
                shifted=shifted,
                drops=drops and not first,
            )
            first = False
        if stage + 1 < len(depths):
            joined = _Tensor(4 * x.channels, -(-x.side // 2))
            tally.moves(x, joined)
            x = tally.product(tally.norm(joined, batch=False), 2 * x.channels, bias=False)
    tally.norm(x, batch=False)
    _classify(tally, x, classes)


def _swin_block(
    c: Reader,
    tally: _Tally,
    x: _Tensor,
    heads: int,
    window: int,
    ffn: int,
    bias: bool,
    *,
    shifted: bool,
    drops: bool,
) -> _Tensor:
    """Attention inside windows with a table of relative positions, and a feed-forward part."""
    width = x.channels
    if width % heads:
        raise InputError(f"does not divide a width of {width}", where=c.where, key="num_heads", given=heads)
    y = tally.norm(x, batch=False)
    query, key, value = (tally.product(y, width, bias=bias) for _ in range(3))
    tally.params += (2 * window - 1) ** 2 * heads
    scores = heads * x.side**2 * min(window, x.side) ** 2
    tally.flops += 4 * scores * (width // heads)
    for part in (query, key, value):
        tally.keep(part)
    tally.saved += scores  # probabilities
    # Padded, cut into windows, scaled queries and keys, three heads' layouts, joined, put back.
    tally.traffic += 18 * x.elements + 4 * scores
    tally.kernels += 15
    if shifted:  # rolled and rolled back, under a mask that is made anew
        tally.traffic += 4 * x.elements + 2 * scores + 8 * scores // heads
        tally.kernels += 24
    mixed = _Tensor(width, x.side)
    y = tally.product(mixed, width, bias=True)
    if drops:
        tally.moves(y, y, y, y, kernels=5)
    x = tally.add(x, y)
    y = tally.relu(tally.product(tally.norm(x, batch=False), ffn, bias=True), kept_input=True)
    return tally.add(x, tally.product(y, width, bias=True))
