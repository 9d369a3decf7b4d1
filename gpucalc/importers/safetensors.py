"""The header of a safetensors file: every tensor's type, shape and bytes, without reading a weight.

A file begins with the header's length (8 bytes, little endian) and the header, a JSON object of
tensors. Everything it claims is held against the file before it is believed: a header that is
too long, cut off, overlapping or wrong in any count is refused.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # the reader of one JSON string
from math import prod
from pathlib import Path
from typing import BinaryIO

from gpucalc.errors import InputError
from gpucalc.spec.jsonio import load_json

MAX_HEADER = 8 * 2**20  # the largest published shard needs 2 MB
MAX_ENTRY = 4096  # characters of one tensor's entry
MAX_SHARDS = 10_000
MAX_INDEX = 64 * 2**20
MAX_ELEMENTS = 2**60

# Bits of one element, by the names the format gives its types.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """Stored elements; packed integers count as stored."""
        return prod(self.shape)


def read_header(path: str | Path) -> tuple[Tensor, ...]:
    """The tensors of one file, in the header's order. Raises InputError."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _tensors(_header_text(file, size, where), size, where)
    except FileNotFoundError:
        raise InputError("no such file", where=where) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=where) from None


def read_index(path: str | Path) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors of a sharded checkpoint from its index and every shard's header, and what does not agree.

    A shard that is missing, or that lacks a tensor the index puts there, is an error. Raises InputError.
    """
    where = str(path)
    file = Path(path)
    index = load_json(file, max_bytes=MAX_INDEX).data
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError("missing", where=where, key="weight_map")
    shards: dict[str, set[str]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise InputError(
                "is not a file beside the index", where=where, key=f"weight_map.{name}", given=shard
            )
        shards.setdefault(shard, set()).add(name)
    if len(shards) > MAX_SHARDS:
        raise InputError(f"more than {MAX_SHARDS:,} shards", where=where)
    tensors: list[Tensor] = []
    notes: list[str] = []
    for shard, names in sorted(shards.items()):
        if not (file.parent / shard).is_file():
            raise InputError("the shard is missing", where=where, key="weight_map", given=shard)
        held = read_header(file.parent / shard)
        lacking = names - {tensor.name for tensor in held}
        if lacking:
            raise InputError(f"{shard} does not hold it", where=where, key=f"weight_map.{min(lacking)}")
        spare = len(held) - len(names)
        if spare:
            notes.append(f"{shard} holds {spare} tensors the index does not name")
        tensors += [tensor for tensor in held if tensor.name in names]
    stated = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), dict) else None
    total = sum(tensor.bytes for tensor in tensors)
    if isinstance(stated, int | float) and stated != total:
        notes.append(f"the index states {stated:,} bytes; the shards hold {total:,}")
    return tuple(tensors), tuple(notes)


def _header_text(file: BinaryIO, size: int, where: str) -> str:
    head = file.read(8)
    if len(head) < 8:
        raise InputError(f"too short for a safetensors file: {size} bytes", where=where)
    length = int.from_bytes(head, "little")
    if length > size - 8:
        problem = (
            f"the header is said to be {length:,} bytes, the file is {size:,}: cut off or another format"
        )
        raise InputError(problem, where=where)
    if length > MAX_HEADER:
        raise InputError(f"the header is {length:,} bytes; the limit is {MAX_HEADER:,}", where=where)
    raw = file.read(length)
    if len(raw) < length:
        raise InputError("the header is cut off", where=where)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("the header is not text", where=where) from None


_SPACE = re.compile(r"[ \t\r\n]*")


def _tensors(text: str, size: int, where: str) -> tuple[Tensor, ...]:
    """The entries one by one: a hostile header never becomes a tree of objects in memory."""
    data = size - 8 - len(text.encode("utf-8")) if not text.isascii() else size - 8 - len(text)
    tensors: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    names: set[str] = set()
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        raise InputError("the header is not a JSON object", where=where)
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        name, position = _string(text, position, where)
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise InputError("the header is not JSON", where=where, key=name)
        position = _skip(text, position + 1)
        if name in names:
            raise InputError("the tensor is listed twice", where=where, key=name)
        names.add(name)
        if name == "__metadata__":
            position = _metadata(text, position, where)
        else:
            end = text.find("}", position, position + MAX_ENTRY)
            if text[position : position + 1] != "{" or end < 0:
                raise InputError("is not a tensor's entry", where=where, key=name)
            tensor, span = _tensor(name, text[position : end + 1], data, where)
            tensors.append(tensor)
            spans.append(span)
            position = end + 1
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "}":
            raise InputError("the header is not JSON", where=where, key=name)
    reached = 0
    for start, end in sorted(spans):
        if start != reached:
            problem = "tensors overlap" if start < reached else "bytes belong to no tensor"
            raise InputError(f"{problem} at byte {min(start, reached):,} of the data", where=where)
        reached = end
    if reached != data:
        raise InputError(f"the tensors take {reached:,} bytes, the file holds {data:,}", where=where)
    return tuple(tensors)


def _tensor(name: str, text: str, data: int, where: str) -> tuple[Tensor, tuple[int, int]]:
    try:
        entry = json.loads(text)
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError("is not a tensor's entry", where=where, key=name) from None
    if dtype not in BITS if isinstance(dtype, str) else True:
        raise InputError("unknown element type", where=where, key=name, given=dtype, legal=", ".join(BITS))
    numbers = [*shape, start, end] if isinstance(shape, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise InputError("a shape or an offset is not a whole number", where=where, key=name)
    elements = prod(shape)
    bits = elements * BITS[dtype]
    if elements > MAX_ELEMENTS or bits % 8 or end - start != bits // 8:
        raise InputError(
            f"{dtype} {shape} is {bits / 8:,.0f} bytes, its offsets span {end - start:,}",
            where=where,
            key=name,
        )
    if end > data:
        raise InputError(f"ends at byte {end:,} of {data:,}: cut off or false", where=where, key=name)
    return Tensor(name, dtype, tuple(shape), end - start), (start, end)


def _metadata(text: str, position: int, where: str) -> int:
    """Past the one object that is no tensor: texts by name."""
    if text[position : position + 1] != "{":
        raise InputError("is not an object", where=where, key="__metadata__")
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        _, position = _string(text, position, where)
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise InputError("the header is not JSON", where=where, key="__metadata__")
        _, position = _string(text, _skip(text, position + 1), where)
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "}":
            raise InputError("the header is not JSON", where=where, key="__metadata__")
    return position + 1


def _string(text: str, position: int, where: str) -> tuple[str, int]:
    if text[position : position + 1] != '"':
        raise InputError("the header is not JSON", where=where)
    try:
        found: tuple[str, int] = scanstring(text, position + 1)
    except ValueError:
        raise InputError("the header is not JSON", where=where) from None
    return found


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match is not None else position
