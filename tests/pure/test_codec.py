"""Calls and results become JSON text and come back in their places, whatever the signature."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import gc
import inspect
import json
import math
import random
import uuid
import warnings
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Unpack

import pytest

from onward import codec, faithful, foreign, misfit, text
from onward.codec import Signature
from onward.errors import (
    InvalidArguments,
    InvalidOption,
    NotSerializable,
    PayloadTooLarge,
    PayloadUnreadable,
)
from onward.text import safe_repr
from tests.pure.payloads import (
    Item,
    Options,
    Picky,
    Point,
    arrival,
    refusal,
    refused,
    returning,
    taking,
)

if TYPE_CHECKING:
    from tests.support import Missing  # type: ignore[attr-defined]  # There is no such thing.


# ---------------------------------------------------------------------------- binding


def every_kind(a: int, /, b: int, *rest: int, c: int = 3, **options: int) -> None: ...


def send(user_id: int, subject: str = "hello", *, urgent: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "stored"),
    [
        ((1, 2), {}, {"a": 1, "b": 2}),
        ((1,), {"b": 2, "c": 4}, {"a": 1, "b": 2, "c": 4}),
        ((1, 2, 3, 4), {"d": 5}, {"a": 1, "b": 2, "rest": [3, 4], "options": {"d": 5}}),
        ((1, 2), {"a": 9, "rest": 8}, {"a": 1, "b": 2, "options": {"a": 9, "rest": 8}}),
    ],
)
def test_every_kind_of_parameter_comes_back_in_its_place(
    args: tuple[int, ...], kwargs: dict[str, int], stored: object
) -> None:
    signature = Signature.of(every_kind, "shop.task")
    text = signature.encode_arguments(args, kwargs)
    assert json.loads(text) == stored
    bound = inspect.signature(every_kind).bind(*args, **kwargs)
    got_args, got_kwargs = signature.decode_arguments(text)
    assert inspect.signature(every_kind).bind(*got_args, **got_kwargs) == bound


def test_a_default_between_positional_arguments_may_be_left_out() -> None:
    def task(a: int, /, b: int = 2, c: int = 3) -> None: ...

    signature = Signature.of(task, "shop.task")
    text = signature.encode_arguments((1,), {"c": 5})
    assert signature.decode_arguments(text) == ((1,), {"c": 5})


def test_defaults_are_not_stored() -> None:
    assert Signature.of(send, "shop.send").encode_arguments((5,), {}) == '{"user_id":5}'


def test_the_same_call_is_the_same_text_however_it_is_spelt() -> None:
    signature = Signature.of(send, "shop.send")
    texts = {
        signature.encode_arguments((5, "hi"), {"urgent": True}),
        signature.encode_arguments((), {"urgent": True, "subject": "hi", "user_id": 5}),
    }
    assert texts == {'{"user_id":5,"subject":"hi","urgent":true}'}


@pytest.mark.parametrize("name", ["self", "cls", "name", "__class__", "p0", "p1", "msgspec"])
def test_a_parameter_may_have_any_name(name: str) -> None:
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)

    def task(**kwargs: Any) -> None: ...

    task.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    signature = Signature.of(task, "shop.task")
    assert signature.decode_arguments(signature.encode_arguments((), {name: 1})) == ((), {name: 1})


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'user_id'"),
        (tuple(range(20)), {}, "too many positional arguments; given: 20 positional"),
        ((1,), {"user_id": 2}, "multiple values for argument 'user_id'"),
        ((1,), {"sbject": "x"}, "got an unexpected keyword argument 'sbject'"),
        ((1, "a", True), {}, "too many positional arguments"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_naming_both_sides(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    signature = Signature.of(send, "shop.send")
    message = refusal(lambda: signature.encode_arguments(args, kwargs), InvalidArguments)
    assert said in message
    assert "shop.send(user_id: int, subject: str = …, *, urgent: bool = …)" in message
    with pytest.raises(TypeError):
        signature.encode_arguments(args, kwargs)


async def never_awaited() -> None: ...


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: [{"a": (c,)}]], ids=["bare", "nested"])
@pytest.mark.parametrize("extra", [0, 5], ids=["fits", "does not fit"])
def test_a_refused_coroutine_is_closed(wrap: Callable[[Any], Any], extra: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coroutine = never_awaited()
        with pytest.raises((NotSerializable, InvalidArguments)):
            taking().encode_arguments((wrap(coroutine), *range(extra)), {})
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
        del coroutine
        gc.collect()


def test_a_coroutine_is_refused_with_a_way_out() -> None:
    assert "await it first" in refused(never_awaited())
    assert "await it first" in refusal(lambda: returning().encode_result(never_awaited()))


def test_unpacked_keyword_arguments_are_typed() -> None:
    def task(**options: Unpack[Options]) -> None: ...

    signature = Signature.of(task, "shop.task")
    text = signature.encode_arguments((), {"dry": True})
    assert signature.decode_arguments(text) == ((), {"dry": True})
    with pytest.raises(InvalidArguments, match=r"options\.dry"):
        signature.encode_arguments((), {"dry": "yes"})


# ---------------------------------------------------------------------------- annotations


def early(x: Later) -> None: ...


early_signature = Signature.of(early, "shop.early")


@dataclasses.dataclass
class Later:
    day: dt.date


def test_a_name_defined_further_down_is_found_at_the_first_use() -> None:
    value = Later(dt.date(2024, 1, 1))
    assert arrival(early_signature, value) == value


def test_a_name_that_never_exists_is_named_at_the_first_use() -> None:
    def task(x: int, y: list[Missing]) -> None: ...

    signature = Signature.of(task, "shop.task")
    message = refusal(lambda: signature.encode_arguments((1, []), {}), InvalidOption)
    assert "`y: list[Missing]`" in message
    assert "name 'Missing' is not defined" in message


def test_a_hopeless_annotation_is_refused_when_the_task_is_declared() -> None:
    def task(x: Any) -> None: ...

    task.__annotations__ = {"x": "list["}
    assert "shop.task" in refusal(lambda: Signature.of(task, "shop.task"), InvalidOption)


def test_an_annotation_that_json_cannot_express_takes_plain_values_only() -> None:
    signature = taking(str | uuid.UUID)
    assert arrival(signature, "a") == "a"
    message = refused(uuid.UUID(int=1), str | uuid.UUID)
    assert "its annotation `str | uuid.UUID` cannot be used to read JSON" in message


def test_a_parameter_for_an_injected_object_may_be_declared_and_left_out() -> None:
    def task(x: int, session: Picky | None = None, call: Callable[[], int] = int) -> None: ...

    signature = Signature.of(task, "shop.task")
    assert signature.decode_arguments(signature.encode_arguments((1,), {})) == ((), {"x": 1})
    assert "`session` is a" in refusal(lambda: signature.encode_arguments((1, Picky()), {}))


def test_a_callable_object_is_a_task_too() -> None:
    class Task:
        def __call__(self, day: dt.date) -> None: ...

    signature = Signature.of(Task(), "shop.task")
    day = dt.date(2024, 1, 1)
    assert signature.decode_arguments(signature.encode_arguments((day,), {}))[1] == {"day": day}


def test_a_partial_is_a_task_of_what_is_left_to_give() -> None:
    """Its annotations are those of the function, or of the object, inside."""

    def pay(shop: str, day: dt.date, cents: int) -> None: ...

    class Pay:
        def __call__(self, day: dt.date, cents: int) -> None: ...

    day = dt.date(2024, 1, 1)
    inner: list[Callable[..., object]] = [functools.partial(pay, "here"), Pay()]
    for function in inner:
        signature = Signature.of(functools.partial(function, cents=3), "shop.task")
        text = signature.encode_arguments((day,), {})
        assert signature.decode_arguments(text)[1] == {"day": day}
        refusal(lambda s=signature: s.encode_arguments((5,), {}), InvalidArguments)


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("nonsense", "malformed"),
        ('{"user_id": NaN}', "malformed"),
        ("[]", "expected `object`, got `array`"),
        ("{}", "argument `user_id`: missing"),
        ('{"user_id": 1, "old": 2}', "argument `old`: no such parameter"),
        ('{"user_id": "5"}', "argument `user_id`: expected `int`, got `str`"),
        ('{"user_id": 1, "subject": "\\ud800"}', "truncated"),
        ('{"user_id": ' + "[" * 100_000 + "]" * 100_000 + "}", "expected `int`, got `array`"),
    ],
    ids=range(10),
)
def test_stored_arguments_that_do_not_fit_are_unreadable_by_name(text: str, said: str) -> None:
    signature = Signature.of(send, "shop.send")
    message = refusal(lambda: signature.decode_arguments(text), PayloadUnreadable)
    assert said in message
    assert "shop.send" in message


def test_a_bottomless_text_is_unreadable_and_not_a_recursion_error() -> None:
    text = '{"x": ' + "[" * 100_000
    assert "recursion" in refusal(lambda: taking().decode_arguments(text), PayloadUnreadable)
    assert "recursion" in refusal(lambda: returning().decode_result("[" * 9999), PayloadUnreadable)


def test_an_error_of_the_users_own_type_is_unreadable_and_kept_as_the_cause() -> None:
    @dataclasses.dataclass
    class Even:
        number: int

        def __post_init__(self) -> None:
            if self.number % 2:
                raise LookupError("odd")

    signature = taking(Even)
    with pytest.raises(PayloadUnreadable, match="LookupError: odd") as caught:
        signature.decode_arguments('{"x": {"number": 1}}')
    assert type(caught.value.__cause__) is LookupError


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": 2, "options": {"b": 3}}',
        '{"a": 1, "b": 2, "options": {"c": 3}}',
        '{"b": 2, "rest": [1]}',
    ],
)
def test_stored_arguments_that_would_collide_in_the_call_are_unreadable(text: str) -> None:
    refusal(lambda: Signature.of(every_kind, "t").decode_arguments(text), PayloadUnreadable)


def test_a_positional_gap_is_unreadable() -> None:
    def task(a: int = 1, b: int = 2, /) -> None: ...

    signature = Signature.of(task, "t")
    assert signature.decode_arguments('{"a": 5}') == ((5,), {})
    assert "`a` is missing" in refusal(
        lambda: signature.decode_arguments('{"b": 5}'), PayloadUnreadable
    )


def test_every_attempt_gets_objects_of_its_own() -> None:
    signature = taking(list[dict[str, int]])
    text = signature.encode_arguments(([{"a": 1}],), {})
    first = signature.decode_arguments(text)[1]["x"]
    first[0]["a"] = 2
    first.append({})
    assert signature.decode_arguments(text)[1]["x"] == [{"a": 1}]


# ---------------------------------------------------------------------------- results


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 1.5], ids=repr)
def test_empty_results_are_results(value: object) -> None:
    signature = returning()
    received = signature.decode_result(signature.encode_result(value))
    assert received == value
    assert type(received) is type(value)
    assert signature.encode_result(None) == "null"


def test_a_result_comes_back_as_the_declared_type() -> None:
    async def task() -> list[Item]: ...  # type: ignore[empty-body]

    signature = Signature.of(task, "shop.task")
    value = [Item(1.0)]
    assert signature.decode_result(signature.encode_result(value)) == value
    day = dt.date(2024, 1, 1)
    for signature in (returning(dt.date), returning(Awaitable[dt.date])):
        assert signature.decode_result(signature.encode_result(day)) == day


def test_a_tuple_in_a_result_is_kept_where_declared_and_a_list_elsewhere() -> None:
    for annotation in (Any, inspect.Parameter.empty):
        signature = returning(annotation)
        assert signature.decode_result(signature.encode_result((1, ({"a": (2,)},)))) == [
            1,
            [{"a": [2]}],
        ]
    signature = returning(tuple[int, ...])
    assert signature.decode_result(signature.encode_result((1, 2))) == (1, 2)
    assert "`result`" in refusal(lambda: returning().encode_result(Point(1, 2.0)))


def test_a_result_that_contradicts_its_annotation_is_refused() -> None:
    message = refusal(lambda: returning(str).encode_result(5))
    assert "the value does not fit the declared `-> str`: expected `str`, got `int`" in message
    message = refusal(lambda: returning(list[dict[str, int]]).encode_result([{"a": "x"}]))
    assert "`result[0]['a']` does not fit the declared `-> list[dict[str, int]]`" in message
    refusal(lambda: returning(None).encode_result(5))


@pytest.mark.parametrize("value", [{1}, b"a", math.nan, Picky(), "\ud800", {1: 2}], ids=safe_repr)
def test_a_result_follows_the_rule_of_arguments(value: object) -> None:
    message = refusal(lambda: returning().encode_result({"a": [value]}))
    assert "cannot store the result of shop.task" in message
    assert "`result['a'][0]" in message


def test_a_stored_result_that_does_not_fit_is_unreadable() -> None:
    message = refusal(lambda: returning(list[int]).decode_result('[1,"x"]'), PayloadUnreadable)
    assert "stored result does not fit shop.task" in message
    assert "`result[1]`: expected `int`, got `str`" in message


# ---------------------------------------------------------------------------- size


def test_size_is_bounded_and_the_largest_argument_named() -> None:
    def task(a: Any, b: Any) -> None: ...

    signature = Signature.of(task, "shop.task")
    message = refusal(
        lambda: signature.encode_arguments((1, "x" * codec.MAX_BYTES), {}), PayloadTooLarge
    )
    assert "argument `b` is the largest" in message
    assert "16,777,230 bytes of JSON; at most 16,777,216" in message
    assert len(message) < 500
    message = refusal(lambda: returning().encode_result("x" * codec.MAX_BYTES), PayloadTooLarge)
    assert "cannot store the result of shop.task" in message


# ---------------------------------------------------------------------------- hygiene


def test_nothing_is_executed_or_imported_from_data() -> None:
    for module in (codec, faithful, foreign, misfit, text):
        source = inspect.getsource(module)
        for word in ("import pickle", "pickle.", "eval(", "exec(", "import pydantic", "__import__"):
            assert word not in source


def test_random_bytes_never_raise_anything_else() -> None:
    chance = random.Random(7)
    signature = taking(dict[str, list[Item | None]])
    text = signature.encode_arguments(({"a": [Item(1.0, ["x"]), None]},), {})
    for _ in range(3000):
        place = chance.randrange(len(text))
        spoilt = text[:place] + chr(chance.randrange(1, 128)) + text[place + 1 :]
        try:
            signature.decode_arguments(spoilt)
        except PayloadUnreadable:
            continue
