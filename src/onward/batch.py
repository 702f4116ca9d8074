"""How calls reach the store: many in one transaction, or through a connection of the caller's.

In:  calls, checked and serialised.    Out: handles, after our commit (the caller's comes later).
A call with an id of the caller's may have been written before: then its handle shows the job as it
is there. All others have ids that nobody has seen yet, so the first try is a plain INSERT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import msgspec

from onward.codec import Signature
from onward.errors import (
    DatabaseError,
    IdConflict,
    PayloadUnreadable,
)
from onward.foreign import ENCODER, fields_of, is_pydantic
from onward.handle import Handle
from onward.job import NewJob
from onward.store import connections, portions, store
from onward.store.database import Again, Duplicate, Unknown
from onward.store.statements import Op
from onward.store.store import Record
from onward.text import kind_of, mro_of, type_name

if TYPE_CHECKING:
    from onward.app import Onward
    from onward.task import Call


def enqueue_all(app: Onward, calls: Sequence[Call[Any]]) -> list[Handle[Any]]:
    """Write the calls; those without a connection in one transaction."""
    there: dict[str, Record] = {}
    for part in _parts(calls):
        try:
            if part.connection is not None:
                there |= connections.write(
                    app.database,
                    part.connection,
                    part.write,
                    several=part.several,
                    repeats=part.repeats,
                )
            elif part.several:
                try:
                    there |= app.database.run(part.write)
                except Unknown:  # It may have taken: the repeat meets its own rows.
                    there |= app.database.run(part.write_again)
                if app.database.notifies:
                    with suppress(DatabaseError):  # A hint: what is written stays written.
                        app.database.enqueue([])  # Writes nothing, and wakes a worker that waits.
            else:
                app.database.enqueue(part.jobs)
        except Duplicate as error:
            raise enqueued_already() from error
    return _handles(app, calls, there)


async def aenqueue_all(app: Onward, calls: Sequence[Call[Any]]) -> list[Handle[Any]]:
    """The same as `enqueue_all`, for async code."""
    there: dict[str, Record] = {}
    for part in _parts(calls):
        try:
            if part.connection is not None:
                there |= await connections.awrite(
                    app.database,
                    part.connection,
                    part.write,
                    several=part.several,
                    repeats=part.repeats,
                )
            elif part.several:
                try:
                    there |= await app.database.arun(part.write)
                except Unknown:
                    there |= await app.database.arun(part.write_again)
                if app.database.notifies:
                    with suppress(DatabaseError):
                        await app.database.aenqueue([])
            else:
                await app.database.aenqueue(part.jobs)
        except Duplicate as error:
            raise enqueued_already() from error
    return _handles(app, calls, there)


def enqueued_already() -> IdConflict:
    """What to say of a call that has been enqueued before."""
    return IdConflict(
        "one of these calls is enqueued already",
        why="a call has the id of its job from the start, so it is one job",
        fix="make a call for each job; using(id=…) makes an enqueue that can be repeated",
    )


class _Part:
    """The calls that are written in one transaction: ours, or that of one connection."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.jobs: list[NewJob] = []
        self._explicit: dict[str, Call[Any]] = {}
        self._used: set[str] = set()

    def add(self, call: Call[Any]) -> None:
        if call.task.options.id is not None:
            first = self._explicit.setdefault(call.job.id, call)
            if first is not call:
                return self._check_same(first, call.job)
        elif call.used:
            self._used.add(call.job.id)
        self.jobs.append(call.job)

    def check_once(self) -> None:
        """Refuse a call that is here twice."""
        if len(self.jobs) > 1 and len({job.id for job in self.jobs}) < len(self.jobs):
            raise enqueued_already()

    @property
    def repeats(self) -> bool:
        """Whether a job may be there already."""
        return bool(self._explicit or self._used)

    @property
    def several(self) -> bool:
        """Whether it takes more than one statement."""
        return self.repeats or (len(self.jobs) > 1 and len(self._portions) > 1)

    @cached_property
    def _portions(self) -> list[Sequence[NewJob]]:
        return portions.cut(self.jobs)

    def write(self) -> Op[dict[str, Record]]:
        """Write all; returns those that were there already."""
        if self.repeats:
            return (yield from self.write_again())
        for portion in self._portions:
            yield from store.enqueue(portion, alone=len(self._portions) == 1)
        return {}

    def write_again(self) -> Op[dict[str, Record]]:
        """The same where some may be there: the caller's ids, or a write whose answer was lost."""
        there: dict[str, Record] = {}
        for portion in self._portions:
            born = yield from store.enqueue_again(portion, self._is_same)
            known = {job.id for job in portion} - born
            if known & self._used:  # A job of ours that is there, or has ended since.
                raise enqueued_already()
            there |= yield from _records(known & self._explicit.keys())
        return there

    def _is_same(self, job: NewJob, args: str) -> bool:
        call = self._explicit.get(job.id)
        return job.args == args or (
            call is not None and _same_arguments(call.task.signature, job.args, args)
        )

    def _check_same(self, first: Call[Any], second: NewJob) -> None:
        if first.job.task != second.task or not self._is_same(second, first.job.args):
            raise IdConflict(
                f"job id {second.id} is given to two calls, of {first.job.task} and {second.task}",
                why="an explicit id makes an enqueue repeatable: the same id means the same call",
                fix="one id for one call; uuid.uuid5(namespace, key) makes one from your key",
            )


