"""Ids: the caller's own make an enqueue repeatable; ours are unique and strictly rise."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from msgspec.structs import replace

from onward import Onward, batch, ids
from onward.errors import IdConflict
from onward.ids import new_id
from onward.store import portions, store
from onward.store.database import Again
from onward.store.statements import Op
from onward.task import SyncTask
from tests.front.shop import total
from tests.support import by_hand


def test_the_same_call_with_the_same_id_is_one_job(app: Onward, send: SyncTask[..., int]) -> None:
    key = uuid.uuid5(uuid.NAMESPACE_URL, "order/5")
    first = send.using(id=key).enqueue("x")
    again = send.using(id=str(key).upper(), priority=9).enqueue(what="x")
    assert first == again
    assert first.id == str(key)
    assert again.priority == 0, "nothing changes: the job is as it was first enqueued"
    assert total(app) == 1


@pytest.mark.parametrize("other", ["arguments", "task"])
def test_the_same_id_for_another_call_is_a_conflict(
    app: Onward, send: SyncTask[..., int], other: str
) -> None:
    key = uuid.uuid4()
    send.using(id=key).enqueue("x")
    post = app.task(name="shop.post")(send.function)
    calls = {"arguments": send.using(id=key).call("y"), "task": post.using(id=key).call("x")}
    with pytest.raises(IdConflict, match=str(key)) as refused:
        app.enqueue_many([calls[other]])
    assert "shop.send" in refused.value.what
    assert total(app) == 1


def test_the_same_id_twice_in_one_batch_is_one_job_or_a_conflict(
    app: Onward, send: SyncTask[..., int]
) -> None:
    task = send.using(id=uuid.uuid4())
    one, same = app.enqueue_many([task.call(1), task.call(1)])
    assert one == same
    assert total(app) == 1
    other = send.using(id=uuid.uuid4())
    with pytest.raises(IdConflict, match="two calls"):
        app.enqueue_many([other.call(1), send.call(), other.call(2)])
    assert total(app) == 1


def test_an_id_used_after_its_job_has_ended_shows_that_job_and_runs_nothing(
    app: Onward, send: SyncTask[..., int]
) -> None:
    task = send.using(id=uuid.uuid4())
    job = task.enqueue("x")
    by_hand.succeed(app, job.id, "3")
    again = task.enqueue("x")
    assert (again.state, again.result, again.attempt) == ("succeeded", 3, 1)
    assert again.wait(timeout=1) == 3
    with pytest.raises(IdConflict):
        send.using(id=job.id).enqueue("y")
    assert app.counts()["queued"] == 0


def test_an_id_used_after_its_job_was_pruned_is_a_new_job(
    app: Onward, send: SyncTask[..., int]
) -> None:
    task = send.using(id=uuid.uuid4(), timeout=5)
    job = task.enqueue("x")
    by_hand.succeed(app, job.id)
    old = app.get(job.id)
    by_hand.prune(app, job.id)
    new = app.get(send.using(id=job.id).enqueue("y").id)
    assert (new.state, new.attempt, new.args) == ("queued", 1, {"what": "y"})
    assert new.created_at > old.created_at
    assert (new.started_at, new.finished_at, new.result) == (None, None, None)
    assert app.database.read(by_hand.store.get, job.id).timeout is None
    assert new.attempts() == []


@pytest.mark.parametrize("looks", [2, 3])
def test_a_job_that_is_pruned_between_two_looks_is_looked_at_again(
    app: Onward, send: SyncTask[..., int], looks: int
) -> None:
    task = send.using(id=uuid.uuid4())
    row = app.database.read(store.read, "calls", ids=store.dumps([task.enqueue("x").id]))
    part = batch._Part(None)
    part.add(task.call("x"))
    writing = part.write()
    next(writing)
    # Nothing is new, nothing has ended, and then it is gone: at the first look at it, or later.
    for rows in [[], [], row][:looks]:
        writing.send(rows)
    with pytest.raises(Again):
        writing.send([])


def test_the_repeat_of_many_asks_for_all_of_them_at_once(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """In one open transaction: a round trip for each would hold it for minutes."""
    calls = [send.using(id=uuid.uuid4()).call(number) for number in range(30)]
    jobs = app.enqueue_many(calls)
    part = batch._Part(None)
    for call in calls:
        part.add(call)
    asked: list[str] = []

    def noted() -> Op[dict[str, Any]]:
        writing, rows = part.write(), None
        try:
            while True:
                statement = next(writing) if rows is None else writing.send(rows)
                asked.append(statement.name)
                rows = yield statement
        except StopIteration as end:
            found: dict[str, Any] = end.value
            return found

    assert app.database.run(noted).keys() == {job.id for job in jobs}
    assert len(asked) == len(set(asked)) < 6
    assert app.enqueue_many(calls) == jobs


def test_many_at_once_with_one_id_are_one_job(app: Onward, send: SyncTask[..., int]) -> None:
    task = send.using(id=uuid.uuid4())
    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(lambda _: task.enqueue("x"), range(100)))
    assert len(set(jobs)) == total(app) == 1


def test_a_call_is_one_job_so_it_cannot_be_enqueued_twice(
    app: Onward, send: SyncTask[..., int]
) -> None:
    call = send.call(1)
    app.enqueue_many([call])
    for calls in ([call], [send.call(2), call], [send.call(3)] * 2):
        with pytest.raises(IdConflict, match="enqueued already") as refused:
            app.enqueue_many(calls)
        assert "a call for each job" in refused.value.fix

    async def scene() -> None:
        with pytest.raises(IdConflict):
            await app.aenqueue_many([call])
        await app.aclose()

    asyncio.run(scene())
    assert total(app) == 1


def test_a_call_that_is_twice_among_very_many_is_refused_and_nothing_is_written(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """So many take several statements of one transaction."""
    call = send.call(1)
    calls = [call, *(send.call(number) for number in range(portions.MOST_ROWS)), call]
    with pytest.raises(IdConflict, match="enqueued already"):
        app.enqueue_many(calls)
    assert total(app) == 0
    assert len(app.enqueue_many(calls[1:])) == total(app) == len(calls) - 1


def test_a_call_whose_job_has_ended_is_enqueued_all_the_same(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """Its job is in the cold table by then: a second one with that id would be in both."""
    call = send.call(1)
    (job,) = app.enqueue_many([call])
    app.cancel(job.id)
    with pytest.raises(IdConflict, match="enqueued already"):
        app.enqueue_many([call])
    with pytest.raises(IdConflict, match="enqueued already"):
        app.enqueue_many([send.call(2), call])
    assert app.get(job.id).state == "cancelled"
    assert total(app) == 1


def test_ids_strictly_rise_and_are_uuids_of_version_seven() -> None:
    before = time.time_ns() // 1_000_000
    ids = [new_id() for _ in range(20_000)]
    assert all(one < other for one, other in itertools.pairwise(ids))
    for text in ids[::1_000]:
        parsed = uuid.UUID(text)
        assert (parsed.version, parsed.variant, str(parsed)) == (7, uuid.RFC_4122, text)
        assert before - 1 <= parsed.int >> 80 <= before + 60_000


def test_ids_rise_even_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_id()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert first < new_id() < new_id()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_ids_are_unique_across_threads_and_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the clock stopped, only chance tells the ids of one process from those of another.
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: [new_id() for _ in range(2_000)], range(8))
        found = list(itertools.chain.from_iterable(made))
    read, write = os.pipe()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os.write(write, "".join(new_id() for _ in range(500)).encode())
            os._exit(0)
        os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    found += [text[start : start + 36] for start in range(0, len(text), 36)]
    found += [new_id() for _ in range(500)]
    assert len(found) == len(set(found)) == 8 * 2_000 + 3 * 500 + 500


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_an_id_is_made_can_make_its_own() -> None:
    with ids._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # Ends it, if it waits for a lock that nobody in it holds.
            new_id()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


REPEATED = """
import sys
from onward import Onward

