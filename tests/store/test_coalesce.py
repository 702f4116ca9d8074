"""Group commit: callers share a write, and whoever brings a bad row is the only one who hears of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from onward.errors import DatabaseError, DatabaseUnavailable, JobNotFound
from onward.job import Change, Job, NewJob
from onward.store import coalesce, portions, store
from onward.store.coalesce import AsyncCoalescer, Coalescer, Entry
from onward.store.database import Database, Duplicate, Refused
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_writer import MOST_PER_COMMIT, Work
from onward.store.statements import Op, Statement
from onward.store.store import Wake
from tests.store.builders import (
    DATABASE_ERRORS,
    claim,
    enqueue,
    hand,
    new_job,
    register,
    running,
    succeed,
)

# --- the coalescers by themselves -----------------------------------------------------------------


class Row(int):
    """A number that is to be written, and the text that goes with it."""

    args: str = ""


def rows(*numbers: int, text: int = 0) -> list[Row]:
    """Some of them, each with so much text."""
    made = [Row(number) for number in numbers]
    for row in made:
        row.args = "x" * text
    return made


class Writer:
    """Writes into a list, slowly if asked, and refuses what is negative."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, items: Sequence[int]) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        if any(item == -2 for item in items):
            raise ValueError("not to be written as text")
        if any(item < 0 for item in items):
            raise Refused("negative")
        self.batches.append(list(items))

    @property
    def written(self) -> list[int]:
        return sorted(item for batch in self.batches for item in batch)


def gathered(writer: Writer, items: Sequence[Sequence[Row]]) -> list[BaseException | None]:
    """Write each in a thread of its own, all of them while one write is under way; returns their
    errors.
    """
    coalescer: Coalescer[Row] = Coalescer(writer)
    writer.gate.clear()
    with ThreadPoolExecutor(len(items) + 1) as pool:
        first = pool.submit(coalescer.write, rows(0))
        assert writer.entered.wait(5)
        rest = [pool.submit(coalescer.write, one) for one in items]
        end = time.monotonic() + 5
        while len(coalescer._waiting) < len(items) and time.monotonic() < end:
            time.sleep(0.001)
        writer.gate.set()
        first.result(10)
        return [one.exception(10) for one in rest]


async def agathered(writer: Writer, items: Sequence[Sequence[Row]]) -> list[BaseException | None]:
    """The same on a loop."""

    async def write(items: Sequence[int]) -> None:
        await asyncio.sleep(0)
        writer(items)

    coalescer: AsyncCoalescer[Row] = AsyncCoalescer(write)
    first = asyncio.create_task(coalescer.write(rows(0)))
    await asyncio.sleep(0)
    rest = await asyncio.gather(*map(coalescer.write, items), return_exceptions=True)
    await first
    return rest


Gather = Callable[[Writer, Sequence[Sequence[Row]]], list[BaseException | None]]


@pytest.fixture(params=["threads", "loop"])
def gather(request: pytest.FixtureRequest) -> Gather:
    if request.param == "threads":
        return gathered
    return lambda writer, items: asyncio.run(agathered(writer, items))


def test_what_is_asked_during_a_write_shares_the_next(gather: Gather) -> None:
    """Twenty callers, two writes: the first alone, since it does not wait for anybody, then all the
    others.
    """
    writer = Writer()
    assert gather(writer, [rows(n) for n in range(1, 21)]) == [None] * 20
    assert [len(batch) for batch in writer.batches] == [1, 20]
    assert writer.written == list(range(21))


@pytest.mark.parametrize("bad", [{0}, {19}, {7, 8}, {0, 5, 10, 19}, set(range(20))])
@pytest.mark.parametrize("value", [-1, -2])
def test_a_bad_row_is_refused_to_its_caller_and_to_nobody_else(
    gather: Gather, bad: set[int], value: int
) -> None:
    """A batch that fails is cut in two until the bad rows are by themselves; their neighbours are
    written.
    """
    writer = Writer()
    errors = gather(writer, [rows(value if n in bad else n + 1) for n in range(20)])
    assert {n for n, error in enumerate(errors) if error is not None} == bad
    kind = Refused if value == -1 else ValueError
    assert all(isinstance(error, kind) for error in errors if error is not None)
    assert writer.written == [0, *(n + 1 for n in range(20) if n not in bad)]


