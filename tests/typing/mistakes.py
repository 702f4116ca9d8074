# type: ignore
"""What type checkers must refuse: each line with a mark is an error in pyright and in mypy.

The first line silences them where they check the whole project; the test takes it away.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from onward import Call, Handle, Onward, current

app = Onward("sqlite:///never-opened.db")


@dataclass
class Receipt:
    """A result with fields."""

    number: int


@app.task
def plain(user_id: int, subject: str = "hi", *, urgent: bool = False) -> bool:
    return urgent or bool(user_id and subject)


@app.task(queue="mail")
async def later(order: int) -> Receipt:
    return Receipt(order)


@app.task(que="mail")  # error
def misspelt() -> None: ...


@app.task(priority="high")  # error
def wrong_priority() -> None: ...


@app.task("mail")  # error
def positional() -> None: ...


def check_arguments() -> None:
    plain.enqueue("5")  # error
    plain.enqueue()  # error
    plain.enqueue(5, 6)  # error
    plain.enqueue(5, "x", True)  # error
    plain.enqueue(5, urgnt=True)  # error
    plain.enqueue(user_id=5, urgent="yes")  # error
    plain.enqueue(5, user_id=5)  # error
    plain.call(None)  # error
    plain.call()  # error
    plain("5")  # error
    later.enqueue("5")  # error
    later.enqueue(order=5, express=True)  # error
    later.call("5")  # error


async def check_async_arguments() -> None:
    await plain.aenqueue("5")  # error
    await later.aenqueue()  # error
    await later.aenqueue(5, 6)  # error
    await later("5")  # error


def check_using() -> None:
    plain.using(queue="mail").enqueue("5")  # error
    plain.using(priority=5).call()  # error
    plain.using(queue=5)  # error
    plain.using(priority="high")  # error
    plain.using(priority=1.5)  # error
    plain.using(run_after="tomorrow")  # error
    plain.using(timeout="5 s")  # error
    plain.using(id=5)  # error
    plain.using(delay=5)  # error
    plain.using(timedelta(hours=1))  # error


def check_results() -> None:
    wrong: str = plain.enqueue(5).wait()  # error
    handle: Handle[str] = plain.enqueue(5)  # error
    call: Call[str] = plain.call(5)  # error
    print(later.enqueue(5).wait().total)  # error
    now: str = plain(5)  # error
    awaited: Receipt = later(5)  # error
    plain.enqueue(5).wait("10")  # error
    print(plain.enqueue(5).stat)  # error
    print(wrong, handle, call, now, awaited)


async def check_async_results() -> None:
    job: Handle[bool] = plain.aenqueue(5)  # error
    wrong: str = await (await later.aenqueue(5)).await_result()  # error
    await plain(5)  # error
    print(job, wrong)


def check_many() -> None:
    app.enqueue_many([plain.enqueue(5)])  # error
    app.enqueue_many(plain.call(5))  # error
    app.enqueue_many([plain])  # error
    app.enqueue_many([later(5)])  # error
    current().enqueue(plain.enqueue(5))  # error
    current().enqueue(plain)  # error
    app.get(5)  # error