def _same_arguments(signature: Signature, one: str, other: str) -> bool:
    """Whether two texts are the same arguments, in whatever order a set or a mapping stands."""
    try:
        return _sorted(signature.decode_arguments(one)) == _sorted(
            signature.decode_arguments(other)
        )
    except PayloadUnreadable:
        return False


def _sorted(value: Any) -> bytes:
    """A text of the value, to be compared, in which sets and mappings are sorted: by their items'
    texts, since enums or None cannot be.
    """
    kind = kind_of(value)
    if is_pydantic(kind):  # It has a form of its own.
        parts = [_sorted(msgspec.json.decode(ENCODER.encode(value)))]
    elif kind in (list, tuple):
        parts = [_sorted(item) for item in value]
    elif kind in (set, frozenset):
        parts = sorted(map(_sorted, value))
    else:
        entries = _entries(value)
        if entries is None:
            return ENCODER.encode(value)
        parts = sorted(_sorted(key) + b":" + _sorted(part) for key, part in entries)
    return b"%s(%s)" % (type_name(kind).encode(), b",".join(parts))


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a mapping holds, or the fields of an object; None: it is neither."""
    bases = mro_of(kind_of(value))
    if dict in bases:
        return cast(Iterable[tuple[Any, Any]], value.items())
    fields = None if Enum in bases else fields_of(value)
    return fields and [each for each in fields if each[1] is not msgspec.UNSET]


def _records(ids: Set[str]) -> Op[dict[str, Record]]:
    if not ids:
        return {}
    found = yield from store.records(sorted(ids))
    if len(found) < len(ids):
        raise Again  # Pruned just now, so it can be enqueued after all.
    return {record.job.id: record for record in found}


def _parts(calls: Sequence[Call[Any]]) -> Iterator[_Part]:
    """The calls by the connection that they go through; our own transaction comes last."""
    parts: dict[int, _Part] = {}
    for call in calls:
        key = 0 if call.connection is None else id(call.connection)
        if key not in parts:
            parts[key] = _Part(call.connection)
        parts[key].add(call)
    for call in calls:
        call.used = True
    for part in parts.values():
        part.check_once()
    own = parts.pop(0, None)
    yield from parts.values()
    if own is not None:
        yield own


def _handles(
    app: Onward, calls: Sequence[Call[Any]], there: Mapping[str, Record]
) -> list[Handle[Any]]:
    return [
        Handle(app, record=there[call.job.id])
        if call.job.id in there
        else Handle(app, call.job, None, call.connection)
        for call in calls
    ]
