"""Versions of engines, compared by their numbers."""

from __future__ import annotations

import re


def version_key(version: str) -> tuple[int, ...] | None:
    """The numbers of a version for comparing, None where it has none: `0.10.1`, `v0.6.3`, `b4500`."""
    match = re.fullmatch(r"[vb]?(\d+(?:\.\d+)*).*", version.strip())
    return tuple(int(part) for part in match[1].split(".")) if match else None
