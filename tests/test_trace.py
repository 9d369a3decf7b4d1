"""Tracing: the module's own counts, autograd's own saved tensors, and what cannot be traced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.catalog import Catalog
from gpucalc.errors import CannotMeasure, InputError
from gpucalc.importers.load import model_yaml
from gpucalc.jobs import resolve
from gpucalc.planner import plan_job
from gpucalc.spec.model import ModelSpec
from gpucalc.trace import TraceInput, parse_argument, parse_input, trace

CATALOG = Catalog([Path(__file__).parents[1] / "catalogs"])


def test_inputs_are_parsed() -> None:
    assert parse_input("1x3x224x224") == TraceInput((1, 3, 224, 224))
    assert parse_input("ids=int64:1x77") == TraceInput((1, 77), "int64", "ids")
    for bad in ("", "1x", "0x3", "1x-3", "complex:1", "a b=1x3", "1x3x99999999999"):
        with pytest.raises(InputError, match="--input"):
            parse_input(bad)
    assert parse_argument("depth=3") == ("depth", 3)
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_argument("depth")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CannotMeasure, match=r"gpucalc\[probe\]"):
        trace("json:loads", [TraceInput((1,))])


torch = pytest.importorskip("torch")
import networks  # noqa: E402  # needs torch

IMAGE = {"resnet50": 224, "resnet101": 224, "vit_b_16": 224, "yolov8n": 640, "unet": 256}
PUBLISHED = {"resnet50": 25_557_032, "resnet101": 44_549_160, "vit_b_16": 86_567_656}


def traced(name: str, image: int) -> ModelSpec:
    return trace(f"networks:{name}", [TraceInput((1, 3, image, image))])


def instantiated(name: str) -> Any:
    return getattr(networks, name)()


def really_saved(module: Any, *inputs: Any) -> int:
    """Bytes autograd keeps in a forward pass on real tensors, by its own hooks."""
    held = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "yolov8n", "unet"])
def test_parameters_and_saved_tensors_are_those_of_the_instantiated_module(name: str) -> None:
    image = 224 if name == "vit_b_16" else 64
    spec = traced(name, image)
    module = instantiated(name).train()
    for part in module.modules():  # the mask of dropout on CPU is no GPU's
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    assert spec.params_total == sum(p.numel() for p in module.parameters())
    assert spec.params_total == PUBLISHED.get(name, spec.params_total)
    batch = 2
    measured = really_saved(module, torch.randn(batch, 3, image, image))
    assert spec.trace is not None
    expected = spec.trace.saved_bytes_fixed + batch * spec.trace.saved_bytes_per_sample
    masks = 12 * batch * 197 * 768 if name == "vit_b_16" else 0  # one byte an element, traced with dropout on
    assert expected - masks == pytest.approx(measured, rel=0.01)


def test_resnet_50_is_what_the_catalogue_has_by_another_trace() -> None:
    spec, known = traced("resnet50", 224), CATALOG.model("resnet-50")
    assert spec.params_total == known.params_total
    assert spec.gflops_forward == pytest.approx(known.gflops_forward, rel=1e-6)
    assert spec.saved_elements == pytest.approx(known.saved_elements, rel=1e-3)
    assert spec.traffic_elements == pytest.approx(known.traffic_elements, rel=0.01)
    assert spec.layers == known.layers
    assert spec.live_elements == known.live_elements


def test_blocks_add_up_to_the_whole() -> None:
    spec = traced("unet", 64)
    assert spec.trace is not None
    assert sum(block.params for block in spec.trace.blocks) == spec.params_total
    assert sum(block.flops_forward for block in spec.trace.blocks) == pytest.approx(
        1e9 * (spec.gflops_forward or 0)
    )
    assert sum(block.saved_bytes for block in spec.trace.blocks) == pytest.approx(
        spec.trace.saved_bytes_per_sample
    )


def test_half_the_bytes_in_half_the_type() -> None:
    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 10))

    wide, narrow = (trace(make, [TraceInput((1, 64))], dtype=d) for d in ("float32", "bfloat16"))
    assert wide.trace is not None
    assert narrow.trace is not None
    assert narrow.trace.saved_bytes_per_sample == wide.trace.saved_bytes_per_sample / 2
    assert narrow.saved_elements == wide.saved_elements == 64 + 96
    assert narrow.params_total == wide.params_total


def test_several_inputs_by_name() -> None:
    spec = trace("networks:clip_b_16", [parse_input("image=1x3x224x224"), parse_input("text=int64:1x77")])
    assert spec.params_total == 149_620_481 == sum(p.numel() for p in instantiated("clip_b_16").parameters())


@pytest.mark.parametrize(
    ("framework", "stage"), [("ddp", 0), ("fsdp", 3), ("fsdp", 2), ("deepspeed", 1), ("deepspeed", 3)]
)
def test_a_traced_file_is_planned(framework: str, stage: int, tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(model_yaml(traced("unet", 64)))
    sets = [f"run.framework={framework}", f"run.zero_stage={stage}", "run.micro_batch=8"]
    job = resolve(tmp_path / "net.yaml", CATALOG, gpus="4xA100-SXM-80GB", sets=sets)
    plan = plan_job(job, CATALOG, advice=False)
    assert plan.verdict.level.value == "fits"
    assert plan.time is not None


@pytest.mark.parametrize("task", ["train", "serve"])
def test_a_traced_file_is_planned_for_both_tasks(task: str, tmp_path: Path) -> None:
    (tmp_path / "net.yaml").write_text(model_yaml(traced("unet", 64)))
    job = resolve(tmp_path / "net.yaml", CATALOG, gpus="2xA100-SXM-80GB", task=task)
    plan = plan_job(job, CATALOG)
    assert plan.verdict.level.value == "fits"
    assert plan.throughput is not None
    command = [
        sys.executable,
        "-m",
        "gpucalc",
        "plan",
        "net.yaml",
        "--gpus",
        "2xA100-SXM-80GB",
        "--task",
        task,
    ]
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "", "NO_COLOR": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (out.returncode, out.stderr) == (0, "")
    assert "FITS" in out.stdout


def test_what_lives_in_a_forward_pass_is_what_a_plan_of_inference_holds() -> None:
    """Two maps and a ReLU: at the second the input, its output and the last output are alive."""

    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))

    spec = trace(make, [TraceInput((1, 64))])
    assert spec.live_elements == 64 + 96 + 96  # the ReLU reads 96 and makes 96
    graph = build_graph(spec)
    assert graph.network is not None
    assert graph.network.live_elements == 64 + 96 + 96


def test_a_factory_that_reads_a_schedule_it_computes_is_made_on_the_meta_device() -> None:
    """Drop rates of image networks: values on the CPU by name, which fake tensors do not have."""

    class Scheduled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rates = torch.linspace(0, 0.3, 4, device="cpu").tolist()
            self.maps = torch.nn.ModuleList(torch.nn.Linear(8, 8) for rate in rates if rate > 0.05)
            self.maps[1].weight = self.maps[0].weight  # shared, and counted once
            self.norm = torch.nn.BatchNorm1d(8)

        def forward(self, x: Any) -> Any:
            for layer in self.maps:
                x = layer(x)
            return self.norm(x)

    spec = trace(Scheduled, [TraceInput((1, 8))])
    assert spec.params_total == 2 * 64 + 3 * 8 + 2 * 8
    assert spec.trace is not None
    assert spec.trace.buffers == 17
    with pytest.raises(InputError, match="the factory failed"):
        trace(lambda: torch.nn.Linear(int(torch.rand(1).item() * 0) + 3, 3), [TraceInput((1, 3))])


def test_a_module_that_cannot_be_evaluated_has_no_figure_for_it() -> None:
    class Trains(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            if not self.training:
                raise RuntimeError("only trains")
            return self.map(x)

    assert trace(Trains, [TraceInput((1, 4))]).live_elements is None


def test_a_trace_runs_the_module_three_times_each_way() -> None:
    """Two batches for the line and one to check it, with gradients and without: what a trace costs."""
    calls: list[tuple[int, bool]] = []

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            calls.append((x.shape[0], torch.is_grad_enabled()))
            return self.map(x)

    trace(Counts, [TraceInput((1, 4))])
    assert sorted(calls) == [(2, False), (2, True), (4, False), (4, True), (7, False), (7, True)]


class Quadratic(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return (x[:, None] - x[None]).exp().requires_grad_().exp()


class Values(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum().item() > 0 else -x


def test_what_cannot_be_traced_is_an_input_error() -> None:
    one = [TraceInput((1, 4))]
    with pytest.raises(InputError, match="does not grow with the batch"):
        trace(Quadratic, one)
    with pytest.raises(InputError, match="depends on values"):
        trace(Values, one)
    with pytest.raises(InputError, match="forward pass failed"):
        trace(lambda: torch.nn.Linear(3, 3), one)
    with pytest.raises(InputError, match=r"made no torch\.nn\.Module"):
        trace(dict, one)
    with pytest.raises(InputError, match="the factory failed"):
        trace(lambda: 1 / 0, one)
    named = {"nowhere_at_all:f": "cannot be imported", "json:nothing": "has no nothing", "json": "MODULE"}
    for text, problem in named.items():
        with pytest.raises(InputError, match=problem):
            trace(text, one)
    with pytest.raises(InputError, match="element type"):
        trace(dict, one, dtype="int8")
    with pytest.raises(InputError, match="no input"):
        trace(dict, [])


def test_dropout_is_put_back() -> None:
    before = torch.nn.functional.dropout
    with pytest.raises(InputError):
        trace(lambda: 1 / 0, [TraceInput((1,))])
    assert torch.nn.functional.dropout is before


def test_the_command_says_that_it_runs_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make(width):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(width, 5), torch.nn.ReLU())\n"
    )
    command = [
        sys.executable,
        "-m",
        "gpucalc",
        "trace",
        "mine:make",
        "--input",
        "1x7",
        "--arg",
        "width=7",
        "-o",
        "m.yaml",
    ]
    env = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""}
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (out.returncode, out.stdout) == (0, ""), out.stderr
    assert "runs its code" in out.stderr
    assert ModelSpec.read(__import__("yaml").safe_load((tmp_path / "m.yaml").read_text())).params_total == 40
