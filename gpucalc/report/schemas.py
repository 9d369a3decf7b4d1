"""JSON Schema of what users write and of what programs read: `gpucalc schema NAME`.

Files users write are described by the classes that read them, so that an editor knows the keys.
Documents are described here beside their writers; tests hold real ones against them.
"""

from __future__ import annotations

from typing import Any

from gpucalc.check_findings import RULES
from gpucalc.line import Kind
from gpucalc.plan.answer import Level
from gpucalc.report.json import SCHEMA_VERSION
from gpucalc.spec.base import Spec
from gpucalc.spec.check import FITS, QUANTITIES, WARN

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAMES = ("job", "model", "gpu", "system", "server", "calibration", "plan", "check")

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_NUMBER: _Schema = {"type": "number"}
_WHOLE: _Schema = {"type": "integer"}
_TEXTS: _Schema = {"type": "array", "items": _TEXT}


def schema(name: str) -> _Schema:
    """The schema of a kind of file or document."""
    body = {"plan": _plan, "check": _check}[name]() if name in ("plan", "check") else _written(name)
    return {"$schema": DIALECT, "title": f"gpucalc {name}", **{k: v for k, v in body.items() if k != "title"}}


def _written(name: str) -> _Schema:
    """A file users write: the schema of the class that reads it."""
    from gpucalc.spec.calibration import CalibrationSpec
    from gpucalc.spec.gpu import GpuSpec
    from gpucalc.spec.job import Job
    from gpucalc.spec.model import ModelSpec
    from gpucalc.spec.server import ServerSpec
    from gpucalc.spec.system import SystemSpec

    specs: dict[str, type[Spec]] = {
        "job": Job,
        "model": ModelSpec,
        "gpu": GpuSpec,
        "system": SystemSpec,
        "server": ServerSpec,
        "calibration": CalibrationSpec,
    }
    found: _Schema = specs[name].model_json_schema()
    if name == "job":
        found["properties"]["expect"] = _expect(warn=True)
        found["properties"]["matrix"] = {"type": "object", "additionalProperties": {"type": "array"}}
    return found


def _expect(*, warn: bool) -> _Schema:
    comparison: _Schema = {"anyOf": [_TEXT, _NUMBER]}
    keys: _Schema = {key: {**comparison, "description": item.title} for key, item in QUANTITIES.items()}
    keys[FITS] = {"enum": [True, False, "marginal"], "description": QUANTITIES[FITS].title}
    if warn:
        keys[WARN] = {**_expect(warn=False), "description": "the same keys; a miss warns"}
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _object(needed: _Schema, optional: _Schema | None = None) -> _Schema:
    return {
        "type": "object",
        "properties": {**needed, **(optional or {})},
        "required": list(needed),
        "additionalProperties": False,
    }


def _maybe(item: _Schema) -> _Schema:
    return {"anyOf": [item, {"type": "null"}]}


