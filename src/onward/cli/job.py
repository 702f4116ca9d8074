"""`onward job`: list, show, cancel, requeue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from onward.app import cancel_change, requeue_change
from onward.cli.bulk import Request, carry_out
from onward.cli.filters import PENDING, Filter, unknown_names
from onward.cli.options import (
    Place,
    bulk_options,
    check_may_go_on,
    examples,
    json_option,
    place_options,
    which_options,
)
from onward.cli.places import check_sound, opened, whole_id, whole_ids
from onward.cli.record import read_record, show_record
from onward.cli.root import Family
from onward.cli.screen import Screen, marked, message, print_json, report_damage, say
from onward.cli.table import Column
from onward.cli.troubles import exit_code, tell
from onward.cli.values import Cut, Id, Moment, Past, State, due, plain
from onward.errors import OnwardError
from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database

COLUMNS = (
    Column("id"),
    Column("state"),
    Column("task", elastic=True),
    Column("queue", elastic=True, spare=True),
    Column("priority", "prio", spare=True),
    Column("tries", "failed"),
    Column("created_at", "created", spare=True),
    Column("when"),
    Column("note", elastic=True),
)

_OPTIONAL = frozenset({"worker", "started_at", "finished_at", "reason", "note"})


@click.group(
    cls=Family,
    epilog=examples(
        "onward job list --state dead",
        "onward job show 0193a1b2-c3d4-7e5f",
        "onward job cancel 0193a1b2-c3d4-7e5f",
    ),
)
def job() -> None:
    """List, show, cancel and requeue jobs.

    A job is named by its id, or by any beginning of it that no other job has.
    """


# --- list -----------------------------------------------------------------------------------------


@job.command(
    "list",
    epilog=examples(
        "onward job list --state running",
        "onward job list --queue mail --limit 200",
        "onward job list --task billing.charge --json",
    ),
)
@click.option(
    "--state",
    type=click.Choice([state.value for state in JobState]),
    help="Only jobs in this state.",
)
@click.option("--queue", help="Only jobs of this queue.")
@click.option(
    "--task",
    help="Only jobs of this task. Names are compared as they are: no character is a wildcard.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    metavar="N",
    default=50,
    show_default=True,
    help="How many at most.",
)
@click.option("--before", metavar="ID", help="The next page: jobs below this one.")
@json_option
@place_options
@click.pass_obj
def list_jobs(
    place: Place,
    state: str | None,
    queue: str | None,
    task: str | None,
    limit: int,
    before: str | None,
    as_json: bool,
) -> None:
    """List jobs by id, from the highest: of ids that Onward made, the newest come first.

    FAILED counts failures of those that are allowed, and losses if there were any. WHEN is when a
    queued job is due, when a running one started, and when the others ended.
    """
    with opened(place) as database:
        start = whole_id(database, before) if before else None
        filters = {"state": state, "queue": queue, "task": task}
        rows = database.read(store.read, "list", before=start, limit=limit, **filters)
        now = database.read(store.now)
        named = Filter(queue=queue, task=task)
        unknown = [] if rows else list(unknown_names(database, named))
    items = marked([_listed(row) for row in rows], _OPTIONAL)
    following = items[-1]["id"] if len(items) == limit else None
    if as_json:
        print_json("job.list/1", items=items, next=following)
        return
    if items:
        Screen(now).table(COLUMNS, items)
    else:
        message("no job matches" if any(filters.values()) else "there are no jobs yet")
        for problem in unknown:
            message(problem)
    report_damage(items)
    if following:
        message(f"there may be more: --before {plain(following)}")


def _listed(row: tuple[Any, ...]) -> dict[str, Any]:
    state = row[4]
    run_at = due(state, row[11])
    begun = {"running": row[12], "cancelling": row[12]}
    when = run_at if isinstance(run_at, Moment) else Past(begun.get(str(state), row[13]))
    return {
        "id": Id(row[0]),
        "state": State(state),
        "task": Cut(row[1]),
        "queue": Cut(row[2]),
        "priority": row[3],
        "attempt": row[5],
        "tries": _tries(row),
        "worker": Id(row[6]),
        "failures": row[9],
        "losses": row[10],
        "max_attempts": row[7],
        "max_losses": row[8],
        "created_at": Past(row[14]),
        "run_at": run_at,
        "started_at": Past(row[12]),
        "finished_at": Past(row[13]),
        "when": when,
        "reason": Cut(row[15]),
        "note": Cut(_note(row)),
    }


def _tries(row: tuple[Any, ...]) -> str:
    """Failures of the allowed ones, and losses where there are any: `2/5`, `2/5 +1 lost`."""
    lost = f" +{row[10]} lost" if row[10] else ""
    return f"{row[9]}/{row[7]}{lost}"


def _note(row: tuple[Any, ...]) -> str | None:
    if row[4] not in set(JobState):
        return "damaged: unknown state"
    return None if row[15] is None else str(row[15])


# --- show -----------------------------------------------------------------------------------------


@job.command(
    epilog=examples(
        "onward job show 0193a1b2-c3d4-7e5f",
        "onward job show 0193a1b2-c3d4-7e5f --database sqlite:///jobs.db",
        "onward job show 0193a1b2-c3d4-7e5f --json",
    )
)
@click.argument("id", metavar="ID")
@json_option
@place_options
@click.pass_obj
def show(place: Place, id: str, as_json: bool) -> None:
    """Show one job: arguments, attempts, errors, result.

    Values under secret-looking names (password, token, api_key, …) are shown as ***.
    """
    with opened(place) as database:
        found = read_record(database, whole_id(database, id))
    if as_json:
        print_json("job.show/1", **found.document())
    else:
        show_record(found)


# --- move -----------------------------------------------------------------------------------------


@job.command(
    epilog=examples(
        "onward job cancel 0193a1b2-c3d4-7e5f 0193a1c7-d5e6-7f80",
        "onward job cancel --queue reports --dry-run",
        "onward job cancel --task old.task --older-than 1d",
        note="A queued job is cancelled at once. A running one is asked to stop: it "
        "is `cancelling` until it has. A filter shows no running jobs; one that has begun after it "
        "was shown is asked to stop, too.",
    )
)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@which_options("was enqueued")
@bulk_options
@json_option
@place_options
@click.pass_obj
def cancel(place: Place, /, ids: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Ask jobs to stop, or drop jobs that wait.

    Name them by id: these are asked to stop at once. Or by a filter: all jobs that wait to begin
    and that it shows at this moment are dropped, after a question.
    """
    chosen = Filter(**{name: given.pop(name) for name in ("task", "queue", "older_than")})
    _check_one_way(ids, chosen, given)
    if ids:
        with opened(place) as database:
            _move(database, ids, cancel_change, "job.cancel/1", as_json)
        return
    check_may_go_on("cancel", yes=given["yes"], dry_run=given["dry_run"])
    request = Request(
        kind=PENDING,
        verb="cancel",
        past="cancelled",
        promise="They end cancelled; this cannot be undone. One that begins meanwhile is asked to "
        "stop.",
        schema="job.cancel.matching/1",
        decide=cancel_change,
        chosen=chosen,
        as_json=as_json,
        **given,
    )
    carry_out(place, request)


