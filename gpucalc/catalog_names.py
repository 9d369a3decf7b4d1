"""Which catalogue file a name stands for: a file stem or an alias, case and punctuation free.

The file of a stem is opened directly; aliases are looked for only on a miss, by scanning the first
lines of the files of that kind. Roots are searched in order and the first that has the file wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpucalc.errors import UnknownName, nearest
from gpucalc.spec.yamlio import load_yaml, read_text

KINDS = (
    "gpus",
    "systems",
    "models",
    "jobs",
    "kernels",
    "collectives",
    "prices",
    "costs",
    "grids",
    "reliability",
    "interconnects",
    "host",
    "engines",
    "measurements",
    "claims",
    "checks",
)
_ONE = {
    "gpus": "GPU",
    "systems": "system",
    "models": "model",
    "jobs": "job",
    "kernels": "kernel rates",
    "collectives": "collective class",
    "prices": "price list",
    "interconnects": "interconnect",
    "grids": "grid",
    "reliability": "published run",
}

LISTED = ("gpus", "models", "systems")  # kinds that a command lists
_STEM = re.compile(r"[a-z0-9][a-z0-9._+-]*", re.IGNORECASE)
_VENDOR = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|radeon|intel|(?<![a-z])gpu(?![a-z])")
_PUNCTUATION = re.compile(r"(?!(?<=[0-9])\.(?=[0-9]))[^a-z0-9]")
_NAMES = re.compile(r"^(aliases|default_for):[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Named:
    """A catalogue file found by a name."""

    stem: str
    path: Path
    assumptions: tuple[str, ...] = ()


class Names:
    """Catalogue folders in the order they are searched, and what their files are called."""

    def __init__(self, roots: Iterable[str | Path]) -> None:
        self.roots = tuple(Path(root) for root in roots)
        self._index: dict[str, dict[str, str]] = {}
        self._aliases: dict[tuple[str, str], Named | None] = {}
        self._declared: dict[Path, dict[str, list[str]]] = {}
        self._files: dict[str, dict[str, Path]] = {}

    def names(self, kind: str) -> tuple[str, ...]:
        """Every file stem of a kind, over all roots, sorted."""
        return tuple(sorted(self._stems(kind)))

    def path_of(self, kind: str, name: str) -> Path:
        """The file a name stands for. Raises UnknownName."""
        return self.find(kind, name).path

    def revision_of(self, kind: str, name: str) -> str:
        """Twelve hex digits that change with the file's content."""
        import hashlib  # only when a report asks

        return hashlib.sha256(self.path_of(kind, name).read_bytes()).hexdigest()[:12]

    def find(self, kind: str, name: str) -> Named:
        """The file a name stands for, and what had to be assumed to choose it. Raises UnknownName."""
        where = _ONE.get(kind, kind)
        if not _is_name(name):
            raise UnknownName(f"not a {where} name", given=name)
        found = self.look_up(kind, name)
        if found is None:
            raise self._unknown(kind, name, where)
        return found

    def look_up(self, kind: str, name: str) -> Named | None:
        """The same, None for a name that stands for no file or fits several."""
        if not _is_name(name):
            return None
        stem = name.strip().casefold()
        if _STEM.fullmatch(stem):
            for root in self.roots:
                path = root / kind / f"{stem}.yaml"
                if path.is_file():
                    return Named(stem, path)
        if (kind, stem) not in self._aliases:  # many jobs name the same few
            self._aliases[kind, stem] = self._by_alias(kind, name)
        return self._aliases[kind, stem]

    def stem_of(self, kind: str, name: str) -> str | None:
        """The file stem of a name or alias, with or without its owner, None where there is none.

        For many names: reads every file once.
        """
        if kind not in self._index:
            index: dict[str, str] = {}
            for stem, path in self._stems(kind).items():
                for alias in self._names_in(path)["aliases"]:
                    index.setdefault(fold(alias), stem)
                    index.setdefault(fold(alias.rpartition("/")[2]), stem)
            self._index[kind] = index | {fold(stem): stem for stem in self._stems(kind)}
        return self._index[kind].get(fold(name))

    def clashes(self, kind: str, stem: str) -> dict[str, str]:
        """Names of a file that another file of its kind has too, and that file's stem."""
        key = f"names of {kind}"
        if key not in self._index:
            owners: dict[str, str] = {}
            for other, path in self._stems(kind).items():
                for name in _all_names(other, path).values():
                    owners[name] = f"{owners[name]} {other}" if name in owners else other
            self._index[key] = owners
        path = self._stems(kind)[stem]
        shared = {name: self._index[key][folded] for name, folded in _all_names(stem, path).items()}
        return {
            name: next(other for other in owners.split() if other != stem)
            for name, owners in shared.items()
            if " " in owners
        }

    def _by_alias(self, kind: str, name: str) -> Named | None:
        if kind not in self._files:
            self._files[kind] = self._stems(kind)
        stems = self._files[kind]
        wanted = fold(name)
        folded = {fold(stem): stem for stem in stems}
        if wanted and wanted in folded:
            return Named(folded[wanted], stems[folded[wanted]])
        for stem, path in stems.items():
            names = self._names_in(path)
            if any(fold(alias) == wanted for alias in names["aliases"]):
                return Named(stem, path)
            if any(fold(alias) == wanted for alias in names["default_for"]):
                others = [other for other in sorted(stems) if other != stem and _matches(name, other)]
                also = f" (also known: {', '.join(others)})" if others else ""
                said = f"{name.strip()} is taken as {stem}{also}"
                return Named(stem, path, (said,))
        return None

    def _unknown(self, kind: str, name: str, where: str) -> UnknownName:
        """The error for a name, with the files it fits or comes near to."""
        stems = self._stems(kind)
        matching = tuple(stem for stem in sorted(stems) if _matches(name, stem))
        if len(matching) > 1:
            return UnknownName(f"the {where} name fits several", given=name, legal=matching)
        known = {
            alias: stem
            for stem, path in stems.items()
            for aliases in self._names_in(path).values()
            for alias in aliases
        }
        close = matching or tuple(
            dict.fromkeys(known.get(found, found) for found in nearest(name, [*stems, *known]))
        )
        legal = f"`gpucalc {kind}` lists them" if kind in LISTED else None
        return UnknownName(f"unknown {where}", given=name, legal=legal, near=close)

    def _names_in(self, path: Path) -> dict[str, list[str]]:
        """The aliases a file declares; each file is looked into once."""
        if path not in self._declared:
            self._declared[path] = declared_names(path)
        return self._declared[path]

    def _stems(self, kind: str) -> dict[str, Path]:
        if kind not in KINDS:
            raise UnknownName("unknown kind of catalogue file", given=kind, legal=KINDS)
        found: dict[str, Path] = {}
        for root in self.roots:
            try:
                entries = list(os.scandir(root / kind))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                stem, dot, suffix = entry.name.rpartition(".")
                if dot and suffix == "yaml" and _STEM.fullmatch(stem):
                    found.setdefault(stem, Path(entry.path))
        return found


