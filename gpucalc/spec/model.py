"""What a model file or an inline `model:` mapping may say.

Shapes are facts about the architecture; `architecture` (the `model_type` of a public config.json)
or `family` picks what the shapes leave open: norms, biases, rotary kind (`gpucalc/families.py`). A
trait written here wins over the family's. `params_*` are totals a source states: they are
compared with the count in tests, and are an input only for networks given by their totals.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from gpucalc.spec.base import Name, Spec

MOST = 100_000_000  # of anything that shapes a model: no width, table or context comes near

ModelKind = Literal[
    "dense_decoder",
    "moe_decoder",
    "hybrid_ssm",
    "ssm",
    "encoder",
    "encoder_decoder",
    "asr",
    "vit",
    "clip",
    "cnn",
    "detector",
    "diffusion",
]


class MoeSpec(Spec):
    """Routed experts. Layer i is mixture-of-experts when i >= dense_layers and i % every == offset."""

    experts: int = Field(ge=1, le=MOST)
    top_k: int = Field(ge=1, le=MOST)
    expert_ffn: int | None = Field(default=None, ge=1, le=MOST)  # width of one routed expert
    shared_expert_ffn: int = Field(default=0, ge=0, le=MOST)  # total width of the experts every token passes
    shared_experts: int | None = Field(default=None, ge=0, le=MOST)  # how many of them; the width counts
    dense_layers: int = Field(default=0, ge=0, le=MOST)  # leading layers with a dense feed-forward part
    every: int = Field(default=1, ge=1, le=MOST)
    offset: int = Field(default=0, ge=0, le=MOST)
    latent: int | None = Field(default=None, ge=1, le=MOST)  # width the experts work in when it is not hidden
    router: str | None = None  # softmax unless said


class MlaSpec(Spec):
    """Multi-head latent attention: low-rank queries and one compressed key-value vector per token."""

    q_lora: int | None = Field(default=None, ge=1, le=MOST)
    kv_lora: int = Field(ge=1, le=MOST)
    qk_nope: int = Field(ge=1, le=MOST)
    qk_rope: int = Field(ge=1, le=MOST)
    v_head: int = Field(ge=1, le=MOST)


class IndexerSpec(Spec):
    """A small attention that picks the `topk` tokens the real one reads."""

    heads: int = Field(ge=1, le=MOST)
    head_dim: int = Field(ge=1, le=MOST)
    topk: int = Field(ge=1, le=MOST)


class SsmSpec(Spec):
    """Mamba (dt_rank) or Mamba-2 (heads, head_dim, groups) layers."""

    state: int = Field(ge=1, le=MOST)
    conv: int = Field(default=4, ge=1, le=MOST)
    expand: int = Field(default=2, ge=1, le=MOST)
    dt_rank: int | None = Field(default=None, ge=1, le=MOST)
    groups: int = Field(default=1, ge=1, le=MOST)
    heads: int | None = Field(default=None, ge=1, le=MOST)
    head_dim: int | None = Field(default=None, ge=1, le=MOST)
    norm: bool = True  # Mamba-2's norm before the output projection


class LinearAttentionSpec(Spec):
    """Linear attention layers: the state is value_heads x key_dim x value_dim.

    rwkv and rg_lru keep numbers per channel (value_heads of them), short_conv the last `conv` inputs.
    """

    kind: Literal["gated_deltanet", "kda", "lightning", "short_conv", "rwkv", "rg_lru"]
    key_heads: int = Field(ge=1, le=MOST)
    value_heads: int = Field(ge=1, le=MOST)
    key_dim: int = Field(ge=1, le=MOST)
    value_dim: int = Field(ge=1, le=MOST)
    conv: int = Field(default=0, ge=0, le=MOST)


class CompressedSpec(Spec):
    """DeepSeek-V4 attention: one shared key-value vector, compressed along the sequence in C and H layers."""

    q_lora: int = Field(ge=1, le=MOST)
    o_groups: int = Field(ge=1, le=MOST)
    o_lora: int = Field(ge=1, le=MOST)
    rope_dim: int = Field(ge=1, le=MOST)
    sparse_ratio: int = Field(ge=1, le=MOST)  # tokens per entry in C layers
    heavy_ratio: int = Field(ge=1, le=MOST)  # tokens per entry in H layers
    residual_streams: int = Field(default=1, ge=1, le=MOST)  # hyper-connections


class GlobalAttentionSpec(Spec):
    """Full-attention layers whose heads differ from those of the sliding ones."""

    kv_heads: int = Field(ge=1, le=MOST)
    head_dim: int = Field(ge=1, le=MOST)
    v_head_dim: int | None = Field(default=None, ge=1, le=MOST)
    shared_kv: bool = False  # values are the keys: no value projection


class SharedSpec(Spec):
    """Blocks of weights that serve several layers: in turn beside state spaces (Zamba), else one after
    another for equal runs of layers (ALBERT).
    """

    blocks: int = Field(ge=1, le=10_000)
    reads: int | None = Field(default=None, ge=1, le=MOST)  # width attention reads: stream beside embedding
    adapter: int | None = Field(default=None, ge=1, le=MOST)  # rank of what a layer adds of its own
    attention_adapters: bool = False  # to queries, keys and values as well as the feed-forward part


class AudioSpec(Spec):
    """Convolutions over the samples of audio, and what else stands before and on a transformer of frames."""

    widths: tuple[int, ...] = Field(min_length=1, max_length=64)
    kernels: tuple[int, ...] = Field(min_length=1, max_length=64)
    strides: tuple[int, ...] = Field(min_length=1, max_length=64)
    bias: bool = False
    norm: Literal["group", "layer"]  # after the first convolution alone, or after each
    position_kernel: int = Field(ge=1, le=MOST)
    position_groups: int = Field(ge=1, le=MOST)
    projection_norm: bool = True
    mask: bool = True  # a learned frame stands in for masked ones
    buckets: int = Field(default=0, ge=0, le=MOST)  # of relative positions, which queries gate (WavLM)
    classifier_width: int | None = Field(default=None, ge=1, le=MOST)
    weighted_layers: bool = False  # a classifier reads a learned mean of all layers

    @field_validator("strides")
    @classmethod
    def _one_each(cls, strides: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        sizes = {len(strides), *(len(info.data.get(name, strides)) for name in ("widths", "kernels"))}
        if len(sizes) > 1:
            raise ValueError("widths, kernels and strides differ in length")
        return strides


class TowerSpec(Spec):
    """A vision tower, or the text tower of a contrastive model.

    kind: how the tower and the way from it to the decoder are built, where the decoder's family does
    not say: the name of that family, such as llava or internvl.
    """

    kind: str | None = None
    layers: int = Field(ge=1, le=10_000)
    hidden: int = Field(ge=1, le=MOST)
    heads: int = Field(ge=1, le=MOST)
    ffn: int = Field(ge=1, le=MOST)
    patch: int | None = Field(default=None, ge=1, le=MOST)
    image: int | None = Field(default=None, ge=1, le=MOST)
    positions: int | None = Field(default=None, ge=1, le=MOST)  # entries of the position table
    vocab: int | None = Field(default=None, ge=1, le=MOST)
    projection: int | None = Field(default=None, ge=1, le=MOST)  # width the tower's output is projected to
    merge: int | None = Field(default=None, ge=1, le=MOST)  # patches by patches put into one token
    qkv_bias: bool | None = None
    params_incl_projector: int | None = Field(default=None, ge=1)  # stated by the source; for tests


class AdaptiveSpec(Spec):
    """Adaptive embedding and softmax: clusters cut by frequency, each `div` times narrower than the last."""

    cutoffs: tuple[int, ...]
    div: int = Field(default=1, ge=1, le=MOST)


class WeightsSpec(Spec):
    """The tensors of published files, read from their headers: exact bytes, as stored."""

    total_bytes: int = Field(ge=0)
    bytes_by_type: dict[str, int] = Field(default_factory=dict)
    bytes_by_part: dict[str, int] = Field(default_factory=dict)  # vision experts embedding head linear rest
    params_by_part: dict[str, int] = Field(default_factory=dict)  # packed ones unpacked, scales left out


class TracedBlock(Spec):
    """A part of a traced module; work and bytes are per sample."""

    name: str
    kind: str  # its class
    params: int = Field(ge=0)
    flops_forward: float = Field(ge=0)
    saved_bytes: float


class TraceSpec(Spec):
    """How a module was traced, and what it came to; bytes are as kept for backward in the traced type."""

    inputs: tuple[str, ...]
    torch: str
    buffers: int = Field(default=0, ge=0)
    saved_bytes_per_sample: float
    saved_bytes_fixed: float = 0.0
    check_batch: int
    check_error: float
    blocks: tuple[TracedBlock, ...] = ()


class ModelSpec(Spec):
    """One model. Every field but a name may be missing; the graph builder names what it lacks."""

    id: Name | None = None
    name: Name | None = None
    aliases: tuple[str, ...] = ()
    hf: Name | None = None  # repository on the Hugging Face hub
    family: Name | None = None
    architecture: Name | None = None
    released: str | None = None
    kind: ModelKind | None = None

    layers: int | None = Field(default=None, ge=1, le=10_000)
    decoder_layers: int | None = Field(default=None, ge=1, le=10_000)
    hidden: int | None = Field(default=None, ge=1, le=MOST)
    heads: int | None = Field(default=None, ge=1, le=MOST)
    kv_heads: int | None = Field(default=None, ge=1, le=MOST)
    head_dim: int | None = Field(default=None, ge=1, le=MOST)
    v_head_dim: int | None = Field(default=None, ge=1, le=MOST)
    ffn: int | None = Field(default=None, ge=1, le=MOST)
    decoder_ffn: int | None = Field(default=None, ge=1, le=MOST)
    vocab: int | None = Field(default=None, ge=1, le=MOST)
    embedding_width: int | None = Field(default=None, ge=1, le=MOST)  # when it is not hidden
    max_context: int | None = Field(default=None, ge=1, le=MOST)
    positions: int | None = Field(default=None, ge=0, le=MOST)  # entries of a learned position table
    token_types: int | None = Field(default=None, ge=0, le=MOST)
    tied_embeddings: bool | None = None
    # What stands on top: lm, mlm (masked words), body (nothing), pooler, classifier.
    head: Literal["lm", "mlm", "body", "pooler", "classifier"] | None = None
    classes: int | None = Field(default=None, ge=1, le=MOST)

    # Traits; None leaves them to the family.
    norm: str | None = None
    qk_norm: Literal["none", "head", "head_l2", "head_layernorm", "width"] | None = None
    activation: str | None = None
    gated_mlp: bool | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    head_bias: bool | None = None  # on the vocabulary matrix
    post_norm: bool | None = None  # norms after each part instead of before
    final_norm: bool | None = None  # after the last layer
    parallel_block: bool | None = None
    layer_scale: bool | None = None
    norms_per_block: int | None = Field(default=None, ge=0, le=MOST)
    rope_linear_factor: float | None = Field(default=None, ge=1)  # positions of full layers are divided by it
    position_kind: Literal["rope", "rope_partial", "learned", "alibi", "relative", "none"] | None = None

    # One letter a layer: F full, S sliding, K chunked, D full with its own indexer, L linear, M Mamba,
    # B attention and Mamba both, E experts only, - feed-forward only, C compressed, H heavily compressed.
    # `S5` and `[S5 F]*8` repeat.
    pattern: str | None = None
    window: int | None = Field(default=None, ge=1, le=MOST)

    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    indexer: IndexerSpec | None = None
    ssm: SsmSpec | None = None
    linear_attention: LinearAttentionSpec | None = None
    compressed: CompressedSpec | None = None
    global_attention: GlobalAttentionSpec | None = None
    adaptive: AdaptiveSpec | None = None
    shared: SharedSpec | None = None
    audio: AudioSpec | None = None
    vision_tower: TowerSpec | None = None
    text_tower: TowerSpec | None = None

    mel_bins: int | None = Field(default=None, ge=1, le=MOST)
    image_size: int | None = Field(default=None, ge=1, le=MOST)
    patch: int | None = Field(default=None, ge=1, le=MOST)
    denoiser: dict[str, Any] | None = None
    components: dict[str, int] | None = None  # parameters of each network of a pipeline
    gflops_forward: float | None = Field(default=None, gt=0)  # per image, multiply-add counted as two
    saved_elements: float | None = Field(default=None, gt=0)  # kept for backward, per image
    live_elements: float | None = Field(default=None, gt=0)  # alive at once without gradients, per image
    traffic_elements: float | None = Field(default=None, gt=0)
    # A detector's loss, beside what is kept: bytes an image (boxes matched with places), bytes of the fullest
    # image alone, and elements of the head's results and their gradients.
    loss_bytes: float | None = Field(default=None, gt=0)
    loss_once_bytes: float | None = Field(default=None, gt=0)
    head_elements: float | None = Field(default=None, gt=0)
    stages: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None

    # Stated by a source.
    params: float | None = Field(default=None, gt=0)
    active_params: float | None = Field(default=None, gt=0)
    params_total: int | None = Field(default=None, ge=1)
    params_active: int | None = Field(default=None, ge=1)
    params_input_embedding: int | None = Field(default=None, ge=0)
    params_routed_experts: int | None = Field(default=None, ge=0)
    published: str | None = None
    native_dtype: str | None = None
    quantization: str | None = None  # of the weights as distributed
    config_source: str | None = None
    count_status: str | None = None
    weights: WeightsSpec | None = None
    trace: TraceSpec | None = None
    notes: str | None = None

    @field_validator("pattern")
    @classmethod
    def _known_letters(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            layer_letters(pattern)
        return pattern

    @property
    def label(self) -> str:
        """The name an answer uses."""
        return self.id or self.name or self.architecture or self.family or "model"


LAYER_LETTERS = "FSKDLMBECH-"


def layer_letters(pattern: str) -> str:
    """A pattern written out, one letter a layer. Raises ValueError."""
    out: list[str] = []
    starts: list[int] = []
    last = 0  # where the item that a following number or `*n` repeats begins
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char in LAYER_LETTERS:
            last = len(out)
            out.append(char)
        elif char == "[":
            starts.append(len(out))
        elif char == "]" and starts:
            last = starts.pop()
        elif char.isdigit() or char == "*":
            end = i + 1
            while end < len(pattern) and pattern[end].isdigit():
                end += 1
            times = pattern[i:end].lstrip("*")
            if not times or len(out) * int(times) > 10_000:
                raise ValueError(f"bad repeat in layer pattern {pattern!r}")
            out[last:] = out[last:] * int(times)
            i = end - 1
        elif char != " ":
            raise ValueError(f"unknown layer letter {char!r} in {pattern!r}; legal: {LAYER_LETTERS}")
        i += 1
    if starts:
        raise ValueError(f"unclosed [ in layer pattern {pattern!r}")
    return "".join(out)
