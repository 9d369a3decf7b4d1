"""YAML that strangers wrote: what it means, and every way it is refused."""

from __future__ import annotations

import math
import os
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.errors import InputError
from gpucalc.spec import yamlio
from gpucalc.spec.yamlio import load_yaml, parse_scalar, parse_yaml


def value(text: str) -> object:
    return parse_yaml(f"a: {text}", "f.yaml").data["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e9", 1e9),
        ("1E-3", 1e-3),
        ("-1.5e+3", -1500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("+3", 3),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("", None),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, expected: object) -> None:
    got = value(text)
    assert got == expected
    assert type(got) is type(expected)


def test_infinity_and_nan_are_numbers_for_the_reader_to_refuse() -> None:
    assert value("-.inf") == -math.inf
    assert math.isnan(value(".nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: a: the key is given twice"),
        ("a:\n  b: 1\n  b: 2", "f.yaml:3: b: the key is given twice"),
        ("", "f.yaml: the file is empty"),
        ("# nothing\n", "f.yaml: the file is empty"),
        ("- 1", "f.yaml:1: expected keys and values, found a list"),
        ("word", "f.yaml:1: expected keys and values, found a single value"),
        ("a: [1,\n b: ]]", "f.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "f.yaml:2: not valid YAML: holds more than one document"),
        ("a: !!python/object/apply:os.system [ls]", "the tag is not allowed"),
        ("a: !!binary aGk=", "the tag is not allowed"),
        ("a: !mine 1", "the tag is not allowed"),
        ("a: !!int x", "is not a usable value"),
        ("a: &x [*x]", "an alias contains itself"),
        ("a: *nobody", "f.yaml:1: not valid YAML"),
        ("a: \x01", "f.yaml:1: not valid YAML: control characters"),
        ("true: 1", "a key cannot be true"),
        ("~: 1", "a key cannot be ~"),
        ("? [a]\n: 1", "a key must be a single word or number"),
        ("a: " + "9" * 5000, "is not a usable value"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("a: " + "[" * 100_000, "not valid YAML"),
        ("a:\n  <<: 5", "`<<` takes a group of keys"),
    ],
)
def test_what_is_refused_says_where_and_why(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_merge_keys_work_and_what_is_written_wins() -> None:
    data = parse_yaml("base: &b {tp: 1, pp: 2}\nrun: {<<: *b, tp: 8}", "f").data
    assert data["run"] == {"tp": 8, "pp": 2}


@pytest.mark.parametrize("form", ["list", "merge", "mapping"])
def test_an_alias_bomb_is_refused_at_once(form: str) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for i in range(1, 12):
        refs = ", ".join([f"*a{i - 1}"] * 10)
        if form == "list":
            lines.append(f"a{i}: &a{i} [{refs}]")
        elif form == "merge":
            lines.append(f"a{i}: &a{i} {{<<: [{refs}]}}")
        else:
            keys = ", ".join(f"k{k}: *a{i - 1}" for k in range(10))
            lines.append(f"a{i}: &a{i} {{{keys}}}")
    with pytest.raises(InputError, match="aliases expand to"):  # billions of values would take for ever
        parse_yaml("\n".join(lines), "bomb.yaml")


def test_a_few_aliases_are_fine() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: *x", "f").data == {"a": [1, 2], "b": [1, 2]}


def test_files_that_are_not_text_are_refused(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(InputError) as caught:
            load_yaml(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "no such file" in problem(tmp_path / "missing.yaml")
    assert "is a folder" in problem(tmp_path)
    for name, raw, words in (
        ("empty", b"", "the file is empty"),
        ("blank", b" \n\n", "the file is empty"),
        ("binary", b"\x7fELF\0\0\1", "binary file"),
        ("latin1", b"a: 1\nname: caf\xe9\n", "not UTF-8 text (byte 0xe9)"),
        ("utf16", "a: 1".encode("utf-16"), "binary file"),
    ):
        path = tmp_path / name
        path.write_bytes(raw)
        assert words in problem(path)
    assert "latin1:2" in problem(tmp_path / "latin1")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in problem(tmp_path / "pipe")
    assert "not a regular file" in problem(Path("/dev/zero"))


def test_a_large_file_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"too large to be read: 100\.0 MiB; the limit is 8 MiB"):
            load_yaml(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_limit_can_be_raised_and_lists_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("- {a: 1}\n" * 20)
    with pytest.raises(InputError, match="too large"):
        load_yaml(path, max_bytes=10, mapping=False)
    assert len(load_yaml(path, max_bytes=10**6, mapping=False).data) == 20


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_yaml(path).data == {"a": 1}


def test_lines_of_keys_are_found_on_demand() -> None:
    document = parse_yaml("model: m\nrun:\n  tp: 1\n  lora:\n    rank: 8\nchecks:\n- a\n- b\n", "f")
    assert document.line("model") == 1
    assert document.line("run.tp") == 3
    assert document.line("run.lora.rank") == 5
    assert document.line("checks.1") == 8
    assert document.line("run.nothing") is None


def test_set_values_are_scalars() -> None:
    assert parse_scalar("4096", "--set") == 4096
    assert parse_scalar("auto", "--set") == "auto"
    assert parse_scalar("", "--set") is None
    assert parse_scalar("[q, v]", "--set") == ["q", "v"]


def test_the_pure_python_loader_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(yaml.SafeLoader):
        yaml_implicit_resolvers = yamlio._Loader.yaml_implicit_resolvers

    text = "a: 1e9\nb: no\nc: &x [1, 0o7]\nd: *x\ne: {<<: {f: true}}\n"
    fast = parse_yaml(text, "f").data
    monkeypatch.setattr(yamlio, "_Loader", Slow)
    assert parse_yaml(text, "f").data == fast
    with pytest.raises(InputError):
        parse_yaml("[" * 3000, "f")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    said = "read"
    try:
        parse_yaml(text, "f", mapping=False)
    except InputError as error:
        said = str(error)
    assert said.isprintable()


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abcno1e.-", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", min_size=1), _PLAIN, max_size=4))
def test_json_means_the_same_in_yaml(data: dict[str, object]) -> None:
    import json

    assert parse_yaml(json.dumps(data), "f").data == json.loads(json.dumps(data))
