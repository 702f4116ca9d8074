"""Nonsense for everything that reads what others wrote, and hostile text for every text column.

In:  a seed.    Out: a report of how often each target was tried, and what came out that must not.
A target makes a case from chances and says what is wrong with what came of it. What a parser may
raise is an error of ours, and nothing else; what is shown to people has no control characters and
no secret; what encodes decodes equal and of the same type.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import random
import re
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, TypedDict, cast

import click
import msgspec

from onward.cli.failures import headline_of_start, read_failure
from onward.cli.options import parse_duration
from onward.cli.places import whole_id
from onward.cli.values import Cut, Moment, Span, drawn, json_text, many_lines, one_line, payload
from onward.cli.values import plain as shown_plain
from onward.cli.worker import parse_queues
from onward.codec import Signature
from onward.config import Settings, check_range, seconds
from onward.errors import InvalidOption, JobNotFound, OnwardError, PayloadUnreadable
from onward.failure import MESSAGE_BYTES, TRACEBACK_BYTES, describe
from onward.ids import parse_id
from onward.job import NewJob
from onward.lifecycle import AttemptState, Event
from onward.names import check_name
from onward.policy import Outcome
from onward.store import store
from onward.store.database import Database
from onward.store.statements import in_schema, numbered_text, psycopg_text, twins
from onward.store.store import FIRST_ID, Registration
from onward.store.url import open_database
from onward.text import clean_text, safe_repr
from onward.worker.body import error_text
from onward.worker.child import Hello, Orders
from onward.worker.isolation import Order
from tests.proof.machine import places
from tests.proof.report import Budget, Report, Technique

# --- mutation -------------------------------------------------------------------------------------

DICTIONARY = (
    *"\x00\x01\x1b\x7f\x85\ud800\udfff\u202e\u2028\u200b\ufeff\xa0ıİßé٣²\U0001f600",
    *"'\"`;:@/\\%?#&=+,.-_~*$<>[]{}()| \t\n\r",
    *[
        "0",
        "1",
        "9",
        "-1",
        "00",
        "1e9",
        "1e999",
        "NaN",
        "Infinity",
        "4294967296",
        "9223372036854775808",
    ],
    "'; DROP TABLE job; --",
    "%s",
    "%(id)s",
    ":name",
    "$1",
    "\\u0000",
    "\\ud800",
    "%00",
    "%70",
    "\x1b[31m",
    "\x1b]0;x\x07",
    "null",
    "true",
    "{}",
    "[]",
    "[" * 300,
    '{"a":' * 200,
    "9" * 400,
    "9" * 5000,
    "x" * 300,
    "password",
    "sqlite:///",
    "postgresql://",
    "..",
)


def pick(chance: random.Random, things: Any) -> Any:
    """One of them; several times quicker than `choice`."""
    return things[int(chance.random() * len(things))]


def mutated(text: str, chance: random.Random) -> str:
    """The text after one to three changes."""
    for _ in range(1 + int(chance.random() * 3)):
        place = int(chance.random() * (len(text) + 1))
        what = chance.random()
        if what < 0.35:
            text = text[:place] + pick(chance, DICTIONARY) + text[place:]
        elif what < 0.6:
            text = text[:place] + text[place + 1 + int(chance.random() * 6) :]
        elif what < 0.75:
            text = text[:place] + chr(int(chance.random() * 0x300)) + text[place + 1 :]
        elif what < 0.85:
            text = text[:place]
        else:
            other = int(chance.random() * (len(text) + 1))
            text = text[:place] + text[other:]
    return text


def storable(text: str) -> str:
    """The text without what no database holds: NUL and lone surrogates."""
    return text.replace("\x00", "0").encode(errors="replace").decode()


def rude(chance: random.Random) -> str:
    """A text that nobody would write."""
    return "".join(pick(chance, DICTIONARY) for _ in range(1 + int(chance.random() * 4)))


# --- targets --------------------------------------------------------------------------------------


class Target(NamedTuple):
    """`make` makes a case; `wrong` tries it and says what is wrong, or nothing; `share` is how
    often, beside the others: the quick ones more often.
    """

    make: Callable[[random.Random], Any]
    wrong: Callable[[Any], str | None]
    share: int = 10


TARGETS: dict[str, Target] = {}
Wrong = Callable[[Any], str | None]


def target(make: Callable[[random.Random], Any], share: int = 10) -> Callable[[Wrong], Wrong]:
    """Registers a function that says what is wrong with a case."""

    def register(wrong: Wrong) -> Wrong:
        TARGETS[wrong.__name__] = Target(make, wrong, share)
        return wrong

    return register


def mutations(*corpus: str) -> Callable[[random.Random], str]:
    """Mutations of these."""
    return lambda chance: mutated(pick(chance, corpus), chance)


def attempt(act: Callable[[], Any], *allowed: type[BaseException]) -> str | None:
    """What it raises, if that is not allowed."""
    try:
        act()
    except allowed:
        return None
    except Exception as error:
        return f"raised {type(error).__name__}: {clean_text(str(error), 200)}"
    return None


def unsafe(text: str, *, lines: bool = False) -> str | None:
    """What a terminal must not be sent."""
    seen = text.replace("\n", "") if lines else text
    return None if seen.isprintable() else f"shows {ascii(text)[:200]}"


@target(
    mutations("0190a1b2-7c3d-7e4f-8a5b-0123456789ab", "0190A1B27C3D7E4F8A5B0123456789AB", "x"),
    share=20,
)
def ids(text: str) -> str | None:
    try:
        found = parse_id(text)
    except InvalidOption as error:
        return unsafe(str(error), lines=True)
    return None if str(uuid.UUID(found)) == found == parse_id(found) else f"gives {found!r}"


@target(mutations("mail", "reports.daily", "shop.tasks.Send more", "été-1"), share=30)
def names(text: str) -> str | None:
    try:
        found = check_name(text, "queue")
    except InvalidOption as error:
        return unsafe(str(error), lines=True)
    sound = found == text == text.strip() and text.isprintable() and not set(text) & set(",*:=")
    return None if sound and 0 < len(text) <= 200 else "is taken for a name"


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 5, 10**9, 10**400, -(10**400), 2**63, True, False, None),
    *(0.0, -0.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 1j),
    *("5", "", b"5", [], {}, object(), Decimal("NaN"), Decimal("sNaN"), Decimal(5)),
    *(dt.timedelta(days=1), dt.timedelta.max, dt.timedelta.min, dt.timedelta(0)),
)


def _number(chance: random.Random) -> Any:
    """A number that somebody may take for seconds: one of the above, or any."""
    if chance.random() < 0.3:
        return pick(chance, NUMBERS)
    size = (chance.random() - 0.3) * 10.0 ** int(chance.random() * 14 - 4)
    return pick(chance, (float, int, str, Decimal, _timedelta))(size)


def _timedelta(size: float) -> dt.timedelta:
    return dt.timedelta(microseconds=size * 1e6)


@target(lambda chance: (_number(chance), pick(chance, SETTINGS)), share=8)
def durations(case: tuple[object, str]) -> str | None:
    value, name = case
    wrong = attempt(lambda: Settings(**{name: cast(Any, value)}), InvalidOption)
    wrong = wrong or attempt(lambda: check_range(name, value, 1, 100), InvalidOption)
    try:
        found = seconds(value, name)
    except InvalidOption:
        return wrong
    return wrong if -4e8 < found < 4e8 else f"gives {found} s"


SETTINGS = Settings.__struct_fields__

SECRET = "Xy7zSecretq"


def _url_with_secret(chance: random.Random) -> str:
    """A server's URL in which the secret stands where a password does, with nonsense around it."""
    before, after, junk = "", "", mutated("", chance)
    if chance.random() < 0.5:
        before, after = mutated("", chance), junk
    secret = storable(f"{before}{SECRET}{after}")
    scheme = pick(chance, ("postgresql", "postgres", "POSTGRES", "postgresql+psycopg", "mysql"))
    host = pick(chance, ("", "host", "host:5432", "[::1]:5432", "a:1,b:2", "host:x", "[", "h%20"))
    place = (
        f"{host}/{pick(chance, ('', 'shop', 'a?x=1', 'a#b', storable(mutated('shop', chance))))}"
    )
    if chance.random() < 0.6:
        return f"{scheme}://user:{secret}@{place}"
    name = pick(chance, ("password", "PASSWORD", "sslpassword", "p%61ssword"))
    return f"{scheme}://user@{place.partition('?')[0]}?{name}={secret}"


