"""What type checkers must make of correct code: pyright and mypy, both strict, find nothing here.

`assert_type` fails in the checker where the two types are not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type
from uuid import UUID, uuid4

from onward import BURY, DROP, Backoff, Call, Handle, JobState, Onward, Task, current

app = Onward("sqlite:///never-opened.db")


@dataclass
class Receipt:
    """A result with fields."""

    number: int


# --- each kind of task, with and without options --------------------------------------------------


@app.task
def plain(user_id: int, subject: str = "hi", *, urgent: bool = False) -> bool:
    return urgent or bool(user_id and subject)


@app.task(queue="mail", max_attempts=5, timeout=30, priority=3)
def plain_with_options(user_id: int) -> Receipt:
    return Receipt(user_id)


@app.task
async def later(order: int, *lines: str, **notes: float) -> Receipt:
    return Receipt(order + len(lines) + len(notes))


@app.task(
    name="shop.later",
    timeout=timedelta(minutes=1),
    backoff=Backoff(base=1),
    on_error={ValueError: BURY, KeyError: DROP, OSError: Backoff(base=60)},
    isolation="process",
)
async def later_with_options(order: int) -> list[Receipt] | None:
    return [Receipt(order)]


@app.task()
def nothing() -> None:
    """No arguments, no result."""


@app.task
async def nothing_later() -> None:
    """The same on the loop."""


@app.task
def anything(value: Any) -> Any:
    return value


@app.task
def makes_coroutine(n: int) -> Coroutine[Any, Any, int]:
    """A plain function that returns a coroutine counts as an async one, here and when it runs."""
    return asynchronous(n)


async def asynchronous(n: int) -> int:
    return n


def declared_elsewhere(n: int) -> str:
    return str(n)


registered = app.task(declared_elsewhere)
registered_with_options = app.task(queue="mail")(declared_elsewhere)


# --- enqueue --------------------------------------------------------------------------------------


def check_enqueue() -> None:
    assert_type(plain.enqueue(5), Handle[bool])
    assert_type(plain.enqueue(user_id=5, subject="x", urgent=True), Handle[bool])
    assert_type(plain_with_options.enqueue(5), Handle[Receipt])
    assert_type(later.enqueue(5, "a", "b", weight=1.5), Handle[Receipt])
    assert_type(later_with_options.enqueue(order=5), Handle[list[Receipt] | None])
    assert_type(nothing.enqueue(), Handle[None])
    assert_type(nothing_later.enqueue(), Handle[None])
    loose: Handle[Any] = anything.enqueue(object())
    assert_type(loose.wait(), Any)
    assert_type(makes_coroutine.enqueue(5), Handle[int])
    assert_type(registered.enqueue(5), Handle[str])
    assert_type(registered_with_options.enqueue(n=5), Handle[str])


async def check_aenqueue() -> None:
    assert_type(await plain.aenqueue(5, urgent=True), Handle[bool])
    assert_type(await later.aenqueue(5), Handle[Receipt])
    assert_type(await later_with_options.aenqueue(5), Handle[list[Receipt] | None])
    assert_type(await nothing.aenqueue(), Handle[None])


def check_many() -> None:
    assert_type(plain.call(5), Call[bool])
    assert_type(later.call(5, "a"), Call[Receipt])
    assert_type(later_with_options.call(5), Call[list[Receipt] | None])
    calls = [plain.call(1), later.call(2), nothing.call()]
    assert_type(app.enqueue_many(calls), list[Handle[Any]])
    assert_type(app.enqueue_many(plain.call(n) for n in range(9)), list[Handle[Any]])


async def check_amany() -> None:
    assert_type(await app.aenqueue_many([plain.call(1), later.call(2)]), list[Handle[Any]])


# --- using ----------------------------------------------------------------------------------------


def check_using() -> None:
    moment = datetime.now(UTC)
    assert_type(plain.using(queue="mail").enqueue(5), Handle[bool])
    assert_type(plain.using(run_after=timedelta(hours=1), priority=10).call(5), Call[bool])
    assert_type(later.using(run_after=moment, id=uuid4()).enqueue(5, "a"), Handle[Receipt])
    assert_type(later.using(run_after=5, id="…", timeout=1.5).enqueue(5), Handle[Receipt])
    assert_type(plain.using(connection=object()).using(max_attempts=1).enqueue(5), Handle[bool])
    # What it is used for does not change what it is: it can still be called here and now.
    assert_type(plain.using(queue="mail")(5), bool)


async def check_using_async() -> None:
    assert_type(await later.using(queue="mail").aenqueue(5), Handle[Receipt])
    assert_type(await later.using(queue="mail")(5), Receipt)


# --- here and now ---------------------------------------------------------------------------------


def check_call() -> None:
    assert_type(plain(5, "x", urgent=True), bool)
    assert_type(plain_with_options(5), Receipt)
    value: int = anything(5)
    assert_type(value, int)


async def check_await() -> None:
    assert_type(await later(5, "a"), Receipt)
    assert_type(await later_with_options(5), list[Receipt] | None)
    assert_type(await makes_coroutine(5), int)


# --- results --------------------------------------------------------------------------------------


def check_results() -> None:
    assert_type(plain.enqueue(5).wait(), bool)
    assert_type(plain.enqueue(5).wait(timeout=1.5), bool)
    assert_type(later.enqueue(5).wait(10).number, int)
    assert_type(nothing.enqueue().refresh(), Handle[None])
    assert_type(app.get("…"), Handle[Any])
    assert_type(app.get(UUID(int=0)).state, JobState)
    assert_type(app.counts(), dict[str, int])
    assert_type(app.cancel(uuid4()), JobState)
    assert_type(app.cancel(plain.enqueue(5)), JobState)
    assert_type(app.get(plain.enqueue(5)), Handle[Any])
    assert_type(plain.enqueue(5).state == "succeeded", bool)


async def check_results_async() -> None:
    assert_type(await (await later.aenqueue(5)).await_result(timeout=1), Receipt)
    assert_type(await (await plain.aenqueue(5)).await_result(), bool)
    assert_type(await (await later.aenqueue(5)).arefresh(), Handle[Receipt])
    assert_type(await app.aget("…"), Handle[Any])
    assert_type(await app.acounts(), dict[str, int])


# --- in other hands -------------------------------------------------------------------------------


def takes_any_task(task: Task[[int], object]) -> Handle[object]:
    return task.enqueue(5)


def takes_anything_callable(function: Callable[[int], str]) -> str:
    return function(5)


def check_passing_on() -> None:
    assert_type(takes_any_task(plain_with_options), Handle[object])
    assert_type(takes_any_task(later_with_options), Handle[object])
    assert_type(takes_anything_callable(registered), str)
    handles: list[Handle[object]] = [plain.enqueue(5), later.enqueue(5)]
    assert_type(handles[0].wait(), object)


def check_current() -> None:
    attempt = current()
    assert_type(attempt.enqueue(plain.call(5)), str)
    assert_type(attempt.id, str)
    assert_type(attempt.attempt, int)
    attempt.log.info("at %d", attempt.attempt)
