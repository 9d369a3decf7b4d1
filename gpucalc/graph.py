"""What a model is made of: stacks of blocks, each a mixer, a feed-forward part and norms.

A graph is a handful of block kinds with counts, whatever the depth. It states shapes only;
counts, bytes, FLOPs and seconds are formulas' business. `build_graph` turns a model
description into one and refuses, by name, what it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Shard(StrEnum):
    """How tensor parallelism holds a weight."""

    COLUMN = "column"  # outputs divided by tp
    ROW = "row"  # inputs divided by tp
    REPLICATED = "replicated"  # whole on every tp rank
    VOCAB = "vocab"  # vocabulary rows divided by tp
    EXPERT = "expert"  # divided over expert-parallel ranks, and by expert-tp inside


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix [inputs, outputs] that tokens are multiplied by.

    `copies` identical matrices are held (experts); each token passes through `active` of them, or, in a
    convolution at a higher rate than tokens, `active` times through the one. shared: one set of weights
    serves every layer of the kind.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    shard: Shard = Shard.COLUMN
    copies: int = 1
    active: float = 1.0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Vector:
    """Parameters that enter no matrix multiplication: norm weights, sinks, positions, convolutions."""

    name: str
    params: int
    shard: Shard = Shard.REPLICATED
    shared: bool = False  # as of a Linear


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation of a block: what it does decides what it keeps for backward.

    kind: rmsnorm | rmsnorm_fp32_weight (weight multiplied in fp32: gemma, olmo2) | rmsnorm_keeps_input (t5:
    the 16-bit input stays beside its fp32 copy) | layernorm |
    layernorm_nobias | layernorm_cohere; and, without weights, layernorm_noweight | rmsnorm_noweight.
    """

    name: str
    kind: str
    width: int
    params: int
    shared: bool = False  # as of a Linear


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention: MHA, GQA, MQA, MLA (kv_lora set), windows, cross attention, compressed caches.

    span: tokens a query sees at most (sliding window or chunk), None for all.
    kind: full | sliding | chunked | cross | compressed | heavily_compressed | sparse_indexed.
    qk_norm: none | head (per head) | head_l2 (per head, no weight) | head_layernorm (per head, with a
    bias) | width (over all heads).
    qkv: split | fused | packed (fused with no rope).
    rope: none | full | partial (partial and cat-style rotations copy q and k once more).
    """

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    qk_dim: int  # width of one query or key head
    v_dim: int  # width of one value head
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()
    causal: bool = True
    span: int | None = None
    qk_norm: str = "none"
    qkv: str = "split"
    rope: str = "full"
    softcap: bool = False
    q_lora: int | None = None
    kv_lora: int | None = None
    rope_dim: int | None = None
    compress_ratio: int | None = None
    index_heads: int | None = None
    index_dim: int | None = None
    index_topk: int | None = None
    shared_kv: bool = False  # one projection serves as key and value
    gated: bool = False  # the output is multiplied by a gate as wide as itself
    sinks: bool = False  # one learned logit per head joins the softmax


@dataclass(frozen=True, slots=True)
class StateMixer:
    """A mixer whose state does not grow with context: Mamba, Mamba-2, gated delta net, KDA, lightning,
    short convolutions, RWKV, RG-LRU.
    """

    kind: str  # mamba | mamba2 | gated_deltanet | kda | lightning | short_conv | rwkv | rg_lru
    hidden: int
    inner: int  # width of the mixed stream (d_inner, or value heads x value dim)
    heads: int
    key_dim: int  # per head; the state is heads x key_dim x value_dim
    value_dim: int
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()
    conv: int = 0
    conv_width: int = 0


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward part. activation: silu | gelu | gelu_new | gelu_tanh | relu | relu2."""

    hidden: int
    ffn: int
    gated: bool
    activation: str
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts with optional shared experts. `linears` has the router, the experts, the shared part.

    activation: as of an Mlp, or swiglu_clamped.
    """

    hidden: int
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int  # total width of the shared experts, 0 for none
    gated: bool
    activation: str
    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()
    latent: int | None = None  # width the experts work in when it is not hidden
    fp32_router: bool = False  # the router multiplies in fp32, whatever the compute type


Mixer = Attention | StateMixer
FeedForward = Mlp | Moe


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of layer. parallel: attention and feed-forward read the same residual.

    With one norm, a parallel block's parts share its output. `beside` is a second feed-forward part
    next to the first (a dense one beside experts); `state` a state space in the layer of an attention,
    with a norm's output of its own or the attention's. `streams`: copies of the residual stream that
    hyper-connections keep; `linears` are the block's own, such as the maps that mix those streams.
    """

    name: str
    mixer: Mixer | None
    ffn: FeedForward | None
    norms: tuple[Norm, ...]
    cross: Attention | None = None
    vectors: tuple[Vector, ...] = ()
    parallel: bool = False
    beside: FeedForward | None = None
    linears: tuple[Linear, ...] = ()
    streams: int = 1
    state: StateMixer | None = None

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """What the layer is made of, in order."""
        every = (self.mixer, self.state, self.cross, self.ffn, self.beside)
        return tuple(part for part in every if part is not None)

    @property
    def hidden(self) -> int:
        """Width of the residual stream; attention beside a state space may read a wider one."""
        for part in (self.state, self.mixer, self.ffn):
            if part is not None:
                return part.hidden
        return self.norms[0].width

    @property
    def weights(self) -> tuple[Linear | Vector | Norm, ...]:
        """Everything that holds parameters."""
        found: list[Linear | Vector | Norm] = [*self.linears, *self.vectors, *self.norms]
        for part in self.parts:
            found += (*part.linears, *part.vectors)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Stack:
    """A run of layers over one token stream.

    role: decoder | encoder | vision | text (CLIP). `layers` holds, in order, the index into
    `blocks` of each layer. `tokens`: tokens per sample when the stream's length is fixed
    (image patches, audio frames), None when it is the run's sequence length.
    """

    name: str
    role: str
    hidden: int
    blocks: tuple[Block, ...]
    layers: tuple[int, ...]
    tokens: int | None = None
    inputs: tuple[Linear, ...] = ()  # patch or audio convolutions as matrices
    vectors: tuple[Vector, ...] = ()  # positions, class token, embedding norm
    final_norm: Norm | None = None

    @property
    def convolutions(self) -> tuple[Linear, ...]:
        """Inputs at higher rates than tokens come at, and the convolution that ends at the tokens' own."""
        fast = [i for i, linear in enumerate(self.inputs) if linear.active > 1]
        return self.inputs[: fast[-1] + 2] if fast else ()

    def normed(self, linear: Linear) -> bool:
        """Whether a norm follows that input."""
        return any(vector.name == f"{linear.name}_norm" for vector in self.vectors)

    def count(self, block: int) -> int:
        """How many layers of the stack are of that block kind."""
        return self.layers.count(block)

    def sets(self, block: int, weight: Linear | Vector | Norm) -> int:
        """How many of that weight the layers of a kind hold."""
        return min(self.count(block), 1) if weight.shared else self.count(block)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token table and what is added to it. `tables`: how many vocabulary tables the input side holds."""

    vocab: int
    width: int
    vectors: tuple[Vector, ...] = ()
    projection: tuple[Linear, ...] = ()  # opt-350m style width changes, factorised embeddings


@dataclass(frozen=True, slots=True)
class Head:
    """The output side. `tied`: the vocabulary matrix is the embedding table, counted once.

    vocab 0: no vocabulary output (BERT body, ViT, CLIP).
    """

    vocab: int
    hidden: int
    tied: bool
    linears: tuple[Linear, ...] = ()  # transforms, poolers, classifiers; not the vocabulary matrix
    vectors: tuple[Vector, ...] = ()
    bias: bool = False  # on the vocabulary matrix


@dataclass(frozen=True, slots=True)
class ImageNetwork:
    """A convolutional or detection network known by its totals, from a trace or a publication.

    All per image at `image` x `image`: forward FLOPs (2 x multiply-accumulate), elements saved for
    backward, elements read and written by layers that multiply nothing.
    """

    params: int
    image: int
    forward_flops: float
    saved_elements: float | None = None
    traffic_elements: float | None = None
    layers: int | None = None  # kernels launched forward, for the overhead term
    live_elements: float | None = None  # most that live at once in a pass without gradients
    # While a detector's loss is taken: bytes per image, bytes of the fullest image alone, and elements of the
    # head's results and their gradients.
    loss_bytes: float = 0.0
    loss_once_bytes: float = 0.0
    head_elements: float = 0.0
    buffers: int = 0  # elements held beside the parameters, such as running statistics


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole model. `trunk` is the stack that pipeline parallelism cuts."""

    name: str
    family: str
    stacks: tuple[Stack, ...] = ()
    embedding: Embedding | None = None
    head: Head | None = None
    vectors: tuple[Vector, ...] = ()
    linears: tuple[Linear, ...] = ()  # projectors between stacks
    network: ImageNetwork | None = None
    notes: tuple[str, ...] = field(default=())  # what the builder assumed

    @property
    def trunk(self) -> Stack:
        """The stack with the most layers; decoders win ties."""
        return max(self.stacks, key=lambda s: (len(s.layers), s.role == "decoder"))
