"""The search over a job's layouts as tables: the best, memory against time, and the job's own layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpucalc import units
from gpucalc.layouts import SAID_BY_DEGREES, Layouts, Option, Size, one_copy
from gpucalc.plan.answer import Level, Verdict
from gpucalc.report.screen import QUIET, clean, columns, heading, indent, set_word, whole

# Keys in the order of the table, what heads them, and the value that says nothing.
HEADS = {
    "tp": ("tp", 1), "pp": ("pp", 1), "vpp": ("vpp", 1), "cp": ("cp", 1), "ep": ("ep", 1), "etp": ("etp", 1),
    "dp": ("dp", None), "dp_shard": ("shard", None), "zero_stage": ("zero", None),
    "micro_batch": ("mb", None),
    "recompute": ("recomp", "none"), "recompute_modules": ("modules", None),
    "sequence_parallel": ("sp", False), "offload": ("offload", "none"),
    "schedule": ("schedule", None),
}  # fmt: skip
# Words that would push a table of every key past eighty columns.
SHORT = {
    "selective": "sel", "selective-op": "sel-op", "selective-layer": "sel-layer", "zero-bubble": "zb",
    "dualpipe-v": "dual-v", "interleaved": "1f1b", "optimizer-cpu": "opt", "params+optimizer-cpu": "opt+par",
    "activations-cpu": "act", "optimizer+gradients-cpu": "opt+grad", "optimizer-nvme": "nvme",
    "params+optimizer-nvme": "nvme+par",
}  # fmt: skip
MODULES = {
    "core_attn": "attn", "layernorm": "ln", "moe_act": "act", "mla_up_proj": "up", "shared_experts": "shared",
}  # fmt: skip
LEAST_SHARE = 0.002  # of the step: smaller differences between two layouts are not listed


def report(found: Layouts, command: str) -> RenderableType:
    """The whole answer of a search; `command` plans the job as it is."""
    parts: list[RenderableType] = [heading(f"{found.name} on {found.best.fleet}: {_ranked(found)}")]
    parts.append(Text(_effort(found), QUIET))
    if found.held:
        parts.append(Text("held: " + ", ".join(f"{key} {_value(v)}" for key, v in found.held.items()), QUIET))
    parts += [
        Text(),
        heading("Best layouts" if found.fitting else "No layout fits; the one that needs least"),
    ]
    parts.append(indent(_table(found.options, found.own_option)))
    if not found.fitting:
        parts.append(indent(Text(_lacking(found.best.verdict))))
    parts += [Text(), *_own(found)]
    if len(found.front) > 1:
        parts += [Text(), heading("Memory against time: less memory is only had for a slower step")]
        parts.append(indent(_table(found.front, None)))
    if found.sizes:
        parts += [Text(), heading("Fewer of the same GPUs"), indent(_sizes(found.sizes))]
        per = "samples" if all(size.sample_tokens == 1 for size in found.sizes) else "tokens"
        if any(size.gpu_hour_known for size in found.sizes):
            parts.append(indent(Text(f"/M: of a million {per}, without what failures take", QUIET)))
    parts += _legend([*found.options, *found.front])
    if any(row.level is Level.MARGINAL for row in (*found.options, *found.front)):
        parts += [Text(), Text("~ marginal: fits or not within the expected error of memory", QUIET)]
    return Group(*parts, Text(), *_again(found, command))


def _lacking(verdict: Verdict) -> str:
    """What the layout that needs least still lacks, of a GPU or of its host."""
    host = verdict.host
    if verdict.host_decides and host is not None and host.capacity is not None:
        needed, held = host.needed.value, host.capacity.value
        return f"a node's host needs {units.gib(needed)} and has {units.gib(held)}"
    return f"a GPU needs {units.gib(verdict.needed.value)} and has {units.gib(verdict.capacity.value)}"


def _ranked(found: Layouts) -> str:
    return {
        "time": "the fastest layout",
        "cost": "the cheapest layout and number of GPUs",
        "energy": "the layout and number of GPUs that take least energy",
        "gpus": "the fewest GPUs, and the fastest layout on them",
    }[found.ranked_by]


def _effort(found: Layouts) -> str:
    how = "" if found.in_columns else ", one by one"
    return (
        f"{found.legal:,} legal layouts, {found.fitting:,} fit; evaluated in {units.seconds(found.seconds)}"
        f" of one core{how}: {_rate(found.per_second)} layouts/s"
    )


def _rate(per_second: float) -> str:
    return f"{per_second / 1e6:.2f} million" if per_second >= 1e5 else whole(round(per_second))


def _table(options: Sequence[Option], own: Option | None) -> RenderableType:
    """Layouts as rows; keys on which none says anything are left out."""
    rows = [*options, *([own] if own is not None else [])]
    told = [key for key in HEADS if key != "recompute_modules"]  # which stand in the place of "selective"
    keys = [key for key in told if any(not idle(key, row.keys) for row in rows)]
    heads = [*(HEADS[key][0] for key in keys), "step", "GiB", ""]
    numbers = [index for index, key in enumerate(keys) if not isinstance(rows[0].keys[key], str)]
    right = (*numbers, len(keys), len(keys) + 1)
    table = columns(*heads, right=right, whole=range(len(heads)), gap=1)
    fastest = min((row.step_s for row in options if row.step_s is not None), default=None)
    for row in rows:
        mark = _mark(row, fastest) + (" yours" if row is own else "")
        table.add_row(
            *(_cell(key, row.keys) for key in keys),
            "" if row.step_s is None else units.seconds(row.step_s),
            f"{row.needed_bytes / units.GIB:,.1f}{'~' if row.level is Level.MARGINAL else ' '}",
            mark.strip(),
        )
    return table


def idle(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether a key's value says nothing: a degree of one, or what the degrees say already."""
    if key == "schedule":
        return keys[key] in SAID_BY_DEGREES
    if key == "dp_shard":
        return one_copy(keys)
    if key == "recompute_modules":
        return keys[key] is None
    idle = HEADS[key][1]
    return idle is not None and keys[key] == idle


