"""Seconds one GPU computes on one layer: matrices, attention, elementwise kernels, forward and backward.

This module chooses formulas by the shape of the layer and the code path. The pass counts are reads
and writes of the kernels each code path launches, counted; the arithmetic is in `formulas.compute`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.errors import InputError
from gpucalc.formulas import compute as f
from gpucalc.graph import Attention, Block, FeedForward, Linear, Mixer, Mlp, Moe, Norm, Shard, StateMixer
from gpucalc.line import Kind, Line, compute, total
from gpucalc.num import Num, ceil_div, maximum, where
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import KernelRate, KernelSpec

LOW_PRECISION = ("fp8", "fp6", "fp4", "int8")
WHOLE_RECOMPUTE = ("megatron", "deepspeed")  # frameworks whose checkpoints repeat a layer's last product
# Before, PyTorch's context parallelism gave a rank one range: under a causal mask the last has most to do.
BALANCED_CONTEXT_YEAR = 2025
SCAN_CHUNK = 256  # tokens per chunk in Mamba-2 and flash-linear-attention kernels
TILE_ROWS = 128  # rows of a matrix tile; an expert's last tile is padded to it

# Reads and writes of a tensor, forward and backward, by code path.
NORM_PASSES = {"eager": (18, 28), "compiled": (2, 3), "fused": (2, 3)}  # RMSNorm written out upcasts to fp32
LAYERNORM_PASSES = (2, 4)  # one kernel forward, two backward, in every code path
RESIDUAL_PASSES = {"eager": (3, 3), "compiled": (2, 2), "fused": (3, 3)}
ROPE_PASSES = {"eager": (12, 14), "compiled": (2, 2), "fused": (2, 2)}
GATE_PASSES = {"eager": (5, 9), "compiled": (3, 5), "fused": (3, 5)}  # of width ffn: two inputs, one product
PLAIN_PASSES = {"eager": (2, 3), "compiled": (2, 3), "fused": (2, 3)}
WRITTEN_OUT_GELU_PASSES = (20, 30)  # gelu_new as eight eager kernels
DROPOUT_PASSES = {"eager": (2.5, 2.5), "compiled": (0.5, 0.5), "fused": (0.5, 0.5)}
SCORE_PASSES = {"eager": (9, 9), "compiled": (4, 5), "fused": (4, 5)}  # scale, mask, softmax, dropout
# Autocast runs mask, softmax and dropout in fp32: counted in 16-bit units.
AUTOCAST_SCORE_PASSES = (16.5, 18.5)
# Relative positions: position scores written, shifted by a padded copy and added, masked in fp32.
RELATIVE_PASSES = 14
# Convolution, gates and chunked scan; fitted to the published Nemotron 3 Nano runs on four GPU kinds.
SCAN_PASSES = {"eager": (150, 300), "compiled": (120, 240), "fused": (120, 240)}
# Biases of experts, weighted by the router's fp32 probabilities outside the product, in fp32 passes of the
# output: product, addition, concatenation and cast; backward the same and two reductions.
EXPERT_BIAS_PASSES = (7, 11)
SCAN_EFFICIENCY = Line(
    "scan_efficiency",
    0.5,
    "fraction",
    Kind.MODELLED,
    source="fitted to the published Nemotron 3 Nano runs; small chunk products, against attention's rate",
)
CAST_PASSES = 3  # fp32 read and 16-bit write, in 16-bit units
# Bytes per logit, forward and backward together: written-out fp32 log-softmax, compiled, one kernel.
LOSS_BYTES = {"eager": 28, "compiled": 14, "fused": 10}

# Host time forward, in units of one kernel launch: module hooks, views, casts and autograd bookkeeping cost
# the host as much as launches do. Backward takes twice that. Fitted to runs too short for the GPU to be the
# slower side: Qwen at 256 tokens (eager), mixture-of-experts models on H100 and GB200 (TransformerEngine).
LAYER_CALLS = {"eager": 120, "compiled": 22, "fused": 90}
LINEAR_CALLS = {"eager": 3, "compiled": 2, "fused": 22}
LOW_PRECISION_CALLS = {"eager": 3, "compiled": 3, "fused": 22}
MOE_CALLS = {"eager": 90, "compiled": 90, "fused": 220}  # router, permutation, exchange
EXPERT_CALLS = {"eager": 0, "compiled": 0, "fused": 3}  # per matrix of a local expert; twice with casts
# From the containers of mid-2026 on TransformerEngine runs gated experts in Blackwell's block-scaled formats
# as one grouped kernel: activation and casts in its epilogues, replayed from a CUDA graph.
FUSED_EXPERTS_YEAR = 2026
BLOCK_SCALED = ("mxfp8", "nvfp4")
LORA_CALLS = 20  # a wrapped module: dropout, two products, scale, add, casts

# On other vendors' GPUs the catalogue carries Hopper's share over, and PyTorch's kernels are no closer to it.
PORTABLE_ATTENTION = Line(
    "portable_attention",
    0.55,
    "fraction",
    Kind.MEASURED,
    source="Shah et al. 2024: FlashAttention-2, PyTorch's kernel, reaches 35 % of an H100, FlashAttention-3"
    " 65 to 75 %",
)
FIRST_FLASH = Line(
    "first_flash",
    0.5,
    "fraction",
    Kind.MEASURED,
    source="Dao 2023: FlashAttention-1 reaches 25 to 40 % of an A100, FlashAttention-2 50 to 73 %",
)
NATIVE_ATTENTION_FROM = 9.0  # compute capability from which the two differ
# Bytes moved to unpack one 4-bit weight, its own left out: NF4 in one or two kernels; GPTQ's unpacking
# writes and reads 16- and 32-bit temporaries for shift, mask, offset and scale.
DEQUANTISE_BYTES = {False: 9.5, True: 20.5}


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU's rates as formula inputs, for the precisions of a recipe."""

    gpu: GpuSpec
    kernels: KernelSpec
    matrix: dict[str, Any]  # inputs of gemm_s at the recipe's precision
    wide: dict[str, Any]  # the same at the precision attention and head run at
    attention: dict[str, Any]
    attention_backward: dict[str, Any]
    traffic: dict[str, Any]
    launch: Line
    low_precision: bool

    @classmethod
    def of(cls, gpu: GpuSpec, kernels: KernelSpec, recipe: Recipe) -> Device:
        """The device for a recipe. Raises InputError for a precision the GPU cannot multiply in."""
        low = recipe.math in LOW_PRECISION
        wide = "bf16" if low else recipe.math
        bandwidth = gpu.memory_bandwidth.line("memory_bandwidth")
        training = kernels.training_efficiency.line("training_efficiency")
        own = kernels.training_efficiency_low if low else None
        training_low = own.line("training_efficiency") if own is not None else training

        def rates(
            rate: KernelRate, math: str, share: str, alone: Line | None = None, inside: Line = training
        ) -> dict[str, Any]:
            return {
                "peak_flops_per_s": _peak(gpu, math, recipe.clock_share),
                share: compute(
                    share,
                    f.in_step_efficiency,
                    alone=alone if alone is not None else rate.mfu_max.line("alone"),
                    training_efficiency=inside,
                ),
                "bandwidth_bytes_per_s": bandwidth,
                "hbm_efficiency": rate.hbm_efficiency.line("hbm_efficiency"),
                "p": rate.p.line("p"),
                "overhead_s": rate.overhead.line("overhead"),
            }

        plain = _gemm(kernels, wide)
        unquantised = _unquantised(kernels, recipe.math, plain) if low else None
        attention_math = wide if wide in ("fp16", "bf16") else recipe.math
        # Fused attention is bound by its own pipeline and not by power: its rate alone holds inside a step.
        attention = rates(kernels.attention, attention_math, "efficiency")
        attention["efficiency"] = _attention_share(gpu, kernels, recipe)
        backward = dict(attention)
        backward["efficiency"] = compute(
            "efficiency",
            f.in_step_efficiency,
            alone=attention["efficiency"],
            training_efficiency=kernels.attention_backward_efficiency.line("attention_backward_efficiency"),
        )
        return cls(
            gpu=gpu,
            kernels=kernels,
            matrix=rates(plain, recipe.math, "mfu_max", unquantised, training_low),
            wide=rates(plain, wide, "mfu_max"),
            attention=attention,
            attention_backward=backward,
            traffic={
                "bandwidth_bytes_per_s": bandwidth,
                "hbm_efficiency": kernels.elementwise_hbm_efficiency.line("hbm_efficiency"),
            },
            launch=kernels.launch_overhead.line("launch_overhead"),
            low_precision=low,
        )

    def move(self, name: str, bytes_moved: Any) -> Line:
        """Time to move bytes through device memory."""
        return compute(name, f.traffic_s, bytes_moved=bytes_moved, **self.traffic)


