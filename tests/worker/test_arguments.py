"""What a body is given and what it gives back: nothing of it leaves a job in limbo."""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import onward
from onward import Discard, Onward, current
from onward.worker.isolation import frame
from onward.worker.loading import app_options
from tests.store.builders import hand, loosen
from tests.support import tasks
from tests.support.ledger import Ledger
from tests.support.workers import ROOT, TARGET, wait_until
from tests.worker.history import ends, last_error, starts, wait_for, wait_over


def test_every_attempt_sees_the_original_arguments(app: Onward) -> None:
    """What one attempt does to its list, the next does not see."""
    seen: list[list[int]] = []

    @app.task(max_attempts=3, backoff=tasks.SOON)
    def mutate(numbers: list[int], *, options: dict[str, Any]) -> None:
        seen.append([*numbers, len(options)])
        numbers.append(99)
        options["more"] = True
        raise RuntimeError

    with app.worker():
        wait_for(mutate.enqueue([1, 2], options={"one": 1}), "dead")
    assert seen == [[1, 2, 1]] * 3


def test_arguments_that_no_longer_fit_end_dead_at_once(app: Onward) -> None:
    """A signature that has changed: one attempt and a reason that names the argument. Once the code
    fits again, a requeue runs the job.
    """

    @app.task(name="report", max_attempts=5)
    def old(user: int, style: str) -> str:
        return f"{user} {style}"

    job = old.enqueue(5, style="short")
    app.tasks.clear()

    @app.task(name="report", max_attempts=5)
    def new(user: int) -> str:
        return f"{user}"

    with app.worker():
        wait_for(job, "dead")
    assert ends(job) == ["failed: rejected"]
    assert "style" in last_error(job).message
    app.tasks["report"] = old
    with app.worker():
        job_again = app.get(job.id)
        app.requeue(job.id)
        assert job_again.wait(10) == "5 short"
    assert ends(job) == ["failed: rejected", "succeeded"]


def test_arguments_of_another_type_than_today_end_dead_at_once(app: Onward) -> None:
    """Stored text where a number is wanted now: rejected, with the path in the reason."""

    @app.task(name="report")
    def old(user: str) -> None: ...

    job = old.enqueue("five")
    app.tasks.clear()

    @app.task(name="report")
    def new(user: int) -> None: ...

    with app.worker():
        wait_for(job, "dead")
    assert ends(job) == ["failed: rejected"]
    assert "user" in last_error(job).message


def test_damaged_arguments_end_dead_and_hinder_nobody(app: Onward) -> None:
    """A row whose arguments a hand has damaged is rejected; its neighbours run."""

    @app.task
    def add(x: int, y: int = 0) -> int:
        return x + y

    jobs = [add.enqueue(i, 1) for i in range(5)]
    with hand(app.database) as dba:
        dba.sql("UPDATE onward.job SET args = :args WHERE id = :id", args="[1,", id=jobs[2].id)
    with app.worker():
        wait_over(jobs)
    assert [job.state for job in jobs] == [
        "succeeded",
        "succeeded",
        "dead",
        "succeeded",
        "succeeded",
    ]
    assert ends(jobs[2]) == ["failed: rejected"]


class Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["echo", "aecho", "isolated_echo"])
def test_a_pickle_in_a_row_is_rejected_and_runs_nothing(
    shop: Onward, ledger: Ledger, tmp_path: Path, name: str
) -> None:
    """Whoever can write to the database cannot run code: a payload is JSON text, or nothing. SQLite
    whose tables were loosened would also keep a BLOB; one is refused even if it holds good JSON.
    """
    bomb = Bomb(tmp_path / "made")
    payloads: list[str | bytes] = [pickle.dumps(bomb, protocol=0).decode()]
    if shop.database.dialect == "sqlite":
        payloads += [pickle.dumps(bomb, protocol=5), b'{"value":1}']
    task = getattr(tasks, name)
    jobs = [task.using(max_attempts=3).enqueue("x") for _ in payloads]
    neighbour = task.enqueue("fine")
    with hand(shop.database) as dba:
        if dba.dialect == "sqlite":
            loosen(dba)
        for job, payload in zip(jobs, payloads, strict=True):
            dba.sql(
                "UPDATE onward.job SET args = :payload WHERE id = :id", payload=payload, id=job.id
            )
    with shop.worker():
        wait_over([*jobs, neighbour])
    assert neighbour.state == "succeeded"
    for job, payload in zip(jobs, payloads, strict=True):
        assert (job.state, ends(job)) == ("dead", ["failed: rejected"])
        assert ("BLOB" in last_error(job).message) is isinstance(payload, bytes)
        assert not starts(ledger, job)
    assert not bomb.path.exists()


