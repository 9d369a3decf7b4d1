"""Checks: levels, matrices, places in files, baselines, and what must not happen."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpucalc import catalog_entries, catalog_names
from gpucalc import check as check_module
from gpucalc.__main__ import main
from gpucalc.catalog import Catalog
from gpucalc.check import check
from gpucalc.check_compare import _fits
from gpucalc.check_findings import RULES, Report, Status, read_baseline
from gpucalc.errors import InputError
from gpucalc.report import files as report_files
from gpucalc.spec.check import QUANTITIES

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])
JOB = """\
name: pretrain
model: llama-3-8b
gpus: 8xh100-sxm-80gb
run: {task: train, framework: fsdp, seq_len: 8192, micro_batch: 1, global_batch: 128, recompute: full}
"""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a job file and stands beside it."""
    monkeypatch.chdir(tmp_path)

    def to(text: str, name: str = "job.yaml") -> str:
        (tmp_path / name).write_text(text, "utf-8")
        return name

    return to


def held(text: str, write: Callable[..., str], **more: Any) -> Report:
    return check([write(text)], CATALOG, **more)


# -- findings -------------------------------------------------------------------------------------


def test_a_finding_has_its_place_value_limit_unit_and_equation(write: Callable[..., str]) -> None:
    report = held(JOB + "expect:\n  fits: true\n  peak_gib: <=10 GiB\n  gpus: 8\n", write)
    fits, peak, gpus = report.findings
    assert [f.status for f in report.findings] == [Status.PASS, Status.FAIL, Status.PASS]
    assert (peak.rule, peak.file, peak.line, peak.job) == ("peak_gib", "job.yaml", 7, "pretrain")
    assert (peak.limit, peak.unit) == (10, "GiB")
    assert isinstance(peak.value, float)
    assert peak.equation is not None
    assert "(allocated)" in peak.equation
    assert peak.equation.endswith("bytes")
    total = float(peak.equation.rpartition(" = ")[2].removesuffix(" bytes").replace("_", ""))
    assert total / 2**30 == pytest.approx(peak.value, rel=1e-6)
    assert fits.value == "fits"
    assert fits.equation is not None
    assert "<=" in fits.equation
    assert gpus.value == 8


def test_equations_of_formulas_have_their_values_in_them(write: Callable[..., str]) -> None:
    (mfu,) = held(JOB + "expect: {mfu: '>=90 %'}\n", write).findings
    assert mfu.equation is not None
    code = mfu.equation.split(" = ")[1]
    assert 100 * eval(code) == pytest.approx(mfu.value, rel=1e-5)


@pytest.mark.parametrize(
    ("gpus", "wanted", "status"),
    [
        ("8xh100-sxm-80gb", "true", Status.PASS),
        ("8xh100-sxm-80gb", "marginal", Status.PASS),
        ("8xh100-sxm-80gb", "false", Status.FAIL),
        ("2xrtx4090", "true", Status.FAIL),
        ("2xrtx4090", "marginal", Status.FAIL),
        ("2xrtx4090", "false", Status.PASS),
    ],
)
def test_fits_asks_for_the_verdict(gpus: str, wanted: str, status: Status, write: Callable[..., str]) -> None:
    text = JOB.replace("8xh100-sxm-80gb", gpus) + f"expect: {{fits: {wanted}}}\n"
    assert held(text, write).findings[0].status is status


def test_a_marginal_plan_warns_either_way() -> None:
    from gpucalc.plan.answer import Level

    for wanted in ("fits", "does_not_fit"):
        assert _fits(wanted, Level.MARGINAL, Status.FAIL) is Status.WARN
    assert _fits("marginal", Level.MARGINAL, Status.FAIL) is Status.PASS


def test_speed_asked_of_a_plan_that_does_not_fit_is_a_miss(write: Callable[..., str]) -> None:
    text = JOB.replace("8xh100-sxm-80gb", "2xrtx4090") + "expect: {step_s: '<=1000'}\n"
    (finding,) = held(text, write).findings
    assert finding.status is Status.FAIL
    assert finding.value is None
    assert "does not fit and has no speed" in finding.message


def test_a_job_without_expectations_is_expected_to_fit(write: Callable[..., str]) -> None:
    (finding,) = held(JOB, write).findings
    assert (finding.rule, finding.status) == ("fits", Status.PASS)
    assert "the job has no expect:" in finding.message


