"""PostgreSQL goes away, comes back, says no, or answers into a cut wire: what is told, and that
nothing is doubled.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest

from onward import Onward
from onward.app import requeue_change
from onward.errors import DatabaseError, DatabaseUnavailable, WaitTimeout
from onward.job import NewJob
from onward.lifecycle import JobState
from onward.store import postgres as adapter
from onward.store import postgres_link, postgres_wakeup, store
from onward.store.database import Database, Duplicate, Refused
from onward.store.portions import MOST_ROWS
from onward.store.postgres import PostgresDatabase
from onward.store.postgres_link import MOST_CONNECTIONS, lives, sever
from onward.store.statements import Op, Statement
from onward.store.url import open_database
from tests.crash.wire import Wire
from tests.store.builders import (
    LANE,
    START,
    TASK,
    Hand,
    apply,
    bury,
    claim,
    enqueue,
    get,
    hand,
    new_job,
    register,
    retry,
    running,
    state_of,
    succeed,
)
from tests.support import postgres
from tests.support.postgres import PrivatePostgres, StopMode
from tests.support.proxy import Proxy


@pytest.fixture
def rough(private_postgres: PrivatePostgres) -> Iterator[PostgresDatabase]:
    """A migrated database on a server that may be stopped."""
    private_postgres.start()
    url = postgres.create_database(private_postgres.url())
    with closing(open_database(url)) as database:
        database.migrate()
        assert isinstance(database, PostgresDatabase)
        yield database
    private_postgres.start()


@pytest.fixture
def proxy(wiped_postgres: str) -> Iterator[Proxy]:
    """A network in front of the shared server."""
    with closing(Proxy(wiped_postgres)) as proxy:
        yield proxy


@pytest.fixture
def behind(proxy: Proxy) -> Iterator[PostgresDatabase]:
    """The database through that network."""
    with closing(open_database(proxy.url)) as database:
        assert isinstance(database, PostgresDatabase)
        yield database


async def on_loop(database: Database, make: Callable[[], Any]) -> Any:
    try:
        return await make()
    finally:
        await database.aclose()


USES: dict[str, Callable[[Database], Any]] = {
    "enqueue": lambda db: db.enqueue([new_job()]),
    "a write": lambda db: db.run(store.beat, [], 1.0),
    "a read": lambda db: db.read(store.counts),
    "aenqueue": lambda db: asyncio.run(on_loop(db, lambda: db.aenqueue([new_job()]))),
    "an async write": lambda db: asyncio.run(on_loop(db, lambda: db.arun(store.beat, [], 1.0))),
    "migrate": lambda db: db.migrate(),
    "facts": lambda db: db.facts(),
}


def warm(database: PostgresDatabase, count: int = 4) -> None:
    """Have so many connections in the pool."""
    barrier = threading.Barrier(count)

    def wait() -> Op[None]:
        yield Statement("now", {}, alone=False)
        barrier.wait(10)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda _: database.run(wait), range(count)))


def sessions(url: str) -> int:
    """How many sessions our application has on this database."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = 'onward' AND datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def kill_sessions(url: str) -> None:
    """End our application's sessions on the server, and wait until they are gone."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'onward' AND datname = current_database()"
        )
    end = time.monotonic() + 5
    while sessions(url) and time.monotonic() < end:
        time.sleep(0.01)


# --- the server is away ---------------------------------------------------------------------------


def test_a_server_that_is_down_is_named_and_used_again_when_it_is_back(
    private_postgres: PrivatePostgres, rough: PostgresDatabase
) -> None:
    """Every way to ask says that the server cannot be reached; the same object goes on later."""
    ids = enqueue(rough, 3)
    private_postgres.stop()
    for use in USES.values():
        with pytest.raises(DatabaseUnavailable, match="cannot be reached") as caught:
            use(rough)
        assert "postgres" in caught.value.what
    private_postgres.start()
    for use in USES.values():
        use(rough)
    assert rough.read(store.counts)["queued"] == 5
    assert [job.id for job in claim(rough, register(rough))][:3] == ids


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_between_two_calls_is_not_noticed(
    private_postgres: PrivatePostgres, rough: PostgresDatabase, mode: StopMode
) -> None:
    """Pooled connections have died meanwhile: each is replaced by a fresh one, and no caller hears
    of it.
    """
    warm(rough)
    (first,) = enqueue(rough)
    private_postgres.restart(mode)
    assert state_of(rough, first) is JobState.QUEUED
    private_postgres.restart(mode)
    rough.enqueue([new_job()])
    private_postgres.restart(mode)
    assert len(claim(rough, register(rough))) == 2


def test_a_restart_between_two_calls_on_a_loop_is_not_noticed(
    private_postgres: PrivatePostgres, rough: PostgresDatabase
) -> None:
    """The same on a loop, where several tasks find dead connections at once."""

    async def main() -> int:
        await asyncio.gather(*(rough.arun(store.now) for _ in range(6)))
        await asyncio.to_thread(private_postgres.restart, "immediate")
        await asyncio.gather(*(rough.arun(store.now) for _ in range(6)))
        await rough.aenqueue([new_job()])
        await asyncio.to_thread(private_postgres.restart, "fast")
        await asyncio.gather(*(rough.aenqueue([new_job()]) for _ in range(6)))
        return (await rough.aread(store.counts))["queued"]

    assert asyncio.run(on_loop(rough, main)) == 7


def test_acknowledged_jobs_survive_a_crash_of_the_server(
    private_postgres: PrivatePostgres, rough: PostgresDatabase
) -> None:
    """Writers go on through a crash: whatever was acknowledged is there once, whatever failed at
    most once.
    """
    acknowledged: list[str] = []
    unknown: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            job = new_job()
            try:
                rough.enqueue([job])
                acknowledged.append(job.id)
            except DatabaseUnavailable:
                unknown.append(job.id)
                time.sleep(0.01)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for mode in ("immediate", "fast"):
        time.sleep(0.1)
        private_postgres.restart(mode)
    time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    rows = rough.read(
        store.read, "list", before=None, state=None, queue=None, task=None, limit=10**6
    )
    found = [row[0] for row in rows]
    assert len(found) == len(set(found))
    assert set(acknowledged) <= set(found) <= set(acknowledged) | set(unknown)
    assert acknowledged


# --- a session is ended ---------------------------------------------------------------------------


def test_sessions_that_were_ended_are_replaced(pg: Database) -> None:
    """A DBA ends idle sessions, a firewall forgets them: the next call opens another."""
    assert isinstance(pg, PostgresDatabase)
    warm(pg)
    for use in USES.values():
        kill_sessions(pg.url)
        use(pg)
    assert pg.read(store.counts)["queued"] == 2


def test_a_session_that_is_ended_in_the_middle_is_unavailable_or_repeated(pg: Database) -> None:
    """A statement waits for a lock and its session is ended: it is tried again, or the caller hears
    what happened.
    """
    assert isinstance(pg, PostgresDatabase)
    job = running(pg)
    with hand(pg) as dba, ThreadPoolExecutor(1) as pool:
        dba.sql("BEGIN")
        dba.sql("SELECT * FROM onward.job WHERE id = :id FOR UPDATE", id=job.id)
        waiting = pool.submit(apply, pg, succeed(job))
        wait_until(lambda: waits_for_a_lock(dba))
        kill_sessions_waiting(dba)
        dba.sql("ROLLBACK")
        try:
            assert waiting.result(10) == {job.id}
        except DatabaseUnavailable:
            apply(pg, succeed(job))
    assert state_of(pg, job.id) is JobState.SUCCEEDED


def waits_for_a_lock(dba: Hand) -> bool:
    return bool(
        dba.sql(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND datname = current_database() AND application_name = 'onward'"
        )
    )


def kill_sessions_waiting(dba: Hand) -> None:
    dba.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database() AND application_name = 'onward'"
    )


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def test_a_transaction_that_was_idle_too_long_is_unavailable_and_not_refused(
    pg: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped inside a transaction has lost its session: its data is not at
    fault.
    """
    limit = "SET LOCAL idle_in_transaction_session_timeout = '50ms'"
    replace_limit(monkeypatch, limit)
    job = new_job()

    def slow() -> Op[None]:
        yield Statement("enqueue", {"jobs": store.dumps([job])}, alone=False)
        time.sleep(0.3)
        yield Statement("now", {})

    for run in (
        lambda: pg.run(slow),
        lambda: asyncio.run(on_loop(pg, lambda: pg.arun(slow))),
    ):
        with pytest.raises(DatabaseUnavailable):
            run()
    assert pg.read(store.counts)["queued"] == 0


