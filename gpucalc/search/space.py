"""The layouts a run leaves open: the values of every key, and which of them go together.

A layout is a structure, which decides what there is to compute (pipeline stages, sharding stage,
schedule, recomputation, offload), and a place on each of five axes, along which numbers alone change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from gpucalc.errors import Infeasible
from gpucalc.graph import Graph, Moe, StateMixer
from gpucalc.num import Num, where
from gpucalc.plan.resolve import dealt_layers, resolve_layout, sequence_length
from gpucalc.plan.rules import (
    DUAL_PIPES,
    Degrees,
    divisors,
    model_rules,
    schedule_rules,
    split_experts,
    too_few_to_fold,
    uneven_batch,
    uneven_ends,
    uneven_halves,
    uneven_rounds,
    uneven_tokens,
)
from gpucalc.plan.stage_time import composition
from gpucalc.plan.stages import stages
from gpucalc.search.frameworks import (
    MEGATRON_FSDP,
    OFFLOAD,
    OFFLOAD_ALONE,
    RECOMPUTE,
    SCHEDULES,
    ZERO_STAGES,
    Structure,
    clash,
    knows,
    module_sets,
)
from gpucalc.spec.defaults import STAGE_KEYS, Default, stage_defaults, year_of
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.train_run import TrainRun

# In the order a layout is written.
AUTO_KEYS = (
    "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "dp_shard", "zero_stage", "micro_batch", "recompute",
    "sequence_parallel", "offload", "schedule",
)  # fmt: skip

# What the rules between axes ask for.
_CROSSED = ("tp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "sequence_parallel")

# Where nobody says how large the batch is, micro-batches are tried in powers of two up to this.
MOST_FREE_MICRO_BATCH = 64


@dataclass(frozen=True, slots=True)
class Axes:
    """Values that go with a structure: every combination is a candidate, `legal` says which are layouts."""

    degrees: tuple[tuple[int, int, int], ...]  # tp, cp and dp_shard
    experts: tuple[tuple[int, int], ...]  # ep and etp
    micro_batches: tuple[int, ...]
    sequence_parallel: tuple[bool, ...]
    vpps: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Values along each axis."""
        return (
            len(self.degrees),
            len(self.experts),
            len(self.micro_batches),
            len(self.sequence_parallel),
            len(self.vpps),
        )

    @property
    def size(self) -> int:
        """Candidates."""
        result = 1
        for count in self.shape:
            result *= count
        return result


