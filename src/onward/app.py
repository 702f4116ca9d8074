"""The app: tasks on one side, a database on the other. What callers hold in their hands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload
from uuid import UUID

from onward.batch import aenqueue_all, enqueue_all
from onward.codec import decode_plain
from onward.config import Settings, default_url, seconds
from onward.errors import DuplicateTask, InvalidArguments, InvalidOption, UnknownTask
from onward.failure import MOST_REASON
from onward.handle import Handle
from onward.ids import parse_id
from onward.job import Change, Job
from onward.lifecycle import AttemptState, Event, JobState
from onward.names import check_name, default_name, is_async, place_of, same_function
from onward.policy import Backoff
from onward.store import store, two_libraries
from onward.store.database import Database
from onward.store.url import open_database
from onward.task import (
    AsyncTask,
    Call,
    OnError,
    Options,
    SyncTask,
    Task,
    Unsaid,
    as_call,
    check_app,
    check_function,
    check_rules,
)
from onward.text import clean_text, safe_repr

if TYPE_CHECKING:
    from onward.worker.embedded import EmbeddedWorker

P = ParamSpec("P")
R = TypeVar("R")

AnyId: TypeAlias = str | UUID | Handle[Any]
"""What names a job: its id, or the job as its caller holds it."""


class TaskDecorator(Protocol):
    """What `@app.task(...)` returns: it makes a task of a plain or an `async` function."""

    # The overloads overlap: a coroutine function is a callable too. The first that fits counts.
    @overload
    def __call__(self, function: Callable[P, Unsaid], /) -> SyncTask[P, Any]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


class Onward:
    """An app: the tasks that it has, and the database that holds their jobs.

    Args:
        url: `sqlite:///onward.db` or `postgresql://user@host/name`; by default `ONWARD_URL`, or a
            file beside you.
        settings: how long things take, and how long they are kept.
        schema: PostgreSQL only: the schema of Onward's tables.
        listen_url: PostgreSQL only: a direct address for LISTEN, where `url` leads through a
            pooler.
        sqlite_driver: SQLite only: `apsw`, or `sqlite3` where the application opens the same file
            with it.

    Raises:
        InvalidOption: a URL or a setting that cannot work.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Settings | None = None,
        schema: str = "onward",
        listen_url: str | None = None,
        sqlite_driver: str = "apsw",
    ) -> None:
        self.url = default_url() if url is None or url == "" else url
        self.settings = _settings(settings)
        self.options: dict[str, Any] = {
            "schema": schema,
            "listen_url": listen_url,
            "sqlite_driver": sqlite_driver,
        }
        self.database: Database = open_database(self.url, **self.options)
        two_libraries.watch(self.database)
        self.tasks: dict[str, Task[Any, Any]] = {}

    def __repr__(self) -> str:
        return f"<Onward {self.database.shown_url}, {len(self.tasks)} tasks>"

    # --- tasks ------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[P, Unsaid], /) -> SyncTask[P, Any]: ...
    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 5,
        max_losses: int | None = None,
        timeout: timedelta | float | None = None,
        backoff: Backoff | None = None,
        on_error: OnError | None = None,
        isolation: str | None = None,
    ) -> TaskDecorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        max_attempts: int = 5,
        max_losses: int | None = None,
        timeout: timedelta | float | None = None,
        backoff: Backoff | None = None,
        on_error: OnError | None = None,
        isolation: str | None = None,
    ) -> Any:
        """Make a task of a function.

        Args:
            name: under which it is stored; by default `module.function`.
            queue: where its jobs go.
            priority: −100 to 100; a higher one runs first.
            max_attempts: how many failed attempts make a job dead. 1 means "at most once".
            max_losses: how many attempts may be lost to vanished workers before the job is dead; by
                default 3, or 0 where `max_attempts` is 1.
            timeout: the time limit of one attempt (timedelta, or seconds); None: no limit.
            backoff: the delays between tries.
            on_error: what certain exceptions mean: another `Backoff`, `BURY` (dead at once) or
                `DROP` (cancelled).
            isolation: `"process"`: each attempt in a process of its own, which can be killed.

        Raises:
            InvalidOption: a value that cannot work.
            DuplicateTask: another function has this name.
        """
        options = Options(
            queue=check_name(queue, "queue"),
            priority=priority,
            max_attempts=max_attempts,
            max_losses=max_losses,
            timeout=None if timeout is None else seconds(timeout, "timeout"),
        )
        backoff, on_error = backoff or Backoff(), on_error or {}
        check_rules(backoff, on_error, isolation)

        def decorate(function: Callable[..., Any]) -> Task[Any, Any]:
            check_function(function)
            full = check_name(default_name(function) if name is None else name, "task")
            kind = AsyncTask[..., Any] if is_async(function) else SyncTask[..., Any]
            return self._register(
                kind(
                    self,
                    function,
                    full,
                    options,
                    backoff=backoff,
                    on_error=on_error,
                    isolation=isolation,
                )
            )

        return decorate if function is None else decorate(function)

    def _register(self, task: Task[Any, Any]) -> Task[Any, Any]:
        known = self.tasks.get(task.name)
        if known is not None and not same_function(known.function, task.function):
            place, second = place_of(known.function), place_of(task.function)
            raise DuplicateTask(
                f"two functions want to be the task {task.name!r}",
                why=f"{place} has the name already; {second} came second",
                fix="give one of them a name: @app.task(name='…')",
            )
        self.tasks[task.name] = task
        return task

    # --- enqueue ----------------------------------------------------------------------------------

    def enqueue_many(self, calls: Iterable[Call[Any]]) -> list[Handle[Any]]:
        """Enqueue many calls, of any tasks, in one transaction.

        Calls made with `using(connection=…)` are written through their connection instead.

        Args:
            calls: made by `task.call(...)`.

        Raises:
            InvalidArguments: something among them is no call; nothing is written.
            IdConflict: an explicit id belongs to another call; nothing is written.
        """
        return enqueue_all(self, self._checked(calls))

    async def aenqueue_many(self, calls: Iterable[Call[Any]]) -> list[Handle[Any]]:
        """The same as `enqueue_many`, for async code."""
        return await aenqueue_all(self, self._checked(calls))

    def _checked(self, calls: object) -> list[Call[Any]]:
        """The calls, all of them of this app; whatever else is given, no coroutine stays open."""
        if not isinstance(calls, Iterable):
            if inspect.iscoroutine(calls):
                calls.close()
            raise InvalidArguments(
                f"app.enqueue_many was given {safe_repr(calls)}, which is no list of calls",
                why="it writes many calls in one transaction",
                fix="app.enqueue_many([send.call(1), send.call(2)]), with a task `send`",
            )
        given: list[object] = list(cast(Iterable[object], calls))
        try:
            found = [as_call(call, "app.enqueue_many") for call in given]
        except InvalidArguments:
            for coroutine in filter(inspect.iscoroutine, given):
                coroutine.close()
            raise
        for call in found:
            check_app(call, self)
        return found

    # --- look -------------------------------------------------------------------------------------

    def get(self, id: AnyId) -> Handle[Any]:
        """One job as it is now.

        Raises:
            JobNotFound: no job has this id.
        """
        return Handle(self, record=self.database.read(store.record, _id_of(id)))

    async def aget(self, id: AnyId) -> Handle[Any]:
        """The same as `get`, for async code."""
        return Handle(self, record=await self.database.aread(store.record, _id_of(id)))

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state."""
        return self.database.read(store.counts)

    async def acounts(self) -> dict[str, int]:
        """The same as `counts`, for async code."""
        return await self.database.aread(store.counts)

    # --- move -------------------------------------------------------------------------------------

    def cancel(self, id: AnyId) -> JobState:
        """Ask a job to stop.

        A queued one is cancelled at once, a running one is `cancelling` until it has stopped.

        Returns:
            The state it is in now.

        Raises:
            IllegalTransition: it has succeeded, or is dead.
            JobNotFound: no job has this id.
        """
        return _told(id, self.database.run(store.move, _id_of(id), cancel_change))

    async def acancel(self, id: AnyId) -> JobState:
        """The same as `cancel`, for async code."""
        return _told(id, await self.database.arun(store.move, _id_of(id), cancel_change))

    def requeue(self, id: AnyId) -> JobState:
        """Take a dead job out of quarantine: a new attempt, both budgets afresh. History stays.

        Raises:
            IllegalTransition: it is not dead.
            JobNotFound: no job has this id.
        """
        return _told(id, self.database.run(store.move, _id_of(id), requeue_change))

    async def arequeue(self, id: AnyId) -> JobState:
        """The same as `requeue`, for async code."""
        return _told(id, await self.database.arun(store.move, _id_of(id), requeue_change))

    def discard(self, id: AnyId, *, reason: str = "discarded") -> JobState:
        """Give a dead job up for good: it ends cancelled.

        Args:
            id: of the job; or its handle.
            reason: for people; what is longer than 1,000 characters is cut, and control characters
                become escapes.

        Raises:
            IllegalTransition: it is not dead.
            JobNotFound: no job has this id.
        """
        return _told(id, self.database.run(store.move, _id_of(id), discard_change(reason)))

    async def adiscard(self, id: AnyId, *, reason: str = "discarded") -> JobState:
        """The same as `discard`, for async code."""
        return _told(id, await self.database.arun(store.move, _id_of(id), discard_change(reason)))

    # --- run --------------------------------------------------------------------------------------

    def run_worker(
        self,
        *,
        concurrency: int = 10,
        queues: Sequence[str] | None = None,
        until_empty: bool = False,
    ) -> None:
        """Run a worker in this thread, until a signal stops it or there is nothing left to do.

        It beats from a thread of its own: C code that holds the interpreter for longer than a lease
        loses its jobs to other workers. `onward worker` has no such limit.

        SIGTERM and SIGINT stop it in order, a second one at once. A thread that nothing can stop
        has been given back by then; it goes on beside the program, and ends with it at the latest.

        Args:
            concurrency: how many jobs at once.
            queues: which queues; by default those of the app's tasks.
            until_empty: end when no due job is left.

        Raises:
            InvalidOption: a concurrency that cannot work, no queue, or a name that no queue can
                have.
        """
        self.worker(concurrency=concurrency, queues=queues, until_empty=until_empty).run()

    def worker(
        self,
        *,
        concurrency: int = 10,
        queues: Sequence[str] | None = None,
        until_empty: bool = False,
    ) -> EmbeddedWorker:
        """A worker in a thread of this process: `with app.worker(): …` runs jobs meanwhile.

        The end of the block lets running jobs end within the grace of the settings, or of a
        `stop(grace=…)` in it. The arguments, and what they raise, are those of `run_worker`.
        """
        from onward.worker.embedded import EmbeddedWorker

        return EmbeddedWorker(self, concurrency=concurrency, queues=queues, until_empty=until_empty)

    def use(self, url: str, **options: Any) -> None:
        """Use another database from now on; the tasks stay. For the command line's `--database`."""
        self.url = url
        self.options = options or self.options
        two_libraries.forget(self.database)
        self.database = open_database(url, **self.options)
        two_libraries.watch(self.database)

    def close(self) -> None:
        """Close the connections. The app can be used again; it opens new ones."""
        two_libraries.forget(self.database)
        self.database.close()

    async def aclose(self) -> None:
        """The same as `close`, for async code."""
        two_libraries.forget(self.database)
        await self.database.aclose()

    def find_task(self, name: str) -> Task[Any, Any]:
        """The task of this name.

        Raises:
            UnknownTask: the app has none.
        """
        task = self.tasks.get(name)
        if task is None:
            from difflib import get_close_matches

            near = get_close_matches(name, self.tasks, n=3) or sorted(self.tasks)[:10]
            raise UnknownTask(
                f"this app has no task {name!r}",
                why=f"it has {len(self.tasks)} tasks, among them: {', '.join(near) or 'none'}",
                fix="import the module that registers it where the app is made",
            )
        return task

    def _decode_result(self, task: str, text: str) -> Any:
        known = self.tasks.get(task)
        if known is None:
            return decode_plain(text, task, noun="result")
        return known.signature.decode_result(text)


