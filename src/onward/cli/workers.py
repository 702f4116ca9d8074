"""`onward workers`: who runs jobs, and who did."""

from __future__ import annotations

from typing import Any

import click

from onward.cli.options import Place, examples, json_option, place_options
from onward.cli.places import opened
from onward.cli.screen import Screen, marked, message, print_json, report_damage
from onward.cli.table import Column
from onward.cli.values import Cut, Id, Past, Span, State, duration
from onward.lifecycle import WorkerState
from onward.overview import HOUR, WorkerLine, elapsed, read_workers
from onward.store import store

COLUMNS = (
    Column("id"),
    Column("name", elastic=True),
    Column("state"),
    Column("running"),
    Column("slots"),
    Column("queues", elastic=True),
    Column("process", elastic=True),
    Column("started_at", "started"),
    Column("lease_left", "lease"),
    Column("note", elastic=True),
)

_OPTIONAL = frozenset({"ended_at", "last_beat_at", "note", "reason", "silent", "lease_left"})


@click.command(
    epilog=examples(
        "onward workers",
        "onward workers --all",
        "onward workers --json",
    )
)
@click.option(
    "--all", "everyone", is_flag=True, help="Also those that ended more than an hour ago."
)
@json_option
@place_options
@click.pass_obj
def workers(place: Place, everyone: bool, as_json: bool) -> None:
    """List the workers.

    A worker is one process start. LEASE is what is left of its claim on its
    jobs; when that is over, its jobs are taken back. Of a lost one the note
    says when it was last heard of, and when that was noticed.
    """
    with opened(place) as database:
        now = database.read(store.now)
        found = [w for w in read_workers(database) if everyone or _recent(w, now)]
    items = marked([item(worker) for worker in found], _OPTIONAL)
    if as_json:
        print_json("workers/1", items=items)
    elif items:
        Screen(now).table(COLUMNS, items)
    else:
        message("no worker is alive; start one: onward worker module:app")
    if not as_json:
        report_damage(items)


def _recent(worker: WorkerLine, now: float) -> bool:
    return (elapsed(worker.ended_at, now) or 0.0) < HOUR


def item(worker: WorkerLine) -> dict[str, Any]:
    """A worker as a row and as a JSON object."""
    return {
        "id": Id(worker.id),
        "name": worker.name,
        "state": State(worker.state),
        "alive": worker.alive,
        "running": worker.running,
        "slots": worker.concurrency,
        "queues": worker.queues,
        "host": worker.host,
        "pid": worker.pid,
        "process": Cut(f"{worker.host}:{worker.pid}"),
        "version": worker.version,
        "started_at": Past(worker.started_at),
        "silent": Span(max(0.0, worker.silent) if worker.ended_at is None else None),
        "lease_left": Span(max(0.0, worker.lease_left) if worker.ended_at is None else None),
        "last_beat_at": Past(worker.beat_at),
        "ended_at": Past(worker.ended_at),
        "reason": Cut(worker.reason),
        "note": Cut(_note(worker)),
        "tasks": worker.tasks,
    }


def _note(worker: WorkerLine) -> str | None:
    if worker.overdue:
        return "its lease is over: it will be declared lost"
    heard = elapsed(worker.beat_at, worker.ended_at)
    if worker.state != WorkerState.LOST or heard is None:
        return worker.reason
    return f"{worker.reason}; last sign of life {duration(heard)} before that was noticed"
