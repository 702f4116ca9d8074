"""Wake-ups on PostgreSQL: one enqueue tells an idle worker with its own commit, and of many at once
none waits for another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

from onward.errors import InvalidOption
from onward.job import NewJob
from onward.store import postgres as adapter
from onward.store import store
from onward.store.database import Database, Duplicate
from onward.store.postgres import PostgresDatabase
from onward.store.statements import psycopg_text
from onward.store.store import Wake
from onward.store.url import open_database
from tests.store.builders import new_job, register

Enqueue = Callable[[PostgresDatabase, list[NewJob]], None]


def enqueue(database: PostgresDatabase, jobs: list[NewJob]) -> None:
    database.enqueue(jobs)


def aenqueue(database: PostgresDatabase, jobs: list[NewJob]) -> None:
    async def main() -> None:
        try:
            await database.aenqueue(jobs)
        finally:
            await database.close_loop()

    asyncio.run(main())


@pytest.fixture(params=[enqueue, aenqueue])
def put(request: pytest.FixtureRequest) -> Enqueue:
    found: Enqueue = request.param
    return found


@pytest.fixture
def server(pg: Database) -> PostgresDatabase:
    assert isinstance(pg, PostgresDatabase)
    return pg


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The wake-ups that are sent apart from the write."""
    sent: list[str] = []
    compose = PostgresDatabase._notification

    def noted(self: PostgresDatabase, jobs: list[NewJob]) -> object:
        sent.append(self.channel)
        return compose(self, jobs)

    monkeypatch.setattr(PostgresDatabase, "_notification", noted)
    return sent


@contextmanager
def listening(database: PostgresDatabase) -> Iterator[Callable[[], list[str]]]:
    """Whoever is told, and what."""
    with psycopg.connect(database.url, autocommit=True) as link:
        link.execute(f'LISTEN "{database.channel}"'.encode())

        def heard() -> list[str]:
            link.execute("SELECT 1")  # What was sent before has come by then.
            return [hint.payload for hint in link.notifies(timeout=0)]

        yield heard


def test_one_job_wakes_an_idle_worker_with_its_own_commit(
    server: PostgresDatabase, put: Enqueue, apart: list[str]
) -> None:
    register(server)
    with listening(server) as heard:
        put(server, [new_job(queue="\"mail's", priority=-7)])
        assert heard() == ['["\\"mail\'s", -7]']
    assert apart == []


def test_several_jobs_wake_it_apart_from_their_commit(
    server: PostgresDatabase, put: Enqueue, apart: list[str]
) -> None:
    register(server)
    with listening(server) as heard:
        put(server, [new_job(priority=1), new_job(queue="mail", priority=2)])
        assert heard() == ['["mail",2]']
    assert apart == [server.channel]


def test_nobody_is_woken_where_nobody_waits(
    server: PostgresDatabase, put: Enqueue, apart: list[str]
) -> None:
    server.run(store.set_idle, register(server), False)
    with listening(server) as heard:
        put(server, [new_job()])
        assert heard() == []
    assert apart == []


