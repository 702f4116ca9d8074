"""The schema: made on first use on SQLite, only when asked on PostgreSQL, once however many ask,
and never half.
"""

from __future__ import annotations

import asyncio
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from onward.errors import DatabaseError, InvalidOption, SchemaMissing
from onward.store import migrate, store
from onward.store.database import Database
from onward.store.migrate import Migration, migrations
from onward.store.postgres import PostgresDatabase
from onward.store.url import open_database
from tests.store.builders import (
    another,
    claim,
    enqueue,
    hand,
    new_job,
    opened,
    register,
)
from tests.store.forks import at_once


@pytest.fixture(params=["apsw", "sqlite3"])
def fresh_sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A SQLite database that does not exist yet."""
    url = f"sqlite:///{tmp_path}/onward.db"
    with closing(open_database(url, sqlite_driver=request.param)) as database:
        yield database


@pytest.fixture
def fresh_postgres(postgres_database: str) -> Iterator[Database]:
    """A PostgreSQL database that was never migrated."""
    with closing(open_database(postgres_database)) as database:
        yield database


@pytest.fixture(params=["sqlite", "postgres"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind."""
    url = f"sqlite:///{tmp_path}/onward.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_database")
    with closing(open_database(url)) as database:
        yield database


# --- SQLite: on first use -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda database: database.enqueue([new_job()]),
        lambda database: database.run(store.now),
        lambda database: database.read(store.counts),
        lambda database: database.facts(),
    ],
    ids=["an enqueue", "a write", "a read", "a look at its settings"],
)
def test_a_sqlite_file_is_made_and_migrated_on_first_use(
    fresh_sqlite: Database, tmp_path: Path, use: Callable[[Database], Any]
) -> None:
    """No command is needed to begin; what it holds is for its owner's eyes only."""
    path = tmp_path / "onward.db"
    assert not path.exists()
    assert fresh_sqlite.schema_version() == 0
    assert not path.exists()
    use(fresh_sqlite)
    assert fresh_sqlite.schema_version() == migrations("sqlite")[-1].version
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_file_that_was_there_keeps_its_permissions(
    fresh_sqlite: Database, tmp_path: Path
) -> None:
    """Whoever made the file for a group of users meant it."""
    path = tmp_path / "onward.db"
    path.touch()
    path.chmod(0o660)
    fresh_sqlite.enqueue([new_job()])
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize("round_", range(4))
def test_processes_that_use_a_new_file_at_the_same_moment_all_succeed(
    fresh_sqlite: Database, round_: int
) -> None:
    """One of them makes the tables, the others wait for it: nobody is told that the file is
    locked.
    """

    def use() -> None:
        with opened(fresh_sqlite) as database:
            enqueue(database)

    at_once([use] * 5)
    assert fresh_sqlite.read(store.counts)["queued"] == 5
    with hand(fresh_sqlite) as dba:
        assert len(dba.sql("SELECT version FROM onward.migration")) == len(migrations("sqlite"))


def test_a_file_that_another_process_is_just_making_is_waited_for(
    fresh_sqlite: Database, tmp_path: Path
) -> None:
    """SQLite does not wait by itself while it changes the journal mode, so that has to be tried
    again.
    """
    path = tmp_path / "onward.db"
    path.touch()
    with hand(fresh_sqlite) as dba, ThreadPoolExecutor(1) as pool:
        dba.sql("BEGIN IMMEDIATE")
        use = pool.submit(fresh_sqlite.enqueue, [new_job()])
        time.sleep(0.3)
        assert not use.done()
        dba.sql("COMMIT")
        use.result(10)
    assert fresh_sqlite.read(store.counts)["queued"] == 1


def test_both_libraries_make_the_same_schema(tmp_path: Path) -> None:
    """A migration is cut into its statements by one and run whole by the other: the result is
    one.
    """
    schemas: list[list[tuple[Any, ...]]] = []
    for driver in ("apsw", "sqlite3"):
        url = f"sqlite:///{tmp_path}/{driver}.db"
        with closing(open_database(url, sqlite_driver=driver)) as database:
            database.migrate()
            with hand(database) as dba:
                schemas.append(dba.sql("SELECT type, name, sql FROM sqlite_schema ORDER BY name"))
    assert schemas[0] == schemas[1]
    assert len(schemas[0]) > 20


# --- PostgreSQL: only when asked ------------------------------------------------------------------


