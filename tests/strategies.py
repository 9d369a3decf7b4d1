"""Strategies for files people write: values a schema allows, real files with one thing wrong, torn bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

Value = Any
Path = tuple[str | int, ...]

# What people, programs and attackers put where a number, a name or a list belongs.
ODD: st.SearchStrategy[Value] = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.0, -0.5, 1e308, 1e-308,
            float("inf"), float("-inf"), float("nan"), "", " ", "auto", "none", "nan", "1e9", "8 GiB", "yes",
            "../../etc/passwd", "a/b/c", "\x1b[31mred\x1b[0m", "<script>alert(1)</script>", "|x|`y`", "é中🙂",
            "x" * 5000, [], {}, [[]], [None], {"": 0}, [1, "a", None],
        ]
    ),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=20),
)  # fmt: skip


def from_schema(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> st.SearchStrategy[Value]:
    """Values a JSON schema allows, small ones first; an object gets its required keys and a few others."""
    root = schema if root is None else root
    if "$ref" in schema:
        return from_schema(_definition(schema["$ref"], root), root)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(list(schema["enum"]))
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of(*(from_schema(option, root) for option in schema[choice]))
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*(from_schema({**schema, "type": one}, root) for one in kind))
    if kind == "object" or "properties" in schema:
        return _objects(schema, root)
    if kind == "array":
        items = from_schema(schema.get("items", {}), root)
        return st.lists(items, min_size=schema.get("minItems", 0), max_size=3)
    if kind == "integer":
        return st.integers(int(schema.get("minimum", 0)), int(schema.get("maximum", 4096)))
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        return st.floats(low, schema.get("maximum", schema.get("exclusiveMaximum", 1e12)), exclude_min=True)
    simple = {"boolean": st.booleans(), "null": st.none(), "string": st.text(max_size=12)}
    return simple.get(str(kind), ODD)


def _definition(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found  # type: ignore[no-any-return]  # a schema is JSON


def _objects(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Value]:
    keys: Mapping[str, Any] = schema.get("properties", {})
    required = set(schema.get("required", ()))
    optional = sorted(set(keys) - required)

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Value]:
        extra = draw(st.lists(st.sampled_from(optional), unique=True, max_size=4)) if optional else []
        return {key: draw(from_schema(keys[key], root)) for key in (*sorted(required), *extra)}

    return build()


def places(document: Value, at: Path = ()) -> Iterator[Path]:
    """Every place in a document, the whole first."""
    yield at
    if isinstance(document, dict | list):
        inner = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in inner:
            yield from places(value, (*at, key))


@st.composite
def damaged(draw: st.DrawFn, documents: list[Value]) -> Value:
    """One of the documents with one to three places replaced, removed, renamed, doubled or moved."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from([place for place in places(document) if place]))
        parent = document
        for step in where[:-1]:
            parent = parent[step]
        last = where[-1]
        how = draw(st.sampled_from(["replace", "remove", "rename", "nest"]))
        if how == "replace":
            parent[last] = copy.deepcopy(draw(ODD))
        elif how == "remove":
            del parent[last]
        elif how == "rename" and isinstance(parent, dict):
            other = draw(st.sampled_from([f"{last}s", str(last)[:-1], str(last).upper(), "x"]))
            parent[other] = parent.pop(last)
        else:
            parent[last] = {str(last): parent[last]}
        if not any(place for place in places(document) if place):
            break
    return document


@st.composite
def torn(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """One of the files cut off, with bytes flipped, put in, taken out or repeated."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        how = draw(st.sampled_from(["flip", "cut", "insert", "delete", "repeat"]))
        if how == "flip":
            data[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif how == "delete":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = data[at : at + 200] * draw(st.integers(1, 3))
    return bytes(data)


def finite(document: Value) -> bool:
    """Whether every number of a printed document is one: not NaN, not infinite."""
    text = json.dumps(document)
    return "NaN" not in text and "Infinity" not in text
