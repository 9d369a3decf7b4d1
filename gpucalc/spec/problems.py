"""Validation failures as one line of ours: file, key, value, legal values, nearest name.

Loaded only when something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gpucalc.errors import InputError, UnknownName, nearest
from gpucalc.spec.base import keys_of

_PLAIN = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "finite_number": "must be a finite number",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a group of keys",
    "mapping_type": "must be a group of keys",
    "model_type": "must be a group of keys",
    "model_attributes_type": "must be a group of keys",
    "literal_error": "is not a legal value",
    "enum": "is not a legal value",
    "union_tag_invalid": "is not a legal value",
    "union_tag_not_found": "is missing",
}
_BOUNDS = {
    "greater_than": ("gt", "must be greater than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
    "string_too_long": ("max_length", "has more characters than"),
}
_SHAPES = {"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false"}
_YAML_1_1_BOOLEANS = {"yes", "no", "on", "off", "y", "n"}


@dataclass
class Problem:
    """One thing that is wrong at one key."""

    key: str
    text: str
    given: Any = None
    legal: str | None = None
    near: tuple[str, ...] = ()
    unknown: bool = False
    choices: list[str] = field(default_factory=list)

    def error(self, where: str | None) -> InputError:
        kind = UnknownName if self.unknown else InputError
        return kind(
            self.text, where=where, key=self.key or None, given=self.given, legal=self.legal, near=self.near
        )


def input_error(
    error: ValidationError, spec: type[BaseModel], data: Any, *, where: str | None = None, key: str = ""
) -> InputError:
    """Every problem of a validation failure on one line; the attributes are the first one's."""
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        problem = _problem(item, spec, data, key)
        if problem.key in problems:  # the branches of one `number or auto`
            _join(problems[problem.key], problem)
        else:
            problems[problem.key] = problem
    return together([problem.error(where) for problem in problems.values()])


def together(errors: list[InputError]) -> InputError:
    """Several errors of one file as one error with one line; what is legal is said once."""
    first = errors[0]
    texts, said = [str(first)], {str(first.legal)}
    for error in errors[1:]:
        legal = None if str(error.legal) in said else error.legal
        said.add(str(error.legal))
        where = None if error.where == first.where else error.where
        texts.append(
            str(
                InputError(
                    error.problem, where=where, key=error.key, given=error.given, legal=legal, near=error.near
                )
            )
        )
    first.args = ("; also ".join(texts),)
    first.also = tuple(errors[1:])
    return first


def _problem(item: Any, spec: type[BaseModel], data: Any, prefix: str) -> Problem:
    path, models, parent = _walk(item["loc"], spec, data)
    kind, given, context = item["type"], item.get("input"), item.get("ctx") or {}
    key = ".".join((*((prefix,) if prefix else ()), *path))
    if kind == "extra_forbidden":
        known = list(dict.fromkeys(name for model in models for name in keys_of(model)))
        meant = [
            explain(path[-1]) for model in models if (explain := getattr(model, "explain_unknown", None))
        ]
        return Problem(
            key=key,
            text=next((text for text in meant if text), "no such key"),
            legal=", ".join(known),
            near=nearest(path[-1], known),
            unknown=True,
        )
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = str(context.get("discriminator", "")).strip("'")
        expected = _expected(str(context.get("expected_tags", "")))
        return Problem(
            key=f"{key}.{tag}" if key else tag,
            text=_PLAIN[kind],
            given=given.get(tag) if isinstance(given, Mapping) else None,
            legal=", ".join(expected or _tags(models)),
            near=nearest(str(given.get(tag)), expected) if isinstance(given, Mapping) and expected else (),
        )
    if kind == "gpucalc":
        legal, near = context.get("legal"), tuple(context.get("near") or ())
        said = ", got " in context["problem"]  # of the part that is wrong, where that lies deeper
        return Problem(
            key=key, text=context["problem"], given=None if said else given, legal=legal, near=near
        )
    if kind == "missing":
        choices = [*_choices(path[-1], models)] if path else []
        return Problem(key=key, text=_PLAIN[kind], legal=", ".join(choices) or _needed(parent, models))
    problem = Problem(key=key, text=_PLAIN.get(kind, item["msg"]), given=given)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        problem.text = f"{words} {context[name]}"
    if kind == "string_type" and isinstance(given, int | float):
        problem.legal = "the same in quotes"  # 0.10 without them is a number, and another one
    if kind in ("literal_error", "enum"):
        problem.choices = _expected(str(context.get("expected", "")))
        problem.legal = ", ".join(problem.choices)
        problem.near = nearest(str(given), problem.choices)
        problem.unknown = True
    elif kind in _SHAPES:
        problem.choices = [_SHAPES[kind]]
    if kind == "bool_type" and isinstance(given, str) and given.lower() in _YAML_1_1_BOOLEANS:
        problem.text += f" (`{given}` is text, not a boolean)"
    if kind == "value_error":
        problem.text = str(context.get("error", item["msg"]))
    if problem.given is None and kind.endswith("_type"):
        problem.given = "nothing"
    return problem


