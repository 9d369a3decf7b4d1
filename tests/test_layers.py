"""The layer contract: imports go down only, and each outside library is met in its own place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gpucalc"

# Lower may not import higher; modules of one layer may know each other.
LAYERS: list[set[str]] = [
    {"gpucalc", "formula", "num", "units", "errors", "line"},
    {"spec"},
    {"graph", "builders", "families", "importers", "formulas"}
    | {"catalog", "catalog_names", "catalog_entries", "catalog_machines"},
    {"counts", "calibration"} | {"jobs", "jobs_changes", "jobs_defaults", "jobs_found", "jobs_model"},
    {"plan"},
    {"search", "search_serving"},
    {"advise", "advise_serving", "points", "mixed"}
    | {"measured", "measured_runs", "measured_meters", "measured_deployments", "measured_serving"}
    | {"measured_collectives"},
    {"estimate_serving", "estimate_training"},
    {"validate", "validate_collectives", "validate_serving", "validate_training"},
    {"accuracy", "economics"},
    {"planner"},
    {"diff", "doctor", "explain", "trace", "claims", "scale", "documents", "layouts"}
    | {"check", "check_compare", "check_findings"}
    | {"oom", "oom_changes", "oom_held", "oom_message", "oom_tensors"},
    {"catalog_files", "catalog_sanity", "catalog_check", "reference"},
    {"size_fleets", "size_targets"},
    {"size", "size_bounds", "size_joined", "size_offers"},
    {"report", "probe"},
    {"api"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Outside library -> the parts of the package that may import it.
PLACES = {
    "torch": {"probe", "trace"},
    "pynvml": {"probe", "trace"},
    "numpy": {"search", "num"},
    "rich": {"commands", "report"},
    "typer": {"commands"},
    "yaml": {"spec", "importers"},
}
# Modules that read or write files; what computes must not reach for them.
FILE_MODULES = {"os", "io", "pathlib", "shutil", "tempfile", "glob", "subprocess"}
NO_FILES = {"formulas", "plan", "formula", "num", "units", "errors", "line", "graph", "counts", "explain"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The layer name of a file: its module, or the package it lies in."""
    first = path.relative_to(PACKAGE).parts[0]
    return "gpucalc" if first == "__init__.py" else first.removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute import of a file, wherever it stands, with its line number."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "gpucalc":
                for alias in node.names:
                    yield node.lineno, f"gpucalc.{alias.name}"
            else:
                yield node.lineno, node.module


def internal(name: str) -> str | None:
    """The part of the package an import reaches, None for other libraries."""
    parts = name.split(".")
    if parts[0] != "gpucalc":
        return None
    return parts[1] if len(parts) > 1 and not parts[1].startswith("__version") else "gpucalc"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    part = part_of(path)
    assert part in RANK, f"give {part} a place in the layers"
    for line, name in imported(path):
        target = internal(name)
        if target is None or target == part:
            continue
        if part == "gpucalc":  # the public names, for type checkers alone; see the test below
            assert target in {"api", "errors"}
            continue
        assert target in RANK, f"{path.name}:{line}: {name} has no place in the layers"
        assert RANK[target] <= RANK[part], f"{path.name}:{line}: {part} may not import {target}"
        if part == "formulas":
            assert target in {"formula", "num"}, f"{path.name}:{line}: formulas know formula and num alone"


def test_the_api_is_loaded_by_name_where_it_is_handed_out_alone() -> None:
    """`import gpucalc` stays cheap, and `gpucalc.plan`, a package too, can be called: these two reach up."""
    reaching = {"__init__.py": {"api", "errors", "plan"}, "plan/__init__.py": {"api"}}
    for path in MODULES:
        named = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                named |= {text.split(".")[1] for text in texts if str(text).startswith("gpucalc.")}
        up = {name for name in named if RANK[name] > RANK[part_of(path)]}
        assert up <= reaching.get(str(path.relative_to(PACKAGE)), set()), path


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_are_met_in_their_own_place(path: Path) -> None:
    part = part_of(path)
    for line, name in imported(path):
        library = name.split(".")[0]
        if library in PLACES:
            assert part in PLACES[library], f"{path.name}:{line}: {part} may not import {library}"
        if part in NO_FILES:
            assert library not in FILE_MODULES, f"{path.name}:{line}: {part} touches no file"


@pytest.mark.parametrize("path", sorted((PACKAGE / "commands").glob("*.py")), ids=lambda path: path.stem)
def test_commands_import_only_typer_on_top(path: Path) -> None:
    """What a command needs is imported when it runs, so that the others stay quick."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tops}
    ours = {name for name in names if name.split(".")[0] == "gpucalc"}
    assert ours <= {"gpucalc", "gpucalc.errors", "gpucalc.commands.base"}
    assert not {name.split(".")[0] for name in names} & {"rich", "yaml", "pydantic", "numpy", "torch", "json"}