def test_no_module_reads_anything_but_json() -> None:
    for module in Path(onward.__file__).parent.rglob("*.py"):
        assert not re.search(
            r"(import|from) (pickle|marshal|shelve)|\b(eval|exec)\(", module.read_text()
        )


def test_an_order_that_cannot_be_read_ends_its_process(shop: Onward) -> None:
    """Its sender waits for an outcome, and learns of the end of the process instead."""
    environment = {
        "ONWARD_TARGET": TARGET,
        "ONWARD_OPTIONS": app_options(shop),
        "ONWARD_MODULES": "",
        "ONWARD_PATH": str(ROOT),
    }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "onward.worker.isolated",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno()],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        ours.sendall(frame({"type": "Run", "job": {"args": b"{}"}}))
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValidationError" in told


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


async def coroutine() -> None: ...


RESULTS: dict[str, Any] = {
    "object": lambda: object(),
    "in a list": lambda: [1, {"a": object()}],
    "nan": lambda: float("nan"),
    "generator": lambda: (i for i in range(3)),
    "function": lambda: print,
    "lone surrogate": lambda: "x\ud800",
    "deep": lambda: nested(5_000),
    "large": lambda: "x" * 40_000_000,
    "keys that merge": lambda: {1: "a", "1": "b"},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_that_cannot_be_stored_ends_dead_with_the_reason(app: Onward, kind: str) -> None:
    """Or, where it can be stored faithfully after all, succeeds; never is the job left running."""

    @app.task(max_attempts=3)
    def give() -> Any:
        return RESULTS[kind]()

    with app.worker():
        job = give.enqueue()
        wait_for(job, "dead", "succeeded")
    if job.state == "succeeded":
        assert kind == "lone surrogate"
        assert job.result == "x\ud800"
    else:
        assert ends(job) == ["failed: rejected"]
        assert last_error(job).message


NUMBERS: dict[str, tuple[Any, Any]] = {
    "nan": (float("nan"), None),
    "inf": (float("inf"), None),
    "-inf": (float("-inf"), None),
    "1e308 * 10": (1e308 * 10, None),
    "Decimal nan": (Decimal("NaN"), "Decimal('NaN')"),
    "-0.0": (-0.0, "-0.0"),
    "1e308": (1e308, "1e+308"),
    "Decimal": (Decimal("-0.10"), "Decimal('-0.10')"),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("annotated", [True, False])
def test_an_odd_number_as_a_result_comes_back_as_it_is_or_is_refused(
    app: Onward, number: str, annotated: bool
) -> None:
    """The same on both databases; never is the job left running, nor the number bent."""
    value, shown = NUMBERS[number]

    def give() -> Any:
        return value

    if annotated:
        give.__annotations__["return"] = type(value)
    elif isinstance(value, Decimal):
        shown = None  # Without its annotation it would come back as text.
    job = app.task(name="give", max_attempts=3)(give).enqueue()
    with app.worker():
        wait_over([job])
    if shown is None:
        assert (job.state, ends(job)) == ("dead", ["failed: rejected"])
        assert "result" in str(last_error(job))
    else:
        assert (job.state, repr(job.result)) == ("succeeded", shown)


@pytest.mark.parametrize("name", ["echo", "aecho", "isolated_echo"])
def test_a_body_gets_ten_megabytes(shop: Onward, name: str) -> None:
    text = "ä€" * 2_000_000
    with shop.worker():
        assert getattr(tasks, name).enqueue(text).wait(60) == text


def test_a_coroutine_as_a_result_is_a_mistake_that_is_named(app: Onward) -> None:
    """A plain function that forgets to await ends dead, with a reason."""

    @app.task
    def forgets() -> Any:
        never = coroutine()
        never.close()  # Python would warn of it later, at a moment of its own.
        return never

    with app.worker():
        job = forgets.enqueue()
        wait_for(job, "dead")
    assert "coroutine" in last_error(job).message


def test_a_result_comes_back_with_its_nul(app: Onward) -> None:
    """A NUL in a result, a key and an argument survives on both databases."""

    @app.task
    def swap(value: dict[str, str]) -> dict[str, str]:
        return {item: key for key, item in value.items()}

    with app.worker():
        assert swap.enqueue({"a\x00b": "c\x00"}).wait(10) == {"c\x00": "a\x00b"}


NASTY = ["boom\x00tail", "x\ud800y", "\x1b[31mred", "a\nb", "'; DROP TABLE job; --", "🙂" * 500]


def test_error_texts_that_fight_back_are_recorded(app: Onward) -> None:
    """NUL, a lone surrogate, control characters: two failed attempts, then dead with the text."""

    @app.task(max_attempts=2, backoff=tasks.SOON)
    def fail(number: int) -> None:
        raise ValueError(NASTY[number])

    jobs = [fail.enqueue(number) for number in range(len(NASTY))]
    with app.worker():
        wait_over(jobs)
    for job, text in zip(jobs, NASTY, strict=True):
        assert job.state == "dead"
        assert ends(job) == ["failed: error"] * 2
        assert last_error(job).type == "ValueError"
        assert last_error(job).message[-1] == text[-1]
        assert last_error(job).message.isprintable() or "\n" in text


def test_an_error_class_and_notes_that_fight_back_are_recorded(app: Onward) -> None:
    """What stands before and after a NUL or a lone surrogate survives, wherever it is."""
    odd = type("Odd", (Exception,), {"__module__": "shop"})
    odd.__qualname__ = "Bo\x00om\ud800Error"

    @app.task(max_attempts=2, backoff=tasks.SOON)
    async def fail() -> None:
        error = odd("message\x00tail")
        error.add_note("note\x00with\udfffend")
        raise error

    with app.worker():
        job = fail.enqueue()
        wait_for(job, "dead")
    assert ends(job) == ["failed: error"] * 2
    assert last_error(job).type == r"shop.Bo\x00om\ud800Error"
    assert last_error(job).message == r"message\x00tail"
    assert r"note\x00with\udfffend" in last_error(job).traceback


@pytest.mark.parametrize("text", NASTY)
def test_reasons_that_fight_back_are_recorded_and_spare_the_neighbours(
    app: Onward, text: str
) -> None:
    """The reason of a Discard is a text like any other, and is written in one batch with others."""

    @app.task(name="drop")
    async def drop() -> None:
        raise Discard(text)

    @app.task(name="fine")
    async def fine() -> None: ...

    jobs = app.enqueue_many([fine.call(), drop.call(), fine.call(), drop.call(), fine.call()])
    with app.worker():
        wait_over(jobs)
    assert [job.state for job in jobs] == [
        "succeeded",
        "cancelled",
        "succeeded",
        "cancelled",
        "succeeded",
    ]
    assert jobs[1].refresh().reason


def test_nothing_is_imported_by_a_name_in_the_database(
    app: Onward, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that a hand points at `os.system` stays queued; the log names it; nobody else waits."""

    @app.task
    def safe(text: str) -> str:
        return text

    job = safe.enqueue("touch /tmp/never")
    with hand(app.database) as dba:
        dba.sql("UPDATE onward.job SET task = 'os.system' WHERE id = :id", id=job.id)
    with caplog.at_level(logging.WARNING, "onward"), app.worker():
        assert safe.enqueue("fine").wait(10) == "fine"
        wait_until(lambda: "os.system" in caplog.text)
    assert job.refresh().state == "queued"
    assert job.attempt == 1
    job.cancel()


def test_a_large_follow_up_and_result_travel_from_an_isolated_process(shop: Onward) -> None:
    """A megabyte each way, and the process is used again."""
    text = "ä" * 400_000
    with shop.worker():
        for _ in range(2):
            assert tasks.isolated_echo.enqueue(text).wait(20) == text


def test_a_follow_up_whose_id_is_there_already_changes_nothing(app: Onward) -> None:
    """An explicit id makes a follow-up repeatable, as it makes an enqueue repeatable."""

    @app.task
    def child(x: int) -> int:
        return x

    @app.task(max_attempts=2, backoff=tasks.SOON)
    def parent(id: str) -> None:
        current().enqueue(child.using(id=id).call(1))

    existing = child.enqueue(1)
    with app.worker():
        assert existing.wait(10) == 1
        job = parent.enqueue(existing.id)
        wait_for(job, "succeeded", "dead")
    assert ends(job) == ["succeeded"]
    assert app.counts()["succeeded"] == 2
