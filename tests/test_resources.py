"""The program on machines that lack something: a home, a terminal, a locale, room on the disk, a reader."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpucalc.__main__ import main
from gpucalc.catalog import open_catalog
from gpucalc.jobs import resolve
from gpucalc.planner import plan_job

ROOT = Path(__file__).parents[1]
JOB = """\
name: tiny
model: llama-3.2-1b
gpus: 1xA100-80GB
run: {task: train, framework: ddp, seq_len: 512, micro_batch: 1}
"""
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
posix = pytest.mark.skipif(os.name != "posix", reason="of POSIX systems")


def environment(**changes: str | None) -> dict[str, str]:
    """The tests' environment with variables set, or taken away where None."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    for name, value in changes.items():
        known.pop(name, None)
        if value is not None:
            known[name] = value
    return known


def gpucalc(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, **streams: Any
) -> subprocess.CompletedProcess[bytes]:
    """The program in a process of its own, its streams captured unless said otherwise."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **streams}
    command = [sys.executable, "-m", "gpucalc", *words]
    return subprocess.run(command, env=dict(env or environment()), cwd=cwd, check=False, **streams)


# -- what is not there ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"HOME": None, "XDG_CONFIG_HOME": None},
        {"HOME": "/nonexistent", "XDG_CONFIG_HOME": None},
        {"HOME": os.devnull, "XDG_CONFIG_HOME": None},  # a file, of which nothing can be a part
        {"HOME": None, "XDG_CONFIG_HOME": os.devnull, "USER": None, "LOGNAME": None},
        {"TERM": None},
        {"TERM": ""},
        {"TERM": "dumb", "LANG": None, "LC_ALL": None},
        {"COLUMNS": None, "TERM": None},
        {"COLUMNS": "0"},
        {"COLUMNS": "many"},
        {"PATH": None},
    ],
    ids=str,
)
def test_a_plan_needs_nothing_of_the_environment(changes: dict[str, str | None]) -> None:
    done = gpucalc("plan", "llama-3-8b", env=environment(**changes))
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"FITS" in done.stdout


def test_an_ascii_terminal_gets_ascii() -> None:
    done = gpucalc("plan", "llama-3-8b", env=environment(**ASCII))
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_nothing_is_written_outside_what_is_asked_for(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "job.yaml").write_text(JOB, "utf-8")
    env = environment(HOME=str(home), XDG_CONFIG_HOME=None, PYTHONDONTWRITEBYTECODE="1")
    for words in (
        ("plan", "job.yaml"),
        ("check", "job.yaml", "--format", "json"),
        ("size", "job.yaml", "--gpu", "A100", "--max-gpus", "2"),
        ("catalog",),
    ):
        assert gpucalc(*words, env=env, cwd=work).returncode in (0, 1)
    assert list(home.rglob("*")) == []
    assert [path.name for path in work.iterdir()] == ["job.yaml"]


@posix
def test_a_home_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".config" / "gpucalc" / "gpus").mkdir(parents=True)
    os.chmod(tmp_path / ".config" / "gpucalc" / "gpus", 0o000)
    try:
        done = gpucalc(
            "plan", "llama-3-8b", "--quiet", env=environment(HOME=str(tmp_path), XDG_CONFIG_HOME=None)
        )
    finally:
        os.chmod(tmp_path / ".config" / "gpucalc" / "gpus", 0o755)
    assert done.stdout or b"Permission denied" in done.stderr
    assert done.returncode in (0, 2)
    assert done.stderr.count(b"\n") <= 1


# -- names and line ends ----------------------------------------------------------------------------

WIDE = "计划 и план 🚀/jöb 模型.yaml"


@pytest.mark.parametrize("changes", [{}, ASCII], ids=["utf-8", "ascii"])
def test_wide_characters_in_paths(tmp_path: Path, changes: dict[str, str]) -> None:
    job = tmp_path / WIDE
    job.parent.mkdir()
    job.write_text(JOB, "utf-8")
    env = environment(**changes)
    page, report = job.with_name("pägé.html"), job.with_name("日本.json")
    assert gpucalc("plan", str(job), "--html", str(page), "--quiet", env=env).returncode == 0
    assert "tiny" in page.read_text("utf-8")
    assert gpucalc("check", str(job), "--format", "json", "-o", str(report), env=env).returncode == 0
    assert json.loads(report.read_text("utf-8"))["findings"]
    missing = gpucalc("plan", str(job.with_name("模.yaml")), env=env)
    assert missing.returncode == 2
    assert missing.stderr.endswith(b"no such file\n")


@posix
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\xfe.yaml")
    try:
        Path(name).write_text(JOB, "utf-8")
    except OSError:
        pytest.skip("this file system takes text only")
    for words in (
        ("plan", name, "--json"),
        ("diff", name, "--gpus", "1xT4", "--format", "markdown"),
        *(("check", name, "--format", form) for form in ("table", "junit", "sarif", "github", "markdown")),
    ):
        done = gpucalc(*words)
        assert (done.returncode, done.stderr) == (0, b""), words
        done.stdout.decode("utf-8")


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    texts = {
        "job.yaml": JOB,
        "ds.json": '{\n"train_micro_batch_size_per_gpu": 4,\n"bf16": {"enabled": true}\n}\n',
        "launch.sh": "export NCCL_IB_DISABLE=true\nNCCL_SOCKET_IFNAM=eth0 \\\n torchrun --use_env train.py\n",
        "error.txt": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 25.10 GiB. GPU 0 has a\n"
        "total capacity of 39.39 GiB of which 13.84 GiB is free.\n",
    }
    answers = []
    for folder, mark, end in (("unix", "", "\n"), ("windows", "\ufeff", "\r\n")):
        here = tmp_path / folder
        here.mkdir()
        for name, text in texts.items():
            (here / name).write_text(mark + text, "utf-8", newline=end)
        answers.append(
            [
                gpucalc(*words, cwd=here)
                for words in (
                    ("plan", "job.yaml", "--quiet"),
                    ("import", "ds.json"),
                    ("doctor", "--lint", "launch.sh"),
                    ("oom", "error.txt"),
                )
            ]
        )
    for unix, windows in zip(*answers, strict=True):
        assert (unix.returncode, unix.stdout, unix.stderr) == (
            windows.returncode, windows.stdout, windows.stderr,
        )  # fmt: skip


@posix
def test_links(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(JOB, "utf-8")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    (tmp_path / "gone.yaml").symlink_to("nowhere.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "cat").symlink_to(ROOT / "catalogs")
    assert gpucalc("plan", "link.yaml", "--catalog", "cat", "--quiet", cwd=tmp_path).returncode == 0
    for name in ("gone.yaml", "loop.yaml"):
        done = gpucalc("plan", name, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(b"\n") == 1
    (tmp_path / "out.json").symlink_to("kept.json")
    done = gpucalc("check", "link.yaml", "--format", "json", "-o", "out.json", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "out.json").is_symlink()
    assert json.loads((tmp_path / "kept.json").read_text("utf-8"))


# -- readers and writers ----------------------------------------------------------------------------

ANSWERS = [
    ("plan", "llama-3-8b"),
    ("plan", "llama-3-8b", "--json"),
    ("plan", "--help"),
    ("--version",),
    ("gpus", "--json"),
    ("formulas", "--markdown"),
    ("schema", "job"),
]


@posix
@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    near, far = os.pipe()
    os.close(near)  # nobody reads
    try:
        done = gpucalc(*words, stdout=far)
    finally:
        os.close(far)
    assert (done.returncode, done.stderr) == (0, b"")


@posix
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
@pytest.mark.parametrize("words", ["plan llama-3-8b --quiet", "plan nothing-of-this-name", "--version"])
def test_closed_streams(words: str, closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m gpucalc {words} {closed}'],
        env=environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == (2 if "nothing" in words else 0)
    assert b"Traceback" not in done.stderr
    assert b"gpucalc: " not in done.stdout  # an error is no answer


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("words", [*ANSWERS, ("plan", "nothing-of-this-name")], ids=" ".join)
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = gpucalc(*words, stdout=full)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"No space left on device" in done.stderr or words[-1].startswith("nothing")
        assert gpucalc(*words, stdout=full, stderr=full).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_reports_and_calibrations_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    for words in (
        ("check", "job.yaml", "--format", "json", "-o", "/dev/full"),
        ("plan", "job.yaml", "--html", "/dev/full"),
    ):
        done = gpucalc(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"No space left on device" in done.stderr


# -- stopped and together ---------------------------------------------------------------------------


def stopped(words: list[str], cwd: Path) -> tuple[int, bytes, bytes]:
    """The program interrupted once it is at work: it has opened the files its work needs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpucalc", *words],
        env=environment(), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: busy(process.pid) >= 0.4 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def busy(pid: int) -> float:
    """Seconds of processor time a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "words",
    [
        ["size", "models/llama-3-70b", "--task", "serve", "--unpriced"],
        ["plan", "megatron-1t", "--search"],
        ["validate"],
        ["catalog", "check"],
    ],
    ids=" ".join,
)
def test_an_interrupt_ends_the_work_without_a_trace(words: list[str], tmp_path: Path) -> None:
    code, out, err = stopped(words, tmp_path)
    assert (code, out, err) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_an_interrupt_ends_a_measurement_and_its_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpucalc", "probe", "--device", "cpu", "--quick", "-o", "cpu.yaml"],
        env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    wait_for(lambda: bool(ranks_of(process.pid)) or process.poll() is not None)
    time.sleep(1)  # ranks load torch, meet and measure
    ranks = ranks_of(process.pid)
    assert ranks
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert list(tmp_path.iterdir()) == []


def wait_for(met: Callable[[], bool], seconds: float = 30) -> None:
    """Returns when a condition is met, or after a while without it."""
    deadline = time.monotonic() + seconds
    while not met() and time.monotonic() < deadline:
        time.sleep(0.02)


def ranks_of(parent: int) -> set[int]:
    """The processes another has started, each in a session of its own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, owner = stat.read_text().rpartition(")")[2].split()[:2]
            if owner == str(parent) and state != "Z":
                found.add(int(stat.parent.name))
    return found


