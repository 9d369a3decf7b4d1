"""Reading YAML that strangers wrote: YAML 1.2 numbers, true/false only, no duplicates, no bombs.

What differs from PyYAML: `1e9` is a number and `010` is ten; only `true` and `false` are
booleans; dates stay text; a key given twice is an error; tags that build objects are errors;
aliases may not multiply the document; files that are too large, binary, empty or not files
are refused before they are parsed. Every refusal names the file and, where there is one, the
line.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpucalc.errors import InputError

MAX_BYTES = 8 * 2**20
MAX_DEPTH = 64  # of nesting: no job or catalogue file goes past ten
MAX_ALIASED_NODES = 10_000  # that aliases may add to what is written


@dataclass(frozen=True, slots=True)
class Document:
    """Parsed data and the place it came from; line numbers are looked up only when asked for."""

    data: Any
    where: str
    text: str = field(repr=False)

    def line(self, key: str) -> int | None:
        """The line of a dotted key (`run.tp`, `checks.2.name`), or None when it is not there."""
        node, line = _compose(self.text, self.where), None
        for part in key.split(".") if key else ():
            line, node = _step(node, part)
            if line is None:
                return None
        return line

    def lines(self) -> dict[str, int]:
        """The line of every dotted key, for readers that ask for many; aliases are followed once."""
        found: dict[str, int] = {}
        node = _compose(self.text, self.where)
        waiting = [("", node, 0)] if node is not None else []
        seen: set[int] = set()
        while waiting:
            path, node, depth = waiting.pop()
            if id(node) in seen or depth > MAX_DEPTH:
                continue
            seen.add(id(node))
            for part, line, below in _parts(node):
                key = f"{path}.{part}" if path else part
                found.setdefault(key, line)
                waiting.append((key, below, depth + 1))
        return found


def nearest_line(lines: Mapping[str, int], key: str) -> int:
    """The line of a dotted key, or of the nearest group around it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return 1


def load_yaml(path: str | Path, *, max_bytes: int = MAX_BYTES, mapping: bool = True) -> Document:
    """The document in a YAML file. Raises InputError.

    `mapping=False` lets a list (or a lone value) be the document; `max_bytes` raises the size limit.
    """
    return parse_yaml(read_text(path, max_bytes=max_bytes), str(path), mapping=mapping)


def parse_yaml(text: str, where: str, *, mapping: bool = True) -> Document:
    """The document in a text; `where` names it in errors. Raises InputError."""
    node = _compose(text, where)
    if node is None:
        raise InputError("the file is empty", where=where)
    if mapping and not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise InputError(f"expected keys and values, found {found}", where=_at(where, node))
    if "&" in text and "*" in text:
        _refuse_bombs(node, where)
    return Document(data=_build(node, where, 0), where=where, text=text)


def parse_scalar(text: str, where: str) -> Any:
    """The value of a `--set key=VALUE`: a YAML scalar, or a flow list or mapping."""
    if not text.strip():
        return None
    try:
        return parse_yaml(text, where, mapping=False).data
    except InputError as error:  # one line has no line number worth saying
        raise InputError(error.problem, where=where, given=text) from None