def replace_limit(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Set another limit wherever the adapter has its text."""
    for name in ("_LIMIT", "LIMIT"):
        if hasattr(adapter, name):
            monkeypatch.setattr(adapter, name, text)
            return
    raise AssertionError("the limit of an open transaction has another name now")


@pytest.mark.parametrize("stage", ["set_isolation_level", "execute"])
def test_a_connection_whose_making_was_cancelled_is_closed(
    pg: Database, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A caller that gives up while it is made leaves no session behind on the server."""
    assert isinstance(pg, PostgresDatabase)
    made: list[psycopg.AsyncConnection] = []

    async def cancelled(self: psycopg.AsyncConnection, *_: object, **__: object) -> None:
        made.append(self)
        raise asyncio.CancelledError

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.AsyncConnection, stage, cancelled)
            with pytest.raises(asyncio.CancelledError):
                await pg.arun(store.now)
        assert [one.closed for one in made] == [True]
        assert await pg.arun(store.now)

    asyncio.run(on_loop(pg, main))


def test_an_operation_that_is_not_alone_as_it_says_is_a_mistake_of_ours(pg: Database) -> None:
    """What follows would be another transaction: better an error than half of a move."""

    def two() -> Op[None]:
        yield Statement("now", {})
        yield Statement("enqueue", {"jobs": store.dumps([new_job()])})

    for run in (lambda: pg.run(two), lambda: asyncio.run(on_loop(pg, lambda: pg.arun(two)))):
        with pytest.raises(AssertionError, match="enqueue follows a statement that was to be al"):
            run()
    assert pg.read(store.counts)["queued"] == 0