class Space:
    """Every layout that a run leaves open on a cluster."""

    def __init__(self, graph: Graph, run: TrainRun, cluster: Cluster) -> None:
        self.graph, self.run, self.gpus = graph, run, cluster.count
        self.domain = max(cluster.nvlink_domain, 1)
        self.open = tuple(key for key in AUTO_KEYS if getattr(run, key) == "auto")
        blocks = [block for stack in graph.stacks for block in stack.blocks]
        # What ranks of a context group hand each other of a state is no cost that the formulas know.
        self.has_states = any(isinstance(block.mixer, StateMixer) for block in blocks)
        self.has_experts = any(isinstance(block.ffn, Moe) for block in blocks)
        self.layers = len(graph.trunk.layers) if graph.stacks else 1
        self.seq_len = sequence_length(run, graph)
        self.even = run.framework == "megatron" and run.pipeline_split == "even"
        self.year = year_of(run)
        self.batch = run.global_batch if isinstance(run.global_batch, int) else None
        self._axes: dict[Any, list[Axes]] = {}

    # -- structures ---------------------------------------------------------------------------------

    def structures(self) -> Iterator[Structure]:
        """Every structure that is possible, the simplest first."""
        run = self.run
        for pp, zero, schedule, (recompute, modules), offload in product(
            self._choices("pp"),
            self._choices("zero_stage"),
            self._choices("schedule"),
            self._recomputations,
            self._choices("offload"),
        ):
            one = Structure(pp, zero, schedule, recompute, offload, modules)
            if any(key in self.open for key in clash(run, one)):
                continue
            if pp == 1 or schedule is None or not self._schedule_rules(schedule, pp):
                yield one

    def dealt_layers(self, stages: int) -> tuple[int, ...]:
        """Layers of each stage, as `plan.resolve.dealt_layers`."""
        return dealt_layers(self.run, self.graph, stages)

    def _schedule_rules(self, schedule: str, pp: int) -> tuple[str, ...]:
        """What a schedule asks of stages, however many micro-batches there are."""
        plenty = 2 * pp * max(self.layers, 1)
        return schedule_rules(self.graph, schedule, pp=pp, vpp=1, micro_batches=plenty)

    def _choices(self, key: str) -> tuple[Any, ...]:
        value = getattr(self.run, key)
        if value != "auto":
            return (value,)
        return tuple(getattr(self, f"_{key}_values"))

    @cached_property
    def _pp_values(self) -> list[int]:
        if not self.graph.stacks:
            return [1]
        return [p for p in divisors(self.gpus) if p <= self.layers and self._fits(pp=p)]

    @property
    def _zero_stage_values(self) -> tuple[int, ...]:
        framework = self.run.framework
        stages = ZERO_STAGES.get(framework, (0,))
        if framework == "megatron" and not (self._knows("fsdp") and self.run.optimizer in MEGATRON_FSDP):
            stages = stages[:2]
        return stages if self._knows("zero_stage") else stages[:1]

    @property
    def _schedule_values(self) -> tuple[str, ...]:
        return tuple(filter(self._knows, SCHEDULES.get(self.run.framework, ("1f1b",))))

    @property
    def _recompute_values(self) -> tuple[str, ...]:
        values = RECOMPUTE.get(self.run.framework, ("none", "full")) if self.graph.stacks else ("none",)
        return tuple(filter(self._knows, values))

    @property
    def _recomputations(self) -> list[tuple[str, tuple[str, ...] | None]]:
        """What is made again, with the modules of a selective recomputation where the run names none."""
        run = self.run
        named = run.recompute_modules is not None or not self._knows("modules")
        if run.recompute != "auto" or run.framework != "megatron" or named or not self.graph.stacks:
            return [(word, None) for word in self._choices("recompute")]
        sets = module_sets(run, self.graph)
        full = [] if run.ep_overlap else [("full", None)]
        return [("none", None), *(("selective", modules) for modules in sets), *full]

    @property
    def _offload_values(self) -> tuple[str, ...]:
        values = OFFLOAD[self.run.framework]
        if self.run.framework in ("ddp", "hf") and self.gpus == 1:
            values += OFFLOAD_ALONE
        return tuple(filter(self._knows, values))

    def _knows(self, what: str) -> bool:
        """Whether the framework of the run's year has it."""
        return knows(self.run.framework, what, self.year)

    # -- axes ---------------------------------------------------------------------------------------

    def axes(self, one: Structure) -> list[Axes]:
        """The axes of a structure: one set for each way in which interleaving deals out unlike layers.

        Layouts with nothing to shard stand apart where stages hold other tensors than they do.
        """
        key = (one.pp, one.schedule, one.zero_stage, self._alike(one))  # recomputation changes none of them
        if key not in self._axes:
            self._axes[key] = self._make_axes(one)
        return self._axes[key]

    def _make_axes(self, one: Structure) -> list[Axes]:
        every = self._every_degrees(one)
        sharing = [degrees for degrees in every if degrees[0] * one.pp < self.gpus]
        lone = [degrees for degrees in every if degrees[0] * one.pp == self.gpus]
        parts = [every if sharing else []] if self._alike(one) else [sharing]
        if self.stands_for_one(one) and not (sharing and self._alike(one)):
            parts.append(lone)
        experts = self._expert_pairs(one)
        found = []
        for held in parts:
            for vpps in self._vpps(one):
                axes = Axes(tuple(held), experts, self._micro_batches, self._sequence_parallel, vpps)
                if axes.size:
                    found.append(axes)
        return found

    def _alike(self, one: Structure) -> bool:
        """Whether a group of one rank holds the same tensors, and its host too, with and without a stage.

        Experts may be shared where the rest is not.
        """
        stage = one.zero_stage if isinstance(one.zero_stage, int) else 0
        return stage <= 1 and not self.has_experts and one.offload in ("none", "activations-cpu")

    def stands_for_one(self, one: Structure) -> bool:
        """Whether a structure stands for all sharding stages of layouts with nothing to shard.

        DeepSpeed's engine runs its stage all the same.
        """
        if "zero_stage" not in self.open or self.run.framework == "deepspeed":
            return True
        usual = 0 if self.run.framework == "megatron" else -1
        return bool(one.zero_stage == self._zero_stage_values[usual])

    def _every_degrees(self, one: Structure) -> list[tuple[int, int, int]]:
        stated = self.run.dp if isinstance(self.run.dp, int) else None
        found = []
        for tp, cp in product(self._tp_values, self._cp_values):
            taken = tp * cp * one.pp
            dp = self.gpus // taken
            if self.gpus % taken or stated not in (None, dp) or (tp * cp > 1 and self._replicates(one)):
                continue
            found += [(tp, cp, shard) for shard in self._shards(one, dp, cp)]
        return found

    def _shards(self, one: Structure, dp: int, cp: int) -> list[int]:
        """Data-parallel ranks that share one copy of what a stage divides."""
        if isinstance(self.run.dp_shard, int):
            return [self.run.dp_shard] if dp % self.run.dp_shard == 0 else []
        if self.run.dp_shard is None or one.zero_stage == 0 or not self._knows("dp_shard"):
            return [dp]
        if self.run.framework == "megatron" and one.zero_stage == 1:
            return [dp]  # copies hold more and gain nothing: what they sum travels as far as what all share
        return [shard for shard in divisors(dp) if shard * cp > 1 or dp == 1]  # else nothing is divided

    def _replicates(self, one: Structure) -> bool:
        """Whether a structure is torchtitan's plain data parallelism, which goes with no other degree."""
        open_ = self.run.framework == "torchtitan" and "zero_stage" in self.open
        return open_ and one.zero_stage == 0

    @cached_property
    def _tp_values(self) -> list[int]:
        if self.run.tp != "auto":
            return [self.run.tp] if self._fits(tp=self.run.tp) else []
        if not self.graph.stacks:
            return [1]
        limit = self.gpus if self.run.tp_across_nodes else self.domain
        return [t for t in divisors(self.gpus) if t <= limit and self._fits(tp=t)]

    @cached_property
    def _cp_values(self) -> list[int]:
        values = divisors(self.gpus) if self.run.cp == "auto" else [self.run.cp]
        if self.run.cp == "auto" and (not self.graph.stacks or self.has_states or not self._knows("cp")):
            return [1]
        return [c for c in values if not uneven_halves(self._degrees(cp=c))]

    def _expert_pairs(self, one: Structure) -> tuple[tuple[int, int], ...]:
        run, ranks = self.run, self.gpus // one.pp
        eps: list[Any] = [run.ep]
        if run.ep == "auto":
            eps = divisors(ranks) if self.has_experts and self._knows("ep") else [1]
        etps: list[Any] = [run.etp if isinstance(run.etp, int) else 1]
        if run.etp == "auto":  # whole experts, or divided as the rest is; `legal` says which of the two
            etps = sorted({1, *self._tp_values}) if self.has_experts and self._knows("etp") else [1]
        if self._replicates(one):
            eps = [ep for ep in eps if ep == 1]
        return tuple(pair for pair in product(eps, etps) if self._fits(ep=pair[0], etp=pair[1], pp=one.pp))

    @cached_property
    def _micro_batches(self) -> tuple[int, ...]:
        if isinstance(self.run.micro_batch, int):
            return (self.run.micro_batch,)
        if self.batch is not None:
            return tuple(divisors(self.batch))
        return tuple(2**power for power in range(MOST_FREE_MICRO_BATCH.bit_length()))

    @property
    def _sequence_parallel(self) -> tuple[bool, ...]:
        run = self.run
        if run.sequence_parallel != "auto":
            return (bool(run.sequence_parallel),)
        if run.framework == "torchtitan":  # always beside tp
            return (True,)
        if run.framework == "megatron" and self._knows(
            "sequence_parallel"
        ):  # asserts it where experts meet tp
            return (True,) if self.has_experts else (False, True)
        return (False,)

    def _vpps(self, one: Structure) -> list[tuple[int, ...]]:
        """Virtual stages by which layers come to lie on the same ranks."""
        if self.run.vpp != "auto":
            fits = self._fits(pp=one.pp, vpp=self.run.vpp)
            return [(self.run.vpp,)] if fits else []
        apart = one.schedule in (None, "1f1b") and self._knows("vpp")
        if one.pp == 1 or not apart or not self.graph.stacks:
            return [(1,)] if self._fits(pp=one.pp) else []
        return self._vpps_by_split[one.pp]

    @cached_property
    def _vpps_by_split(self) -> dict[int, list[tuple[int, ...]]]:
        found: dict[int, list[tuple[int, ...]]] = {}
        for pp in self._choices("pp"):
            alike: dict[Any, list[int]] = {}
            for vpp in range(1, max(self.layers // pp, 1) + 1) if pp > 1 else (1,):
                if self._fits(pp=pp, vpp=vpp):
                    split = tuple(composition(stage) for stage in stages(self.graph, pp=pp, vpp=vpp))
                    alike.setdefault(split, []).append(vpp)
            found[pp] = [tuple(vpps) for vpps in alike.values()]
        return found

    # -- what is legal ------------------------------------------------------------------------------

    def _degrees(self, **values: Any) -> Degrees:
        """Degrees with these values and nothing else divided."""
        alone: dict[str, Any] = {
            **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "micro_batch", "global_batch"), 1),
            "gpus": self.gpus,
            "seq_len": self.seq_len,
            "sequence_parallel": False,
            "even_pipeline": self.even,
        }
        return Degrees(**(alone | values))

    def _fits(self, **values: Any) -> bool:
        return not model_rules(self.graph, self._degrees(**values))

    def legal(self, one: Structure, axes: Mapping[str, Num]) -> Num:
        """Which candidates are layouts: of values along a structure's axes, numbers or columns.

        What a single axis rules out is not on it; these are the rules between axes.
        """
        tp, dp, sharing = axes["tp"], axes["dp"], axes["sequence_parallel"]
        d = self._degrees(
            pp=one.pp,
            **{key: axes[key] for key in _CROSSED},
            global_batch=axes["global_batch"],
        )
        broken = uneven_batch(d) | uneven_rounds(d) | uneven_tokens(d)
        if self.has_experts and self.run.dp_shard is not None:
            broken = broken | split_experts(d, axes["dp_shard"])
        if one.offload == "optimizer+gradients-cpu" and self.run.framework in ("ddp", "hf"):
            broken = broken | (d.global_batch > dp * d.micro_batch)
        if one.pp > 1 and one.schedule in DUAL_PIPES:
            count = d.global_batch // (dp * d.micro_batch)
            broken = broken | too_few_to_fold(one.pp, count) | uneven_ends(one.schedule, count)
        if self.run.grad_accum is not None and self.batch is not None:
            broken = broken | (self.run.grad_accum * d.micro_batch * dp != self.batch)
        if not self.stands_for_one(one):  # counted with another stage
            broken = broken | (tp * one.pp == self.gpus)
        if self.run.etp == "auto":  # other degrees cost exchanges that the formulas do not know
            broken = broken | ((axes["etp"] > 1) & (axes["etp"] != tp))
        if self.run.sequence_parallel == "auto":  # means nothing without tp: counted once
            first = self._sequence_parallel[0]
            broken = broken | (where(tp > 1, 0, 1) > where(sharing == first, 1, 0))
        return where(broken, 0, 1) > 0

    def global_batch(self, one: Structure, micro_batch: Num, dp: Num) -> Num:
        """Sequences per step: the run's, or what a layout takes where nobody says."""
        if self.batch is not None:
            return self.batch
        accum = one.pp if one.pp > 1 else 1
        if one.pp > 1 and one.schedule in DUAL_PIPES:
            accum = 2 * one.pp
        if self.run.grad_accum is not None:
            accum = self.run.grad_accum
        return accum * micro_batch * dp

    # -- one layout ---------------------------------------------------------------------------------

    def settled(self, values: Mapping[str, Any]) -> TrainRun:
        """The run with these values for what it leaves open, and what follows from them."""
        run = self.run
        update = {key: values[key] for key in self.open}
        if run.etp in (None, "auto"):
            update["etp"] = values["etp"]
        if "sequence_parallel" in update:
            update["sequence_parallel"] = values["sequence_parallel"] and values["tp"] > 1
        if "zero_stage" in update and run.reshard_after_forward is None:
            update["reshard_after_forward"] = values["zero_stage"] == 3 if values["zero_stage"] else None
        if values.get("recompute_modules") is not None:
            update["recompute_modules"] = values["recompute_modules"]
        if run.fused_loss is None:  # torchtitan compiles it with the model where tp does not divide it
            update["fused_loss"] = values["tp"] == 1
        changed = run.model_copy(update=update)
        return stage_defaults(changed)[0] if self._follows_stage else changed

    def followed(self, values: Mapping[str, Any]) -> tuple[Default, ...]:
        """What follows from the sharding stage of a layout, of keys that nobody set."""
        stage = {"zero_stage": values["zero_stage"]}
        return stage_defaults(self.run.model_copy(update=stage))[1] if self._follows_stage else ()

    @cached_property
    def _follows_stage(self) -> bool:
        """Whether the searched sharding stage decides about keys that nobody set."""
        return "zero_stage" in self.open and any(getattr(self.run, key) is None for key in STAGE_KEYS)

    def values(self, one: Structure, axes: Axes, place: tuple[int, ...]) -> dict[str, Any]:
        """The values of all keys at a place on the axes."""
        (tp, cp, shard), (ep, etp) = axes.degrees[place[0]], axes.experts[place[1]]
        return {
            "tp": tp, "pp": one.pp, "vpp": axes.vpps[place[4]], "cp": cp, "ep": ep, "etp": etp,
            "dp": self.gpus // (tp * cp * one.pp), "dp_shard": shard, "zero_stage": one.zero_stage,
            "micro_batch": axes.micro_batches[place[2]], "recompute": one.recompute,
            "sequence_parallel": axes.sequence_parallel[place[3]], "offload": one.offload,
            "schedule": one.schedule, "recompute_modules": one.modules,
        }  # fmt: skip

    def candidates(self) -> Iterator[dict[str, Any]]:
        """The values of every legal layout, one by one."""
        for one in self.structures():
            for axes in self.axes(one):
                for place in product(*(range(count) for count in axes.shape)):
                    values = self.values(one, axes, place)
                    batch = self.global_batch(one, values["micro_batch"], values["dp"])
                    if self.legal(one, values | {"global_batch": batch}):
                        yield values

    def size(self) -> int:
        """Candidates, among them some that are no legal layout."""
        return sum(axes.size for one in self.structures() for axes in self.axes(one))

    def refusal(self) -> Infeasible:
        """Why no layout is legal, in the words of the first one tried."""
        values: dict[str, Any] = dict.fromkeys(AUTO_KEYS, 1) | {
            key: self._choices(key)[0] for key in ("zero_stage", "schedule", "recompute", "offload")
        }
        dp = max(1, self.gpus // _product(self.run, ("tp", "pp", "cp")))
        values |= {"dp": dp, "dp_shard": dp, "sequence_parallel": False}
        try:
            resolve_layout(self.settled(values), self.graph, gpus=self.gpus)
        except Infeasible as error:
            return error
        return Infeasible(["no legal value for the keys left auto"])


def _product(run: TrainRun, keys: tuple[str, ...]) -> int:
    result = 1
    for key in keys:
        value = getattr(run, key)
        result *= value if isinstance(value, int) else 1
    return result
