"""Planning from Python: the answers of the command line, cheap to import, errors that say what is legal."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpucalc
from gpucalc.__main__ import main
from gpucalc.report.html.page import LARGEST

ROOT = Path(__file__).parents[1]


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import gpucalc; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split() if name != "gpucalc"}
    assert loaded <= sys.stdlib_module_names


def test_a_plan_loads_neither_a_page_nor_a_table() -> None:
    code = "import sys, gpucalc; gpucalc.plan('bert-large'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {name.split(".")[0] for name in loaded} & {"rich", "numpy", "torch", "typer"}
    assert not {name for name in loaded if name.startswith(("gpucalc.report.html", "gpucalc.report.svg"))}


def test_the_answer_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-8b", "--set", "run.seq_len=4096", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert gpucalc.plan("llama-3-8b", run={"seq_len": 4096}).document() == document
    assert gpucalc.plan("llama-3-8b", set={"run.seq_len": 4096}).document() == document


def test_the_report_is_that_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", "llama-3-8b"]) == 0
    assert str(gpucalc.plan("llama-3-8b")) == capsys.readouterr().out.rstrip("\n")


def test_a_job_may_be_a_mapping() -> None:
    run = {"task": "train", "framework": "fsdp", "seq_len": 4096, "micro_batch": 1}
    answer = gpucalc.plan({"model": "llama-3-8b", "gpus": "8xH100-SXM", "run": run})
    assert answer.level == "fits"
    assert answer.value("tokens_per_s") > 0
    assert answer.line("tokens_per_s").unit == "tokens/s"
    assert "nobody" not in answer.explain("tokens_per_s")
    assert repr(answer) == "<gpucalc.Plan 'llama-3-8b' on '8xH100-SXM': fits>"


def test_values_are_set_as_they_are() -> None:
    answer = gpucalc.plan(
        "llama-3-8b",
        run={"method": "lora", "lora": {"rank": 8, "targets": ["q", "v"]}, "compile": True, "tokens": None},
    )
    assert answer.recipe.adapters.rank == 8
    assert answer.recipe.kernels == "compiled"


def test_a_deployment_has_no_scaling_curve() -> None:
    assert gpucalc.plan("serve-gpt-oss-20b", advice=False).scaling() is None


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"job": "lama-3-8b"}, gpucalc.UnknownName, "did you mean llama-3-8b"),
        ({"job": "llama-3-8b", "gpus": "8xH1000"}, gpucalc.UnknownName, "H1000"),
        ({"job": "llama-3-8b", "run": {"seqlen": 1}}, gpucalc.UnknownName, "did you mean seq_len"),
        ({"job": "gpt3-175b-full", "run": {"tp": 5}}, gpucalc.Infeasible, "tp"),
        ({"job": {"model": "llama-3-8b"}}, gpucalc.InputError, "no GPUs given"),
        ({"job": "llama-3-8b", "run": {"seq_len": {1}}}, gpucalc.InputError, "cannot stand in a job"),
        (
            {"job": "llama-3-8b", "run": {"seq_len": float("nan")}},
            gpucalc.InputError,
            "cannot stand in a job",
        ),
    ],
)
def test_mistakes_are_errors_of_the_package(given: dict[str, object], kind: type, said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)) as caught:
        gpucalc.plan(**given)  # type: ignore[arg-type]
    assert isinstance(caught.value, gpucalc.GpucalcError)


def test_the_public_names_are_these() -> None:
    assert gpucalc.__all__ == [
        "GpucalcError", "Infeasible", "InputError", "Plan", "UnknownName", "UnsupportedModel", "__version__",
        "plan",
    ]  # fmt: skip
    assert all(getattr(gpucalc, name) is not None for name in gpucalc.__all__)
    assert set(gpucalc.__all__) <= set(dir(gpucalc))
    with pytest.raises(AttributeError, match="plans"):
        _ = gpucalc.plans  # type: ignore[attr-defined]


def test_the_package_of_the_same_name_keeps_working() -> None:
    """`gpucalc.plan` is a package of ours too, whoever imports it first."""
    from gpucalc.plan.answer import Level

    assert callable(gpucalc.plan)
    assert "gpus" in inspect.signature(gpucalc.plan).parameters
    assert Level("fits").value == "fits"


def test_the_package_is_typed(tmp_path: Path) -> None:
    from mypy import api as mypy

    assert (ROOT / "gpucalc/py.typed").exists()
    code = tmp_path / "use.py"
    code.write_text(
        "import gpucalc\n"
        'answer = gpucalc.plan("llama-3-8b", gpus="8xH100-SXM", run={"seq_len": 4096})\n'
        "reveal_type(answer)\n"
        "reveal_type(answer.level)\n"
        'gpucalc.plan("llama-3-8b", gpu="8xH100-SXM")\n',
        "utf-8",
    )
    out, _, _ = mypy.run([str(code), "--follow-imports=silent", "--config-file=", "--no-incremental"])
    assert 'Revealed type is "gpucalc.api.Plan"' in out
    assert 'Revealed type is "str"' in out or 'Revealed type is "builtins.str"' in out
    assert 'Unexpected keyword argument "gpu"' in out


def test_a_notebook_shows_the_verdict_and_the_figures() -> None:
    answer = gpucalc.plan("llama-3-8b", advice=False)
    text = answer._repr_html_()
    assert "Fits" in text
    assert "tokens/s" in text
    assert " id=" not in text  # a notebook holds many of them
    assert 'href="#' not in text
    assert "<script" not in text
    assert len(text.encode()) < LARGEST / 10


def code_of_the_readme() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return [block for block in blocks if "import gpucalc" in block]


@pytest.mark.parametrize("code", code_of_the_readme())
def test_the_readme_s_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert list(tmp_path.glob("*.html"))


def test_the_readme_has_code() -> None:
    assert code_of_the_readme()