@target(_url_with_secret, share=3)
def server_urls(url: str) -> str | None:
    """A URL is read or refused, and neither shows the password."""
    try:
        database = open_database(url)
    except OnwardError as error:
        shown = [str(error), repr(error)]
        while (cause := error.__cause__) is not None:
            shown.append(str(cause))
            error = cast(Any, cause)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    else:
        shown = [database.shown_url]
    return f"shows the password: {shown}" if any(SECRET in text for text in shown) else None


@target(mutations("sqlite:///onward.db", "sqlite:////var/lib/a%20b.db?synchronous=normal"), share=3)
def file_urls(url: str) -> str | None:
    return attempt(lambda: open_database(url), OnwardError)


@target(
    lambda chance: [mutated(pick(chance, QUEUES), chance) for _ in range(pick(chance, (1, 2)))],
    share=20,
)
def queue_options(given: list[str]) -> str | None:
    try:
        found = parse_queues(CONTEXT, OPTION, tuple(given)) or ()
    except (click.BadParameter, OnwardError):
        return None
    for name, limit in found:
        if check_name(name, "queue") != name or not (limit is None or limit >= 1):
            return f"gives {found}"
    return None


QUEUES = ("mail:3", "mail", "mail:3,reports", "reports.daily:12, mail")
OPTION = click.Option(["--queue"])
CONTEXT = click.Context(click.Command("worker"))


