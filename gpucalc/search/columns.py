"""A space of layouts evaluated in numpy columns, by the formulas that plan a single layout.

The axes of a structure are arrays that broadcast against each other, so that what depends on tp alone
is worked out once per tp and not once per layout; blocks are cut to stay in a core's cache. Of what
fits, the best and the front of memory against time are kept, nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gpucalc.num import Mixed, Num, is_scalar, maximum, where
from gpucalc.plan import memory
from gpucalc.plan import time as times
from gpucalc.plan.layout import Layout, Recipe
from gpucalc.plan.resolve import resolve_recipe
from gpucalc.plan.time import step_time
from gpucalc.search.found import RIVALS, UNFIT, Candidate, Found, merit
from gpucalc.search.frameworks import Structure
from gpucalc.search.space import Axes, Space
from gpucalc.search.worth import Scale

CELLS_AT_A_TIME = 131_072  # a block's float64 columns, half a MiB each, stay in the last level of cache
# Axes of no more cells keep what their layouts have in common; it would be hundreds of megabytes of more.
CELLS_KEPT = 2 * CELLS_AT_A_TIME

Column = Any  # a numpy array of five axes that broadcasts to a block, or one number
Progress = Callable[[int, int], None]


def search(space: Space, scale: Scale, *, keep: int, progress: Progress | None = None) -> Found:
    """Every legal layout of a space: the best few, the front, and counts."""
    began = time.process_time()
    keeper = _Keeper(keep)
    sharing: dict[tuple[Any, Axes], list[Structure]] = {}
    for one in space.structures():
        for axes in space.axes(one):
            sharing.setdefault(((one.pp, one.schedule), axes), []).append(one)
    done, total = 0, sum(map(len, sharing.values()))
    with np.errstate(all="ignore"):  # candidates that are no layouts may divide by nothing
        for (_, axes), structures in sharing.items():
            _share(space, scale, axes, structures, keeper)
            done += len(structures)
            if progress is not None:
                progress(done, total)
    found = keeper.found(space)
    found.seconds = time.process_time() - began
    found.in_columns = True
    return found


def _share(space: Space, scale: Scale, whole: Axes, structures: list[Structure], keeper: _Keeper) -> None:
    """Structures on the same axes, which have in common what their stages do."""
    made: dict[tuple[Axes, bool], _Columns] = {}
    known: dict[Axes, _Known] = {}
    for one in structures:
        for axes, recipe in _by_recipe(space, scale, one, whole):
            for cut in _cuts(axes):
                key = (cut, space.stands_for_one(one))
                if key not in made:
                    made[key] = _Columns(space, one, cut)
                if made[key].legal_count:
                    kept = _Known() if axes.size > CELLS_KEPT else known.setdefault(cut, _Known())
                    _block(space, scale, one, made[key], recipe, kept, keeper)


def _by_recipe(space: Space, scale: Scale, one: Structure, axes: Axes) -> Iterator[tuple[Axes, Recipe]]:
    """The axes with their recipe; where tp decides about it (how weights load, the loss), in parts."""
    recipes: dict[bool, Recipe] = {}
    for number, (tp, _, _) in enumerate(axes.degrees):
        if (tp == 1) not in recipes:
            place = (number, 0, 0, 0, 0)
            recipes[tp == 1] = resolve_recipe(space.settled(space.values(one, axes, place)), scale.graph)
    first = next(iter(recipes.values()))
    if all(recipe == first for recipe in recipes.values()):
        yield axes, first
        return
    for alone, recipe in recipes.items():
        part = tuple(degrees for degrees in axes.degrees if (degrees[0] == 1) == alone)
        yield replace(axes, degrees=part), recipe


def _cuts(axes: Axes) -> Iterator[Axes]:
    """Blocks of axes of no more than so many cells."""
    if axes.size <= CELLS_AT_A_TIME:
        yield axes
        return
    names = [field.name for field in fields(axes)]
    name = max(names, key=lambda name: len(getattr(axes, name)))
    values = getattr(axes, name)
    for part in (values[: len(values) // 2], values[len(values) // 2 :]):
        yield from _cuts(replace(axes, **{name: part}))


class _Columns:
    """The columns of a block's axes, and which of its cells are legal layouts."""

    def __init__(self, space: Space, one: Structure, axes: Axes) -> None:
        self.space, self.axes = space, axes
        tp, cp, shard = (_column([degrees[side] for degrees in axes.degrees], 0) for side in range(3))
        ep, etp = (_column([pair[side] for pair in axes.experts], 1) for side in (0, 1))
        micro_batch = _column(axes.micro_batches, 2)
        self.shared = any(degrees[0] * one.pp < space.gpus for degrees in axes.degrees)  # over dp and cp
        dp = space.gpus // (tp * cp * one.pp)
        self.batch: Column = space.global_batch(one, micro_batch, dp)
        columns: dict[str, Any] = {
            "tp": tp, "cp": cp, "ep": ep, "etp": etp, "dp": dp, "shard": maximum(1, shard * cp),
            "micro_batch": micro_batch, "vpp": _column(axes.vpps, 4),
            "sequence_parallel": _column(axes.sequence_parallel, 3),
        }  # fmt: skip
        self.columns = columns | {"micro_batches": maximum(1, self.batch // (dp * micro_batch))}
        legal = space.legal(one, columns | {"global_batch": self.batch, "dp_shard": shard})
        self.legal = np.broadcast_to(legal, axes.shape)
        self.legal_count = int(np.count_nonzero(self.legal))

    def layout(self, one: Structure) -> Layout:
        """The layouts of a structure. With nothing to shard, no stage does."""
        stage = one.zero_stage if isinstance(one.zero_stage, int) and self.shared else 0
        schedule = "none" if one.pp == 1 else one.schedule or "1f1b"
        layout = Layout(pp=one.pp, zero_stage=stage, schedule=schedule, **self.columns)
        return replace(layout, stage_layers=self.space.dealt_layers(layout.pipeline_stages))


def _column(values: Any, axis: int) -> Column:
    """Values along one axis of five, or the one number they all are."""
    if len(set(values)) == 1:
        return values[0]
    shape = [1] * 5
    shape[axis] = len(values)
    kind = bool if isinstance(values[0], bool) else float
    return np.array(values, dtype=kind).reshape(shape)


def _block(
    space: Space,
    scale: Scale,
    one: Structure,
    columns: _Columns,
    recipe: Recipe,
    known: _Known,
    keeper: _Keeper,
) -> None:
    try:
        _weigh(space, scale, one, columns, recipe, known, keeper)
    except Mixed as mixed:
        for axes in _split(columns.axes, np.asarray(mixed.condition)):
            part = _Columns(space, one, axes)
            if part.legal_count:
                _block(space, scale, one, part, recipe, _Known(), keeper)


def _split(axes: Axes, condition: Column) -> tuple[Axes, Axes]:
    """Two parts of a block: where a condition holds along an axis it changes along, and the rest."""
    names = [field.name for field in fields(axes)]
    changes = [axis for axis, size in enumerate(condition.shape) if size > 1]
    for axis in changes:
        others = tuple(other for other in range(condition.ndim) if other != axis)
        held = condition.all(axis=others)
        if held.any():  # else no value of this axis settles it
            break
    else:
        axis = changes[0]
        held = np.arange(condition.shape[axis]) < condition.shape[axis] // 2
    values = getattr(axes, names[axis])
    part = tuple(value for value, here in zip(values, held, strict=True) if here)
    rest = tuple(value for value, here in zip(values, held, strict=True) if not here)
    return replace(axes, **{names[axis]: part}), replace(axes, **{names[axis]: rest})


def _weigh(
    space: Space,
    scale: Scale,
    one: Structure,
    columns: _Columns,
    recipe: Recipe,
    known: _Known,
    keeper: _Keeper,
) -> None:
    layout = columns.layout(one)
    run = space.run
    trees = _memory(scale, layout, recipe, known, columns.legal)
    needed, ranks = trees[-1].value, [scale.ranks_of(tree, layout, recipe, run) for tree in trees]
    held, host = ranks[-1]
    if len(trees) == 2:  # held whole where there is one micro-batch, added up where there are more
        single = layout.micro_batches <= 1
        needed = where(single, trees[0].value, needed)
        held = where(single, ranks[0][0], held)
    del trees  # every line of them holds a column
    tier = where(maximum(held, host) == 2, UNFIT, held + host)
    fits = columns.legal & (tier < UNFIT)
    seconds: Column = np.inf
    if fits.any():
        seconds = step_time(scale.graph, layout, recipe, scale.cluster, known=known.times).value
    keeper.add(one, columns, fits, tier, needed, seconds)


def _memory(scale: Scale, layout: Layout, recipe: Recipe, known: _Known, legal: Any) -> list[Any]:
    """The memory tree; two where one micro-batch and several leave different tensors, both of them legal."""
    count: Num = layout.micro_batches
    if recipe.framework == "megatron" or is_scalar(count) or not (count <= 1).any() or (count <= 1).all():
        return [scale.memory(layout, recipe, known.layers)]
    single = np.broadcast_to(count <= 1, legal.shape)[legal]
    several = np.maximum(count, 2)
    counts = [several] if not single.any() else [1] if single.all() else [1, several]
    return [scale.memory(replace(layout, micro_batches=one), recipe, known.layers) for one in counts]


class _Known:
    """What a block's layouts have in common whatever their sharding, schedule and offload."""

    def __init__(self) -> None:
        self.layers: memory.Known = {}
        self.times: times.Known = {}


class _Keeper:
    """The best cells so far, the front, and counts."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.legal = self.fitting = self.timed = 0
        # tier, seconds a sample, bytes, structure, axes, place, seconds a step
        self.best: list[tuple[Any, ...]] = []
        self.rivals: dict[tuple[int, int], list[tuple[Any, ...]]] = {}  # by pp and vpp, best first
        self.front_memory = np.empty(0, dtype=np.float32)
        self.front_spent = np.empty(0, dtype=np.float32)
        self.front: list[tuple[Any, ...]] = []
        self.least: tuple[Any, ...] | None = None

    def add(
        self, one: Structure, columns: _Columns, fits: Any, tier: Column, needed: Column, seconds: Column
    ) -> None:
        """Take what is worth keeping of a block."""
        axes, shape = columns.axes, columns.axes.shape
        self.legal += columns.legal_count
        where_fits = np.flatnonzero(fits)
        if not where_fits.size:
            self._keep_least(one, columns, needed)
            return
        self.fitting += where_fits.size
        self.timed += columns.legal_count
        wide_s = np.broadcast_to(seconds, shape).ravel()[where_fits]
        held = np.broadcast_to(needed, shape).ravel()[where_fits]
        tiers = np.broadcast_to(tier, shape).ravel()[where_fits]
        pace = wide_s / np.broadcast_to(columns.batch, shape).ravel()[where_fits]
        order = self._leading(tiers, pace, held)
        for index in order:
            self.best.append(self._entry(one, axes, where_fits, tiers, pace, held, wide_s, index))
        self._trim()
        self._keep_rivals(one, axes, where_fits, tiers, pace, held, wide_s)
        self._extend_front(one, axes, where_fits, tiers, pace, held, wide_s)

    @staticmethod
    def _entry(
        one: Structure, axes: Axes, cells: Any, tiers: Any, pace: Any, held: Any, seconds: Any, index: int
    ) -> tuple[Any, ...]:
        return (
            int(tiers[index]),
            float(pace[index]),
            float(held[index]),
            one,
            axes,
            int(cells[index]),
            float(seconds[index]),
        )

    def _leading(self, tiers: Any, pace: Any, held: Any) -> Any:
        """The places of the best of a block that may belong to the best of all."""
        places = np.arange(len(pace))
        if len(self.best) >= self.keep:
            worst = self.best[self.keep - 1][:2]
            places = np.flatnonzero((tiers < worst[0]) | ((tiers == worst[0]) & (pace <= worst[1])))
        if len(places) > self.keep:
            least = tiers[places].min()
            lead = places[tiers[places] == least]
            if len(lead) > self.keep:
                bound = np.partition(pace[lead], self.keep - 1)[self.keep - 1]
                places = lead[pace[lead] <= bound]
        order = np.lexsort((held[places], pace[places], tiers[places]))
        return places[order[: self.keep]]

    def _keep_rivals(
        self, one: Structure, axes: Axes, cells: Any, tiers: Any, pace: Any, held: Any, seconds: Any
    ) -> None:
        """The best of each vpp of the block; vpp is the index of a cell that runs fastest."""
        if one.pp == 1:
            return
        places = cells % len(axes.vpps)
        for number, vpp in enumerate(axes.vpps):
            mine = np.flatnonzero(places == number)
            if not mine.size:
                continue
            least = mine[tiers[mine] == tiers[mine].min()]
            if len(least) > RIVALS:
                least = least[np.argpartition(pace[least], RIVALS)[:RIVALS]]
            known = self.rivals.setdefault((one.pp, vpp), [])
            known += [self._entry(one, axes, cells, tiers, pace, held, seconds, index) for index in least]
            known.sort(key=lambda entry: entry[:3])
            del known[RIVALS:]

    def _trim(self) -> None:
        self.best.sort(key=lambda entry: entry[:3])
        del self.best[self.keep :]

    def _extend_front(
        self, one: Structure, axes: Axes, cells: Any, tiers: Any, pace: Any, held: Any, seconds: Any
    ) -> None:
        # In single precision, as `front_place`: what differs by rounding alone is one on the front.
        memory, spent = held.astype(np.float32), pace.astype(np.float32)
        if len(self.front):
            below = np.searchsorted(self.front_memory, memory, side="right") - 1
            beaten = (below >= 0) & (self.front_spent[np.maximum(below, 0)] <= spent)
            fresh = np.flatnonzero(~beaten)
        else:
            fresh = np.arange(len(pace))
        if not fresh.size:
            return
        order = fresh[np.lexsort((spent[fresh], memory[fresh]))]
        best_before = np.minimum.accumulate(np.concatenate(([np.inf], spent[order][:-1])))
        order = order[spent[order] < best_before]
        entries = [self._entry(one, axes, cells, tiers, pace, held, seconds, index) for index in order]
        merged = sorted([*self.front, *entries], key=lambda entry: tuple(map(np.float32, entry[2:0:-1])))
        self.front, fastest = [], np.float32(np.inf)
        for entry in merged:
            if np.float32(entry[1]) < fastest:
                self.front.append(entry)
                fastest = np.float32(entry[1])
        self.front_memory = np.array([entry[2] for entry in self.front], dtype=np.float32)
        self.front_spent = np.array([entry[1] for entry in self.front], dtype=np.float32)

    def _keep_least(self, one: Structure, columns: _Columns, needed: Column) -> None:
        if self.best:
            return
        wide = np.where(columns.legal, needed, np.inf).ravel()
        place = int(wide.argmin())
        if self.least is None or wide[place] < self.least[2]:
            self.least = (UNFIT, np.inf, float(wide[place]), one, columns.axes, place, np.inf)

    def found(self, space: Space) -> Found:
        """What was kept, as candidates."""
        self._trim()
        entries = self.best or ([self.least] if self.least is not None else [])
        best = [_candidate(space, entry) for entry in entries]
        best.sort(key=merit)
        return Found(
            best=best,
            rivals=[_candidate(space, entry) for known in self.rivals.values() for entry in known],
            front=[_candidate(space, entry) for entry in self.front],
            legal=self.legal,
            fitting=self.fitting,
            timed=self.timed,
        )


def _candidate(space: Space, entry: tuple[Any, ...]) -> Candidate:
    tier, pace, needed, one, axes, place, seconds = entry
    values = space.values(one, axes, np.unravel_index(place, axes.shape))
    return Candidate(values, tier, needed, seconds, 1 / pace if pace < np.inf else 0.0)
