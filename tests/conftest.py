"""`golden` and `committed` compare text with a stored file; `pytest --update-golden` rewrites the files.

What whoever runs the tests has set for the program, or for a terminal, is set aside while they run: answers
and pages are compared with stored ones.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucalc.catalog import Catalog

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


# Catalogues, the hub's cache, ranks and their starters, widths and colours.
READ = {
    *("GPUCALC_CATALOG", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CUDA_VISIBLE_DEVICES"),
    *("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX"),
}
READ_SO = ("HF_", "HUGGINGFACE_", "LOCAL_", "MASTER_", "NCCL_", "OMPI_", "PYTORCH_", "SLURM_")
_own = tempfile.TemporaryDirectory(prefix="gpucalc-tests-")


def pytest_configure() -> None:
    for name in [name for name in os.environ if name in READ or name.startswith(READ_SO)]:
        del os.environ[name]
    os.environ["XDG_CONFIG_HOME"] = f"{_own.name}/config"
    os.environ["HF_HOME"] = f"{_own.name}/hub"


def pytest_unconfigure() -> None:
    _own.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    parser.addoption("--record-predictions", metavar="WHY", help="rewrite the table of predictions")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    """The shipped catalogue alone."""
    return Catalog([ROOT / "catalogs"])


@pytest.fixture
def committed(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares text with a file of the repository, by its path from the root."""

    def compare(name: str, text: str) -> None:
        path = ROOT / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text + "\n", f"{name} changed; see --update-golden"

    return compare


@pytest.fixture
def golden(committed: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """The same for a file of tests/golden."""

    def compare(name: str, text: str) -> None:
        committed(f"{GOLDEN.relative_to(ROOT)}/{name}", text)

    return compare