def _peak(gpu: GpuSpec, math: str, clock_share: float) -> Line:
    peak = gpu.peak(math)
    if peak is None:
        raise InputError(
            "this GPU does not multiply in that precision", where=gpu.id, given=math, legal=sorted(gpu.peaks)
        )
    if clock_share == 1:
        return peak
    return compute(
        "sustained", f.sustained_flops_per_s, peak_flops_per_s=peak, clock_share=stated_share(clock_share)
    )


def stated_share(clock_share: float) -> Line:
    """The share of its clock a GPU holds, as the run states it."""
    return Line("clock_share", clock_share, "fraction", Kind.ASSUMED, source="run.clock_share")


def _gemm(kernels: KernelSpec, math: str) -> KernelRate:
    if math not in kernels.gemm:
        raise InputError(
            "no kernel rate for that precision", where=kernels.id, given=math, legal=sorted(kernels.gemm)
        )
    return kernels.gemm[math]


def _attention_share(gpu: GpuSpec, kernels: KernelSpec, recipe: Recipe) -> Line:
    """Share of the peak attention reaches with the kernel the framework calls."""
    best = kernels.attention.mfu_max.line("alone")
    native = gpu.vendor == "NVIDIA" and float(gpu.compute_capability) < NATIVE_ATTENTION_FROM
    if recipe.framework != "megatron" and not native:
        best = compute("alone", f.in_step_efficiency, alone=best, training_efficiency=PORTABLE_ATTENTION)
    if recipe.first_flash:
        best = compute("efficiency", f.in_step_efficiency, alone=best, training_efficiency=FIRST_FLASH)
    return best


