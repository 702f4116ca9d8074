"""What the doctor looks at: versions, settings, clocks, workers, queues, and the rules that hold.

Each examination yields diagnoses and changes nothing. Durability facts come first, because the rest
stands on them.
"""

from __future__ import annotations

import platform
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from onward.cli.options import Place
from onward.cli.places import file_of, opened
from onward.cli.values import duration, one_line
from onward.errors import DatabaseError
from onward.invariants import Finding, run_checks
from onward.lifecycle import JobState
from onward.overdue import watch
from onward.overview import Alarm, Overview, alarms, look
from onward.store import store
from onward.store.database import Database
from onward.store.migrate import newest
from onward.version import version

Level = Literal["ok", "note", "bad"]

SKEW = 2.0
"""Seconds that two clocks may be apart without a word."""

WAL_RESET_FIXED = (3, 51, 3)
"""SQLite before this may damage a file in WAL mode: https://sqlite.org/wal.html#walresetbug"""

OLDEST_POSTGRES = 14


class Diagnosis(Struct, frozen=True, kw_only=True):
    """One line of the examination. `meaning` and `fix` matter where the level is not `ok`."""

    code: str
    level: Level
    name: str
    what: str
    meaning: str = ""
    fix: str = ""
    rows: tuple[str, ...] = ()


def examine(place: Place) -> Iterator[Diagnosis]:
    """Every diagnosis. A database that cannot be opened ends the examination."""
    yield _sound(
        "versions", f"onward {version()}, Python {platform.python_version()}, {platform.system()}"
    )
    try:
        with opened(place) as database:
            yield from _examine(database)
    except DatabaseError as error:
        yield Diagnosis(
            code="database",
            level="bad",
            name="database",
            what=error.what,
            meaning=error.why or "without its database nothing can be examined",
            fix=error.fix or "check the URL, the server or the file",
        )


def _examine(database: Database) -> Iterator[Diagnosis]:
    yield from _clock(database)
    yield _sound("schema", f"version {database.schema_version()} of {newest(database.dialect)}")
    facts = database.facts()
    path = file_of(database)
    yield from _sqlite(facts, path) if path is not None else _postgres(facts)
    seen = look(database)
    yield from _workers(seen)
    yield from _alarms(alarms(seen, watch(database, seen)))
    yield from _dead(seen)
    for finding in run_checks(database):
        yield _rule(finding)


# --- the database ---------------------------------------------------------------------------------


def _clock(database: Database) -> Iterator[Diagnosis]:
    """How long an answer takes, and how far the database's clock is from ours."""
    database.read(store.now)
    before, started = time.time(), time.monotonic()
    theirs = database.read(store.now)
    took = time.monotonic() - started
    yield _sound("database", f"{database.shown_url} answers in {duration(took)}")
    if database.dialect == "sqlite":
        return  # Its clock is this machine's.
    skew = theirs - (before + took / 2)
    if abs(skew) <= SKEW:
        yield _sound("clock", f"{duration(abs(skew))} apart from the database's")
        return
    where = "behind" if skew > 0 else "ahead of"
    yield Diagnosis(
        code="clock",
        level="note",
        name="clock",
        what=f"this machine is {duration(abs(skew))} {where} the database",
        meaning="jobs and leases go by the database's clock, so nothing breaks; but logs do not "
        "fit together, and a run_after given as a moment comes early or late",
        fix="let both machines keep their clocks by NTP",
    )


def _sqlite(facts: dict[str, Any], path: Path) -> Iterator[Diagnosis]:
    yield _library(str(facts.get("sqlite")), str(facts.get("library")))
    yield _durability(
        "journal_mode",
        facts.get("journal_mode"),
        {"wal"},
        "readers and the writer would block each other",
    )
    yield _durability(
        "synchronous",
        facts.get("synchronous"),
        {"FULL", "EXTRA"},
        "a power cut may take back commits that were acknowledged: jobs enqueued, jobs finished",
    )
    yield _file(path)


def _library(found: str, through: str) -> Diagnosis:
    parts = tuple(int(part) for part in found.split(".") if part.isdecimal())
    if parts >= WAL_RESET_FIXED:
        return _sound("sqlite", f"{found} through {through}")
    return Diagnosis(
        code="sqlite",
        level="bad",
        name="sqlite",
        what=f"{found} through {through} is older than 3.51.3",
        meaning="before 3.51.3 SQLite could damage a file in WAL mode when two connections reset "
        "the log at one time",
        fix="use the default driver apsw, which bundles a current SQLite: pip install -U apsw",
    )


def _durability(code: str, found: Any, wanted: set[str], otherwise: str) -> Diagnosis:
    if str(found) in wanted:
        return _sound(code, str(found))
    return Diagnosis(
        code=code,
        level="note",
        name=code,
        what=f"{found}, not {' or '.join(sorted(wanted))}",
        meaning=otherwise,
        fix="leave synchronous out of the URL, unless speed is worth that to you",
    )


def _file(path: Path) -> Diagnosis:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return _sound("file", f"only its owner may read it ({mode:04o})")
    return Diagnosis(
        code="file",
        level="note",
        name="file",
        what=f"others on this machine may open it ({mode:04o})",
        meaning="arguments and results of jobs stand in it",
        fix=f"chmod 600 {path}",
    )


