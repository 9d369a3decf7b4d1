"""Reading JSON that strangers wrote: UTF-8 text of a regular file of bounded size, no key given twice.

A byte order mark at the start is passed over, as some editors write one. Every refusal names the file
and, where there is one, the line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpucalc.errors import InputError
from gpucalc.spec.yamlio import MAX_BYTES, Document, read_text


def load_json(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Document:
    """The object in a JSON file. Raises InputError."""
    text = read_text(path, max_bytes=max_bytes)
    data = parse_json(text, str(path))
    if not isinstance(data, dict):
        raise InputError("expected keys and values", where=str(path))
    return Document(data=data, where=str(path), text=text)


def parse_json(text: str, where: str) -> Any:
    """The value in a text; `where` names it in errors. Raises InputError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError("the key is given twice", where=where, key=twice)
        return data

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg}", where=f"{where}:{error.lineno}") from None
    except (RecursionError, ValueError):
        raise InputError("not valid JSON: nested too deeply or a number too long", where=where) from None
