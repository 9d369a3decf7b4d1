"""A job scaled to the machine at hand: what each stage of the feasibility test trains, and its plan.

    alone      one card, micro-batch 1, no parallelism: what one card holds and computes
    together   every card, the job's own batch per card, gradients summed over all of them

Layers are cut to what the plan says fits, every kind of layer kept; everything else that differs from
the job is said in `changes`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpucalc.accuracy import error_table
from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.counts import count
from gpucalc.errors import CannotMeasure, InputError
from gpucalc.formulas import calibration
from gpucalc.jobs import ResolvedJob
from gpucalc.line import Line
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, evaluate
from gpucalc.planner import plan_job
from gpucalc.probe.modules import cut, decoder, keep, refuse_unbuilt
from gpucalc.spec.defaults import THIS_YEAR, with_defaults
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun
from gpucalc.units import gib

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-pure")
OPTIMIZERS = {"adamw": "adamw", "adamw-unfused": "adamw", "adamw-fused": "adamw-fused", "adam": "adam",
              "sgd": "sgd", "sgd-momentum": "sgd-momentum"}  # fmt: skip
# What a CPU trains of a model: the same parts, narrow enough that a step takes milliseconds.
CPU_LAYERS, CPU_HEADS, CPU_HEAD_DIM, CPU_VOCAB, CPU_TOKENS, CPU_EXPERTS = 4, 4, 32, 1024, 128, 4
CPU_BATCH = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One stage's model and run. `layers` are the positions, in the job's model, of the layers kept."""

    name: str
    spec: ModelSpec
    layers: tuple[int, ...]
    of: int
    micro_batch: int
    micro_batches: int
    strategy: str  # none | ddp | fsdp
    plan: Plan
    on_cpu: bool

    def settings(self) -> dict[str, Any]:
        """What a worker needs to run it."""
        recipe = self.plan.recipe
        return {
            "model": self.spec.model_dump(mode="json", exclude_none=True),
            "layers": list(self.layers),
            "micro_batch": self.micro_batch,
            "micro_batches": self.micro_batches,
            "strategy": self.strategy,
            "precision": recipe.precision,
            "optimizer": recipe.optimizer,
            "recompute": recipe.recompute == "full",
            "eager_attention": recipe.attention == "eager",
            "seq_len": recipe.seq_len,
            "reshard": recipe.reshard,
            "reduce_bytes": recipe.reduce_bytes,
        }

    @property
    def words(self) -> str:
        """What is trained, in a phrase."""
        layers = f"{len(self.layers)} of {self.of} layers"
        experts = f", {self.spec.moe.experts} experts" if self.spec.moe is not None else ""
        how = {"none": "", "ddp": ", DDP", "fsdp": ", FSDP"}[self.strategy]
        batch = f"{self.micro_batch} x {self.micro_batches} sequences of {self.plan.recipe.seq_len} tokens"
        return f"{layers}{experts}, {batch} a card{how}"

    def predicted(self) -> dict[str, Any]:
        """The plan's numbers for it. Of a CPU only the bytes of tensors, which any device shares."""
        time, rates, verdict = self.plan.time, self.plan.throughput, self.plan.verdict
        found: dict[str, Any] = {
            "parameters": int(self.plan.model.value),
            "peak_allocated_bytes": self._peak(workspace=not self.on_cpu, overhead=False),
            "memory_error_fraction": verdict.expected_error,
        }
        if self.on_cpu or time is None or rates is None:
            return found
        found |= {
            "peak_reserved_bytes": self._peak(workspace=True, overhead=True),
            "step_s": time.value,
            "tokens_per_s": rates.child("tokens_per_s").value,
            "time_error_fraction": self.plan.speed_error[0] if self.plan.speed_error else None,
        }
        shared = next((line for line in time.children if line.name == "data_parallel"), None)
        if shared is not None:
            found["sync_s"] = shared.child("communication").value
            found["sync_exposed_s"] = shared.value
            found["sync_share"] = float(
                calibration.exposed_share(exposed_s=shared.value, step_s=found["step_s"])
            )
        return found

    def _peak(self, *, workspace: bool, overhead: bool) -> float:
        """The largest phase after loading; the test's weights are made where they stay."""
        return max(
            _bytes(phase, workspace=workspace, overhead=overhead)
            for stage in self.plan.memory.children
            for phase in stage.children
            if phase.name != "load"
        )


def _bytes(phase: Line, *, workspace: bool, overhead: bool) -> float:
    held = phase.child("allocated")
    value = sum(line.value for line in held.children if workspace or line.name != "cublas_workspace")
    return float(value + (phase.child("allocator_overhead").value if overhead else 0))


@dataclass(frozen=True, slots=True)
class Trials:
    """A job made ready to be tried: its model, the stages, and what is not as the job has it."""

    job: str
    fleet: str
    alone: Trial
    together: Trial | None  # None on one card
    changes: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """What a worker needs to run every stage."""
        return {
            "alone": self.alone.settings(),
            "together": self.together.settings() if self.together is not None else None,
        }


