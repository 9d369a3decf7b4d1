"""What a plan must not load: the libraries that would make every answer slow."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "torch", "pynvml", "rich", "transformers")


COMMANDS = (
    "plan llama-3-8b --gpus 8xH100-SXM --json",
    "explain llama-3-8b weights --gpus 8xH100-SXM --json",
    "gpus show H100-SXM --json",
    "--help",
)


@pytest.mark.parametrize("arguments", [line.split() for line in COMMANDS], ids=COMMANDS)
def test_no_heavy_library_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gpucalc.__main__ import main\n"
        f"code = main({arguments!r})\nprint(code, *sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *modules = done.stderr.split()
    assert status == "0", done.stderr
    assert not {name.split(".")[0] for name in modules} & set(HEAVY)
