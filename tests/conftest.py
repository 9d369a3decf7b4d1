"""`golden` and `committed` compare text with a stored file; `pytest --update-golden` rewrites the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    parser.addoption("--record-predictions", metavar="WHY", help="rewrite the table of predictions")


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
