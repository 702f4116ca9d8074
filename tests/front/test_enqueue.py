"""From a call to a stored job: refused at the caller's line, or stored as it was given."""

from __future__ import annotations

import asyncio
import math
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import pytest

from onward import (
    DatabaseUnavailable,
    Handle,
    InvalidArguments,
    NotSerializable,
    Onward,
    OnwardError,
)
from onward.codec import MAX_BYTES
from onward.errors import IdConflict
from onward.task import AsyncTask, SyncTask
from tests.front.shop import Address, total
from tests.support import by_hand, postgres
from tests.support.postgres import PrivatePostgres

# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1,), {}),
        ((1, 2, 3), {}),
        ((1,), {"order": 1}),
        ((), {"order": 1, "were": 2}),
        ((1, Address("a", "b"), True), {}),
    ],
    ids=str,
)
def test_a_call_that_does_not_fit_is_refused_with_the_signature(
    app: Onward, ship: AsyncTask[..., str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError) as refused:
        ship.enqueue(*args, **kwargs)
    assert isinstance(refused.value, InvalidArguments)
    assert "order: int" in refused.value.fix
    assert total(app) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"order": "one", "where": Address("a", "b")},
        {"order": 1.5, "where": Address("a", "b")},
        {"order": 1, "where": {"street": "a"}},
        {"order": 1, "where": None},
        {"order": None, "where": Address("a", "b")},
        {"order": 1, "where": Address("a", "b"), "express": "yes"},
    ],
    ids=str,
)
def test_a_value_that_contradicts_its_annotation_is_refused_by_name(
    app: Onward, ship: AsyncTask[..., str], arguments: dict[str, Any]
) -> None:
    with pytest.raises(OnwardError) as refused:
        ship.enqueue(**arguments)
    assert isinstance(refused.value, (InvalidArguments, NotSerializable))
    assert any(f"`{name}" in str(refused.value) for name in arguments)
    assert total(app) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {1, 2}, object(), b"x" * 3])
def test_a_value_without_a_faithful_form_is_refused(
    app: Onward, send: SyncTask[..., int], value: Any
) -> None:
    with pytest.raises(NotSerializable, match="what"):
        send.enqueue(value)
    assert total(app) == 0


HOSTILE = [
    "nul \x00 inside",
    {"a\x00b": {"deep": ["\x00"]}},
    "lone \ud800 surrogate",
    "\u2028 \u0085 \x7f \x1b[2J",
    "'; DROP TABLE onward.job; --",
    "%s %(a)s $1 :jobs \\ \" '",
    "🎉" * 100,
    -0.0,
    2**63,
    [[[[[]]]]],
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:30])
def test_a_hostile_value_arrives_equal_or_is_refused_on_both_databases(
    app: Onward, send: SyncTask[..., int], value: Any
) -> None:
    if "\ud800" in str(value):
        with pytest.raises(NotSerializable, match="what"):
            send.enqueue(value)
        return
    stored = app.database.read(by_hand.store.get, send.enqueue(value).id)
    args, kwargs = send.signature.decode_arguments(stored.args)
    assert [repr(each) for each in (*args, *kwargs.values())] == [repr(value)]


def test_a_large_argument_arrives_and_one_that_is_too_large_is_refused(
    app: Onward, send: SyncTask[..., int]
) -> None:
    for size in (1_000, 7_999, 8_001, 1_000_000, 10_000_000):
        job = send.enqueue("x" * size)
        assert len(app.get(job.id).args["what"]) == size
    with pytest.raises(ValueError, match="cannot enqueue") as refused:
        send.enqueue("x" * 17_000_000)
    assert f"{MAX_BYTES:,}" in str(refused.value)


# --- many at once ---------------------------------------------------------------------------------


async def never() -> None:
    """A coroutine that nobody should have to await."""


@pytest.mark.parametrize("wrong", [None, 5, "shop.send", never, "a coroutine", "a task"])
def test_one_thing_that_is_no_call_refuses_them_all(
    app: Onward, send: SyncTask[..., int], wrong: Any
) -> None:
    thing = {"a coroutine": never, "a task": lambda: send}.get(str(wrong), lambda: wrong)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match="no call") as refused:
            app.enqueue_many([send.call(1), thing, send.call(2)])
        del thing
    assert "send.call(" in cast(InvalidArguments, refused.value).fix
    assert total(app) == 0


@pytest.mark.parametrize("one", ["a call", "a coroutine", "a number"])
def test_what_is_no_list_of_calls_is_refused(
    app: Onward, send: SyncTask[..., int], one: str
) -> None:
    thing: Any = {"a call": lambda: send.call(1), "a coroutine": never}.get(one, lambda: 5)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArguments, match="no list of calls"):
            app.enqueue_many(thing)
        del thing
    assert total(app) == 0


def test_all_coroutines_among_the_calls_are_closed(app: Onward) -> None:
    made = [never() for _ in range(3)]
    with pytest.raises(InvalidArguments):
        app.enqueue_many(cast(Any, made))
    assert all(coroutine.cr_frame is None for coroutine in made)


def test_a_coroutine_as_an_argument_is_closed_and_refused(
    app: Onward, send: SyncTask[..., int]
) -> None:
    coroutine = never()
    with pytest.raises(NotSerializable):
        send.enqueue(coroutine)
    assert coroutine.cr_frame is None