def test_every_combination_of_a_matrix_is_a_plan_of_its_own(write: Callable[..., str]) -> None:
    matrix = "matrix: {gpus: [8xh100-sxm-80gb, 2xrtx4090], batch: [16, 32]}\n"
    report = held(JOB + "expect: {fits: true}\n" + matrix, write)
    assert [(f.cell, f.status.value) for f in report.findings] == [
        ("gpus=8xh100-sxm-80gb, batch=16", "pass"),
        ("gpus=8xh100-sxm-80gb, batch=32", "pass"),
        ("gpus=2xrtx4090, batch=16", "fail"),
        ("gpus=2xrtx4090, batch=32", "fail"),
    ]
    assert len({f.fingerprint for f in report.findings}) == 4


def test_a_limit_nearer_than_the_value_is_known_says_so(write: Callable[..., str]) -> None:
    (exact,) = held(JOB + "expect: {peak_gib: '<=1000'}\n", write).findings
    (near,) = held(JOB + f"expect: {{peak_gib: '<={_peak(write) * 1.001:.3f}'}}\n", write).findings
    assert "expected error" not in exact.message
    assert "reaches across the limit" in near.message


def _peak(write: Callable[..., str]) -> float:
    value = held(JOB + "expect: {peak_gib: '<=1'}\n", write).findings[0].value
    assert isinstance(value, float)
    return value


SERVED = """\
model: llama-3-8b
gpus: 1xh100-sxm-80gb
run: {task: serve, framework: vllm, isl: 1024, osl: 256, concurrency: 16, max_model_len: 8192}
expect:
  kv_tokens: ">=100000"
  max_concurrency: ">=8"
  ttft_ms: "<=2 s"
  tpot_ms: "<=100"
  tokens_per_s: ">=100"
  tokens_per_s_per_user: ">=5"
"""


def test_expectations_of_a_deployment(write: Callable[..., str]) -> None:
    report = held(SERVED, write)
    assert {f.rule: f.status.value for f in report.findings if f.status is not Status.PASS} == {}
    assert all(isinstance(f.value, float) for f in report.findings)


def test_a_key_of_the_other_task_is_not_known(write: Callable[..., str]) -> None:
    (finding,) = held(JOB + "expect: {ttft_ms: '<=100'}\n", write).findings
    assert finding.status is Status.FAIL
    assert "a plan of training has no ttft" in finding.message


def test_every_rule_has_an_id_and_words() -> None:
    assert set(QUANTITIES) < set(RULES)
    for key, rule in RULES.items():
        assert (rule.id, bool(rule.title), bool(rule.help)) == (key, True, True)


# -- broken jobs ----------------------------------------------------------------------------------

MANY = """\
jobs:
  - {name: good, model: llama-3-8b, gpus: 8xh100-sxm-80gb, run: {task: train, framework: fsdp}}
  - name: unknown
    model: lama-3-8b
    gpus: 8xh100-sxm-80gb
    run: {task: train, framework: fsdp}
  - name: illegal
    model: llama-3-8b
    gpus: 8xh100-sxm-80gb
    run:
      task: train
      framework: megatron
      tp: 3
  - name: wrong
    model: llama-3-8b
    gpus: 8xh100-sxm-80gb
    run: {task: train, framework: fsdp}
    expect:
      fit: true
  - just text
"""


def test_a_broken_job_is_its_own_finding_and_the_rest_still_run(write: Callable[..., str]) -> None:
    write("model: [", "bad.yaml")
    report = check([write(MANY), "bad.yaml", "missing.yaml", write(JOB, "last.yaml")], CATALOG)
    found = [(f.file, f.job, f.rule, f.line, f.status.value) for f in report.findings]
    assert found == [
        ("job.yaml", "good", "fits", 2, "pass"),
        ("job.yaml", "unknown", "job", 4, "fail"),
        ("job.yaml", "illegal", "job", 10, "fail"),
        ("job.yaml", "wrong", "job", 19, "fail"),
        ("job.yaml", "job[4]", "job", 20, "fail"),
        ("bad.yaml", "bad", "job", 2, "fail"),
        ("missing.yaml", "missing", "job", 1, "fail"),
        ("last.yaml", "pretrain", "fits", 1, "pass"),
    ]
    assert "did you mean llama-3-8b" in report.findings[1].message
    assert report.exit_code() == 1


