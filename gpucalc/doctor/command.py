"""What `gpucalc doctor` answers, from its flags: one report."""

from __future__ import annotations

import sys

from gpucalc.catalog import Catalog
from gpucalc.doctor.finding import Report
from gpucalc.doctor.lint import MAX_TEXT, lint
from gpucalc.errors import InputError
from gpucalc.spec.yamlio import read_text


def lint_file(file: str, catalog: Catalog) -> Report:
    """The findings in a file, or in what is piped in where its name is `-`."""
    if file != "-":
        return lint(read_text(file, max_bytes=MAX_TEXT), catalog, where=file)
    raw = sys.stdin.buffer.read(MAX_TEXT + 1)
    if len(raw) > MAX_TEXT:
        raise InputError("is too large to be a script", where="standard input", legal=f"{MAX_TEXT} bytes")
    if b"\0" in raw:
        raise InputError("is not text", where="standard input")
    return lint(raw.decode("utf-8", "replace"), catalog, where="standard input")
