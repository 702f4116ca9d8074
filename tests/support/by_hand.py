"""Jobs carried through their lives by hand, where no worker is wanted."""

from __future__ import annotations

from onward import Onward
from onward.ids import new_id
from onward.job import Job
from onward.lifecycle import AttemptState, Event, JobState
from onward.store import store
from onward.store.store import FIRST_ID, Registration


def register(app: Onward) -> str:
    """A worker with a long lease that knows all tasks of the app; returns its id."""
    worker = Registration(
        id=new_id(),
        name="by hand",
        host="here",
        pid=1,
        version="0",
        queues=("default",),
        tasks=tuple(app.tasks),
        concurrency=100,
        lease=3600.0,
    )
    app.database.run(store.register, worker)
    return worker.id


def claim(app: Onward, id: str, *, worker: str | None = None) -> Job:
    """Claim one job, and whatever else is due in its lane, unless it is running already."""
    job = app.database.read(store.get, id)
    if job.state is JobState.RUNNING:
        return job
    owner = worker or register(app)
    claimed = app.database.run(
        store.claim,
        owner,
        store.dumps(list(app.tasks)),
        (job.queue, job.priority),
        (0.0, FIRST_ID),
        10_000,
    )
    (found,) = [each.job for each in claimed if each.job.id == id]
    return found


def succeed(app: Onward, id: str, result: str = "null") -> None:
    """queued > running > succeeded, with this JSON text as the result."""
    change = claim(app, id).move(Event.SUCCEED, ended=AttemptState.SUCCEEDED, result=result)
    assert app.database.run(store.apply, [change]) == {id}


def bury(app: Onward, id: str, error: str = "boom") -> None:
    """queued > running > dead."""
    change = claim(app, id).move(
        Event.BURY, ended=AttemptState.FAILED, reason="error", error=error, failures=1
    )
    assert app.database.run(store.apply, [change]) == {id}


def prune(app: Onward, id: str) -> None:
    """Let retention take a succeeded job."""
    assert app.database.run(store.prune, JobState.SUCCEEDED, -1.0, 10_000) >= 1
    assert app.database.read(store.read, "ids_like", low=id, high=id) == []
