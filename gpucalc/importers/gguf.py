"""The header of a GGUF file: its metadata and every tensor's type, shape and bytes, without reading a weight.

Counts and lengths are held against the file before anything is made of them, and token lists are
stepped over, so that a false header costs neither time nor memory.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from gpucalc.errors import InputError
from gpucalc.importers.safetensors import MAX_ELEMENTS, Tensor

MAX_KEYS = 65_536
MAX_TENSORS = 1_000_000
MAX_TEXT = 4 * 2**20  # of one value: chat templates reach 100 kB
MAX_NAME = 65_535
MAX_STRINGS = 1_500_000  # in all lists of a file: the largest vocabularies and merges have 0.8 million
MAX_KEPT = 4096  # entries of a list of numbers that is kept
MAX_DIMS = 8
MAX_FILES = 1000
_BLOCK = 1 << 20

# ggml's types: name, elements of a block, bytes of a block (ggml.h and ggml-common.h).
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _LIST = 8, 9
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Gguf:
    """What a file's header says. `metadata` leaves out long lists; `lengths` holds every list's length."""

    metadata: dict[str, Any]
    lengths: dict[str, int]
    tensors: tuple[Tensor, ...]


def read_gguf(path: str | Path) -> Gguf:
    """The header of a file, and of the others it is split into. Raises InputError."""
    first = _read_one(path)
    match = _SPLIT.fullmatch(Path(path).name)
    if match is None:
        return first
    count = int(match[3])
    if not 1 <= count <= MAX_FILES:
        raise InputError(f"more than {MAX_FILES:,} parts", where=str(path))
    tensors: list[Tensor] = []
    head = first
    for part in range(1, count + 1):
        file = Path(path).parent / f"{match[1]}-{part:05d}-of-{match[3]}.gguf"
        if not file.is_file():
            raise InputError("a part of the split file is missing", where=str(path), given=file.name)
        read = first if file.name == Path(path).name else _read_one(file)
        head = read if part == 1 else head
        tensors += read.tensors
    return Gguf(head.metadata, head.lengths, tuple(tensors))


def _read_one(path: str | Path) -> Gguf:
    where = str(path)
    try:
        with open(path, "rb") as file:
            return _Cursor(file, os.fstat(file.fileno()).st_size, where).header()
    except FileNotFoundError:
        raise InputError("no such file", where=where) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=where) from None


class _Cursor:
    """A place in a file that moves forward and never past the end."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file = file
        self.size = size
        self.where = where
        self.at = 0
        self.strings = 0

    def header(self) -> Gguf:
        magic = self._take(4)
        if magic != b"GGUF":
            raise self._wrong("not a GGUF file")
        version = self._u32()
        if version not in (2, 3):
            if version in (0x02000000, 0x03000000):
                raise self._wrong("a big-endian GGUF file has no reader")
            raise self._wrong(f"version {version} has no reader; legal: 2, 3")
        tensors, keys = self._u64(), self._u64()
        self._check("tensors", tensors, MAX_TENSORS, 24)
        self._check("keys", keys, MAX_KEYS, 13)
        metadata: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(keys):
            key = self._text(MAX_NAME)
            if key in metadata or key in lengths:
                raise self._wrong("the key is given twice", key)
            self._value(key, metadata, lengths)
        found: list[Tensor] = []
        spans: list[tuple[int, int]] = []
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment % 8:
            raise self._wrong(f"alignment {alignment} is not a multiple of 8", "general.alignment")
        names: set[str] = set()
        for _ in range(tensors):
            tensor, offset = self._tensor()
            if tensor.name in names:
                raise self._wrong("the tensor is listed twice", tensor.name)
            names.add(tensor.name)
            if offset % alignment:
                raise self._wrong(
                    f"begins at byte {offset:,}, which is not aligned to {alignment}", tensor.name
                )
            found.append(tensor)
            spans.append((offset, offset + tensor.bytes))
        start = -(-self.at // alignment) * alignment
        reached = 0
        for (begin, end), tensor in sorted(zip(spans, found, strict=True), key=lambda pair: pair[0]):
            if begin < reached:
                raise self._wrong(f"overlaps another tensor at byte {begin:,} of the data", tensor.name)
            if start + end > self.size:
                raise self._wrong(
                    f"ends at byte {start + end:,} of {self.size:,}: cut off or false", tensor.name
                )
            reached = end
        return Gguf(metadata, lengths, tuple(found))

    def _tensor(self) -> tuple[Tensor, int]:
        name = self._text(MAX_NAME)
        dims = self._u32()
        if dims > MAX_DIMS:
            raise self._wrong(f"has {dims} dimensions", name)
        shape = tuple(self._u64() for _ in range(dims))
        kind = self._u32()
        offset = self._u64()
        if kind not in TYPES:
            raise self._wrong(f"ggml type {kind} has no known size", name)
        label, block, size = TYPES[kind]
        elements = prod(shape)
        if elements > MAX_ELEMENTS or any(side > MAX_ELEMENTS for side in shape):
            raise self._wrong(f"claims {shape} elements", name)
        if shape and shape[0] % block:
            raise self._wrong(f"rows of {shape[0]} do not fill {label} blocks of {block}", name)
        return Tensor(name, label, shape[::-1], elements // block * size), offset

    def _value(self, key: str, metadata: dict[str, Any], lengths: dict[str, int]) -> None:
        kind = self._u32()
        if kind in _SCALARS:
            metadata[key] = self._scalar(kind)
        elif kind == _STRING:
            metadata[key] = self._text(MAX_TEXT)
        elif kind == _LIST:
            inner, count = self._u32(), self._u64()
            lengths[key] = count
            if inner in _SCALARS:
                width = struct.calcsize(_SCALARS[inner])
                self._check(key, count, self.size, width)
                if count <= MAX_KEPT:
                    metadata[key] = list(
                        struct.unpack(f"<{count}{_SCALARS[inner]}", self._take(count * width))
                    )
                else:
                    self._jump(count * width)
            elif inner == _STRING:
                self.strings += count
                if self.strings > MAX_STRINGS:
                    raise self._wrong(f"lists hold more than {MAX_STRINGS:,} texts", key)
                self._check(key, count, MAX_STRINGS, 8)
                self._step_over(count, key)
            else:
                raise self._wrong(f"a list of type {inner} has no reader", key)
        else:
            raise self._wrong(f"type {kind} has no reader", key)

    def _step_over(self, count: int, key: str) -> None:
        """Past texts without keeping them, a block of the file at a time."""
        held, begin = b"", 0
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if begin + 8 > len(held):
                self.file.seek(self.at)
                held, begin = self.file.read(_BLOCK), 0
                if len(held) < 8:
                    raise self._wrong("the file is cut off", key)
            step = 8 + unpack(held, begin)[0]
            self.at += step
            if self.at > self.size:
                raise self._wrong("a text is longer than the file", key)
            begin += step
            if begin > len(held):
                held, begin = b"", 0
        self.file.seek(self.at)

    def _take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self._wrong("the file is cut off")
        raw = self.file.read(count)
        if len(raw) < count:
            raise self._wrong("the file is cut off")
        self.at += count
        return raw

    def _jump(self, count: int) -> None:
        if count > self.size - self.at:
            raise self._wrong("the file is cut off")
        self.at += count
        self.file.seek(self.at)

    def _text(self, limit: int) -> str:
        length = self._u64()
        if length > limit:
            raise self._wrong(f"a text of {length:,} bytes is longer than any")
        return self._take(length).decode("utf-8", "replace")

    def _scalar(self, kind: int) -> Any:
        code = f"<{_SCALARS[kind]}"
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _check(self, what: str, count: int, limit: int, least: int) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count > limit or count * least > self.size - self.at:
            raise self._wrong(f"{count:,} entries are more than the file can hold", what)

    def _wrong(self, problem: str, key: str | None = None) -> InputError:
        return InputError(problem, where=self.where, key=key)