def test_a_plan_refuses_a_wrong_expectation_too(write: Callable[..., str], capsys: Capture) -> None:
    write(JOB + "expect: {fit: true}\n")
    assert main(["plan", "job.yaml"]) == 2
    assert "job.yaml:5: expect" in capsys.readouterr().err


def test_an_internal_error_is_a_finding_and_its_own_exit_code(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(check_module, "plan_job", fail)
    report = held(JOB, write)
    assert report.findings[0].rule == "internal"
    assert report.exit_code() == 3


@pytest.mark.parametrize("text", ["[]", "jobs: []", "jobs: {a: 1}", "jobs: []\nname: x", "3", ""])
def test_a_file_without_jobs_is_a_finding(text: str, write: Callable[..., str]) -> None:
    (finding,) = held(text, write).findings
    assert finding.rule == "job"


def test_control_characters_of_a_file_stay_visible(write: Callable[..., str]) -> None:
    report = held(JOB.replace("pretrain", '"a\\e[31mb"'), write)
    assert report.findings[0].job == "a\\x1b[31mb"


# -- exit codes and files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "flags", "code"),
    [
        ("{fits: true}", [], 0),
        ("{fits: false}", [], 1),
        ("{warn: {fits: false}}", [], 0),
        ("{warn: {fits: false}}", ["--strict"], 1),
        ("{fit: true}", [], 2),
        ("{fits: true}", ["--format", "xml"], 2),
        ("{fits: true}", ["-o", "a", "-o", "b"], 2),
        ("{fits: true}", ["--format", "json", "--format", "table"], 2),
        ("{fits: true}", ["--format", "json", "-o", "nowhere/report.json"], 2),
        ("{fits: true}", ["--baseline", "job.yaml"], 2),
    ],
)
def test_exit_codes(
    expect: str, flags: list[str], code: int, write: Callable[..., str], capsys: Capture
) -> None:
    assert main(["check", write(f"{JOB}expect: {expect}\n"), *flags]) == code
    out, err = capsys.readouterr()
    assert err.count("\n") <= 1
    assert bool(out) != bool(err)


def test_several_formats_in_one_run_each_in_its_file(write: Callable[..., str], capsys: Capture) -> None:
    flags = [
        "--format",
        "junit",
        "--format",
        "github",
        "--format",
        "json",
        "-o",
        "a.xml",
        "-o",
        "-",
        "-o",
        "b.json",
    ]
    assert main(["check", write(JOB + "expect: {fits: false}\n"), *flags]) == 1
    assert Path("a.xml").read_text("utf-8").startswith("<?xml")
    assert json.loads(Path("b.json").read_text("utf-8"))["summary"]["failed"] == 1
    assert capsys.readouterr().out.startswith("::error ")
    assert sorted(os.listdir()) == ["a.xml", "b.json", "job.yaml"]


def test_quiet_prints_the_counts_alone(write: Callable[..., str], capsys: Capture) -> None:
    assert main(["check", write(JOB), "--quiet"]) == 0
    assert capsys.readouterr().out == "1 check of 1 plan: 1 passed\n"


