"""The planning documents' claims: all of them, judged, their numbers worked out and worked by hand here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog, open_catalog, shipped
from gpucalc.claims import Claim, claim, claims, tally
from gpucalc.errors import ExitCode, InputError, UnknownName
from gpucalc.spec.claims import DOCUMENTS, ClaimVerdict

GB, TB, PEAK = 1e9, 1e12, 1e12
IDS = [f"A{n:02}" for n in range(1, 49)] + [f"B{n:02}" for n in range(1, 53)]
IDS += [f"C{n:02}" for n in range(1, 54)]

# Every number the claims show, worked out by hand from the statement and the evidence.
HAND: dict[str, dict[str, float]] = {
    "A02": {"fp32": 2855 / 367, "mixed": 8322 / 1200, "tf": 9510 / 1270, "efficiency": 0.9},
    "A03": {"v100": 1200 / 367, "v100x8": 8322 / 2855, "bert": 580 / 317},
    "A04": {"a100": 0.78e12, "rtx3090": 71.2e12 / 350},
    "A05": {"equal": 1},
    "A06": {"equal": 2 * 905 / 2487, "peaks": 142.4 / 383.2},
    "A07": {"v100": 300 * GB, "a100": 600 * GB},
    "A08": {"one": 31.507692 * GB, "both": 63.015385 * GB},
    "A09": {"ratio": 4.6875, "pcie3": 15.753846 * GB, "dgx1": 150 / 15.753846},
    "A10": {"gb": 1.75 / 242},
    "A11": {"sqrt": 19.595918, "gone": 1 - 19.595918 / 96},
    "A12": {"flops": 1 / 3, "measured": 7.75 / 5.99},
    "A13": {"towers": 162 / 13.3},
    "A14": {"tf32": 156 * PEAK, "fp32": 19.5 * PEAK},
    "A15": {"cores": 35.58144 * PEAK, "fp32": 35.6 * PEAK},
    "A16": {
        "page": 35.6 / 19.5,
        "measured": 1582 / 905,
        "share": 64 * 1582 / 2487,
        "inverted": 64 * 19.5 / 55.1,
    },
    "A19": {"equal": 250 / 437},
    "A20": {"copy": 10 / 26.3},
    "A21": {"mixed": 16},
    "A23": {"ring": 14, "tree": 14},
    "A24": {"eight": 14, "thirty_two": 62, "measured": 22.57 / 9.98},
    "A25": {"ring": 62, "tree": 18},
    "A26": {"h100": 424 / 384, "h100_8g": 468 / 391, "model": 92 * GB},
    "A27": {"flat": 0.075, "levels": 1.75 / 300 + 0.04, "gain": 1 - (1.75 / 300 + 0.04) / 0.075},
    "A29": {"share": 64 * 1582 / 2487},
    "A30": {"message": 4096 * 4096 * 2},
    "A31": {"rows": 1024},
    "A32": {"interval": (2 * 60 * 86400) ** 0.5, "bloom": 5652.75, "share": 0.12},
    "A33": {"full": 943.95002 * GB, "eight": 7.55160017 * TB},
    "A35": {"ssd": 2581.24 / 663, "sync": 1.5 * 0.1476 / 233},
    "A36": {
        "rate": 905 / 1582,
        "fleet": 2 + 2 * 905 / 1582,
        "implied": 0.55,
        "peaks": 71.2 / 312,
        "by_peaks": 2 + 2 * 71.2 / 312,
    },
    "A39": {
        "one_128": 7038 * 65536 / 580,
        "one_512": 1563 * 32768 / 210,
        "many_128": 7038 * 65536 / 18119,
        "many_512": 1563 * 32768 / 6464,
        "tf32_128": 7038 * 65536 / 9859,
        "tf32_512": 1563 * 32768 / 3293,
        "one": 288.648 * 3600,
        "many": 9.27211 * 3600,
        "tf32": 17.3158 * 3600,
        "implied": 0.5,
    },
    "A40": {"states": 335_141_888 * 16},
    "A41": {
        "h768": 1_358_954_496,
        "h2048": 9_663_676_416,
        "h4096": 38_654_705_664,
        "bert": 11_173_625_856,
    },
    "A43": {"c2c": 900 * GB},
    "A47": {"sixty_four": 71, "eight": 9, "llama": 0.78 * 86400 / 11135},
    "B01": {"r1": 671_026_404_352 * 2 / 8},
    "B02": {"r1": 671_026_404_352, "llm_67b": 67_425_001_472, "ratio": 9.95219},
    "B03": {"fp16": 134_850_002_944, "int8": 67_425_001_472, "card": 80 * 2**30},
    "B04": {"gradients": 134_850_002_944, "pcie": 7.995059, "nvlink": 1.5 * 134.850003 / 233},
    "B06": {"slower": 2039 / 300},
    "B07": {"one": 134_850_002_944, "r1": 671_026_404_352 / 4, "efficiency": 0.8},
    "B09": {"rule": 33_712_500_736, "fp16": 16_856_250_368, "ratio": 2},
    "B10": {
        "four": 33_712_500_736,
        "eight": 16_856_250_368,
        "sixteen": 16_856_250_368,
        "rule_four": 67_425_001_472,
    },
    "B11": {"need": 20.4 * GB, "card": 64 * GB},
    "B12": {"a100": 600 * GB},
    "B13": {"one": 31.507692 * GB, "both": 63.015385 * GB},
    "B14": {"ratio": 9.375, "four": 216.7 / 25.3, "eight": 242 / 15},
    "B15": {"a100p": 1200, "a100s": 1600, "r4090": 1800, "r3090": 1400},
    "B16": {"supply": 1756.25, "over": 1200 / 850, "cards4090": 1800, "supply4090": 2691.25, "carried": 1},
    "B17": {"needed": 64, "each": 4, "rate": 7.876923 * GB},
    "B18": {"four": 16, "eight": 32},
    "B19": {"checkpoint": 943.95002 * GB},
    "B20": {"three": 3.9384615 * GB, "four": 7.876923 * GB},
    "B31": {"gradients": 1_340_567_552, "buckets": 52},
    "B32": {"faster": 0.82 / 0.65},
    "B33": {"bubble": 3 / 11},
    "B35": {
        "bert": 1 - 6775 / 8681,
        "llama": 1 - 24.9 / 42.9,
        "long": 1 - 31 / 240,
        "full": 11_173_625_856,
        "block": 1_233_125_376,
    },
    "B36": {"flops": 1 / 3},
    "B37": {"ddp": 107.81465 * GB, "z1": 37.061286 * GB, "z2": 25.269059 * GB, "z3": 13.476831 * GB},
    "B38": {"z3": 0.75, "z3_8": 0.875, "z1_5": 0.6, "z1_4": 0.5625},
    "B40": {"gradients": 134_850_002_944, "slow": 1.5 * 134.850003 / 1.4},
    "B44": {"first": 0, "second": 0.1},
    "B50": {"stated": 0.775, "bert": 0.99},
    "B51": {"states": 1078.800024 * GB, "four": 280 / 1248, "one": 280 / 312, "memory": 320 * GB},
    "B52": {"states": 1078.800024 * GB, "efficiency": 0.775},
    "C01": {"total": 284_332_230_231},
    "C02": {"active": 13_799_622_231, "table": 529_530_880},
    "C03": {"total": 1_572_997_179_491},
    "C04": {"active": 49_779_058_787, "ratio": 49.779058787 / 19},
    "C05": {"total": 5.53225, "active": 3.60728},
    # 140 bytes a parameter; 16 of states
    "C06": {"rule": 6_738_415_616 * 140, "states": 107.81465 * GB},
    # 4 x 284.33 + 4 x 13 x 32 + 8 x 284.33
    "C07": {
        "rule": 5075.986763 * GB,
        "card": 634.498345 * GB,
        "native": 18.227442 * GB,
        "scales": 19.309572 * GB,
    },
    "C08": {"states": 568.66446 * GB, "fp16": 71.083058 * GB, "card": 23.64 * 2**30},
    "C09": {
        "rule": 21_632 * GB,
        "card": 2704 * GB,
        "rule49": 25_472 * GB,
        "card49": 3184 * GB,
        "native": (1547.396186 / 2 + 25.600993) / 8 * GB,
        "scales": (1547.396186 * 17 / 32 + 25.600993) / 8 * GB,
    },
    "C10": {"a80": 12, "a141": 7},
    "C11": {"ridge": 312_000 / 2039},
    "C12": {"l4": 121 * PEAK, "a10": 125 * PEAK},
    "C13": {"h100": 900 * GB, "h100_fp16": 989.4 * PEAK, "v100": 300 * GB, "v100_memory": 900 * GB},
    "C14": {"two": 1, "eight": 1.75, "many": 1.96875, "zero3": 2.953125 * GB},
    "C15": {"flash": 568_664_460_462},
    "C16": {"each": 256},
    "C17": {"gpu_hours": 192},
    "C18": {"fp32": 16, "mixed": 16, "states": 0, "bert": 1 - 13939 / 14949},
    "C20": {"fp32": 0.75, "bytes": 1.015625, "fp16": 0.4921875},
    "C22": {"two_four": 0.5625, "unstructured": 1},
    "C23": {"lanes": 160},
    "C24": {"cards": 3000, "machine": 3750, "shared": 6, "redundant": 1},
    "C25": {"air": 3.16 * 3750 / 36},
    "C27": {"windows": 240 * 2**30},
    "C29": {"states": 568.66446 * GB, "cards": 72, "global": 128, "each": 1024},
    "C30": {"batch": 128},
    "C31": {"z1": 0.65625, "z3": 0.875},
    "C32": {"states": 568.66446 * GB, "speedup": 17250 / 1300, "resnet": 17250 / 1300 / 16},
    "C33": {"stage": 8, "experts": 48},
    "C34": {"states": 400 * GB, "cards": 400, "days": 6 * 49 * 33e21 / (64 * 989.4e12 * 0.4) / 86400},
    "C35": {"exposed": 0},
    "C36": {"four": 7 / 11, "thirty_two": 7 / 39},
    "C37": {"interval": (2 * 60 * 86400) ** 0.5},
    "C39": {"w300": 375, "w450": 600},
    "C41": {"bus": 222.3252 * GB, "ours": 242 * GB},
    "C42": {"hops": 14},
    "C44": {"lost": 550},
    "C48": {"h200": 141 * 2**30, "b300": 288 * GB, "node": 1128 * 2**30},
    "C52": {"hours": 250_000 / 24.92},
}


@pytest.fixture(scope="module")
def every() -> dict[str, Claim]:
    return {item.spec.id: item for item in claims(open_catalog())}


def test_all_claims_are_there_with_verdict_place_reason_and_evidence(every: dict[str, Claim]) -> None:
    assert sorted(every) == IDS
    assert len(every) == 153
    for item in every.values():
        assert item.spec.title in DOCUMENTS.values()
        assert re.fullmatch(r"\d(\.\d)?", item.spec.section)
        assert len(item.spec.reason) > 20
        assert all(said.reference and said.says for said in item.evidence)


def test_counts_of_verdicts(every: dict[str, Claim]) -> None:
    assert tally(every.values()) == {
        "sound": 38,
        "approximate": 47,
        "contradictory": 20,
        "wrong": 28,
        "unverifiable": 20,
    }


def test_every_computable_claim_is_worked_by_hand(every: dict[str, Claim]) -> None:
    assert {name for name, item in every.items() if item.computed} == set(HAND)


@pytest.mark.parametrize("name", sorted(HAND))
def test_numbers_equal_the_hand_worked_ones(name: str, every: dict[str, Claim]) -> None:
    found = {item.line.name: item.line.value for item in every[name].computed}
    assert found == pytest.approx(HAND[name], rel=1e-5)


def test_a_verdict_agrees_with_its_own_arithmetic(every: dict[str, Claim]) -> None:
    for item in every.values():
        ratio = item.times_stated
        if ratio is None or item.spec.verdict is ClaimVerdict.UNVERIFIABLE:
            continue
        if item.spec.verdict is ClaimVerdict.SOUND:
            assert ratio == pytest.approx(1, rel=0.1), item.spec.id
        elif item.spec.verdict is ClaimVerdict.APPROXIMATE:
            assert ratio == pytest.approx(1, rel=0.35), item.spec.id
        else:
            assert abs(ratio - 1) > 0.1, item.spec.id


def test_a_verdict_nobody_could_check_says_so(every: dict[str, Claim]) -> None:
    """What rests on nothing published is unverifiable, and no other claim rests on nothing."""
    for item in every.values():
        keys = {said.key for said in item.evidence}
        if "none_found" in keys:
            assert item.spec.verdict is ClaimVerdict.UNVERIFIABLE, item.spec.id
        if keys <= {"recall", "ashrae"}:  # from memory alone
            assert item.spec.verdict is ClaimVerdict.UNVERIFIABLE, item.spec.id


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("C07", "contradictory", ["634 GB a card", "18.2 GB", "bare shard"]),
        ("B16", "contradictory", ["1,200 W", "exceeds the 850 W supply"]),
        ("A14", "wrong", ["plain FP32", "156, eight times"]),
        ("C04", "wrong", ["49B", "less than the 25.6B"]),
        ("A16", "contradictory", ["1.8 times the A100", "fast card"]),
        ("B10", "contradictory", ["8 cards at 2 bytes", "33.7 GB"]),
    ],
)
def test_contradictions_are_said_plainly(
    name: str, verdict: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["claims", name]) == ExitCode.ANSWERED
    shown = " ".join(capsys.readouterr().out.split())
    assert verdict.upper() in shown
    assert all(word in shown for word in words)


# -- the command ------------------------------------------------------------------------------------


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["claims", *words, "--json"]) == ExitCode.ANSWERED
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_is_a_list_under_claims(capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys)
    assert [item["id"] for item in document["claims"]] == IDS
    assert sum(document["verdicts"].values()) == 153
    one = run_json(capsys, "C04")["claims"]
    assert len(one) == 1
    assert one[0]["stated"] == 19
    assert one[0]["ours"] == pytest.approx(49.779058787)
    assert one[0]["document"]["title"] == "task selection and deployment"
    assert one[0]["computed"][1]["formula"] == "times_as_much"
    assert all(said["source"] for said in one[0]["evidence"])


def test_filters(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = run_json(capsys, "--verdict", "wrong")["claims"]
    assert {item["verdict"] for item in wrong} == {"wrong"}
    by_title = run_json(capsys, "--document", "single-machine")["claims"]
    assert [item["id"] for item in by_title] == IDS[48:100]
    assert by_title == run_json(capsys, "--document", "003")["claims"]
    links = run_json(capsys, "--topic", "links", "--verdict", "sound")["claims"]
    assert {item["id"] for item in links} == {"A09", "B12", "B22", "C26"}


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["C99"], "did you mean"),
        (["--verdict", "wrnog"], "did you mean wrong?"),
        (["--topic", "link"], "did you mean links"),
        (["--document", "005"], "003 (single-machine multi-card deployment)"),
    ],
)
def test_unknown_names_are_refused(words: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert near in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_within_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ([], ["C07"], ["A39"], ["B16"]):
        assert main(["claims", *words]) == ExitCode.ANSWERED
        assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= width


# -- the catalogue ----------------------------------------------------------------------------------


def catalog_with(folder: Path, topic: str, text: str) -> Catalog:
    (folder / "claims").mkdir(exist_ok=True)
    (folder / "claims" / f"{topic}.yaml").write_text(text, encoding="utf-8")
    return Catalog([folder, shipped()])


ROW = """id: mine
name: Mine
claims:
- id: X01
  document: "000"
  section: "1"
  kind: figure
  quantity: power
  statement: four cards draw 1 kW
  stated: 1000
  unit: W
  verdict: wrong
  reason: they draw what their limits are
  evidence:
  - {source: this_catalog, says: board power}
  computed:
  - name: power
    what: four cards
    formula: cards_power_w
    inputs: {gpus: 4, tdp_w: "gpus/a100-pcie-80gb:tdp"}
    compare: true