# --- the server says no ---------------------------------------------------------------------------


def test_a_read_only_server_is_unavailable_and_not_a_refusal(own_postgres: Database) -> None:
    """After a failover the old address may lead to a standby: results are kept and tried again, not
    thrown away.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    job = running(own_postgres)
    set_default(own_postgres, "default_transaction_read_only", "on")
    for use in (
        lambda: own_postgres.enqueue([new_job()]),
        lambda: apply(own_postgres, succeed(job)),
    ):
        with pytest.raises(DatabaseUnavailable, match="read-only") as caught:
            use()
        assert not isinstance(caught.value, Refused)
    assert own_postgres.read(store.counts)["running"] == 1
    set_default(own_postgres, "default_transaction_read_only", "off")
    assert apply(own_postgres, succeed(job)) == {job.id}


def set_default(database: PostgresDatabase, name: str, value: str) -> None:
    """Change a setting for new sessions of this database, and end the old ones."""
    name_of = postgres.database_name(database.url)
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER DATABASE {name_of} SET {name} = '{value}'".encode())
    database.close()


def test_a_missing_privilege_is_unavailable_and_not_a_refusal(own_postgres: Database) -> None:
    """A DBA took a right away: that is no fault of the job, and is over as soon as it is given
    back.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    role = f"weak_{postgres.database_name(own_postgres.url)}"
    with psycopg.connect(own_postgres.url, autocommit=True) as dba:
        dba.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            url = own_postgres.url.replace("://postgres@", f"://{role}@")
            if role not in url:
                pytest.skip("the server's URL has another user")
            dba.execute(f"GRANT USAGE ON SCHEMA onward TO {role}".encode())
            dba.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA onward TO {role}".encode())
            with closing(open_database(url)) as weak:
                with pytest.raises(DatabaseUnavailable, match="permission denied") as caught:
                    weak.enqueue([new_job()])
                assert not isinstance(caught.value, Refused)
                dba.execute(f"GRANT INSERT ON onward.job TO {role}".encode())
                weak.enqueue([new_job()])
        finally:
            dba.execute(f"DROP OWNED BY {role}".encode())
            dba.execute(f"DROP ROLE {role}".encode())


def test_a_name_that_no_index_can_hold_is_refused(pg: Database) -> None:
    """It can never be written, so it is the row that is refused, and its neighbours are written."""
    with pytest.raises(Refused):
        pg.enqueue([new_job(), new_job(queue=random_text(20_000))])
    with ThreadPoolExecutor(6) as pool:
        calls = [[new_job()] for _ in range(5)] + [[new_job(task=random_text(20_000))]]
        futures = [pool.submit(pg.enqueue, call) for call in calls]
        errors = [future.exception(10) for future in futures]
    assert [type(error) for error in errors] == [type(None)] * 5 + [Refused]


def random_text(size: int) -> str:
    """Text that does not compress."""
    import random

    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=size))