def _plan() -> _Schema:
    """The document of `plan --json`. What a layout and a recipe hold depends on the task."""
    level: _Schema = {"enum": [item.value for item in Level]}
    leaf = {
        "name": _TEXT,
        "value": {"anyOf": [_NUMBER, _TEXT]},
        "unit": {"type": "string", "minLength": 1},
        "kind": {"enum": [item.value for item in Kind]},
    }
    more = {"source": _TEXT, "note": _TEXT}
    inner = {
        **more,
        "formula": _TEXT,
        "inputs": {"type": "object"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/line"}},
    }
    host = _object(
        {"level": level, "needed_bytes": _NUMBER, "capacity_bytes": _maybe(_NUMBER), "phase": _TEXT}
    )
    verdict = {
        "level": level,
        "needed_bytes": _NUMBER,
        "capacity_bytes": _NUMBER,
        "margin_bytes": _NUMBER,
        "expected_error_fraction": _NUMBER,
        "expected_error_basis": _TEXT,
        "binds": _TEXT,
        "phase": _TEXT,
        "stage": _WHOLE,
        "host": _maybe(host),
    }
    error = _object({"expected_error_fraction": _NUMBER, "basis": _TEXT})
    action = {
        "title": _TEXT,
        "changes": {"type": "object"},
        "level": level,
        "needed_bytes": _NUMBER,
        "step_s": _maybe(_NUMBER),
        "tokens_per_s": _maybe(_NUMBER),
    }
    load = {
        "concurrency": _WHOLE,
        "tokens_per_s_per_user": _NUMBER,
        "tokens_per_s_per_gpu": _NUMBER,
        "ttft_s": _NUMBER,
        "tpot_s": _NUMBER,
        "queue_s": _NUMBER,
        "binds": _TEXT,
        "meets_targets": _maybe({"type": "boolean"}),
        "is_job": {"type": "boolean"},
        "is_most": {"type": "boolean"},
        "layout": _TEXT,
    }
    meters = _object({f"{name}_bytes": _NUMBER for name in ("allocated", "reserved", "device")})
    needed = {
        "schema_version": {"const": SCHEMA_VERSION},
        "name": _TEXT,
        "verdict": _object(verdict),
        "meters": _maybe(meters),
        "binds": _TEXT,
        "fleet": _TEXT,
        "gpus": _WHOLE,
        "layout": {"type": "object"},
        "recipe": {"type": "object"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "assumptions": {"type": "array", "items": _object({"key": _TEXT, "value": {}, "why": _TEXT})},
        "assumed_figures": {"type": "array", "items": {"$ref": "#/$defs/figure"}},
        "speed_error": _maybe(error),
        "actions": {"type": "array", "items": _object(action)},
        "splits": {"type": "array", "items": _object(_split(level))},
        "loads": {"type": "array", "items": _object(load)},
        "launch": _maybe(_TEXT),
        "documents": {"type": "array", "items": {"type": "object"}},
        "notes": _TEXTS,
        "provenance": {"type": "object"},
    }
    found = _object(needed)
    found["properties"]["search"] = _search(level)
    found["additionalProperties"] = True  # a later version may say more
    return {**found, "$defs": {"line": _object(leaf, inner), "figure": _object(leaf, more)}}


def _search(level: _Schema) -> _Schema:
    """What `plan --search` adds: the best layouts, those of least memory, and the job's own."""
    option = _object(
        {
            "layout": {"type": "object"},
            "level": level,
            "needed_bytes": _NUMBER,
            "step_s": _maybe(_NUMBER),
            "samples_per_s": _maybe(_NUMBER),
        }
    )
    size = {"gpus": _WHOLE, "best": _maybe(option), "gpu_s_per_sample": _maybe(_NUMBER)}
    size |= {f"{unit}_per_million_tokens": _maybe(_NUMBER) for unit in ("usd", "kwh")}
    return _object(
        {
            "ranked_by": _TEXT,
            "searched": _TEXTS,
            "held": {"type": "object"},
            "legal_layouts": _WHOLE,
            "fitting_layouts": _WHOLE,
            "timed_layouts": _WHOLE,
            "core_s": _NUMBER,
            "layouts_per_s_per_core": _NUMBER,
            "in_columns": {"type": "boolean"},
            "settings": {"type": "object", "description": "keys that turn the job into the best layout"},
            "options": {"type": "array", "items": option, "description": "the best first"},
            "memory_against_time": {"type": "array", "items": option},
            "own": _maybe(option),
            "own_broken_rules": _TEXTS,
            "differing_keys": {"type": "object"},
            "differing_terms": {
                "type": "array",
                "items": _object({"name": _TEXT, "own_s": _NUMBER, "best_s": _NUMBER}),
            },
            "sizes": {"type": "array", "items": _object(size)},
        }
    )


def _split(level: _Schema) -> _Schema:
    """One way of running on unlike cards."""
    part = {
        "gpu": _TEXT,
        "gpus": _WHOLE,
        "micro_batch": _WHOLE,
        "micro_batches": _WHOLE,
        "layers": {"type": "array", "items": _WHOLE},
        "needed_bytes": _NUMBER,
        "capacity_bytes": _NUMBER,
        "level": level,
        "busy_s": _maybe(_NUMBER),
    }
    return {
        "how": _TEXT,
        "fleet": _TEXT,
        "framework": _TEXT,
        "precision": _TEXT,
        "recompute": _TEXT,
        "parts": {"type": "array", "items": _object(part)},
        "level": level,
        "global_batch": _maybe(_WHOLE),
        "step_s": _maybe(_NUMBER),
        "tokens_per_s": _maybe(_NUMBER),
        "left_out": _maybe(_TEXT),
        "wins": {"type": "boolean"},
        "why": _TEXT,
    }


def _check() -> _Schema:
    """The document of `check --format json`."""
    amount: _Schema = {"anyOf": [_NUMBER, _TEXT, {"type": "null"}]}
    finding = {
        "rule": {"enum": list(RULES)},
        "status": {"enum": ["pass", "warn", "fail"]},
        "known": {"type": "boolean"},
        "file": _TEXT,
        "line": {"type": "integer", "minimum": 1},
        "job": _TEXT,
        "cell": _TEXT,
        "message": _TEXT,
        "value": amount,
        "comparison": _TEXT,
        "limit": amount,
        "unit": _TEXT,
        "equation": _maybe(_TEXT),
        "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    }
    counts = dict.fromkeys(("findings", "passed", "warned", "failed", "known"), _WHOLE)
    return _object(
        {
            "schema_version": {"const": SCHEMA_VERSION},
            "summary": _object(counts),
            "findings": {"type": "array", "items": _object(finding)},
        }
    )
