"""CUDA_VISIBLE_DEVICES as the CUDA runtime reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible(
    variable: str | None, uuids: Sequence[str | None], instances: Mapping[str, int] | None = None
) -> tuple[tuple[int, ...], str | None]:
    """The NVML indexes a program would see, in its order, and what to say about it.

    `uuids` are those of the cards (and None for a card that does not tell); `instances` maps the UUIDs
    of MIG instances to their cards. CUDA takes indexes or UUIDs (or their beginnings), and ignores
    everything from the first entry it does not know. Of MIG instances it takes one alone.
    """
    if variable is None:
        return tuple(range(len(uuids))), None
    entries = [part.strip() for part in variable.split(",")] if variable.strip() else []
    if not entries:
        return (), "CUDA_VISIBLE_DEVICES is empty: programs see no GPU"
    found: list[int] = []
    for entry in entries:
        card = _of_instance(entry, instances or {})
        if card is not None and not found:
            return (card,), f"CUDA_VISIBLE_DEVICES: one MIG instance of GPU {card} is all that programs see"
        index = _index(entry, uuids)
        if index is None or index in found:
            why = "twice the same" if index is not None else "names no GPU here"
            if entry.upper().startswith("MIG-"):
                why = "is no MIG instance of these cards" if card is None else "is one more, a MIG instance"
            return tuple(found), f"CUDA_VISIBLE_DEVICES: {entry!r} {why}; it and what follows are ignored"
        found.append(index)
    return tuple(found), None


def _of_instance(entry: str, instances: Mapping[str, int]) -> int | None:
    if not entry.upper().startswith("MIG-"):
        return None
    fits = [card for uuid, card in instances.items() if uuid.lower().startswith(entry.lower())]
    return fits[0] if len(fits) == 1 else None


def _index(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.upper().startswith("GPU-"):
        return None
    fits = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.lower().startswith(entry.lower())]
    return fits[0] if len(fits) == 1 else None