def test_the_rows_of_one_caller_are_one_write(gather: Gather) -> None:
    """All of what one call brings is written, or none: it is never cut in two."""
    writer = Writer()
    errors = gather(writer, [rows(1, 2, 3), rows(4, -1, 5), rows(6, 7)])
    assert [error is None for error in errors] == [True, False, True]
    assert writer.written == [0, 1, 2, 3, 6, 7]


def test_callers_behind_more_rows_than_one_write_takes_are_served(gather: Gather) -> None:
    """Whoever is to write may find a full batch before itself: it goes on until its own rows are
    written.
    """
    writer = Writer()
    most = coalesce.MOST_PER_WRITE
    items = [rows(*range(1, most)) for _ in range(6)] + [rows(1), rows(2)]
    assert gather(writer, items) == [None] * 8
    assert len(writer.written) == 6 * (most - 1) + 3
    assert max(len(batch) for batch in writer.batches) <= most


def test_whoever_gets_the_lock_first_writes_until_its_own_rows_are_written() -> None:
    """The lock is given in no particular order: another's full batch may stand before ours, and be
    all that fits.
    """
    writer = Writer()
    coalescer: Coalescer[Row] = Coalescer(writer)
    before: Future[None] = Future()
    coalescer._waiting.append(Entry(rows(*range(coalesce.MOST_PER_WRITE)), 0, before))
    coalescer.write(rows(1))
    assert before.done()
    assert writer.batches[1:] == [[1]]


def test_a_call_with_more_rows_than_one_write_takes_is_written_whole(gather: Gather) -> None:
    """The bound is for sharing; a single large call stays one write."""
    writer = Writer()
    items = [rows(*range(coalesce.MOST_PER_WRITE * 3))]
    assert gather(writer, items) == [None]
    assert len(writer.batches) == 2


