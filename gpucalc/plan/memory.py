"""Per-GPU memory of a training run: a tree of stages, phases and the tensors alive in each.

    memory (largest stage)
      stage_0 (largest phase)
        load, forward, loss, backward, step (sums)
          allocated (sum): weights, gradients, optimizer_states, activations, ...
          allocator_overhead, cuda_context, nccl_buffers

What is alive when follows a timeline measured tensor by tensor; see the formulas' sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.formulas import activations as act
from gpucalc.formulas import memory as mem
from gpucalc.formulas.pipeline import in_flight_micro_batches
from gpucalc.graph import Attention, Graph, Mlp, Moe, Shard
from gpucalc.line import Kind, Line, compute, total
from gpucalc.plan import allowances
from gpucalc.plan.activation import layer_line, norm_line, selective_line
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.stages import LayerRun, Params, Stage, block_linears, frozen_params, stages

PHASES = ("load", "forward", "loss", "backward", "step")

# Parts of a layer as wide as the residual stream: whole on each tensor-parallel rank unless sequence
# parallelism splits the tokens.
_RESIDUAL_WIDE = {
    "mixer_input",
    "mlp_input",
    "moe_input",
    "cross_input",
    "dropout_masks",
    "router",
    "router_input",
    "layer_input",
    "kv_lora_norm",
    "kv_lora_input",
    "q_lora_norm",
    "q_lora_input",
}


# Tensors made once and kept: the caching allocator adds little to them.
_LASTING = frozenset(
    {
        "weights",
        "frozen_weights",
        "reference_weights",
        "loaded_weights",
        "flat_copy",
        "optimizer_states",
        "gradients",
        "ddp_buckets",
        "reduce_buckets",
    }
)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Where the peak is."""

    tree: Line
    stage: int
    phase: str

    @property
    def needed(self) -> Line:
        """The phase line that decides."""
        return self.tree.child(f"stage_{self.stage}").child(self.phase)


def allocated_peak(tree: Line) -> float:
    """Largest sum of tensors over stages and phases, as torch's max_memory_allocated counts it."""
    return max(float(phase.child("allocated").value) for stage in tree.children for phase in stage.children)


def reserved_peak(tree: Line) -> float:
    """The same with what the caching allocator adds, as max_memory_reserved counts it."""
    return max(
        float(phase.child("allocated").value + phase.child("allocator_overhead").value)
        for stage in tree.children
        for phase in stage.children
    )


def memory_peak(
    graph: Graph,
    layout: Layout,
    recipe: Recipe,
    *,
    hopper_or_later: bool,
    nvlink: bool = True,
    only: tuple[int, ...] | None = None,
) -> MemoryPeak:
    """The memory tree of a run and its peak. `only`: stages worth looking at, all by default.

    nvlink: GPUs reach each other over NVLink, for which NCCL opens many channels; false: over PCIe.
    """
    parts = stages(graph, pp=layout.pp, vpp=layout.vpp)
    chosen = parts if only is None else tuple(parts[index] for index in only)
    lines = tuple(
        _Stage(graph, stage, layout, recipe, hopper_or_later=hopper_or_later, nvlink=nvlink).line()
        for stage in chosen
    )
    tree = largest("memory", lines)
    worst = max(lines, key=lambda line: line.value)
    phase = max(worst.children, key=lambda line: line.value)
    return MemoryPeak(tree=tree, stage=int(worst.name.removeprefix("stage_")), phase=phase.name)


def kept_activations(graph: Graph, layout: Layout, recipe: Recipe) -> Line:
    """Bytes the first stage keeps for backward, wherever they are kept."""
    here = replace(recipe, offload=())
    stage = _Stage(graph, stages(graph, pp=layout.pp, vpp=layout.vpp)[0], layout, here)
    return stage.activations()[0]


def largest(name: str, parts: tuple[Line, ...]) -> Line:
    """A line whose value is the largest of its parts."""
    top = max(parts, key=lambda line: line.value)
    return Line(
        name=name, value=top.value, unit=top.unit, kind=top.kind, children=parts, note="largest of its parts"
    )


