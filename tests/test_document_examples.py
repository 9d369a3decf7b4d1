"""The worked examples the planning documents' readers need answered, each with its numbers worked by hand."""

from __future__ import annotations

import json

import pytest

from gpucalc.__main__ import main
from gpucalc.builders.build import build_graph
from gpucalc.catalog import open_catalog
from gpucalc.claims import Claim, claims
from gpucalc.counts import Counts, count
from gpucalc.errors import ExitCode, UnknownName
from gpucalc.formulas import comm, rules, rules_machine, serving_memory
from gpucalc.formulas.memory import optimizer_state_bytes, weight_bytes
from gpucalc.spec.claims import ClaimVerdict

CATALOG = open_catalog()
GB, GIB = 1e9, 2**30
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def every() -> dict[str, Claim]:
    return {item.spec.id: item for item in claims(CATALOG)}


def counts_of(name: str) -> Counts:
    return count(build_graph(CATALOG.model(name)))


def number(every: dict[str, Claim], claim: str, name: str) -> float:
    return next(float(item.line.value) for item in every[claim].computed if item.line.name == name)


def verdicts(every: dict[str, Claim], *ids: str) -> set[str]:
    return {every[name].spec.verdict.value for name in ids}


def test_1_weights_of_67b(every: dict[str, Claim]) -> None:
    """67,425,001,472 x 2 / 8; "17 GB" is said to take 8 cards while the page has 4."""
    params = counts_of("deepseek-llm-67b").total.value
    assert params == 67_425_001_472
    shard = rules.weight_shard_bytes
    assert shard(params=params, element_bytes=2, gpus=8) == pytest.approx(16.856 * GB, rel=1e-4)
    assert shard(params=params, element_bytes=2, gpus=4) == pytest.approx(33.71 * GB, rel=1e-3)
    assert shard(params=params, element_bytes=4, gpus=16) == pytest.approx(16.86 * GB, rel=1e-3)
    assert "17 GB takes 8 cards at 2 bytes" in every["B10"].spec.reason
    assert "own example has 4 cards" in every["B10"].spec.reason


def test_2_names_and_active_parameters(every: dict[str, Claim]) -> None:
    with pytest.raises(UnknownName) as refused:
        CATALOG.model("DeepSeek-R1 67B")
    assert {"deepseek-r1", "deepseek-llm-67b"} <= set(refused.value.near)
    assert counts_of("deepseek-r1").total.value == 671_026_404_352
    pro = counts_of("deepseek-v4-pro")
    assert pro.total.value == 1_572_997_179_491
    assert pro.active.value == 49_779_058_787
    assert pro.active.value - pro.input_embedding == pytest.approx(48.85 * GB, rel=1e-3)
    assert number(every, "C04", "active") == 49_779_058_787


def test_3_the_documents_formula(every: dict[str, Claim]) -> None:
    """284B, 13B active, batch 32, Adam: 1136 + 1664 + 2272 = 5072 GB, 634 a card, 34.8 times 18.2."""
    whole = rules.memory_rule_bytes(params=284 * GB, active_params=13 * GB, batch=32, optimizer_bytes=8)
    assert whole == 5072 * GB
    card = rules.memory_rule_card_bytes(memory_rule_bytes=whole, gpus=8)
    assert card == 634 * GB
    assert card / (18.2 * GB) == pytest.approx(34.8, abs=0.05)
    assert number(every, "C07", "native") == pytest.approx(18.23 * GB, rel=1e-3)
    pro = rules.memory_rule_bytes(params=1600 * GB, active_params=19 * GB, batch=32, optimizer_bytes=8)
    assert pro == 21_632 * GB
    assert number(every, "C09", "card") == 2704 * GB
    assert number(every, "C09", "card49") == 3184 * GB
    assert number(every, "C09", "native") == pytest.approx(99.9 * GB, rel=1e-3)


def test_4_training_states() -> None:
    params = counts_of("llama-2-7b").total.value
    assert params == 6_738_415_616
    found = [rules.adam_state_bytes(params=params, shard=8, zero_stage=stage) / GB for stage in range(4)]
    assert found == pytest.approx([107.81, 37.06, 25.27, 13.48], abs=0.006)
    # DeepSpeed's 18 bytes: 2 of weights, 4 of FP32 gradients, 12 of master copy and moments
    eighteen = weight_bytes(params=params, parameter_bytes=2, shard=8, zero_stage=3)
    eighteen += optimizer_state_bytes(params=params, bytes_per_param=16, shard=8, zero_stage=3)
    assert eighteen == pytest.approx(15.16 * GB, rel=1e-3)