def trials(
    job: ResolvedJob, catalog: Catalog, cards: Cluster, one: Cluster, *, ranks: int, on_cpu: bool
) -> Trials:
    """The stages of a job on `ranks` cards. `one`: a cluster of the card that holds least.

    Raises InputError for a job that trains nothing here, CannotMeasure when not one layer of each
    kind fits.
    """
    run = job.run
    if not isinstance(run, TrainRun):
        raise InputError("serves; the stages train", where="--stages", given=job.name)
    refuse_unbuilt(build_graph(job.model))
    if run.method != "full":
        raise InputError(
            f"trains by {run.method}, which the stages cannot build", where="--stages", given=job.name,
            legal="--set run.method=full",
        )  # fmt: skip
    own = plan_job(job, catalog, advice=False, always_time=True)
    settled, changes = _alike(run, own, on_cpu=on_cpu)
    spec = job.model
    if on_cpu:
        spec, said = narrowed(spec)
        changes += said
    if len(build_graph(job.model).stacks) > 1:
        changes.append("the vision tower and its projector are left out: the language model is trained")
    batch, accumulated = own.layout.micro_batch, own.layout.micro_batches
    if on_cpu and (batch > CPU_BATCH or accumulated > CPU_BATCH):
        least = min(batch, CPU_BATCH), min(accumulated, CPU_BATCH)
        changes.append(f"batch: {batch} x {accumulated} sequences a card -> {least[0]} x {least[1]}")
        batch, accumulated = least
    fit = _Fitting(job.name, spec, error_table(catalog), on_cpu)
    first = {**settled, "framework": "ddp", "micro_batch": 1, "grad_accum": 1, "zero_stage": 0}
    alone = fit.largest("alone", first, one, strategy="none", batch=1, accumulated=1)
    together = None
    if ranks > 1:
        sharded = own.layout.zero_stage >= 2
        stage = own.layout.zero_stage if sharded else 0
        second = {**settled, "framework": "fsdp" if sharded else "ddp", "zero_stage": stage}
        second |= {"micro_batch": batch, "grad_accum": accumulated}
        together = fit.largest(
            "together", second, cards, strategy=second["framework"], batch=batch, accumulated=accumulated
        )
        changes += _parallel(own, second["framework"], ranks)
    return Trials(job.name, str(job.fleet), alone, together, tuple(changes))


@dataclass(frozen=True, slots=True)
class _Fitting:
    """Finds how many layers fit, by plans alone."""

    job: str
    spec: ModelSpec
    errors: ErrorTable
    on_cpu: bool

    def largest(
        self,
        name: str,
        run: Mapping[str, Any],
        cluster: Cluster,
        *,
        strategy: str,
        batch: int,
        accumulated: int,
    ) -> Trial:
        """The trial with the most layers that fit; with fewer experts where one layer is too much."""
        settled = with_defaults(TrainRun.read(dict(run), where="--stages"))[0]

        def trial(spec: ModelSpec, number: int) -> Trial:
            graph = build_graph(spec)
            kept = keep(graph, number)
            small = cut(graph, kept)
            subject = Subject(spec, small, count(small))
            called = f"{self.job}, {name}"
            terms = Terms(called, str(cluster.count), errors=self.errors, always_time=True)
            plan = evaluate(subject, settled, cluster, terms)
            every = len(decoder(graph).layers)
            return Trial(name, spec, kept, every, batch, accumulated, strategy, plan, self.on_cpu)

        stack = decoder(build_graph(self.spec))
        every, kinds = len(stack.layers), len(set(stack.layers))
        if self.on_cpu:
            return trial(self.spec, min(every, max(CPU_LAYERS, kinds)))
        best = trial(self.spec, kinds)
        while not _fits(best) and (fewer := _half_the_experts(best.spec)) is not None:
            best = trial(fewer, kinds)
        if not _fits(best):
            verdict = best.plan.verdict
            layers = "one layer" if kinds == 1 else f"{kinds} layers, one of each kind,"
            raise CannotMeasure(
                f"{self.job}: not even {layers} with the tables and optimizer fit: {name} needs"
                f" {gib(verdict.needed.value)} of {gib(verdict.capacity.value)} a card"
            )
        low, high = kinds, every
        while low < high:
            middle = (low + high + 1) // 2
            tried = trial(best.spec, middle)
            if _fits(tried):
                low, best = middle, tried
            else:
                high = middle - 1
        return best


def _fits(trial: Trial) -> bool:
    return trial.plan.verdict.level is Level.FITS


