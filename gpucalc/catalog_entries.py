"""What the catalogue's files hold: GPUs, systems, models, kernel rates, collectives and prices, by name.

Each file is read at most once, and every figure's source keys are put beside the references they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpucalc.catalog_names import KINDS, Named, Names
from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.base import Spec
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import CollectiveSpec, KernelSpec
from gpucalc.spec.system import PriceListSpec, SystemSpec
from gpucalc.spec.yamlio import load_yaml, read_text

if TYPE_CHECKING:
    from gpucalc.spec.model import ModelSpec

_ABOUT = re.compile(r"^ +about: \[(.*)\]", re.MULTILINE)

S = TypeVar("S", bound=Spec)


class Entries(Names):
    """The entries of catalogue folders. Each file is read at most once."""

    def __init__(self, roots: Iterable[str | Path]) -> None:
        super().__init__(roots)
        self._specs: dict[tuple[str, str], Any] = {}
        self._sources: dict[str, str] | None = None
        self._about: frozenset[str] | None = None

    # -- files --------------------------------------------------------------------------------

    @property
    def sources(self) -> dict[str, str]:
        """Source keys and the public references they stand for; an earlier root's word wins."""
        if self._sources is None:
            merged: dict[str, str] = {}
            for root in reversed(self.roots):
                path = root / "sources.yaml"
                if path.is_file():
                    merged.update(load_yaml(path).data)
            self._sources = merged
        return self._sources

    def load(self, kind: str, name: str, spec: type[S]) -> S:
        """The spec in the file of that name, its figures' sources resolved."""
        return self._load(kind, self.find(kind, name), spec)

    def _load(self, kind: str, found: Named, spec: type[S]) -> S:
        key = (kind, found.stem)
        if key not in self._specs:
            data = load_yaml(found.path).data
            self._specs[key] = spec.read(self._cite(data, str(found.path), ""), where=str(found.path))
        loaded = self._specs[key]
        assert isinstance(loaded, spec)
        return loaded

    def _cite(self, data: Any, where: str, key: str) -> Any:
        """The data with the full references put beside each figure's source keys."""
        if isinstance(data, dict):
            inside = {
                name: self._cite(part, where, f"{key}.{name}" if key else str(name))
                for name, part in data.items()
            }
            if "unit" in data and "value" in data:
                if "references" in data:
                    raise InputError("unknown key", where=where, key=f"{key}.references")
                inside["references"] = self._references(data.get("source"), where, key)
            return inside
        if isinstance(data, list):
            return [self._cite(part, where, f"{key}.{index}") for index, part in enumerate(data)]
        return data

    def _references(self, keys: Any, where: str, key: str) -> list[str]:
        if not isinstance(keys, list) or not keys:
            raise InputError("a figure needs a list of sources", where=where, key=f"{key}.source", given=keys)
        for name in keys:
            if not isinstance(name, str) or name not in self.sources:
                raise UnknownName(
                    "unknown source",
                    where=where,
                    key=f"{key}.source",
                    given=name,
                    near=nearest(str(name), self.sources),
                )
        return [f"{name}: {self.sources[name]}" for name in keys]

    def used(self) -> dict[str, str]:
        """The revision of every file read so far, by kind and stem: what the answers rest on."""
        read = sorted((kind, stem) for kind, stem in self._specs if kind in KINDS)
        return {f"{kind}/{stem}": self.revision_of(kind, stem) for kind, stem in read}

    def claimed(self, entities: Iterable[str]) -> bool:
        """Whether any claim is about one of these entries (`models/ID`); no file is parsed for it."""
        if self._about is None:
            texts = (read_text(path) for path in self._stems("claims").values())
            listed = [part for text in texts for found in _ABOUT.findall(text) for part in found.split(",")]
            self._about = frozenset(part.strip() for part in listed)
        return not self._about.isdisjoint(entities)

    # -- entities -----------------------------------------------------------------------------

    def gpu(self, name: str) -> tuple[GpuSpec, list[str]]:
        """A GPU, and what had to be assumed to choose it."""
        found = self.find("gpus", name)
        return self._load("gpus", found, GpuSpec), list(found.assumptions)

    def system(self, name: str) -> SystemSpec:
        """A server, instance type or rack."""
        return self.load("systems", name, SystemSpec)

    def model(self, name: str) -> ModelSpec:
        """A model architecture."""
        from gpucalc.spec.model import ModelSpec  # the largest spec: only for those who ask

        return self.load("models", name, ModelSpec)

    def model_of(self, stated: str | dict[str, Any]) -> ModelSpec:
        """A model as a job states it: by name, or described in place."""
        from gpucalc.spec.model import ModelSpec

        return self.model(stated) if isinstance(stated, str) else ModelSpec.read(stated, key="model")

    def collective(self, name: str) -> CollectiveSpec:
        """A collective class."""
        return self.load("collectives", name, CollectiveSpec)

    def kernels_for(self, gpu: GpuSpec) -> KernelSpec:
        """Kernel rates of a GPU; marked as assumed when they were measured on a relative."""
        key = ("kernels of", gpu.id)
        if key not in self._specs:
            spec = self._kernels(gpu)
            self._specs[key] = spec if gpu.id in spec.applies_to else spec.carried_over()
        kernels: KernelSpec = self._specs[key]
        return kernels

    def links_for(self, kind: CollectiveSpec, gpu: GpuSpec) -> CollectiveSpec:
        """The collective class of a host's links as this GPU has them."""
        return kind.on_gpu(gpu)

    def _kernels(self, gpu: GpuSpec) -> KernelSpec:
        for stem in (gpu.id, gpu.kernels, gpu.arch):
            if stem is not None and any((root / "kernels" / f"{stem}.yaml").is_file() for root in self.roots):
                return self.load("kernels", stem, KernelSpec)
        for stem in self.names("kernels"):
            spec = self.load("kernels", stem, KernelSpec)
            if gpu.arch in spec.transfers_to:
                return spec
        raise UnknownName("no kernel rates serve this GPU", given=gpu.id, legal=self.names("kernels"))

    def prices(self, gpu: GpuSpec) -> PriceListSpec | None:
        """What the GPU costs by the hour, or None when no offer is known."""
        if any((root / "prices" / f"{gpu.id}.yaml").is_file() for root in self.roots):
            return self.load("prices", gpu.id, PriceListSpec)
        return None
