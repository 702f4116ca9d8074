"""A value arrives equal and of the same type, or is refused with the path of the culprit."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import inspect
import json
import math
import sys
import uuid
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.errors import NotSerializable, OnwardError, PayloadTooLarge
from onward.text import safe_repr
from tests.pure.payloads import (
    Address,
    Colour,
    Discounted,
    Item,
    Level,
    Login,
    Number,
    Options,
    Picky,
    Point,
    Size,
    StrictUser,
    Text,
    User,
    anything,
    arrival,
    exact,
    plain,
    refusal,
    refused,
    returning,
    taking,
)

BERLIN = ZoneInfo("Europe/Berlin")
KATHMANDU = ZoneInfo("Asia/Kathmandu")


# ---------------------------------------------------------------------------- what survives


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (None, None),
        (True, bool),
        (0, int),
        (2**63, int),
        (-(2**64) - 1, int),
        (10**4000, int),
        (1.5, float),
        (5e-324, float),
        (1e308, float),
        ("a\x00b", str),
        ("\U0001f600 \u2028", str),
        (b"\x00\xff", bytes),
        (bytearray(b"a"), bytearray),
        ({1, 2}, set[int]),
        (frozenset({"a"}), frozenset[str]),
        ((1, "a"), tuple[int, str]),
        ((1, 2, 3), tuple[int, ...]),
        ([(1, 2)], list[tuple[int, int]]),
        (dt.date(2024, 2, 29), dt.date),
        (dt.datetime(2024, 1, 1, 12, 0, 0, 1), dt.datetime),  # noqa: DTZ001 - naive is meant
        (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime),
        (dt.time(12, 30), dt.time),
        (dt.timedelta(days=-3, microseconds=7), dt.timedelta),
        (dt.timedelta.max, dt.timedelta),
        (Decimal("1.10"), Decimal),
        (Decimal("-0"), Decimal),
        (uuid.UUID(int=7), uuid.UUID),
        (Colour.RED, Colour),
        (Size.SMALL, Size),
        (Level.HIGH, Level),
        (Item(1.5, ["a"]), Item),
        ([Discounted(1.0, [], 3)], list[Discounted]),
        (Address("Elm", dt.date(2024, 1, 1)), Address),
        (User(id=1, born=dt.date(2000, 1, 1)), User),
        ([User(id=1)], list[User]),
        (User(id=1), User | None),
        (StrictUser(born=dt.date(2000, 1, 1)), StrictUser),
        ({"dry": True}, Options),
        (Point(1, 2.0), Point),
        ("a", Literal["a", "b"]),
        (None, int | None),
        ([1, "a", None], list[int | str | None]),
        ({1: "a", 2: "b"}, dict[int, str]),
        ({dt.date(2024, 1, 1): 1}, dict[dt.date, int]),
        ({"a": {1: (Decimal("1.0"),)}}, dict[str, dict[int, tuple[Decimal, ...]]]),
        ([1], Sequence[int]),
        ({"a": 1}, Mapping[str, int]),
        ({"a": [1, 2.5, None, "x", {"b": []}]}, Any),
    ],
    ids=lambda value: safe_repr(value, 40),
)
def test_what_the_annotation_can_express_arrives_equal_and_of_the_same_type(
    value: object, annotation: Any
) -> None:
    received = arrival(taking(annotation), value)
    assert received == value
    assert type(received) is type(value)


@pytest.mark.parametrize(
    "value",
    [None, True, 0, 2**64, -1.5, "", "a\x00b", [], {}, [1, [2.0, {"a\x00": None}]]],
    ids=repr,
)
def test_plain_json_needs_no_annotation(value: object) -> None:
    received = arrival(taking(), value)
    assert received == value
    assert type(received) is type(value)


def test_an_object_of_attrs_survives_where_declared() -> None:
    attrs = pytest.importorskip("attrs")

    kind: Any = attrs.make_class("Parcel", {"grams": attrs.field(type=int), "to": attrs.field()})
    value = kind(5, ["me"])
    assert arrival(taking(kind), value) == value
    assert arrival(taking(list[kind]), [value]) == [value]
    assert "`x.to[0]` is a set" in refused(kind(5, [{1}]), kind)
    assert "annotate the place with " in refused(value)


def test_minus_zero_keeps_its_sign() -> None:
    assert math.copysign(1, arrival(taking(), -0.0)) == -1
    assert math.copysign(1, arrival(taking(float), -0.0)) == -1


def test_a_decimal_that_is_not_a_number_survives_where_declared() -> None:
    assert arrival(taking(Decimal), Decimal("NaN")).is_nan()
    assert arrival(taking(Decimal), Decimal("sNaN")).is_snan()
    assert arrival(taking(Decimal), Decimal("-Infinity")) == Decimal("-Infinity")


@pytest.mark.parametrize(
    "moment",
    [
        dt.datetime(2024, 7, 1, 12, tzinfo=KATHMANDU),
        dt.datetime(2024, 10, 27, 2, 30, fold=0, tzinfo=BERLIN),
        dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
        dt.datetime(2024, 7, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45))),
    ],
    ids=str,
)
def test_an_aware_datetime_keeps_its_instant_and_its_offset(moment: dt.datetime) -> None:
    received = arrival(taking(dt.datetime), moment)
    assert received.utcoffset() == moment.utcoffset()
    assert received.replace(tzinfo=None) == moment.replace(tzinfo=None, fold=0)


@pytest.mark.parametrize(
    ("moment", "annotation"),
    [
        (dt.datetime(1800, 1, 1, tzinfo=BERLIN), dt.datetime),  # An offset of 53 min 28 s.
        (dt.datetime(2024, 10, 27, 2, 30, fold=1), dt.datetime),  # noqa: DTZ001 - naive is meant
        (dt.time(12, tzinfo=BERLIN), dt.time),
    ],
    ids=str,
)
def test_a_time_whose_meaning_would_change_is_refused(moment: object, annotation: Any) -> None:
    assert "`x` is datetime." in refused(moment, annotation)


def test_an_exact_int_becomes_the_declared_float_and_an_inexact_one_is_refused() -> None:
    received = arrival(taking(list[float]), [1])
    assert received == [1.0]
    assert type(received[0]) is float
    assert "`x[0]` is an int and would arrive as a float" in refused([2**53 + 1], list[float])


def test_a_serializer_that_fails_is_blamed_on_its_own_argument() -> None:
    """All parts can be written; what the class makes of them cannot."""

    class Order(pydantic.BaseModel):
        number: int

        @pydantic.field_serializer("number")
        def write(self, number: int) -> int:
            raise LookupError("no form")

    said = refused(Order(number=1), Order)
    assert "`x` is" in said
    assert "no form" in said
    assert "`x[0]` is" in refused([Order(number=1)], list[Order])


def test_ten_megabytes_arrive() -> None:
    value = "x" * 10_000_000
    assert arrival(taking(str), value) == value


def test_the_text_holds_no_raw_nul_and_is_valid_utf8() -> None:
    text = taking().encode_arguments(({"a\x00": "\x00é"},), {})
    assert "\x00" not in text
    assert json.loads(text.encode()) == {"x": {"a\x00": "\x00é"}}


@given(plain)
@settings(deadline=None)
def test_any_json_like_value_arrives_exactly(value: object) -> None:
    for signature in (taking(), taking(Any)):
        assert exact(arrival(signature, value)) == exact(value)
    assert exact(returning().decode_result(returning().encode_result(value))) == exact(value)


@given(anything)
@settings(deadline=None)
def test_anything_else_arrives_exactly_or_is_refused(value: object) -> None:
    try:
        received = arrival(taking(), value)
    except OnwardError:
        return
    assert exact(received) == exact(value)


@given(st.sets(st.integers() | st.text()), st.lists(st.binary()), st.uuids(), st.decimals())
@settings(deadline=None)
def test_annotated_values_arrive_exactly_or_are_refused(
    many: set[int | str], raw: list[bytes], key: uuid.UUID, amount: Decimal
) -> None:
    for annotation, value in (
        (set[int | str], many),
        (list[bytes], raw),
        (uuid.UUID, key),
        (Decimal, amount),
    ):
        try:
            received = arrival(taking(annotation), value)
        except NotSerializable:
            continue
        assert repr(received) == repr(value) or received == value
        assert type(received) is type(value)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308 * 10], ids=repr)
@pytest.mark.parametrize("annotation", [Any, float | None, float], ids=str)
def test_a_float_that_json_lacks_is_refused(number: float, annotation: Any) -> None:
    assert f"argument `x` is {number!r}, and JSON has no such number" in refused(number, annotation)


def test_a_float_that_json_lacks_is_found_inside() -> None:
    assert "argument `x[1].price` is nan" in refused([Item(1.0), Item(math.nan)], list[Item])
    assert "argument `x['a'][0]` is inf" in refused({"a": [math.inf]}, dict[str, list[float]])
    assert "argument `x['a'][0]` is inf" in refused({"a": [math.inf]})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"a", "annotate the place with `bytes`"),
        (bytearray(b"a"), "annotate the place with `bytearray`"),
        ({1}, "annotate the place, for example `set[int]`"),
        (frozenset({1}), "annotate the place, for example `frozenset[int]`"),
        ((1,), "annotate the place, for example `tuple[int, ...]`"),
        (dt.date(2024, 1, 1), "annotate the place with `datetime.date`"),
        (Decimal(1), "annotate the place with `decimal.Decimal`"),
        (uuid.UUID(int=1), "annotate the place with `uuid.UUID`"),
        (Colour.RED, "annotate the place with `"),
        (Size.SMALL, "Size`"),
        (Item(1.0), "Item`"),
        (Address("Elm"), "Address`"),
        (User(id=1), "User`"),
        (Point(1, 2.0), "Point`"),
        (Text("a"), "pass the plain `str`"),
        (Number(1), "pass the plain `int`"),
        (collections.OrderedDict(a=1), "pass the plain `dict`"),
        (collections.defaultdict(int), "pass the plain `dict`"),
        (Picky(), "pass plain data, such as an id"),
        (print, "pass plain data"),
        (msgspec.UNSET, "pass plain data"),
    ],
    ids=lambda value: safe_repr(value, 30),
)
def test_what_json_would_bend_without_an_annotation_is_refused_with_a_way_out(
    value: object, said: str
) -> None:
    assert said in refused(value)
    message = refused({"a": [value]})
    assert "`x['a'][0]`" in message
    assert said in message


@pytest.mark.parametrize(
    ("value", "annotation", "said"),
    [
        ({"price": 1.0, "tags": []}, Item, "pass a tests.pure.payloads.Item"),
        ({"street": "Elm", "since": None}, Address, "pass a tests.pure.payloads.Address"),
        (Discounted(1.0), Item, "pass a tests.pure.payloads.Item"),
        ([1], set[int], "pass a set"),
        ([1], tuple[int, ...], "pass a tuple"),
        (str(uuid.UUID(int=1)), uuid.UUID, "pass a uuid.UUID"),
        ("2024-01-01T00:00:00Z", dt.datetime, "pass a datetime.datetime"),
        (1, Colour, "pass a tests.pure.payloads.Colour"),
        ("small", Size, "pass a tests.pure.payloads.Size"),
        ("YQ==", bytes, "pass bytes"),
        ({str(uuid.UUID(int=1)): 1}, dict[uuid.UUID, int], "pass a uuid.UUID"),
    ],
    ids=lambda value: safe_repr(value, 30),
)
def test_where_something_is_declared_the_advice_is_to_pass_that(
    value: object, annotation: Any, said: str
) -> None:
    message = refused([value], list[annotation])
    assert f"fix: {said}" in message
    assert "annotate" not in message


def test_a_subclass_does_not_arrive_as_its_base() -> None:
    assert "Discounted and would arrive as a" in refused(Discounted(1.0), Item)
    assert "`x`" in refused(Number(1), int)
    assert "`x`" in refused(Text("a"), str)
    assert "`x` is a" in refused(Size.SMALL, str)
    assert "`x`" in refused({Size.SMALL}, set[str])  # Equal to "small", and so easily missed.
    assert "`x` is a uuid.UUID and would arrive as a str" in refused(uuid.UUID(int=1), str)


def test_a_numpy_scalar_is_told_apart_even_when_it_is_a_float() -> None:
    float64 = type("float64", (float,), {"__module__": "numpy"})
    message = refused([float64(1.5)], list[float])
    assert "`x[0]` is a numpy.float64" in message
    assert "`.item()` of a scalar" in message


@pytest.mark.parametrize("key", [1, 1.5, None, True, (1, 2), dt.date(2024, 1, 1), Size.SMALL])
def test_a_key_that_is_no_string_is_refused_unless_declared(key: object) -> None:
    message = refused({"a": {key: 1}})
    assert "`x['a'][" in message
    assert "has a key that is " in message


def test_keys_never_merge() -> None:
    assert "`x[1]`" in refused({1: "a", "1": "b"})
    assert "`x['1']` would be lost" in refused({1: "a", "1": "b"}, dict[int, str])


def test_an_entry_that_the_type_does_not_declare_is_not_lost() -> None:
    assert "`x['wet']` would be lost" in refused({"dry": True, "wet": 1}, Options)


def test_a_lone_surrogate_is_refused_in_values_and_keys() -> None:
    assert "`x['a'][0]` is a text with a lone surrogate" in refused({"a": ["x\ud800"]})
    assert "`x[0]['\\ud800']` has a key that is a text with a lone" in refused([{"\ud800": 1}])
    assert "`x`" in refused("\ud800", str)


def test_an_int_beyond_what_python_reads_is_refused() -> None:
    assert "`x[0]` is <int of " in refused([10**5000])


def test_a_secret_model_field_does_not_arrive_masked() -> None:
    message = refused(Login(password=pydantic.SecretStr("hunter2")), Login)
    assert "`x.password` would not arrive as it is" in message


class Tags(pydantic.BaseModel):
    """A model that tidies up what it is given, but not what is set later."""

    row: list[str] = []
    all: set[str] = set()

    @pydantic.field_validator("row")
    @classmethod
    def each_once(cls, row: list[str]) -> list[str]:
        return list(dict.fromkeys(row))

    @pydantic.field_validator("all")
    @classmethod
    def in_lower_case(cls, all: set[str]) -> set[str]:
        return {tag.lower() for tag in all}


@pytest.mark.parametrize("field", ["row", "all"])
def test_a_model_that_drops_items_when_it_is_read_does_not_lose_them_silently(field: str) -> None:
    tags = Tags()
    setattr(tags, field, ["a", "b", "a"] if field == "row" else {"a", "A"})
    message = refused(tags, Tags)
    assert f"`x.{field}` is " in message
    assert "would arrive as" in message


@dataclasses.dataclass(frozen=True, eq=False)
class Moody:
    number: int

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise LookupError("not today")


def test_a_value_that_cannot_be_compared_is_refused_with_its_own_error() -> None:
    """Whoever enqueues it gets an error of ours, which names the place."""
    message = refused({Moody(1)}, set[Moody])
    assert "`x` is a set and cannot be written and read again: LookupError: not today" in message


# ---------------------------------------------------------------------------- bounds


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_nesting_is_bounded_at_128_levels() -> None:
    assert arrival(taking(), nested(128)) == nested(128)
    for levels in (129, 500, 100_000):
        message = refused(nested(levels), kind=PayloadTooLarge)
        assert "nests deeper than 128 levels" in message
        assert len(message) < 300
    assert "nests deeper" in refused({"a": nested(128)}, kind=PayloadTooLarge)


class Node(msgspec.Struct):
    next: Node | None = None


def test_mappings_and_objects_are_bounded_as_lists_are() -> None:
    """Whatever is written could be read again by a worker that is deep in its own stack."""
    mapping: dict[str, Any] = {}
    node = Node()
    for _ in range(127):
        mapping, node = {"a": mapping}, Node(node)
    assert arrival(taking(), mapping) == mapping
    assert arrival(taking(Node), node) == node
    assert "nests deeper than 128" in refused({"a": mapping}, kind=PayloadTooLarge)
    assert "nests deeper than 128" in refused(Node(node), Node, PayloadTooLarge)


def test_a_result_may_be_as_deep_as_an_argument() -> None:
    deep = {"a": nested(127)}
    assert returning().decode_result(returning().encode_result(deep)) == deep
    refusal(lambda: returning().encode_result({"a": nested(128)}), PayloadTooLarge)


def test_what_contains_itself_is_refused() -> None:
    many: list[Any] = [1]
    many.append({"again": many})
    assert "`x[1]['again']` contains itself" in refused(many, kind=PayloadTooLarge)


def test_a_shared_value_is_not_mistaken_for_one_that_contains_itself() -> None:
    shared = [1]
    assert arrival(taking(), [shared, shared]) == [[1], [1]]
    assert "`x[2]`" in refused([shared, shared, {2}])


@pytest.mark.parametrize("room", [90, 200], ids=["while writing", "while comparing"])
def test_a_call_deep_in_the_stack_still_gets_an_onward_error(room: int) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + room)
    try:
        with pytest.raises(PayloadTooLarge, match="deeper than the stack that is left"):
            taking().encode_arguments((nested(120),), {})
    finally:
        sys.setrecursionlimit(limit)
