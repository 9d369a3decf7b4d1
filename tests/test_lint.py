"""Launch scripts held against what the libraries read: every finding with its line and the right form."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucalc.__main__ import main
from gpucalc.catalog import Catalog, shipped
from gpucalc.doctor.finding import Finding
from gpucalc.doctor.lint import lint, tables
from gpucalc.doctor.script import lines, settings
from gpucalc.errors import CannotMeasure, ExitCode, InputError
from gpucalc.spec.checks import CommandRule, SettingsSpec, Severity

CATALOG = Catalog([shipped()])

# The documents' own commands, as they have them.
DOCUMENTS = """\
export NCCL_DEBUG=INFO
export NCCL_IB_DISABLE=1
export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128
NCCL_BLOCKING_WAIT=1
NCCL_ASYNC_ERROR_HANDLING=1
nvidia-smi dmon -s p0 u -c 1 -d 1
nvidia-smi -l 1 ; watch "nvidia-smi dmon -s pcu mclk"
lspci -vvv | grep -i nvidia
nvidia-smi topo -m
torch.distributed.grad_bucket_size = 25 * 1024 * 1024
from torch.distributed.pipeline.sync import Pipe
w = torch.chunk(layer.weight, 2, dim=0)
scheduler = LambdaLR(opt, lr_lambda=lambda epoch: min(1.0, epoch/10))
with torch.cuda.amp.autocast(enabled=True):
print(prof.key_averages().table(sort_by="cuda_time_total"))
"""


def found(text: str) -> tuple[Finding, ...]:
    return lint(text, CATALOG, where="script").findings


def checks(text: str) -> list[tuple[int | None, str]]:
    return [(item.line, item.check) for item in found(text)]


def errors(text: str) -> list[str]:
    return [item.about for item in found(text) if item.severity is Severity.ERROR]


def test_the_documents_own_commands() -> None:
    assert sorted(checks(DOCUMENTS), key=str) == sorted(
        [
            (1, "costly-value"), (2, "costly-value"), (3, "old-name"), (3, "costly-value"), (4, "old-name"),
            (5, "old-name"), (5, "conflict"), (6, "dmon-letters"), (6, "dmon-words"), (6, "dmon-once"),
            (7, "dmon-words"), (7, "watch-dmon"), (8, "lspci-link"), (9, "topo-bandwidth"),
            (10, "grad-bucket-size"), (11, "pipe"), (12, "chunk-weight"), (13, "warmup-zero"),
            (14, "old-autocast"), (15, "cuda-time"),
        ],
        key=str,
    )  # fmt: skip


def test_every_item_of_the_documents_that_lint_answers_is_a_claim() -> None:
    known = {
        claim
        for name in CATALOG.names("claims")
        for claim in re.findall(r"^- id: (\w+)", (shipped() / "claims" / f"{name}.yaml").read_text(), re.M)
    }
    named = {claim for item in found(DOCUMENTS) for claim in item.claims}
    assert named <= known
    assert named == {
        "A22", "A28", "A31", "B21", "B23", "B27", "B28", "B29", "B30", "B31", "B33", "B39", "B41", "B44",
        "B45",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "about", "right"),
    [
        ("NCCL_IB_DISBLE=1", "NCCL_IB_DISBLE", "NCCL_IB_DISABLE"),
        ("NCCL_HEARTBEAT_TIMEOUT_SEC=60", "NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        ("TORCH_NCCL_IB_DISABLE=1", "TORCH_NCCL_IB_DISABLE", "did you mean NCCL_IB_DISABLE?"),
        ("TORCH_NCCL_BLOCKINGWAIT=1", "TORCH_NCCL_BLOCKINGWAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        ("NCCL_IB_CUDA_SUPPORT=1", "NCCL_IB_CUDA_SUPPORT", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_TREE_THRESHOLD=0", "NCCL_TREE_THRESHOLD", "NCCL_ALGO"),
        ("NCCL_TIMEOUT=1800", "NCCL_TIMEOUT", "init_process_group"),
        ("NCCL_P2P_DISABLE=true", "NCCL_P2P_DISABLE", "NCCL_P2P_DISABLE=1"),
        ("NCCL_NVLS_ENABLE=off", "NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE=0"),
        ("NCCL_BUFFSIZE=8M", "NCCL_BUFFSIZE", "whole number"),
        ("NCCL_DEBUG=VERBOSE", "NCCL_DEBUG", "INFO"),
        ("NCCL_P2P_LEVEL=NVLINK", "NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_P2P_LEVEL=nvl", "NCCL_P2P_LEVEL", "NVL"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=none", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "whole number"),
        ("NCCL_PROTO=LL128", "NCCL_PROTO", "leave it out"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=4", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("PYTORCH_ALLOC_CONF=expandable_segments:true", "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF=max_split_size:128", "PYTORCH_ALLOC_CONF", "max_split_size_mb"),
        ("PYTORCH_ALLOC_CONF=max_split_size_mb:16", "PYTORCH_ALLOC_CONF", "leave it out"),
        ("CUDA_VISIBLE_DEVICES=0,1,1", "CUDA_VISIBLE_DEVICES", "once"),
        ("CUDA_LAUNCH_BLOCKING=1 python train.py", "CUDA_LAUNCH_BLOCKING", "leave it out"),
        ("lspci | grep nvidia", "lspci | grep nvidia", "lspci -d 10de:"),
        ("lspci -d 10de: -v | grep LnkSta", "lspci -d 10de: -v | grep LnkSta", "sudo lspci -d 10de: -vv |"),
        ("lspci --speed", "lspci --s", "sudo lspci -d 10de: -vv"),
        ("torchrun --nproc_per_node=four t.py", "--nproc_per_node", "auto"),
        ("torchrun --nprocs 4 t.py", "--nprocs", "nproc-per-node"),
        ("torchrun --use_env --nnodes 1 t.py", "--use_env", "leave it out"),
        ("python -m torch.distributed.run --world_size 8 t.py", "--world_size", "--nnodes"),
        ("torchrun --num_processes=8 t.py", "--num_processes", "nproc-per-node"),
        ("dist.all_reduce_multigpu(t)", "all_reduce_multigpu", "_multigpu"),
        ("export NCCL_DEBUG = INFO", "export NCCL_DEBUG =", "export NAME=value"),
        ("os.environ['NCCL_IB_DISABLE'] = 1", "os.environ['NCCL_IB_DISABLE'] = 1", "os.environ"),
    ],
)
def test_an_error_with_its_right_form(text: str, about: str, right: str) -> None:
    item = next(item for item in found(text) if item.severity is Severity.ERROR)
    assert item.about == about
    assert right in str(item.right)
    assert item.line == 1
    assert item.evidence
    assert item.sources


@pytest.mark.parametrize(
    "text",
    [
        "NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5_0,mlx5_1 torchrun --nproc-per-node 8 t.py",
        "torchrun --standalone --nproc_per_node=gpu train.py --nproc 3 --use_env",
        "torchrun --nnodes=1:4 --nproc_per_node=$GPUS --rdzv_backend=c10d --rdzv-endpoint=$HOST -m pkg.train",
        "torchrun --role $(hostname -s | tr -dc 0-9): --tee 3 --nnodes 2 t.py",
        "torchrun --nproc_per_node [8/16] bash -c 'x --use_env'",
        "- name: torchrun-train",
        "python -m torch.distributed.run --nproc_per_node=N script.py",
        "see [torchrun](torchrun-launcher.slurm) - to be used with it",
        "mpu.clip_grad_norm(model.parameters(), 1.0)",
        "torchrun --nproc_per 8 t.py",  # cut short, one reading
        "python -m torch.distributed.run --nproc-per-node 8 t.py",
        "true  # export NCCL_BOGUS=1",
        "export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-0}",
        "cmake -DNCCL_ROOT=/opt/nccl NCCL_HOME=/opt/nccl NCCL_INCLUDE_DIR=/opt/nccl/include .",
        "NCCL_FASTRAK_NUM_FLOWS=2",
        "NCCL_PROTO=^LL128",
        "PYTORCH_ALLOC_CONF=expandable_segments:True,garbage_collection_threshold:0.8",
        "PYTORCH_ALLOC_CONF=roundup_power2_divisions:[256:1,512:2,>:8]",
        "CUDA_VISIBLE_DEVICES=GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1",
        "CUDA_VISIBLE_DEVICES=1,10,11",
        "nvidia-smi dmon -s pucvmet -d 5 -o T >> gpu.log",
        'nvidia-smi dmon -s "pu" -i 0,1',
        "lspci -d 10de: -vv | grep LnkSta",
        "lspci | grep -i nvidia",
        "from torch.distributed.pipelining import Schedule1F1B",
        "torch.nn.utils.clip_grad_norm_(p, 1.0)",
        "NCCL_BUFFSIZE=0x400000",
        "NCCL_DEBUG_FILE=/tmp/nccl.%h.%p",
    ],
)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert found(text) == ()


def test_settings_in_every_way_they_are_written() -> None:
    text = """\
