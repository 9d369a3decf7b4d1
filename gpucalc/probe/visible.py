"""CUDA_VISIBLE_DEVICES as the CUDA runtime reads it."""

from __future__ import annotations

from collections.abc import Sequence


def visible(variable: str | None, uuids: Sequence[str | None]) -> tuple[tuple[int, ...], str | None]:
    """The NVML indexes a program would see, in its order, and what to say about it.

    `uuids` are those of the cards (and None for a card that does not tell), MIG instances not among
    them. CUDA takes indexes or UUIDs (or their beginnings), and ignores everything from the first
    entry it does not know.
    """
    if variable is None:
        return tuple(range(len(uuids))), None
    entries = [part.strip() for part in variable.split(",")] if variable.strip() else []
    if not entries:
        return (), "CUDA_VISIBLE_DEVICES is empty: programs see no GPU"
    found: list[int] = []
    for entry in entries:
        index = _index(entry, uuids)
        if index is None or index in found:
            why = "twice the same" if index is not None else "names no GPU here"
            if entry.upper().startswith("MIG-"):
                why = "names a MIG instance, see the cards' own lists"
            return tuple(found), f"CUDA_VISIBLE_DEVICES: {entry!r} {why}; it and what follows are ignored"
        found.append(index)
    return tuple(found), None


def _index(entry: str, uuids: Sequence[str | None]) -> int | None:
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.upper().startswith("GPU-"):
        return None
    fits = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.lower().startswith(entry.lower())]
    return fits[0] if len(fits) == 1 else None