def test_a_write_ends_at_so_much_text_too(gather: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers whose rows are large share writes of a bounded size; one may be larger by itself."""
    monkeypatch.setattr(portions, "MOST_TEXT", 100)
    writer = Writer()
    sizes = dict(enumerate([0, 40, 40, 40, 300, 10, 100, 60, 40, 1]))
    items = [rows(number, text=size) for number, size in sizes.items() if number]
    assert gather(writer, items) == [None] * 9
    assert writer.written == list(sizes)
    wrote = [[sizes[number] for number in batch] for batch in writer.batches]
    assert all(sum(each) <= 100 or len(each) == 1 for each in wrote)
    assert max(map(len, wrote)) > 1


def test_a_database_that_is_away_is_told_to_everyone_at_once(gather: Gather) -> None:
    """There is no use in trying each row by itself when nothing can be written."""
    writer = Writer()

    def away(items: Sequence[int]) -> None:
        Writer.__call__(writer, items)
        if items != [0]:
            raise DatabaseUnavailable("gone")

    counted = CountedCalls(away)
    errors = gather(counted, [rows(n) for n in range(1, 11)])
    assert [type(error) for error in errors] == [DatabaseUnavailable] * 10
    assert counted.calls == 2


class CountedCalls(Writer):
    """Counts how often another writer is asked."""

    def __init__(self, write: Callable[[Sequence[int]], None]) -> None:
        super().__init__()
        self.calls = 0
        self._inner = write

    def __call__(self, items: Sequence[int]) -> None:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(10)
        self._inner(items)


def test_whoever_was_interrupted_leaves_nobody_waiting() -> None:
    """A Ctrl-C in the thread that writes for all: it is raised there, and the others hear that
    nothing is known.
    """
    writer = Writer()
    coalescer: Coalescer[Row] = Coalescer(writer)
    writer.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(coalescer.write, rows(0))
        assert writer.entered.wait(5)
        rest = [pool.submit(coalescer.write, rows(n)) for n in (1, 2, 3)]
        while len(coalescer._waiting) < 3:
            time.sleep(0.001)
        interrupted: list[int] = []

        def interrupt_once(items: Sequence[int]) -> None:
            if not interrupted and items != [0]:
                interrupted.append(1)
                raise KeyboardInterrupt
            writer.batches.append(list(items))

        coalescer._write = interrupt_once
        writer.gate.set()
        first.result(5)
        errors = [one.exception(5) for one in rest]
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["DatabaseUnavailable", "DatabaseUnavailable", "KeyboardInterrupt"]
    coalescer.write(rows(9))
    assert 9 in writer.written


def test_whoever_was_interrupted_in_half_a_batch_leaves_nobody_waiting_for_the_other() -> None:
    """A bad row has the batch cut in two, and the Ctrl-C comes before the second half."""
    writer = Writer()
    coalescer: Coalescer[Row] = Coalescer(writer)
    writer.gate.clear()
    sizes: list[int] = []

    def interrupt_a_half(items: Sequence[int]) -> None:
        sizes.append(len(items))
        raise Refused("one of them") if len(items) == 4 else KeyboardInterrupt

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(coalescer.write, rows(0))
        assert writer.entered.wait(5)
        rest = [pool.submit(coalescer.write, rows(n)) for n in (1, 2, 3, 4)]
        while len(coalescer._waiting) < 4:
            time.sleep(0.001)
        coalescer._write = interrupt_a_half
        writer.gate.set()
        first.result(5)
        errors = [one.exception(5) for one in rest]
    assert sizes == [4, 2]
    assert sorted(type(error).__name__ for error in errors) == (
        ["DatabaseUnavailable"] * 3 + ["KeyboardInterrupt"]
    )
    coalescer._write = writer
    coalescer.write(rows(9))
    assert writer.written == [0, 9]


@pytest.mark.parametrize("where", ["in a batch", "in half a batch"])
def test_a_write_that_is_cancelled_leaves_no_task_waiting(where: str) -> None:
    """A loop that ends cancels all its tasks, that which writes for others too: they hear that
    nothing is known, and so do those who came later. Whoever had given up has given up.
    """

    async def main() -> list[Any]:
        stuck, hold = asyncio.Event(), asyncio.Event()

        async def write(items: Sequence[int]) -> None:
            await asyncio.sleep(0)
            if where == "in half a batch" and len(items) == 4:
                raise Refused("one of them")
            if list(items) not in ([0], [7]):
                stuck.set()
                await hold.wait()

        coalescer: AsyncCoalescer[Row] = AsyncCoalescer(write)
        first = asyncio.create_task(coalescer.write(rows(0)))
        await asyncio.sleep(0)
        rest = [asyncio.create_task(coalescer.write(rows(n))) for n in range(1, 5)]
        await stuck.wait()
        await first
        rest += [asyncio.create_task(coalescer.write(rows(n))) for n in (5, 6)]
        rest[0].cancel()
        await asyncio.sleep(0)
        assert coalescer._task is not None
        coalescer._task.cancel()
        errors = await asyncio.gather(*rest, return_exceptions=True)
        await coalescer.write(rows(7))
        return errors

    errors = asyncio.run(asyncio.wait_for(main(), 10))
    assert [type(error) for error in errors] == (
        [asyncio.CancelledError] + [DatabaseUnavailable] * 5
    )
    assert "nobody knows whether it took" in errors[1].why


def test_a_caller_that_is_cancelled_disturbs_nobody() -> None:
    """A task that gives up leaves its rows to be written, and its neighbours theirs."""
    writer = Writer()

    async def main() -> None:
        async def write(items: Sequence[int]) -> None:
            await asyncio.sleep(0.01)
            writer(items)

        coalescer: AsyncCoalescer[Row] = AsyncCoalescer(write)
        tasks = [asyncio.create_task(coalescer.write(rows(n))) for n in range(6)]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        tasks[3].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [
            n in (0, 3) for n in range(6)
        ]
        await coalescer.write(rows(6))

    asyncio.run(main())
    assert writer.written == list(range(7))


# --- on the databases -----------------------------------------------------------------------------


@contextmanager
def held(database: Database) -> Iterator[Callable[[], None]]:
    """Holds every write back until the given function is called."""
    with hand(database) as dba:
        dba.sql("BEGIN IMMEDIATE" if dba.dialect == "sqlite" else "BEGIN")
        if dba.dialect == "postgres":
            dba.sql("LOCK TABLE onward.job IN EXCLUSIVE MODE")

        def release() -> None:
            dba.sql("COMMIT")

        yield release
        with contextlib.suppress(*DATABASE_ERRORS):
            dba.sql("ROLLBACK")


def a_batch(database: Database) -> tuple[list[list[NewJob]], dict[int, type[Exception]]]:
    """Calls of which some cannot be written, and what their callers are to hear."""
    (there,) = enqueue(database)
    calls = [[new_job()] for _ in range(12)]
    calls[2] = [new_job(), new_job(priority=500), new_job()]
    calls[5] = [new_job(id=there)]
    calls[8] = [new_job(), new_job(args="\ud800")]
    calls[11] = [new_job(timeout=-1.0)]
    return calls, {2: Refused, 5: Duplicate, 8: ValueError, 11: Refused}


def check_batch(
    database: Database,
    calls: list[list[NewJob]],
    expected: dict[int, type[Exception]],
    errors: Sequence[BaseException | None],
) -> None:
    assert {n for n, error in enumerate(errors) if error is not None} == set(expected)
    for n, kind in expected.items():
        assert isinstance(errors[n], kind), errors[n]
    for n, call in enumerate(calls):
        for job in call:
            if n not in expected:
                assert database.read(store.get, job.id).id == job.id
            elif n != 5:
                with pytest.raises(JobNotFound):
                    database.read(store.get, job.id)
    written = sum(len(call) for n, call in enumerate(calls) if n not in expected)
    assert database.read(store.counts)["queued"] == written + 1


def test_bad_rows_among_threads_that_share_a_commit(database: Database) -> None:
    """A duplicate, an impossible value and text that is none: each fails alone, wholly, and nobody
    else does.
    """
    calls, expected = a_batch(database)
    with held(database) as release, ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(database.enqueue, call) for call in calls]
        time.sleep(0.1)
        release()
        errors = [future.exception(20) for future in futures]
    check_batch(database, calls, expected, errors)


def test_bad_rows_among_tasks_that_share_a_commit(database: Database) -> None:
    """The same on a loop."""
    calls, expected = a_batch(database)

    async def main() -> list[Any]:
        with held(database) as release:
            tasks = [asyncio.create_task(database.aenqueue(call)) for call in calls]
            await asyncio.sleep(0.1)
            release()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        await database.aclose()
        return answers

    check_batch(database, calls, expected, asyncio.run(main()))


@pytest.mark.parametrize("how", ["threads", "loop"])
def test_large_jobs_of_many_callers_are_no_single_statement(
    database: Database, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each is small enough, and all of them at once are more than a database takes as one text."""
    monkeypatch.setattr(portions, "MOST_TEXT", 1_000)
    right = store.enqueue
    sizes: list[list[int]] = []

    def weighed(jobs: Sequence[NewJob], *args: Any, **kwargs: Any) -> Op[Wake]:
        sizes.append([len(job.args) for job in jobs])
        return right(jobs, *args, **kwargs)

    monkeypatch.setattr(store, "enqueue", weighed)
    calls = [[new_job(args=f'"{"x" * size}"')] for size in [400] * 10 + [900, 1_500] + [10] * 8]

    async def tasks() -> None:
        with held(database) as release:
            waiting = [asyncio.create_task(database.aenqueue(call)) for call in calls]
            await asyncio.sleep(0.1)
            release()
            await asyncio.gather(*waiting)
        await database.aclose()

    if how == "loop":
        asyncio.run(tasks())
    else:
        with held(database) as release, ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(database.enqueue, call) for call in calls]
            time.sleep(0.1)
            release()
            for future in futures:
                future.result(20)
    assert database.read(store.counts)["queued"] == len(calls)
    assert all(sum(each) <= 1_000 or len(each) == 1 for each in sizes)


