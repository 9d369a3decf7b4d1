"""Models by their name on the Hugging Face hub: the local cache, and the network only when asked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpucalc.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w.-]{1,64})?")


def is_name(text: str) -> bool:
    """Whether a text has the form org/name or org/name@revision."""
    return bool(_NAME.fullmatch(text)) and ".." not in text


def cache_root() -> Path:
    """Where the hub's client keeps what it has fetched."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    home = os.environ.get("HF_HOME")
    if home:
        return Path(os.path.expanduser(home)) / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "huggingface" / "hub"


def cached(name: str) -> Path | None:
    """The newest cached snapshot of org/name that holds a config.json, or that of its @revision."""
    repository, _, revision = name.partition("@")
    folder = cache_root() / f"models--{repository.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        if not snapshots.is_dir():
            return None
        wanted = revision or "main"
        reference = folder / "refs" / wanted
        if reference.is_file():
            wanted = reference.read_text(encoding="utf-8").strip()[:64]
        found = [snapshots / wanted] if re.fullmatch(r"[\w.-]+", wanted) and ".." not in wanted else []
        if not revision:
            others = (path for path in snapshots.iterdir() if path not in found)
            found += sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
        return next((path for path in found if (path / "config.json").is_file()), None)
    except (OSError, UnicodeDecodeError):
        return None


def fetch(name: str) -> Path:
    """The folder of a config.json fetched from the hub. Raises InputError when it cannot be had."""
    try:
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError(
            "the hub's client is not installed", where="--hub", legal='pip install "gpucalc[hub]"'
        ) from None
    repository, _, revision = name.partition("@")
    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision or None)).parent
    except Exception as error:  # the client has a dozen of its own, and those of its transport
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise unreadable(name, f"{type(error).__name__}: {said[:200]}") from None


def unreadable(name: str, why: str, near: tuple[str, ...] = ()) -> InputError:
    """The error for a model whose configuration cannot be read: not a value, and not zero."""
    return InputError(
        f"its config.json cannot be read ({why})",
        key="model",
        given=name,
        legal="the path of a config.json, or --hub to fetch it (gated models need a login)",
        near=near,
    )