# --- isolation, serialization, deadlocks ----------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_default_isolation_changes_nothing(own_postgres: Database, level: str) -> None:
    """Each operation asks for READ COMMITTED by itself, so that what was committed meanwhile is
    seen.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    set_default(own_postgres, "default_transaction_isolation", level)
    workers = [register(own_postgres) for _ in range(4)]
    ids = enqueue(own_postgres, 60)

    def work(worker: str) -> list[str]:
        done: list[str] = []
        while jobs := claim(own_postgres, worker, 3):
            done += apply(own_postgres, *(succeed(job) for job in jobs))
        return done

    with ThreadPoolExecutor(4) as pool:
        done = [id_ for mine in pool.map(work, workers) for id_ in mine]
    assert sorted(done) == sorted(ids)
    again = new_job(id=ids[0])
    assert own_postgres.run(store.enqueue_again, [again]) == set()
    with pytest.raises(Duplicate):
        enqueue(own_postgres, 2, id=new_job().id)
    asyncio.run(on_loop(own_postgres, lambda: own_postgres.aenqueue([new_job()])))
    assert own_postgres.read(store.counts)["queued"] == 1


def test_a_deadlock_is_repeated_until_both_have_written(own_postgres: Database) -> None:
    """Two operations take two rows in opposite order: the server ends one, and it is simply run
    again.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    set_default(own_postgres, "deadlock_timeout", "20ms")
    first, second = enqueue(own_postgres, 2)
    barrier = threading.Barrier(2)
    tries: list[str] = []

    def both(one: str, other: str) -> Op[None]:
        tries.append(one)
        yield Statement("hold", {"id": one, "attempt": 1, "seconds": 60.0}, alone=False)
        if len(tries) <= 2:
            barrier.wait(10)
        yield Statement("hold", {"id": other, "attempt": 1, "seconds": 60.0})

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(own_postgres.run, both, first, second)
        other = pool.submit(own_postgres.run, both, second, first)
        one.result(20)
        other.result(20)
    assert len(tries) > 2
    assert sessions(own_postgres.url) <= 2


CONFLICTS = """
CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('conflicts') <= :count THEN
        RAISE EXCEPTION 'could not serialize access' USING ERRCODE = ':code';
    END IF;
    RETURN now();
END $$
"""


def conflicting(database: PostgresDatabase, code: str, count: int) -> None:
    """Let the next so many statements that ask for the time fail with an error that asks to be
    repeated.
    """
    with hand(database) as dba:
        dba.sql("DROP SEQUENCE IF EXISTS conflicts")
        dba.sql("CREATE SEQUENCE conflicts")
        dba.connection.execute(CONFLICTS.replace(":count", str(count)).replace(":code", code))


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_statement_that_asks_to_be_repeated_is_repeated(
    own_postgres: Database, code: str
) -> None:
    """Several times over, from threads and on a loop, on the connections that are there: none is
    added or lost.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    enqueue(own_postgres)
    worker = register(own_postgres)
    uses: list[Callable[[], Any]] = [
        lambda: own_postgres.enqueue([new_job()]),
        lambda: own_postgres.run(store.enqueue, [new_job()]),
        lambda: own_postgres.run(store.claim, worker, store.dumps([TASK]), LANE, START, 1),
    ]
    for use in uses:
        conflicting(own_postgres, code, 7)
        use()
        assert sessions(own_postgres.url) == 1
    conflicting(own_postgres, code, 7)

    async def main() -> int:
        await own_postgres.aenqueue([new_job()])
        await own_postgres.arun(store.enqueue, [new_job()])
        return await asyncio.to_thread(sessions, own_postgres.url)

    assert asyncio.run(on_loop(own_postgres, main)) == 2
    counts = own_postgres.read(store.counts)
    assert (counts["queued"], counts["running"]) == (4, 1)


def test_a_statement_that_asks_for_ever_is_given_up(
    own_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After many tries the caller hears that the database cannot do it, in our own words."""
    assert isinstance(own_postgres, PostgresDatabase)
    enqueue(own_postgres)
    monkeypatch.setattr(adapter, "REPEATS", 5)
    conflicting(own_postgres, "40001", 10**6)
    for use in (
        lambda: own_postgres.enqueue([new_job()]),
        lambda: own_postgres.run(store.enqueue, [new_job()]),
        lambda: asyncio.run(on_loop(own_postgres, lambda: own_postgres.aenqueue([new_job()]))),
    ):
        with pytest.raises(DatabaseUnavailable, match="asked 5 times to repeat"):
            use()


def test_statements_that_are_cancelled_leave_no_connections_behind(own_postgres: Database) -> None:
    """A statement time-out is an error of that statement; its connection is as good as before."""
    assert isinstance(own_postgres, PostgresDatabase)
    (id_,) = enqueue(own_postgres)
    set_default(own_postgres, "statement_timeout", "30ms")
    with hand(own_postgres) as dba:
        dba.sql("BEGIN")
        dba.sql("SELECT * FROM onward.job WHERE id = :id FOR UPDATE", id=id_)
        for _ in range(5):
            with pytest.raises(DatabaseUnavailable, match="timeout"):
                own_postgres.run(store.hold, id_, 1, 60.0)
            assert sessions(own_postgres.url) == 1
        dba.sql("ROLLBACK")
    assert own_postgres.run(store.hold, id_, 1, 60.0)