def _join(one: Problem, other: Problem) -> None:
    choices = list(dict.fromkeys([*one.choices, *other.choices]))
    if not choices:
        return
    one.choices, one.legal, one.text = choices, ", ".join(choices), "is not a legal value"
    one.near = one.near or other.near


def _walk(
    loc: tuple[Any, ...], spec: type[BaseModel], data: Any
) -> tuple[list[str], list[type[BaseModel]], Any]:
    """The keys in a pydantic location less the names of union branches, and the specs that hold the last."""
    path: list[str] = []
    models: list[type[BaseModel]] = [spec]
    holders, parent = models, data
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        is_key = (isinstance(data, Mapping) and part in data) or isinstance(part, int)
        if not is_key and not (last and _is_field(part, models)):
            models = [model for model in models if _is_branch(model, part)] or models
            continue
        path.append(str(part))
        holders, parent = models, data
        models = [inner for model in models for inner in _inside(model, part)] or (
            models if isinstance(part, int) else []
        )
        try:
            data = data[part]
        except (LookupError, TypeError):
            data = None
    return path, holders if path else models, parent


def _is_field(part: Any, models: list[type[BaseModel]]) -> bool:
    return any(part in keys_of(model) for model in models)


def _is_branch(model: type[BaseModel], part: Any) -> bool:
    return model.__name__ == part or any(part in get_args(f.annotation) for f in model.model_fields.values())


def _inside(model: type[BaseModel], part: Any) -> Iterator[type[BaseModel]]:
    for name, info in model.model_fields.items():
        if part in (name, info.alias):
            yield from _specs(info.annotation)


def _specs(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from _specs(part)


def _tags(models: list[type[BaseModel]]) -> list[str]:
    """The legal values of the key that tells the branches of a union apart."""
    inner = [
        part for model in models for info in model.model_fields.values() for part in _specs(info.annotation)
    ]
    return list(dict.fromkeys(tag for part in (*models, *inner) for tag in _choices("task", [part])))


def _choices(key: str, models: list[type[BaseModel]]) -> Iterator[str]:
    for model in models:
        info = model.model_fields.get(key)
        if info is not None and get_origin(info.annotation) is Literal:
            yield from (str(value) for value in get_args(info.annotation))


def _expected(text: str) -> list[str]:
    """The names in pydantic's `'a', 'b' or 'c'`."""
    return [part.strip().strip("'") for part in text.replace(" or ", ", ").split(",") if part.strip()]


def _needed(parent: Any, models: list[type[BaseModel]]) -> str | None:
    needed = [name for model in models for name, info in model.model_fields.items() if info.is_required()]
    return f"needs {', '.join(needed)}" if isinstance(parent, Mapping) and len(needed) > 1 else None
