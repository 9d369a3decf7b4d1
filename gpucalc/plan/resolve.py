"""From what a run states to what is computed: element sizes per framework, code path, legal layout.

Every choice nobody stated is returned as an assumption with the key that changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucalc.errors import Infeasible, InputError
from gpucalc.formulas import memory as mem
from gpucalc.graph import Graph, Linear, Shard
from gpucalc.plan.answer import Assumption
from gpucalc.plan.layout import Adapters, Layout, Recipe
from gpucalc.plan.rules import DUAL_PIPES, Degrees, broken_rules, schedule_rules, shard_rules
from gpucalc.plan.stages import block_linears, fuller_first
from gpucalc.spec.defaults import default_loaded_as, with_defaults, year_of
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import GIB

# Families whose published training code has dropout on (0.1) unless told otherwise.
DROPOUT_FAMILIES = frozenset(
    {"bert", "roberta", "gpt", "gpt2", "gpt3", "t5", "opt", "bart", "transformer_xl", "transformer-xl"}
)

# Bytes per parameter of Adam-like states held at full precision: number of states.
OPTIMIZER_STATES = {
    "adamw": 2,
    "adamw-fused": 2,
    "adamw-unfused": 2,
    "adam": 2,
    "lamb": 2,
    "sgd": 0,
    "sgd-momentum": 1,
    "adafactor": 0,  # and means of rows and columns, by shape
    "lion": 1,
    "muon": 1,  # and a second moment of what is no matrix, by shape
    "soap": 2,  # and preconditioners, by shape
    "shampoo": 2,  # averaged gradients and the grafted second moment; and preconditioners, by shape
    "prodigy": 4,  # two moments, the gradient sum and the first weights
    "adan": 4,  # three moments and the last gradient
    "schedulefree-adamw": 2,
    "adagrad": 1,
    "rmsprop": 1,
    "paged-adamw": 0,  # states live in unified memory and leave the card when it is full
    "paged-adamw-8bit": 0,
}
# Quantised states: bytes per parameter, block scales included (one fp32 per 2,048 or 256 elements and state).
QUANTISED_STATE_BYTES = {
    "adamw-8bit": 2 * (1 + 4 / 2048),
    "adamw-4bit": 2 * (0.5 + 4 / 128),
    "lion-8bit": 1 + 4 / 2048,
}

# The same of states in unified memory, which the host must have room for.
PAGED_STATE_BYTES = {"paged-adamw": 8.0, "paged-adamw-8bit": QUANTISED_STATE_BYTES["adamw-8bit"]}

# Frozen base: bytes per parameter of its linears where not by block. GPTQ: 4 bits, fp16 scale and 4-bit
# zero per 128.
BASE_BYTES = {None: 2.0, "int4-gptq": 0.5 + 2.5 / 128, "int8": 1.0}

NF4, NF4_BLOCK = ("nf4", "nf4-double"), 64

ALL_AT_ONCE_YEAR = 2023  # torch 2.0, March: for-each optimizers by default, in place from 2.1 (October)
BALANCED_STAGES_YEAR = 2024  # DeepSpeed's partition_balanced was rewritten in December 2023
# bitsandbytes 0.43.2 of July 2024 (9e753741) no longer keeps the input of a matrix in 4 bits.
UNKEPT_INPUT_YEAR = 2025
FUSED_NORM_YEAR = 2026  # torch 2.9 came in October 2025
TP_OVERLAP_YEAR = 2024  # Megatron's published recipes hide tensor-parallel gathers in user buffers
SECOND_FLASH_YEAR = 2023  # FlashAttention-2 came out in July
LOW_PRECISION = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


def settle(run: TrainRun) -> tuple[TrainRun, tuple[Assumption, ...]]:
    """The run with its layout-independent defaults filled, and what was filled."""
    filled, defaults = with_defaults(run)
    return filled, tuple(Assumption(d.key, d.value, d.why) for d in defaults)


def sequence_length(run: TrainRun, graph: Graph) -> int:
    """Tokens per sample of the trunk: the run's, or the model's own where its length is fixed."""
    if not graph.stacks:
        return 1
    fixed = graph.trunk.tokens
    if fixed is not None:
        return fixed
    if run.seq_len is None:
        raise InputError(
            f"{graph.name} reads sequences, so their length is needed", key="run.seq_len", legal="tokens"
        )
    return run.seq_len


def resolve_layout(run: TrainRun, graph: Graph, *, gpus: int) -> tuple[Layout, tuple[Assumption, ...]]:
    """The layout of a settled run whose degrees are all numbers.

    Raises Infeasible with every broken rule at once.
    """
    assumed: list[Assumption] = []
    tp, pp, vpp, cp, ep = (_number(run, key) for key in ("tp", "pp", "vpp", "cp", "ep"))
    etp = run.etp if isinstance(run.etp, int) else 1
    micro_batch = _number(run, "micro_batch")
    model_parallel = tp * pp * cp
    dp = run.dp if isinstance(run.dp, int) else max(1, gpus // model_parallel)
    if run.grad_accum is not None and not isinstance(run.global_batch, int):
        global_batch = run.grad_accum * micro_batch * dp
    elif isinstance(run.global_batch, int):
        global_batch = run.global_batch
    else:
        accum = (2 * pp if run.schedule in DUAL_PIPES else pp) if pp > 1 else 1
        global_batch = micro_batch * dp * accum
        assumed.append(
            Assumption(
                "run.global_batch",
                global_batch,
                "one micro-batch per rank and step"
                if accum == 1
                else "one micro-batch per stage and rank"
                if accum == pp
                else "two micro-batches per stage and rank, the fewest DualPipe takes",
            )
        )
    if graph.network is not None and run.channels_last is None:
        assumed.append(Assumption("run.channels_last", False, "PyTorch's default until asked for"))
    if graph.network is not None and graph.network.head_elements:
        why = (
            "bytes an image while the loss matches 100 boxes in the fullest one, 50 without mosaics; COCO's"
            " fullest images hold about 90, and what matching holds grows with them"
        )
        assumed.append(Assumption("model.loss_bytes", int(graph.network.loss_bytes), why))
    degrees = Degrees(
        gpus=gpus,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq_len=sequence_length(run, graph),
        sequence_parallel=bool(run.sequence_parallel),
        even_pipeline=run.framework == "megatron" and run.pipeline_split == "even",
    )
    rules = list(broken_rules(graph, degrees))
    shard = dp if run.dp_shard is None else _number(run, "dp_shard")
    if shard != dp:
        rules += shard_rules(degrees, shard)
    if run.grad_accum is not None and isinstance(run.global_batch, int):
        product = run.grad_accum * micro_batch * dp
        if product != run.global_batch:
            rules.append(
                f"grad_accum {run.grad_accum} x micro_batch {micro_batch} x dp {dp} = {product},"
                f" but global_batch is {run.global_batch}"
            )
    if run.schedule is not None and pp > 1:
        rules += schedule_rules(
            graph, run.schedule, pp=pp, vpp=vpp, micro_batches=global_batch // (dp * micro_batch)
        )
    if rules:
        raise Infeasible(rules)
    zero_stage = run.zero_stage if isinstance(run.zero_stage, int) else 0
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        shard=max(1, shard * cp),
        zero_stage=zero_stage if dp * cp > 1 else 0,
        micro_batch=micro_batch,
        micro_batches=global_batch // (dp * micro_batch),
        sequence_parallel=bool(run.sequence_parallel) and tp > 1,
        schedule="none" if pp == 1 else "interleaved" if vpp > 1 else run.schedule or "1f1b",
    )
    return replace(layout, stage_layers=dealt_layers(run, graph, layout.pipeline_stages)), tuple(assumed)


def dealt_layers(run: TrainRun, graph: Graph, stages: int) -> tuple[int, ...]:
    """Layers of each stage where the engine deals them out its own way; empty: the ends get fewer."""
    if run.framework != "deepspeed" or stages == 1 or run.pipeline_split == "uneven":
        return ()
    year = year_of(run)
    return fuller_first(len(graph.trunk.layers), stages, filled=year < BALANCED_STAGES_YEAR)


def _number(run: TrainRun, key: str) -> int:
    value = getattr(run, key)
    if not isinstance(value, int):
        raise InputError("is left to the search, which has not run", key=f"run.{key}", given=value)
    return value


def resolve_recipe(run: TrainRun, graph: Graph) -> Recipe:
    """Element sizes and code path of a settled run, by framework.

    ddp, hf: fp32 weights under autocast for 16-bit precisions; fsdp, torchtitan: fp32 shards, 16-bit
    gathered copies; deepspeed, megatron: 16-bit weights with fp32 masters in the optimizer.
    """
    framework, precision = run.framework, run.precision
    year = year_of(run)
    pure = precision.endswith("-pure")
    base = precision.removesuffix("-pure")
    wide = base in ("fp32", "tf32")
    stage = run.zero_stage if isinstance(run.zero_stage, int) else 0
    sizes = element_sizes(framework, wide=wide, pure=pure, fp16=base == "fp16", stage=stage, year=year)
    method_full = run.method == "full"
    adapters = None if method_full else _adapters(run, graph, year)
    if adapters is not None:  # the base is loaded in 16 bit and frozen, so nothing is cast per use
        trained = adapters.element_bytes
        sizes = ElementSizes(2, 2, trained, trained, trained, 0)
        if trained == 2 and framework in _CASTING and not pure:  # masters and states of what is trained
            sizes = element_sizes(
                framework, wide=False, pure=False, fp16=base == "fp16", stage=stage, year=year
            )
    if run.state_dtype is not None:
        sizes = replace(sizes, state={"fp32": 4, "bf16": 2, "fp8": 1}[run.state_dtype])
    if run.reduce_dtype is not None:
        reduced = 2 if run.reduce_dtype == "bf16" else 4
        kept = reduced if framework == "megatron" else sizes.gradient
        sizes = replace(sizes, gradient=kept, reduce=reduced)
    states = OPTIMIZER_STATES.get(run.optimizer)
    state_bytes = QUANTISED_STATE_BYTES[run.optimizer] if states is None else float(states * sizes.state)
    fused = framework == "megatron" or run.fused_kernels
    kernels = "fused" if fused else "compiled" if run.compile else "eager"
    attention = run.attention or "sdpa"
    fusion = "fused" if framework == "megatron" or run.compile else "chunked"
    recompute, scope = _recompute(run)
    offload = tuple(_OFFLOADED[run.offload])
    return Recipe(
        framework=framework,
        precision=precision,
        math=LOW_PRECISION.get(base, base),
        activation_bytes=4 if wide else 2,
        parameter_bytes=sizes.parameter,
        compute_bytes=sizes.compute,
        gradient_bytes=sizes.gradient,
        reduce_bytes=sizes.reduce,
        optimizer=run.optimizer,
        optimizer_bytes=state_bytes + sizes.master,
        state_bytes=sizes.state,
        step_temporary_bytes=sizes.state * _step_temporaries(run, year),
        attention="eager" if attention == "eager" else "flash",
        first_flash=attention == "flash-1" or (attention == "flash" and year < SECOND_FLASH_YEAR),
        fused_qkv=run.fused_qkv,
        kernels=kernels,
        fused_norms=_fused_norms(run, kernels, year),
        recompute=recompute,
        recompute_scope=scope,
        recompute_modules=run.recompute_modules or ("core_attn",),
        cuda_graphs=tuple(part for part in run.cuda_graphs or () if part != "none"),
        seq_len=sequence_length(run, graph),
        autocast=sizes.autocast,
        loss=fusion if run.fused_loss else "unfused",
        loss_bytes=2 if run.loss_dtype == "16-bit" and not wide else 4,
        loss_chunks=run.loss_chunks,
        method=run.method,
        adapters=adapters,
        dropout=run.dropout if run.dropout is not None else graph.family in DROPOUT_FAMILIES,
        engine_stage=stage if framework == "deepspeed" else 0,
        gradient_buckets=framework in ("ddp", "hf") and not run.gradient_as_bucket_view,
        fp8_params=run.fp8_params,
        cached_fp8_weights=framework == "megatron" and base in LOW_PRECISION,
        wrapped_root=framework == "fsdp" and not run.wrap_tables,
        # torchtitan keeps weights gathered under pipeline parallelism, to gather once a step.
        # FSDP1 of 2023 never freed gathered weights in backward where they are frozen (torch 2.0 and 2.1).
        reshard=run.reshard_after_forward is not False
        and not (framework == "torchtitan" and run.pp != 1)
        and not (framework == "fsdp" and not method_full and year < 2024),
        keeps_gradients=year < 2023 and framework not in ("megatron", "deepspeed"),
        eager_context=year < 2023,
        optimizer_in_backward=run.optimizer_in_backward,
        gathered_tp_inputs=framework == "torchtitan",
        reduce_bucket=_reduce_bucket(run, graph),
        two_buckets=bool(run.overlap_comm) and stage < 3,
        live_parameters=run.max_live_parameters,
        sub_group=run.sub_group_size,
        overlap=run.overlap,
        channels_last=bool(run.channels_last),
        clock_share=run.clock_share or 1.0,
        input_samples_per_s=None if run.input_samples_per_s == "enough" else run.input_samples_per_s,
        expert_imbalance=run.expert_imbalance or 1.0,
        tp_overlap=_tp_overlap(run, year) and run.overlap,
        ep_overlap=run.ep_overlap and run.overlap,
        moe_dispatcher=run.moe_dispatcher or "alltoall",
        year=year,
        offload=offload,
        nvme_bytes_per_s=None if run.nvme_gb_per_s is None else run.nvme_gb_per_s * 1e9,
        loaded_bytes=4 if (run.loaded_as or default_loaded_as(run)) == "fp32" else sizes.compute,
        whole_load=stage == 3 and run.zero_init is False,
        load_assumed=run.loaded_as is None,
        in_use_bytes=(run.memory_in_use_gib or 0.0) * GIB,
        host_load=run.host_load or "none",
        frozen=run.frozen,
        reference_model=run.reference_model,
        reward_models=run.reward_models,
        ema=run.ema,
    )


_CASTING = ("deepspeed", "megatron")  # frameworks that hold 16-bit weights of all there is, masters apart

_OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer-cpu": ("optimizer",),
    "optimizer-nvme": ("optimizer", "nvme"),
    "optimizer+gradients-cpu": ("optimizer", "gradients"),
    "params+optimizer-cpu": ("optimizer", "gradients", "parameters"),
    "params+optimizer-nvme": ("optimizer", "gradients", "parameters", "nvme"),
    "activations-cpu": ("activations",),
}


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes per element a framework holds: weights as stored and as computed with, gradients as kept and
    as reduced, one optimizer state, and what the optimizer holds beside its states (masters).
    """

    parameter: int
    compute: int
    gradient: int
    reduce: int
    state: int
    master: int
    autocast: bool = False


