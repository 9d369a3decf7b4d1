"""Links: the slot of each card, lanes of the processors, peer access, cards across sockets, BAR1, NVLink."""

from __future__ import annotations

from gpucalc.doctor.context import Answers, Context, keys, stated
from gpucalc.doctor.finding import Finding, Question, once
from gpucalc.formulas import machine as f
from gpucalc.formulas import rules_machine as rules
from gpucalc.line import compute
from gpucalc.spec.checks import Severity
from gpucalc.spec.fleet import FleetPart
from gpucalc.units import GIB, gb_per_s, gib

TRANSFERS_PER_S = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
FULL_WIDTH = 16


def slot(ctx: Context) -> Answers:
    """Generation and width of each card's link against what the card can do."""
    found: list[Finding] = []
    unknown = False
    for card in ctx.box.cards:
        # NVML's maxima are those of card and slot together; the catalogue knows the card's own.
        own = card.spec.pcie_gen if card.spec else None
        gen_max = max((gen for gen in (card.pcie_gen_max, own) if gen is not None), default=None)
        in_slot = ctx.box.live and gen_max is not None and (card.pcie_gen_max or gen_max) < gen_max
        widths = (card.pcie_lanes_max, card.spec.pcie_lanes if card.spec else None)
        wide = max((width for width in widths if width), default=FULL_WIDTH)
        if card.pcie_gen is None or card.pcie_lanes is None:
            unknown = True
        lanes = card.pcie_lanes or wide
        gen = card.pcie_gen or gen_max
        if gen is None or gen_max is None or gen not in TRANSFERS_PER_S or gen_max not in TRANSFERS_PER_S:
            continue
        rate = compute(
            "link", rules.lane_bytes_per_s, transfers_per_s=TRANSFERS_PER_S[min(gen, gen_max)], lanes=lanes
        )
        best = compute("card", rules.lane_bytes_per_s, transfers_per_s=TRANSFERS_PER_S[gen_max], lanes=wide)
        idle = " (links drop when idle: read it under load)" if ctx.box.live and not in_slot else ""
        evidence = (
            f"PCIe {gen} x{lanes}, {gb_per_s(rate.value)} one way; "
            f"the card can do PCIe {gen_max} x{wide}, {gb_per_s(best.value)}"
        )
        if lanes < wide:
            found.append(
                Finding(
                    "pcie-width", Severity.ERROR if lanes <= wide / 4 else Severity.WARNING,
                    f"GPU {card.index}", f"has {lanes} of {wide} lanes", evidence,
                    "another slot, riser or BIOS setting (bifurcation)", ("pcie_ds", "pci_sysfs"),
                    ("B17", "B21"), numbers=(rate, best),
                )
            )  # fmt: skip
        elif gen < gen_max:
            found.append(
                Finding(
                    "pcie-generation", Severity.NOTE if ctx.box.live and not in_slot else Severity.WARNING,
                    f"GPU {card.index}", f"runs PCIe {gen} of {gen_max}{idle}", evidence,
                    "a board, riser and BIOS setting of that generation", ("pcie_ds", "pci_sysfs"),
                    ("B17", "B21"), numbers=(rate, best),
                )
            )  # fmt: skip
    ask = "generation and lanes each slot is wired with, all slots filled (cards: pcie_gen, pcie_lanes)"
    questions = (Question("slots", ask, ("B17", "B21")),) if unknown else ()
    return Answers(once(found), questions)


