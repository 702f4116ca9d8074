"""Onward: background jobs for Python. Write a function, enqueue a call, a worker runs it.

    from onward import Onward

    app = Onward()

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    job = add.enqueue(1, 2)
    print(job.wait(timeout=10))

What this module exports is public; everything else may change.
"""

from onward.app import Onward
from onward.config import Settings
from onward.current import Current, current
from onward.errors import (
    DatabaseUnavailable,
    IllegalTransition,
    InvalidArguments,
    InvalidOption,
    JobFailed,
    JobNotFound,
    NotSerializable,
    OnwardError,
    PayloadTooLarge,
    WaitRefused,
    WaitTimeout,
)
from onward.events import Happened, listen
from onward.handle import Handle
from onward.lifecycle import AttemptState, Event, JobState, WorkerState
from onward.policy import Backoff
from onward.signals import BURY, DROP, Cancelled, Discard, Retry, Snooze
from onward.task import Call, Task

__all__ = [
    "BURY",
    "DROP",
    "AttemptState",
    "Backoff",
    "Call",
    "Cancelled",
    "Current",
    "DatabaseUnavailable",
    "Discard",
    "Event",
    "Handle",
    "Happened",
    "IllegalTransition",
    "InvalidArguments",
    "InvalidOption",
    "JobFailed",
    "JobNotFound",
    "JobState",
    "NotSerializable",
    "Onward",
    "OnwardError",
    "PayloadTooLarge",
    "Retry",
    "Settings",
    "Snooze",
    "Task",
    "WaitRefused",
    "WaitTimeout",
    "WorkerState",
    "current",
    "listen",
]
