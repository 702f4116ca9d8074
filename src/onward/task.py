"""A task: a function registered with an app, and the calls of it that are enqueued.

Options stand apart from the call (`using(...)`), so the function's own arguments stay type-checked.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeGuard, TypeVar, cast
from uuid import UUID

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from onward.batch import aenqueue_all, enqueue_all
from onward.codec import Signature
from onward.config import check_range, seconds
from onward.errors import InvalidArguments, InvalidOption
from onward.ids import new_id, parse_id
from onward.job import NewJob
from onward.names import check_name, is_async, place_of
from onward.policy import Backoff
from onward.signals import Verdict
from onward.text import safe_repr

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.handle import Handle

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

MOST_ATTEMPTS = 10_000

LATEST = 253_370_764_800.0
"""The start of the year 9999, in seconds since the epoch: a date that everything here can carry."""

OnError = Mapping[type[BaseException], Backoff | Verdict]


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
        for name, low, high in (
            ("priority", -100, 100),
            ("max_attempts", 1, MOST_ATTEMPTS),
            ("max_losses", 0, MOST_ATTEMPTS),
        ):
            value = getattr(self, name)
            if value is not None or name != "max_losses":
                # A plain number from here on, whatever class of numbers it was of.
                force_setattr(self, name, check_range(name, value, low, high))
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidOption(
                f"timeout={self.timeout:g} cannot work",
                why="a time limit is more than 0 seconds",
                fix="timeout=30, or leave it out for no limit",
            )

    def losses_allowed(self) -> int:
        """By default three; none where one attempt is all there is: that means "at most once"."""
        if self.max_losses is not None:
            return self.max_losses
        return 0 if self.max_attempts == 1 else 3


class Call(Generic[R_co]):
    """A call of a task, checked and serialised, that is not enqueued yet.

    For `enqueue_many` and `current().enqueue`.
    """

    __slots__ = ("connection", "job", "task", "used")

    def __init__(self, task: Task[Any, R_co], job: NewJob, connection: Any) -> None:
        self.task = task
        self.job = job
        self.connection = connection
        self.used = False  # Whether it has been handed to a write before: it is one job for ever.

    def __repr__(self) -> str:
        return f"<Call of {self.task.name} as {self.job.id}>"


class Task(Generic[P, R_co]):
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
        # What tools read of a function: its name, its place, its documentation, its annotations.
        functools.update_wrapper(cast(Any, self), function, updated=())
        self.app = app
        self.function = function
        self.name = name
        self.options = options
        self.backoff = backoff
        self.on_error = on_error
        self.isolation = isolation
        self.is_async = is_async(function)
        self.signature = signature or Signature.of(function, name)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R_co]:
        """Check and serialise a call, to be enqueued together with others.

        Raises:
            InvalidArguments: the call does not fit the signature or its annotations.
            NotSerializable: a value has no faithful JSON form.
            PayloadTooLarge: the arguments are too large or nest too deeply.
        """
        options = self.options
        job = NewJob(
            id=options.id or new_id(),
            task=self.name,
            queue=options.queue,
            priority=options.priority,
            args=self.signature.encode_arguments(args, kwargs),
            max_attempts=options.max_attempts,
            max_losses=options.losses_allowed(),
            timeout=options.timeout,
            run_at=options.run_at,
            delay=options.delay,
        )
        return Call(self, job, options.connection)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Enqueue a call; returns after the commit.

        The commit is its own: a transaction that you have open has no part in it, and when that is
        rolled back the job stays. With `using(connection=…)` the job is part of that transaction:
        this returns after the write, and the job exists if the transaction commits. On SQLite,
        whose file has one writer, that is the only way while yours has written.

        Raises:
            InvalidArguments, NotSerializable, PayloadTooLarge: the call is refused; nothing is
                written.
            IdConflict: the id given with `using(id=…)` belongs to another call.
            DatabaseUnavailable: the database did not answer; with `using(id=…)` the call can be
                repeated safely.
        """
        return enqueue_all(self.app, [self.call(*args, **kwargs)])[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """The same as `enqueue`, for async code."""
        return (await aenqueue_all(self.app, [self.call(*args, **kwargs)]))[0]

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
    ) -> Self:
        """The same task with other options for the calls made through it. None: as they are.

        Args:
            queue: where the job goes.
            priority: −100 to 100; a higher one runs first.
            run_after: how long to wait (timedelta, or seconds), or the moment (aware datetime).
            max_attempts: how many failed attempts make it dead.
            max_losses: how many losses beyond which it is dead.
            timeout: the time limit of one attempt (timedelta, or seconds).
            id: a UUID of the caller's; enqueuing the same call again with it changes nothing.
            connection: an open connection or session to the app's database (psycopg, psycopg2,
                asyncpg, sqlite3, apsw, SQLAlchemy): the job is written through it, and exists if
                its transaction commits. It must lead to the app's database.

        Raises:
            InvalidOption: a value that cannot work.
        """
        given: dict[str, Any] = {
            "queue": None if queue is None else check_name(queue, "queue"),
            "priority": priority,
            "max_attempts": max_attempts,
            "max_losses": max_losses,
            "timeout": None if timeout is None else seconds(timeout, "timeout"),
            "id": None if id is None else parse_id(id),
            "connection": connection,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        other = copy.copy(self)
        other.options = replace(self.options, **changed, **_due(run_after))
        return other


class SyncTask(Task[P, R_co]):
    """A task made of a plain function; it runs in a thread."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here and now, without a queue."""
        result: R_co = self.function(*args, **kwargs)
        return result


class Unsaid:
    """What no function returns.

    Only a function that returns Any fits a `Callable[P, Unsaid]`, so an overload of it in front
    keeps such a function from being taken for an async one. (mypy gives up and says Any.)
    """


class AsyncTask(Task[P, R_co]):
    """A task made of an `async` function; it runs on the worker's loop."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here and now, without a queue."""
        result: R_co = await self.function(*args, **kwargs)
        return result


def as_call(value: object, taker: str) -> Call[Any]:
    """What somebody handed in as a call; a coroutine is closed, so that it does not complain.

    Raises:
        InvalidArguments: it is no call.
    """
    if _is_call(value):
        return value
    if inspect.iscoroutine(value):
        value.close()
    raise InvalidArguments(
        f"{taker} was given {safe_repr(value)}, which is no call",
        why="a call is made by task.call(…), which checks its arguments",
        fix=f"{taker}(send.call(user_id=5)), with a task `send`",
    )


def check_app(call: Call[Any], app: Onward) -> None:
    """Refuse a call of another app.

    Raises:
        InvalidArguments: it is one.
    """
    if call.task.app is not app:
        raise InvalidArguments(
            f"{call.task.name} belongs to another app",
            why="each app has its own database",
            fix="enqueue it with the app that it is registered with",
        )


def _is_task(value: object) -> bool:
    return isinstance(value, Task)


def _is_call(value: object) -> TypeGuard[Call[Any]]:
    return isinstance(value, Call)


def check_function(function: object) -> None:
    """Refuse what cannot be a task.

    Raises:
        InvalidOption: it is no function, or one whose body does not run when it is called.
    """
    if not callable(function) or isinstance(function, type) or _is_task(function):
        raise InvalidOption(
            f"@app.task was given {safe_repr(function)}, which is no function",
            why="a task is a plain or an async function",
            fix='decorate a function; options go in parentheses: @app.task(queue="mail")',
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(
            f"{place_of(function)} is a generator function",
            why="calling it runs nothing of its body, and a job has one result",
            fix="return a list, or enqueue a job for each item",
        )


def check_rules(backoff: object, on_error: object, isolation: object) -> None:
    """Refuse what a task cannot go by when it fails.

    Raises:
        InvalidOption: a value that cannot work.
    """
    if not isinstance(backoff, Backoff):
        raise InvalidOption(
            f"backoff={safe_repr(backoff)} cannot work",
            why="the delays between tries grow by a rule",
            fix="backoff=Backoff(base=2, factor=3, cap=3600)",
        )
    known = isinstance(on_error, Mapping)
    rules: Mapping[object, object] = cast(Any, on_error) if known else {}
    bad = [
        f"{{{safe_repr(kind)}: {safe_repr(rule)}}}"
        for kind, rule in rules.items()
        if not (inspect.isclass(kind) and issubclass(kind, BaseException))
        or not isinstance(rule, (Backoff, Verdict))
    ]
    if bad or not known:
        raise InvalidOption(
            f"on_error={bad[0] if bad else safe_repr(on_error)} cannot work",
            why="it says for classes of exceptions what they mean for the job",
            fix="on_error={ValueError: BURY, NotThere: DROP, Busy: Backoff(base=60)}",
        )
    if isolation is not None and isolation != "process":
        raise InvalidOption(
            f"isolation={safe_repr(isolation)} cannot work",
            why="an attempt runs in the worker's process, or in a process of its own",
            fix='isolation="process", or leave it out',
        )


def _delay(run_after: object) -> float:
    try:
        return seconds(run_after, "run_after")
    except InvalidOption as error:
        raise InvalidOption(
            error.what,
            why="it is how long to wait, at most ten years, or a moment",
            fix="run_after=timedelta(minutes=5), run_after=300,"
            " run_after=datetime.now(UTC) + timedelta(hours=1)",
        ) from None


def _due(run_after: timedelta | datetime | float | None) -> dict[str, float | None]:
    """When a call is due, as options: after a delay or at a moment, whichever was said last."""
    if run_after is None:
        return {}
    if not isinstance(run_after, datetime):
        return {"delay": max(0.0, _delay(run_after)), "run_at": None}
    if run_after.utcoffset() is None:
        raise InvalidOption(
            f"run_after={safe_repr(run_after)} has no time zone",
            why="a naive time is read differently by machines in different zones",
            fix="datetime.now(UTC) + timedelta(hours=1), or a timedelta",
        )
    moment = run_after.timestamp()
    if moment >= LATEST:
        raise InvalidOption(
            f"run_after={safe_repr(run_after)} is too late", why="a moment is before the year 9999"
        )
    return {"run_at": moment, "delay": None}
