"""The record of a feasibility test: JSON lines, appended one by one, read back to go on.

A line is written whole and forced to disk, so that a machine that dies loses one at most. A last line
that was cut off is dropped when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError

VERSION = 1
MAX_BYTES = 512 * 2**20  # three days of eight cards write under 20 MB
Record = dict[str, Any]
_FIRST = b'{"kind": "stages"'  # how every record begins
_LEGAL = "a file written by gpucalc probe --stages"


class Journal:
    """One file. `records` are the lines that were there when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        if path.exists():
            self.records, whole = read(path)
            if whole != path.stat().st_size:
                os.truncate(path, whole)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one line, on disk when this returns."""
        line = (json.dumps(record) + "\n").encode()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", where=str(self.path)) from None
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        self.records.append(dict(record))


def read(path: Path) -> tuple[list[Record], int]:
    """The complete lines of a file, and how many bytes they are. Raises InputError for another file."""
    where = str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError("is too large for a record of stages", where=where, legal=f"{MAX_BYTES} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=where) from None
    whole = text.rfind(b"\n") + 1
    records: list[Record] = []
    if text and not text.startswith(_FIRST[: len(text)]):  # never cut somebody else's file
        raise InputError("is no record of stages", where=where, legal=_LEGAL)
    for number, line in enumerate(text[:whole].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise InputError(f"line {number} is not of a record of stages", where=where, legal=_LEGAL)
        records.append(record)
    return records, whole