class _Stage:
    """Builds the lines of one pipeline stage. Split by what the lines describe, not by phase."""

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        layout: Layout,
        recipe: Recipe,
        *,
        hopper_or_later: bool = True,
        nvlink: bool = True,
    ) -> None:
        self.graph, self.stage, self.layout, self.recipe = graph, stage, layout, recipe
        self.hopper_or_later, self.nvlink = hopper_or_later, nvlink
        held = stage.params
        self.dense = held.sharded / layout.tp + held.replicated
        self.expert = held.expert / (layout.ep * layout.etp)
        left = frozen_params(graph, stage, recipe.frozen)
        self.frozen = left.sharded / layout.tp + left.replicated
        self.tokens = layout.micro_batch * recipe.seq_len / layout.cp
        self.sp = layout.tp if layout.sequence_parallel else 1
        self.accumulates = layout.micro_batches > 1
        self.in_flight = in_flight_micro_batches(
            pp=layout.pp, vpp=layout.vpp, rank=stage.index, micro_batches=layout.micro_batches
        )

    # --- the tree ------------------------------------------------------------------------------------

    def line(self) -> Line:
        states = self.states()
        weights = tuple(line for line in states if line.name != "optimizer_states")
        kept = self.activations()
        logits = self.head_saved()
        gradients_full = self.gradients()
        recipe = self.recipe
        persistent = self.accumulates or recipe.framework == "megatron" or recipe.keeps_gradients
        held = gradients_full if persistent else ()
        buffers = self.buffers()
        forward = (*states, *held, *buffers, *kept, *self.forward_transients())
        phases = [
            self.phase("load", (*weights, *self.load_extra())),
            self.phase("forward", forward),
        ]
        if self.stage.last:
            phases.append(
                self.phase("loss", (*states, *held, *buffers, *kept, *logits, *self.loss_transients()))
            )
        phases.append(self.backward_phase(states, buffers, kept, gradients_full, persistent))
        phases.append(self.phase("step", (*states, *gradients_full, *buffers, *self.step_transients())))
        return largest(f"stage_{self.stage.index}", tuple(phases))

    def phase(self, name: str, parts: tuple[Line, ...]) -> Line:
        parts = tuple(part for part in parts if part.value)
        workspace = compute(
            "cublas_workspace",
            mem.cublas_workspace_bytes,
            workspace_bytes=allowances.CUBLAS_WORKSPACE[
                "from_hopper" if self.hopper_or_later else "before_hopper"
            ],
            handles=1,
        )
        allocated = total("allocated", (*parts, workspace), unit="bytes")
        layout = self.layout
        lasting = sum(part.value for part in parts if part.name in _LASTING)
        groups = [size for size in (layout.dp, layout.tp, layout.cp, layout.pp, layout.ep) if size > 1]
        outside = (
            compute(
                "allocator_overhead",
                mem.allocator_overhead_bytes,
                lasting_bytes=lasting,
                passing_bytes=allocated.value - lasting,
                lasting_fraction=allowances.LASTING_OVERHEAD,
                passing_fraction=allowances.REGULAR_PASSING_OVERHEAD
                if self.recipe.framework == "megatron"
                else allowances.PASSING_OVERHEAD,
            ),
            compute(
                "cuda_context",
                mem.cuda_context_bytes,
                context_bytes=allowances.EAGER_CUDA_CONTEXT
                if self.recipe.eager_context
                else allowances.CUDA_CONTEXT,
            ),
            compute(
                "nccl_buffers",
                mem.nccl_buffer_bytes,
                communicators=len(groups),
                channels=allowances.NCCL_CHANNELS["nvlink" if self.nvlink else "pcie"],
                channel_bytes=allowances.NCCL_CHANNEL_BYTES[
                    "group" if max(groups, default=2) > 2 else "pair"
                ],
            ),
        )
        return total(name, (allocated, *outside), unit="bytes")

    # --- state -----------------------------------------------------------------------------------------

    def _split(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        held: tuple[float, float] | None = None,
        **inputs: Any,
    ) -> Line:
        """A state line as the sum of its dense and expert parts, each sharded over its own group.

        held: those parts' parameters, the stage's by default.
        """
        layout = self.layout
        dense, expert = (self.dense, self.expert) if held is None else held
        parts = []
        for part, params, shard in (
            ("dense", dense, layout.shard),
            ("experts", expert, layout.expert_shard),
        ):
            if params:
                parts.append(
                    compute(
                        part,
                        function,
                        params=params,
                        shard=shard,
                        zero_stage=layout.zero_stage,
                        **inputs,
                    )
                )
        return total(name, tuple(parts), unit="bytes")

    def states(self) -> tuple[Line, ...]:
        recipe = self.recipe
        if recipe.adapters is not None:
            return self.adapter_states()
        lines: list[Line] = []
        if "parameters" not in recipe.offload:
            trained = self._split(
                "weights", mem.weight_bytes, held=self.trained(), parameter_bytes=recipe.parameter_bytes
            )
            lines.append(trained)
            if recipe.frozen:
                lines.append(self.frozen_weights())
            if recipe.reference_model:
                lines.append(self.reference_weights())
        if "optimizer" not in recipe.offload:
            lines.append(
                self._split(
                    "optimizer_states",
                    mem.optimizer_state_bytes,
                    held=self.trained(),
                    bytes_per_param=recipe.optimizer_bytes,
                )
            )
        return tuple(lines)

    def trained(self) -> tuple[float, float]:
        """Dense and expert parameters of the model on this rank that are trained."""
        return self.dense - self.frozen, self.expert

    def frozen_weights(self) -> Line:
        """Weights of the parts the run leaves untrained, held in the compute type."""
        return compute(
            "frozen_weights",
            mem.weight_bytes,
            params=self.frozen,
            parameter_bytes=self.recipe.compute_bytes,
            shard=self.layout.shard,
            zero_stage=self.layout.zero_stage,
        )

    def reference_weights(self) -> Line:
        """The frozen copy that preference training compares with; sharded as the trained weights are."""
        return self._split("reference_weights", mem.weight_bytes, parameter_bytes=self.recipe.compute_bytes)

    def gradients(self) -> tuple[Line, ...]:
        recipe = self.recipe
        if "gradients" in recipe.offload:
            return ()
        if recipe.optimizer_in_backward:
            return (
                compute(
                    "gradients",
                    mem.gradient_bytes,
                    params=self._largest_tensor(),
                    element_bytes=recipe.gradient_bytes,
                    shard=self.layout.shard,
                    zero_stage=self.layout.zero_stage,
                ),
            )
        if recipe.adapters is None:
            return (
                self._split(
                    "gradients", mem.gradient_bytes, held=self.trained(), element_bytes=recipe.gradient_bytes
                ),
            )
        parts = tuple(
            compute(
                name,
                mem.gradient_bytes,
                params=params,
                element_bytes=size,
                shard=self.layout.shard,
                zero_stage=self.layout.zero_stage,
            )
            for name, params, size in self.trained_parts()
        )
        return (total("gradients", parts, unit="bytes"),)

    def _largest_tensor(self) -> float:
        """Elements of the largest single weight of the stage, on this rank."""
        sizes = [
            linear.inputs * linear.outputs for run in self.stage.layers for linear in block_linears(run.block)
        ]
        return max(*sizes, self.stage.embedding.sharded, self.stage.head.sharded, 0) / self.layout.tp

    def trained_parts(self) -> tuple[tuple[str, float, int], ...]:
        """Adapters, and the tables where they are trained too: name, parameters, element size.

        Trained copies of the tables keep the base's type; adapters have their own.
        """
        recipe, adapters = self.recipe, self.recipe.adapters
        assert adapters is not None
        parts: tuple[tuple[str, float, int], ...] = (
            ("adapters", self.adapter_params(), adapters.element_bytes),
        )
        if adapters.trained_embeddings:
            tables = (self.stage.embedding.sharded + self.stage.head.sharded) / self.layout.tp
            parts += (("tables", tables, recipe.compute_bytes),)
        return parts

    def adapter_params(self) -> float:
        """Parameters of this stage's LoRA matrices."""
        adapters = self.recipe.adapters
        assert adapters is not None
        return sum(
            run.count
            * sum(
                adapters.rank * (linear.inputs + linear.outputs)
                for linear in block_linears(run.block)
                if linear.name in adapters.targets
            )
            for run in self.stage.layers
        )

    def trained_params(self) -> float:
        """Parameters that get gradients."""
        if self.recipe.adapters is None:
            return sum(self.trained())
        return sum(params for _, params, _ in self.trained_parts())

    def adapter_states(self) -> tuple[Line, ...]:
        recipe, adapters, layout = self.recipe, self.recipe.adapters, self.layout
        assert adapters is not None
        linear = sum(run.params.linear * run.count for run in self.stage.layers) / layout.tp
        rest = self.dense - linear
        base_stage = layout.zero_stage if adapters.base_sharded else 0
        frozen = total(
            "weights",
            (
                compute(
                    "frozen_linears",
                    mem.weight_bytes,
                    params=linear + self.expert,
                    parameter_bytes=adapters.base_bytes_per_param,
                    shard=layout.shard,
                    zero_stage=base_stage,
                ),
                compute(
                    "other_weights",
                    mem.weight_bytes,
                    params=rest,
                    parameter_bytes=adapters.rest_bytes if adapters.quantised else recipe.compute_bytes,
                    shard=layout.shard,
                    zero_stage=layout.zero_stage,
                ),
                *(
                    compute(
                        name,
                        mem.weight_bytes,
                        params=params,
                        parameter_bytes=size,
                        shard=layout.shard,
                        zero_stage=layout.zero_stage,
                    )
                    for name, params, size in self.trained_parts()
                ),
            ),
            unit="bytes",
        )
        # States take the type of what they belong to; optimizer_bytes is that of the adapters.
        states = tuple(
            compute(
                name,
                mem.optimizer_state_bytes,
                params=params,
                bytes_per_param=recipe.optimizer_bytes * size / adapters.element_bytes,
                shard=layout.shard,
                zero_stage=layout.zero_stage,
            )
            for name, params, size in self.trained_parts()
        )
        optimizer = total("optimizer_states", states, unit="bytes")
        weights = (frozen, self.reference_weights()) if recipe.reference_model else (frozen,)
        return (
            *(() if "parameters" in recipe.offload else weights),
            *(() if "optimizer" in recipe.offload else (optimizer,)),
        )

    def load_extra(self) -> tuple[Line, ...]:
        """Beside the weights while DeepSpeed builds its state: the larger of two moments.

        The weights as read, while they are cast; the clone of the partition that becomes the master
        weights. (Flattening takes a copy too, but moves to the host where the GPU has no room.)
        """
        recipe, layout = self.recipe, self.layout
        if recipe.framework != "deepspeed" or layout.zero_stage >= 3 or recipe.adapters is not None:
            return ()
        moments = []
        if recipe.loaded_bytes != recipe.parameter_bytes:
            moments.append(
                compute(
                    "loaded_weights",
                    mem.loaded_weight_bytes,
                    kind=Kind.ASSUMED if recipe.load_assumed else None,
                    params=sum(self.trained()),
                    loaded_bytes=recipe.loaded_bytes,
                )
            )
        if "optimizer" not in recipe.offload and recipe.parameter_bytes == 2:
            moments.append(
                self._split(
                    "master_partition",
                    mem.deepspeed_partition_bytes,
                    held=self.trained(),
                    element_bytes=recipe.parameter_bytes,
                )
            )
        return (max(moments, key=lambda line: line.value),) if moments else ()

    # --- framework buffers -----------------------------------------------------------------------------

    def buffers(self) -> tuple[Line, ...]:
        recipe, layout, lines = self.recipe, self.layout, []
        trained = self.trained_params()
        if recipe.gradient_buckets and layout.dp > 1:
            lines.append(
                compute(
                    "ddp_buckets",
                    mem.ddp_bucket_bytes,
                    params=trained,
                    element_bytes=recipe.gradient_bytes,
                )
            )
        if recipe.framework == "deepspeed" and layout.zero_stage >= 1 and layout.dp > 1:
            lines.append(
                compute(
                    "reduce_buckets",
                    mem.deepspeed_bucket_bytes,
                    bucket_elements=allowances.DEEPSPEED_REDUCE_BUCKET,
                    params=trained,
                    element_bytes=recipe.compute_bytes,
                    buffers=2 if layout.zero_stage >= 3 else 1,
                )
            )
        if self._gathers and not recipe.reshard and self.accumulates and layout.pp > 1:
            lines.append(
                compute(
                    "unsharded_gradients",
                    mem.fsdp_accumulated_gradient_bytes,
                    params=trained,
                    reduce_bytes=recipe.reduce_bytes,
                )
            )
        if recipe.framework == "megatron":
            lines.append(
                compute(
                    "dummy_weight_gradients",
                    mem.dummy_weight_gradient_bytes,
                    matmul_params=self._distinct_shapes(),
                    tp=layout.tp,
                )
            )
        if recipe.cached_fp8_weights:
            lines.append(
                compute(
                    "fp8_weight_copies",
                    mem.autocast_weight_bytes,
                    linear_params=self._layer_linear_params(),
                )
            )
        return tuple(lines)

    def _distinct_shapes(self) -> int:
        """Elements of one weight of each kind, told apart by name: Megatron fuses q, k, v and gate, up."""
        shapes = {
            (linear.name, linear.inputs, linear.outputs)
            for run in self.stage.layers
            for linear in block_linears(run.block)
            if linear.name != "router"
        }
        return sum(inputs * outputs for _, inputs, outputs in shapes)

    def _layer_linear_params(self, *, one_layer: bool = False) -> float:
        layout = self.layout
        if one_layer:
            layer = self.stage.layers[0].params
            return layer.linear / layout.tp + layer.expert / (layout.ep * layout.etp)
        dense = sum(run.params.linear * run.count for run in self.stage.layers) / layout.tp
        return dense + self.expert

    # --- activations -----------------------------------------------------------------------------------

    def _run_tokens(self, run: LayerRun) -> float:
        if run.stack.tokens is not None:
            return self.layout.micro_batch * run.stack.tokens
        return self.tokens

    def _memory_ratio(self, run: LayerRun) -> float:
        others = [stack for stack in self.graph.stacks if stack.role == "encoder"]
        if run.block.cross is None or not others:
            return 1.0
        return (others[0].tokens or self.recipe.seq_len) / self.recipe.seq_len

    def _per_layer(self, run: LayerRun, per_token: Line) -> Line:
        """Bytes one layer keeps for one micro-batch on this rank."""
        tokens = self._run_tokens(run)
        parts = tuple(
            compute(
                part.name,
                act.layer_saved_bytes,
                bytes_per_token=part,
                tokens=tokens,
                tp=self._shards(part.name, run),
            )
            for part in per_token.children
        )
        return total(run.block.name, parts, unit="bytes")

    def _shards(self, name: str, run: LayerRun) -> int:
        """Tensor-parallel ranks a saved part is divided over."""
        gathered = self.recipe.gathered_tp_inputs and name in ("mixer_input", "mlp_input", "moe_input")
        if gathered:
            return 1
        return self.sp if self._residual_wide(name, run) else self.layout.tp

    def _residual_wide(self, name: str, run: LayerRun) -> bool:
        return name in _RESIDUAL_WIDE or any(name == norm.name for norm in run.block.norms)

    def full_layer(self, run: LayerRun) -> Line:
        """One layer's activations without recomputation."""
        return self._per_layer(
            run,
            layer_line(
                run.block,
                self.recipe,
                seq_len=run.stack.tokens or self.recipe.seq_len,
                memory_tokens=self._memory_ratio(run),
            ),
        )

    def checkpoint(self, run: LayerRun) -> Line:
        """One layer's input."""
        recipe = self.recipe
        size = recipe.stream_bytes
        return compute(
            run.block.name,
            act.checkpoint_bytes,
            hidden=run.stack.hidden,
            tokens=self._run_tokens(run),
            activation_bytes=size,
            shards=self.sp,
        )

    def kept_layer(self, run: LayerRun) -> float:
        """Bytes one layer keeps from forward to backward under the recipe's recomputation."""
        recipe = self.recipe
        if recipe.recompute == "full":
            return float(self.checkpoint(run).value)
        if recipe.recompute == "selective":
            if recipe.recompute_scope == "layer":  # every second layer
                return (float(self.full_layer(run).value) + float(self.checkpoint(run).value)) / 2
            seq_len = run.stack.tokens or recipe.seq_len
            return float(self._per_layer(run, selective_line(run.block, recipe, seq_len=seq_len)).value)
        return float(self.full_layer(run).value)

    def activations(self, *, one_layer: bool = False) -> tuple[Line, ...]:
        """What is kept for backward; one_layer: when the sweep has come to the first layer."""
        lines: list[Line] = []
        for run in self.stage.layers:
            if self._idle(run):
                continue
            if one_layer and lines:
                break
            flight = self.in_flight if run.in_trunk else 1
            lines.append(
                compute(
                    f"{run.stack.name}.{run.block.name}",
                    act.kept_activation_bytes,
                    kind=Kind.MODELLED,
                    layer_bytes=self.kept_layer(run),
                    layers=1 if one_layer else run.count,
                    in_flight=flight,
                )
            )
        network = self.graph.network
        if network is not None and network.saved_elements is not None:
            lines.append(
                compute(
                    "network",
                    act.network_saved_bytes,
                    kind=Kind.MODELLED,
                    saved_elements=network.saved_elements,
                    images=self.layout.micro_batch,
                    activation_bytes=self.recipe.activation_bytes,
                )
            )
        if self.stage.first and self.graph.embedding is not None:
            lines.append(
                compute("token_ids", act.token_id_bytes, tokens=self.tokens, in_flight=self.in_flight)
            )
        rotary = self._rotary_dim()
        if rotary:
            lines.append(
                compute(
                    "rotary_table",
                    act.rotary_table_bytes,
                    seq_len=self.recipe.seq_len,
                    head_dim=rotary,
                    activation_bytes=self.recipe.activation_bytes,
                )
            )
        if self.recipe.autocast and self.recipe.recompute == "none":
            lines.append(
                compute(
                    "autocast_weights",
                    mem.autocast_weight_bytes,
                    linear_params=self._layer_linear_params(one_layer=one_layer),
                )
            )
        if "activations" in self.recipe.offload:
            return ()
        return (total("activations", tuple(lines), unit="bytes"),)

    def _rotary_dim(self) -> int:
        """Width of the rotation tables, 0 without rotary positions."""
        for run in self.stage.layers:
            mixer = run.block.mixer
            if isinstance(mixer, Attention) and mixer.rope != "none":
                return mixer.rope_dim or mixer.qk_dim
        return 0

    def _idle(self, run: LayerRun) -> bool:
        """A vision tower beside a language model: a run over text alone does not pass it."""
        return run.stack.role == "vision" and self.graph.trunk.role == "decoder"

    def rebuilt(self) -> Line | None:
        """The layer that is rebuilt while its backward runs, where recomputation drops it."""
        recipe = self.recipe
        if recipe.recompute == "none" or not self.stage.layers:
            return None
        run = self._widest_run()
        full = self.full_layer(run)
        kept = self.kept_layer(run)
        extra = full.value if recipe.recompute == "full" else max(0.0, full.value - kept)
        return Line(
            "recomputed_layer", extra, "bytes", Kind.MODELLED, children=(), note=f"one {run.block.name}"
        )

    # --- head and loss ---------------------------------------------------------------------------------

    @property
    def _vocab(self) -> int:
        head = self.graph.head
        return head.vocab if head is not None and self.stage.last else 0

    def head_saved(self) -> tuple[Line, ...]:
        if not self._vocab or self.graph.head is None:
            return ()
        recipe, head = self.recipe, self.graph.head
        per_token = [
            compute(
                "head_input",
                act.linear_input_saved_bytes,
                width=head.hidden,
                element_bytes=recipe.activation_bytes,
                copies=1,
            )
        ]
        norm = self.graph.trunk.final_norm
        if norm is not None:
            per_token.append(norm_line(norm, recipe, frozen=False))
        lines = [
            compute(line.name, act.layer_saved_bytes, bytes_per_token=line, tokens=self.tokens, tp=self.sp)
            for line in per_token
        ]
        if recipe.loss == "unfused":
            lines.append(
                compute(
                    "log_softmax",
                    act.layer_saved_bytes,
                    bytes_per_token=compute("per_token", act.unfused_loss_saved_bytes, vocab=self._vocab),
                    tokens=self.tokens,
                    tp=self.layout.tp,
                )
            )
        return (total("head_and_loss", tuple(lines), unit="bytes"),)

    def loss_transients(self) -> tuple[Line, ...]:
        if not self._vocab or self.graph.head is None:
            return ()
        recipe, layout, vocab = self.recipe, self.layout, self._vocab
        if recipe.loss == "chunked":
            line = compute(
                "chunked_loss",
                act.chunked_loss_bytes,
                tokens=self.tokens,
                vocab=vocab,
                hidden=self.graph.head.hidden,
                activation_bytes=recipe.activation_bytes,
                head_trained=int(recipe.adapters is None or recipe.adapters.trained_embeddings),
            )
            return (line, *self.fsdp_root())
        if recipe.loss == "fused":
            line = compute(
                "logits",
                act.layer_saved_bytes,
                bytes_per_token=compute(
                    "per_token", act.fused_loss_bytes, vocab=vocab, activation_bytes=recipe.activation_bytes
                ),
                tokens=self.tokens,
                tp=layout.tp,
            )
            return (line, *self.fsdp_root())
        forward = compute(
            "forward", act.loss_forward_bytes, vocab=vocab, activation_bytes=recipe.activation_bytes
        )
        backward = compute(
            "backward",
            act.loss_backward_bytes,
            vocab=vocab,
            activation_bytes=recipe.activation_bytes,
            logits_kept=0,
        )
        if recipe.gathered_tp_inputs and layout.tp > 1:
            backward = compute("backward", act.loss_parallel_backward_bytes, vocab=vocab)
        worst = forward if forward.value >= backward.value else backward
        line = compute(
            "logits", act.layer_saved_bytes, bytes_per_token=worst, tokens=self.tokens, tp=layout.tp
        )
        return (line, *self.fsdp_root())

    # --- transients ------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        if "parameters" in self.recipe.offload:  # fetched from the host, on one GPU too
            return True
        return self.layout.zero_stage >= 3 and self.layout.shard > 1

    def _layer_params(self) -> float:
        widest = self.stage.widest
        if widest is None:
            return self.dense
        held: Params = widest.params
        layout, adapters = self.layout, self.recipe.adapters
        if adapters is not None:  # gathered as stored, in the units of the compute type
            stored = adapters.base_bytes_per_param / self.recipe.compute_bytes
            return (held.sharded / layout.tp + held.replicated) * stored
        return held.sharded / layout.tp + held.replicated + held.expert / (layout.ep * layout.etp)

    def _root_params(self) -> float:
        tables = (self.stage.embedding.sharded, self.stage.head.sharded)
        held = sum(tables) if self.recipe.wrapped_root else max(tables)
        return held / self.layout.tp

    def fsdp_root(self) -> tuple[Line, ...]:
        """Gathered head (and embedding in the root group) while the loss is taken."""
        if not self._gathers:
            return ()
        return (
            compute(
                "gathered_root_weights",
                mem.weight_bytes,
                params=self._root_params(),
                parameter_bytes=self.recipe.compute_bytes,
                shard=1,
                zero_stage=0,
            ),
        )

    def forward_transients(self) -> tuple[Line, ...]:
        if not self._gathers:
            return ()
        recipe = self.recipe
        if recipe.framework == "deepspeed":
            return (self._deepspeed_live(),)
        if not recipe.reshard or recipe.unlimited_gathers:
            return (
                compute(
                    "gathered_weights",
                    mem.fsdp_forward_unresharded_bytes,
                    root_params=self._root_params(),
                    layer_params=self._layer_params(),
                    layers=self.stage.depth,
                    element_bytes=recipe.compute_bytes,
                ),
            )
        return (
            compute(
                "gathered_weights",
                mem.fsdp_forward_bytes,
                root_params=self._root_params(),
                layer_params=self._layer_params(),
                element_bytes=recipe.compute_bytes,
            ),
        )

    def _deepspeed_live(self) -> Line:
        held = self.dense + self.expert
        if self.recipe.adapters is not None and not self.recipe.adapters.base_sharded:
            linears = sum(run.params.linear * run.count for run in self.stage.layers) / self.layout.tp
            held = self.dense - linears  # the quantised base is whole on every rank
        return compute(
            "gathered_weights",
            mem.deepspeed_live_parameter_bytes,
            live_elements=allowances.DEEPSPEED_LIVE_PARAMETERS,
            params=held,
            element_bytes=self.recipe.compute_bytes,
        )

    def backward_phase(
        self,
        states: tuple[Line, ...],
        buffers: tuple[Line, ...],
        kept: tuple[Line, ...],
        gradients: tuple[Line, ...],
        persistent: bool,
    ) -> Line:
        """The largest of the moments of the sweep.

        The final norm; the first layer, with most activations; the last one, with most gradients beside a
        layer's activations; the end, with all gradients.
        """
        rebuilt = self.rebuilt()
        layer = (
            *((rebuilt,) if rebuilt is not None else ()),
            *self.backward_working_set(),
            *self.dequantised(),
            *self.backward_transients(),
            *(() if persistent else self.layer_gradient()),
        )
        present = gradients if persistent else self.head_gradient()
        moments = [
            (*states, *buffers, *kept, *layer, *present),
            (*states, *buffers, *gradients, *self.end_transients(), *self.embedding_gradient_input()),
        ]
        norm = self.final_norm_backward()
        if norm:
            moments.append((*states, *buffers, *kept, *norm, *self.fsdp_root(), *present))
        made = self.gradients_but_one_layer()
        if made and not persistent:
            moments.append((*states, *buffers, *self.activations(one_layer=True), *layer, *made))
        return self.phase("backward", max(moments, key=lambda lines: sum(line.value for line in lines)))

    def final_norm_backward(self) -> tuple[Line, ...]:
        """What the written-out final RMSNorm holds while its backward runs."""
        recipe, norm = self.recipe, self.graph.trunk.final_norm if self.graph.stacks else None
        if not self._vocab or norm is None or recipe.kernels != "eager" or "rmsnorm" not in norm.kind:
            return ()
        return (
            compute(
                "final_norm_input",
                act.checkpoint_bytes,
                hidden=norm.width,
                tokens=self.tokens,
                activation_bytes=4,
                shards=self.sp,
            ),
            compute(
                "backward_working_set",
                act.rmsnorm_backward_bytes,
                hidden=norm.width,
                tokens=self.tokens / self.sp,
            ),
        )

    def layer_gradient(self) -> tuple[Line, ...]:
        """Gradient of the feed-forward output matrix, made at the widest point of a layer's backward.

        Where gradients are reduced layer by layer it is among what is gathered and reduced.
        """
        recipe, layout = self.recipe, self.layout
        if recipe.adapters is not None or layout.zero_stage >= 2 or not self.stage.layers:
            return ()
        ffn = self._widest_run().block.ffn
        rows = [linear for linear in ffn.linears if linear.outputs == ffn.hidden] if ffn is not None else []
        if not rows:
            return ()
        dense = sum(linear.inputs * linear.outputs for linear in rows if linear.shard is not Shard.EXPERT)
        expert = sum(
            linear.copies * linear.inputs * linear.outputs for linear in rows if linear.shard is Shard.EXPERT
        )
        return (
            compute(
                "layer_gradient",
                mem.gradient_bytes,
                params=dense / layout.tp + expert / (layout.ep * layout.etp),
                element_bytes=recipe.gradient_bytes,
                shard=1,
                zero_stage=0,
            ),
        )

    def gradients_but_one_layer(self) -> tuple[Line, ...]:
        """Gradients there when the sweep reaches its last layer: all but that layer's and the table's."""
        recipe, stage, layout = self.recipe, self.stage, self.layout
        trunk = [run for run in stage.layers if run.in_trunk]
        if recipe.adapters is not None or recipe.optimizer_in_backward or not trunk:
            return ()
        if "gradients" in recipe.offload:
            return ()
        layer = trunk[0].params
        tied = stage.first and stage.last and self.graph.head is not None and self.graph.head.tied
        table = 0 if tied else stage.embedding.sharded
        held = stage.params
        dense = (held.sharded - layer.sharded - table) / layout.tp + held.replicated - layer.replicated
        expert = (held.expert - layer.expert) / (layout.ep * layout.etp)
        return (
            self._split(
                "gradients", mem.gradient_bytes, held=(dense, expert), element_bytes=recipe.gradient_bytes
            ),
        )

    def embedding_gradient_input(self) -> tuple[Line, ...]:
        """Gradient of the embedding's output, alive while the table's gradient is made."""
        if not self.stage.first or self.graph.embedding is None:
            return ()
        return (
            compute(
                "embedding_output_gradient",
                act.checkpoint_bytes,
                hidden=self.graph.embedding.width,
                tokens=self.tokens,
                activation_bytes=self.recipe.activation_bytes,
                shards=self.sp,
            ),
        )

    def head_gradient(self) -> tuple[Line, ...]:
        """Gradient of the head, the first to appear."""
        if not self._vocab or self.recipe.adapters is not None:
            return ()
        layout = self.layout
        held = self.stage.head.sharded or self.stage.embedding.sharded
        return (
            compute(
                "gradients",
                mem.gradient_bytes,
                params=held / layout.tp,
                element_bytes=self.recipe.gradient_bytes,
                shard=layout.shard,
                zero_stage=layout.zero_stage,
            ),
        )

    def dequantised(self) -> tuple[Line, ...]:
        """16-bit weights made from a quantised base: one matrix, or the layer where autograd keeps them."""
        recipe, adapters = self.recipe, self.recipe.adapters
        if adapters is None or not adapters.quantised or not self.stage.layers:
            return ()
        run = max(self.stage.layers, key=lambda item: item.params.total)
        sizes = [linear.inputs * linear.outputs for linear in block_linears(run.block)]
        kept = sum(sizes) if adapters.keeps_dequantised else max(sizes)
        return (
            compute(
                "dequantised_weights",
                mem.weight_bytes,
                params=kept / self.layout.tp,
                parameter_bytes=recipe.compute_bytes,
                shard=1,
                zero_stage=0,
            ),
        )

    def _widest_run(self) -> LayerRun:
        """The layer kind that keeps most without recomputation."""
        return max(self.stage.layers, key=lambda item: self.full_layer(item).value)

    def backward_working_set(self) -> tuple[Line, ...]:
        recipe, layout = self.recipe, self.layout
        if not self.stage.layers:
            return ()
        run = self._widest_run()
        ffn = run.block.ffn
        tokens = self._run_tokens(run)
        hidden = run.stack.hidden
        size = recipe.activation_bytes
        width, gated = _mlp_width(ffn)
        gathered = int(layout.sequence_parallel and layout.tp > 1)
        candidates = []
        if recipe.framework == "megatron":
            candidates.append(
                compute(
                    "backward_working_set",
                    act.megatron_mlp_backward_bytes,
                    mlp_width=2 * width if gated else width,
                    hidden=hidden,
                    tokens=tokens,
                    activation_bytes=size,
                    tp=layout.tp,
                    gathered=gathered,
                )
            )
        else:
            formula = act.gated_mlp_backward_bytes if gated else act.plain_mlp_backward_bytes
            candidates.append(
                compute(
                    "backward_working_set",
                    formula,
                    ffn=width,
                    hidden=hidden,
                    tokens=tokens,
                    activation_bytes=size,
                    tp=layout.tp,
                )
            )
        if recipe.framework == "megatron" and self._vocab:
            candidates.append(
                compute(
                    "backward_working_set",
                    act.megatron_head_backward_bytes,
                    vocab=self._vocab,
                    hidden=hidden,
                    tokens=self.tokens,
                    activation_bytes=size,
                    tp=layout.tp,
                    gathered=gathered,
                )
            )
        return (max(candidates, key=lambda line: line.value),)

    def backward_transients(self) -> tuple[Line, ...]:
        if not self._gathers:
            return ()
        recipe = self.recipe
        if recipe.framework == "deepspeed":
            return (self._deepspeed_live(),)
        layer = self._layer_params()
        line = compute(
            "gathered_weights_and_gradients",
            mem.fsdp_backward_bytes,
            root_params=self._root_params(),
            head_params=self.stage.head.sharded / self.layout.tp if recipe.wrapped_root else 0,
            layer_params=layer,
            element_bytes=recipe.compute_bytes,
            reduce_bytes=recipe.reduce_bytes,
        )
        if recipe.reshard:
            return (line,)
        kept = compute(
            "unsharded_layers",
            mem.weight_bytes,
            params=(self.stage.depth - 1) * layer,
            parameter_bytes=recipe.compute_bytes,
            shard=1,
            zero_stage=0,
        )
        return (line, kept)

    def end_transients(self) -> tuple[Line, ...]:
        if not self._gathers or self.recipe.framework == "deepspeed":
            return ()
        recipe = self.recipe
        return (
            compute(
                "root_gradients",
                mem.fsdp_end_bytes,
                root_params=self._root_params(),
                layer_params=self._layer_params(),
                element_bytes=recipe.compute_bytes,
                reduce_bytes=recipe.reduce_bytes,
            ),
        )

    def step_transients(self) -> tuple[Line, ...]:
        recipe, layout = self.recipe, self.layout
        trained = self.trained_params()
        lines = []
        if "optimizer" in recipe.offload:
            return ()
        if recipe.framework == "deepspeed" and recipe.parameter_bytes == 2:
            lines.append(
                compute(
                    "fp32_gradient_partition",
                    mem.deepspeed_step_gradient_bytes,
                    params=trained,
                    shard=layout.shard if layout.zero_stage >= 1 else 1,
                    sub_group_elements=allowances.DEEPSPEED_SUB_GROUP if layout.zero_stage >= 3 else trained,
                )
            )
        if recipe.step_temporary_bytes:
            # Tensors are stepped together by element type, one type after the other.
            stepped = [(trained, recipe.step_temporary_bytes)]
            if recipe.adapters is not None:
                stepped = [(params, size) for _, params, size in self.trained_parts()]
            params, size = max(stepped, key=lambda item: item[0] * item[1])
            lines.append(
                compute(
                    "step_temporary",
                    mem.foreach_step_bytes,
                    params=params,
                    state_bytes=size,
                    shard=layout.shard if layout.zero_stage >= 1 else 1,
                )
            )
        return tuple(lines)


def _mlp_width(ffn: object) -> tuple[float, bool]:
    """Width of the gradients in the feed-forward backward, per token, and whether it is gated."""
    if isinstance(ffn, Mlp):
        return ffn.ffn, ffn.gated
    if isinstance(ffn, Moe):
        return ffn.top_k * ffn.expert_ffn + ffn.shared_ffn, ffn.gated
    return 0, False
