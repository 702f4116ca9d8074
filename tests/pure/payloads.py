"""Values that somebody may pass to a task, tasks that take or return them, and what comes of it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import strategies as st

from onward.codec import Signature
from onward.errors import NotSerializable, OnwardError


class Colour(enum.Enum):
    RED = 1


class Size(enum.StrEnum):
    SMALL = "small"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Item:
    price: float
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Discounted(Item):
    percent: int = 0


class Address(msgspec.Struct):
    street: str
    since: dt.date | None = None


class User(pydantic.BaseModel):
    id: int
    born: dt.date | None = None


class StrictUser(pydantic.BaseModel, strict=True):
    born: dt.date


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


class Options(TypedDict, total=False):
    dry: bool


class Point(NamedTuple):
    x: int
    y: float


class Picky:
    """Stands for a class that JSON knows nothing of: a session, a row, a lock."""


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Hostile:
    """Fights back on every occasion."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise SystemExit

    def __eq__(self, other: object) -> bool:
        raise SystemExit

    @property
    def __class__(self) -> Any:
        raise SystemExit

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise SystemExit(name)


def hostile_class() -> type:
    """Not made at import: pytest itself looks at every name of a module."""
    return HostileMeta("HostileClass", (), {"__module__": __name__})


# ---------------------------------------------------------------------------- values by chance


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=30,
)


anything = st.recursive(
    plain
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.sampled_from([Size.SMALL, Colour.RED, Text("a"), Number(1), Item(1.0), ...]),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.dictionaries(st.text() | st.integers() | st.none() | st.booleans(), inner)
    ),
    max_leaves=10,
)


def exact(value: object) -> object:
    """A form that tells 1 from 1.0 and True, 0.0 from -0.0, and one order from another."""
    if isinstance(value, list):
        return [exact(item) for item in value]
    if isinstance(value, dict):
        return [(key, exact(item)) for key, item in value.items()]
    return type(value), repr(value)


# ---------------------------------------------------------------------------- what comes of a call


def taking(annotation: Any = inspect.Parameter.empty) -> Signature:
    """A task of one parameter `x` with this annotation."""

    def task(x: Any) -> Any: ...

    plain = annotation is inspect.Parameter.empty
    task.__annotations__ = {} if plain else {"x": annotation}
    return Signature.of(task, "shop.task")


def returning(annotation: Any = inspect.Parameter.empty) -> Signature:
    def task() -> Any: ...

    plain = annotation is inspect.Parameter.empty
    task.__annotations__ = {} if plain else {"return": annotation}
    return Signature.of(task, "shop.task")


def arrival(signature: Signature, value: object) -> Any:
    """What the worker gets for `x`."""
    args, kwargs = signature.decode_arguments(signature.encode_arguments((value,), {}))
    assert args == ()
    return kwargs["x"]


def refusal(call: Callable[[], object], kind: type[OnwardError] = NotSerializable) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert caught.value.what
    assert caught.value.why
    assert caught.value.fix
    return str(caught.value)


def refused(
    value: object, annotation: Any = inspect.Parameter.empty, kind: Any = NotSerializable
) -> str:
    return refusal(lambda: taking(annotation).encode_arguments((value,), {}), kind)