def test_runs_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")
    command = [sys.executable, "-m", "gpucalc", "check", "job.yaml", "--format", "json", "-o", "report.json"]
    running = [
        subprocess.Popen(
            command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    assert [(process.communicate()[1], process.returncode) for process in running] == [(b"", 0)] * 4
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["summary"]["failed"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "report.json"]


# -- many in one process ----------------------------------------------------------------------------


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_thousand_plans_in_one_process_show_no_growth() -> None:
    catalog = open_catalog(None)
    job = resolve("models/llama-3.2-1b", catalog, gpus="1xL4", task="train")
    served = resolve("models/llama-3.2-1b", catalog, gpus="1xL4", task="serve")

    def plan(times: int) -> int:
        for _ in range(times):
            plan_job(job, catalog, advice=False)
            plan_job(served, catalog, advice=False)
        gc.collect()
        return len(gc.get_objects())

    first = plan(20)  # caches fill
    peak = peak_kib()
    assert plan(480) - first < 500  # of about a hundred thousand
    assert peak_kib() - peak < 8 * 1024


def test_answers_in_one_process_leave_no_open_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB, "utf-8")

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    main(["plan", str(tmp_path / "job.yaml")])
    before = open_files()
    for _ in range(5):
        main(["plan", str(tmp_path / "job.yaml"), "--json"])
        main(
            [
                "check",
                str(tmp_path / "job.yaml"),
                "--format",
                "json",
                "-o",
                str(tmp_path / "out.json"),
                "--quiet",
            ]
        )
        main(["plan", "no-such-job"])
    capsys.readouterr()
    assert open_files() == before
