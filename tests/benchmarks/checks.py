"""CPU seconds that one process takes to check many jobs, start-up and all seven formats included.

    python tests/benchmarks/checks.py [jobs]

The jobs differ in model, fleet, length and batch, as a team's do; target: 200 in under 2 s. A
benchmark, not a test: `test_check.py` holds the catalogue to one reading per file instead.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = ("llama-3-8b", "meta-llama/Meta-Llama-3-70B", "mixtral-8x7b", "qwen2.5-7b", "bert-large")
FLEETS = ("8xH100-SXM", "8xA100-80GB", "4xRTX4090", "2x8xH100-SXM", "8xL40S", "8xh200-sxm-141gb")
TEXT = """\
model: {model}
gpus: {fleet}
run: {{task: train, framework: fsdp, seq_len: {length}, micro_batch: {batch}, global_batch: {sequences}}}
expect: {{fits: true, headroom: ">=10 %", step_s: "<=20 s", mfu: ">=30 %", warn: {{peak_gib: "<=60"}}}}
"""
FORMATS = ("json", "junit", "sarif", "github", "gitlab", "markdown")


def write(folder: Path, count: int) -> list[str]:
    """That many job files, no two alike."""
    names = []
    for index in range(count):
        batch = 1 + index % 4
        text = TEXT.format(
            model=MODELS[index % len(MODELS)],
            fleet=FLEETS[index // 5 % len(FLEETS)],
            length=256 * (1 + index % 2) if index % len(MODELS) == 4 else 1024 * (1 + index % 8),
            batch=batch,
            sequences=64 * batch,
        )
        names.append(f"job{index}.yaml")
        (folder / names[-1]).write_text(text, "utf-8")
    return names


def _spent() -> float:
    """CPU seconds of every process that has ended: a busy machine does not lengthen them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    package = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": package}
    with tempfile.TemporaryDirectory() as folder:
        names = write(Path(folder), count)
        command = [sys.executable, "-m", "gpucalc", "check", *names, "--quiet"]
        for name in FORMATS:
            command += ["--format", name, "-o", f"report.{name}"]
        best = float("inf")
        for _ in range(5):
            before = _spent()
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            best = min(best, _spent() - before)
        print(done.stdout.strip() or done.stderr.strip())
        print(f"{count} jobs, {len(FORMATS) + 1} formats: {best:.2f} s CPU, best of 5")


if __name__ == "__main__":
    main()