def fold(name: str) -> str:
    """A name without case, punctuation and vendor words: `NVIDIA GeForce RTX 4090` is `rtx4090`.

    A point between digits stays: opt-1.3b is not opt-13b.
    """
    return _PUNCTUATION.sub("", _VENDOR.sub("", name.casefold()))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable() and len(name) <= 200


def _tokens(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.casefold()))


def _matches(name: str, stem: str) -> bool:
    """Whether the words of a name all occur in a stem: `a100 80gb` in `a100-pcie-80gb`."""
    words = _tokens(name)
    return bool(words) and words <= _tokens(stem)


def declared_names(path: Path) -> dict[str, list[str]]:
    """The aliases a file declares, without parsing it: both keys are written in flow style."""
    text = read_text(path)
    names: dict[str, list[str]] = {"aliases": [], "default_for": []}
    for key, rest in _NAMES.findall(text):
        rest = rest.partition(" #")[0].strip()
        if rest.startswith("[") and rest.endswith("]"):
            names[key] = [part.strip().strip("'\"") for part in rest[1:-1].split(",") if part.strip()]
        else:  # written some other legal way: let the parser read it
            names[key] = [str(part) for part in load_yaml(path).data.get(key) or ()]
    return names


def _all_names(stem: str, path: Path) -> dict[str, str]:
    """Everything a file may be called, as written and as compared; each once."""
    declared = declared_names(path)
    names = {fold(name): name for name in (*declared["aliases"], *declared["default_for"], stem)}
    return {name: folded for folded, name in names.items()}