def test_wake_ups_of_one_process_keep_a_distance(
    server: PostgresDatabase, put: Enqueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes sooner is found by the worker that has been woken. It is not told at all: neither
    with the commit nor apart.
    """
    monkeypatch.setattr(adapter, "NOTIFY_GAP", 3_600.0)
    register(server)
    with listening(server) as heard:
        put(server, [new_job()])
        put(server, [new_job()])
        put(server, [new_job(), new_job()])
        assert len(heard()) == 1
        monkeypatch.setattr(adapter, "NOTIFY_GAP", 0.0)
        put(server, [new_job()])
        assert len(heard()) == 1


def test_what_nobody_waited_for_spends_no_wake_up(
    server: PostgresDatabase, put: Enqueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that goes to sleep just then hears of the next enqueue."""
    monkeypatch.setattr(adapter, "NOTIFY_GAP", 3_600.0)
    worker = register(server)
    server.run(store.set_idle, worker, False)
    with listening(server) as heard:
        put(server, [new_job()])
        server.run(store.set_idle, worker, True)
        put(server, [new_job()])
        assert len(heard()) == 1


def test_an_enqueue_beside_one_that_notifies_does_not_wait_for_its_commit(
    server: PostgresDatabase, put: Enqueue, apart: list[str]
) -> None:
    """Here the other's commit never comes; the worker is told all the same, apart."""
    register(server)
    with psycopg.connect(server.url) as other, listening(server) as heard:
        job = new_job()
        text = psycopg_text("enqueue_one", server.schema)
        params = next(store.enqueue_one(job, wake=True)).params
        row = other.execute(text, params).fetchone()
        assert row is not None
        assert Wake(row[0]) is Wake.TOLD
        put(server, [new_job()])
        assert len(heard()) == 1
        other.rollback()
    assert apart == [server.channel]
    assert server.read(store.counts)["queued"] == 1


def test_wake_ups_apart_keep_a_greater_distance(
    server: PostgresDatabase,
    put: Enqueue,
    apart: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside many who enqueue at once each of them would send a transaction more for each job, and
    the one that notifies with its commit wakes the worker for all.
    """
    monkeypatch.setattr(adapter, "NOTIFY_GAP", 0.0)
    monkeypatch.setattr(adapter, "APART_GAP", 3_600.0)
    register(server)
    with psycopg.connect(server.url) as other:
        params = next(store.enqueue_one(new_job(), wake=True)).params
        other.execute(psycopg_text("enqueue_one", server.schema), params)
        for _ in range(3):
            put(server, [new_job()])
        assert len(apart) == 1
        put(server, [new_job(), new_job()])
        assert len(apart) == 2
        monkeypatch.setattr(adapter, "APART_GAP", 0.0)
        put(server, [new_job()])
        assert len(apart) == 3


def test_a_wake_up_that_the_server_has_no_room_for_costs_no_job(
    own_postgres: Database, put: Enqueue
) -> None:
    """Its queue of notifications is full: the commit fails, and is made again without."""
    assert isinstance(own_postgres, PostgresDatabase)
    register(own_postgres)
    with psycopg.connect(own_postgres.url, autocommit=True) as dba:
        row = dba.execute("SELECT pg_get_functiondef('onward.enqueue'::regproc)").fetchone()
        assert row is not None
        full = "RAISE EXCEPTION 'too many notifications' USING ERRCODE = '54000'"
        text = row[0].replace("PERFORM pg_notify(channel, json_build_array($3, $4)::text)", full)
        assert full in text
        dba.execute(text.encode())
    put(own_postgres, [new_job()])
    assert own_postgres.read(store.counts)["queued"] == 1
    double = new_job()
    put(own_postgres, [double])
    with pytest.raises(Duplicate):
        put(own_postgres, [double])
    assert own_postgres.read(store.counts)["queued"] == 2


@pytest.mark.parametrize("how", ["thread", "loop"])
@pytest.mark.parametrize(
    "text", ["BEGIN; SELECT 1 / 0; COMMIT", "SELECT pg_terminate_backend(pg_backend_pid())"]
)
def test_a_wake_up_that_fails_is_nobodys_error_and_its_connection_is_not_used_again(
    server: PostgresDatabase, how: str, monkeypatch: pytest.MonkeyPatch, text: LiteralString
) -> None:
    """The jobs are there and a poll finds them. What is left is no open transaction for the next
    to fall into.
    """
    failed: list[object] = []

    def failing(self: PostgresDatabase, jobs: list[NewJob]) -> sql.Composed:
        failed.append(self)
        return sql.SQL(text).format()

    async def main() -> object:
        try:
            await server.aenqueue([new_job(), new_job()])
            return server._side().idle.copy()
        finally:
            await server.close_loop()

    monkeypatch.setattr(PostgresDatabase, "_notification", failing)
    register(server)
    if how == "thread":
        server.enqueue([new_job(), new_job()])
    idle = asyncio.run(main()) if how == "loop" else server._idle
    assert (failed, idle) == ([server], [])
    assert server.read(store.counts)["queued"] == 2


def test_the_channel_is_that_of_the_schema(postgres_database: str, put: Enqueue) -> None:
    with closing(open_database(postgres_database, schema="Other_1")) as database:
        assert isinstance(database, PostgresDatabase)
        database.migrate()
        register(database)
        with listening(database) as heard:
            put(database, [new_job()])
            assert heard() == ['["default", 0]']


@pytest.mark.parametrize("schema", ["a" * 57, "ä" * 29])
def test_a_schema_whose_channel_has_no_name_is_refused(schema: str) -> None:
    """A NOTIFY cuts a name of more than 63 bytes, and pg_notify refuses it."""
    with pytest.raises(InvalidOption, match="cannot be used") as refused:
        open_database("postgresql://localhost/nowhere", schema=schema)
    assert "56 bytes" in str(refused.value.why)


def test_the_longest_schema_has_a_channel(postgres_database: str, put: Enqueue) -> None:
    with closing(open_database(postgres_database, schema="a" * 56)) as database:
        assert isinstance(database, PostgresDatabase)
        database.migrate()
        register(database)
        with listening(database) as heard:
            put(database, [new_job()])
            assert heard() == ['["default", 0]']
