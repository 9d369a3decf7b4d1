"""The grammar of GPU lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.errors import InputError
from gpucalc.spec.fleet import GRAMMAR, FleetPart, FleetSpec, parse_fleet


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("8xH100-SXM", [(None, 8, "H100-SXM")]),
        ("8 x H100", [(None, 8, "H100")]),
        ("8XH100", [(None, 8, "H100")]),
        ("8×H100", [(None, 8, "H100")]),  # noqa: RUF001
        ("8*H100", [(None, 8, "H100")]),
        ("2x8xH100", [(2, 8, "H100")]),
        ("2 x 8 x H100", [(2, 8, "H100")]),
        ("H100", [(None, 1, "H100")]),
        ("a100-sxm4-80gb:8", [(None, 8, "a100-sxm4-80gb")]),
        ("2xa100:8", [(2, 8, "a100")]),
        ("4xA100+4xRTX3090", [(None, 4, "A100"), (None, 4, "RTX3090")]),
        ("4xA100 + 2x4xL40S", [(None, 4, "A100"), (2, 4, "L40S")]),
        ("rtx-4090", [(None, 1, "rtx-4090")]),
        ("2x3xRTX-3090", [(2, 3, "RTX-3090")]),
        ("8xgh200", [(None, 8, "gh200")]),
        ("mi300x", [(None, 1, "mi300x")]),
        ("8xmi300x", [(None, 8, "mi300x")]),
        ("mi300x:8", [(None, 8, "mi300x")]),
        ("8x4090", [(None, 8, "4090")]),
        ("3090 Ti", [(None, 1, "3090 Ti")]),
        ("8xH100 80GB SXM", [(None, 8, "H100 80GB SXM")]),
        ("1xrtx-pro-6000-server", [(None, 1, "rtx-pro-6000-server")]),
    ],
)
def test_fleets_read(text: str, parts: list[tuple[int | None, int, str]]) -> None:
    assert parse_fleet(text).parts == tuple(FleetPart(*part) for part in parts)


def test_counts_add_up() -> None:
    fleet = parse_fleet("2x8xH100+4xA100")
    assert fleet.count == 20
    assert [part.total for part in fleet.parts] == [16, 4]
    assert fleet.mixed
    assert not parse_fleet("8xA100+8xa100").mixed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no GPUs given"),
        ("  ", "no GPUs given"),
        ("8x", "the GPU name is missing"),
        ("8", "the GPU name is missing"),
        ("x", "the GPU name is missing"),
        ("8x8", "the GPU name is missing"),
        ("0xH100", "a count must be at least 1"),
        ("2x0xH100", "a count must be at least 1"),
        ("-8xH100", "a count must be a whole number of at least 1"),
        ("1.5xH100", "a count must be a whole number of at least 1"),
        ("1e3xH100", "a count must be a whole number of at least 1"),
        ("8 H100", "write 8xH100"),
        ("a100 x 8", "write 8xa100"),
        ("2x3x4xH100", "too many numbers"),
        ("8xH100+", "a part of the GPU list is empty"),
        ("+8xH100", "a part of the GPU list is empty"),
        ("99999999999999999999xH100", "a count must be at most 1,048,576"),
        ("1048576x8xH100", "8,388,608 GPUs are more than"),
        ("8xH100;rm", "is not a GPU name"),
        ("8xH100,8xA100", "is not a GPU name"),
        ("8x\x1b[31mH100", "is not a GPU name"),
        ("8x../../etc", "is not a GPU name"),
        ("H100" * 400, "too long"),
    ],
)
def test_refusals_show_the_grammar(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_fleet(text, where="--gpus")
    message = str(caught.value)
    assert message.startswith("--gpus: ")
    assert words in message
    assert GRAMMAR in message
    assert message.isprintable()


def test_a_number_is_not_a_fleet() -> None:
    with pytest.raises(InputError, match=r"job\.yaml: gpus: is not a GPU list, got 8"):
        parse_fleet(8, where="job.yaml", key="gpus")  # type: ignore[arg-type]


_NAMES = st.from_regex(r"[a-z]{1,3}[0-9]{1,4}x?(-[a-z0-9]{1,6}){0,2}", fullmatch=True)
_PARTS = st.builds(
    FleetPart, nodes=st.none() | st.integers(1, 64), count=st.integers(1, 256), gpu=_NAMES
).filter(lambda part: not part.gpu.startswith("x"))


@given(st.lists(_PARTS, min_size=1, max_size=3))
def test_what_is_printed_reads_back(parts: list[FleetPart]) -> None:
    fleet = FleetSpec(tuple(parts))
    assert parse_fleet(str(fleet)) == fleet


@given(st.text(max_size=40) | st.text("0123456789xX×+:*. -ahgr", max_size=20))  # noqa: RUF001
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    said, fleet = "read", None
    try:
        fleet = parse_fleet(text)
    except InputError as error:
        said = str(error)
    assert said.isprintable()
    assert fleet is None or parse_fleet(str(fleet)).count == fleet.count >= 1