export NCCL_A=1
NCCL_B="two words" NCCL_C='3' python t.py  # NCCL_X=9
docker run -e NCCL_D=4 --env NCCL_E image
mpirun -x NCCL_F -x NCCL_G=7 ./a.out
srun --export=ALL,NCCL_H=8,NCCL_I=9 t.sh
ENV NCCL_J 10
setenv NCCL_K 11
os.environ["NCCL_L"] = "12"
os.environ.setdefault('NCCL_M', '13')
        - name: NCCL_N
          value: "14"
  NCCL_O: "15"
        - {name: NCCL_P, value: "16"}
"NCCL_Q": "17",
torchrun \\
  --x NCCL_R=18
"""
    got = {item.name: (item.value, item.line) for item in settings(lines(text))}
    assert got == {
        "NCCL_A": ("1", 1), "NCCL_B": ("two words", 2), "NCCL_C": ("3", 2), "NCCL_D": ("4", 3),
        "NCCL_E": (None, 3), "NCCL_F": (None, 4), "NCCL_G": ("7", 4), "NCCL_H": ("8", 5),
        "NCCL_I": ("9", 5), "NCCL_J": ("10", 6), "NCCL_K": ("11", 7), "NCCL_L": ("12", 8),
        "NCCL_M": ("13", 9), "NCCL_N": ("14", 10), "NCCL_O": ("15", 12), "NCCL_P": ("16", 13),
        "NCCL_Q": ("17", 14), "NCCL_R": ("18", 16),
    }  # fmt: skip


def test_conflicts_hold_for_what_is_set_last() -> None:
    both = "TORCH_NCCL_BLOCKING_WAIT=1\nTORCH_NCCL_ASYNC_ERROR_HANDLING=1\n"
    assert (2, "conflict") in checks(both)
    assert "conflict" not in {check for _, check in checks(both + "TORCH_NCCL_BLOCKING_WAIT=0\n")}
    assert "conflict" not in {check for _, check in checks(both + "unset TORCH_NCCL_BLOCKING_WAIT\n")}
    mixed = "export NCCL_BLOCKING_WAIT=1\nexport TORCH_NCCL_ASYNC_ERROR_HANDLING=3\n"
    assert (2, "conflict") in checks(mixed)


def test_a_continued_line_keeps_the_line_of_each_flag() -> None:
    text = "torchrun \\\n --nnodes 2 \\\n --nproc_per_node=all \\\n --standalone --rdzv_endpoint h \\\n t.py"
    assert checks(text) == [(3, "wrong-type"), (4, "flag-conflict")]


def test_the_same_setting_is_told_once() -> None:
    assert len(found("NCCL_BOGUSNESS=1\n" * 5)) == 1


def test_the_tables_are_consistent_and_cited() -> None:
    known = tables(CATALOG)
    cited = set()
    for library in known.settings:
        names = [*library.integers, *library.texts]
        assert len(names) == len(set(names))
        gone = {item.name for item in library.old_names if item.severity is Severity.ERROR}
        assert not gone & set(names), "what nothing reads is no known name"
        for item in (*library.old_names, *library.variables, *library.conflicts):
            cited |= set(item.source)
        cited |= set(library.source)
    cited |= {key for rule in known.commands.rules for key in rule.source}
    assert cited <= set(CATALOG.sources)
    nccl = CATALOG.load("checks", "nccl", SettingsSpec)
    assert len(nccl.integers) + len(nccl.texts) > 250


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    rule = {"id": "r", "pattern": "(", "severity": "note", "reason": "r", "right": "x", "source": ["recall"]}
    with pytest.raises(InputError, match="regular expression"):
        CommandRule.read(rule)


@given(st.text(alphabet=st.sampled_from("NCCL_IB=\"'\\#${} \n-torchrun1"), max_size=200))
def test_any_text_is_read(text: str) -> None:
    try:
        items = found(text)
    except CannotMeasure:
        return
    assert all(item.line and 1 <= item.line <= len(text.splitlines()) for item in items)


def test_long_lines_take_no_time() -> None:
    text = "nvidia-smi dmon " * 2000 + "\n" + "lspci -" + "v" * 15000 + "\nmin(1," + " " * 15000
    assert found(text + "\n" + "NCCL_" * 100000) == ()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(DOCUMENTS)
    assert main(["doctor", "--lint", str(script)]) == ExitCode.NO
    shown = capsys.readouterr().out
    assert "line 6: error: nvidia-smi dmon -s p0" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["doctor", "--lint", str(script), "--json"]) == ExitCode.NO
    body = json.loads(capsys.readouterr().out)
    assert body["schema_version"]
    assert body["counts"]["error"] == 9
    assert set(body["references"]) == {key for item in body["findings"] for key in item["sources"]}
    script.write_text("NCCL_DEBUG=WARN torchrun --nproc-per-node 8 train.py\n")
    assert main(["doctor", "--lint", str(script)]) == ExitCode.ANSWERED
    assert "nothing wrong found" in capsys.readouterr().out


def test_piped_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"HOME=/root\nNCCL_BOGUS=1\n")))
    assert main(["doctor", "--lint", "-"]) == ExitCode.NO
    assert "line 2: error: NCCL_BOGUS" in capsys.readouterr().out


@pytest.mark.parametrize(("body", "code"), [(b"", ExitCode.CANNOT_MEASURE), (b"a\0b", ExitCode.USAGE)])
def test_nothing_to_read(
    body: bytes, code: ExitCode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(body)))
    assert main(["doctor", "--lint", "-"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lint", "/no/such/file"]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1