def _unquantised(kernels: KernelSpec, math: str, plain: KernelRate) -> Line:
    """Share of the low-precision peak a product reaches when its operands are already cast.

    The catalogue's low-precision constants include the inference stacks' casts; here casts are counted
    apart, so what they cost is taken out: as much as fp8 loses against 16 bits in the same stack.
    """
    return compute(
        "alone",
        f.unquantised_efficiency,
        measured=_gemm(kernels, math).mfu_max.line("measured"),
        wide=plain.mfu_max.line("wide"),
        fp8=_gemm(kernels, "fp8").mfu_max.line("fp8"),
    )


@dataclass(slots=True)
class LayerWork:
    """What one layer of a kind costs for one micro-batch."""

    block: Block
    matrix: list[Line] = field(default_factory=list)  # forward matrices
    attention: list[Line] = field(default_factory=list)
    traffic: list[Line] = field(default_factory=list)
    matrix_back: list[Line] = field(default_factory=list)
    attention_back: list[Line] = field(default_factory=list)
    traffic_back: list[Line] = field(default_factory=list)
    calls: Num = 0  # host time forward, in kernel launches

    def forward(self) -> Line:
        """Seconds forward."""
        return _sum("forward", self.matrix, self.attention, self.traffic)

    def backward(self) -> Line:
        """Seconds backward, recomputation apart."""
        return _sum("backward", self.matrix_back, self.attention_back, self.traffic_back)

    def recompute(self, recipe: Recipe) -> Line | None:
        """Seconds of forward work repeated for backward."""
        if recipe.recompute == "none":
            return None
        if recipe.recompute == "selective":
            if recipe.recompute_scope == "core":
                return _sum("recompute", [], self.attention, []) if self.attention else None
            if recipe.recompute_scope == "modules":
                return self._modules_again(recipe.recompute_modules)
            if recipe.recompute_scope == "op":
                # Half of the matrices and all elementwise kernels run again; attention's output is kept.
                return _sum("recompute", self.matrix[1::2], [], self.traffic)
            return compute("recompute", f.shared_s, whole_s=self.forward(), share=0.5)
        matrix = self.matrix
        if recipe.framework not in WHOLE_RECOMPUTE and matrix:
            matrix = matrix[:-1]  # torch's checkpoint stops before the last product
        return _sum("recompute", matrix, self.attention, self.traffic)

    def _modules_again(self, modules: tuple[str, ...]) -> Line | None:
        """Seconds of what Megatron-Core's recompute modules run again."""
        names = [name for module in modules for name in _MODULE_WORK.get(module, ())]

        def of(lines: list[Line]) -> list[Line]:
            return [line for line in lines if line.name.startswith(tuple(names))] if names else []

        attention = self.attention if "core_attn" in modules else []
        matrix, traffic = of(self.matrix), of(self.traffic)
        return _sum("recompute", matrix, attention, traffic) if matrix or attention or traffic else None