def _cell(key: str, keys: Mapping[str, Any]) -> str:
    """A value in a row; of a selective recomputation its modules."""
    modules = keys["recompute_modules"] if key == "recompute" else None
    if modules is not None:
        return "+".join(MODULES.get(name, clean(name)) for name in modules)
    said = _value(keys[key])
    return SHORT.get(said, said)


def _legend(rows: Sequence[Option]) -> list[RenderableType]:
    """What the short names of modules made again stand for."""
    named = [name for row in rows for name in row.keys["recompute_modules"] or ()]
    short = [f"{MODULES[name]} {name}" for name in dict.fromkeys(named) if name in MODULES]
    said = f"recomp: selective, of the modules named: {', '.join(short)}"
    return [Text(), Text(said, QUIET)] if named else []


def _mark(row: Option, fastest: float | None) -> str:
    if row.level is Level.DOES_NOT_FIT:
        return "no fit"
    if row.step_s is None or fastest is None or row.step_s == fastest:
        return ""
    slower = row.step_s / fastest - 1
    return f"{'+' if slower >= 0 else '-'}{abs(slower):.{0 if abs(slower) >= 0.5 else 1}%}"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "+".join(map(clean, value))
    words = {True: "yes", False: "no", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else clean(value)


def _own(found: Layouts) -> Iterator[RenderableType]:
    """Why the job's own layout is not the best."""
    yield heading("Your layout")
    if found.own_broken:
        yield indent(Text("is not legal: " + "; ".join(clean(rule) for rule in found.own_broken)))
        return
    if found.own is None or found.own_option is None:
        return
    differing = found.differing()
    if not differing:
        yield indent(Text("is the best"))
        return
    told = ", ".join(f"{key} {_value(own)} -> {_value(best)}" for key, (own, best) in differing.items())
    own, best = found.own_option, found.options[0]
    if own.level is Level.DOES_NOT_FIT:
        verdict = found.own.verdict
        yield indent(
            Text(
                f"does not fit: needs {units.gib(own.needed_bytes)}, has {units.gib(verdict.capacity.value)};"
                f" largest part there: {clean(verdict.binds)}"
            )
        )
    elif own.step_s is not None and best.step_s is not None:
        slower = own.step_s / best.step_s - 1
        words = "slower" if slower >= 0 else "faster, but marginal"
        yield indent(Text(f"is {units.percent(abs(slower), 1)} {words} than the best, with {told}"))
    terms = [
        row
        for row in found.terms()
        if found.own.time is not None and abs(row[1] - row[2]) > LEAST_SHARE * float(found.own.time.value)
    ]
    if not terms:
        return
    table = columns("part of the step", "yours", "best", "lost", right=(1, 2, 3), whole=range(4))
    for name, mine, other in terms:
        table.add_row(clean(name), units.seconds(mine), units.seconds(other), _lost(mine - other))
    yield indent(table)


def _lost(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{units.seconds(abs(value))}"


def _sizes(sizes: Sequence[Size]) -> RenderableType:
    heads = ["GPUs", "step", "samples/s", "memory", "GPU-s a sample"]
    priced = any(size.usd_per_million is not None for size in sizes)
    powered = any(size.kwh_per_million is not None for size in sizes)
    heads += ["$/M"] * priced + ["kWh/M"] * powered
    table = columns(*heads, right=range(len(heads)), whole=range(len(heads)))
    for size in sizes:
        option = size.option
        if option is None or option.step_s is None or option.samples_per_s is None:
            table.add_row(whole(size.gpus), "no layout")
            continue
        table.add_row(
            whole(size.gpus),
            units.seconds(option.step_s),
            whole(option.samples_per_s),
            units.gib(option.needed_bytes),
            f"{size.gpu_s_per_sample or 0:.4g}",
            *([f"{size.usd_per_million or 0:.4g}"] if priced else []),
            *([f"{size.kwh_per_million or 0:.4g}"] if powered else []),
        )
    return table


def _again(found: Layouts, command: str) -> Iterator[RenderableType]:
    """How to plan with the layout found."""
    said = " ".join(f"--set {_setting(key, value)}" for key, value in found.settings().items())
    if said:
        yield Text(f"plan it: {command} {said}", QUIET)


def _setting(key: str, value: Any) -> str:
    """A key and its value as a shell takes them."""
    said = f"run.{key}={set_word(value)}"
    return f"'{said}'" if "[" in said else said