@target(mutations("90", "90s", "10m", "2.5h", "3 d", "150ms", "1w"), share=25)
def duration_options(text: str) -> str | None:
    def act() -> None:
        assert (parse_duration(CONTEXT, OPTION, text) or 0.0) >= 0

    return attempt(act, click.BadParameter)


class NoRows:
    """A database in which nothing is found."""

    def read(self, *args: Any, **params: Any) -> list[Any]:
        assert len(params["low"]) == len(params["high"]) == 36
        return []


@target(mutations("0190a1b2-7c3d", "0190A1B2", "0190a1b2-7c3d-7e4f-8a5b-0123456789ab"), share=20)
def id_prefixes(text: str) -> str | None:
    nothing = cast(Database, NoRows())
    return attempt(lambda: whole_id(nothing, text), click.BadParameter, JobNotFound)


@target(
    lambda chance: (rude(chance) * pick(chance, (1, 1, 7)), pick(chance, (80, 200, 4_000))), share=6
)
def clean_texts(case: tuple[str, int]) -> str | None:
    text, limit = case
    cleaned = clean_text(text, limit)
    cleaned.encode()
    if _CONTROL.search(cleaned):
        return f"leaves {ascii(cleaned)[:200]}"
    return f"is {len(cleaned)} long" if len(cleaned) > limit else None


@target(lambda chance: some_value(chance, 2), share=2)
def shown_values(value: object) -> str | None:
    """Whatever a row holds is shown on one line, and JSON is JSON."""
    for text in (
        safe_repr(value),
        one_line(value),
        shown_plain(value),
        *(drawn(kind(value), 1e9) for kind in (Moment, Span, Cut)),
    ):
        if wrong := unsafe(text):
            return wrong
    if not many_lines(value).replace("\n", "").isprintable():
        return f"shows {ascii(many_lines(value))[:200]}"
    document = json_text({"a": value})
    json.loads(document)
    return unsafe(document, lines=True)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


STORED = '{"type":"shop.Late","message":"no \\u2028 answer","traceback":"Traceback …\\n  File"}'


@target(lambda chance: storable(mutations(STORED, STORED[:50], '"text"', "7")(chance)))
def stored_errors(text: str) -> str | None:
    failure = read_failure(text)
    headline_of_start(text)
    payload(text)
    return None if failure is not None else "is not there"


class Rude(Exception):
    """Its message and notes are what it was given, or an error of their own."""

    def __str__(self) -> str:
        if self.args[1] < 0.1:
            raise SystemExit(self.args[0])
        return str(self.args[0])


def _rude_error(chance: random.Random) -> BaseException:
    error: BaseException = Rude(rude(chance), chance.random())
    for _ in range(int(chance.random() * 3)):
        outer = Rude(rude(chance), chance.random())
        error.add_note(rude(chance))
        outer.__cause__ = error if chance.random() < 0.5 else None
        outer.__context__ = error
        error = outer
    if chance.random() < 0.2:
        error = BaseExceptionGroup(rude(chance), [error, ValueError(rude(chance))])
    return error


