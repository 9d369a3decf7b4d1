"""The next best actions of a plan: changes worth making, each planned again to get its number.

Reads plans and makes more of them; the catalogue is asked only for other fleets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpucalc.errors import GpucalcError
from gpucalc.graph import Graph
from gpucalc.plan.answer import HOST, Action, Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms
from gpucalc.plan.resolve import settle
from gpucalc.search import plan_best
from gpucalc.search.frameworks import knows, module_sets
from gpucalc.spec.defaults import year_of
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

MOST_ACTIONS = 6
WORTH_SPEED = 1.01  # a change that brings less than one percent is not an action
WORTH_MEMORY = 0.98
FLEET_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Clusters = Callable[[str, int], Cluster]  # the cluster of so many GPUs of a catalogue id
_FOLLOWS = ("reshard_after_forward", "flash_attention")  # other words for zero_stage and attention
_RANK = {Level.FITS: 0, Level.MARGINAL: 1, Level.DOES_NOT_FIT: 2}


def advised(
    plan: Plan,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    *,
    clusters: Clusters | None = None,
    larger: tuple[str, ...] = (),
    errors: ErrorTable | None = None,
) -> Plan:
    """The plan with its next best actions. `run` is the settled run the plan was made from.

    `clusters` builds other fleets; `larger` names cards with more memory worth naming.
    """
    actions = [
        action
        for title, changes in _changes(plan, run, subject.graph)
        if (action := _tried(plan, subject, run, cluster, title, changes, errors)) is not None
    ]
    seen: dict[str, Action] = {}
    for action in actions:  # the best layout may be the job's own
        seen.setdefault(str(sorted(action.changes.items())), action)
    actions = list(seen.values())
    if plan.verdict.level is Level.FITS:
        speed = _speed(plan)
        kept = [a for a in actions if a.level is Level.FITS and (a.tokens_per_s or 0) > speed * WORTH_SPEED]
        kept.sort(key=lambda a: -(a.tokens_per_s or 0))
    else:
        needed = plan.verdict.needed.value
        better = _RANK[plan.verdict.level]
        kept = [a for a in actions if a.needed_bytes < needed * WORTH_MEMORY or _RANK[a.level] < better]
        kept.sort(key=lambda a: (_RANK[a.level], -(a.tokens_per_s or 0), a.needed_bytes))
        if kept and kept[0].level is Level.FITS:  # beside what is enough, what is not says nothing
            kept = [action for action in kept if action.level is not Level.DOES_NOT_FIT]
    kept = kept[:MOST_ACTIONS]
    if len(cluster.pools) > 1 and clusters is not None:
        kept = [*_without_a_kind(plan, subject, run, cluster, clusters, errors), *kept]
    if plan.verdict.level is not Level.FITS and clusters is not None:
        cards = (*(pool.gpu.id for pool in cluster.pools), *larger)
        for card in dict.fromkeys(cards):
            found = smallest_fleet(plan, subject, run, cluster, card, clusters, errors)
            if found is not None:
                kept.append(found)
    return replace(plan, actions=tuple(kept))


def _without_a_kind(
    plan: Plan,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    clusters: Clusters,
    errors: ErrorTable | None,
) -> Iterator[Action]:
    """What each GPU kind of a mixed fleet does alone, where that is better than all of them together.

    The smallest card sizes every rank and the slowest paces every step, so more cards may give less.
    """
    batch = plan.layout.global_batch if isinstance(run.global_batch, int) else None
    open_run = run.model_copy(
        update={"dp": None, "dp_shard": None, "global_batch": batch, "grad_accum": None if batch else 1}
    )
    for kept in cluster.pools:
        fleet = f"{kept.count}x{kept.gpu.id}"
        try:
            alone = clusters(kept.gpu.id, kept.count)
            found = plan_best(subject, open_run, alone, Terms(plan.name, fleet, errors=errors))
        except GpucalcError:
            continue
        better = _RANK[found.verdict.level] < _RANK[plan.verdict.level]
        same = found.verdict.level is plan.verdict.level
        if better or (same and _speed(found) > _speed(plan) * WORTH_SPEED):
            yield Action.of(f"{kept.count} x {kept.gpu.name} alone", {"gpus": fleet}, found)


def smallest_fleet(
    plan: Plan,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    card: str,
    clusters: Clusters,
    errors: ErrorTable | None = None,
) -> Action | None:
    """The fewest GPUs of a card that hold the run under its best layout; None when no listed size does."""
    own = len(cluster.pools) == 1 and cluster.pools[0].gpu.id == card
    for open_run in open_runs(run):
        for count in FLEET_SIZES:
            if own and count <= cluster.count:
                continue
            try:
                other = clusters(card, count)
                fleet = f"{count}x{card}"
                found = plan_best(subject, open_run, other, Terms(plan.name, fleet, errors=errors))
            except GpucalcError:
                continue
            verdict = found.verdict
            # A host nobody described makes a plan marginal; the question here is of cards.
            if verdict.level is Level.FITS or (verdict.level is Level.MARGINAL and verdict.binds == HOST):
                title = f"{count} x {other.pools[0].gpu.name}, {open_run.framework}"
                changes = _layout_changes(found, run) | _opened_changes(open_run, run, found)
                return Action.of(title, {"gpus": fleet, **changes}, found)
    return None


def open_runs(run: TrainRun) -> Iterator[TrainRun]:
    """The run with its layout left to the search, as far as its framework allows; then under Megatron,
    which can divide a layer that no single card could gather.
    """
    base = {"dp": None, "dp_shard": None, "micro_batch": 1, "vpp": 1, **_full(run)}
    base |= {"grad_accum": None} if isinstance(run.global_batch, int) else {"grad_accum": 1}
    if run.framework in ("deepspeed", "fsdp"):
        yield run.model_copy(update={**base, "zero_stage": 3, "reshard_after_forward": True})
    elif run.framework == "torchtitan":
        free = {"tp": "auto", "pp": "auto", "zero_stage": 3, "reshard_after_forward": True}
        yield run.model_copy(update={**base, **free})
    if run.method == "full":
        free = {"tp": "auto", "pp": "auto", "ep": "auto", "etp": 1, "zero_stage": 1, "attention": "flash"}
        megatron = {"framework": "megatron", "pipeline_split": "uneven", "offload": "none"}
        yield run.model_copy(update={**base, **free, **megatron, "optimizer": "adam"})


def _opened_changes(opened: TrainRun, run: TrainRun, found: Plan) -> dict[str, Any]:
    """What `open_runs` set beside the layout, so that the keys given plan what was found."""
    keys = ["micro_batch", "offload"]
    if run.optimizer not in ("adam", "adamw", "adamw-fused"):
        keys.append("optimizer")
    if run.attention == "eager":
        keys.append("attention")
    if found.layout.pp > 1:
        keys.append("pipeline_split")
    if opened.cuda_graphs != run.cuda_graphs:
        keys.append("cuda_graphs")
    if run.reshard_after_forward is False and opened.framework in ("fsdp", "torchtitan"):
        keys.append("reshard_after_forward")
    return {f"run.{key}": getattr(opened, key) for key in keys if getattr(opened, key) != getattr(run, key)}


def _layout_changes(plan: Plan, run: TrainRun) -> dict[str, Any]:
    """The keys that give the layout found."""
    layout = plan.layout
    degrees = {key: getattr(layout, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    changed: dict[str, Any] = {
        f"run.{key}": value for key, value in degrees.items() if getattr(run, key) not in (value, None)
    }
    if plan.recipe.framework != run.framework:
        changed["run.framework"] = plan.recipe.framework
    return changed | {"run.zero_stage": layout.zero_stage, "run.recompute": plan.recipe.recompute}


def _tried(
    plan: Plan,
    subject: Subject,
    run: TrainRun,
    cluster: Cluster,
    title: str,
    changes: Mapping[str, Any],
    errors: ErrorTable | None,
) -> Action | None:
    """The action a change amounts to, None when it is illegal here."""
    try:
        left_out = {*_FOLLOWS, *(["recompute_modules"] if "recompute" in changes else [])}
        stated = run.model_dump(exclude_none=True, exclude=left_out)
        changed, _ = settle(TrainRun.read({**stated, **changes}))
        found = plan_best(subject, changed, cluster, Terms(plan.name, plan.fleet, errors=errors))
    except GpucalcError:
        return None
    settled = {f"run.{key}": _settled(found, key, value) for key, value in changes.items()}
    moved = {key: value for key, value in settled.items() if value != _stated(plan, run, key)}
    return Action.of(title, moved, found)


def _settled(found: Plan, key: str, value: Any) -> Any:
    """A change as the plan found it: the number chosen for auto, the one that follows for a key left open."""
    if key == "grad_accum":
        return found.layout.micro_batches
    return getattr(found.layout, key) if value in ("auto", None) else value


def _stated(plan: Plan, run: TrainRun, key: str) -> Any:
    """What the plan has now for a key: the layout's number, else the run's word."""
    name = key.removeprefix("run.")
    if name == "grad_accum":
        return plan.layout.micro_batches
    return getattr(plan.layout, name, getattr(run, name, None))


def _speed(plan: Plan) -> float:
    return float(plan.throughput.child("tokens_per_s").value) if plan.throughput is not None else 0.0


def _selective(run: TrainRun, graph: Graph) -> dict[str, Any]:
    """The selective recomputation that costs least: of Megatron-Core, modules that cost next to nothing."""
    if run.framework != "megatron" or not knows("megatron", "modules", year_of(run)) or not graph.stacks:
        return {"recompute": "selective"}
    return {"recompute": "selective", "recompute_modules": module_sets(run, graph)[0]}


def _changes(plan: Plan, run: TrainRun, graph: Graph) -> Iterator[tuple[str, dict[str, Any]]]:
    """Single changes that could help, in words and keys. Each is judged by planning it."""
    layout, recipe = plan.layout, plan.recipe
    tight = plan.verdict.level is not Level.FITS
    if recipe.attention == "eager":
        yield "flash attention", {"attention": "flash"}
    if tight:
        yield from _memory_changes(plan, run, graph)
        return
    if recipe.recompute == "full":
        yield "selective recompute", _selective(run, graph)
    if recipe.recompute != "none":
        yield "no recompute", {"recompute": "none"}
    for factor in (2, 4):
        if layout.micro_batches % factor == 0:
            yield (
                f"micro_batch {layout.micro_batch * factor}",
                {"micro_batch": layout.micro_batch * factor, **_kept_batch(plan)},
            )
    if not run.compile and run.framework not in ("megatron", "deepspeed"):
        yield "torch.compile", {"compile": True}
    if layout.zero_stage == 3 and run.framework in ("fsdp", "torchtitan", "deepspeed"):
        yield "keep gathered weights (stage 2)", {"zero_stage": 2}
    if run.framework == "megatron" and layout.world > 1 and (layout.tp > 1 or layout.pp > 1):
        auto = {"tp": "auto", "pp": "auto", "dp": None, "micro_batch": layout.micro_batch}
        yield "another layout", {**auto, **_kept_batch(plan)}


def _full(run: TrainRun) -> dict[str, Any]:
    """Whole layers made again, whose parts cannot be captured meanwhile."""
    parts = set(run.cuda_graphs or ()) - {"none", "full"}
    return {"recompute": "full", **({"cuda_graphs": ("none",)} if parts else {})}


def _host_changes(plan: Plan, run: TrainRun) -> Iterator[tuple[str, dict[str, Any]]]:
    if plan.recipe.host_load == "every-rank" and plan.layout.world > 1:
        yield "load on one rank of a node", {"host_load": "one-rank"}
    if run.framework == "deepspeed" and run.offload.endswith("-cpu") and "optimizer" in run.offload:
        kept = "params+optimizer" if run.offload.startswith("params") else "optimizer"
        yield "offload to NVMe", {"offload": f"{kept}-nvme"}


def _memory_changes(plan: Plan, run: TrainRun, graph: Graph) -> Iterator[tuple[str, dict[str, Any]]]:
    layout, recipe = plan.layout, plan.recipe
    if plan.verdict.phase == "load" and recipe.loaded_bytes > recipe.parameter_bytes:
        yield "weights read in 16 bit", {"loaded_as": "16-bit"}
    if plan.verdict.host_decides:
        yield from _host_changes(plan, run)
    if recipe.recompute == "none" and run.framework in ("megatron", "torchtitan"):
        yield "selective recompute", _selective(run, graph)
    if recipe.recompute != "full":
        yield "full recompute", _full(run)
    if layout.micro_batch > 1:
        half = layout.micro_batch // 2
        yield f"micro_batch {half}", {"micro_batch": half, **_kept_batch(plan)}
        if half > 1:
            yield "micro_batch 1", {"micro_batch": 1, **_kept_batch(plan)}
    if recipe.loss == "unfused":
        yield "fused loss", {"fused_loss": True}
    if run.framework == "deepspeed":
        for stage in range(layout.zero_stage + 1, 4):
            yield f"ZeRO stage {stage}", {"zero_stage": stage}
    if run.framework in ("ddp", "hf") and layout.dp > 1:
        yield "fsdp", {"framework": "fsdp", "zero_stage": 3, "gradient_as_bucket_view": False}
    if run.framework == "megatron" and layout.zero_stage == 0:
        yield "distributed optimizer", {"zero_stage": 1}
    if run.framework in ("megatron", "torchtitan"):
        auto = {"tp": "auto", "pp": "auto", "ep": "auto", "etp": 1, "dp": None, **_kept_batch(plan)}
        yield "the best layout", auto
        yield "the best layout with full recompute", {**auto, **_full(run)}
    if not run.optimizer.endswith("8bit") and run.framework in ("ddp", "hf", "fsdp"):
        yield "8-bit Adam", {"optimizer": "adamw-8bit"}
    if run.offload == "none" and run.framework in ("deepspeed", "fsdp", "hf", "ddp"):
        along = run.framework == "deepspeed" and layout.zero_stage >= 2  # its gradients go there too
        kept = "optimizer+gradients-cpu" if along else "optimizer-cpu"
        yield "optimizer on the CPU", {"offload": kept}
    if recipe.recompute != "full" and layout.zero_stage >= 2:
        yield "full recompute, fused loss", {**_full(run), "fused_loss": True}
    if run.method == "full" and run.framework in ("ddp", "hf", "fsdp"):
        yield "LoRA", {"method": "lora", "recompute": "full"}


def _kept_batch(plan: Plan) -> dict[str, Any]:
    """Keeps the sequences per step when the micro-batch or the ranks change."""
    return {"global_batch": plan.layout.global_batch, "grad_accum": None}
