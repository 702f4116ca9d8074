"""Dies at a chosen SQL statement, again and again, and is followed by a clean program each time.

    python -m tests.crash.by_statement STEP OFFSET     (database and ledger in the environment)

For N = OFFSET, OFFSET + STEP, … it enqueues two jobs, forks a worker that SIGKILLs itself just
before its N-th statement (later: just after it), and forks a clean worker that must bring
everything to its end. It goes on until a worker lives through all of its statements. Each death is
one JSON line: N, the side, the statement, and the ids of the jobs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg

from onward.config import Settings
from onward.store import sqlite_apsw, store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.statements import Statement
from tests.crash import jobs
from tests.crash.field import live
from tests.support import tasks

app = jobs.app
app.settings = Settings(
    lease=5.0, beat=0.15, sweep=0.1, poll=0.02, cancel_poll=0.1, prune_every=3600.0
)


class Counter:
    """Counts this process's statements, and ends it at one of them.

    Args:
        number: which; counted from 1.
        before: just before it, or just after.
        tell: where to write which statement it was.
    """

    def __init__(self, number: int, before: bool, tell: int) -> None:
        self._number = number
        self._before = before
        self._tell = tell
        self._count = 0

    def reached(self, name: str) -> bool:
        """Count a statement that is about to be run; returns whether the process dies after it."""
        self._count += 1
        if self._count == self._number and self._before:
            self.die(name)
        return self._count == self._number

    def die(self, name: str) -> None:
        os.write(self._tell, name.encode())
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def watch_sqlite(counter: Counter) -> None:
    """Every statement of SQLite, BEGIN and COMMIT too; not the look whether others have written."""
    run = sqlite_apsw.ApswConnection.rows

    def rows(self: Any, text: str, params: Any = None) -> Any:
        name = " ".join(text.split()[:4])
        if name.startswith("PRAGMA"):
            return run(self, text, params)
        fatal = counter.reached(name)
        found = run(self, text, params)
        if fatal:
            counter.die(name)
        return found

    sqlite_apsw.ApswConnection.rows = rows  # type: ignore[method-assign]


def watch_postgres(counter: Counter) -> None:
    """Every round trip to PostgreSQL, BEGIN and COMMIT too, but for the opening of connections."""
    name = ["other"]
    named = PostgresDatabase._arows  # pyright: ignore[reportPrivateUsage]
    wait = psycopg.AsyncConnection.wait

    async def arows(self: Any, connection: Any, statement: Statement) -> Any:
        name[0] = statement.name
        try:
            return await named(self, connection, statement)
        finally:
            name[0] = "begin, commit or other"

    async def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        at = name[0]
        fatal = counter.reached(at)
        found = await wait(self, *args, **kwargs)
        if fatal:
            counter.die(at)
        return found

    PostgresDatabase._arows = arows  # type: ignore[method-assign]
    psycopg.AsyncConnection.wait = waited  # type: ignore[method-assign]


def forked(run: Callable[[], object]) -> int:
    """Run in a child; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def doomed(number: int, before: bool, tell: int) -> None:
    """A worker that does not get past its N-th statement."""
    counter = Counter(number, before, tell)
    if app.database.dialect == "sqlite":
        watch_sqlite(counter)
    else:
        watch_postgres(counter)
    app.run_worker(concurrency=2, until_empty=True)


def clean() -> None:
    """A worker that brings everything to its end."""
    lose_the_dead(app.database)
    end = time.monotonic() + 20
    with app.worker(concurrency=2):
        while live(app):
            if time.monotonic() > end:
                raise AssertionError(f"still there: {app.counts()}")
            time.sleep(0.01)


def lose_the_dead(database: Database) -> None:
    """What a supervisor does when a worker process has died: nobody waits for its lease."""
    for lease in database.read(store.leases):
        database.run(store.lose, lease.worker, "killed at a statement")


def enqueue() -> list[str]:
    """A job with a follow-up, and one that fails first."""
    found: list[str] = []

    def run() -> None:
        link, by_attempt = (task.using(max_attempts=3) for task in (tasks.link, jobs.by_attempt))
        handles = app.enqueue_many(
            [link.call(1, 2, 0.0), by_attempt.call([(0.0, "raise"), (0.0, "return")])]
        )
        os.write(told, json.dumps([handle.id for handle in handles]).encode())

    read, told = os.pipe()
    assert forked(run) == 0
    found = json.loads(os.read(read, 4096))
    os.close(read)
    os.close(told)
    return found


def main() -> None:
    step, offset = int(sys.argv[1]), int(sys.argv[2])
    for before in (True, False):
        number = offset
        while True:
            ids = enqueue()
            read, tell = os.pipe()
            status = forked(lambda n=number, b=before, t=tell: doomed(n, b, t))
            os.close(tell)
            at = os.read(read, 200).decode()
            os.close(read)
            assert status in {0, -signal.SIGKILL}, f"the worker ended with {status}"
            assert forked(clean) == 0, f"after a death at {number}, {at}"
            print(json.dumps({"n": number, "before": before, "at": at, "ids": ids}), flush=True)
            if status == 0:
                break
            number += step


if __name__ == "__main__":
    main()