@target(_rude_error, share=1)
def failures(error: BaseException) -> str | None:
    found = describe(error)
    for text, most in ((found.message, MESSAGE_BYTES), (found.traceback, TRACEBACK_BYTES)):
        if len(text.encode()) > most or "\x00" in text or "\x1b" in text:
            return f"stores {ascii(text)[:200]}"
    back = read_failure(error_text(error))
    return None if back == found else "does not come back as it was stored"


# --- the codec ------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Item:
    """A dataclass of the user's."""

    price: float
    tags: list[str] = dataclasses.field(default_factory=list[str])


class Place(msgspec.Struct):
    """A Struct of the user's."""

    street: str
    since: dt.date | None = None


class Pair(NamedTuple):
    """A named tuple of the user's."""

    x: int
    y: float


class Options(TypedDict, total=False):
    """A typed dict of the user's."""

    dry: bool


LEAVES: dict[Any, Callable[[random.Random], Any]] = {
    int: lambda c: int(c.random() * 2**70) - 2**69 if c.random() < 0.3 else int(c.random() * 99),
    float: lambda c: pick(c, (0.0, -0.0, 1.5, 1e300, 5e-324, 7, c.random())),
    str: lambda c: rude(c) if c.random() < 0.5 else "plain",
    bool: lambda c: c.random() < 0.5,
    bytes: lambda c: c.randbytes(5),
    Decimal: lambda c: Decimal(pick(c, ("1.10", "-0", "1E+5", "NaN", "0.1"))),
    uuid.UUID: lambda c: uuid.UUID(int=c.getrandbits(128)),
    dt.date: lambda c: dt.date(1 + int(c.random() * 9998), 2, 28),
    dt.datetime: lambda c: dt.datetime(
        *(1 + int(c.random() * 9998), 12, 31, 23, 59, 59, int(c.random() * 10**6)),
        tzinfo=pick(c, (None, dt.UTC, dt.timezone(dt.timedelta(hours=-5, minutes=30)))),
    ),
    dt.time: lambda c: dt.time(int(c.random() * 24), 0, 0, int(c.random() * 10**6)),
    dt.timedelta: lambda c: dt.timedelta(seconds=int(c.random() * 1e6), microseconds=7),
    Colour: lambda c: pick(c, (Colour.RED, Colour.BLUE)),
    Item: lambda c: Item(c.random(), [rude(c)]),
    Place: lambda c: Place("street", dt.date(2024, 1, 1)),
    Pair: lambda c: Pair(1, 2.5),
    Options: lambda c: {"dry": True},
    Any: lambda c: some_value(c, 2),
}