# First words of the lines of work that a module of Megatron-Core is made of.
_MODULE_WORK = {
    "layernorm": ("input", "pre_ffn"),
    "moe_act": ("expert_activation",),
    "mlp": ("gate", "up", "down", "activation", "mlp"),
    "moe": ("router", "expert_", "shared_", "permute"),
    "shared_experts": ("shared_",),
    "mla_up_proj": ("q_b", "kv_b", "rope"),
}


def _sum(name: str, matrix: list[Line], attention: list[Line], traffic: list[Line]) -> Line:
    parts = [
        total(part, tuple(lines), unit="s")
        for part, lines in (("matrices", matrix), ("attention", attention), ("elementwise", traffic))
        if lines
    ]
    return total(name, tuple(parts), unit="s")


@dataclass(frozen=True, slots=True)
class Shape:
    """The tokens a layer sees on one rank."""

    tokens: Num  # rows of activations: micro_batch x seq_len / cp
    sequences: Num
    seq_len: Num
    memory_len: Num  # encoder tokens a cross attention reads


def layer_work(block: Block, shape: Shape, layout: Layout, recipe: Recipe, device: Device) -> LayerWork:
    """The work of one layer on one rank."""
    work = LayerWork(block)
    code = recipe.kernels
    size = recipe.activation_bytes
    stream = 4 if recipe.autocast else size  # the residual stream stays fp32 under autocast
    outside = where(layout.sequence_parallel, shape.tokens / layout.tp, shape.tokens)
    for norm in block.norms:
        if norm.kind != "none":
            _norm(work, norm, outside, code, stream, device)
    parts = [p for p in (block.mixer, block.state, block.cross, block.ffn) if p is not None]
    hidden = block.hidden
    work.calls += LAYER_CALLS[code]
    for index, _ in enumerate(parts[: 1 if block.parallel else None], start=1):
        _elementwise(work, f"residual_{index}", outside, hidden, RESIDUAL_PASSES[code], stream, device)
        if recipe.dropout:
            _elementwise(work, f"dropout_{index}", outside, hidden, DROPOUT_PASSES[code], stream, device)
    for part in parts:
        _linears(
            work,
            part.linears,
            shape.tokens,
            layout,
            recipe,
            device,
            low=device.low_precision,
            fused=_fused_experts(part, recipe),
        )
        if isinstance(part, Attention):
            _attention(work, part, part is block.cross, shape, layout, recipe, device)
        elif isinstance(part, StateMixer):
            _state_mixer(work, part, shape, layout, recipe, device)
        else:
            _feed_forward(work, part, shape, layout, recipe, device)
    return work


def _elementwise(
    work: LayerWork,
    name: str,
    tokens: Num,
    width: Num,
    passes: tuple[float, float],
    element_bytes: Num,
    device: Device,
) -> None:
    for lines, count in ((work.traffic, passes[0]), (work.traffic_back, passes[1])):
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=tokens,
            width=width,
            passes=count,
            element_bytes=element_bytes,
        )
        lines.append(device.move(name, moved))


def _norm(work: LayerWork, norm: Norm, tokens: Num, code: str, size: Num, device: Device) -> None:
    single = norm.kind in ("layernorm", "layernorm_nobias")
    passes = LAYERNORM_PASSES if single else NORM_PASSES[code]
    _elementwise(work, norm.name, tokens, norm.width, passes, size, device)