def test_a_call_of_another_app_is_refused(app: Onward, send: SyncTask[..., int]) -> None:
    other = Onward(app.url)
    with pytest.raises(InvalidArguments, match="another app"):
        other.enqueue_many([send.call()])
    assert total(app) == 0


def test_no_calls_are_no_jobs(app: Onward) -> None:
    assert app.enqueue_many([]) == []
    assert app.enqueue_many(iter(())) == []


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(7_000, id="scaled"),
        pytest.param(20_000, id="as written", marks=pytest.mark.soak),
    ],
)
def test_thousands_of_calls_of_several_tasks_are_stored_in_order(
    app: Onward, send: SyncTask[..., int], ship: AsyncTask[..., str], count: int
) -> None:
    calls = (
        ship.call(n, Address("a", "b")) if n % 5 == 0 else send.using(queue="bulk").call(n)
        for n in range(count)
    )
    jobs = app.enqueue_many(calls)
    assert total(app) == count
    ids = [job.id for job in jobs]
    assert ids == sorted(set(ids))
    for place in (0, 1, count // 2, count - 1):
        args = app.get(ids[place]).args
        assert args.get("what", args.get("order")) == place


def test_an_id_whose_arguments_todays_code_cannot_read_is_that_of_another_call(url: str) -> None:
    """The caller gave the id, so it hears of a conflict and not of somebody's old arguments."""
    key = uuid.uuid4()

    def before(cents: int) -> None: ...
    def after(amount: str) -> None: ...

    with closing(Onward(url)) as old, closing(Onward(url)) as new:
        old.task(name="shop.pay")(before).using(id=key).enqueue(5)
        task = new.task(name="shop.pay")(after).using(id=key)
        with pytest.raises(IdConflict, match=str(key)):
            task.enqueue("5")
        assert total(new) == 1
        assert new.get(str(key)).task == "shop.pay"


def test_a_bulk_with_one_bad_id_writes_nothing(app: Onward, send: SyncTask[..., int]) -> None:
    key = uuid.uuid4()
    send.using(id=key).enqueue(1)
    with pytest.raises(IdConflict):
        app.enqueue_many([*(send.call(n) for n in range(10)), send.using(id=key).call(2)])
    with pytest.raises(IdConflict):
        app.enqueue_many([*(send.call(n) for n in range(6_000)), send.using(id=key).call(2)])
    assert total(app) == 1


def test_large_arguments_in_bulk_are_one_transaction(app: Onward, send: SyncTask[..., int]) -> None:
    key = uuid.uuid4()
    send.using(id=key).enqueue("other")
    calls = [send.call("x" * 3_000_000) for _ in range(7)]
    with pytest.raises(IdConflict):
        app.enqueue_many([*calls, send.using(id=key).call("mine")])
    assert total(app) == 1
    app.enqueue_many(calls)
    assert total(app) == 8


def test_many_threads_enqueue_at_once(app: Onward, send: SyncTask[..., int]) -> None:
    with ThreadPoolExecutor(32) as pool:
        jobs = list(pool.map(send.enqueue, range(640)))
    assert len({job.id for job in jobs}) == total(app) == 640


def test_many_coroutines_enqueue_at_once(app: Onward, ship: AsyncTask[..., str]) -> None:
    async def scene() -> list[Handle[str]]:
        calls = (ship.aenqueue(n, Address("a", "b")) for n in range(640))
        jobs = await asyncio.gather(*calls)
        assert (await app.acounts())["queued"] == 640
        await app.aclose()
        return jobs

    jobs = asyncio.run(scene())
    assert len({job.id for job in jobs}) == total(app) == 640


# --- a server that is away ------------------------------------------------------------------------


def test_an_enqueue_without_a_server_says_so_and_is_safely_repeated_with_its_id(
    private_postgres: PrivatePostgres,
) -> None:
    app = Onward(private_postgres.url())
    app.database.migrate()

    @app.task(name="shop.send")
    def send(n: int) -> None: ...

    send.enqueue(0)  # A connection waits in the pool, and dies with the server.
    private_postgres.stop("immediate")
    job = send.using(id=uuid.uuid4())
    for enqueue in (lambda: job.enqueue(1), lambda: app.enqueue_many([send.call(2), job.call(1)])):
        with pytest.raises(ConnectionError) as away:
            enqueue()
        assert isinstance(away.value, DatabaseUnavailable)
        assert "cannot be reached" in away.value.what
    private_postgres.start()
    assert {job.enqueue(1).id, job.enqueue(1).id} == {job.options.id}
    assert app.counts()["queued"] == 2
    private_postgres.restart("immediate")
    assert send.enqueue(3).refresh().state == "queued", "a dead connection in the pool is no error"
    app.close()


def test_an_async_enqueue_without_a_server_says_so_too(private_postgres: PrivatePostgres) -> None:
    app = Onward(private_postgres.url(postgres.database_name(_fresh(private_postgres))))
    app.database.migrate()

    @app.task(name="shop.send")
    async def send(n: int) -> None: ...

    async def scene() -> None:
        await send.aenqueue(0)
        private_postgres.stop("immediate")
        job = send.using(id=uuid.uuid4())
        with pytest.raises(DatabaseUnavailable):
            await job.aenqueue(1)
        private_postgres.start()
        await job.aenqueue(1)
        await job.aenqueue(1)
        assert (await app.acounts())["queued"] == 2
        await app.aclose()

    asyncio.run(scene())


def _fresh(server: PrivatePostgres) -> str:
    return postgres.create_database(server.url())