def _postgres(facts: dict[str, Any]) -> Iterator[Diagnosis]:
    server = str(facts.get("server_version"))
    major = server.split(".")[0]
    if major.isdecimal() and int(major) < OLDEST_POSTGRES:
        yield Diagnosis(
            code="postgres",
            level="note",
            name="postgres",
            what=f"server {server} is older than {OLDEST_POSTGRES}",
            meaning="its makers no longer mend it, and Onward is not tested on it",
            fix="upgrade the server",
        )
    else:
        most = facts.get("max_connections")
        what = f"server {server} through {facts.get('driver')}, {most} connections at most"
        yield _sound("postgres", what)
    yield _fsync(facts.get("fsync"))
    yield _synchronous_commit(facts.get("synchronous_commit"))
    yield _sound(
        "isolation", f"{facts.get('default_transaction_isolation')} (Onward asks for what it needs)"
    )


def _fsync(found: Any) -> Diagnosis:
    if found == "on":
        return _sound("fsync", "on")
    return Diagnosis(
        code="fsync",
        level="bad",
        name="fsync",
        what=f"{found}",
        meaning="a crash of the machine can destroy the database, not only its last commits",
        fix="set fsync = on in postgresql.conf (off is for servers whose data nobody needs, such "
        "as a test's)",
    )


def _synchronous_commit(found: Any) -> Diagnosis:
    if found not in {"off", "local"}:
        return _sound("synchronous_commit", str(found))
    return Diagnosis(
        code="synchronous_commit",
        level="note",
        name="synchronous_commit",
        what=str(found),
        meaning="a crash may take back commits that were acknowledged: jobs enqueued, jobs finished"
        if found == "off"
        else "a failover to a standby may take back commits that were acknowledged",
        fix="set synchronous_commit = on, for this database or for Onward's role",
    )


# --- workers and queues ---------------------------------------------------------------------------


def _workers(seen: Overview) -> Iterator[Diagnosis]:
    living = [worker for worker in seen.workers if worker.alive]
    slots = sum(worker.concurrency for worker in living)
    yield _sound("workers", f"{len(living)} alive with {slots:,} slots")
    versions = sorted({worker.version for worker in living} | {version()})
    if living and len(versions) > 1:
        yield Diagnosis(
            code="mixed_versions",
            level="note",
            name="versions differ",
            what=", ".join(versions),
            meaning="workers of several versions, or of another than this one, share the database",
            fix="normal while a deploy is under way; otherwise restart those that stayed behind",
        )


def _alarms(found: Iterable[Alarm]) -> Iterator[Diagnosis]:
    """What `onward status` would raise; limbo is among the rules below."""
    raised = [alarm for alarm in found if alarm.code != "limbo"]
    if not raised:
        yield _sound(
            "queues", "every due job has a worker that serves its queue and knows its task"
        )
    for alarm in raised:
        yield _alarm(alarm)


_ALARMS: dict[str, tuple[Level, str, str]] = {
    "queue_unserved": (
        "bad",
        "queue without workers",
        "its jobs wait until somebody serves the queue",
    ),
    "task_unknown": ("bad", "unknown task", "its jobs stay queued until a worker knows the task"),
    "overdue": (
        "bad",
        "jobs left lying",
        "a worker that could run them beats, and does not claim them",
    ),
    "worker_lost": (
        "note",
        "lost worker",
        "a worker ended without saying so: killed, out of memory, or cut off",
    ),
}


def _alarm(alarm: Alarm) -> Diagnosis:
    level, name, meaning = _ALARMS[alarm.code]
    return Diagnosis(
        code=alarm.code, level=level, name=name, what=alarm.what, meaning=meaning, fix=alarm.fix
    )


def _dead(seen: Overview) -> Iterator[Diagnosis]:
    count = seen.states.get(JobState.DEAD, 0)
    if count:
        yield Diagnosis(
            code="dead",
            level="note",
            name="dead jobs",
            what=f"{count:,} wait for a human",
            meaning="they are out of attempts; nothing happens to them until somebody decides",
            fix="onward dead list, then onward dead requeue or onward dead discard",
        )


# --- rules ----------------------------------------------------------------------------------------


def _rule(finding: Finding) -> Diagnosis:
    check = finding.check
    name = f"{check.key} {check.name}"
    code = check.statement.removeprefix("check_")
    if finding.holds:
        return Diagnosis(code=code, level="ok", name=name, what=check.meaning)
    many = f"{len(finding.offences):,}{' or more' if finding.more else ''}"
    return Diagnosis(
        code=code,
        level="bad",
        name=name,
        what=f"cannot be examined: {finding.problem}"
        if finding.problem
        else f"{many} against the rule",
        meaning=f"the rule: {check.meaning}",
        fix=check.fix,
        rows=tuple(f"{one_line(o.subject, 80)}  {o.what}" for o in finding.offences),
    )


def _sound(code: str, what: str) -> Diagnosis:
    return Diagnosis(code=code, level="ok", name=code.replace("_", " "), what=what)