def local_shape(
    linear: Linear, tokens: Num, layout: Layout, *, imbalance: float
) -> tuple[Num, Num, Num, Num]:
    """Rows, inputs, outputs and matrices of a linear on one rank.

    imbalance: tokens of the busiest rank's experts over the mean, which the others wait for.
    """
    if linear.shard is Shard.EXPERT:
        # Every rank computes top_k / tp of its tokens' expert work, in tiles of whole rows.
        matrices = maximum(linear.copies / layout.ep, 1)
        rows = imbalance * tokens * linear.active * layout.etp / layout.tp
        padded = ceil_div(rows / matrices, TILE_ROWS) * TILE_ROWS * matrices
        return where(rows > 0, padded, rows), linear.inputs, linear.outputs / layout.etp, matrices
    rows = tokens * linear.active
    if linear.shard is Shard.ROW:
        return rows, linear.inputs / layout.tp, linear.outputs, linear.copies
    if linear.shard is Shard.REPLICATED:
        rows = where(layout.sequence_parallel, rows / layout.tp, rows)
        return rows, linear.inputs, linear.outputs, linear.copies
    return rows, linear.inputs, linear.outputs / layout.tp, linear.copies


def linear_lines(
    linear: Linear,
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    *,
    low: bool,
    fused: bool = False,
) -> tuple[Line, list[Line]]:
    """Forward time of a linear, and backward times of its input and weight gradients.

    fused: the experts of a rank are one kernel.
    """
    rows, inputs, outputs, matrices = local_shape(linear, tokens, layout, imbalance=recipe.expert_imbalance)
    low = low and linear.shard is not Shard.REPLICATED
    rates = device.matrix if low else device.wide
    operand = _stored_bytes(recipe.math) if low else where(recipe.activation_bytes == 4, 4, 2)
    result = recipe.activation_bytes
    flops = compute("flops", f.linear_flops, tokens=rows, inputs=inputs, outputs=outputs, active=1)
    shape = {"rows": rows, "inputs": inputs, "outputs": outputs, "matrices": matrices}
    if linear.shard is Shard.EXPERT and not fused:  # every expert's product is a call of its own
        rates = rates | {
            "overhead_s": compute("overhead", f.repeated_s, each_s=rates["overhead_s"], times=matrices)
        }
    moved = compute("bytes", f.gemm_bytes, operand_bytes=operand, result_bytes=result, **shape)
    forward = compute(linear.name, f.gemm_s, flops=flops, bytes_moved=moved, **rates)
    back_moved = compute(
        "bytes",
        f.gemm_bytes,
        operand_bytes=operand,
        result_bytes=result,
        rows=rows,
        inputs=outputs,
        outputs=inputs,
        matrices=matrices,
    )
    backward = [
        compute(f"{linear.name}_input_gradient", f.gemm_s, flops=flops, bytes_moved=back_moved, **rates)
    ]
    if recipe.adapters is None:
        weight_moved = compute(
            "bytes",
            f.weight_gradient_bytes,
            operand_bytes=operand,
            gradient_bytes=recipe.gradient_bytes,
            # fused accumulation reads and writes the sum; a separate addition moves the gradient 3 times more
            gradient_passes=where(layout.micro_batches > 1, 2 if recipe.framework == "megatron" else 4, 1),
            **shape,
        )
        backward.append(
            compute(
                f"{linear.name}_weight_gradient", f.gemm_s, flops=flops, bytes_moved=weight_moved, **rates
            )
        )
    return forward, backward


def _fused_experts(part: Mixer | FeedForward, recipe: Recipe) -> bool:
    """Whether experts run as one kernel with their activation and casts."""
    if not isinstance(part, Moe) or not part.gated or any(linear.bias for linear in part.linears):
        return False
    known = recipe.framework == "megatron" and recipe.precision in BLOCK_SCALED
    return known and recipe.year >= FUSED_EXPERTS_YEAR


def _stored_bytes(math: str) -> float:
    return {"fp4": 0.5625, "fp6": 0.75}.get(math, 1.0)  # fp4 with one fp8 scale per 16 values


