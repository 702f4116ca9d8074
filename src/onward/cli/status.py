"""`onward status`: the system on one screen, with exit status 1 while an alarm is on."""

from __future__ import annotations

from typing import Any

import click

from onward.cli.options import Place, examples, json_option, place_options
from onward.cli.places import opened
from onward.cli.root import PROBLEM
from onward.cli.screen import Part, Screen, print_json
from onward.cli.table import STYLES, Column
from onward.cli.values import Cut, Moment, Span, State, one_line
from onward.cli.workers import item as worker_item
from onward.overdue import watch
from onward.overview import Alarm, Overview, QueueLine, alarms, look

QUEUES = (
    Column("queue", elastic=True),
    Column("due"),
    Column("oldest"),
    Column("later"),
    Column("waiting"),
    Column("running"),
    Column("dead"),
    Column("workers"),
    Column("slots"),
)

_MOST_SHOWN = 20


@click.command(
    epilog=examples(
        "onward status",
        "onward status --json",
        "onward status || echo 'something is wrong'",
    )
)
@json_option
@place_options
@click.pass_obj
def status(place: Place, as_json: bool) -> None:
    """Show the system on one screen.

    Exit status 1 while an alarm is on: due jobs in a queue that no living worker serves, a task
    that no worker knows, jobs that wait although a worker has slots free for them, jobs in limbo, a
    worker lost within the last 15 minutes.
    """
    with opened(place) as database:
        seen = look(database)
        raised = alarms(seen, watch(database, seen))
    if as_json:
        print_json("status/1", **_document(seen, raised))
    else:
        screen = Screen(seen.now)
        (_show if screen.draws else _print)(screen, seen, raised)
    if raised:
        click.get_current_context().exit(PROBLEM)


def _document(seen: Overview, raised: list[Alarm]) -> dict[str, Any]:
    return {
        "database": seen.url,
        "dialect": seen.dialect,
        "schema_version": seen.schema,
        "now": Moment(seen.now),
        "states": seen.states,
        "ended_last_hour": seen.ended,
        "limbo": len(seen.limbo.offences),
        "queues": [_queue(queue) for queue in seen.queues],
        "workers": [worker_item(worker) for worker in seen.workers if worker.ended_at is None],
        "alarms": [
            {"code": a.code, "subject": a.subject, "what": a.what, "fix": a.fix} for a in raised
        ],
    }


def _queue(queue: QueueLine) -> dict[str, Any]:
    return {
        "queue": Cut(queue.name),
        "due": queue.due,
        "oldest": Span(queue.oldest),
        "later": queue.later,
        "waiting": queue.waiting,
        "running": queue.running,
        "dead": queue.dead,
        "workers": queue.workers,
        "slots": queue.slots,
    }


def _print(screen: Screen, seen: Overview, raised: list[Alarm]) -> None:
    """For pipes: every part as lines with tabs."""
    living = [worker for worker in seen.workers if worker.alive]
    slots = sum(worker.concurrency for worker in living)
    screen.fields(
        {"database": seen.url, "schema": seen.schema, "workers": len(living), "slots": slots}
    )
    screen.line("")
    screen.table(
        (Column("state"), Column("jobs"), Column("ended", "ended last hour")),
        [
            {"state": State(state), "jobs": count, "ended": seen.ended.get(state, 0)}
            for state, count in seen.states.items()
        ],
    )
    screen.line("")
    screen.table(QUEUES, [_queue(queue) for queue in seen.queues])
    screen.line("")
    screen.table(
        (Column("code", "alarm"), Column("what"), Column("fix")),
        [{"code": a.code, "what": a.what, "fix": a.fix} for a in raised],
    )


def _show(screen: Screen, seen: Overview, raised: list[Alarm]) -> None:
    from onward.version import version

    living = [worker for worker in seen.workers if worker.alive]
    slots = sum(worker.concurrency for worker in living)
    screen.line(
        (f"onward {version()}", "bold"),
        f" · {seen.url} · schema {seen.schema}",
        f" · {_count(len(living), 'worker')}, {_count(slots, 'slot')}",
    )
    screen.line("")
    screen.line("  ", *_states(seen))
    ended = ", ".join(f"{count:,} {one_line(state)}" for state, count in seen.ended.items())
    screen.line((f"  last hour: {ended or 'nothing ended'}", "bright_black"))
    if seen.queues:
        screen.line("")
        screen.table(QUEUES, [_queue(queue) for queue in seen.queues])
    if raised:
        screen.line("")
    for alarm in raised[:_MOST_SHOWN]:
        _show_alarm(screen, alarm)
    if len(raised) > _MOST_SHOWN:
        screen.line(
            (f"! and {len(raised) - _MOST_SHOWN} more alarms: onward status --json", "bold yellow")
        )


def _states(seen: Overview) -> list[Part]:
    """Each state with its count; those that are nothing now are pale."""
    parts: list[Part] = []
    for state, count in seen.states.items():
        style = STYLES.get(state, "bold red") if count else "bright_black"
        parts += [(one_line(state), style), f" {count:,}   "]
    return parts


def _show_alarm(screen: Screen, alarm: Alarm) -> None:
    screen.line(("! ", "bold yellow"), (one_line(alarm.what), "bold"))
    screen.line(("    fix: ", "bright_black"), one_line(alarm.fix))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
