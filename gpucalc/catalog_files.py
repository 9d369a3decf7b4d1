"""Which files make up a catalogue folder, and what a file that stands alone describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucalc.catalog_names import KINDS
from gpucalc.errors import InputError
from gpucalc.spec.yamlio import load_yaml

SOURCES = "sources"
# What tells the kind of a file that stands anywhere: the first that has the key.
_TOLD_BY = {
    "peaks": "gpus",
    "gpus_per_node": "systems",
    "offers": "prices",
    "purchase": "prices",
    "carbon_kg_per_kwh": "grids",
    "usd_per_kwh": "grids",
    "interruptions": "reliability",
    "gemm": "kernels",
    "alpha0": "collectives",
    "eras": "engines",
    "claims": "claims",
    "one_way": "interconnects",
    "run": "jobs",
    "layers": "models",
    "family": "models",
    "architecture": "models",
    "architectures": "models",
    "network": "models",
}


@dataclass(frozen=True, slots=True)
class File:
    """One catalogue file: where it lies, what it holds and, of one in a catalogue folder, the folder."""

    path: Path
    kind: str  # of KINDS, or SOURCES
    root: Path | None

    @property
    def stem(self) -> str:
        """The name it is called by."""
        return self.path.name.removesuffix(".yaml")


def files_of(path: Path) -> Iterator[File]:
    """The file at a path, or those of a catalogue folder or of one of its kinds. Raises InputError."""
    if not path.is_dir():
        yield _one(path)
        return
    if path.name in KINDS:
        root, folders = path.parent, [path]
    else:
        root, folders = path, [path / kind for kind in KINDS if (path / kind).is_dir()]
        if not folders:
            raise InputError(
                "holds no catalogue files", where=str(path), legal=f"a folder with any of {', '.join(KINDS)}"
            )
        if (root / f"{SOURCES}.yaml").is_file():
            yield File(root / f"{SOURCES}.yaml", SOURCES, root)
    for folder in folders:
        for found in sorted(folder.rglob("*.y*ml")):
            yield File(found, folder.name, root)


def _one(path: Path) -> File:
    if path.name == f"{SOURCES}.yaml":
        return File(path, SOURCES, path.parent)
    folder = path.absolute().parent
    if folder.parent.name == "measurements":  # these lie one folder deeper
        folder = folder.parent
    if folder.name in KINDS:
        return File(path, folder.name, folder.parent)
    return File(path, _kind_of(path), None)


def _kind_of(path: Path) -> str:
    data = load_yaml(path, mapping=False, max_bytes=most_bytes("measurements")).data
    if isinstance(data, list):
        return "measurements"
    kind = next((kind for key, kind in _TOLD_BY.items() if isinstance(data, Mapping) and key in data), None)
    if kind is None:
        raise InputError(
            "cannot tell what this file describes",
            where=str(path),
            legal=f"a file in a folder named {', '.join(KINDS)}, or one with the keys of such a file",
        )
    return kind


def most_bytes(kind: str) -> int:
    """How large a file of a kind may be."""
    from gpucalc.measured import MAX_FILE_BYTES
    from gpucalc.spec.yamlio import MAX_BYTES

    return MAX_FILE_BYTES if kind == "measurements" else MAX_BYTES


def kinds_of(roots: Iterable[Path]) -> dict[Path, dict[str, int]]:
    """How many files of each kind every folder holds."""
    return {
        root: {kind: len(list((root / kind).rglob("*.yaml"))) for kind in KINDS if (root / kind).is_dir()}
        for root in roots
    }
