"""A database with jobs in every state, moved by hand with the store's operations: no waiting."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from onward.app import cancel_change, discard_change, requeue_change
from onward.ids import new_id
from onward.job import Job, NewJob
from onward.lifecycle import AttemptState, Event
from onward.policy import Backoff, Discarded, Outcome, Raised, Released, Returned, Stopped
from onward.policy import recover as decide_recovery
from onward.policy import settle as decide
from onward.store import store
from onward.store.database import Database
from tests.store.builders import shift_clock

ERROR = (
    '{"type":"shop.ApiError","message":"no such user: 7",'
    '"traceback":"Traceback (most recent call last):\\nshop.ApiError: no such user: 7"}'
)

RAISED = Raised(error=ERROR)
FATAL = Raised(error=ERROR, final=True)

_NOW = Backoff(base=1e-9, factor=1, jitter=0)


class Scene:
    """Jobs and workers of a database, and short ways to move them.

    Args:
        database: its tables are made.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.migrate()
        self.worker = self.start_worker()

    @contextmanager
    def ago(self, seconds: float) -> Generator[None]:
        """What happens inside happened so many seconds ago."""
        shift_clock(self.database, -seconds)
        try:
            yield
        finally:
            shift_clock(self.database, 0)

    def start_worker(self, **given: Any) -> str:
        """Register a worker with a lease of an hour; returns its id."""
        values: dict[str, Any] = {
            "id": new_id(),
            "name": "web-1",
            "host": "here",
            "pid": 4711,
            "version": "0.1.0",
            "queues": ("default",),
            "tasks": ("shop.mail",),
            "concurrency": 10,
            "lease": 3600.0,
        }
        worker = store.Registration(**(values | given))
        self.database.run(store.register, worker)
        return worker.id

    def lose_worker(self, worker: str) -> None:
        """Declare it lost, and nothing else: no sweep."""
        assert self.database.run(store.lose, worker, "its process was killed by signal 9")

    def enqueue(self, **given: Any) -> str:
        """A queued job; returns its id."""
        values: dict[str, Any] = {
            "id": new_id(),
            "task": "shop.mail",
            "queue": "default",
            "priority": 0,
            "args": '{"user_id":7}',
            "max_attempts": 3,
            "max_losses": 3,
        }
        job = NewJob(**(values | given))
        self.database.enqueue([job])
        return job.id

    def job(self, id: str) -> Job:
        return self.database.read(store.get, id)

    def claim(self, id: str, worker: str | None = None) -> str:
        """queued > running, for just this job."""
        job, place = self.job(id), self.database.read(store.record, id).run_at
        before = str(uuid.UUID(int=uuid.UUID(id).int - 1))
        claimed = self.database.run(
            store.claim,
            worker or self.worker,
            store.dumps([job.task]),
            (job.queue, job.priority),
            (place, before),
            1,
        )
        assert [found.job.id for found in claimed] == [id]
        return id

    def settle(self, id: str, outcome: Outcome) -> str:
        """End the running attempt so; a retry is due at once."""
        change = decide(self.job(id), outcome, _NOW, chance=0.0)
        assert self.database.run(store.apply, [change]) == {id}
        return id

    def attempt(self, id: str, outcome: Outcome) -> str:
        """One whole attempt."""
        return self.settle(self.claim(id), outcome)

    def recover(self) -> None:
        """What a sweep does."""
        self.database.run(store.sweep, decide_recovery)

    def ask_cancel(self, id: str) -> str:
        self.database.run(store.move, id, cancel_change)
        return id

    def requeue(self, id: str) -> str:
        self.database.run(store.move, id, requeue_change)
        return id

    def dead(self, **given: Any) -> str:
        """A job that failed for good at its first attempt."""
        return self.attempt(self.enqueue(**given), FATAL)

    def everything(self) -> dict[str, str]:
        """A job in every state, by every way that leads there."""
        lost = self.start_worker(name="web-2")
        found = {
            "queued": self.enqueue(),
            "later": self.enqueue(delay=3600.0),
            "retried": self.attempt(self.attempt(self.enqueue(), RAISED), RAISED),
            "released": self.attempt(self.enqueue(), Released()),
            "running": self.claim(self.enqueue()),
            "cancelling": self.ask_cancel(self.claim(self.enqueue())),
            "waiting": self._suspended(),
            "succeeded": self.attempt(self.attempt(self.enqueue(), RAISED), Returned(result="3")),
            "cancelled": self.ask_cancel(self.enqueue()),
            "dropped": self.attempt(self.enqueue(), Discarded(why="too late")),
            "stopped": self.settle(self.ask_cancel(self.claim(self.enqueue())), Stopped()),
            "failed_cancelling": self.settle(self.ask_cancel(self.claim(self.enqueue())), RAISED),
            "dead": self._exhausted(),
            "dead_again": self._dead_again(),
            "requeued": self.requeue(self.dead()),
            "discarded": self._discarded(),
            "lost": self.claim(self.enqueue(), lost),
            "lost_for_good": self.claim(self.enqueue(max_attempts=1, max_losses=0), lost),
            "lost_cancelling": self.ask_cancel(self.claim(self.enqueue(), lost)),
        }
        self.lose_worker(lost)
        self.recover()
        return found

    def _suspended(self) -> str:
        id = self.claim(self.enqueue())
        change = self.job(id).move(Event.SUSPEND, ended=AttemptState.RELEASED)
        assert self.database.run(store.apply, [change]) == {id}
        return id

    def _exhausted(self) -> str:
        id = self.enqueue(max_attempts=2)
        return self.attempt(self.attempt(id, RAISED), RAISED)

    def _dead_again(self) -> str:
        id = self.requeue(self._exhausted())
        return self.attempt(self.attempt(id, RAISED), RAISED)

    def _discarded(self) -> str:
        id = self.dead()
        self.database.run(store.move, id, discard_change("nobody wants it"))
        return id