def test_a_wait_for_a_transaction_that_does_not_end_has_an_end(
    own_postgres: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the caller's own, which ends only after us. The error does not say that the server
    is down.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    limit = postgres_link.LIMIT.replace(b"'10s'", b"'0.2s'")
    assert limit != postgres_link.LIMIT
    monkeypatch.setattr(adapter, "LIMIT", limit)
    app = Onward(own_postgres.url)
    send = app.task(lambda n: None, name="send")
    key = uuid.uuid4()

    async def on_loop() -> None:
        try:
            await send.using(id=key).aenqueue(1)
        finally:
            await app.database.close_loop()

    with psycopg.connect(own_postgres.url) as mine:
        send.using(id=key, connection=mine).enqueue(1)
        for again in (lambda: send.using(id=key).enqueue(1), lambda: asyncio.run(on_loop())):
            with pytest.raises(DatabaseUnavailable, match="in vain for a lock") as waited:
                again()
            assert "one of yours" in waited.value.why
            assert "pg_locks" in waited.value.fix
        mine.rollback()
    send.using(id=key).enqueue(1)
    app.close()


def test_a_cancelled_statement_is_not_told_as_an_outage(own_postgres: Database) -> None:
    assert isinstance(own_postgres, PostgresDatabase)
    set_default(own_postgres, "statement_timeout", "1ms")
    many = [new_job() for _ in range(5_000)]
    with pytest.raises(DatabaseUnavailable, match="cancelled a statement") as cancelled:
        own_postgres.run(store.enqueue, many)
    assert "statement_timeout" in cancelled.value.why


@pytest.mark.parametrize("call", ["enqueue", "wait"])
def test_a_thread_does_not_wait_for_ever_for_an_answer(
    wiped_postgres: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The wire swallows what is said and nobody hangs up. The enqueue is repeated on another
    connection, and makes one job.
    """
    monkeypatch.setattr(adapter, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(postgres_link, "LOOK_SECONDS", 0.1)
    with Wire(urlsplit(wiped_postgres).port or 5432) as wire:
        app = Onward(wire.url(wiped_postgres))
        send = app.task(lambda n: None, name="send")
        job = send.enqueue(1)
        assert wire.deafen()
        began = time.monotonic()
        if call == "enqueue":
            send.enqueue(2)
        else:
            with pytest.raises(WaitTimeout):
                job.wait(0.5)
        assert time.monotonic() - began < 8
        assert app.counts()["queued"] == 1 + (call == "enqueue")
        app.close()


def test_an_enqueue_in_the_middle_of_being_watched_waits_for_nobody() -> None:
    """A signal handler or a destructor may come at any moment of the very thread's enqueue."""
    watch, connection = postgres_link.Watch(), cast(psycopg.Connection, object())

    def interrupted() -> None:
        with watch._lock, watch.over(connection, 60.0) as watched:
            watched.again()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_whoever_looks_after_waiting_threads_ends_when_nobody_waits(
    pg: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_link, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(postgres_link, "QUIET_LOOKS", 3)

    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "onward-watch"]

    wait_until(lambda: not watching())
    for _ in range(2):
        pg.enqueue([new_job()])
        assert watching()
        wait_until(lambda: not watching())


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_texts_are_texts_whatever_the_encoding_of_the_database(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """What the database cannot carry is refused where it is enqueued."""
    monkeypatch.setenv("PGCLIENTENCODING", "latin1")
    name = f"onward_{encoding.lower()}_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_url, autocommit=True) as dba:
        dba.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
            " TEMPLATE template0".encode()
        )
        try:
            with closing(Onward(postgres.database_url(postgres_url, name))) as app:
                app.database.migrate()
                echo = app.task(lambda text: text, name="echo")
                with app.worker():
                    assert echo.enqueue("é").wait(10) == "é"
                    if encoding == "SQL_ASCII":
                        assert echo.using(queue="→").enqueue("→").queue == "→"
                    else:
                        with pytest.raises(DatabaseError, match="no equivalent in encoding"):
                            echo.enqueue("→")
        finally:
            dba.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_many_threads_share_few_connections(pg: Database) -> None:
    """Whoever finds none free waits for one, so that a server is not flooded."""
    assert isinstance(pg, PostgresDatabase)
    wait_until(lambda: sessions(pg.url) == 0)  # Those of the test before may still be ending.
    most: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            most.append(sessions(pg.url))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda _: pg.run(store.now), range(600)))
    done.set()
    watcher.join(10)
    assert max(most) <= MOST_CONNECTIONS
    assert len(pg._idle) <= MOST_CONNECTIONS