def element_sizes(
    framework: str, *, wide: bool, pure: bool, fp16: bool, stage: int, year: int
) -> ElementSizes:
    """The element sizes of a framework; wide: 32-bit training, pure: everything in 16 bit."""
    if wide:
        return ElementSizes(4, 4, 4, 4, 4, 0)
    if pure:
        return ElementSizes(2, 2, 2, 2, 2, 0)
    if framework in ("ddp", "hf"):
        return ElementSizes(4, 2, 4, 4, 4, 0, autocast=True)
    if framework in ("fsdp", "torchtitan"):
        return ElementSizes(4, 2, 4, 4, 4, 0)
    if framework == "deepspeed":
        # bf16 at stage 1 accumulated in fp32 beside the 16-bit gradients, which are zeroed, not freed, until
        # DeepSpeed 4be8df72 of January 2023 (engine.py, get_data_types: the model's type under ZeRO).
        fp32_beside = stage == 1 and not fp16 and year < 2023
        return ElementSizes(2, 2, 6 if fp32_beside else 2, 2, 4, 4)
    # Megatron: fp32 main gradients for bf16; with fp16 they are 16-bit and a fp32 copy joins the masters.
    return ElementSizes(2, 2, 2, 2, 4, 8) if fp16 else ElementSizes(2, 2, 4, 4, 4, 4)


