"""Rules of three planning documents about links, power and the machine, and what holds against them.

The documents: "multi-GPU architectures", "single-machine multi-card deployment" and "task selection and
deployment". Link rates are one way unless the name says both ways.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.formulas.comm import all_reduce_bus_factor, gather_bus_factor
from gpucalc.num import Num, ceil_div, floor_div, log2, minimum

_ARCHITECTURES = 'Document "multi-GPU architectures"'
_SINGLE_MACHINE = 'Document "single-machine multi-card deployment"'
_SELECTION = 'Document "task selection and deployment"'
_NCCL = "NVIDIA/nccl 2.30.7 src/graph/tuning.cc"
_ARITHMETIC = "Arithmetic"

# --- links -----------------------------------------------------------------------------------------


@formula(unit="bytes/s", source="PCI-SIG: 128b/130b coding from generation 3 on, before packet headers")
def lane_bytes_per_s(*, transfers_per_s: Num, lanes: Num) -> Num:
    """One-way line rate of so many lanes."""
    return transfers_per_s * lanes * 128 / 130 / 8


@formula(unit="bytes/s", source=_ARITHMETIC)
def both_ways_bytes_per_s(*, one_way_bytes_per_s: Num) -> Num:
    """Both directions summed, as links are advertised."""
    return 2 * one_way_bytes_per_s


@formula(unit="ratio", source=_ARITHMETIC)
def times_as_much(*, quantity: Num, reference: Num) -> Num:
    """One quantity over another of the same unit."""
    return quantity / reference


@formula(unit="s", source="NVIDIA nccl-tests, doc/PERFORMANCE.md; latency left out")
def all_reduce_transfer_s(*, message_bytes: Num, ranks: Num, bus_bytes_per_s: Num) -> Num:
    """Time of a large all-reduce: 2 (n - 1) / n of the message at the bus bandwidth."""
    return message_bytes * all_reduce_bus_factor(ranks=ranks) / bus_bytes_per_s


@formula(unit="bytes/s", source="NVIDIA nccl-tests, doc/PERFORMANCE.md")
def measured_bus_bytes_per_s(*, message_bytes: Num, seconds_s: Num, ranks: Num) -> Num:
    """Bus bandwidth a timed all-reduce shows."""
    return message_bytes / seconds_s * all_reduce_bus_factor(ranks=ranks)


@formula(unit="hops", source=_NCCL + ": nsteps = 2 (nRanks - 1) for an all-reduce")
def ring_hops(*, ranks: Num) -> Num:
    """Latency steps of a ring all-reduce: linear in the ranks."""
    return 2 * (ranks - 1)


@formula(unit="hops", source=_NCCL + ": 2 ((ranks / nodes - 1) inside + log2(nodes) between)")
def tree_hops(*, ranks: Num, nodes: Num) -> Num:
    """Latency steps of a double binary tree: the logarithm is of the nodes, not of the cards."""
    return 2 * (ranks / nodes - 1 + log2(nodes))


@formula(unit="s", source="One ring over a node's only network card; latency left out")
def flat_all_reduce_s(*, message_bytes: Num, ranks: Num, network_bytes_per_s: Num) -> Num:
    """All-reduce of one ring through every rank, at the rate of the network card it passes."""
    return message_bytes * all_reduce_bus_factor(ranks=ranks) / network_bytes_per_s


@formula(unit="s", source=_ARCHITECTURES + ", section 3.1: hierarchical AllReduce; latency left out")
def hierarchical_all_reduce_s(
    *,
    message_bytes: Num,
    ranks_per_node: Num,
    nodes: Num,
    link_bytes_per_s: Num,
    network_bytes_per_s: Num,
) -> Num:
    """Reduce inside the nodes, all-reduce between them, gather inside them.

    All shares of a node pass its one network card.
    """
    return (
        2 * gather_bus_factor(ranks=ranks_per_node) * message_bytes / link_bytes_per_s
        + all_reduce_bus_factor(ranks=nodes) * message_bytes / network_bytes_per_s
    )


@formula(unit="ratio", source=_SINGLE_MACHINE + ", section 4.1: communication share before and after")
def share_speedup(*, share_before: Num, share_after: Num) -> Num:
    """Speed-up when the share of communication falls and the computation stays."""
    return (1 - share_after) / (1 - share_before)


# --- speed-ups and unlike cards --------------------------------------------------------------------


@formula(unit="fraction", source=_ARITHMETIC)
def speedup_efficiency(*, speedup: Num, gpus: Num) -> Num:
    """Share of a linear speed-up that is reached."""
    return speedup / gpus


@formula(unit="ratio", source=_ARITHMETIC)
def mixed_speedup(*, fast_cards: Num, slow_cards: Num, relative_rate: Num) -> Num:
    """Speed-up over one fast card of a fleet whose slow cards reach `relative_rate` of it each."""
    return fast_cards + slow_cards * relative_rate


@formula(unit="ratio", source=_ARITHMETIC)
def implied_relative_rate(*, speedup: Num, fast_cards: Num, slow_cards: Num) -> Num:
    """Rate of a slow card, over a fast one's, that a stated speed-up asks for."""
    return (speedup - fast_cards) / slow_cards