def _settings(given: object) -> Settings:
    if given is None:
        return Settings()
    if isinstance(given, Settings):
        return given
    raise InvalidOption(
        f"settings={safe_repr(given)} cannot work",
        why="they are a value of their own, which is checked where it is made",
        fix="settings=Settings(lease=30, beat=10), with: from onward import Settings",
    )


def _id_of(job: AnyId) -> str:
    return job.id if isinstance(job, Handle) else parse_id(job)


def _told(job: AnyId, state: JobState) -> JobState:
    """The state that a job was moved to; whoever named it by a handle sees it there, too."""
    if isinstance(job, Handle):
        job._learn(state)  # pyright: ignore[reportPrivateUsage]
    return state


def cancel_change(job: Job) -> Change | None:
    """What a request to stop makes of a job; None: it has been asked already."""
    if job.state in {JobState.CANCELLING, JobState.CANCELLED}:
        return None
    if job.state is JobState.RUNNING:
        return job.move(Event.ASK_CANCEL)
    if job.state in {JobState.QUEUED, JobState.WAITING}:
        return job.move(Event.CANCEL, ended=AttemptState.CANCELLED, reason="cancelled on request")
    return job.move(Event.CANCEL)


def requeue_change(job: Job) -> Change:
    """What a human's second chance makes of a dead job."""
    return job.move(Event.REQUEUE)


def discard_change(reason: object) -> Callable[[Job], Change]:
    """What giving up makes of a dead job.

    Raises:
        InvalidOption: the reason is no text.
    """
    if not isinstance(reason, str):
        raise InvalidOption(
            f"reason={safe_repr(reason)} is no text",
            why="people read it in the history of the job",
            fix='reason="the order was cancelled"',
        )
    clean = clean_text(str.__str__(reason), MOST_REASON)

    def change(job: Job) -> Change:
        return job.move(Event.DISCARD, reason=clean)

    return change