def test_postgres_without_a_schema_names_the_command(fresh_postgres: Database) -> None:
    """Nothing is created behind a DBA's back; the error says what to type, without the password."""

    async def in_async() -> None:
        try:
            await fresh_postgres.aenqueue([new_job()])
        finally:
            await fresh_postgres.aclose()

    uses: list[Callable[[], Any]] = [
        lambda: fresh_postgres.enqueue([new_job()]),
        lambda: fresh_postgres.run(store.now),
        lambda: fresh_postgres.read(store.counts),
        lambda: asyncio.run(in_async()),
    ]
    for use in uses:
        with pytest.raises(SchemaMissing, match="has no Onward schema named onward\n") as caught:
            use()
        assert caught.value.fix == f"onward db init --database {fresh_postgres.shown_url}"
    assert fresh_postgres.schema_version() == 0
    fresh_postgres.migrate()
    for use in uses:
        use()


def test_a_password_is_in_no_message(postgres_database: str) -> None:
    """The URL in errors and commands is the one to show."""
    secret = postgres_database.replace("//postgres@", "//postgres:s3cret@")
    assert "s3cret" in secret or "postgres@" not in postgres_database
    with closing(open_database(secret + "?password=s3cret")) as database:
        with pytest.raises(SchemaMissing) as caught:
            database.run(store.now)
        assert "s3cret" not in str(caught.value)
        assert "s3cret" not in database.shown_url


def test_a_schema_that_vanishes_under_a_running_app_is_named(own_postgres: Database) -> None:
    """A DBA drops the tables: the error is about the schema, and after `init` the app goes on."""
    enqueue(own_postgres)
    with hand(own_postgres) as dba:
        dba.sql("DROP SCHEMA onward CASCADE")
    for _ in range(2):
        with pytest.raises(SchemaMissing, match="has no Onward schema"):
            enqueue(own_postgres)
    with opened(own_postgres) as other:
        other.migrate()
    enqueue(own_postgres)


def test_two_schemas_live_side_by_side_in_one_database(own_postgres: Database) -> None:
    """Two apps, one server: neither sees the other's jobs, workers or migrations."""
    assert isinstance(own_postgres, PostgresDatabase)
    with closing(open_database(own_postgres.url, schema="Second_app")) as second:
        with pytest.raises(SchemaMissing):
            enqueue(second)
        assert second.migrate() == [f"{m.version:04}_{m.name}" for m in migrations("postgres")]
        (mine,), (theirs,) = enqueue(own_postgres), enqueue(second)
        assert [job.id for job in claim(second, register(second))] == [theirs]
        assert [job.id for job in claim(own_postgres, register(own_postgres))] == [mine]
        with psycopg.connect(own_postgres.url, autocommit=True) as dba:
            with pytest.raises(psycopg.errors.CheckViolation, match="job refuses"):
                dba.execute('UPDATE "Second_app".job SET attempt = 7')
            dba.execute("DROP SCHEMA onward CASCADE")
        assert second.read(store.counts)["running"] == 1


@pytest.mark.parametrize("schema", ["", "a b", 'a"b', "a;b", "a-b", "1a", "x" * 61])
def test_a_schema_name_that_could_be_anything_else_is_refused(schema: str) -> None:
    """It stands in every statement, so it is a plain name or nothing."""
    with pytest.raises(InvalidOption, match="schema"):
        open_database("postgresql://localhost/none", schema=schema)


# --- either ---------------------------------------------------------------------------------------


def test_migrating_again_does_nothing(fresh: Database) -> None:
    """Who runs it with every deploy loses nothing and changes nothing."""
    names = [f"{m.version:04}_{m.name}" for m in migrations(fresh.dialect)]
    assert fresh.schema_version() == 0
    assert fresh.migrate() == names
    (id_,) = enqueue(fresh)
    for database in (fresh, another(fresh)):
        with closing(database):
            assert database.migrate() == []
            assert database.schema_version() == migrations(fresh.dialect)[-1].version
    assert fresh.read(store.get, id_).id == id_