@formula(unit="fraction", source="A synchronous step waits for its slowest rank")
def equal_split_efficiency(*, first_rate: Num, second_rate: Num) -> Num:
    """Share of two cards' joint rate when both get the same work."""
    return 2 * minimum(first_rate, second_rate) / (first_rate + second_rate)


@formula(unit="samples", source=_ARCHITECTURES + ", section 2.2: batch size adjusted to the card")
def batch_share(*, batch: Num, own_rate: Num, other_rate: Num) -> Num:
    """Samples of a batch that keep one of two cards as long at work as the other."""
    return batch * own_rate / (own_rate + other_rate)


@formula(unit="FLOP/s", source="Two FLOPs, a multiply and an add, per CUDA core and clock")
def core_flops_per_s(*, cores: Num, clock_hz: Num) -> Num:
    """FP32 peak of the CUDA cores."""
    return 2 * cores * clock_hz


@formula(unit="fraction", source=_ARITHMETIC)
def peak_share(*, achieved_flops_per_s: Num, gpus: Num, peak_flops_per_s: Num) -> Num:
    """Share of the dense peak of so many GPUs that a stated rate is."""
    return achieved_flops_per_s / (gpus * peak_flops_per_s)


@formula(unit="s", source=_ARITHMETIC)
def phase_s(*, steps: Num, batch: Num, samples_per_s: Num) -> Num:
    """Time of so many steps at a measured rate."""
    return steps * batch / samples_per_s


@formula(unit="s", source=_ARITHMETIC)
def both_phases_s(*, first_s: Num, second_s: Num) -> Num:
    """Time of a recipe of two phases, one after the other."""
    return first_s + second_s


# --- power, heat, lanes, host ----------------------------------------------------------------------


@formula(unit="W", source=_ARITHMETIC)
def cards_power_w(*, gpus: Num, tdp_w: Num) -> Num:
    """Power of the cards at their limit."""
    return gpus * tdp_w


@formula(unit="W", source="General practice: a supply runs at 80 % of its label at most")
def supply_w(*, gpu_power_w: Num, other_w: Num, load_share: Num) -> Num:
    """Supply that carries the cards and the rest of the machine at that share of its label."""
    return (gpu_power_w + other_w) / load_share


@formula(unit="cards", source=_SELECTION + ", section 2.3: can the supplies carry full load")
def cards_on_supply(*, supply_w: Num, load_share: Num, other_w: Num, tdp_w: Num) -> Num:
    """Cards that a supply carries beside the rest of the machine."""
    return floor_div(supply_w * load_share - other_w, tdp_w)


@formula(unit="W", source="PCI-SIG: 75 W from the slot, 150 W an 8-pin connector, 600 W a 12V-2x6")
def connector_w(*, slot_w: Num, eight_pins: Num, twelve_volts: Num) -> Num:
    """Power the slot and the connectors of a card may deliver."""
    return slot_w + 150 * eight_pins + 600 * twelve_volts


@formula(unit="CFM", source="3.16 cubic feet a minute per watt and degree Fahrenheit of rise")
def airflow_cfm(*, power_w: Num, rise_k: Num) -> Num:
    """Air that carries a machine's heat away at so many kelvin of rise."""
    return 3.16 * power_w / (1.8 * rise_k)


@formula(unit="lanes", source=_SINGLE_MACHINE + ", section 2.2: at least 16 PCIe 4.0 lanes")
def lanes_per_card(*, lanes: Num, gpus: Num) -> Num:
    """Lanes each card gets when a processor's are divided evenly."""
    return floor_div(lanes, gpus)


@formula(unit="lanes", source=_ARITHMETIC)
def lanes_for_cards(*, gpus: Num, width: Num) -> Num:
    """Lanes that give every card its full width."""
    return gpus * width


@formula(unit="cores", source="General practice: four loader processes a GPU at least")
def loader_cores(*, gpus: Num, cores_per_gpu: Num) -> Num:
    """Processor cores that feed so many GPUs."""
    return gpus * cores_per_gpu


@formula(unit="bytes", source=_ARITHMETIC)
def joint_memory_bytes(*, gpus: Num, card_bytes: Num) -> Num:
    """Memory of so many cards: what their windows in the address space span, and what sharding can use."""
    return gpus * card_bytes


@formula(unit="rows", source=_ARITHMETIC)
def shard_rows(*, outputs: Num, tp: Num) -> Num:
    """Output rows of a weight matrix that each rank of a tensor group holds."""
    return ceil_div(outputs, tp)


@formula(unit="experts", source=_ARITHMETIC)
def experts_per_rank(*, experts: Num, ep: Num) -> Num:
    """Experts the fullest rank of an expert-parallel group holds."""
    return ceil_div(experts, ep)


@formula(unit="count", source=_ARITHMETIC)
def buckets(*, gradient_bytes: Num, bucket_bytes: Num) -> Num:
    """Messages a step's gradients are sent in."""
    return ceil_div(gradient_bytes, bucket_bytes)


@formula(unit="h", source=_SELECTION + ", section 5: cloud or own machines")
def break_even_h(*, purchase_usd: Num, rent_usd_per_h: Num, running_usd_per_h: Num) -> Num:
    """Hours of use after which buying is cheaper than renting."""
    return purchase_usd / (rent_usd_per_h - running_usd_per_h)
