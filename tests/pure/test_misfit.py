"""Errors about a call that does not fit: where exactly, short, and without secrets."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pytest

from onward.codec import Signature
from onward.errors import InvalidArguments, OnwardError, PayloadUnreadable
from onward.text import safe_repr
from tests.pure.payloads import (
    Hostile,
    Item,
    Picky,
    User,
    hostile_class,
    refusal,
    refused,
    returning,
    taking,
)

# ---------------------------------------------------------------------------- paths


class Old(pydantic.BaseModel):
    """A model that refuses in a way of its own."""

    @classmethod
    def model_validate_json(cls, *_: Any, **__: Any) -> Any:
        raise ValueError("a form from last year")


Dotted = TypedDict("Dotted", {"b.c": dict[str, int]})


class Rude:
    """Is no good in an annotation."""

    def __repr__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("value", "annotation", "said"),
    [
        ("5", int, "argument `x` does not fit its annotation: expected `int`, got `str`"),
        (True, int, "expected `int`, got `bool`"),
        (1.0, int, "expected `int`, got `float`"),
        (None, int, "expected `int`, got `None`"),
        ("5", int | None, "expected `int | None`, got `str`"),
        ([None], list[int], "expected `int`, got `None`"),
        ([[1]], list[int], "expected `int`, got `list`"),
        ({1}, int, "expected `int`, got `set`"),
        (Item(1.0), int, "expected `int`, got `tests.pure.payloads.Item`"),
        ("x", Item, "expected `tests.pure.payloads.Item`, got `str`"),
        (1, set[int], "expected `set[int]`, got `int`"),
        (dt.date(2024, 1, 1), dt.datetime, "expected `datetime`, got `datetime.date`"),
        ([dt.date(2024, 1, 1)], list[dt.datetime], "`x[0]` does not fit its annotation: expected"),
        ("no text", bytes, "expected `bytes`, got `str`"),
        ("soon", dt.timedelta, "expected `timedelta`, got `str`"),
        ("c", Literal["a"], "invalid enum value 'c'"),
        ([1, "a"], list[int], "`x[1]`"),
        ({"a": 1, "b.c": "x"}, dict[str, int], "`x['b.c']`"),
        ([{"k": {"m": [1, "x"]}}], list[dict[str, dict[str, list[int]]]], "`x[0]['k']['m'][1]`"),
        ({"k": {"x": 1}}, dict[str, dict[int, int]], "`x['k']['x']` does not fit its annotation"),
        ({"price": "x"}, Item, "`x.price`"),
        ([{"id": "x"}], list[User], "`x[0]` does not fit its annotation: id: Input should be"),
        (1, Picky, "expected `Picky`, got `int`"),
        (Old(), Old, "argument `x` does not fit its annotation: a form from last year"),
        ({"b.c": {"d": "x"}}, Dotted, "`x.b.c[...]` does not fit its annotation: expected `int`"),
        ("x", Annotated[int, Rude()], "the task expects shop.task(x: …)"),
        (1, Callable[[int], int], "expected `Callable`, got `int`"),
    ],
    ids=lambda value: safe_repr(value, 30),
)
def test_a_value_of_the_wrong_type_is_refused_at_the_call(
    value: object, annotation: Any, said: str
) -> None:
    assert said in refused(value, annotation, InvalidArguments)


def test_the_blamed_entry_of_a_large_dict_is_found() -> None:
    value: dict[str, object] = {f"k{number}": number for number in range(1000)}
    value["k617"] = "x"
    assert "`x['k617']`" in refused(value, dict[str, int], InvalidArguments)


# ---------------------------------------------------------------------------- messages


def login(user: str, password: str, extra: int = 0) -> None: ...


def test_secrets_are_not_shown() -> None:
    signature = Signature.of(login, "shop.login")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("bob", "hunter2", 1, "hunter2"), {}),
        ((), {"user": 1, "password": "hunter2"}),
        (("bob",), {"password": "hunter2", "oops": 1}),
        (("bob", b"hunter2"), {}),
    ]
    for args, kwargs in calls:
        with pytest.raises(OnwardError) as caught:
            signature.encode_arguments(args, kwargs)
        assert "hunter2" not in str(caught.value)
        assert "***" in str(caught.value)


def test_secrets_inside_of_values_are_not_shown() -> None:
    hidden: dict[str, Any] = {"password": "hunter2", "Api-Key": "hunter2", "api_key": "hunter2"}
    del hidden["Api-Key"]
    assert "hunter2" not in refused({**hidden, "x": {1}})
    assert "hunter2" not in refused(hidden, dict[str, Literal["a"]], InvalidArguments)
    assert "hunter2" not in refused({"token": Decimal("1")}, dict[str, int], InvalidArguments)
    naive = dt.datetime(2024, 10, 27, 2, 30, fold=1)  # noqa: DTZ001 - naive is meant
    assert "2024" not in refused({"secret": naive}, dict[str, dt.datetime])
    with pytest.raises(PayloadUnreadable) as caught:
        taking(dict[str, Literal["a"]]).decode_arguments('{"x": {"password": "hunter2"}}')
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("make", [Hostile, lambda: hostile_class()(), hostile_class])
def test_hostile_objects_do_not_break_the_making_of_the_error(make: Callable[[], Any]) -> None:
    value = make()
    assert "`x[0]`" in refused([value])
    assert "`result`" in refusal(lambda: returning().encode_result(value))
    with pytest.raises(InvalidArguments):
        taking().encode_arguments((value, value), {})
    assert safe_repr({"a": [value]}).startswith("{'a': [<")


def test_a_dataclass_whose_fields_fight_back_is_refused() -> None:
    @dataclasses.dataclass
    class Trap:
        number: int

        def __getattribute__(self, name: str) -> Any:
            raise LookupError(name)

    refused(Trap(1), Trap)


def test_a_message_is_short_whatever_the_value() -> None:
    def task(**options: int) -> None: ...

    options = {f"{'k' * 5000}{number}": "x" * 100_000 for number in range(100)}
    message = refusal(
        lambda: Signature.of(task, "t").encode_arguments((), options), InvalidArguments
    )
    assert len(message) < 2000
    message = refusal(
        lambda: Signature.of(login, "t").encode_arguments((), options), InvalidArguments
    )
    assert len(message) < 2000


def test_only_the_first_line_is_needed_to_know_what_happened() -> None:
    first = refused({1}).split("\n")[0]
    assert first == "[OW102] cannot enqueue shop.task(x={1})"
