"""No headline number moves unless somebody said why.

`python -m pytest tests/test_predictions.py --record-predictions "why"` writes the table anew and adds
the reason, with how many numbers moved and how far, to the log beside it.
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from predictions import CASES, FIELDS, Moved, moved, predict, written

from gpucalc.catalog import open_catalog

DATA = Path(__file__).parent / "data"
TABLE = DATA / "predictions.csv"
LOG = DATA / "predictions.yaml"
SHOWN = 20


def stored() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def digest() -> str:
    return hashlib.sha256(TABLE.read_bytes()).hexdigest()[:16]


def summary(changes: list[Moved], numbers: int) -> str:
    """How many numbers moved, the rows that came and went, and the largest changes."""
    lines = [f"predictions: {len(changes)} of {numbers} numbers moved"]
    ratios = sorted(abs(one.ratio - 1) for one in changes if one.ratio is not None)
    if ratios:
        middle, most = ratios[len(ratios) // 2], ratios[-1]
        lines[0] += f", by {100 * middle:.2g} % in the median, {100 * most:.3g} % at most"
    lines += [f"  {one}" for one in changes[:SHOWN]]
    if len(changes) > SHOWN:
        lines.append(f"  and {len(changes) - SHOWN} more")
    return "\n".join(lines)


def test_headline_numbers_are_those_recorded(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = predict(open_catalog(None))
    assert {row["case"] for row in rows} == set(CASES)
    before = stored() if TABLE.exists() else []
    changes = moved(before, rows)
    words = summary(changes, len(rows) * len(FIELDS[2:]))
    with capsys.disabled():  # what moved is said whether or not it fails
        print(f"\n{words}", end=" ")
    why = request.config.getoption("--record-predictions")
    if why and changes:
        TABLE.write_text(written(rows), encoding="utf-8")
        log: list[dict[str, Any]] = yaml.safe_load(LOG.read_text(encoding="utf-8")) if LOG.exists() else []
        log.append({"why": why, "moved": words.split(": ")[1].split("\n")[0], "table": digest()})
        LOG.write_text(yaml.safe_dump(log, sort_keys=False, width=100), encoding="utf-8")
        return
    assert not changes, f"{words}\nif this is meant: pytest {Path(__file__).name} --record-predictions 'why'"


def test_the_table_is_the_one_the_log_speaks_of() -> None:
    log = yaml.safe_load(LOG.read_text(encoding="utf-8"))
    assert log[-1]["table"] == digest(), "predictions.csv changed without a reason; see --record-predictions"
    assert all(len(entry["why"].split()) >= 3 for entry in log)


def test_what_moved_is_found_and_ordered() -> None:
    numbers = {"verdict": "fits", "needed_gib": "10", "time_s": "2", "rate_per_s": "8"}
    row = {"model": "m", "case": "fsdp", **numbers}
    other = row | {"model": "n"}
    near = row | {"needed_gib": "10.000001", "time_s": "2.2", "verdict": "marginal"}
    found = moved([row], [near, other])
    assert [(one.model, one.field) for one in found][-1] == ("m", "time_s")
    assert {(one.model, one.field) for one in found} == {
        ("m", "verdict"), ("m", "time_s"), ("n", "verdict"), ("n", "needed_gib"), ("n", "time_s"),
        ("n", "rate_per_s"),
    }  # fmt: skip
    assert str(found[-1]) == "m fsdp time_s: 2 -> 2.2 (+10 %)"
    assert moved([row], [row]) == []
