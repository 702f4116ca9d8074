"""Enqueue in the caller's own transaction: the job exists if, and only if, it commits."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onward import (
    Handle,
    InvalidOption,
    JobNotFound,
    Onward,
    OnwardError,
    Settings,
    WaitRefused,
)
from onward.errors import DatabaseUnavailable, DriverConflict, IdConflict, SchemaMissing
from onward.store import portions, store, two_libraries
from onward.store import sqlite as sqlite_adapter
from onward.store.connections import in_transaction
from onward.store.database import Again
from onward.store.statements import Op
from onward.task import SyncTask
from tests.front.callers import ALL, POSTGRES, Caller
from tests.support import by_hand

SETTINGS = Settings(poll=0.05)


class Shop:
    """An app with two tasks, and somebody's connection to its database."""

    def __init__(self, app: Onward, kind: str) -> None:
        self.app = app
        self.kind = kind

        @app.task(name="shop.send")
        def send(n: int, to: str = "you") -> int:
            return n

        @app.task(name="shop.charge", queue="money")
        async def charge(cents: int) -> str:
            return f"{cents} charged"

        self.send: SyncTask[..., int] = send
        self.charge = charge

    def play(self, scene: Callable[[Caller], Awaitable[None]]) -> None:
        """Run a scene with a caller whose transaction has begun."""

        async def played() -> None:
            try:
                async with ALL[self.kind](self.app) as caller:
                    await caller.start()
                    await scene(caller)
            finally:
                await self.app.database.close_loop()

        asyncio.run(played())

    def queued(self) -> int:
        """How many jobs anybody can see."""
        return sum(self.app.counts().values())