def _step_temporaries(run: TrainRun, year: int) -> int:
    """Tensors of a state's size that torch's own Adam holds while it steps, beside states and gradients.

    torch 2.0 (2023) steps all tensors at once, with a root of the second moment and a denominator; 2.1
    reuses the root in place. Before 2.0 each tensor is stepped by itself, unless a framework steps one
    flat partition. Megatron, torchtitan and DeepSpeed's own Adam step in one kernel. Source:
    torch/optim/adamw.py of releases 1.13, 2.0 and 2.1.
    """
    if run.optimizer_in_backward:
        return 0
    flat = run.framework == "deepspeed" and run.optimizer == "adamw-unfused"
    at_once = run.framework in ("ddp", "hf", "fsdp") and run.optimizer in ("adamw", "adam", "adamw-unfused")
    if flat or (at_once and year >= ALL_AT_ONCE_YEAR):
        return 2 if year <= ALL_AT_ONCE_YEAR else 1
    return 0


def _recompute(run: TrainRun) -> tuple[str, str]:
    if run.recompute.startswith("selective"):
        scope = run.recompute.removeprefix("selective").lstrip("-")
        if not scope:
            core = run.recompute_modules in (None, ("core_attn",))
            scope = "op" if run.framework == "torchtitan" else "core" if core else "modules"
        return "selective", scope
    return run.recompute, "none"


