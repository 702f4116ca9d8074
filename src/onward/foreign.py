"""Foreign: the objects that JSON knows nothing of, how they are written, read and taken apart.

msgspec itself writes and reads dataclasses, Structs, enums, dates and their like; a pydantic model
goes through its own methods, as JSON, so that its own rules hold. pydantic is never imported here:
who passes a model has done so. What a class says about itself is read past its metaclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from onward.text import kind_of, mro_of, type_name

# ---------------------------------------------------------------------------- writing and reading


def _write_foreign(value: Any) -> object:
    if is_pydantic(kind_of(value)):
        return msgspec.Raw(value.model_dump_json(by_alias=True, round_trip=True).encode())
    raise TypeError(f"a {type_name(kind_of(value))} has no JSON form")


ENCODER = msgspec.json.Encoder(enc_hook=_write_foreign)


def read_foreign(kind: Any, value: Any) -> object:
    """Make a model from plain JSON values; msgspec puts the path to a TypeError or ValueError."""
    if isinstance(kind, type) and is_pydantic(kind):
        return _read_pydantic(kind, value)
    return value  # msgspec checks what comes back against the type, and refuses it.


def _read_pydantic(kind: Any, value: object) -> object:
    try:
        # As JSON, since a strict model takes a date as text from there only.
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        problems: Any = getattr(error, "errors", None)
        if problems is None:
            raise
        # pydantic's own text would quote the value, which may be a secret.
        first = problems()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None


def is_pydantic(kind: type) -> bool:
    """Whether this is a pydantic model; if it is, somebody else has imported pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and pydantic.BaseModel in mro_of(kind)


# ---------------------------------------------------------------------------- named parts


MISSING = object()
"""Stands for a field that an object does not have."""


def fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a dataclass, Struct, NamedTuple, attrs or pydantic object, or None."""
    kind = kind_of(value)
    if is_pydantic(kind):
        return [*value.__dict__.items(), *(value.__pydantic_extra__ or {}).items()]
    names = field_names(cast(Any, kind))
    if names is None:
        return None
    return [(name, getattr(value, name, MISSING)) for name in names]


@functools.lru_cache(maxsize=1024)
def field_names(kind: type) -> tuple[str, ...] | None:
    """The fields that a class declares in one of the known ways, or None."""
    if msgspec.Struct in mro_of(kind):
        return cast("tuple[str, ...]", cast(Any, kind).__struct_fields__)
    if _has(kind, "__dataclass_fields__"):
        return tuple(field.name for field in dataclasses.fields(kind))
    if tuple in mro_of(kind) and _has(kind, "_fields"):
        return cast("tuple[str, ...]", cast(Any, kind)._fields)
    if _has(kind, "__attrs_attrs__"):
        return tuple(field.name for field in cast(Any, kind).__attrs_attrs__)
    return None


def _has(kind: type, attribute: str) -> bool:
    """Whether a class has an attribute; its metaclass is not asked."""
    return any(attribute in type.__dict__["__dict__"].__get__(base) for base in mro_of(kind))


# ---------------------------------------------------------------------------- coroutines


def close_coroutines(values: Iterable[object], depth: int = 3) -> None:
    """Close coroutines that will never be awaited, so that Python does not warn about them too."""
    for value in values:
        kind = type(value)
        if kind is types.CoroutineType:
            with contextlib.suppress(Exception):  # It may be running.
                cast("types.CoroutineType[Any, Any, Any]", value).close()
        elif depth and kind is dict:
            close_coroutines(cast("dict[Any, Any]", value).values(), depth - 1)
        elif depth and kind in (list, tuple):
            close_coroutines(cast("list[Any]", value), depth - 1)