def test_a_full_disk_leaves_nothing_half_written(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    job = write(JOB)
    Path("a.xml").write_text("before", "utf-8")
    synced = os.fsync
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(descriptor)

    monkeypatch.setattr(report_files.os, "fsync", full)
    flags = ["--format", "junit", "--format", "json", "-o", "a.xml", "-o", "b.json"]
    assert main(["check", job, *flags]) == 2
    assert "b.json: cannot be written: No space left on device" in capsys.readouterr().err
    assert Path("a.xml").read_text("utf-8") == "before"
    assert sorted(os.listdir()) == ["a.xml", "job.yaml"]


def test_a_missing_folder_is_said_before_anything_is_planned(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(check_module, "check", lambda *_, **__: pytest.fail("planned"))
    assert main(["check", write(JOB), "--format", "json", "-o", "nowhere/a.json"]) == 2
    assert "the folder is missing" in capsys.readouterr().err
    assert not Path("nowhere").exists()


def test_goodput_and_carbon_are_held_where_the_plan_says_them(
    write: Callable[..., str], capsys: Capture
) -> None:
    long = JOB.replace("task: train,", "task: train, tokens: 1000000000,")
    assert long != JOB
    assert main(["check", write(long + "expect: {goodput: '>=90 %', cost: '<=1e9 kg'}\n")]) == 0
    assert main(["check", write(long + "expect: {goodput: '>=99.9999 %'}\n")]) == 1
    capsys.readouterr()
    assert main(["check", write(JOB + "expect: {goodput: '>=90 %'}\n")]) == 1
    assert "run.tokens" in capsys.readouterr().out


def test_a_device_is_written_to_not_replaced(write: Callable[..., str]) -> None:
    assert main(["check", write(JOB), "--format", "json", "-o", os.devnull]) == 0
    assert not Path(os.devnull).is_file()


def test_equal_inputs_give_equal_reports_without_place_or_time(
    write: Callable[..., str], tmp_path: Path
) -> None:
    name = write(JOB + "expect: {fits: true, cost: '<=1 USD'}\n")
    texts = []
    for file in (name, f"./{name}", str(tmp_path / name)):
        main(["check", file, "--format", "json", "-o", "out.json"])
        texts.append(Path("out.json").read_text("utf-8"))
    assert len(set(texts)) == 1
    assert str(tmp_path) not in texts[0]


# -- baseline -------------------------------------------------------------------------------------


def test_a_baseline_forgives_what_is_no_worse(write: Callable[..., str]) -> None:
    text = JOB + "expect: {step_s: '<=20 s', headroom: '>=99 %', fits: true}\n"
    main(["check", write(text), "--format", "json", "-o", "base.json"])
    known = read_baseline("base.json")
    same = held("# a line more\n" + text, write, baseline=known)
    assert [f.known for f in same.findings] == [True, True, False]
    assert same.exit_code() == 0
    slower = held(
        text.replace("recompute: full", "recompute: full, compile: false, fused_loss: false"), write
    )
    assert slower.exit_code() == 1
    longer = held(text.replace("seq_len: 8192", "seq_len: 12288"), write, baseline=known)
    assert {f.rule: f.known for f in longer.findings if f.status is Status.FAIL} == {
        "step_s": False,
        "headroom": False,
    }
    assert longer.exit_code() == 1


def test_a_new_miss_is_not_in_the_baseline(write: Callable[..., str]) -> None:
    main(["check", write(JOB + "expect: {fits: true}\n"), "--format", "json", "-o", "base.json"])
    report = held(JOB + "expect: {fits: false}\n", write, baseline=read_baseline("base.json"))
    assert report.exit_code() == 1


@pytest.mark.parametrize("text", ["[]", "{}", '{"findings": 3}', '{"findings": [1]}', "not json"])
def test_what_is_no_baseline_is_refused(text: str, write: Callable[..., str]) -> None:
    with pytest.raises(InputError, match="is not a report"):
        read_baseline(write(text, "base.json"))


# -- many jobs --------------------------------------------------------------------------------------


def test_catalogue_files_are_read_once_for_many_jobs(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Catalog(CATALOG.roots)
    read: Counter[str] = Counter()
    whole, head = catalog_entries.load_yaml, catalog_names.read_text

    def counting(loader: Callable[..., Any]) -> Callable[..., Any]:
        def load(path: Any, *rest: Any, **more: Any) -> Any:
            read[str(path)] += 1
            return loader(path, *rest, **more)

        return load

    for module in (catalog_entries, catalog_names):
        monkeypatch.setattr(module, "load_yaml", counting(whole))
        monkeypatch.setattr(module, "read_text", counting(head))
    text = JOB.replace("model: llama-3-8b", "model: Meta-Llama-3-8B").replace("8xh100-sxm-80gb", "8xH100-SXM")
    names = [write(text, f"job{index}.yaml") for index in range(20)]
    assert check(names, fresh).exit_code() == 0
    # Names by alias are looked for in the heads of the files of a kind, once; what is named is then read.
    assert read
    assert max(read.values()) <= 2


def test_the_list_of_accepted_names_in_help_is_the_writers() -> None:
    from gpucalc.report.formats import FORMATS

    assert FORMATS == ("table", "json", "junit", "sarif", "github", "gitlab", "markdown")
