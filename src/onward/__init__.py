"""Onward: background jobs for Python. Write a function, enqueue a call, a worker runs it.

    from onward import Onward

    app = Onward()

    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    job = add.enqueue(1, 2)
    print(job.wait(timeout=10))

What this module exports is public; everything else may change. Each name is imported when it is
first asked for: `import onward` alone costs next to nothing, and no command line waits for what it
does not use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.config import Settings
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
    from onward.running import Current, current
    from onward.signals import BURY, DROP, Cancelled, Discard, Retry, Snooze
    from onward.task import Call, Task

_HOMES = {
    "app": ("Onward",),
    "config": ("Settings",),
    "errors": (
        "DatabaseUnavailable",
        "IllegalTransition",
        "InvalidArguments",
        "InvalidOption",
        "JobFailed",
        "JobNotFound",
        "NotSerializable",
        "OnwardError",
        "PayloadTooLarge",
        "WaitRefused",
        "WaitTimeout",
    ),
    "events": ("Happened", "listen"),
    "handle": ("Handle",),
    "lifecycle": ("AttemptState", "Event", "JobState", "WorkerState"),
    "policy": ("Backoff",),
    "running": ("Current", "current"),
    "signals": ("BURY", "DROP", "Cancelled", "Discard", "Retry", "Snooze"),
    "task": ("Call", "Task"),
}

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


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"onward.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'onward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