# What PEFT target names of several model families call the graph's linears.
_TARGETS = {
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("o",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("down",),
    "c_attn": ("qkv", "q", "k", "v"),
    "c_proj": ("o", "down"),
    "query_key_value": ("qkv",),
    "w1": ("gate",),
    "w2": ("up",),
    "w3": ("up",),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "dense": ("o",),
}


def _fused_norms(run: TrainRun, kernels: str, year: int) -> bool:
    """Whether an RMS norm is one kernel: as stated, where all is fused, and where it is torch's own.

    torch.nn.RMSNorm calls aten::_fused_rms_norm on CUDA since release 2.9 of October 2025, which keeps its
    input and a reciprocal root a row (tools/autograd/derivatives.yaml); torchtitan's models use it.
    """
    if run.fused_norms is not None:
        return run.fused_norms
    return kernels != "eager" or (run.framework == "torchtitan" and year >= FUSED_NORM_YEAR)


def _reduce_bucket(run: TrainRun, graph: Graph) -> int | None:
    """Elements of DeepSpeed's bucket as stated; `auto` is Transformers' square of the hidden size."""
    if run.reduce_bucket_size == "auto":
        return graph.trunk.hidden**2 if graph.stacks else None
    return run.reduce_bucket_size


def _tp_overlap(run: TrainRun, year: int) -> bool:
    """Whether tensor parallelism hides its gathers: as stated, else as Megatron's recipes since 2024."""
    if run.tp_overlap is not None:
        return run.tp_overlap
    return run.framework == "megatron" and year >= TP_OVERLAP_YEAR


def _base_bytes(run: TrainRun) -> float:
    """Bytes a parameter of the frozen linears takes."""
    if run.quantization not in NF4:
        return BASE_BYTES[run.quantization]
    block = run.quantization_block or NF4_BLOCK
    return float(mem.nf4_bytes_per_param(block=block, double=int(run.quantization == "nf4-double")))


def _adapters(run: TrainRun, graph: Graph, year: int) -> Adapters:
    lora = run.lora
    assert lora is not None  # with_defaults fills it
    if not graph.stacks:
        raise InputError(
            f"adapters wrap the matrices of layers, and {graph.name} is known by its totals alone",
            key="run.method",
            given=run.method,
            legal="full",
        )
    linears = [linear for stack in graph.stacks for block in stack.blocks for linear in block_linears(block)]
    names = {linear.name for linear in linears}
    if lora.kind == "adapter":
        targets: tuple[str, ...] = ()
    elif lora.targets == "all-linear" or lora.kind == "adapter_v2":
        targets = tuple(sorted(_all_linear(linears)))
    else:
        wanted: list[str] = []
        for target in lora.targets:
            found = [name for name in (target, *_TARGETS.get(target, ())) if name in names]
            if not found:
                raise InputError(
                    f"{graph.name} has no such linear",
                    key="run.lora.targets",
                    given=target,
                    legal=sorted(names),
                )
            wanted += found
        targets = tuple(dict.fromkeys(wanted))
    size = _adapter_bytes(run)
    four_bit = run.quantization in NF4
    # 16-bit mixed precision runs these two under autocast, adapters included; FSDP computes with a cast copy.
    autocast = run.framework in ("ddp", "hf") and run.precision in ("bf16", "fp16")
    gathered = run.framework in ("fsdp", "torchtitan") and run.precision not in ("fp32", "tf32")
    return Adapters(
        rank=lora.rank,
        targets=targets,
        element_bytes=size,
        input_bytes=2 if autocast or gathered else size,
        casts=autocast and size == 4,
        dropout=lora.dropout > 0,
        base_bytes_per_param=_base_bytes(run),
        base_sharded=run.quantization is None or run.shard_quantised is not False,
        rest_bytes=4 if run.quantization is not None and run.upcast_frozen else 2,
        trained_embeddings=lora.train_embeddings,
        kind=lora.kind,
        quantised=run.quantization is not None,
        keeps_frozen_inputs=run.quantization == "int8" or (four_bit and year < UNKEPT_INPUT_YEAR),
        keeps_dequantised=run.quantization == "int4-gptq",
    )


def _adapter_bytes(run: TrainRun) -> int:
    """Element size of adapters: as stated; else 16 bit where the framework casts the whole model to it.

    DeepSpeed's engine casts every parameter (engine.py, _configure_distributed_model), Megatron builds them
    so, and -pure runs hold nothing else; PEFT upcasts adapters to fp32 (autocast_adapter_dtype).
    """
    assert run.lora is not None
    if run.lora.dtype is not None:
        return 2 if run.lora.dtype == "bf16" else 4
    pure = run.precision.endswith("-pure")
    cast = run.framework in _CASTING and run.precision not in ("fp32", "tf32")
    return 2 if pure or cast else 4


def _all_linear(linears: list[Linear]) -> set[str]:
    return {linear.name for linear in linears if linear.shard not in (Shard.REPLICATED, Shard.EXPERT)}