def test_many_callers_lose_and_double_nothing(database: Database) -> None:
    """Threads and tasks at once: every acknowledged job is there once."""
    jobs = [[new_job() for _ in range(10)] for _ in range(16)]

    def thread(mine: list[NewJob]) -> None:
        for job in mine:
            database.enqueue([job])

    async def tasks() -> None:
        await asyncio.gather(*(database.aenqueue([job]) for mine in jobs[8:] for job in mine))
        await database.aclose()

    with ThreadPoolExecutor(9) as pool:
        futures: list[Future[Any]] = [pool.submit(thread, mine) for mine in jobs[:8]]
        futures.append(pool.submit(lambda: asyncio.run(tasks())))
        for future in futures:
            future.result(30)
    assert database.read(store.counts)["queued"] == 160


# --- a shared commit on SQLite --------------------------------------------------------------------


class OwnError(Exception):
    """An error of whoever runs the operation."""


def fails_half_way(job: NewJob) -> Op[None]:
    """Writes, and then finds that it should not have."""
    yield Statement("enqueue", {"jobs": store.dumps([job])}, alone=False)
    raise OwnError


def together(database: Database, *operations: Callable[[], Op[Any]]) -> list[Future[Any]]:
    """Submit operations while the writer is busy with another, so that they share the next
    commit.
    """
    assert isinstance(database, SqliteDatabase)
    busy, go_on = threading.Event(), threading.Event()

    def wait() -> Op[None]:
        busy.set()
        assert go_on.wait(10)
        yield Statement("now", {})

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(database.run, wait)
        assert busy.wait(5)
        futures = [_submitted(database, operation) for operation in operations]
        go_on.set()
        first.result(5)
    for future in futures:
        future.exception(10)
    return futures


