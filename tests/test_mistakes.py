"""What a user plausibly gets wrong: one line that says where, what was given, what is legal and what was
meant; exit 2, and no answer beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import shipped
from gpucalc.errors import nearest

FILES = {
    "mistyped.yaml": "model: llama-3-8b\ngpu: 8xH100\nrun: {task: train}\n",
    "card.yaml": "model: llama-3-8b\n\ngpus: 8xH1000\nrun: {task: train}\n",
    "server.yaml": "model: llama-3-8b\ngpus: 8xH100\nsystem: dgx-9\nrun: {task: train}\n",
    "narrow.yaml": "model: {family: llama, layers: 2}\ngpus: 8xH100\nrun: {task: train}\n",
    "version.yaml": "model: llama-3.1-8b\ngpus: 1xH100\nrun: {task: serve, framework: vllm, version: 0.19}\n",
    "long.yaml": f"model: {{family: diffusion, id: {'x' * 5000}, params_total: 1e9}}\ngpus: 8xH100\n",
    "tower.yaml": (shipped() / "models" / "kimi-k2.5.yaml").read_text().replace(" patch: 14,", ""),
    "log.txt": "nothing is wrong\n",
}
MISTAKES = {
    # names
    "plan lama-3-8b": "JOB: neither a file, nor a shipped job, nor a catalogue model, got 'lama-3-8b'; legal:"
    " `gpucalc models` lists the models; did you mean llama-3-8b or ",
    "plan models/llama-3-8b --gpus 8xH1000": "--gpus: unknown GPU, got 'H1000'; legal: `gpucalc gpus` lists"
    " them; did you mean h100-sxm-80gb or ",
    "plan card.yaml": "card.yaml:3: gpus: unknown GPU, got 'H1000'; legal: `gpucalc gpus` lists them; did you"
    " mean h100-sxm-80gb or ",
    "plan card.yaml --set gpus=8xV1000": "--set: gpus: unknown GPU, got 'V1000'",
    "plan server.yaml": "server.yaml:3: system: unknown system, got 'dgx-9'; legal: `gpucalc systems` lists",
    "plan llama-3-8b --gpus 8xH100 --set system=dgx-9": "--set: system: unknown system, got 'dgx-9'",
    "gpus show h1o0": "unknown GPU, got 'h1o0'; legal: `gpucalc gpus` lists them; did you mean h100-sxm-80gb",
    "models show llama3": "legal: `gpucalc models` lists them; did you mean llama-3-8b",
    "models --family lama": "--family: no entry has this value, got 'lama'; legal: one of ",
    "gpus --arch hoper": "blackwell_ultra, cdna,",
    "claims A999": "ID: unknown claim, got 'A999'; legal: `gpucalc claims` lists them\n",
    "formulas colective_s": "NAME: unknown formula, got 'colective_s'; legal: `gpucalc formulas` lists them;"
    " did you mean collective_s",
    # keys
    "plan tower.yaml --gpus 8xH100": "tower.yaml: model.vision_tower.patch: is not stated; legal: a whole",
    "plan long.yaml": "long.yaml: model.id: has more characters than 200, got 'xxx",
    "plan mistyped.yaml": "mistyped.yaml:2: gpu: no such key; legal: name, model, gpus, ",
    "plan version.yaml": "version.yaml:3: run.version: must be text, got 0.19; legal: the same in quotes\n",
    "plan llama-3-8b --set expect.fits=1": "fits: is not a verdict, got 1; legal: true, false, marginal\n",
    "plan narrow.yaml": "narrow.yaml: model.hidden: llama (llama) cannot be drawn without hidden; legal:",
    # files
    "plan cart.yaml": "cart.yaml: no such file; did you mean card.yaml?\n",
    "plan nope.yaml": "nope.yaml: no such file\n",
    "plan missing/config.json": "missing/config.json: no such file\n",
    "oom log.txt": "log.txt: holds no out-of-memory message that is known; legal: a log of torch,",
    # words of flags
    "gpus --min-memory 80": "--min-memory: is not a size, got '80'; legal: a number and one of B KB MB GB",
    "size models/llama-3-8b --max-gpus abc": "parse string as an integer, got 'abc'; see gpucalc size --help",
    "validate --by framwork": "--by: unknown part, got 'framwork'; legal: group, framework,",
    "validate --quantity peak_mem": "did you mean peak_memory?",
    "validate --where framewrk=fsdp": "--where: no run has this key, got 'framewrk'; did you mean framework?",
    "validate --where framework=fsdb": "--where: framework: no run has this value, got 'fsdb'; legal: ",
    # flags that contradict each other
    "plan llama-3-8b --search --scale 8": "--search: does not go with --scale",
    "plan llama-3-8b --scale 8 --rules": "--rules: does not go with --scale",
    "plan llama-3-8b --scale 8 --quiet": "--quiet: does not go with --scale",
    "plan llama-3-8b --search --rules": "--rules: does not go with --search",
    "plan llama-3-8b --rank cost --quiet": "--quiet: does not go with --rank",
    "plan models/llama-3-8b --model llama-3-8b --gpus 8xH100": "--model: JOB is a model already",
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files lie in the current folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(("words", "said"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named_on_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gpucalc: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("given", "known", "found"),
    [
        ("llama3", ["llama-33b", "llama-3-8b", "llama-2-7b"], ("llama-33b", "llama-3-8b", "llama-2-7b")),
        ("wieghts", ["gradients", "weights"], ("weights",)),
        ("H100_SXM", ["h100-pcie", "h100-sxm", "h100"], ("h100-sxm", "h100")),
        ("nope", ["unet", "opt", "note"], ("note",)),
        ("a", ["abc"], ()),
        ("", ["abc"], ()),
    ],
)
def test_near_names_are_those_alike_or_that_begin_alike(
    given: str, known: list[str], found: tuple[str, ...]
) -> None:
    assert nearest(given, known) == found


@pytest.mark.parametrize("words", ["-h", "plan -h", "gpus -h", "gpus show -h"])
def test_help_has_a_short_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith("Usage: gpucalc ")