def _check_one_way(ids: Sequence[str], chosen: Filter, given: Mapping[str, Any]) -> None:
    if bool(ids) != chosen.empty:
        raise click.UsageError(
            "ids and a filter are two ways to say which jobs: use one."
            if ids
            else "say which jobs to cancel: ids, or a filter (--task, --queue, --older-than)."
        )
    if ids and (given["dry_run"] or given["limit"] is not None):
        raise click.UsageError("--dry-run and --limit go with a filter.")


@job.command(
    epilog=examples(
        "onward job requeue 0193a1b2-c3d4-7e5f",
        "onward job requeue 0193a1b2-c3d4-7e5f 0193a1c7-d5e6-7f80",
        "onward dead requeue --task billing.charge",
        note="Attempt numbers go on where they were and history stays; the budgets of failures and "
        "losses start afresh.",
    )
)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@json_option
@place_options
@click.pass_obj
def requeue(place: Place, ids: tuple[str, ...], as_json: bool) -> None:
    """Take dead jobs out of quarantine, to be tried again."""
    with opened(place) as database:
        _move(database, ids, requeue_change, "job.requeue/1", as_json)


def _move(
    database: Database,
    given: Sequence[str],
    decide: Callable[[Job], Change | None],
    schema: str,
    as_json: bool,
) -> None:
    """Move each job by itself: one that refuses does not hinder the others; the status tells."""
    worst = 0
    items: list[dict[str, Any]] = []
    for id in whole_ids(database, given):
        try:
            check_sound(database, id)
            state: str | None = database.run(store.move, id, decide).value
            problem = None
        except OnwardError as error:
            state, problem, worst = None, error.what, max(worst, exit_code(error))
            tell(error)
        items.append({"id": Id(id), "state": State(state), "error": problem})
        if state and not as_json:
            say(f"{id}\t{state}")
    if as_json:
        print_json(schema, items=items)
    click.get_current_context().exit(worst)
