"""Report files, all of them whole or none of them changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpucalc.errors import InputError


def look(paths: Sequence[Path], flag: str = "-o") -> None:
    """Refuse what cannot be written before anything is worked out; `flag` named them. Raises InputError."""
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise InputError("is named twice", where=flag, given=str(paths[-1]))
    for path in paths:
        if os.path.isdir(path):
            raise InputError("is a folder, not a file", where=str(path), key=flag)
        if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
            raise InputError("the folder is missing", where=str(path), key=flag)


def write(texts: Mapping[Path, str]) -> None:
    """Write every file: drafts beside them first, then all put in place. Raises InputError.

    A full disk or a missing folder leaves the old files as they were and no draft behind.
    """
    drafts: list[tuple[Path, Path]] = []
    special: list[tuple[Path, str]] = []
    path = Path()
    try:
        for path, text in texts.items():
            target = Path(os.path.realpath(path))  # a link keeps pointing where it did
            if os.path.exists(target) and not os.path.isfile(
                target
            ):  # a pipe or a device is written to, never replaced
                special.append((target, text))
                continue
            draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            drafts.append((draft, target))
            with open(draft, "w", encoding="utf-8", newline="\n") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        for path, text in special:
            with open(path, "w", encoding="utf-8", newline="\n") as file:
                file.write(text + "\n")
        for draft, path in drafts:
            os.replace(draft, path)
    except OSError as error:
        for draft, _ in drafts:
            with suppress(OSError):
                draft.unlink()
        reason = error.strerror or str(error)
        raise InputError(f"cannot be written: {reason}", where=str(path)) from None