def test_5_activations_of_bert_base() -> None:
    shape = {"layers": 12, "seq_len": 512, "batch": 32, "hidden": 768, "heads": 12}
    assert rules.full_activation_bytes(**shape) == pytest.approx(10.41 * GIB, rel=1e-3)
    layer = rules.full_activation_bytes(**{**shape, "layers": 1})
    assert layer == pytest.approx(0.87 * GIB, rel=5e-3)
    assert rules.block_checkpoint_bytes(**shape) - layer == pytest.approx(0.28 * GIB, rel=5e-3)


def test_6_caches() -> None:
    token = serving_memory.kv_token_bytes(
        layers=80, kv_heads=8, tp=1, key_width=128, value_width=128, element_bytes=2
    )
    assert token == 327_680
    assert token * 8 * 4096 == pytest.approx(10.74 * GB, rel=1e-3)
    # Gemma 3 27B: 10 of 62 layers see the whole context, 52 the last 1024 tokens
    gemma = {"kv_heads": 16, "tp": 1, "key_width": 128, "value_width": 128, "element_bytes": 2}
    full = serving_memory.kv_token_bytes(layers=10, **gemma) * 131_072
    sliding = serving_memory.window_request_bytes(
        token_bytes=serving_memory.kv_token_bytes(layers=52, **gemma), window=1024
    )
    assert full == pytest.approx(10.74 * GB, rel=1e-3)
    assert full + sliding == pytest.approx(11.17 * GB, rel=1e-3)
    latent = serving_memory.latent_token_bytes(layers=61, latent=512, rope_width=64, element_bytes=2)
    assert latent == 70_272
    for sparse, heavy, gib in ((30, 31, 9.617), (21, 20, 6.719)):  # V4-Pro, V4-Flash
        held = serving_memory.compressed_token_bytes(
            layers=sparse, entry_width=512, index_width=128, ratio=4, element_bytes=2
        ) + serving_memory.compressed_token_bytes(
            layers=heavy, entry_width=512, index_width=0, ratio=128, element_bytes=2
        )
        assert held * 1_048_576 == pytest.approx(gib * GIB, rel=1e-4)


def test_7_links(every: dict[str, Claim]) -> None:
    assert number(every, "B14", "ratio") == 9.375
    assert every["B14"].spec.stated == "3-5"
    assert number(every, "A09", "ratio") == pytest.approx(4.69, abs=0.005)
    lane = rules_machine.lane_bytes_per_s
    assert lane(transfers_per_s=16e9, lanes=16) == pytest.approx(31.5 * GB, rel=1e-3)
    assert lane(transfers_per_s=16e9, lanes=4) == pytest.approx(7.9 * GB, rel=5e-3)
    reduce = rules_machine.all_reduce_transfer_s
    assert reduce(message_bytes=GB, ranks=8, bus_bytes_per_s=240 * GB) == pytest.approx(7.29e-3, rel=1e-3)
    gradients = 134.850002944 * GB
    assert reduce(message_bytes=gradients, ranks=4, bus_bytes_per_s=25 * GB) == pytest.approx(8.1, abs=0.1)
    assert reduce(message_bytes=gradients, ranks=4, bus_bytes_per_s=240 * GB) == pytest.approx(0.84, abs=0.01)


def test_8_scaling(every: dict[str, Claim]) -> None:
    assert number(every, "A02", "fp32") == pytest.approx(7.78, abs=0.005)
    assert number(every, "A02", "mixed") == pytest.approx(6.94, abs=0.006)
    assert verdicts(every, "A02") == {"sound"}
    assert number(every, "B50", "bert") * 8 == pytest.approx(7.92)
    assert number(every, "A39", "many") == pytest.approx(9.3 * 3600, rel=0.01)
    assert number(every, "A39", "implied") == 0.5
    assert verdicts(every, "A39") == {"contradictory"}


