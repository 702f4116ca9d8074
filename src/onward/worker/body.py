"""The only step that runs user code: from a job to an outcome, whatever the code does.

The same for the loop, for threads and for processes of their own. Every exception that Python can
raise leads to a named outcome, `SystemExit`, `KeyboardInterrupt`, `MemoryError` and endless
recursion among them.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from onward.errors import OnwardError, PayloadUnreadable
from onward.failure import MOST_REASON, ErrorText, describe
from onward.job import Job
from onward.policy import Backoff, Discarded, Outcome, Raised, Rejected, Returned, Snoozed, Stopped
from onward.running import Current, set_current
from onward.signals import Cancelled, Discard, Retry, Snooze, Verdict
from onward.task import Task
from onward.text import clean_text, mro_of, safe_repr, type_name

FORKED = 70
"""The exit status of a process that a body has forked, and that came out of the body."""

_forks = 0
"""How many forks this process is away from the one that was started, by Python's own hook: to ask
for the process's number is a call of the system, and this is asked twice a job. A fork by C code
that passes the hook by is not seen, as it is not by the pools of connections.
"""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def run_body(task: Task[Any, Any], job: Job, current: Current) -> Outcome:
    """Run a plain function's body here, in this thread."""
    forks = _forks
    set_current(current)
    try:
        try:
            args, kwargs = task.signature.decode_arguments(job.args)
        except PayloadUnreadable as error:
            return Rejected(error_text(error))
        value = task.function(*args, **kwargs)
        return _returned(task, value, current)
    except BaseException as error:
        return _certainly(task, error, current)
    finally:
        set_current(None)
        _end_fork(forks)


async def run_async_body(task: Task[Any, Any], job: Job, current: Current) -> Outcome:
    """Run an `async` function's body on this loop."""
    forks = _forks
    set_current(current)
    try:
        try:
            args, kwargs = task.signature.decode_arguments(job.args)
        except PayloadUnreadable as error:
            return Rejected(error_text(error))
        value = await task.function(*args, **kwargs)
        return _returned(task, value, current)
    except BaseException as error:
        return _certainly(task, error, current)
    finally:
        _end_fork(forks)


def _end_fork(forks: int) -> None:
    """A process that the body has forked, and that comes back here, is not the attempt: it must not
    speak for it, nor go on as a copy of this worker.
    """
    if _forks != forks:
        os._exit(FORKED)


def _returned(task: Task[Any, Any], value: object, current: Current) -> Outcome:
    """A result that cannot be stored ends the job: the work is done, and another try would return
    the same.
    """
    current.end()
    try:
        text = task.signature.encode_result(value)
    except OnwardError as error:
        return Rejected(error_text(error))
    return Returned(text, tuple(current.follow_ups))


def _certainly(task: Task[Any, Any], error: BaseException, current: Current) -> Outcome:
    """An outcome, even where there is no memory left to describe the error."""
    current.end()
    try:
        return _outcome_of(task, error, current)
    except BaseException as another:
        return Raised(plain_error(type(another).__name__, "the error could not be described"))


def _outcome_of(task: Task[Any, Any], error: BaseException, current: Current) -> Outcome:
    match error:
        case Retry(after=after):
            return Raised(error_text(error), after=after)
        case Snooze(delay=delay):
            return Snoozed(delay)
        case Discard(why=why):
            return Discarded(_said(why))
        case Cancelled() | asyncio.CancelledError() if current.cancel_requested:
            return Stopped()
        case _:
            return _by_rule(task, error, current)


def _by_rule(task: Task[Any, Any], error: BaseException, current: Current) -> Outcome:
    """What the task says about this kind of exception; the nearest class in its ancestry counts."""
    # By identity: a class may not be hashable, if its metaclass says so.
    rule = next(
        (
            rule
            for ancestor in mro_of(type(error))
            for kind, rule in task.on_error.items()
            if kind is ancestor
        ),
        None,
    )
    text = error_text(error)
    match rule:
        case Verdict.BURY:
            return Raised(text, final=True)
        case Verdict.DROP:
            why = f"{type_name(type(error))}: dropped by the task's rule"
            return Discarded(why, by_rule=True)
        case Backoff():
            return Raised(text, backoff=rule)
        case _:
            return Raised(text)


def _said(why: object) -> str:
    """What somebody gave as a reason: mostly a text."""
    try:
        return clean_text(str(why), MOST_REASON)
    except Exception:
        return safe_repr(why)


def error_text(error: BaseException) -> str:
    """An exception as it is stored."""
    return encode_error(describe(error))


def encode_error(text: ErrorText) -> str:
    return msgspec.json.encode(text).decode()


def plain_error(kind: str, message: str) -> str:
    """An error that no exception tells of, as it is stored."""
    return encode_error(ErrorText(type=kind, message=message, traceback=""))