def lanes(ctx: Context) -> Answers:
    """Lanes of each processor against the cards under it."""
    box = ctx.box
    if box.nvlink_domain and box.nvlink_domain > 1 and box.lanes is None:
        return Answers()  # cards on a baseboard with switches of its own
    if box.lanes is None:
        ask = "PCIe lanes of each processor, and whether switches share them (lanes, sockets)"
        return Answers(questions=(Question("lanes", ask, ("B17", "C23")),))
    sockets = box.sockets or 1
    fullest = max(box.placement) if box.placement else -(-len(box.cards) // sockets)
    wide = FULL_WIDTH
    each = compute("each", rules.lanes_per_card, lanes=stated("lanes", box.lanes, "lanes"), gpus=fullest)
    left = compute("left", f.lanes_left, lanes=box.lanes, gpus=fullest, width=wide)
    needed = compute("needed", rules.lanes_for_cards, gpus=fullest, width=wide)
    evidence = f"{box.lanes} lanes a processor, {fullest} cards under the fullest: {needed.value} for x{wide}"
    source = keys(ctx.rules.pcie_lanes_per_gpu)
    if left.value < 0:
        width = max((step for step in (16, 8, 4, 2, 1) if step <= each.value), default=0)
        item = Finding(
            "lanes", Severity.ERROR if width < wide / 2 else Severity.WARNING, "lanes",
            f"do not suffice: {each.value:.0f} a card, so x{width}", evidence,
            "more lanes, a PCIe switch, or fewer cards", source, ("B17", "C23"), numbers=(each, needed),
        )  # fmt: skip
    elif left.value < 2 * 4:
        item = Finding(
            "lanes", Severity.WARNING, "lanes", f"leave {left.value:.0f} for network and disks", evidence,
            "a second processor or a PCIe switch", source, ("B17", "C23"), numbers=(left, needed),
        )  # fmt: skip
    else:
        item = Finding(
            "lanes", Severity.NOTE, "lanes", f"suffice, and {left.value:.0f} are left a processor", evidence,
            None, source, ("B17", "C23"), numbers=(left, needed),
        )  # fmt: skip
    return Answers((item,))


def peers(ctx: Context) -> Answers:
    """Whether cards reach each other directly, and what an all-reduce gets."""
    box = ctx.box
    if len(box.cards) < 2:
        return Answers()
    found: list[Finding] = []
    asked: list[Question] = []
    down = [card for card in box.cards if card.nvlinks_down and card.nvlinks_up]
    found += [
        Finding(
            "nvlink-down", Severity.ERROR, f"GPU {card.index}", f"has {card.nvlinks_down} NVLinks down",
            f"{card.nvlinks_up} up", "reseat; nvidia-smi nvlink -s; the fabric manager's log",
            ("smi_man",), ("B22",),
        )
        for card in down
    ]  # fmt: skip
    names = [card.spec.id if card.spec else card.name for card in box.cards]
    joined = any(card.nvlinks_up for card in box.cards) or (box.nvlink_domain or 1) > 1
    known = [card.spec for card in box.cards if card.spec is not None]
    if not joined and len(known) == len(box.cards):
        parts = tuple(FleetPart(None, names.count(name), name) for name in dict.fromkeys(names))
        link = ctx.catalog.cluster(parts).intra
        if link.link == "pcie" and link.resolved:
            direct = link.peer_to_peer if box.peer_to_peer is None else box.peer_to_peer
            rate = link.terms("all_reduce", len(box.cards)).bus_bytes_per_s
            told = "as described" if box.peer_to_peer is not None else f"as a rule: {link.name}"
            told = box.peer_evidence or told
            evidence = f"peer access {'on' if direct else 'off'} ({told}); bus bandwidth {gb_per_s(rate)}"
            if not direct:
                found.append(
                    Finding(
                        "no-peer-access", Severity.WARNING, "peer access",
                        "cards talk through host memory", evidence,
                        "a split that sends little (data parallel, few large messages), or cards with NVLink",
                        ("nccl_1127", "collective_runs"), ("B23", "C28"),
                        numbers=(stated("bus_bandwidth", rate, "bytes/s"),),
                    )
                )  # fmt: skip
        if box.peer_to_peer is None:
            ask = "peer access between every two cards: nvidia-smi topo -p2p r"
            asked.append(Question("peer access", ask, ("B23", "C28")))
    placed = [count for count in box.placement if count]
    if len(placed) > 1 and not joined:
        found.append(
            Finding(
                "across-sockets", Severity.WARNING, "sockets",
                f"cards lie under {len(placed)} processors: traffic between them crosses the socket link",
                " + ".join(map(str, placed)) + " cards", "tensor parallel groups within one processor; "
                "numactl --cpunodebind for each rank", ("bench4090",), ("C26",),
            )
        )  # fmt: skip
    elif not box.placement and box.across and not joined:
        found.append(
            Finding(
                "across-sockets", Severity.WARNING, "sockets",
                f"{box.across} {'pair' if box.across == 1 else 'pairs'} of cards reach each other"
                " over the link between processors",
                "their path is SYS in the driver's topology", "tensor parallel groups within one processor; "
                "numactl --cpunodebind for each rank", ("smi_man",), ("C26",),
            )
        )  # fmt: skip
    elif not box.placement and box.across is None and not joined:
        ask = "which cards lie under which processor (placement): nvidia-smi topo -m"
        asked.append(Question("NUMA", ask, ("C26",)))
    if len(set(names)) > 1:
        found.append(
            Finding(
                "mixed-cards", Severity.WARNING, "cards", "differ: the slowest paces, the smallest limits",
                ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)),
                "one kind per job, or shares by measured speed", ("reasoning",), ("A05",),
            )
        )  # fmt: skip
    return Answers(tuple(found), tuple(asked))


def windows(ctx: Context) -> Answers:
    """BAR1 against the card's memory, and what lies above 4 GiB."""
    box = ctx.box
    found: list[Finding] = []
    asked: list[Question] = []
    sized = [card for card in box.cards if card.bar1_bytes is not None and card.memory_bytes]
    for card in sized:
        if (card.bar1_bytes or 0) < 0.9 * (card.memory_bytes or 0):
            found.append(
                Finding(
                    "bar1", Severity.WARNING, f"GPU {card.index}",
                    f"shows {gib(card.bar1_bytes or 0)} of {gib(card.memory_bytes or 0)} to its peers",
                    "BAR1 smaller than the memory: Resizable BAR is off or not offered",
                    "BIOS: Above 4G Decoding and Resizable BAR on", ("nvml_doc",), ("C28",),
                )
            )  # fmt: skip
    if not sized:
        ask = "Resizable BAR in the BIOS, and BAR1 as nvidia-smi -q -d MEMORY shows it (cards: bar1)"
        asked.append(Question("BAR1", ask, ("C28",)))
    each = max((card.memory_bytes or 0 for card in box.cards), default=0)
    span = compute("windows", rules.joint_memory_bytes, gpus=len(box.cards), card_bytes=each)
    if box.above_4g is False and span.value > 4 * GIB:
        found.append(
            Finding(
                "above-4g", Severity.ERROR, "Above 4G Decoding", "is off",
                f"the cards' windows span up to {gib(span.value, 0)}, and 4 GiB hold none of them whole",
                "BIOS: Above 4G Decoding on", ("pci_sysfs",), ("C27",), numbers=(span,),
            )
        )  # fmt: skip
    elif box.above_4g is None and not box.live:
        ask = f"Above 4G Decoding in the BIOS: the windows span up to {gib(span.value, 0)} (above_4g)"
        asked.append(Question("Above 4G Decoding", ask, ("C27",)))
    return Answers(once(found), tuple(asked))
