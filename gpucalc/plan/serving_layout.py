"""How a model is served: the layout over GPUs, the recipe of the engine, and what they come to.

`ServeLayout` and `ServeRecipe` hold every choice made, nothing left to guess. `ServingMemory` and
`ServingTime` are the lines that `serve_memory` and `serve_time` work out from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpucalc.graph import Graph
from gpucalc.line import Line


@dataclass(frozen=True, slots=True)
class ServeLayout:
    """The parallel degrees of one deployment. gpus = tp x pp x dp x replicas.

    dp: ranks that each hold their own cache and attention weights but share the experts, which lie
    over `ep` ranks (ep divides tp x dp; 1: experts are divided as the rest). replicas: independent
    copies of the whole engine, requests divided evenly among them.
    decode_context: ranks of a tensor group among which the cache of one sequence is divided.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    replicas: int
    gpus: int
    decode_context: int = 1

    @property
    def words(self) -> str:
        """The degrees above one and how many copies there are."""
        named = [("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep)]
        named.append(("decode_context_parallel", self.decode_context))
        shown = [f"{name} {value}" for name, value in named if value > 1] or ["one GPU a copy"]
        if self.replicas > 1:
            shown.append(f"{self.replicas} copies of {self.engine_gpus} GPUs")
        return ", ".join(shown)

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp * self.dp

    @property
    def caches(self) -> int:
        """Independent key-value caches in the deployment; each serves its share of the requests."""
        return self.dp * self.replicas

    def decoding_caches(self, prefill_replicas: int) -> int:
        """Caches of the copies that decode, where so many compute prompts alone."""
        return self.dp * (self.replicas - prefill_replicas)

    @property
    def expert_ranks(self) -> int:
        """Ranks of one stage over which one copy of the routed experts is spread, whole or in slices."""
        return max(self.ep, self.tp * self.dp) if self.ep > 1 else self.tp * self.dp


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bytes per parameter as a GPU holds them, scales included, by what the parameters are.

    linear: attention and dense feed-forward matrices. expert: routed experts. Names of graph linears in
    `exceptions` differ from their class. math: key of the GPU's peak table matrix products run at
    where the GPU has it, else 16-bit with weights expanded on the way. computes_quantised: activations
    are quantised too (w8a8, fp8), so the product runs at `math`; else weights are only stored small.
    """

    name: str
    linear: float
    expert: float
    embedding: float
    head: float
    rest: float  # norms, biases, routers, vision towers
    math: str
    computes_quantised: bool = False
    exceptions: Mapping[str, float] | None = None
    kind: str = "exact"  # exact | assumed: how the bytes per parameter are known
    source: str = ""

    def bytes_of(self, name: str, *, expert: bool) -> float:
        """Bytes per parameter of the linear of that name."""
        if self.exceptions is not None and name in self.exceptions:
            return self.exceptions[name]
        return self.expert if expert else self.linear


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests are like beyond their lengths, and what is done about it.

    prefix_hit: share of prompt tokens found in the prefix cache. drafts: tokens proposed per pass of the
    model; acceptance: probability that one is accepted, those before it being so; draft_share: time of one
    draft pass over that of a pass of the model. prefill_replicas: copies of the engine that only compute
    prompts, the others decode; 0: every copy does both.
    """

    prefix_hit: float = 0.0
    drafts: int = 0
    acceptance: float = 0.0
    draft_share: float = 0.0
    prefill_replicas: int = 0


PLAIN = Traffic()


@dataclass(frozen=True, slots=True)
class Drafter:
    """What drafts for the model: a model of its own, or a head of so many bytes over the tensor group."""

    name: str  # of the catalogue, or of the file
    published: str  # the checkpoint's name
    graph: Graph | None = field(default=None, repr=False)
    weights: WeightFormat | None = field(default=None, repr=False)
    rope_positions: int = field(default=0, repr=False)
    head_bytes: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """What memory depends on."""
        return self.name, self.weights.name if self.weights is not None else "", self.head_bytes


@dataclass(frozen=True, slots=True)
class ServeRecipe:
    """What an engine is told and what it chose where nobody told it."""

    engine: str  # vllm | sglang | trtllm | llamacpp | hf
    version: str  # of the engine, as printed: "0.19.0", "b4500"
    weights: WeightFormat
    dtype: str  # bf16 | fp16 | fp32: activations and unquantised weights
    dtype_bytes: int
    kv_dtype: str  # bf16 | fp16 | fp32 | fp8 | int8 | q8_0 | q5_0 | q4_0 ...
    kv_bytes: float  # per element of the cache
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float | None  # vllm, trtllm (share of what is free)
    mem_fraction_static: float | None  # sglang
    enforce_eager: bool  # no graphs are captured
    in_use_bytes: float  # of each card, by others before the engine starts
    isl: int
    osl: int
    concurrency: int  # requests in flight over the whole deployment
    request_rate: float | None  # requests per second that arrive, where those decide how many are in flight
    rope_positions: int = 0  # entries of the rotary tables: the model's own longest context
    rope_factor: float = 1.0  # tables of full layers are this much longer (linear scaling)
    ttft_ms: float | None = None  # targets
    tpot_ms: float | None = None
    traffic: Traffic = PLAIN
    drafter: Drafter | None = None

    @property
    def context(self) -> int:
        """Tokens of one request at its end."""
        return self.isl + self.osl

    @property
    def of_images(self) -> bool:
        """Whether samples are run forward whole, with neither tokens nor a cache."""
        return self.max_model_len == 0

    def memory_key(self) -> tuple[object, ...]:
        """Everything of the recipe that memory depends on, for one model; loads and targets are left out."""
        return (
            self.engine, self.version, self.weights.name, self.dtype, self.kv_dtype, self.max_model_len,
            self.max_num_seqs, self.max_num_batched_tokens, self.block_size, self.gpu_memory_utilization,
            self.mem_fraction_static, self.enforce_eager, self.in_use_bytes, self.isl, self.osl,
            self.rope_positions, self.rope_factor, self.drafter.key if self.drafter is not None else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """One GPU of a deployment, the worst of the pipeline's stages.

    tree: bytes the GPU holds when all is allocated: weights, activation_peak, non_torch, kv_cache, state,
    graphs, sampler, pre_existing. budget: bytes the engine lets itself use. pool: bytes left for cache and
    state, negative where nothing is left. kv_tokens: tokens of cache per engine rank group (one cache).
    kv_blocks: blocks of that cache. max_concurrency: requests of max_model_len that fit one cache
    (sequences in flight where the cache is static). kv_bytes_per_token: of one request, per GPU, growing
    part only. state_bytes: per request, per GPU, the part that does not grow.
    """

    tree: Line
    weights: Line
    budget: Line
    pool: Line
    kv_bytes_per_token: Line
    state_bytes: Line
    kv_tokens: Line
    kv_blocks: Line
    max_concurrency: Line
    seats: Line  # requests of the run's own length that one cache holds
    peak: Line  # bytes on the GPU at the worst moment, with the cache as large as the engine makes it
    needed: Line  # bytes without which the engine refuses or fails: what the verdict weighs
    capacity: Line  # what `needed` is held against: the budget, or the whole card
    binds: str  # the largest part of `needed`, or what the engine would name
    uncertain_bytes: float  # expected error of `needed`
    stage: int
    refusal: str | None  # why the engine would refuse to start, in its own terms; None: it starts
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServingTime:
    """What a request and the deployment see at one load.

    prefill_s: time to first token, queueing aside. decode_step_s: time per output token. The rates count
    output tokens. binds: compute | memory bandwidth | link | latency | cache | prompts, where other
    copies compute those.
    """

    prefill_s: Line
    decode_step_s: Line
    output_tokens_per_s: Line  # whole deployment
    tokens_per_s_per_gpu: Line
    tokens_per_s_per_user: Line
    concurrency: int  # requests in flight that the cache let through
    binds: str
    notes: tuple[str, ...] = ()
    request_s: Line | None = None  # from admission to the last token
    requests_per_s: Line | None = None
    queue_s: Line | None = None  # mean wait for room in the cache
    burst_first_token_s: Line | None = None  # mean time to first token when all arrive at once