def test_many_who_migrate_at_once_apply_each_migration_once(fresh: Database) -> None:
    """Every machine of a deploy may run it: one does the work, and all of them return when it is
    done.
    """
    with ExitStack() as stack:
        databases = [stack.enter_context(opened(fresh)) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            applied = list(pool.map(lambda database: database.migrate(), databases))
        assert sorted(map(len, applied)) == [0] * 5 + [len(migrations(fresh.dialect))]
        for database in databases:
            enqueue(database)
    assert fresh.read(store.counts)["queued"] == 6


def with_second(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """As if this version of Onward brought one more migration."""
    real = migrations

    def more(dialect: str) -> tuple[Migration, ...]:
        return (*real(dialect), Migration(9001, "more", text))

    monkeypatch.setattr(migrate, "migrations", more)


SECOND = (
    "CREATE TABLE onward{dot}more (id integer PRIMARY KEY);\n"
    "INSERT INTO onward{dot}more VALUES (1);\n"
)


def second_for(database: Database) -> str:
    return SECOND.format(dot="_" if database.dialect == "sqlite" else ".")


def test_an_older_schema_gets_what_it_lacks(
    fresh: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the migrations that are missing are applied: by use on SQLite, by command on
    PostgreSQL.
    """
    fresh.migrate()
    (id_,) = enqueue(fresh)
    with_second(monkeypatch, second_for(fresh))
    with opened(fresh) as newer:
        if fresh.dialect == "postgres":
            with pytest.raises(SchemaMissing, match="this version needs 9001") as caught:
                enqueue(newer)
            assert caught.value.fix == f"onward db migrate --database {fresh.shown_url}"
            assert newer.migrate() == ["9001_more"]
        assert newer.read(store.get, id_).id == id_
        assert newer.schema_version() == 9001
    with hand(fresh) as dba:
        assert dba.sql("SELECT id FROM onward.more") == [(1,)]


def test_a_migration_that_fails_leaves_the_schema_as_it_was(
    fresh: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a migration is applied, or none: nobody has to clean up after half of one."""
    fresh.migrate()
    with_second(monkeypatch, second_for(fresh) + "CREATE TABLE oh no;\n")
    with opened(fresh) as newer:
        with pytest.raises(DatabaseError):
            newer.migrate()
        assert newer.schema_version() == migrations(fresh.dialect)[-1].version
    with hand(fresh) as dba:
        catalog = {
            "sqlite": "SELECT name FROM sqlite_schema WHERE name = 'onward_more'",
            "postgres": "SELECT 1 WHERE to_regclass('onward.more') IS NOT NULL",
        }
        assert dba.sql(catalog[fresh.dialect]) == []


def test_a_first_migration_that_fails_leaves_nothing(
    fresh: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the very first: the database is as empty as before."""
    broken = Migration(1, "jobs", migrations(fresh.dialect)[0].text + "\nCREATE TABLE oh no;\n")
    with monkeypatch.context() as patched:
        patched.setattr(migrate, "migrations", lambda dialect: (broken,))
        with pytest.raises(DatabaseError):
            fresh.migrate()
        assert fresh.schema_version() == 0
    assert fresh.migrate()
    enqueue(fresh)


def test_a_newer_schema_is_refused(fresh: Database) -> None:
    """Another machine runs a newer version: this one does not touch what it does not know."""
    fresh.migrate()
    enqueue(fresh)
    with hand(fresh) as dba:
        values = (
            "VALUES (9002, 'later', 0)" if dba.dialect == "sqlite" else "VALUES (9002, 'later')"
        )
        columns = "version, name, applied_at" if dba.dialect == "sqlite" else "version, name"
        dba.sql(f"INSERT INTO onward.migration ({columns}) {values}")
    with opened(fresh) as older:
        for use in (
            lambda: older.enqueue([new_job()]),
            lambda: older.run(store.now),
            lambda: older.read(store.counts),
        ):
            with pytest.raises(
                SchemaMissing, match="schema 9002; this version of Onward knows"
            ) as e:
                use()
            assert "upgrade" in e.value.fix
        assert older.migrate() == []
        assert older.schema_version() == 9002


def test_migrations_are_numbered_alike_in_both_dialects() -> None:
    """One number is one change, whichever database: versions can be compared."""
    names = {d: [(m.version, m.name) for m in migrations(d)] for d in ("sqlite", "postgres")}
    assert names["sqlite"] == names["postgres"]
    assert [version for version, _ in names["sqlite"]] == list(range(1, len(names["sqlite"]) + 1))
    for dialect in names:
        for migration in migrations(dialect):
            assert re.match(r"-- Onward on \w+, schema \d+\.", migration.text)