def _half_the_experts(spec: ModelSpec) -> ModelSpec | None:
    """The model with half its experts; None where a token would not find its number of them."""
    moe = spec.moe
    if moe is None or moe.experts // 2 < max(moe.top_k, 2):
        return None
    return spec.model_copy(update={"moe": moe.model_copy(update={"experts": moe.experts // 2})})


def _alike(run: TrainRun, own: Plan, *, on_cpu: bool) -> tuple[dict[str, Any], list[str]]:
    """The keys of the job's run that the test takes over, and what it takes instead of others."""
    recipe, changes = own.recipe, []
    length = min(recipe.seq_len, CPU_TOKENS) if on_cpu else recipe.seq_len
    if length != recipe.seq_len:
        changes.append(f"sequence: {recipe.seq_len} -> {length} tokens")
    precision = recipe.precision
    if precision not in PRECISIONS or (on_cpu and precision == "fp16"):
        changes.append(f"precision: {precision} -> bf16")
        precision = "bf16"
    elif on_cpu and precision == "tf32":
        changes.append("precision: tf32 -> fp32")
        precision = "fp32"
    optimizer = OPTIMIZERS.get(recipe.optimizer)
    if optimizer is None:
        changes.append(f"optimizer: {recipe.optimizer} -> adamw")
        optimizer = "adamw"
    recompute = "full" if recipe.recompute == "full" else "none"
    if recipe.recompute == "selective":
        changes.append("recompute: selective -> none")
    for key, words in (
        ("offload", "offload: nothing"),
        ("fused_loss", "loss: not fused"),
        ("fused_kernels", "kernels: PyTorch's own"),
        ("compile", "compile: off"),
        ("reference_model", "no reference model"),
        ("frozen", "nothing is frozen"),
    ):
        if getattr(run, key) not in (None, False, "none", ()):
            changes.append(words)
    return {
        "precision": precision, "optimizer": optimizer, "seq_len": length, "recompute": recompute,
        "attention": "eager" if recipe.attention == "eager" else "sdpa", "dropout": False,
        "year": THIS_YEAR,
    }, changes  # fmt: skip


def _parallel(own: Plan, framework: str, ranks: int) -> list[str]:
    """How the job's layout differs from data parallelism over all cards."""
    layout, changes = own.layout, []
    degrees = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep")
               if getattr(layout, name) > 1]  # fmt: skip
    if degrees:
        changes.append(f"layout: {', '.join(degrees)} -> data parallel over {ranks} cards")
    if layout.zero_stage == 1:
        changes.append("sharding: of the optimizer -> none")
    elif layout.zero_stage and layout.shard < layout.dp * layout.cp:
        changes.append(f"sharding: over {layout.shard} cards -> over all")
    if own.recipe.framework != framework:
        kind = "FSDP" if framework == "fsdp" else "DDP"
        changes.append(f"framework: {own.recipe.framework} -> PyTorch's {kind}")
    if own.gpus != ranks:
        changes.append(f"cards: {own.gpus} -> {ranks}, each with its own share of the batch")
    return changes


def narrowed(spec: ModelSpec) -> tuple[ModelSpec, list[str]]:
    """The same architecture at a width a CPU trains in milliseconds."""
    heads, kv = spec.heads or CPU_HEADS, spec.kv_heads or spec.heads or CPU_HEADS
    kv_heads = max(1, round(CPU_HEADS * kv / heads))
    while CPU_HEADS % kv_heads:
        kv_heads -= 1
    hidden = CPU_HEADS * CPU_HEAD_DIM
    ratio = (spec.ffn or 4 * (spec.hidden or 1)) / (spec.hidden or 1)
    update: dict[str, Any] = {
        "hidden": hidden,
        "heads": CPU_HEADS,
        "kv_heads": kv_heads,
        "head_dim": CPU_HEAD_DIM if spec.head_dim or spec.mla is None else None,
        "v_head_dim": None,
        "ffn": max(32, round(ratio * hidden / 32) * 32),
        "vocab": min(spec.vocab or CPU_VOCAB, CPU_VOCAB),
        "window": min(spec.window, CPU_TOKENS // 2) if spec.window else None,
        "positions": min(spec.positions, CPU_TOKENS) if spec.positions else spec.positions,
        "embedding_width": hidden // 2 if spec.embedding_width not in (None, spec.hidden) else None,
        "vision_tower": None,
        "weights": None,
    }
    if spec.global_attention is not None:
        wide = {"kv_heads": kv_heads, "head_dim": CPU_HEAD_DIM, "v_head_dim": None}
        update["global_attention"] = spec.global_attention.model_copy(update=wide)
    if spec.mla is not None:
        low = {"q_lora": hidden // 2 if spec.mla.q_lora else None, "kv_lora": hidden // 4}
        update["mla"] = spec.mla.model_copy(
            update={**low, "qk_nope": CPU_HEAD_DIM, "qk_rope": CPU_HEAD_DIM // 2, "v_head": CPU_HEAD_DIM}
        )
    if spec.moe is not None:
        experts = min(spec.moe.experts, CPU_EXPERTS)
        moe = {
            "experts": experts,
            "top_k": min(spec.moe.top_k, max(1, experts // 2)),
            "expert_ffn": hidden,
            "shared_expert_ffn": hidden if spec.moe.shared_expert_ffn else 0,
            "latent": hidden // 2 if spec.moe.latent else None,
        }
        update["moe"] = spec.moe.model_copy(update=moe)
    small = spec.model_copy(update=update)
    words = f"width: {spec.hidden} -> {hidden}, {heads} -> {CPU_HEADS} heads, vocabulary {small.vocab}"
    if spec.moe is not None and small.moe is not None:
        words += f", {spec.moe.experts} -> {small.moe.experts} experts"
    return small, [f"{words}: a CPU trains it in place of a GPU"]
