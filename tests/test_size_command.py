"""`gpucalc size` at the prompt: the words it takes, the files of a fleet, its table and its document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.errors import InputError
from gpucalc.jobs import ResolvedJob, resolve
from gpucalc.size import size
from gpucalc.size_fleets import kinds
from gpucalc.size_targets import Targets, parse_duration, parse_targets

CATALOG = open_catalog()
Capture = pytest.CaptureFixture[str]
JOB = "models/llama-3-8b"


def job_of(name: str = JOB, *sets: str, task: str | None = None) -> ResolvedJob:
    return resolve(name, CATALOG, sets=sets, task=task, need_gpus=False)


# -- words in -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hours"), [("36h", 36), ("30 days", 720), ("2.5d", 60), ("90min", 1.5), ("2 weeks", 336)]
)
def test_durations(text: str, hours: float) -> None:
    assert parse_duration(text, "--by") == hours * 3600


def test_counts_take_a_prefix_and_the_jobs_own_budget_stands() -> None:
    assert parse_targets(job_of(), tokens="15T").tokens == 15 * 10**12
    assert parse_targets(job_of(), tokens="2e9", by="1h").required_per_s == 2e9 / 3600
    assert parse_targets(job_of(JOB, "run.tokens=5e9"), by="1h").tokens == 5 * 10**9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vendor", "nvidea"], "did you mean NVIDIA"),
        (["--gpu", "h10"], "--gpu: unknown GPU"),
        (["--cloud", "AVS"], "did you mean AWS"),
        (["--arch", "hoper"], "did you mean hopper"),
        (["--by", "5 days"], "goes with a token budget"),
        (["--by", "5", "--tokens", "1B"], "is not a duration"),
        (["--tokens", "many"], "is not a count"),
        (["--tokens", "1e400"], "is not a count"),
        (["--task", "serve", "--tokens", "1B"], "says nothing of a serve run"),
        (["--requests", "5"], "says nothing of a train run"),
        (["--budget", "nan", "--tokens", "1B"], "must be a number above 0"),
        (["--max-price", "-1"], "must be a number above 0"),
        (["--max-gpus", "0"], "must be a number of GPUs"),
        (["--sort", "watts"], "legal: price, speed, gpus, energy"),
        (["--gpu", "h100-sxm-80gb", "--arch", "ampere"], "no GPU is left"),
        (["--fleet", "nowhere.yaml"], "no such file"),
        (["--fleet", "nowhere.yaml", "--cloud", "AWS"], "--cloud or --fleet"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_wrong_words_are_one_line_and_exit_2(words: list[str], said: str, capsys: Capture) -> None:
    assert main(["size", JOB, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_a_fleet_file_says_how_many_and_at_what_price(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("available:\n- {gpus: 6xH100-SXM, usd_per_gpu_hour: 2.1}\n- {gpus: 2x4xL4}\n", "utf-8")
    h100, l4 = kinds(CATALOG, fleet=path)
    assert h100.counts == (1, 2, 4)
    assert l4.counts == (1, 2, 4, 8)
    found = size(job_of(), CATALOG, (h100,), Targets())
    assert found.smallest is not None
    assert found.smallest.usd_per_hour == pytest.approx(4 * 2.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("available: []", "available"),
        ("have: []", "have"),
        ("available:\n- {gpus: 4xA100+4xL4}", "names several GPU kinds"),
        ("available:\n- {gpus: 4xH10O}", "available.0: unknown GPU"),
        ("available:\n- {gpus: 8xA100-SXM-80GB, system: dgx-h100}", "holds h100-sxm-80gb"),
        ("available:\n- {gpus: 8xL4, usd_per_gpu_hour: 0}", "usd_per_gpu_hour"),
    ],
)
def test_a_bad_fleet_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text, "utf-8")
    with pytest.raises(InputError, match=r"fleet\.yaml") as error:
        kinds(CATALOG, fleet=path)
    assert said in str(error.value)


# -- words out ------------------------------------------------------------------------------------

ARGUMENTS = ["size", JOB, "--gpu", "h100-sxm-80gb", "--gpu", "rtx-4090", "--tokens", "10B", "--by", "9 days"]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("more", [[], ["--all"], ["--sort", "energy"]], ids=["best", "all", "energy"])
def test_the_table_keeps_its_width(
    width: int, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*ARGUMENTS, *more]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "\x1b" not in out
    assert ("no price" in out) == ("--all" in more)
    assert ("kWh/M" in out) == ("--sort" in more)
    for word in (
        "cheapest",
        "fastest",
        "smallest",
        "least energy",
        "10,000,000,000 tokens, within 9.0 days",
        "±",
    ):
        assert word in out


def test_a_fleet_that_is_best_twice_is_listed_once(capsys: Capture) -> None:
    """The smallest fleet and the one of least energy, when neither is among the cheapest."""
    words = ["size", "models/llama-3-70b", "--task", "serve", "--cloud", "AWS", "--set", "run.tpot_ms=50"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "least energy  the same as the smallest: 4 x gb200 in aws-p6e-gb200" in out
    rows = out.split("Fleets that meet it", 1)[1].splitlines()
    assert sum(row.startswith("  4 x gb200") for row in rows) == 1


def test_the_document_has_every_fleet(capsys: Capture) -> None:
    assert main([*ARGUMENTS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert next(iter(document)) == "schema_version"
    assert document["met"] is True
    assert document["targets"]["by_s"] == 9 * 86400
    assert document["cheapest"]["total_usd"] > 0
    fleets = document["fleets"]
    assert any(row["usd_per_hour"] is None and row["total_usd"] is None for row in fleets)
    far = document["fastest"]["far_end"]
    assert far["wall_s"] > document["fastest"]["wall_s"] > document["fastest"]["near_end"]["wall_s"]
    assert document["not_planned"]


def test_nothing_meets_is_an_answer_and_no_with_strict(capsys: Capture) -> None:
    words = ["size", JOB, "--gpu", "l4", "--max-gpus", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "No fleet looked at meets this." in out
    assert "1xl4: what it must hold is 4.1 times its memory" in out
    assert main([*words, "--strict"]) == 1


def test_image_networks_are_sized_in_samples(capsys: Capture) -> None:
    assert main(["size", "models/resnet-50", "--gpu", "l4", "--max-gpus", "4"]) == 0
    out = capsys.readouterr().out
    assert "samples/s" in out
    assert "tokens" not in out