"""


def test_a_claim_of_ones_own(tmp_path: Path) -> None:
    found = claim(catalog_with(tmp_path, "mine", ROW), "x01")
    assert found.times_stated == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  unit: W\n", "  unit: W\n  valeu: 3\n", "claims.0.valeu"),
        ("verdict: wrong", "verdict: false-ish", "claims.0.verdict"),
        ("unit: W", "unit: watt", "claims.0.unit"),
        ("unit: W", "unit: GB", "what is compared is in W, what is stated in GB"),
        ("formula: cards_power_w", "formula: card_power_w", "did you mean cards_power_w"),
        ("gpus: 4, ", "cards: 4, ", "claims.0.computed.0.inputs"),
        ("a100-pcie-80gb:tdp", "a100-pcie-80gb:tpd", "no such fact"),
        ('"gpus/a100-pcie-80gb:tdp"', '"=other"', "no earlier number of this name"),
        ("source: this_catalog", "source: that_catalog", "did you mean this_catalog"),
        ("    formula: cards_power_w\n", "", "needs a formula or a figure"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in ROW
    known = catalog_with(tmp_path, "mine", ROW.replace(old, new))
    with pytest.raises((InputError, UnknownName)) as refused:
        claim(known, "X01")
    assert "mine.yaml" in str(refused.value)
    assert said in str(refused.value)


def test_numbers_follow_the_catalogue(tmp_path: Path) -> None:
    """Nothing is stored: another power limit in the catalogue is another number in the claim."""
    (tmp_path / "gpus").mkdir()
    text = (shipped() / "gpus" / "a100-pcie-80gb.yaml").read_text(encoding="utf-8")
    changed = re.sub(r"(tdp: \{value: )300", r"\g<1>250", text)
    assert changed != text
    (tmp_path / "gpus" / "a100-pcie-80gb.yaml").write_text(changed, encoding="utf-8")
    found = claim(Catalog([tmp_path, shipped()]), "B15")
    assert found.computed[0].line.value == 1000
