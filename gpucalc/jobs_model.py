"""The model a job is about: its own keys, a path, a catalogue id or a name of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucalc.errors import InputError, UnknownName
from gpucalc.jobs_changes import Change, apply_changes
from gpucalc.jobs_found import PICKLES, WEIGHTS, Found, described_model, from_path, is_there

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.spec.model import ModelSpec, WeightsSpec


def model_of(
    words: Any, found: Found, catalog: Catalog, changes: Sequence[Change]
) -> tuple[ModelSpec, str, tuple[str, ...]]:
    """The model with its changes, where it was read, and what is to be said of it. Raises InputError."""
    model, where, notes, weights = _named_model(words, found, catalog)
    if weights is not None:
        model = model.model_copy(update={"weights": weights})
    if changes:
        data = model.model_dump(mode="python", exclude_unset=True)
        apply_changes(data, [Change(c.key.removeprefix("model."), c.value, c.text) for c in changes])
        model = type(model).read(data, where="--set", key="model")
        where = f"{where}, changed by --set"
    return model, where, notes


def draft_of(
    words: str, found: Found, catalog: Catalog, changes: Sequence[Change]
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model that drafts, named as any model is, and what is to be said of it. Raises InputError."""
    flagged = found.flagged or any(change.key == "run.draft_model" for change in changes)
    try:
        spec, _, notes, weights = _named_model(words, replace(found, flagged=flagged), catalog)
    except InputError as error:
        if error.key != "model":
            raise
        raise type(error)(
            error.problem,
            where=error.where,
            key="run.draft_model",
            given=error.given,
            legal=error.legal,
            near=error.near,
        ) from None
    return spec if weights is None else spec.model_copy(update={"weights": weights}), notes


def _named_model(
    words: Any, found: Found, catalog: Catalog
) -> tuple[ModelSpec, str, tuple[str, ...], WeightsSpec | None]:
    if isinstance(words, Mapping) and words:
        key = "" if found.bare else "model"
        spec, where, notes = described_model(
            dict(words), found.where, key, found.name if found.bare else None
        )
        return spec, where, (*found.notes, *notes), found.weights
    if words is None:
        legal = "a catalogue id, a path, or keys" if found.foreign is None else "--model NAME, a name or path"
        raise InputError("is missing", where=found.where, key="model", legal=legal)
    if not isinstance(words, str) or not words.strip():
        raise InputError(
            "is not a model",
            where=found.where,
            key="model",
            given=words,
            legal="a catalogue id, a path, or keys",
        )
    path = _model_path(words, found.folder)
    if path is not None and not found.flagged and _climbs_out(words, found.folder):
        raise InputError(
            "a job's model may not lie above the job's folder and the current one",
            where=found.where,
            key="model",
            given=words,
            legal="a path below either; --model for any other",
        )
    if path is None:
        try:
            return (*_catalogue_model(words, catalog), None)
        except UnknownName as error:
            inner, said = _published(words, found, catalog, error.near)
            inner = replace(inner, notes=(said, *inner.notes))
    else:
        inner = from_path(path)
    if not inner.bare:
        raise InputError("is a job, not a model", where=found.where, key="model", given=words)
    model = inner.data["model"]
    if isinstance(model, str):  # a catalogue entry, by the name its publisher gives it
        return (*_catalogue_model(model, catalog)[:2], inner.notes, None)
    spec, where, notes = described_model(model, inner.where, "", inner.name)
    return spec, where, (*inner.notes, *notes), inner.weights


def _published(words: str, found: Found, catalog: Catalog, near: tuple[str, ...]) -> tuple[Found, str]:
    """A name of the hub: the local cache, the hub when asked, else the catalogue's entry of that name."""
    from gpucalc.importers import hub

    if not hub.is_name(words):
        raise UnknownName(
            "unknown model: neither a file nor in the catalogue",
            where=found.where,
            key="model",
            given=words,
            near=near,
        )
    snapshot = hub.cached(words)
    if snapshot is None and found.hub:
        snapshot = hub.fetch(words)
    if snapshot is not None:
        inner = from_path(snapshot)
        return replace(inner, name=words), f"{words}: revision {snapshot.name[:12]} of the Hugging Face cache"
    name = words.partition("@")[0].rsplit("/", 1)[-1]
    try:
        stem = catalog.find("models", name).stem
    except UnknownName as error:
        raise hub.unreadable(
            words, "neither in the catalogue nor in the local Hugging Face cache", error.near
        ) from None
    data = {"model": stem}
    return Found(found.where, None, data, bare=True, name=stem), f"{words} is taken as {stem}"


def _model_path(words: str, folder: Path | None) -> Path | None:
    """The file or folder a model name stands for: beside the job first, then where the user is."""
    plain = "/" not in words and "\\" not in words and not words.startswith((".", "~"))
    if plain and Path(words).suffix.lower() not in (".json", ".yaml", ".yml", *WEIGHTS, *PICKLES):
        return None  # a catalogue id
    candidates = [Path(os.path.expanduser(words))]  # "~nobody" stays as it is
    if folder is not None and not candidates[0].is_absolute():
        candidates.insert(0, folder / candidates[0])
    return next((path for path in candidates if is_there(path)), None)


def _climbs_out(words: str, folder: Path | None) -> bool:
    """Whether a path with `..` leaves both the job's folder and where the user is: files come from others."""
    if ".." not in Path(words).parts:
        return False
    here = Path.cwd()
    base = here if folder is None else here / folder
    target = os.path.normpath(base / words)
    return not any(Path(target).is_relative_to(os.path.normpath(root)) for root in (here, base))


def _catalogue_model(words: str, catalog: Catalog) -> tuple[ModelSpec, str, tuple[str, ...]]:
    named = catalog.find("models", words.removesuffix(".yaml"))
    return catalog.model(named.stem), str(named.path), named.assumptions