def test_9_rates(every: dict[str, Claim], capsys: Capture) -> None:
    assert number(every, "B51", "four") == pytest.approx(0.224, abs=5e-4)
    assert number(every, "B51", "one") == pytest.approx(0.897, abs=5e-4)
    assert number(every, "B51", "states") == pytest.approx(1079 * GB, rel=1e-3)
    assert verdicts(every, "B51", "B52") == {"contradictory"}
    words = ["plan", "deepseek-llm-67b", "--gpus", "4xA100-80GB", "--task", "train", "--strict", "-q"]
    assert main(words) == ExitCode.NO
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_10_power_and_lanes(every: dict[str, Claim]) -> None:
    assert number(every, "B15", "a100p") == 1200 > 850
    assert number(every, "B16", "supply") == pytest.approx(1756, abs=0.5)
    assert number(every, "B16", "supply4090") == pytest.approx(2691, abs=0.5)
    assert number(every, "C24", "machine") == 3750 > 2 * 1600
    assert number(every, "C24", "redundant") == 1
    assert number(every, "B17", "each") == 4


def test_11_unlike_cards(every: dict[str, Claim]) -> None:
    share = rules_machine.batch_share(batch=64, own_rate=312, other_rate=71.2)
    assert (round(share), round(64 - share)) == (52, 12)
    assert number(every, "A06", "peaks") == pytest.approx(0.37, abs=0.005)
    assert number(every, "A16", "inverted") == pytest.approx(22.65, abs=0.05)
    # by measured rates, which plans prefer to peaks
    assert number(every, "A16", "share") == pytest.approx(40.7, abs=0.05)


def test_12_parallel_plan(every: dict[str, Claim], capsys: Capture) -> None:
    layers = CATALOG.model("deepseek-v4-pro").layers
    assert layers == 61
    assert all(layers % pp for pp in (2, 4, 8))
    assert number(every, "C33", "stage") == 8
    assert number(every, "C33", "experts") == 48
    assert rules.bubble_share(pp=8, micro_batches=4) == pytest.approx(0.636, abs=5e-4)
    assert rules.bubble_share(pp=8, micro_batches=32) == pytest.approx(0.179, abs=6e-4)
    assert number(every, "C34", "states") == 400 * GB
    assert main(["plan", "deepseek-v4-pro", "--gpus", "64xH200", "--strict", "-q"]) == ExitCode.NO
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_13_checkpoints(every: dict[str, Claim]) -> None:
    assert number(every, "A32", "interval") == pytest.approx(3220, abs=0.5)
    assert number(every, "A32", "share") == 0.12
    # the write for which 500 s are right: 500^2 / (2 x 86,400)
    assert rules.save_interval_s(write_s=500**2 / 172_800, mtbf_s=86_400) == pytest.approx(500)
    assert number(every, "A33", "full") == pytest.approx(944 * GB, rel=1e-3)


def test_14_spares_and_soak(every: dict[str, Claim]) -> None:
    assert number(every, "A47", "sixty_four") == 71
    assert number(every, "C17", "gpu_hours") == 192


def test_15_cooling(every: dict[str, Claim]) -> None:
    assert number(every, "C25", "air") == pytest.approx(329, abs=0.5)
    assert every["C25"].spec.stated == 35


def test_16_what_the_documents_read_off_a_machine(every: dict[str, Claim]) -> None:
    """Which of their checks show what they are said to show."""
    assert verdicts(every, "B22", "C26", "C27", "C45", "C46") == {"sound"}
    assert verdicts(every, "B21", "B23") == {"wrong"}


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        ("A28", "not a list"),
        ("B45", "stray word"),
        ("B21", "grep keeps only lines that name nvidia"),
        ("B41", "exclude each other"),
        ("B31", "bucket_cap_mb"),
        ("B44", "zero at the first epoch"),
        ("A31", "1024 rows, not 512"),
    ],
)
def test_17_commands_that_do_not_do_what_is_said(claim: str, word: str, every: dict[str, Claim]) -> None:
    assert every[claim].spec.verdict is ClaimVerdict.WRONG
    assert word in every[claim].spec.reason


def test_17_pipe_is_gone_since(every: dict[str, Claim]) -> None:
    assert "torch.distributed.pipelining" in every["B33"].spec.reason


def test_18_every_claim_with_its_sum_and_verdict(capsys: Capture) -> None:
    assert main(["claims", "--json"]) == ExitCode.ANSWERED
    rows = json.loads(capsys.readouterr().out)["claims"]
    assert len(rows) == 153
    assert all(row["verdict"] and row["reason"] for row in rows)
    assert sum(bool(row["computed"]) for row in rows) > 95


def test_synchronisation_is_bounded() -> None:
    """1.0, 1.75 and 1.97 times the message on 2, 8 and 64 ranks; never exponential."""
    factors = [comm.all_reduce_bus_factor(ranks=ranks) for ranks in (2, 8, 64, 10**6)]
    assert factors[:3] == [1, 1.75, 1.96875]
    assert factors[3] < 2
