"""The machine a plan runs on: its nodes, what joins the GPUs in them, and how the model lies over it."""

from __future__ import annotations

from collections.abc import Iterator

from gpucalc import units
from gpucalc.plan.answer import Plan, Split
from gpucalc.report import mixed
from gpucalc.report.html.ledger import Ledger
from gpucalc.report.html.pieces import Row, Section, figure, section, table
from gpucalc.report.markup import Html, join, short, tag
from gpucalc.report.svg.bars import Bar, Piece, stacks
from gpucalc.report.svg.topology import Node, topology
from gpucalc.spec.hardware import Cluster, Pool

_DRAWN = 64  # GPUs of a node that are told apart


def machine(answer: Plan, cluster: Cluster | None, ledger: Ledger) -> Section | None:
    """The topology section."""
    if cluster is None:
        return None
    nodes = list(_nodes(answer, cluster))
    network = _network(cluster)
    label = f"Topology of {short(answer.fleet)}: {_count(len(nodes), 'node')}"
    parts = [
        f"{pool.nodes} x {pool.gpus_per_node} {pool.gpu.name} joined by {link_words(pool)}"
        for pool in cluster.pools
    ]
    told = "; ".join([label, *parts, *([network] if network else [])])
    return section(
        "topology",
        "Topology",
        figure(topology(nodes, network, told), _caption(answer)),
        table("The machine", ("what", "value", "of"), _rows(cluster, ledger), numbers=1, name="facts"),
    )


def unlike(answer: Plan) -> Section | None:
    """The ways of running on unlike cards: each kind's memory in the one that wins, and how they compare."""
    if not answer.splits:
        return None
    content: list[Html] = []
    if (won := next((split for split in answer.splits if split.wins and split.parts), None)) is not None:
        bars = [
            Bar(
                f"{part.gpus} x {part.gpu}",
                f"{units.gib(part.needed_bytes)} of {units.gib(part.capacity_bytes)}",
                [Piece("needed", part.needed_bytes / part.capacity_bytes, f"s{number % 8}")],
            )
            for number, part in enumerate(won.parts)
        ]
        told = "; ".join(f"{bar.label} {bar.amount}" for bar in bars)
        caption = f"Memory of each kind of card as a share of its own: {won.how}"
        picture = stacks(bars, 1.0, "each card's own limit", _share, f"{caption}. {told}", 1.0)
        content.append(figure(picture, caption))
    heads = ("way", "fits", "batch", "step", "tokens/s")
    rows = (_way(split) for split in answer.splits)
    content.append(table("The best way first", heads, rows, numbers=4, name="wide"))
    return section("unlike", "How to use unlike cards", content)


def _way(split: Split) -> Row:
    name, *numbers = mixed.cells(split)
    shown = tag("b", name) if split.wins else name
    more = (tag("div", words, class_="more") for words in mixed.below(split))
    return (join(shown, more), *numbers)


def _share(value: float) -> str:
    return units.percent(value, 0)


def link_words(pool: Pool) -> str:
    """What joins the GPUs of a node."""
    if pool.gpus_per_node < 2 and pool.nvlink_domain < 2:
        return "one GPU in the node"
    gpu = pool.gpu
    if pool.nvlink_domain > 1 and gpu.nvlink_bandwidth is not None:
        kind = gpu.nvlink_kind or "NVLink"
        over = f" over {pool.nvlink_domain}" if pool.nvlink_domain != pool.gpus_per_node else ""
        return f"{kind}{over}, {units.gb_per_s(gpu.nvlink_bandwidth.si / 2)} one way"
    lanes = f" x{gpu.pcie_lanes}" if gpu.pcie_lanes else ""
    return f"PCIe {gpu.pcie_gen}{lanes}" if gpu.pcie_gen else pool.intra.name


def _nodes(answer: Plan, cluster: Cluster) -> Iterator[Node]:
    layout = answer.layout
    first, named = 0, 0
    for pool in cluster.pools:
        for number in range(pool.nodes):
            named += 1
            held = min(pool.gpus_per_node, pool.count - number * pool.gpus_per_node)
            stages = [_stage(first + at, answer, cluster.count) for at in range(min(held, _DRAWN))]
            gpus = [
                (
                    f"{stage}" if layout.pp > 1 else str(first + at),
                    f"s{stage % 8}" if layout.pp > 1 else "s0",
                    f"GPU {first + at}" + (f", pipeline stage {stage}" if layout.pp > 1 else ""),
                )
                for at, stage in enumerate(stages)
            ]
            gpus += [("", "s0", "")] * max(0, held - _DRAWN)
            alone = pool.nodes == 1 and len(cluster.pools) == 1
            name = pool.gpu.name if alone else f"node {named}, {pool.gpu.name}"
            yield Node(name, link_words(pool), gpus)
            first += held


def _stage(gpu: int, answer: Plan, count: int) -> int:
    """The pipeline stage on a GPU: stages are the outermost groups of a run, the inner ones of an engine."""
    layout = answer.layout
    if layout.pp < 2:
        return 0
    if answer.serves:
        return int(gpu // layout.tp % layout.pp)
    return int(min(gpu // max(1, count // layout.pp), layout.pp - 1))


def _network(cluster: Cluster) -> str:
    nodes = sum(pool.nodes for pool in cluster.pools)
    if nodes < 2:
        return ""
    rate = cluster.nic_bandwidth_per_node
    return "network" if rate is None else f"network, {units.gb_per_s(rate.value)} per node"


def _caption(answer: Plan) -> str:
    layout = answer.layout
    if answer.serves:
        one = layout.engine_gpus
        words = f"One copy of the model takes {_count(one, 'GPU')}; {_count(layout.caches, 'cache')}."
    else:
        one = layout.tp * layout.pp * layout.cp
        words = (
            f"One copy of the model's layers takes {_count(one, 'GPU')}, {_count(layout.dp, 'copy')} in all."
        )
    if layout.pp > 1:
        words += " Colours and numbers are pipeline stages."
    return words


def _count(number: int, word: str) -> str:
    """So many of something."""
    return (
        f"{number:,} {word}"
        if number == 1
        else f"{number:,} {word[:-1] + 'ie' if word[-1] == 'y' else word}s"
    )


def _rows(cluster: Cluster, ledger: Ledger) -> Iterator[Row]:
    kinds = ", ".join(f"{pool.count} x {pool.gpu.name}" for pool in cluster.pools)
    yield ("GPUs", f"{cluster.count:,}", kinds)
    for pool in cluster.pools:
        gpu = pool.gpu
        lines = [gpu.usable_memory(), gpu.memory_bandwidth.line("memory_bandwidth")]
        if gpu.nvlink_bandwidth is not None and pool.nvlink_domain > 1:
            lines.append(gpu.nvlink_bandwidth.line("link_bandwidth_both_ways"))
        for line in lines:
            yield (ledger.opened(line), ledger.value(line.value, line.unit), gpu.name)
    for fact in (cluster.nic_bandwidth_per_node, cluster.host_ram, cluster.node_power):
        if fact is not None:
            yield (ledger.opened(fact), ledger.value(fact.value, fact.unit), "of one node")
