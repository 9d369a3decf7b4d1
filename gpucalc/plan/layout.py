"""How a run is laid over GPUs, and by which recipe: every choice made, nothing left to guess.

`Layout` holds the parallel degrees, `Recipe` what is computed in which precision by which
framework. Both are plain numbers and names, so that formulas can be fed from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpucalc.num import Num, is_scalar, maximum


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel degrees of one training run. world = tp x cp x pp x dp.

    Expert parallelism reuses the dp x cp x tp ranks: expert weights are divided by ep x etp and
    replicated (or sharded by ZeRO) over world / (pp x ep x etp).

    A search hands columns in: every field but pp, zero_stage and schedule may be a numpy array, of
    shapes that broadcast. The values of a vpp column split the layers into the same stages.
    """

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    shard: int  # ranks that share one copy of sharded state (dp x cp; less for hybrid sharding)
    zero_stage: int  # 0 none, 1 optimizer, 2 + gradients, 3 + parameters
    micro_batch: int
    micro_batches: int  # per step and pipeline, gradient accumulation
    sequence_parallel: bool
    schedule: str  # 1f1b | interleaved | gpipe | zero-bubble | zb-h2 | dualpipe | dualpipe-v | none
    stage_layers: tuple[int, ...] = ()  # layers of each stage; empty: dealt out as evenly as can be

    @property
    def world(self) -> int:
        """GPUs in the run."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def passes(self) -> Num:
        """Micro-batches that pass a rank's layers in a step: DualPipe sends half of them from each end."""
        return self.micro_batches / 2 if self.schedule == "dualpipe" else self.micro_batches

    @property
    def pipeline_stages(self) -> int:
        """Stages the model is cut into: as many as ranks, twice as many where a pipeline is folded."""
        return 2 * self.pp if self.schedule == "dualpipe-v" else self.pp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return maximum(1, self.world // (self.pp * self.ep * self.etp))  # type: ignore[no-any-return]

    @property
    def expert_shard(self) -> int:
        """Ranks that share one copy of the sharded state of experts: as many copies as of the rest."""
        return maximum(1, self.tp * self.shard // (self.ep * self.etp))  # type: ignore[no-any-return]

    @property
    def chunks_per_rank(self) -> int:
        """Virtual stages by which layers are dealt out to pipeline ranks."""
        vpp: Num = self.vpp
        return int(vpp if is_scalar(vpp) else vpp.flat[0])


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters: their rank, the linears they sit on (names of graph linears), their element size."""

    rank: int
    targets: tuple[str, ...]
    element_bytes: int
    input_bytes: int  # of the input an adapter keeps: its own type, or the compute type under autocast
    casts: bool  # autocast: each adapter makes its own copy of the input
    dropout: bool
    base_bytes_per_param: float  # of the frozen linears: 2, or what a quantised base takes
    base_sharded: bool  # stage 3 divides the frozen linears
    rest_bytes: int  # of what a quantised base leaves unquantised: embeddings, norms, head
    trained_embeddings: bool
    # lora | dora (and a magnitude per output) | adapter (prompt vectors, no matrices on the linears) |
    # adapter_v2 (scale and bias)
    kind: str
    quantised: bool
    keeps_frozen_inputs: bool  # the quantised kernel saves its input though the weight is frozen
    keeps_dequantised: bool  # the dequantised weights of the layer at hand stay until its backward is done


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one step computes, in which precision, by which code path.

    kernels: eager | compiled | fused (TransformerEngine, Apex, Liger): which activations are kept
    and how much elementwise traffic and launch time there is.
    loss: unfused | fused | chunked. recompute_scope (of selective): core | modules | op | layer.
    """

    framework: str  # ddp | fsdp | deepspeed | megatron | torchtitan | hf
    precision: str  # fp32 tf32 fp16 bf16 fp8 mxfp8 nvfp4 bf16-pure ...
    math: str  # key of the GPU's peak table the matrix multiplies run at: fp32 tf32 fp16 bf16 fp8 fp4
    activation_bytes: int
    parameter_bytes: int  # stored weights that are trained
    compute_bytes: int  # gathered or cast weights during a layer
    gradient_bytes: int
    reduce_bytes: int  # gradients while they are reduced
    optimizer: str
    optimizer_bytes: float  # states and master copy per trained parameter
    state_bytes: int  # of one element of an optimizer state that is not quantised
    step_temporary_bytes: int  # per parameter, at the optimizer step
    attention: str  # flash | eager
    first_flash: bool  # kernels before FlashAttention-2
    fused_qkv: bool  # LitGPT: one matrix for queries, keys and values of every model
    kernels: str
    fused_norms: bool  # RMS norms keep their input alone, whatever the rest of the layer keeps
    recompute: str  # none | selective | full
    recompute_scope: str
    recompute_modules: tuple[str, ...]  # of scope modules
    cuda_graphs: tuple[str, ...]  # full, or the modules of a layer that are replayed
    seq_len: int
    autocast: bool  # fp32 weights, 16-bit copies made per use
    loss: str
    loss_bytes: int  # per element of what an unfused loss keeps: 4 where logits are upcast
    loss_chunks: int  # pieces a fused loss is taken in
    method: str  # full | lora | qlora
    adapters: Adapters | None
    dropout: bool
    engine_stage: int  # DeepSpeed's ZeRO stage, whose engine and hooks run on one rank too; 0 elsewhere
    gradient_buckets: bool  # DDP holds gradients a second time
    fp8_params: bool  # there are no 16-bit weights beside those
    cached_fp8_weights: bool  # TransformerEngine keeps fp8 copies beside 16-bit weights
    wrapped_root: bool  # FSDP: embedding and head stay gathered in the root group
    reshard: bool  # FSDP: gathered weights are freed after forward
    keeps_gradients: bool  # zero_grad fills with zeros instead of freeing (PyTorch before 2.0)
    eager_context: bool  # CUDA loads every kernel at start (before 11.7)
    optimizer_in_backward: bool  # gradients are stepped and freed one by one
    gathered_tp_inputs: bool  # tensor-parallel linears keep their gathered, whole input
    # DeepSpeed's own sizes, in elements; None: its defaults.
    reduce_bucket: int | None
    two_buckets: bool  # stages 1 and 2: one is reduced while the other fills
    live_parameters: int | None
    sub_group: int | None
    overlap: bool  # communication runs beside computation
    channels_last: bool  # image tensors lie as tensor cores read them
    clock_share: float  # clock under load over that of the runs the rates come from
    input_samples_per_s: float | None  # what the host loads; None: as fast as the GPUs ask
    expert_imbalance: float  # tokens of the busiest rank's experts over the mean
    tp_overlap: bool  # sequence-parallel gathers and scatters run beside the products they feed
    ep_overlap: bool  # tokens travel to experts beside another micro-batch
    moe_dispatcher: str  # alltoall: a copy of a token per expert | deepep: one per rank
    year: int  # of the software: what it overlaps and which kernels it calls
    offload: tuple[str, ...]  # any of optimizer, gradients, parameters, activations; nvme: to disk
    nvme_bytes_per_s: float | None  # of a node's drives together; None: a usual server's
    loaded_bytes: int  # per trained weight as read, before the engine casts it
    whole_load: bool  # stage 3 takes the whole model onto each GPU before it divides it
    load_assumed: bool  # nobody said in which type weights are read
    in_use_bytes: float  # of each card, by others
    host_load: str  # every-rank | one-rank | none: whole copies of the weights in host memory while loading
    frozen: tuple[str, ...]  # any of vision_tower, embedding, head: not trained
    reference_model: bool  # a frozen copy in the compute type beside the trained model
    reward_models: int  # more of them, that score answers
    ema: bool  # a moving average of the trained weights

    @property
    def fp32_masters(self) -> bool:
        """Whether 16-bit weights are stepped in fp32 beside them; -pure runs hold nothing in fp32."""
        return self.parameter_bytes == 2 and not self.precision.endswith("-pure")

    @property
    def low_precision_bytes(self) -> float:
        """Bytes an element takes in the type matrices multiply in, block scales included: MXFP8 has one of a
        byte for 32 elements, NVFP4 one for 16.
        """
        return {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}.get(self.precision, 1.0)

    @property
    def casts_head(self) -> bool:
        """Whether autocast makes a 16-bit copy of the output matrix, kept until its backward."""
        upcast = self.adapters is not None and self.adapters.rest_bytes == 4
        return self.autocast or (upcast and self.framework in ("ddp", "hf"))

    @property
    def stream_bytes(self) -> int:
        """Element size of the residual stream: fp32 where the embedding is, as under autocast."""
        fp32 = self.autocast or (self.adapters is not None and self.adapters.rest_bytes == 4)
        return 4 if fp32 else self.activation_bytes

    @property
    def fused_loss(self) -> bool:
        """Whether the loss never materialises fp32 logits."""
        return self.loss != "unfused"
