"""The product's own error as a table: written from a validation report, read by every plan.

One file, catalogs/measurements/accuracy.yaml, holds per quantity and framework how far published
runs were from their estimates. `gpucalc validate --record` writes it; a test compares it with a
fresh report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucalc.catalog import Catalog
from gpucalc.errors import UnknownName
from gpucalc.plan.evaluate import ClassError, ErrorTable
from gpucalc.spec.yamlio import load_yaml

if TYPE_CHECKING:
    from gpucalc.validate import Report

FILE = ("measurements", "accuracy")
# Of deployments, what a plan states; the rest of what logs print is compared and not recorded.
SERVING = (
    "weights", "kv_tokens", "kv_tokens_predicted", "activation_peak", "decode_speed", "batched_speed",
    "prefill",
)  # fmt: skip
HEADER = """\
# How far published runs were from their estimates, by quantity and framework: absolute relative errors as
# fractions, groups of equal weight (a source of training runs; a model on a GPU of a source of deployments).
# Written by `gpucalc validate --record`; not by hand.
"""


def error_table(catalog: Catalog) -> ErrorTable:
    """The recorded errors, empty where none were recorded."""
    try:
        path = catalog.path_of(*FILE)
    except UnknownName:
        return ErrorTable()
    data = load_yaml(path).data
    return ErrorTable(
        memory={name: ClassError(**row) for name, row in data.get("peak_memory", {}).items()},
        time={name: ClassError(**row) for name, row in data.get("throughput", {}).items()},
        decode={name: ClassError(**row) for name, row in data.get("decode_speed", {}).items()},
        batched={name: ClassError(**row) for name, row in data.get("batched_speed", {}).items()},
    )


def recorded(report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    """The table of a report: quantity, framework, figures. Plans quote the errors of runs alone."""
    from gpucalc.validate_training import QUANTITIES

    kept = (*QUANTITIES, *SERVING)
    return {
        quantity: {
            framework: {
                "rows": found.rows,
                "groups": found.groups,
                "median_abs": round(found.median_abs or 0.0, 3),
                "p90_abs": round(found.p90_abs or 0.0, 3),
                "signed_median": round(found.signed_median or 0.0, 3),
            }
            for framework, found in sorted(report.breakdown(quantity, "framework").items())
        }
        for quantity in report.quantities
        if quantity in kept and report.of(quantity)
    }


def write(report: Report, catalog: Catalog) -> Path:
    """Write the report's table over the recorded one, whole or not at all; the file written.

    What the report did not compare stays as it was recorded.
    """
    path = catalog.path_of(*FILE)
    lines = [HEADER]
    for quantity, rows in {**load_yaml(path).data, **recorded(report)}.items():
        lines.append(f"{quantity}:\n")
        for framework, row in rows.items():
            figures = ", ".join(f"{key}: {value}" for key, value in row.items())
            lines.append(f"  {framework}: {{{figures}}}\n")
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(lines), encoding="utf-8")
    draft.replace(path)
    return path