def made_shop(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[Shop]:
    if kind in POSTGRES:
        app = Onward(request.getfixturevalue("migrated_postgres"), settings=SETTINGS)
    else:
        driver = "apsw" if kind == "apsw" else "sqlite3"
        url = f"sqlite:///{tmp_path}/onward.db"
        app = Onward(url, sqlite_driver=driver, settings=SETTINGS)
        app.counts()
    yield Shop(app, kind)
    app.close()


@pytest.fixture(params=ALL)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """The shop, once for each driver."""
    yield from made_shop(request, tmp_path, request.param)


@pytest.fixture(params=POSTGRES)
def postgres_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """The shop, once for each driver of PostgreSQL."""
    yield from made_shop(request, tmp_path, request.param)


# --- commit and rollback --------------------------------------------------------------------------


def test_a_plain_enqueue_is_no_part_of_the_callers_transaction(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits by itself, so it stays after a rollback. A SQLite file has one writer: there it
    waits for the caller's own transaction, and the error says what to do.
    """
    monkeypatch.setattr(sqlite_adapter, "BUSY_SECONDS", 0.2)
    shop.app.close()  # Connections keep the patience that they were opened with.

    async def scene(caller: Caller) -> None:
        await caller.execute("INSERT INTO note VALUES ('mine')")
        if shop.kind in POSTGRES:
            await shop.send.aenqueue(1)
        else:
            with pytest.raises(DatabaseUnavailable, match="transaction of your own") as caught:
                await shop.send.aenqueue(1)
            assert "using(connection=…)" in caught.value.fix
            assert "space" not in caught.value.fix
        await caller.finish("rollback")
        assert await caller.notes() == 0
        assert shop.queued() == (1 if shop.kind in POSTGRES else 0)
        if shop.kind not in POSTGRES:
            await shop.send.aenqueue(1)  # The way is free again.

    shop.play(scene)


@pytest.mark.parametrize("first", ["a row of its own", "the job"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_job_exists_if_and_only_if_its_transaction_commits(
    shop: Shop, end: str, first: str
) -> None:
    async def scene(caller: Caller) -> None:
        if first == "a row of its own":
            await caller.execute("INSERT INTO note VALUES ('before')")
        job = await caller.enqueue(shop.send, 1)
        if first == "the job":
            await caller.execute("INSERT INTO note VALUES ('after')")
        assert shop.queued() == 0, "seen before the commit"
        await caller.finish(end)
        kept = 1 if end == "commit" else 0
        assert (shop.queued(), await caller.notes()) == (kept, kept)
        if kept:
            assert shop.app.get(job.id).args == {"n": 1}
        else:
            with pytest.raises(JobNotFound):
                shop.app.get(job.id)

    shop.play(scene)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_of_nothing_but_one_job_is_a_transaction(shop: Shop, end: str) -> None:
    async def scene(caller: Caller) -> None:
        await caller.enqueue(shop.send, 1)
        await caller.finish(end)
        assert shop.queued() == (1 if end == "commit" else 0)

    shop.play(scene)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_several_calls_of_several_tasks_share_one_fate(shop: Shop, end: str) -> None:
    async def scene(caller: Caller) -> None:
        through = {"connection": caller.connection}
        calls = [
            shop.send.using(**through).call(1),
            shop.charge.using(**through, priority=3).call(cents=250),
            shop.send.using(**through, run_after=3600).call(2, to="me"),
        ]
        jobs = await caller.enqueue_many(calls)
        assert [job.task for job in jobs] == ["shop.send", "shop.charge", "shop.send"]
        assert shop.queued() == 0
        await caller.finish(end)
        assert shop.queued() == (3 if end == "commit" else 0)
        if end == "commit":
            assert [shop.app.get(job.id).args for job in jobs] == [
                {"n": 1},
                {"cents": 250},
                {"n": 2, "to": "me"},
            ]

    shop.play(scene)


def test_a_savepoint_that_is_rolled_back_takes_its_job_along(shop: Shop) -> None:
    async def scene(caller: Caller) -> None:
        kept = await caller.enqueue(shop.send, 1)
        if caller.connection.__class__.__module__ == "sqlite3":
            assert caller.connection.in_transaction
        await caller.execute("SAVEPOINT mine")
        await caller.enqueue(shop.send, 2)
        await caller.execute("ROLLBACK TO SAVEPOINT mine")
        also = await caller.enqueue(shop.send, 3)
        await caller.finish("commit")
        assert shop.queued() == 2
        assert [shop.app.get(job.id).args["n"] for job in (kept, also)] == [1, 3]

    shop.play(scene)


def test_transactions_follow_each_other_on_one_connection(shop: Shop) -> None:
    async def scene(caller: Caller) -> None:
        await caller.enqueue(shop.send, 1)
        await caller.finish("rollback")
        await caller.start()
        await caller.enqueue(shop.send, 2)
        await caller.finish("commit")
        await caller.start()
        await caller.enqueue(shop.send, 3)
        await caller.finish("rollback")
        assert shop.queued() == 1

    shop.play(scene)


@pytest.mark.parametrize(
    ("jobs", "most_rows"),
    [
        pytest.param(550, 500, id="scaled"),
        pytest.param(5_500, portions.MOST_ROWS, id="as written", marks=pytest.mark.soak),
    ],
)
def test_many_jobs_in_one_transaction_are_all_or_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, jobs: int, most_rows: int
) -> None:
    """More than one statement takes."""
    monkeypatch.setattr(portions, "MOST_ROWS", most_rows)

    async def scene(caller: Caller) -> None:
        task = shop.send.using(connection=caller.connection)
        await caller.enqueue_many([task.call(n) for n in range(jobs)])
        await caller.finish("rollback")
        assert shop.queued() == 0
        await caller.start()
        await caller.enqueue_many([task.call(n) for n in range(jobs)])
        assert shop.queued() == 0
        await caller.finish("commit")
        assert shop.queued() == jobs

    shop.play(scene)


# --- waiting --------------------------------------------------------------------------------------


def test_a_wait_inside_the_transaction_is_refused_because_it_could_never_end(shop: Shop) -> None:
    async def scene(caller: Caller) -> None:
        job = await caller.enqueue(shop.send, 1)
        with pytest.raises(WaitRefused, match="cannot wait for job") as refused:
            await caller.wait(job)
        assert "commit first" in refused.value.fix
        await caller.finish("commit")
        by_hand.succeed(shop.app, job.id, "7")
        assert await caller.wait(job) == 7

    shop.play(scene)


def test_a_wait_after_a_rollback_says_that_there_is_no_such_job(shop: Shop) -> None:
    async def scene(caller: Caller) -> None:
        job = await caller.enqueue(shop.send, 1)
        await caller.finish("rollback")
        with pytest.raises(JobNotFound):
            await caller.wait(job)

    shop.play(scene)


def test_a_wait_after_the_connection_was_closed_says_that_there_is_no_such_job(shop: Shop) -> None:
    jobs: list[Handle[Any]] = []

    async def scene(caller: Caller) -> None:
        jobs.append(await caller.enqueue(shop.send, 1))
        await caller.finish("rollback")

    shop.play(scene)
    with pytest.raises(JobNotFound):
        jobs[0].wait(1)


def test_a_connection_that_cannot_tell_is_no_reason_to_refuse_a_wait() -> None:
    """Nor is one that is in no state to be asked."""

    class Broken:
        @property
        def in_transaction(self) -> bool:
            raise RuntimeError("closed")

    assert not in_transaction(object())
    assert not in_transaction(Broken())


# --- an id of the caller's ------------------------------------------------------------------------


def test_a_call_repeated_with_its_id_is_one_job_and_shows_what_became_of_it(shop: Shop) -> None:
    key = uuid.uuid4()

    async def scene(caller: Caller) -> None:
        first = await caller.enqueue(shop.send, 1, id=key)
        again = await caller.enqueue(shop.send, 1, id=key)
        assert first == again
        await caller.finish("commit")
        assert shop.queued() == 1
        by_hand.succeed(shop.app, first.id, "7")
        await caller.start()
        third = await caller.enqueue(shop.send, 1, id=key)
        assert (third.state, third.result) == ("succeeded", 7)
        await caller.finish("commit")
        assert shop.queued() == 1

    shop.play(scene)


def test_an_id_of_another_call_is_refused_and_the_transaction_goes_on(shop: Shop) -> None:
    key = uuid.uuid4()
    shop.send.using(id=key).enqueue(1)

    async def scene(caller: Caller) -> None:
        await caller.execute("INSERT INTO note VALUES ('mine')")
        through = shop.send.using(connection=caller.connection)
        with pytest.raises(IdConflict, match=str(key)):
            await caller.enqueue_many(
                [through.using(id=uuid.uuid4()).call(5), through.using(id=key).call(2)]
            )
        await caller.execute("INSERT INTO note VALUES ('mine too')")
        await caller.finish("commit")
        assert (shop.queued(), await caller.notes()) == (1, 2)

    shop.play(scene)


def test_a_look_that_was_overtaken_is_taken_again_in_the_same_transaction(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker ends a job between our two statements: what the first wrote is undone, and what the
    caller had written is not.
    """
    key, real = uuid.uuid4(), store.enqueue_again
    born: list[set[str]] = []

    def overtaken(*args: Any) -> Op[set[str]]:
        born.append((yield from real(*args)))
        if len(born) == 1:
            raise Again
        return born[-1]

    monkeypatch.setattr(store, "enqueue_again", overtaken)

    async def scene(caller: Caller) -> None:
        await caller.execute("INSERT INTO note VALUES ('mine')")
        await caller.enqueue(shop.send, 1, id=key)
        assert born == [{str(key)}, {str(key)}]
        await caller.finish("commit")
        assert (shop.queued(), await caller.notes()) == (1, 1)

    shop.play(scene)


def test_an_id_needs_a_transaction_that_sees_what_others_commit(postgres_shop: Shop) -> None:
    shop = postgres_shop

    async def scene(caller: Caller) -> None:
        await caller.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(InvalidOption, match="repeatable read") as refused:
            await caller.enqueue(shop.send, 1, id=uuid.uuid4())
        assert "READ COMMITTED" in refused.value.fix
        await caller.enqueue(shop.send, 2)
        await caller.finish("commit")
        assert shop.queued() == 1

    shop.play(scene)


@pytest.mark.parametrize("again", [False, True], ids=["an id", "the same call"])
def test_what_may_be_there_already_is_told_so_where_it_cannot_be_seen(
    postgres_shop: Shop, again: bool
) -> None:
    """A loop that repeats its transaction repeats its call: there was never an explicit id."""
    shop = postgres_shop

    async def scene(caller: Caller) -> None:
        await caller.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        given = {} if again else {"id": uuid.uuid4()}
        call = shop.send.using(connection=caller.connection, **given).call(1)
        call.used = again
        with pytest.raises(InvalidOption, match="was enqueued before") as refused:
            await caller.enqueue_many([call])
        assert "make a new call" in refused.value.fix

    shop.play(scene)


def test_a_pipeline_takes_a_call_and_no_id(migrated_postgres: str) -> None:
    shop = Shop(Onward(migrated_postgres), "")
    with psycopg.connect(migrated_postgres) as connection, connection.pipeline():
        with pytest.raises(InvalidOption, match="pipeline mode"):
            shop.send.using(connection=connection, id=uuid.uuid4()).enqueue(1)
        shop.send.using(connection=connection).enqueue(2)
    assert shop.queued() == 1
    shop.app.close()


def test_a_delay_counts_from_the_enqueue_and_not_from_the_transaction(shop: Shop) -> None:
    """Which may have been open for a while."""

    async def scene(caller: Caller) -> None:
        await caller.execute("SELECT 1")
        await asyncio.sleep(0.3)
        before = time.time()
        job = await caller.enqueue(shop.send, 1, run_after=10)
        await caller.finish("commit")
        found = await shop.app.aget(job.id)
        assert found.run_at.timestamp() - before > 9.9
        assert found.created_at.timestamp() - before > -0.1

    shop.play(scene)


# --- where no transaction is open -----------------------------------------------------------------


@asynccontextmanager
async def autocommitting(shop: Shop) -> AsyncIterator[tuple[Any, bool]]:
    """A connection of the shop's driver that commits each statement by itself."""
    app = shop.app
    match shop.kind:
        case "psycopg":
            with psycopg.connect(app.url, autocommit=True) as connection:
                yield connection, False
        case "psycopg async":
            async with await psycopg.AsyncConnection.connect(app.url, autocommit=True) as other:
                yield other, True
        case "asyncpg":
            raw: Any = await asyncpg.connect(app.url)
            yield raw, True
            await raw.close()
        case "sqlite3":
            with closing(sqlite3.connect(_file(app), isolation_level=None)) as file:
                yield file, False
        case "sqlite3 autocommit":
            connect: Any = sqlite3.connect
            with closing(connect(_file(app), autocommit=True)) as file:
                yield file, False
        case _:
            with closing(apsw.Connection(_file(app))) as file:
                yield file, False


def _file(app: Onward) -> str:
    return app.url.removeprefix("sqlite:///")


NEW_SQLITE3 = ["sqlite3 autocommit"] if sys.version_info >= (3, 12) else []


@pytest.fixture(
    params=["psycopg", "psycopg async", "asyncpg", "sqlite3", "apsw", *NEW_SQLITE3],
)
def bare_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """The shop, once for each driver that can do without a transaction."""
    yield from made_shop(request, tmp_path, request.param)


def test_a_connection_that_commits_by_itself_has_the_job_at_once(bare_shop: Shop) -> None:
    shop = bare_shop

    async def scene() -> None:
        async with autocommitting(shop) as (connection, is_async):
            through = shop.send.using(connection=connection)
            job = await through.aenqueue(1) if is_async else through.enqueue(1)
            assert shop.app.get(job.id).state == "queued"

    asyncio.run(scene())


def test_calls_on_a_connection_that_commits_by_itself_are_still_one_write(bare_shop: Shop) -> None:
    shop, taken = bare_shop, uuid.uuid4()
    shop.send.using(id=taken).enqueue(1)

    async def scene() -> None:
        async with autocommitting(shop) as (connection, is_async):
            through = shop.send.using(connection=connection)

            async def enqueue_many(*calls: Any) -> None:
                if is_async:
                    await shop.app.aenqueue_many(calls)
                else:
                    shop.app.enqueue_many(calls)

            new = [through.using(id=uuid.uuid4()).call(n) for n in range(3)]
            with pytest.raises(IdConflict):
                await enqueue_many(*new, through.using(id=taken).call(2))
            assert shop.queued() == 1
            await enqueue_many(*new, through.using(id=taken).call(1))
            assert shop.queued() == 4

    asyncio.run(scene())


def test_sqlalchemy_in_autocommit_has_the_job_at_once(migrated_postgres: str) -> None:
    shop = Shop(Onward(migrated_postgres), "")
    engine = create_engine(
        migrated_postgres.replace("postgresql:", "postgresql+psycopg:"),
        isolation_level="AUTOCOMMIT",
    )
    with engine.connect() as connection:
        shop.send.using(connection=connection, id=uuid.uuid4()).enqueue(1)
        assert shop.queued() == 1
    engine.dispose()
    shop.app.close()


# --- what the caller has set up for itself --------------------------------------------------------


def test_rows_and_cursors_as_the_caller_likes_them_do_no_harm(migrated_postgres: str) -> None:
    shop, key = Shop(Onward(migrated_postgres), ""), uuid.uuid4()
    with psycopg.connect(migrated_postgres, row_factory=dict_row) as connection:
        shop.send.using(connection=connection, id=key).enqueue(1)
        shop.send.using(connection=connection, id=key).enqueue(1)
    with psycopg.connect(migrated_postgres, cursor_factory=psycopg.RawCursor) as connection:
        shop.send.using(connection=connection, id=key).enqueue(1)
        shop.send.using(connection=connection).enqueue(2)
    assert shop.queued() == 2
    shop.app.close()


def test_sqlite_rows_and_texts_as_the_caller_likes_them_do_no_harm(tmp_path: Path) -> None:
    shop = Shop(Onward(f"sqlite:///{tmp_path}/onward.db", sqlite_driver="sqlite3"), "")
    shop.app.counts()
    key = uuid.uuid4()
    with closing(sqlite3.connect(tmp_path / "onward.db")) as connection:
        connection.row_factory = lambda cursor, row: {"row": row}
        connection.text_factory = bytes
        shop.send.using(connection=connection, id=key).enqueue(1)
        again = shop.send.using(connection=connection, id=key).enqueue(1)
        assert again.id == str(key)
        connection.commit()
    assert shop.queued() == 1
    shop.app.close()


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_jobs_are_enqueued_while_the_caller_reads_its_rows(tmp_path: Path, driver: str) -> None:
    shop = Shop(Onward(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=driver), "")
    shop.app.counts()
    path = str(tmp_path / "onward.db")
    connection: Any = sqlite3.connect(path) if driver == "sqlite3" else apsw.Connection(path)
    connection.execute("CREATE TABLE item AS SELECT value AS n FROM json_each('[1, 2, 3]')")
    connection.execute("BEGIN")
    for (n,) in connection.execute("SELECT n FROM item"):
        shop.send.using(connection=connection).enqueue(n)
    connection.execute("COMMIT")
    connection.close()
    assert shop.queued() == 3
    shop.app.close()


@pytest.mark.parametrize("driver", ["sqlite3", "apsw"])
def test_a_transaction_that_has_read_what_is_old_is_told_how_to_begin(
    tmp_path: Path, driver: str
) -> None:
    """SQLite refuses its write at once. The error stays the driver's own."""
    shop = Shop(Onward(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=driver), "")
    shop.app.counts()
    path = str(tmp_path / "onward.db")
    connection: Any = sqlite3.connect(path) if driver == "sqlite3" else apsw.Connection(path)
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM onward_job").fetchall()
    shop.send.enqueue(1)
    kind: Any = sqlite3.OperationalError if driver == "sqlite3" else apsw.BusyError
    with pytest.raises(kind) as refused:
        shop.send.using(connection=connection).enqueue(2)
    assert "BEGIN IMMEDIATE" in refused.value.__notes__[0]
    connection.execute("ROLLBACK")
    connection.close()
    shop.app.close()


def test_a_scoped_session_is_the_session_of_its_scope(migrated_postgres: str) -> None:
    shop = Shop(Onward(migrated_postgres), "")
    engine = create_engine(migrated_postgres.replace("postgresql:", "postgresql+psycopg:"))
    scoped = scoped_session(sessionmaker(engine))
    job = shop.send.using(connection=scoped).enqueue(1)
    with pytest.raises(WaitRefused, match="commit first"):
        job.wait(5)
    scoped.rollback()
    with pytest.raises(JobNotFound):
        job.wait(5)
    shop.send.using(connection=scoped).enqueue(2)
    scoped.commit()
    scoped.remove()
    engine.dispose()
    assert shop.queued() == 1
    shop.app.close()


def test_an_async_session_is_taken_in_each_of_its_forms(migrated_postgres: str) -> None:
    shop = Shop(Onward(migrated_postgres), "")

    async def scene() -> None:
        engine = create_async_engine(
            migrated_postgres.replace("postgresql:", "postgresql+asyncpg:")
        )
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        await shop.send.using(connection=scoped).aenqueue(1)
        await scoped.commit()
        await scoped.remove()

        def inside(session: Session) -> None:
            shop.send.using(connection=session).enqueue(2)

        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(inside)
        await engine.dispose()

    asyncio.run(scene())
    assert shop.queued() == 2
    shop.app.close()


def test_the_tables_may_be_in_another_schema(postgres_database: str) -> None:
    app = Onward(postgres_database, schema="back_office")
    app.database.migrate()

    async def scene(kind: str) -> None:
        async with POSTGRES[kind](app) as caller:
            shop = Shop(app, kind)
            await caller.start()
            await caller.enqueue(shop.send, 1)
            await caller.enqueue(shop.send, 2, id=uuid.uuid4())
            await caller.finish("commit")
        await app.database.close_loop()

    for kind in POSTGRES:
        asyncio.run(scene(kind))
    assert app.counts()["queued"] == 2 * len(POSTGRES)
    app.close()


def test_a_call_that_is_given_twice_is_refused_before_the_connection_is_asked(shop: Shop) -> None:
    """By our own error; the caller's transaction goes on."""

    async def scene(caller: Caller) -> None:
        call = shop.send.using(connection=caller.connection).call(1)
        with pytest.raises(IdConflict, match="enqueued already"):
            await caller.enqueue_many([call, call])
        await caller.enqueue(shop.send, 2)
        await caller.finish("commit")

    shop.play(scene)
    assert shop.queued() == 1


# --- wake-ups -------------------------------------------------------------------------------------


def test_a_callers_transaction_notifies_nobody(postgres_shop: Shop) -> None:
    shop = postgres_shop
    worker = by_hand.register(shop.app)
    shop.app.database.run(by_hand.store.set_idle, worker, True)
    with psycopg.connect(shop.app.url, autocommit=True) as listener:
        listener.execute("LISTEN onward_onward")

        async def scene(caller: Caller) -> None:
            await caller.enqueue(shop.send, 1)
            await caller.enqueue(shop.send, 2, id=uuid.uuid4())
            await caller.finish("commit")
            assert shop.queued() == 2

        shop.play(scene)
        assert list(listener.notifies(timeout=0.3)) == []
        # A plain enqueue does notify, so the silence above means something.
        shop.send.enqueue(3)
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1


def test_an_enqueue_with_an_id_wakes_an_idle_worker_too(migrated_postgres: str) -> None:
    shop = Shop(Onward(migrated_postgres), "")
    shop.app.database.run(by_hand.store.set_idle, by_hand.register(shop.app), True)
    with psycopg.connect(migrated_postgres, autocommit=True) as listener:
        listener.execute("LISTEN onward_onward")
        shop.send.using(id=uuid.uuid4()).enqueue(1)
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1
    shop.app.close()


# --- refusals -------------------------------------------------------------------------------------


def refused(shop: Shop, connection: Any) -> OnwardError:
    with pytest.raises(DriverConflict) as caught:
        shop.send.using(connection=connection).enqueue(1)
    assert shop.queued() == 0
    return caught.value


@pytest.fixture
def file_shop(tmp_path: Path) -> Iterator[Shop]:
    """The shop on a file that is opened with apsw, the default."""
    app = Onward(f"sqlite:///{tmp_path}/onward.db")
    app.counts()
    yield Shop(app, "apsw")
    app.close()


@pytest.fixture
def server_shop(migrated_postgres: str) -> Iterator[Shop]:
    """The shop on PostgreSQL."""
    app = Onward(migrated_postgres)
    yield Shop(app, "psycopg")
    app.close()


def test_the_other_sqlite_library_is_refused_with_the_setting_that_helps(
    file_shop: Shop, tmp_path: Path
) -> None:
    # Opened on another file: on the app's own, it is too late for advice (see below).
    with closing(sqlite3.connect(tmp_path / "elsewhere.db")) as connection:
        assert 'sqlite_driver="sqlite3"' in refused(file_shop, connection).fix
    engine = create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    with Session(engine) as session:
        assert 'sqlite_driver="sqlite3"' in refused(file_shop, session).fix
    engine.dispose()


def test_apsw_is_refused_where_the_app_uses_sqlite3(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/onward.db", sqlite_driver="sqlite3")
    shop = Shop(app, "")
    with closing(apsw.Connection(str(tmp_path / "elsewhere.db"))) as connection:
        assert 'sqlite_driver="apsw"' in refused(shop, connection).fix
    app.close()


@pytest.mark.parametrize("place", ["elsewhere.db", ":memory:"])
def test_another_file_is_refused_by_name(file_shop: Shop, tmp_path: Path, place: str) -> None:
    path = place if place == ":memory:" else str(tmp_path / place)
    with closing(apsw.Connection(path)) as connection:
        assert str(tmp_path / "onward.db") in str(refused(file_shop, connection))


def test_the_same_file_by_another_path_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    shop = Shop(Onward(f"sqlite:///{tmp_path}/link/onward.db"), "")
    shop.app.counts()
    with closing(apsw.Connection(str(tmp_path / "data" / "onward.db"))) as connection:
        shop.send.using(connection=connection).enqueue(1)
    assert shop.queued() == 1
    shop.app.close()


def test_a_connection_to_the_other_kind_of_database_is_refused(
    file_shop: Shop, server_shop: Shop, tmp_path: Path
) -> None:
    with psycopg.connect(server_shop.app.url) as connection:
        assert "leads to PostgreSQL" in refused(file_shop, connection).why
    with closing(apsw.Connection(str(tmp_path / "onward.db"))) as file:
        assert "leads to SQLite" in refused(server_shop, file).why


@pytest.mark.parametrize("thing", [object(), "postgresql://here/db", 5])
def test_what_is_no_connection_is_refused_and_the_known_ones_are_named(
    file_shop: Shop, thing: object
) -> None:
    error = refused(file_shop, thing)
    assert type(thing).__qualname__ in error.what
    assert "SQLAlchemy" in error.fix


def test_what_only_leads_to_connections_is_refused(
    server_shop: Shop, migrated_postgres: str
) -> None:
    engine = create_engine(migrated_postgres.replace("postgresql:", "postgresql+psycopg:"))
    with psycopg.connect(migrated_postgres) as connection:
        for thing in (engine, sessionmaker(engine), connection.cursor()):
            refused(server_shop, thing)
    engine.dispose()

    async def scene() -> None:
        pool: Any = await asyncpg.create_pool(migrated_postgres, min_size=1, max_size=1)
        async with pool:
            with pytest.raises(DriverConflict):
                await server_shop.send.using(connection=pool).aenqueue(1)
            async with pool.acquire() as pooled, pooled.transaction():
                await server_shop.send.using(connection=pooled).aenqueue(1)

    asyncio.run(scene())
    assert server_shop.queued() == 1


def test_an_async_connection_is_for_aenqueue(postgres_shop: Shop) -> None:
    shop = postgres_shop

    async def scene(caller: Caller) -> None:
        if caller.is_async:
            assert "aenqueue" in refused(shop, caller.connection).fix
            await caller.finish("rollback")
        else:
            await shop.send.using(connection=caller.connection).aenqueue(1)
            await caller.finish("commit")
            assert shop.queued() == 1

    shop.play(scene)


def test_a_database_without_the_schema_is_named(server_shop: Shop, postgres_database: str) -> None:
    """The connection's database is meant, and not that of the app's URL."""
    with psycopg.connect(postgres_database) as connection:
        with pytest.raises(SchemaMissing, match="this connection leads to has no Onw") as missing:
            server_shop.send.using(connection=connection).enqueue(1)
        connection.rollback()
    assert "named onward" in missing.value.what
    assert server_shop.app.database.shown_url not in missing.value.what

    async def scene() -> None:
        engine = create_async_engine(
            postgres_database.replace("postgresql:", "postgresql+asyncpg:")
        )
        async with AsyncSession(engine) as session:
            with pytest.raises(SchemaMissing, match="no Onward schema"):
                await server_shop.send.using(connection=session).aenqueue(1)
        await engine.dispose()

    asyncio.run(scene())


@pytest.mark.parametrize("kind", POSTGRES)
def test_without_the_schema_the_callers_own_work_goes_on(
    server_shop: Shop, postgres_database: str, kind: str
) -> None:
    """What we had begun in the transaction is undone, and the rest of it can be committed."""
    elsewhere = Onward(postgres_database)

    async def scene() -> None:
        async with POSTGRES[kind](elsewhere) as caller:
            await caller.start()
            await caller.execute("INSERT INTO note VALUES ('mine')")
            with pytest.raises(SchemaMissing, match="this connection leads to has no Onward"):
                await caller.enqueue(server_shop.send, 1, id=uuid.uuid4())
            await caller.finish("commit")
            assert await caller.notes() == 1

    asyncio.run(scene())
    elsewhere.close()


def test_a_file_gets_its_tables_on_first_use_but_not_under_the_callers_lock(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/onward.db", sqlite_driver="sqlite3")
    shop = Shop(app, "")
    with closing(sqlite3.connect(tmp_path / "onward.db")) as connection:
        connection.execute("CREATE TABLE note (body TEXT)")
        connection.execute("INSERT INTO note VALUES ('mine')")
        with pytest.raises(SchemaMissing, match="no Onward schema") as missing:
            shop.send.using(connection=connection).enqueue(1)
        assert missing.value.why == "in a transaction of yours no tables are made"
        assert "app.database.migrate()" in missing.value.fix
        connection.commit()
        shop.send.using(connection=connection).enqueue(1)
        connection.commit()
    assert shop.queued() == 1
    app.close()


def test_an_error_of_the_callers_transaction_is_the_drivers_own(server_shop: Shop) -> None:
    with psycopg.connect(server_shop.app.url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            server_shop.send.using(connection=connection).enqueue(1)
        connection.rollback()
        server_shop.send.using(connection=connection).enqueue(1)
    assert server_shop.queued() == 1


@pytest.mark.parametrize("key", [None, uuid.UUID(int=7)], ids=["one statement", "several"])
def test_a_transaction_that_has_failed_says_so_through_every_driver(
    postgres_shop: Shop, key: uuid.UUID | None
) -> None:
    """By the driver's own error; after its rollback the connection is as good as before."""
    shop = postgres_shop
    options = {} if key is None else {"id": key}

    async def scene(caller: Caller) -> None:
        with pytest.raises(Exception, match="division by zero"):
            await caller.execute("SELECT 1 / 0")
        with pytest.raises(Exception, match="transaction") as caught:
            await caller.enqueue(shop.send, 1, **options)
        assert not isinstance(caught.value, OnwardError)
        await caller.finish("rollback")
        await caller.start()
        await caller.enqueue(shop.send, 1, **options)
        await caller.finish("commit")
        assert shop.queued() == 1

    shop.play(scene)


def test_a_driver_of_sqlalchemys_that_is_not_known_is_refused_by_name(file_shop: Shop) -> None:
    engine = create_engine("sqlite://")
    engine.dialect.driver = "pysqlcipher"
    with Session(engine) as session:
        error = refused(file_shop, session)
    engine.dispose()
    assert error.why == "it works through pysqlcipher"
    assert "psycopg" in error.fix


# --- beside a worker, and under a kill ------------------------------------------------------------


def start_beside_a_worker(shop: Shop, *, hold: float, soon: float) -> None:
    """Hold the transaction open while a worker polls; it starts the job once it is committed."""
    ran: list[float] = []

    @shop.app.task(name="shop.note")
    def note() -> None:
        ran.append(time.monotonic())

    async def scene(caller: Caller) -> None:
        await caller.execute("INSERT INTO note VALUES ('before')")
        job = await caller.enqueue(note)
        await asyncio.sleep(hold)
        assert ran == []
        await caller.finish("commit")
        committed = time.monotonic()
        await asyncio.to_thread(job.wait, 30)
        assert len(ran) == 1
        assert ran[0] - committed < soon

    with shop.app.worker():
        shop.play(scene)


# It takes 0.1 s on a machine of its own, and there a second is the limit: see the soak test. Tests
# that share their machine with others get more.
def test_a_worker_starts_the_job_after_the_commit_and_not_before(shop: Shop) -> None:
    start_beside_a_worker(shop, hold=0.5, soon=10)


@pytest.mark.soak
def test_a_worker_starts_the_job_within_a_second_of_the_commit(shop: Shop) -> None:
    start_beside_a_worker(shop, hold=2, soon=1)


def test_a_worker_never_starts_a_job_that_is_rolled_back(shop: Shop) -> None:
    """It polls all the while; when it has run what came afterwards, it has run nothing else."""
    ran: list[str] = []

    @shop.app.task(name="shop.note")
    def note(which: str) -> None:
        ran.append(which)

    async def scene(caller: Caller) -> None:
        await caller.execute("INSERT INTO note VALUES ('before')")
        await caller.enqueue(note, "rolled back")
        await asyncio.sleep(2 * SETTINGS.poll)
        await caller.finish("rollback")
        await asyncio.to_thread(lambda: note.enqueue("afterwards").wait(30))

    with shop.app.worker():
        shop.play(scene)
    assert ran == ["afterwards"]
    assert shop.queued() == 1


KILLED = """
import os, signal, sys
import {library}
from onward import Onward

app = Onward({url!r}, sqlite_driver={driver!r})

@app.task(name="shop.send")
def send(n: int) -> int:
    return n

connection = {opened}
{begin}
connection.execute("INSERT INTO note VALUES ('before')")
send.using(connection=connection).enqueue(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["psycopg", "sqlite3", "apsw"])
def test_a_process_that_is_killed_before_its_commit_leaves_no_job(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """Nor does a worker that polls all the while start one."""
    (shop,) = made_shop(request, tmp_path, kind)

    async def make_table(caller: Caller) -> None:
        await caller.finish("commit")

    shop.play(make_table)
    url = shop.app.url
    program = KILLED.format(
        library=kind,
        url=url,
        driver="sqlite3" if kind == "sqlite3" else "apsw",
        opened={
            "psycopg": f"psycopg.connect({url!r})",
            "sqlite3": f"sqlite3.connect({url.removeprefix('sqlite:///')!r})",
            "apsw": f"apsw.Connection({url.removeprefix('sqlite:///')!r})",
        }[kind],
        begin="connection.execute('BEGIN')" if kind == "apsw" else "",
    )
    with shop.app.worker():
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert shop.queued() == 0
        assert shop.send.enqueue(2).wait(30) == 2
    assert shop.queued() == 1
    shop.app.close()


# --- two SQLite libraries on one file -------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit hook is traced, and so measured, only if it says so."""
    monkeypatch.setattr(two_libraries._hook, "__cantrace__", True, raising=False)


def connect(target: Any) -> None:
    """Open something with the other library, whatever comes of it."""
    try:
        sqlite3.connect(target).close()
    except (TypeError, ValueError, sqlite3.Error):
        return


@pytest.mark.usefixtures("traced")
def test_a_file_that_is_not_there_yet_is_warned_of_by_its_path(tmp_path: Path) -> None:
    """The two libraries will meet on it as soon as it is made."""
    app = Onward(f"sqlite:///{tmp_path}/onward.db")
    connect(tmp_path / "other.db")
    with pytest.warns(RuntimeWarning, match=r"onward\.db is opened with sqlite3"):
        connect(bytes(tmp_path / "onward.db"))
    app.close()


@pytest.mark.usefixtures("file_shop", "traced")
@pytest.mark.parametrize(
    "target", ["", ":memory:", b"", "a\0b", 5, None, "file:", "/", "file://[x"]
)
def test_what_is_no_file_is_left_to_the_other_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any
) -> None:
    """Nobody is warned, and nothing is raised but what sqlite3 itself says."""
    monkeypatch.chdir(tmp_path)
    two_libraries._hook("sqlite3.connect", (target,))  # pyright: ignore[reportPrivateUsage]
    connect(target)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("form", ["path", "text", "uri", "link"])
def test_opening_the_file_with_the_other_library_is_warned_of_once(
    file_shop: Shop, tmp_path: Path, form: str
) -> None:
    path = tmp_path / "onward.db"
    (tmp_path / "link.db").symlink_to(path)
    target = {
        "path": path,
        "text": str(path),
        "uri": f"file:{path}?mode=ro",
        "link": tmp_path / "link.db",
    }[form]
    with pytest.warns(RuntimeWarning, match="sqlite_driver") as warned:
        sqlite3.connect(target, uri=form == "uri").close()
    assert warned[0].filename == __file__
    sqlite3.connect(target, uri=form == "uri").close()


def test_other_files_and_apps_on_sqlite3_are_nobodys_concern(
    file_shop: Shop, tmp_path: Path
) -> None:
    sqlite3.connect(tmp_path / "other.db").close()
    sqlite3.connect(":memory:").close()
    app = Onward(f"sqlite:///{tmp_path}/mine.db", sqlite_driver="sqlite3")
    app.counts()
    sqlite3.connect(tmp_path / "mine.db").close()
    app.close()


def test_a_closed_app_opens_nothing_so_nobody_is_warned(tmp_path: Path) -> None:
    app = Onward(f"sqlite:///{tmp_path}/onward.db")
    app.counts()
    app.close()
    sqlite3.connect(tmp_path / "onward.db").close()