def _submitted(database: SqliteDatabase, operation: Callable[[], Op[Any]]) -> Future[Any]:
    future: Future[Any] = Future()

    def tell(answer: Any) -> None:
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    database._writer.submit(Work(operation, tell))
    return future


def test_one_refused_operation_of_a_commit_does_not_fail_its_neighbours(sqlite: Database) -> None:
    """Each has a savepoint of its own: what it wrote is undone, what others wrote is committed."""
    worker = register(sqlite)
    enqueue(sqlite, 3)
    jobs = claim(sqlite, worker)
    before, after, half, again = new_job(), new_job(), new_job(), new_job()
    futures = together(
        sqlite,
        lambda: store.enqueue([before]),
        lambda: store.enqueue([before]),
        lambda: store.apply([succeed(jobs[0])]),
        lambda: store.apply([succeed(jobs[1], follow_ups=(new_job(priority=999),))]),
        lambda: fails_half_way(half),
        lambda: store.apply([succeed(jobs[2]), succeed(jobs[0])]),
        lambda: store.enqueue([after]),
        lambda: fails_half_way(again),
    )
    errors = [type(future.exception()).__name__ for future in futures]
    assert errors == [
        "NoneType",
        "Duplicate",
        "NoneType",
        "Refused",
        "OwnError",
        "NoneType",
        "NoneType",
        "OwnError",
    ]
    assert futures[2].result() == {jobs[0].id}
    assert futures[5].result() == {jobs[2].id}
    counts = sqlite.read(store.counts)
    assert (counts["queued"], counts["running"], counts["succeeded"]) == (2, 1, 2)
    created = {sqlite.read(store.record, job.id).created_at for job in (before, after)}
    assert len(created) == 1  # One commit is one moment, so they did share it.


def test_a_decision_that_fails_does_not_fail_its_neighbours(sqlite: Database) -> None:
    """An error of the code that decides is its own caller's, also among others in one commit."""
    job = running(sqlite)
    assert job.worker is not None
    sqlite.run(store.lose, job.worker, "killed")

    def broken(found: Job, error: str) -> Change:
        raise OwnError

    good = new_job()
    futures = together(
        sqlite,
        lambda: store.sweep(broken),
        lambda: store.enqueue([new_job(args="\udfff")]),
        lambda: store.enqueue([good]),
    )
    assert isinstance(futures[0].exception(), OwnError)
    assert isinstance(futures[1].exception(), ValueError)
    assert futures[2].exception() is None
    assert sqlite.read(store.get, good.id).id == good.id


def test_more_operations_than_one_commit_takes_are_all_answered(sqlite: Database) -> None:
    """A burst is cut into commits, and nobody waits for ever."""
    count = MOST_PER_COMMIT * 2 + 10
    futures = together(sqlite, *(lambda: store.enqueue([new_job()]) for _ in range(count)))
    assert [future.exception() for future in futures] == [None] * count
    assert sqlite.read(store.counts)["queued"] == count