def _linears(
    work: LayerWork,
    linears: tuple[Linear, ...],
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
    *,
    low: bool,
    fused: bool = False,
) -> None:
    seen: set[tuple[int, float]] = set()
    made: dict[Any, tuple[Line, list[Line]]] = {}  # keys and values, gate and up have one shape
    for linear in linears:
        inside = fused and linear.shard is Shard.EXPERT
        key = (linear.inputs, linear.outputs, linear.shard, linear.active, linear.copies)
        if key not in made:
            made[key] = linear_lines(linear, tokens, layout, recipe, device, low=low, fused=inside)
        forward, backward = made[key]
        work.matrix.append(forward if forward.name == linear.name else replace(forward, name=linear.name))
        work.matrix_back.extend(backward)
        work.calls += LINEAR_CALLS[recipe.kernels]
        rows, inputs, outputs, matrices = local_shape(
            linear, tokens, layout, imbalance=recipe.expert_imbalance
        )
        if linear.shard is Shard.EXPERT and not fused:
            work.calls += matrices * EXPERT_CALLS[recipe.kernels] * (2 if low else 1)
        fresh = (linear.inputs, linear.active) not in seen
        seen.add((linear.inputs, linear.active))
        if low and linear.shard is not Shard.REPLICATED and not inside:
            # The forward input once per distinct tensor, the gradient of every output.
            work.calls += LOW_PRECISION_CALLS[recipe.kernels]
            stored = _stored_bytes(recipe.math)
            # TransformerEngine keeps scales and cast weights; elsewhere each use finds its maximum first.
            cached = recipe.cached_fp8_weights
            source = 2 if cached else 4
            casts = [(work.traffic_back, f"{linear.name}_gradient_cast", rows * outputs)]
            if fresh:
                casts.append((work.traffic, f"{linear.name}_input_cast", rows * inputs))
            if not cached:
                casts.append((work.traffic, f"{linear.name}_weight_cast", matrices * inputs * outputs))
            for lines, name, elements in casts:
                moved = compute(
                    "bytes", f.quantise_bytes, elements=elements, source_bytes=source, stored_bytes=stored
                )
                lines.append(device.move(name, moved))
        if recipe.autocast:
            work.calls += 2
            _elementwise(work, f"{linear.name}_cast", rows, inputs, (CAST_PASSES, CAST_PASSES), 2, device)
            _elementwise(
                work,
                f"{linear.name}_weight_cast",
                inputs * linear.copies,
                outputs,
                (CAST_PASSES, CAST_PASSES),
                2,
                device,
            )
        if recipe.adapters is not None and linear.name in recipe.adapters.targets:
            work.calls += LORA_CALLS
            _adapter(work, linear, rows, inputs, outputs, recipe, device)
        if recipe.method == "qlora" and recipe.adapters is not None:
            adapters = recipe.adapters
            base = adapters.base_bytes_per_param
            for lines in (work.traffic, work.traffic_back):
                moved = compute(
                    "bytes",
                    f.elementwise_bytes,
                    tokens=inputs * linear.copies,
                    width=outputs,
                    passes=1,
                    element_bytes=base + DEQUANTISE_BYTES[adapters.keeps_dequantised],
                )
                lines.append(device.move(f"{linear.name}_dequantise", moved))


def _adapter(
    work: LayerWork, linear: Linear, rows: Num, inputs: Num, outputs: Num, recipe: Recipe, device: Device
) -> None:
    adapters = recipe.adapters
    assert adapters is not None
    # Fused stacks keep adapters in the compute type; PEFT's are fp32 copies.
    size = recipe.activation_bytes if recipe.kernels == "fused" else adapters.element_bytes
    for name, a, b in (
        (f"{linear.name}_lora_a", inputs, adapters.rank),
        (f"{linear.name}_lora_b", adapters.rank, outputs),
    ):
        flops = compute("flops", f.linear_flops, tokens=rows, inputs=a, outputs=b, active=1)
        moved = compute(
            "bytes",
            f.gemm_bytes,
            rows=rows,
            inputs=a,
            outputs=b,
            matrices=1,
            operand_bytes=size,
            result_bytes=size,
        )
        line = compute(name, f.gemm_s, flops=flops, bytes_moved=moved, **device.wide)
        work.matrix.insert(0, line)  # before the last product, which a checkpoint may skip
        work.matrix_back.extend((line, line))
    # input cast or dropout, and the addition to the layer's output
    if recipe.kernels == "eager":
        _elementwise(work, f"{linear.name}_lora_input", rows, inputs, (2, 3), adapters.element_bytes, device)
    _elementwise(work, f"{linear.name}_lora_add", rows, outputs, (3, 2), recipe.activation_bytes, device)


