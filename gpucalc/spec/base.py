"""The base of everything users and catalogues may write: frozen, no unknown keys, no silent conversions.

A value keeps the type it was written with: `"8"` is not a number, `1` is not a boolean, `yes` is
text. What YAML cannot spell differently is let through: a list for a tuple, a name for an
enum, `1e9` for a whole number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import PydanticCustomError, core_schema

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

    from gpucalc.errors import InputError

S = TypeVar("S", bound="Spec")
Name = Annotated[str, Field(max_length=200)]  # what is called by it in a message is still read

_STRICT = {"float", "bool", "str"}


def _no_conversions(schema: Any) -> Any:
    """The same schema with text, numbers and booleans strict; whole numbers may be written 1e9."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        if not isinstance(kind, str):  # a table of fields, whose names may be anything
            return {name: _no_conversions(part) for name, part in schema.items()}
        if kind == "function-before" and schema["function"]["function"] is _whole:
            return schema  # a group inside this one, already treated
        if kind == "int":
            return core_schema.no_info_before_validator_function(_whole, dict(schema))
        walked = {name: _no_conversions(part) for name, part in schema.items() if name != "metadata"}
        if "metadata" in schema:
            walked["metadata"] = schema["metadata"]
        if kind in _STRICT:
            walked.setdefault("strict", True)
        return walked
    if isinstance(schema, list):
        return [_no_conversions(part) for part in schema]
    if isinstance(schema, tuple):
        return tuple(_no_conversions(part) for part in schema)
    return schema


def _whole(value: Any) -> Any:
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


class Spec(BaseModel):
    """A group of keys. Unknown keys are refused, values are never reinterpreted, instances are frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _no_conversions(handler(source))
        return schema

    @classmethod
    def read(cls: type[S], data: Any, *, where: str | None = None, key: str = "") -> S:
        """The spec in parsed data, or one InputError that names every problem.

        `where` is the file the data came from; `key` the dotted path of `data` in it.
        """
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            from gpucalc.errors import InputError

            raise InputError(
                "expected keys and values", where=where, key=key or None, given=data, legal=list(keys_of(cls))
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise as_input_error(error, cls, data, where=where, key=key) from None


def keys_of(spec: type[BaseModel]) -> tuple[str, ...]:
    """The keys a file may use for a spec."""
    return tuple(field.alias or name for name, field in spec.model_fields.items())


def refuse(message: str, *, legal: str | None = None, near: tuple[str, ...] = ()) -> PydanticCustomError:
    """What a validator raises to refuse a value in our words; the value itself is added by the reader."""
    # The message goes in as a value: braces in it must not be read as a template.
    return PydanticCustomError(
        "gpucalc", "{problem}", {"problem": message, "legal": legal, "near": list(near)}
    )


def as_input_error(
    error: ValidationError,
    spec: type[BaseModel],
    data: Any,
    *,
    where: str | None = None,
    key: str = "",
) -> InputError:
    """A validation failure as one line in our format: every problem, the first one as the error's own."""
    from gpucalc.spec.problems import input_error  # error path only

    return input_error(error, spec, data, where=where, key=key)