def read_text(path: str | Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `max_bytes`. Raises InputError."""
    where = str(path)
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise InputError("is a folder, not a file", where=where)
            if not stat.S_ISREG(status.st_mode):
                raise InputError("is not a regular file", where=where)
            if status.st_size > max_bytes:
                raise _too_large(where, status.st_size, max_bytes)
            raw = file.read(max_bytes + 1)
    except IsADirectoryError:
        raise InputError("is a folder, not a file", where=where) from None
    except FileNotFoundError:
        raise InputError("no such file", where=where) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {reason}", where=where) from None
    if len(raw) > max_bytes:  # it grew while being read, or its size was not known
        raise _too_large(where, len(raw), max_bytes)
    if b"\0" in raw:
        raise InputError("is a binary file; expected UTF-8 text", where=where)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"is not UTF-8 text (byte 0x{raw[error.start]:02x})", where=f"{where}:{line}"
        ) from None
    if not text.strip():
        raise InputError("the file is empty", where=where)
    return text


def _open_without_waiting(path: str, flags: int) -> int:
    # A named pipe would otherwise block until somebody writes to it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _too_large(where: str, size: int, limit: int) -> InputError:
    return InputError(
        f"is too large to be read: {size / 2**20:,.1f} MiB; the limit is {limit / 2**20:,.0f} MiB",
        where=where,
    )


# -- parsing ------------------------------------------------------------------------------------

_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BASE):  # type: ignore[misc]  # the base is chosen at run time
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # PyYAML's own way of holding them


_TAG = "tag:yaml.org,2002:"
_RESOLVERS = (  # the YAML 1.2 core schema
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("merge", r"^<<$", "<"),
)
for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), list(_first))


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
            return node
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "cannot be parsed"
        if problem.startswith("but found another document"):
            problem = "holds more than one document"
        raise InputError(
            f"not valid YAML: {problem}", where=f"{where}:{mark.line + 1}" if mark else where
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else 1
        raise InputError("not valid YAML: control characters in the text", where=f"{where}:{line}") from None
    except RecursionError:
        raise InputError("not valid YAML: nested too deeply", where=where) from None
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {error}", where=where) from None


def _at(where: str, node: yaml.Node) -> str:
    return f"{where}:{node.start_mark.line + 1}"


def _refuse_bombs(root: yaml.Node, where: str) -> None:
    """Refuse aliases that make the document much larger than it is written, or endless."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node, depth: int) -> int:
        known = sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in open_nodes:
            raise InputError("an alias contains itself", where=_at(where, node))
        if depth > MAX_DEPTH:
            raise InputError(f"nested more than {MAX_DEPTH} deep", where=_at(where, node))
        open_nodes.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            total += sum(size(key, depth + 1) + size(value, depth + 1) for key, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            total += sum(size(item, depth + 1) for item in node.value)
        open_nodes.discard(id(node))
        sizes[id(node)] = total
        return total

    added = size(root, 0) - len(sizes)
    if added > MAX_ALIASED_NODES:
        raise InputError(
            f"its aliases expand to {added:.3g} values; the limit is {MAX_ALIASED_NODES:,}", where=where
        )


def _build(node: yaml.Node, where: str, depth: int) -> Any:
    tag = node.tag
    if isinstance(node, yaml.ScalarNode):
        if tag == _TAG + "str":
            return node.value
        read = _SCALARS.get(tag)
        if read is None:
            raise _unknown_tag(node, where)
        try:
            return read(node.value)
        except (ValueError, KeyError):
            raise InputError("is not a usable value", where=_at(where, node), given=node.value) from None
    if depth >= MAX_DEPTH:
        raise InputError(f"nested more than {MAX_DEPTH} deep", where=_at(where, node))
    if isinstance(node, yaml.SequenceNode) and tag == _TAG + "seq":
        return [_build(item, where, depth + 1) for item in node.value]
    if isinstance(node, yaml.MappingNode) and tag == _TAG + "map":
        return _build_mapping(node, where, depth)
    raise _unknown_tag(node, where)


def _build_mapping(node: yaml.MappingNode, where: str, depth: int) -> dict[Any, Any]:
    data: dict[Any, Any] = {}
    merged: list[yaml.Node] = []
    for key_node, value_node in node.value:
        if key_node.tag == _TAG + "merge":
            merged.append(value_node)
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError("a key must be a single word or number", where=_at(where, key_node))
        key = _build(key_node, where, depth + 1)
        if key is None or isinstance(key, bool):
            raise InputError(
                f"a key cannot be {key_node.value or 'empty'}; quote it to make it text",
                where=_at(where, key_node),
            )
        if key in data:
            raise InputError("the key is given twice", where=_at(where, key_node), key=str(key))
        data[key] = _build(value_node, where, depth + 1)
    for value_node in merged:
        parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise InputError("`<<` takes a group of keys or a list of them", where=_at(where, value_node))
            # What is written here wins over what is merged in; earlier merges win over later ones.
            for key, value in _build_mapping(part, where, depth + 1).items():
                data.setdefault(key, value)
    return data


def _unknown_tag(node: yaml.Node, where: str) -> InputError:
    tag = str(node.tag).replace(_TAG, "!!")
    return InputError(
        "the tag is not allowed; nothing in a file is run or built", where=_at(where, node), given=tag
    )


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ValueError("too many digits")
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(text: str) -> float:
    lowered = text.lower()
    if lowered.endswith((".inf", ".nan")):
        return float(lowered.replace(".", ""))
    return float(text)


_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    _TAG + "null": lambda _: None,
    _TAG + "int": _integer,
    _TAG + "float": _float,
}


def _parts(node: yaml.Node) -> list[tuple[str, int, yaml.Node]]:
    """The keys or places directly inside a node, each with its line."""
    if isinstance(node, yaml.MappingNode):
        return [
            (key.value, key.start_mark.line + 1, value)
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        ]
    if isinstance(node, yaml.SequenceNode):
        return [(str(index), item.start_mark.line + 1, item) for index, item in enumerate(node.value)]
    return []


def _step(node: yaml.Node | None, part: str) -> tuple[int | None, yaml.Node | None]:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value == part:
                return key_node.start_mark.line + 1, value_node
    elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
        item = node.value[int(part)]
        return item.start_mark.line + 1, item
    return None, None