def wraps(kind: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    """The annotation inside others, each with what puts a value there."""
    return [
        (list[kind], lambda value: [value]),
        (tuple[kind, ...], lambda value: (value, value)),
        (dict[str, kind], lambda value: {"k": value}),
        (kind | None, lambda value: value),
        (frozenset[kind], lambda value: frozenset([value])),
        (dict[int, kind], lambda value: {7: value}),
    ]


def some_value(chance: random.Random, depth: int) -> Any:
    """Any value at all: what JSON has, and what it has not."""
    what = chance.random()
    if depth and what < 0.15:
        return [some_value(chance, depth - 1) for _ in range(2)]
    if depth and what < 0.3:
        return {rude(chance): some_value(chance, depth - 1), "a": 1}
    if depth and what < 0.35:
        return (some_value(chance, depth - 1), {1, 2})
    if what < 0.6:
        return rude(chance)
    if what < 0.8:
        return pick(chance, NUMBERS)
    return pick(chance, _PLAIN_LEAVES)(chance)


_PLAIN_LEAVES = [make for kind, make in LEAVES.items() if kind is not Any]


def _kinds() -> list[tuple[Signature, Callable[[random.Random], Any]]]:
    """Tasks of one parameter with all annotations, plain and wrapped, and what makes values."""
    found: list[tuple[Signature, Callable[[random.Random], Any]]] = []
    for kind, leaf in LEAVES.items():
        found.append((_signature(kind), leaf))
        found += [(_signature(outer), _wrapped(around, leaf)) for outer, around in wraps(kind)]
    return found


def _signature(annotation: Any) -> Signature:
    def task(x: Any) -> Any:
        return x

    task.__annotations__ = {"x": annotation, "return": annotation}
    return Signature.of(task, "shop.task")


def _wrapped(around: Callable[[Any], Any], leaf: Callable[[random.Random], Any]) -> Any:
    def make(chance: random.Random) -> Any:
        value = leaf(chance)
        try:
            return around(value)
        except TypeError:
            return value

    return make


KINDS = _kinds()


def _some_call(chance: random.Random) -> tuple[Signature, Any]:
    signature, make = pick(chance, KINDS)
    if chance.random() < 0.25:
        make = pick(chance, KINDS)[1]
    return signature, make(chance)


def exact(value: Any) -> Any:
    """A form that tells 1 from 1.0 and True, and 0.0 from -0.0; a set's order says nothing."""
    if isinstance(value, (list, tuple)):
        return type(cast(Any, value)), [exact(part) for part in cast("list[Any]", value)]
    if isinstance(value, dict):
        return [(exact(key), exact(part)) for key, part in cast("dict[Any, Any]", value).items()]
    if isinstance(value, (set, frozenset)):
        return type(cast(Any, value)), sorted(map(repr, map(exact, cast("set[Any]", value))))
    if isinstance(value, dt.datetime) and value.tzinfo:
        return dt.datetime, value.replace(tzinfo=None), value.utcoffset()
    if isinstance(value, float) and value.is_integer():
        return float, int(value), str(value)[0]  # An int may come back as the float declared.
    if type(value) is int:
        return float, value, str(value)[0]
    return type(value), repr(value)


@target(_some_call, share=4)
def codec_calls(case: tuple[Signature, Any]) -> str | None:
    """Either the call is refused, or it arrives equal and of the same types."""
    signature, value = case
    try:
        text = signature.encode_arguments((value,), {})
    except OnwardError:
        return None
    (args, kwargs) = signature.decode_arguments(text)
    arrived = kwargs["x"] if kwargs else args[0]
    if exact(arrived) != exact(value):
        return f"{safe_repr(value)} arrives as {safe_repr(arrived)}"
    result = signature.decode_result(signature.encode_result(value))
    return None if exact(result) == exact(value) else f"returns as {safe_repr(result)}"


CALLS = (
    '{"x":1}',
    '{"x":[{"price":1.5,"tags":["a"]}]}',
    '{"x":{"k":"2024-02-28T23:59:59.5+05:30"}}',
    '{"x":"0190a1b2-7c3d-7e4f-8a5b-0123456789ab","y":null}',
    '{"x":{"7":["red",-0.0,1e300,"\\u0000\\ud83d\\ude00"]}}',
)


@target(lambda chance: (pick(chance, KINDS)[0], mutations(*CALLS)(chance)), share=12)
def codec_texts(case: tuple[Signature, str]) -> str | None:
    signature, text = case
    return attempt(lambda: signature.decode_arguments(text), PayloadUnreadable) or attempt(
        lambda: signature.decode_result(text), PayloadUnreadable
    )


# --- pipes and statements -------------------------------------------------------------------------

HELLO = msgspec.json.encode(
    {
        "registration": {
            **dict.fromkeys(("id", "name", "host", "version"), "w"),
            "pid": 1,
            "queues": ["mail"],
            "tasks": [],
            "concurrency": 1,
            "lease": 15.0,
        },
        "options": "{}",
        "settings": {"lease": 15.0},
        "backoffs": {"a": {"base": 2.0}},
    }
).decode()
ORDERS = '{"target":"shop:app","concurrency":4,"board_fd":3,"link_fd":4,"queues":[["mail",null]]}'
ORDER = msgspec.msgpack.encode({"type": "Cancel", "harder": True})
RAISED = msgspec.msgpack.encode({"type": "Raised", "error": "{}", "backoff": {"base": 1.0}})


@target(mutations(HELLO, ORDERS), share=25)
def hellos(text: str) -> str | None:
    data = text.encode(errors="surrogatepass")
    allowed = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
    return attempt(lambda: msgspec.json.decode(data, type=Hello), *allowed) or attempt(
        lambda: msgspec.json.decode(data, type=Orders), *allowed
    )


def _mutated_bytes(chance: random.Random) -> bytes:
    data = bytearray(pick(chance, (ORDER, RAISED)))
    for _ in range(1 + int(chance.random() * 3)):
        place = int(chance.random() * len(data))
        data[place : place + int(chance.random() * 3)] = chance.randbytes(int(chance.random() * 3))
        data = data or bytearray(b"\xc0")
    return bytes(data)


@target(_mutated_bytes)
def orders(data: bytes) -> str | None:
    allowed = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
    return attempt(lambda: msgspec.msgpack.decode(data, type=Order), *allowed) or attempt(
        lambda: msgspec.msgpack.decode(data, type=Outcome), *allowed
    )


@target(
    lambda chance: (pick(chance, STATEMENTS), pick(chance, ("onward", "jobs", "_x", "Ünï"))),
    share=1,
)
def placeholders(case: tuple[str, str]) -> str | None:
    """Each statement has the same parameters however it is spelt, and one schema."""
    name, schema = case
    text, names = numbered_text(name, schema)
    named = psycopg_text(name, schema).decode() % dict.fromkeys(names, "1")
    stray = schema != "onward" and "onward." in in_schema(named, schema)
    return "has a stray schema" if stray or f"${len(names) + 1}" in text else None


STATEMENTS = list(twins())


# --- hostile text in every column -----------------------------------------------------------------


MEGABYTE = 1_000_000


class Texts(NamedTuple):
    """The texts of one case: names as names are checked, the others as they are encoded."""

    name: str
    text: str
    args: str
    result: str
    error: str
    reason: str
    ids: tuple[str, ...]


def rude_texts(chance: random.Random, size: int = 0) -> Texts:
    """At least so long, and through the product's own edges: they see to what no database takes."""
    text = rude(chance)
    text *= 1 + size // len(text)
    name = clean_text(text, 180).strip(" ,*:=-").replace(":", "").replace(",", "") or "mail"
    with_text = {text.encode(errors="replace").decode(): [text.encode(errors="replace").decode()]}
    return Texts(
        name=storable(name),
        text=storable(text),
        args=ANYTHING.encode_arguments((with_text,), {}),
        result=ANYTHING.encode_result(with_text),
        error=error_text(Rude(text, 1.0)),
        reason=clean_text(text, 1_000),
        ids=tuple(str(uuid.UUID(int=chance.getrandbits(128))) for _ in range(4)),
    )


ANYTHING = _signature(Any)


def write_and_read(database: Database, case: Texts) -> str | None:
    """Whatever was written comes back, from the columns that it was written to."""
    jobs = [_job(case, id_) for id_ in case.ids[:3]]
    worker = Registration(
        id=case.ids[3],
        name=case.text,
        host=case.reason,
        pid=1,
        version=case.text,
        queues=(case.name, case.text),
        tasks=(case.name, case.text),
        concurrency=1,
        lease=9.0,
        lock_path=case.text,
    )
    database.run(store.register, worker)
    database.enqueue(jobs[:1])
    database.run(store.enqueue_again, jobs[1:])
    lane, names = (case.name, 0), store.dumps([case.name])
    taken = database.run(store.claim, worker.id, names, lane, (0.0, FIRST_ID), 9)
    by_id = {one.job.id: one.job for one in taken}
    if by_id.keys() != {job.id for job in jobs}:
        return f"only {len(taken)} of 3 are claimed"
    first, second, third = (by_id[job.id] for job in jobs)
    late = first.move(Event.SUCCEED, ended=AttemptState.SUCCEEDED, result=case.result)
    changes = [
        late,
        second.move(
            Event.BURY,
            ended=AttemptState.FAILED,
            failures=1,
            error=case.error,
            reason=case.reason,
        ),
        third.move(Event.DROP, ended=AttemptState.CANCELLED, reason=case.text),
    ]
    if len(database.run(store.apply, changes)) != 3:
        return "not all changes took"
    database.run(store.refuse, [store.refusal_of(late, first, detail=case.text)])
    database.run(store.stop, worker.id, case.text)
    return _not_as_written(database, case, [job.id for job in jobs], worker)


def _not_as_written(
    database: Database, case: Texts, ids: list[str], worker: Registration
) -> str | None:
    records = [database.read(store.record, id_) for id_ in ids]
    (died,) = database.read(store.attempts, ids[1])
    (refusal,) = database.read(store.refusals, ids[0])
    (row,) = [row for row in database.read(store.read, "workers", limit=100) if row[0] == worker.id]
    listed = database.read(
        store.read, "list", before=None, state=None, queue=case.name, task=case.name, limit=99
    )
    shown = {item[0] for item in listed}
    expected: dict[str, tuple[object, object]] = {
        "args": ([case.args] * 3, [record.job.args for record in records]),
        "task": ([case.name] * 3, [record.job.task for record in records]),
        "queue": ([case.name] * 3, [record.job.queue for record in records]),
        "result": (case.result, records[0].result),
        "error": ((case.error, case.reason), (died.error, died.reason)),
        "reason": (case.text, records[2].reason),
        "refusal": (case.text, refusal.detail),
        "worker": ((case.text, case.reason, case.text), (row[1], row[2], row[4])),
        "lists": ([[case.name, case.text]] * 2, [msgspec.json.decode(row[i]) for i in (6, 7)]),
        "end": (case.text, row[14]),
        "filter": ((set(ids), {case.name}), (set(ids) & shown, {item[1] for item in listed})),
    }
    for column, (wanted, found) in expected.items():
        if wanted != found:
            return f"{column}: {ascii(wanted)[:200]} comes back as {ascii(found)[:200]}"
    return None


def _job(case: Texts, id_: str) -> NewJob:
    return NewJob(
        id=id_,
        task=case.name,
        queue=case.name,
        priority=0,
        args=case.args,
        max_attempts=1,
        max_losses=0,
    )


def fuzz_columns(
    kind: str, seed: int, count: int, goes_on: Callable[[], bool] = lambda: True
) -> Report:
    """Write hostile texts to a database and read them."""
    chance = random.Random(seed)
    with places(kind) as (place,):
        report = Report("hostile text", place.name, seed)
        for number in range(count):
            if not goes_on() or len(report.violations) > 3:
                break
            case = rude_texts(chance, MEGABYTE if number % 100 == 25 else 0)
            report.sometimes["texts of a megabyte"] += len(case.text) >= MEGABYTE
            report.did["texts"] += 1
            try:
                wrong = write_and_read(place.database, case)
            except Exception as error:
                wrong = f"raised {type(error).__name__}: {clean_text(str(error), 200)}"
            if wrong is not None:
                report.violate(f"{ascii(case.text)[:200]}: {wrong}")
            if number % 20 == 19:
                place.wipe()
    return report


# --- the search -----------------------------------------------------------------------------------

CASES_A_ROUND = 300_000
TEXTS_A_ROUND = 100
"""Texts take thousands of times as long, and the cases still get most of the time."""


def fuzz(seed: int, count: int, goes_on: Callable[[], bool] = lambda: True) -> Report:
    """Try `count` cases, the targets by turns according to their shares."""
    report = Report("fuzzing", "parsers and the codec", seed)
    chance = random.Random(seed)
    while report.did.total() < count and goes_on():
        for name, aim in TARGETS.items():
            for _ in range(aim.share * 10):
                _try(name, aim, chance, report)
            report.did[name] += aim.share * 10
        if len(report.violations) > 5:
            return report
    return report


def _try(name: str, aim: Target, chance: random.Random, report: Report) -> None:
    case = aim.make(chance)
    try:
        wrong = aim.wrong(case)
    except Exception as error:
        wrong = f"raised {type(error).__name__}: {clean_text(str(error), 200)}"
    if wrong is not None:
        report.violate(f"{name}({_smallest(case, aim.wrong)}): {wrong}")


def _smallest(case: Any, wrong: Wrong) -> str:
    """A text with as much cut off as goes; anything else as it is."""
    if not isinstance(case, str):
        return ascii(case)[:500]
    size = len(case) // 2
    while size:
        for start in range(0, len(case), size):
            shorter = case[:start] + case[start + size :]
            if _fails(shorter, wrong):
                case = shorter
                break
        else:
            size //= 2
    return ascii(case)[:500]


def _fails(case: Any, wrong: Wrong) -> bool:
    try:
        return wrong(case) is not None
    except Exception:
        return True


def run(seed: int, budget: Budget) -> Report:
    """The deep form: parsers, then columns, by turns."""
    total = Report("fuzzing", "parsers, the codec and text columns", seed)
    for round_ in range(1 << 30):
        if not budget.left() or total.violations:
            break
        total.add(fuzz(seed + round_, CASES_A_ROUND, budget.left))
        for kind in ("apsw", "postgres"):
            total.add(fuzz_columns(kind, seed + round_, TEXTS_A_ROUND, budget.left))
    return total


TECHNIQUES = [Technique("fuzzing", run)]