app = Onward(sys.argv[1])

@app.task(name="shop.tag")
def tag(names: set[str], marks: dict[str, int]) -> None: ...

marks = {"a": 1, "b": 2} if sys.argv[3] == "1" else {"b": 2, "a": 1}
tag.using(id=sys.argv[2]).enqueue({"x", "y", "z", "w"}, marks)
app.close()
"""


def test_the_order_of_a_set_or_a_mapping_makes_no_other_call(app: Onward) -> None:
    key = str(uuid.uuid4())
    for seed in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", REPEATED, app.url, key, seed],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert total(app) == 1


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Wall:
    colours: frozenset[Colour]


@pytest.mark.parametrize(
    ("kind", "value", "texts"),
    [
        (set[Colour], {Colour.RED, Colour.BLUE}, ['["red","blue"]', '["blue","red"]']),
        (set[int | None], {1, None}, ["[1,null]", "[null,1]"]),
        (set[int | str], {1, "1"}, ['[1,"1"]', '["1",1]']),
        (
            frozenset[frozenset[int]],
            frozenset({frozenset({1, 2}), frozenset({3})}),
            ["[[1,2],[3]]", "[[3],[2,1]]", "[[3],[1,2]]"],
        ),
        (
            dict[str, list[Wall]],
            {"a": [Wall(frozenset(Colour))], "b": []},
            [
                '{"a":[{"colours":["red","blue"]}],"b":[]}',
                '{"b":[],"a":[{"colours":["blue","red"]}]}',
            ],
        ),
    ],
    ids=["enums", "None", "kinds", "sets", "fields"],
)
def test_a_set_of_whatever_cannot_be_sorted_makes_no_other_call_either(
    app: Onward, kind: Any, value: Any, texts: list[str]
) -> None:
    def paint(what: Any) -> None: ...

    paint.__annotations__["what"] = kind
    task = app.task(name="shop.paint")(paint)
    for text in texts:
        job = replace(task.call(value).job, args=f'{{"what":{text}}}')
        app.database.run(store.enqueue, [job])
        assert task.using(id=job.id).enqueue(value).id == job.id
        with pytest.raises(IdConflict):
            task.using(id=job.id).enqueue(type(value)())
    assert total(app) == len(texts)


def test_a_follow_up_that_is_there_may_stand_in_another_order(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """As when it is enqueued from outside a job."""
    parent, child = send.enqueue(), send.using(id=uuid.uuid4())
    there = child.enqueue({"a": 1, "b": 2})
    again = child.call({"b": 2, "a": 1}).job
    change = by_hand.claim(app, parent.id).move(
        by_hand.Event.SUCCEED,
        ended=by_hand.AttemptState.SUCCEEDED,
        result="null",
        follow_ups=(again,),
    )
    assert app.database.run(store.apply, [change]) == {parent.id}
    assert child.enqueue({"b": 2, "a": 1}) == there
    assert total(app) == 2


def test_equal_numbers_of_other_types_are_other_arguments(
    app: Onward, send: SyncTask[..., int]
) -> None:
    task = send.using(id=uuid.uuid4())
    task.enqueue(1)
    for other in (True, 1.0, "1", [1]):
        with pytest.raises(IdConflict):
            task.enqueue(other)