# --- an answer is lost ----------------------------------------------------------------------------


@pytest.fixture(params=["read committed", "serializable"])
def level(request: pytest.FixtureRequest, wiped_postgres: str) -> Iterator[str]:
    """With the usual isolation a write is one statement, with a stricter one a transaction."""
    name = postgres.database_name(wiped_postgres)
    with psycopg.connect(wiped_postgres, autocommit=True) as dba:
        dba.execute(
            f"ALTER DATABASE {name} SET default_transaction_isolation = '{request.param}'".encode()
        )
        yield request.param
        dba.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation".encode())


FIRST_TRY = b"onward.enqueue("
"""How one job is written, the first time."""

COMMIT = b"COMMIT\0"
"""As it is sent, and not as part of READ COMMITTED."""


def enqueue_on(database: PostgresDatabase, how: str, jobs: list[NewJob]) -> None:
    if how == "thread":
        database.enqueue(jobs)
    else:
        asyncio.run(on_loop(database, lambda: database.aenqueue(jobs)))


@pytest.mark.parametrize("how", ["thread", "loop"])
@pytest.mark.parametrize("warmed", [False, True], ids=["fresh", "pooled"])
@pytest.mark.parametrize("lost", ["the answer", "the request"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_enqueue_whose_answer_is_lost_makes_exactly_one_job(
    proxy: Proxy,
    behind: PostgresDatabase,
    level: str,
    how: str,
    warmed: bool,
    lost: str,
    count: int,
) -> None:
    """The connection is cut after the commit, or before the statement: the repeat meets itself, or
    is the first.
    """
    if warmed:
        behind.read(store.now)
    decisive = FIRST_TRY if count == 1 else b"INSERT INTO onward.job"
    decisive = decisive if level == "read committed" else COMMIT
    arm = proxy.lose_answer if lost == "the answer" else proxy.lose_request
    arm(decisive)
    jobs = [new_job() for _ in range(count)]
    enqueue_on(behind, how, jobs)
    assert proxy.lost
    assert behind.read(store.counts)["queued"] == count
    assert {state_of(behind, job.id) for job in jobs} == {JobState.QUEUED}


@pytest.mark.parametrize("how", ["thread", "loop"])
def test_an_enqueue_whose_repeat_is_lost_too_says_that_nothing_is_known(
    proxy: Proxy, behind: PostgresDatabase, how: str
) -> None:
    """Then the caller may try again with the same id, and there is still one job."""
    behind.read(store.now)
    for request in (FIRST_TRY, b"INSERT INTO onward.job"):
        proxy.lose_answer(request, times=4)
    job = new_job()
    with pytest.raises(DatabaseUnavailable):
        enqueue_on(behind, how, [job])
    proxy._faults.clear()
    assert behind.run(store.enqueue_again, [job]) == set()
    assert behind.read(store.counts)["queued"] == 1


@pytest.mark.parametrize("how", ["thread", "loop"])
def test_a_decision_whose_commit_finds_no_answer_is_not_made_again(
    proxy: Proxy, behind: PostgresDatabase, how: str
) -> None:
    """It would meet its own doing, and call what took an illegal move."""
    job = running(behind)
    apply(behind, bury(job))
    behind.read(store.now)
    proxy.lose_answer(COMMIT)

    def requeue() -> None:
        if how == "thread":
            behind.run(store.move, job.id, requeue_change)
        else:
            asyncio.run(on_loop(behind, lambda: behind.arun(store.move, job.id, requeue_change)))

    with pytest.raises(DatabaseUnavailable, match="COMMIT"):
        requeue()
    assert proxy.lost
    assert (get(behind, job.id).state, get(behind, job.id).attempt) == (JobState.QUEUED, 2)


@pytest.mark.parametrize("how", ["thread", "loop"])
def test_many_at_once_whose_commit_finds_no_answer_are_written_once(
    proxy: Proxy, behind: PostgresDatabase, how: str
) -> None:
    """They bear their ids, so the repeat meets its own rows."""
    app = Onward(behind.url)

    @app.task
    def nothing(number: int) -> None: ...

    calls = [nothing.call(number) for number in range(MOST_ROWS + 1)]
    app.database.read(store.now)
    proxy.lose_answer(COMMIT)

    async def many() -> None:
        try:
            await app.aenqueue_many(calls)
        finally:
            await app.aclose()

    if how == "thread":
        app.enqueue_many(calls)
    else:
        asyncio.run(many())
    assert proxy.lost
    assert app.counts()["queued"] == MOST_ROWS + 1
    app.close()


def test_callers_that_shared_a_lost_commit_each_have_their_job(
    proxy: Proxy, behind: PostgresDatabase
) -> None:
    """The repeat is for all of them; only the one whose id was taken hears an error."""
    (there,) = enqueue(behind)
    calls = [[new_job()] for _ in range(10)]
    calls[4] = [new_job(id=there, task="other")]
    with hand(behind) as dba, ThreadPoolExecutor(10) as pool:
        dba.sql("BEGIN")
        dba.sql("LOCK TABLE onward.job IN EXCLUSIVE MODE")
        futures = [pool.submit(behind.enqueue, call) for call in calls]
        time.sleep(0.1)
        proxy.lose_answer(b"INSERT INTO onward.job")
        dba.sql("COMMIT")
        errors = [future.exception(20) for future in futures]
    assert [n for n, error in enumerate(errors) if error is not None] == [4]
    assert behind.read(store.counts)["queued"] == 10


def test_a_finish_whose_answer_is_lost_is_recognised(
    proxy: Proxy, behind: PostgresDatabase
) -> None:
    """The change took and nobody heard: the repeat takes nothing, and a look knows it for ours."""
    job = running(behind)
    for change in (retry(job),):
        proxy.lose_answer(b"INSERT INTO onward.attempt")
        taken = apply(behind, change)
        assert proxy.lost
        assert taken == set()
        found, ours = behind.run(store.look, change)
        assert ours
        assert found is not None
        assert found.state is JobState.QUEUED
    (job,) = claim(behind, register(behind))
    proxy.lose_answer(b"onward.finish(")
    assert apply(behind, succeed(job)) == set()
    assert behind.run(store.look, succeed(job))[1]
    assert len(behind.read(store.attempts, job.id)) == 2


def test_follow_ups_of_a_finish_whose_answer_is_lost_are_written_once(
    proxy: Proxy, behind: PostgresDatabase
) -> None:
    """Job and children were one transaction: a repeat finds the job over and writes no child again,
    and a look tells that it took.
    """
    job, child = running(behind), new_job()
    change = succeed(job, follow_ups=(child,))
    proxy.lose_answer(COMMIT)
    with pytest.raises(DatabaseUnavailable):
        apply(behind, change)
    assert apply(behind, change) == set()
    assert behind.run(store.look, change)[1]
    counts = behind.read(store.counts)
    assert (counts["succeeded"], counts["queued"]) == (1, 1)


def test_a_claim_whose_answer_is_lost_is_found_by_asking_what_is_owned(
    proxy: Proxy, behind: PostgresDatabase
) -> None:
    """What the database says that a worker owns, and it does not hold, it runs or releases: nothing
    sits for ever.
    """
    worker = register(behind)
    ids = enqueue(behind, 4)
    proxy.lose_answer(b"onward.claim(")
    held = claim(behind, worker, 2)
    owned = behind.read(store.owned, worker)
    assert {job.id for job in owned} == set(ids)
    assert {job.id for job in held} == set(ids[2:])


def test_a_cut_network_is_told_and_heals(proxy: Proxy, behind: PostgresDatabase) -> None:
    """While every connection is refused each call says so; afterwards everything goes on."""
    warm(behind, 3)
    proxy.refusing = True
    proxy.cut()
    for use in USES.values():
        with pytest.raises(DatabaseUnavailable):
            use(behind)
    proxy.refusing = False
    for use in USES.values():
        use(behind)
    assert behind.read(store.counts)["queued"] == 2


# --- hints ----------------------------------------------------------------------------------------


def test_an_idle_worker_is_woken_and_a_busy_one_is_not(pg: Database) -> None:
    """The hint goes out with an enqueue only while somebody waits for it."""

    async def main() -> list[bool]:
        wakeup = await pg.wakeup()
        worker = register(pg)
        heard = [await wakeup.wait(0.05)]  # It has just begun to listen: look once.
        heard.append(await wakeup.wait(0.05))
        await pg.aenqueue([new_job()])
        heard.append(await wakeup.wait(2))
        await pg.arun(store.set_idle, worker, False)
        await asyncio.sleep(0.02)
        await pg.aenqueue([new_job()])
        heard.append(await wakeup.wait(0.1))
        await asyncio.to_thread(pg.run, store.set_idle, worker, True)
        await asyncio.to_thread(pg.enqueue, [new_job()])
        heard.append(await wakeup.wait(2))
        await wakeup.close()
        await pg.aclose()
        return heard

    assert asyncio.run(main()) == [True, False, True, False, True]


def test_a_hint_names_the_lane_of_what_comes_first(pg: Database) -> None:
    """Of several jobs that of the highest priority. A foreign notification names none."""
    assert isinstance(pg, PostgresDatabase)
    url, channel = pg.url, pg.channel

    def foreign(payload: str) -> None:
        with psycopg.connect(url, autocommit=True) as dba:
            dba.execute("SELECT pg_notify(%s, %s)", [channel, payload])

    async def main() -> list[tuple[str, int] | None]:
        wakeup = await pg.wakeup()
        register(pg)
        await wakeup.wait(0.05)
        lanes: list[tuple[str, int] | None] = []
        low, high = new_job(priority=1), new_job(queue="mail's", priority=7)
        await pg.aenqueue([low, high])
        assert await wakeup.wait(2)
        lanes.append(wakeup.lane)
        for payload in ("", "hello", '["default"]', '{"default": 1}'):
            await asyncio.to_thread(foreign, payload)
            assert await wakeup.wait(2)
            lanes.append(wakeup.lane)
        await wakeup.close()
        await pg.aclose()
        return lanes

    assert asyncio.run(main()) == [("mail's", 7), None, None, None, None]


def test_a_listener_whose_session_was_ended_listens_again(pg: Database) -> None:
    """What may have been missed meanwhile counts as a hint, and the next one is heard."""
    assert isinstance(pg, PostgresDatabase)

    async def main() -> tuple[bool, bool, bool]:
        wakeup = await pg.wakeup()
        await wakeup.wait(0.05)
        await asyncio.to_thread(kill_sessions, pg.url)
        lost = await wakeup.wait(0.05)
        again = await wakeup.wait(2)
        register(pg)
        await pg.aenqueue([new_job()])
        heard = await wakeup.wait(2)
        await wakeup.close()
        await pg.aclose()
        return lost, again, heard

    assert asyncio.run(main()) == (False, True, True)


def test_a_listener_whose_line_has_died_in_silence_listens_again(
    pg: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes, and nothing says why: asked whether it lives, the connection does not
    answer.
    """
    assert isinstance(pg, PostgresDatabase)

    async def dead(connection: psycopg.AsyncConnection) -> bool:
        sever(connection)
        return await lives(connection)

    async def main() -> list[bool]:
        wakeup = await pg.wakeup()
        register(pg)
        heard = [await wakeup.wait(0.05)]
        with monkeypatch.context() as patch:
            patch.setattr(postgres_wakeup, "lives", dead)
            heard.append(await wakeup.wait(0.01))
        heard.append(await wakeup.wait(2))
        await pg.aenqueue([new_job()])
        heard.append(await wakeup.wait(2))
        await wakeup.close()
        await pg.aclose()
        return heard

    assert asyncio.run(main()) == [True, False, True, True]


def test_a_listener_survives_a_server_that_is_down(
    private_postgres: PrivatePostgres, rough: PostgresDatabase
) -> None:
    """It neither raises nor spins: it says that nothing was heard, and listens when the server is
    back.
    """

    async def main() -> list[bool]:
        wakeup = await rough.wakeup()
        answers = [await wakeup.wait(0.05)]
        await asyncio.to_thread(private_postgres.stop)
        answers += [await wakeup.wait(0.05), await wakeup.wait(0.05)]
        await asyncio.to_thread(private_postgres.start)
        answers.append(await wakeup.wait(2))
        await wakeup.close()
        return answers

    assert asyncio.run(main()) == [True, False, False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda url: url + "_nowhere", "has no database of that name"),
        (lambda url: url.replace("://postgres@", "://nobody_here@"), "does not let this user in"),
    ],
    ids=["database", "user"],
)
def test_a_server_that_answers_is_not_called_down(
    pg: Database, change: Callable[[str], str], why: str
) -> None:
    """What it says about a wrong name is told as what it is."""
    assert isinstance(pg, PostgresDatabase)
    url = change(pg.url)
    assert url != pg.url
    with closing(open_database(url)) as wrong, pytest.raises(DatabaseUnavailable) as caught:
        wrong.read(store.now)
    assert why in caught.value.why