def attention_pairs(part: Attention, cross: bool, shape: Shape) -> Line:
    """Query-key pairs of one head of one sequence."""
    if part.kind == "chunked" and part.span is not None:
        return compute("pairs", f.chunked_attention_pairs, seq_len=shape.seq_len, chunk=part.span)
    keys: Num = shape.memory_len if cross else shape.seq_len
    if part.kind in ("compressed", "heavily_compressed") and part.compress_ratio:
        keys = keys / part.compress_ratio
    span = part.span if part.span is not None else keys
    if part.index_topk is not None:
        span = part.index_topk
    return compute(
        "pairs",
        f.attention_pairs,
        seq_len=shape.seq_len,
        keys=keys,
        span=span,
        causal=part.causal and not cross,
    )


def _attention(
    work: LayerWork,
    part: Attention,
    cross: bool,
    shape: Shape,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> None:
    code = recipe.kernels
    size = recipe.activation_bytes
    heads = maximum(part.heads / layout.tp, 1)
    kv_heads = maximum(part.kv_heads / layout.tp, 1)
    width = heads * part.qk_dim + kv_heads * part.qk_dim
    if part.rope != "none" and not cross:
        _elementwise(work, "rope", shape.tokens, width, ROPE_PASSES[code], size, device)
    if part.qk_norm != "none":
        _elementwise(work, "qk_norm", shape.tokens, width, NORM_PASSES[code], size, device)
    pairs = attention_pairs(part, cross, shape)
    uneven = (
        part.causal and not cross and recipe.framework == "torchtitan" and recipe.year < BALANCED_CONTEXT_YEAR
    )
    flops = compute(
        "flops",
        f.attention_core_flops,
        sequences=shape.sequences,
        heads=heads,
        qk_dim=part.qk_dim,
        v_dim=part.v_dim,
        pairs=compute("pairs", f.unbalanced_pairs if uneven else f.shared_pairs, pairs=pairs, cp=layout.cp),
    )
    if recipe.attention == "eager":
        _unfused_attention(work, part, cross, heads, shape, layout, recipe, device)
        return
    work.calls += 2
    back_flops = compute("flops", f.attention_backward_flops, forward_flops=flops, recomputes_scores=True)
    moved = compute(
        "bytes",
        f.attention_io_bytes,
        tokens=shape.tokens,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=part.qk_dim,
        v_dim=part.v_dim,
        element_bytes=size,
    )
    back_moved = compute("bytes", f.attention_backward_bytes, forward_bytes=moved)
    work.attention.append(
        compute("attention", f.attention_s, flops=flops, bytes_moved=moved, **device.attention)
    )
    work.attention_back.append(
        compute(
            "attention_gradient",
            f.attention_s,
            flops=back_flops,
            bytes_moved=back_moved,
            **device.attention_backward,
        )
    )
    if part.index_heads and part.index_dim:
        index = compute(
            "flops",
            f.attention_core_flops,
            sequences=shape.sequences,
            heads=part.index_heads,
            qk_dim=part.index_dim,
            v_dim=0,
            pairs=shape.seq_len * shape.seq_len / 2 / layout.cp,
        )
        work.attention.append(
            compute("indexer", f.attention_s, flops=index, bytes_moved=moved, **device.attention)
        )


def _unfused_attention(
    work: LayerWork,
    part: Attention,
    cross: bool,
    heads: Num,
    shape: Shape,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> None:
    """Scores written to memory: whole squares are multiplied, and every pass reads or writes them."""
    keys = shape.memory_len if cross else shape.seq_len
    relative = any(linear.name == "relative" for linear in part.linears)
    if relative:  # Transformer-XL attends over a memory as long as its segment
        keys = 2 * keys
    queries = shape.seq_len / layout.cp
    square = compute(
        "flops",
        f.attention_core_flops,
        sequences=shape.sequences,
        heads=heads,
        qk_dim=part.qk_dim * (2 if relative else 1),  # content and position scores
        v_dim=part.v_dim,
        pairs=queries * keys,
    )
    work.calls += 6
    size = recipe.activation_bytes
    mixed = recipe.autocast and recipe.framework == "hf" and recipe.kernels == "eager"
    forward, backward = AUTOCAST_SCORE_PASSES if mixed else SCORE_PASSES[recipe.kernels]
    if relative:
        forward, backward = forward + RELATIVE_PASSES, backward + RELATIVE_PASSES
    for matrix, traffic, passes, products in (
        (work.attention, work.traffic, forward + 2, 1),
        (work.attention_back, work.traffic_back, backward + 4, 2),
    ):
        moved = compute(
            "bytes",
            f.score_traffic_bytes,
            sequences=shape.sequences,
            heads=heads,
            queries=queries,
            keys=keys,
            passes=passes,
            score_bytes=size,
        )
        line = compute("scores", f.gemm_s, flops=square, bytes_moved=0.0, **device.wide)
        matrix.extend([line] * products)
        traffic.append(device.move("score_passes", moved))


def _state_mixer(
    work: LayerWork, part: StateMixer, shape: Shape, layout: Layout, recipe: Recipe, device: Device
) -> None:
    flops = compute(
        "flops",
        f.state_mixer_flops,
        tokens=shape.tokens,
        heads=maximum(part.heads / layout.tp, 1),
        key_dim=part.key_dim,
        value_dim=part.value_dim,
        chunk=SCAN_CHUNK,
    )
    work.calls += 10
    share = compute(
        "efficiency",
        f.in_step_efficiency,
        alone=device.attention["efficiency"],
        training_efficiency=SCAN_EFFICIENCY,
    )
    rates = device.attention | {"efficiency": share}
    for lines, times in ((work.attention, 1), (work.attention_back, 2)):
        line = compute("scan", f.attention_s, flops=flops, bytes_moved=0.0, **rates)
        lines.extend([line] * times)
    _elementwise(
        work,
        "scan_traffic",
        shape.tokens,
        part.inner / layout.tp,
        SCAN_PASSES[recipe.kernels],
        recipe.activation_bytes,
        device,
    )


def _feed_forward(
    work: LayerWork, part: FeedForward, shape: Shape, layout: Layout, recipe: Recipe, device: Device
) -> None:
    code = recipe.kernels
    size = recipe.activation_bytes
    if part.gated:
        passes: tuple[float, float] = GATE_PASSES[code]
    elif part.activation == "gelu_new" and code == "eager":
        passes = WRITTEN_OUT_GELU_PASSES
    else:
        passes = PLAIN_PASSES[code]
    if isinstance(part, Mlp):
        _elementwise(work, "activation", shape.tokens, part.ffn / layout.tp, passes, size, device)
        return
    routed = recipe.expert_imbalance * shape.tokens * part.top_k / layout.tp
    if not _fused_experts(part, recipe):
        work.calls += MOE_CALLS[code]
        _elementwise(work, "expert_activation", routed, part.expert_ffn, passes, size, device)
    biased = sum(linear.outputs for linear in part.linears if linear.shard is Shard.EXPERT and linear.bias)
    if biased and recipe.year < FUSED_EXPERTS_YEAR:
        _elementwise(work, "expert_bias", routed, biased / layout.etp, EXPERT_BIAS_PASSES, 4, device)
    if part.shared_ffn:
        _elementwise(
            work, "shared_activation", shape.tokens, part.shared_ffn / layout.tp, passes, size, device
        )
    width = part.latent or part.hidden
    # Permuted, sorted by expert, sorted back and unpermuted, some of it fused.
    _elementwise(work, "permute", routed, width, (6, 6), size, device)
    _elementwise(work, "router", shape.tokens / layout.tp, part.experts, (6, 6), 4, device)


def head_work(
    hidden: int,
    vocab: int,
    linears: tuple[Linear, ...],
    tokens: Num,
    layout: Layout,
    recipe: Recipe,
    device: Device,
) -> LayerWork:
    """The output matrix and the loss, as one layer's work."""
    work = LayerWork(Block(name="head", mixer=None, ffn=None, norms=()))
    _linears(work, linears, tokens, layout, recipe, device, low=False)
    if vocab:
        matrix = Linear("vocabulary", hidden, vocab, shard=Shard.VOCAB)
        forward, backward = linear_lines(matrix, tokens, layout, recipe, device, low=False)
        work.matrix.append(forward)
        work.matrix_back.extend(backward)
        code = recipe.kernels if recipe.loss == "unfused" else "fused"
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=tokens,
            width=vocab / layout.tp,
            passes=1,
            element_bytes=LOSS_BYTES[code],
        )
        work.traffic.append(device.move("loss", moved))
        work.calls += 8
    return work


def has_experts(block: Block) -> bool:
    """Whether the block routes tokens to experts."""
    return isinstance(block.ffn, Moe)
