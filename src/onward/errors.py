"""Every error that Onward raises: what happened, why, and what to do about it.

The first line of a message is complete by itself, because log collectors cut there.
Codes are stable: 1xx the caller's arguments, 2xx tasks and the app, 3xx the database, 4xx the life
of a job.
"""

from __future__ import annotations


class OnwardError(Exception):
    """Base of all Onward errors.

    Args:
        what: what happened, to which object; one sentence.
        why: the cause, in the words of the user's code.
        fix: what to do about it.
    """

    code = "OW000"

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"[{self.code}] {self.what}"]
        for name, text in (("why", self.why), ("fix", self.fix)):
            if text:
                lines.append(f"  {name}: " + text.replace("\n", "\n       "))
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.why, self.fix), self.__dict__


def _rebuild(kind: type[OnwardError], what: str, why: str, fix: str) -> OnwardError:
    """Make the error again from its parts, so that it survives pickling."""
    error = kind.__new__(kind)
    OnwardError.__init__(error, what, why=why, fix=fix)
    return error


class InvalidArguments(OnwardError, TypeError):
    """A call does not fit the task's signature or annotations."""

    code = "OW101"


class NotSerializable(OnwardError, TypeError):
    """A value has no faithful JSON form: it would come back as something else, or not at all."""

    code = "OW102"


class PayloadTooLarge(OnwardError, ValueError):
    """A value is larger or deeper than what is stored for one job."""

    code = "OW103"


class InvalidOption(OnwardError, ValueError):
    """An option of a task, an enqueue or the app has a value that cannot work."""

    code = "OW104"


class IdConflict(OnwardError, ValueError):
    """An explicit job id already belongs to another call."""

    code = "OW105"


class PayloadUnreadable(OnwardError, ValueError):
    """Stored arguments or a stored result do not fit today's code."""

    code = "OW106"


class UnknownTask(OnwardError, LookupError):
    """No task of this name is registered with the app."""

    code = "OW201"


class DuplicateTask(OnwardError, ValueError):
    """Two functions claim the same task name."""

    code = "OW202"


class OutsideJob(OnwardError, RuntimeError):
    """`onward.current()` was called outside a running job."""

    code = "OW203"


class AppNotFound(OnwardError, LookupError):
    """`module:app` does not lead to an Onward app."""

    code = "OW204"


class DatabaseError(OnwardError):
    """The database cannot do what was asked."""

    code = "OW300"


class DatabaseUnavailable(DatabaseError, ConnectionError):
    """The database cannot be reached, or went away; whether a write took is not known."""

    code = "OW301"


class SchemaMissing(DatabaseError):
    """The database has no Onward schema, or not this version of it."""

    code = "OW302"


class DriverConflict(DatabaseError):
    """Two SQLite libraries in one process on one file, or a connection of the wrong driver."""

    code = "OW303"


class DriverMissing(DatabaseError, ImportError):
    """The driver for this database is not installed."""

    code = "OW304"


class IllegalTransition(OnwardError):
    """A move that the table of the job's life does not have."""

    code = "OW401"


class JobNotFound(OnwardError, LookupError):
    """No job has this id (it may have been pruned)."""

    code = "OW402"


class JobFailed(OnwardError):
    """The job that was waited for ended dead or cancelled."""

    code = "OW403"


class WaitTimeout(OnwardError, TimeoutError):
    """The job had not ended when the time-out of the wait was over; the job goes on."""

    code = "OW404"


class WaitRefused(OnwardError, RuntimeError):
    """The wait could never end: the job is enqueued in a transaction that is still open here."""

    code = "OW405"