@pytest.mark.parametrize("round_", range(5))
def test_closing_while_others_write_loses_nothing_and_hangs_nobody(
    sqlite: Database, round_: int
) -> None:
    """Close answers what was asked before; what is asked afterwards opens the file again."""
    stop = threading.Event()
    written: list[str] = []

    def write() -> None:
        while not stop.is_set():
            job = new_job()
            sqlite.enqueue([job])
            written.append(job.id)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        sqlite.close()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert sqlite.read(store.counts)["queued"] == len(written)
    assert written


def test_a_plain_caller_who_finds_nobody_writing_writes_in_its_own_thread(
    sqlite: Database,
) -> None:
    """To be woken twice would cost a third of a commit; a loop never writes itself."""
    writers: list[str] = []

    def note() -> Op[None]:
        writers.append(threading.current_thread().name)
        yield Statement("now", {})

    sqlite.run(note)
    asyncio.run(sqlite.arun(note))
    assert writers == [threading.current_thread().name, "onward-sqlite"]


def test_an_interrupted_caller_leaves_nothing_half_written(sqlite: Database) -> None:
    """Ctrl-C comes between two statements: nothing of them is there, and the next write works."""
    job = new_job()

    def interrupted() -> Op[None]:
        yield Statement("enqueue", {"jobs": store.dumps([job])}, alone=False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sqlite.run(interrupted)
    assert sqlite.read(store.counts)["queued"] == 0
    sqlite.enqueue([job])
    assert sqlite.read(store.counts)["queued"] == 1


def test_to_close_takes_no_lock(sqlite: Database) -> None:
    """Nothing is left to be written, so it does not wait for a foreign writer."""
    asyncio.run(sqlite.aenqueue([new_job()]))
    with hand(sqlite) as dba:
        dba.sql("BEGIN IMMEDIATE")
        began = time.monotonic()
        sqlite.close()
        assert time.monotonic() - began < 5
        dba.sql("ROLLBACK")


@pytest.mark.parametrize("how", ["enqueue", "run", "read"])
def test_a_signal_handler_that_wants_the_database_does_not_wait_for_itself(
    database: Database, how: str
) -> None:
    """It comes in the middle of a write of its own thread. PostgreSQL has another connection for
    it; SQLite has one writer, and says so.
    """
    job = new_job()
    heard: list[Exception] = []

    def handle(*_: object) -> None:
        try:
            if how == "read":
                database.read(store.now)
            elif how == "run":
                database.run(store.enqueue, [job])
            else:
                database.enqueue([job])
        except DatabaseError as error:
            heard.append(error)

    def interrupted() -> Op[None]:
        yield Statement("now", {}, alone=False)
        signal.raise_signal(signal.SIGUSR1)
        yield Statement("now", {})

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        database.run(interrupted)
    finally:
        signal.signal(signal.SIGUSR1, before)
    refused = database.dialect == "sqlite" and how != "read"
    assert [type(error) for error in heard] == [DatabaseError] * refused
    written = how != "read" and not refused
    assert database.read(store.counts)["queued"] == int(written)


def test_a_handler_in_the_middle_of_a_shared_write_writes_by_itself() -> None:
    """It holds the lock that it would wait for."""
    written: list[list[int]] = []
    coalescer: Coalescer[Row]

    def write(items: Sequence[int]) -> None:
        written.append(list(items))
        if items == [1]:
            coalescer.write(rows(2))

    coalescer = Coalescer(write)
    coalescer.write(rows(1))
    assert written == [[1], [2]]


def test_what_an_interrupted_caller_wanted_is_not_written_later() -> None:
    """It waited for its turn and went away: nobody would know of its job."""
    written: list[list[int]] = []
    busy, go_on = threading.Event(), threading.Event()

    def write(items: Sequence[int]) -> None:
        if items == [1]:
            busy.set()
            go_on.wait(10)
        written.append(list(items))

    coalescer: Coalescer[Row] = Coalescer(write)

    class Interrupting:
        """A lock at which one caller is interrupted while it waits."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def acquire(self, blocking: bool = True) -> bool:
            taken: bool = self._lock.acquire(blocking=blocking)
            return taken

        def release(self) -> None:
            self._lock.release()

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(coalescer.write, rows(1))
        assert busy.wait(5)
        right = coalescer._lock
        coalescer._lock = Interrupting(right)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            coalescer.write(rows(2))
        coalescer._lock = right
        go_on.set()
        first.result(5)
    coalescer.write(rows(3))
    assert written == [[1], [3]]
