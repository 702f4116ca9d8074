"""A task: a function registered with an app, and the calls of it that are enqueued.

Options stand apart from the call (`using(...)`), so the function's own arguments stay type-checked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from onward.codec import Signature
from onward.config import seconds
from onward.errors import InvalidOption
from onward.ids import new_id, parse_id
from onward.job import NewJob
from onward.policy import Backoff
from onward.signals import Verdict

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")

MOST_ATTEMPTS = 10_000
MOST_NAME = 200

OnError = Mapping[type[BaseException], "Backoff | Verdict"]


class Options(Struct, frozen=True, kw_only=True):
    """How a call is enqueued. Durations are in seconds, `run_at` in seconds since the epoch."""

    queue: str = "default"
    priority: int = 0
    max_attempts: int = 5
    max_losses: int | None = None
    timeout: float | None = None
    delay: float | None = None
    run_at: float | None = None
    id: str | None = None
    connection: Any = None

    def __post_init__(self) -> None:
        check_name(self.queue, "queue")
        _check_range("priority", self.priority, -100, 100)
        _check_range("max_attempts", self.max_attempts, 1, MOST_ATTEMPTS)
        if self.max_losses is not None:
            _check_range("max_losses", self.max_losses, 0, MOST_ATTEMPTS)
        if self.timeout is not None and not 0 < self.timeout < 10 * 365 * 86_400:
            raise InvalidOption(
                f"timeout={self.timeout} cannot work",
                why="a time limit is more than 0 seconds and less than ten years",
                fix="timeout=30, or timeout=None for no limit",
            )


class Call(Generic[R]):
    """A call of a task, checked and serialised, that is not enqueued yet: for `enqueue_many` and `current().enqueue`."""

    __slots__ = ("connection", "job", "task")

    def __init__(self, task: Task[Any, R], job: NewJob, connection: Any) -> None:
        self.task = task
        self.job = job
        self.connection = connection

    def __repr__(self) -> str:
        return f"<Call of {self.task.name} as {self.job.id}>"


class Task(Generic[P, R]):
    """A function registered with an app. Made by `@app.task`."""

    def __init__(
        self,
        app: Onward,
        function: Callable[..., Any],
        name: str,
        options: Options,
        *,
        backoff: Backoff,
        on_error: OnError,
        isolation: str | None,
        signature: Signature | None = None,
    ) -> None:
        self.app = app
        self.function = function
        self.name = name
        self.options = options
        self.backoff = backoff
        self.on_error = on_error
        self.isolation = isolation
        self.is_async = inspect.iscoroutinefunction(function)
        self.signature = signature or Signature.of(function, name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """Check and serialise a call, to be enqueued together with others.

        Raises:
            InvalidArguments: the call does not fit the signature or its annotations.
            NotSerializable: a value has no faithful JSON form.
            PayloadTooLarge: the arguments are too large or nest too deeply.
        """
        return self._call(args, kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Enqueue a call; returns after the commit. In a caller's transaction: after the write, before the commit.

        Raises:
            InvalidArguments, NotSerializable, PayloadTooLarge: the call is refused; nothing is written.
            DatabaseUnavailable: the database did not answer; with `using(id=…)` the call can be repeated safely.
        """
        return self.app._enqueue_one(self._call(args, kwargs))  # pyright: ignore[reportPrivateUsage]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """The same as `enqueue`, for async code."""
        return await self.app._aenqueue_one(self._call(args, kwargs))  # pyright: ignore[reportPrivateUsage]

    def using(
        self,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_after: timedelta | datetime | float | None = None,
        max_attempts: int | None = None,
        max_losses: int | None = None,
        timeout: timedelta | float | None = None,
        id: str | UUID | None = None,
        connection: Any = None,
    ) -> Task[P, R]:
        """The same task with other options for the calls made through it.

        Args:
            queue: where the job goes.
            priority: −100 to 100; a higher one runs first.
            run_after: how long to wait (timedelta, or seconds), or the moment (an aware datetime).
            max_attempts: how many failed attempts make it dead.
            max_losses: how many losses beyond which it is dead.
            timeout: the time limit of one attempt (timedelta, or seconds).
            id: a UUID of the caller's; enqueuing the same call again with it changes nothing.
            connection: an open connection or session (psycopg, asyncpg, sqlite3, apsw, SQLAlchemy): the job is
                written through it, and exists if its transaction commits.

        Raises:
            InvalidOption: a value that cannot work.
        """
        given: dict[str, Any] = {
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
            "max_losses": max_losses,
            "timeout": None if timeout is None else seconds(timeout, "timeout"),
            "id": None if id is None else parse_id(id),
            "connection": connection,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        return self._with(replace(self.options, **changed, **_due(run_after)))

    def _with(self, options: Options) -> Task[P, R]:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.options = options
        return copy

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[R]:
        options = self.options
        text = self.signature.encode_arguments(args, kwargs)
        job = NewJob(
            id=options.id or new_id(),
            task=self.name,
            queue=options.queue,
            priority=options.priority,
            args=text,
            max_attempts=options.max_attempts,
            max_losses=losses_allowed(options),
            timeout=options.timeout,
            run_at=options.run_at,
            delay=options.delay,
        )
        return Call(self, job, options.connection)


class SyncTask(Task[P, R]):
    """A task made of a plain function; it runs in a thread."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, without a queue."""
        result: R = self.function(*args, **kwargs)
        return result


class AsyncTask(Task[P, R]):
    """A task made of an `async` function; it runs on the worker's loop."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, without a queue."""
        result: R = await self.function(*args, **kwargs)
        return result


def losses_allowed(options: Options) -> int:
    """By default three; none where one attempt is all there is, which so means "at most once"."""
    if options.max_losses is not None:
        return options.max_losses
    return 0 if options.max_attempts == 1 else 3


def default_name(function: Callable[..., Any]) -> str:
    """`module.function`. A script that is run by itself is known by the name under which it would be imported."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        if spec is not None:
            module = str(spec.name).removesuffix(".__main__")
        elif file:
            module = Path(file).stem
    return f"{module}.{function.__qualname__}"


def check_name(name: object, what: str) -> str:
    """A queue's or a task's name: text that any list, log line and command line can carry.

    Raises:
        InvalidOption: it is empty, too long, or has characters that hide or break things.
    """
    if (
        isinstance(name, str)
        and 0 < len(name) <= MOST_NAME
        and name.isprintable()
        and name == name.strip()
        and not set(name) & set(",*:=")
        and not name.startswith("-")
    ):
        return name
    raise InvalidOption(
        f"{what} {ascii(name)[:80]} cannot be used as a name",
        why=f"a name is 1 to {MOST_NAME} printable characters, does not start with '-', has no space around it and none of , * : =",
        fix='queue="mail", queue="reports.daily"',
    )


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return
    raise InvalidOption(
        f"{name}={value!r} cannot work", why=f"{name} is a whole number from {low} to {high}"
    )


def _due(run_after: timedelta | datetime | float | None) -> dict[str, float]:
    if run_after is None:
        return {}
    if not isinstance(run_after, datetime):
        delay = seconds(run_after, "run_after")
        if not abs(delay) <= 10 * 365 * 86_400:
            raise InvalidOption(
                f"run_after={run_after!r} cannot work", why="the longest delay is ten years"
            )
        return {"delay": max(0.0, delay)}
    if run_after.tzinfo is None:
        raise InvalidOption(
            f"run_after={run_after!r} has no time zone",
            why="a naive time is read differently by machines in different zones",
            fix="datetime.now(UTC) + timedelta(hours=1), or a timedelta",
        )
    return {"run_at": run_after.timestamp()}


