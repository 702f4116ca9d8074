"""A process that forks: the child has connections of its own, and the parent's are as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from onward.store import store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from tests.store.builders import apply, claim, enqueue, new_job, opened, register, succeed
from tests.store.forks import Child


def queued(database: Database) -> int:
    return database.read(store.counts)["queued"]


def test_a_child_enqueues_and_the_parent_is_unharmed(database: Database) -> None:
    """Both go on after the fork as before it."""
    enqueue(database)
    assert queued(database) == 1

    def child() -> int:
        enqueue(database)
        return queued(database)

    assert Child(child).result() == "2"
    enqueue(database)
    assert queued(database) == 3


PROGRAM = """
import os, sys
from onward.store import store
from onward.store.url import open_database
from tests.store.builders import new_job

url, driver = sys.argv[1:]
database = open_database(url, sqlite_driver=driver)
database.enqueue([new_job()])
database.read(store.counts)
pid = os.fork()
database.enqueue([new_job()])
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    database.enqueue([new_job()])
    print(database.read(store.counts)["queued"])
"""


def test_a_child_that_ends_in_order_does_not_end_its_parents_sessions(database: Database) -> None:
    """At its end an interpreter lets go of all that it has: what it got from its parent is not its
    own to close.
    """
    url, driver = database.shown_url, "apsw"
    if isinstance(database, SqliteDatabase):
        driver = database.driver.name
    elif isinstance(database, PostgresDatabase):
        url = database.url
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, url, driver],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["4"]
    assert "Error" not in run.stderr
    assert queued(database) == 4


def test_parent_and_children_write_at_the_same_time(database: Database) -> None:
    """Nobody speaks on another's connection: every acknowledged job is there once."""
    enqueue(database)
    queued(database)

    def child() -> None:
        for _ in range(20):
            database.enqueue([new_job()])
            queued(database)

    children = [Child(child) for _ in range(4)]
    for _ in range(20):
        database.enqueue([new_job()])
        queued(database)
    for one in children:
        one.result()
    assert queued(database) == 101


def test_a_child_that_outlives_the_parents_connections_loses_nothing(database: Database) -> None:
    """The parent closes, and with it would go SQLite's log if the child held no lock of its own."""
    enqueue(database)
    queued(database)
    ready, ready_w = os.pipe()
    go, go_w = os.pipe()

    def child() -> None:
        enqueue(database)
        os.write(ready_w, b"1")
        os.read(go, 1)
        enqueue(database)

    one = Child(child)
    os.read(ready, 1)
    database.close()
    os.write(go_w, b"1")
    one.result()
    with opened(database) as afterwards:
        assert queued(afterwards) == 3
    for end in (ready, ready_w, go, go_w):
        os.close(end)


def test_a_fork_while_other_threads_write_harms_neither(database: Database) -> None:
    """A fork may come at any moment of a commit; no thread of the parent fails, and no child
    hangs.
    """
    stop = threading.Event()
    written: list[int] = []
    errors: list[BaseException] = []

    def write() -> None:
        count = 0
        try:
            while not stop.is_set():
                database.enqueue([new_job()])
                database.read(store.now)
                count += 1
        except BaseException as error:
            errors.append(error)
        written.append(count)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    children = 8
    for _ in range(children):
        Child(lambda: database.enqueue([new_job()])).result()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert queued(database) == sum(written) + children


def test_a_grandchild_works_too(database: Database) -> None:
    """A child may fork in its turn."""
    enqueue(database)

    def child() -> str:
        enqueue(database)
        return Child(lambda: enqueue(database) and queued(database)).result()

    assert Child(child).result() == "3"
    assert queued(database) == 3


def test_a_claim_and_a_finish_may_lie_on_both_sides_of_a_fork(database: Database) -> None:
    """What a process owns is a matter of the database, not of its connections."""
    worker = register(database)
    enqueue(database, 2)
    first, second = claim(database, worker)
    assert Child(lambda: len(apply(database, succeed(first)))).result() == "1"
    assert apply(database, succeed(first)) == set()
    assert apply(database, succeed(second)) == {second.id}


def test_a_listener_hears_of_what_a_child_wrote_during_the_fork(sqlite: Database) -> None:
    """A fork closes the connection that watches the file; what was missed meanwhile counts as a
    hint.
    """
    import asyncio

    async def main() -> tuple[bool, bool, bool]:
        wakeup = await sqlite.wakeup()
        await wakeup.wait(0.01)
        quiet = await wakeup.wait(0.01)
        await asyncio.to_thread(lambda: Child(lambda: enqueue(sqlite)).result())
        heard = await wakeup.wait(1)
        then = await wakeup.wait(0.01)
        await wakeup.close()
        return quiet, heard, then

    assert asyncio.run(main()) == (False, True, False)


@pytest.mark.parametrize("busy", ["migrate", "facts", "schema_version"])
def test_no_connection_of_a_file_is_open_while_the_process_forks(
    sqlite: Database, busy: str
) -> None:
    """Also those that are opened for a moment only: a fork waits until they are closed."""
    assert isinstance(sqlite, SqliteDatabase)
    enqueue(sqlite)
    use: Callable[[], Any] = getattr(sqlite, busy)
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            use()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def open_files() -> list[str]:
        folder = "/proc/self/fd"
        if not os.path.isdir(folder):
            pytest.skip("this system does not show a process's open files")
        links = [os.path.join(folder, name) for name in os.listdir(folder)]
        return [os.readlink(link) for link in links if os.path.islink(link)]

    for _ in range(20):
        files = Child(lambda: "\n".join(open_files())).result()
        assert str(sqlite.path) not in files
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
