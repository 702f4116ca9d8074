"""`onward dead`: list, requeue, discard.

A bulk action touches exactly what its filter has shown, and says how much it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from onward.app import discard_change, requeue_change
from onward.cli.bulk import Request, carry_out
from onward.cli.filters import DEAD, Filter, matching, unknown_names, up_to
from onward.cli.options import (
    Place,
    bulk_options,
    check_may_go_on,
    examples,
    json_option,
    place_options,
    which_options,
)
from onward.cli.places import opened, whole_id
from onward.cli.root import Family
from onward.cli.screen import Screen, marked, message, print_json, report_damage
from onward.cli.table import Column
from onward.cli.values import plain
from onward.job import Change, Job
from onward.store import store

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS = (
    Column("id"),
    Column("task", elastic=True),
    Column("queue", elastic=True, spare=True),
    Column("attempt", spare=True),
    Column("died_at", "died"),
    Column("reason"),
    Column("error", elastic=True),
)

_OPTIONAL = frozenset({"error"})


def _filter_options(function: F) -> F:
    error = click.option(
        "--error-like",
        metavar="TEXT",
        help="Whose error (type and message) has this text in it; no character is a wildcard.",
    )
    return which_options("died")(error(function))


@click.group(
    cls=Family,
    epilog=examples(
        "onward dead list",
        "onward dead requeue --task billing.charge",
        "onward dead discard 0193a1b2-c3d4-7e5f",
    ),
)
def dead() -> None:
    """List, requeue and discard dead jobs.

    A job is dead when it is out of attempts. It stays until somebody requeues it (it is tried
    again) or discards it (it ends cancelled).
    """


# --- list -----------------------------------------------------------------------------------------


@dead.command(
    "list",
    epilog=examples(
        "onward dead list",
        "onward dead list --task billing.charge --limit 200",
        "onward dead list --error-like 'ConnectionTimeout: api.example.com' --json",
    ),
)
@_filter_options
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
def list_dead(
    place: Place,
    task: str | None,
    queue: str | None,
    older_than: float | None,
    error_like: str | None,
    limit: int,
    before: str | None,
    as_json: bool,
) -> None:
    """List dead jobs by id, from the highest, each with the error of its last attempt."""
    chosen = Filter(task=task, queue=queue, older_than=older_than, error_like=error_like)
    with opened(place) as database:
        start = whole_id(database, before) if before else None
        found = list(up_to(limit, matching(database, DEAD, chosen, start)))
        now = database.read(store.now)
        unknown = [] if found else list(unknown_names(database, chosen))
    items = marked(found, _OPTIONAL)
    following = items[-1]["id"] if len(items) == limit else None
    if as_json:
        print_json("dead.list/1", items=items, next=following)
        return
    if items:
        Screen(now).table(COLUMNS, items)
    else:
        message("no job is dead" if chosen.empty else f"no dead job matches: {chosen}")
        for problem in unknown:
            message(problem)
    report_damage(items)
    if following:
        message(f"there may be more: --before {plain(following)}")


# --- act ------------------------------------------------------------------------------------------


def _act_options(function: F) -> F:
    options = (
        click.argument("ids", metavar="[ID]...", nargs=-1),
        _filter_options,
        click.option("--all", "everything", is_flag=True, help="All dead jobs."),
        bulk_options,
        json_option,
        place_options,
    )
    for option in reversed(options):
        function = option(function)
    return function


@dead.command(
    epilog=examples(
        "onward dead requeue 0193a1b2-c3d4-7e5f",
        "onward dead requeue --error-like ConnectionTimeout --dry-run",
        "onward dead requeue --task billing.charge --limit 1",
        "onward dead requeue --all --yes",
        note="Attempt numbers go on where they were (after attempt 3 comes attempt 4) and history "
        "stays. Both budgets, of failures and of losses, start afresh: a job with max_attempts=3 "
        "may fail three more times.",
    )
)
@_act_options
@click.pass_obj
def requeue(place: Place, /, **given: Any) -> None:
    """Take dead jobs out of quarantine, to be tried again.

    Name them by id, by a filter, or with --all. Only jobs that the filter shows at this moment
    are touched.
    """
    promise = (
        "Attempt numbers go on where they were; the budgets of failures and losses start afresh."
    )
    carry_out(place, _request("requeue", "requeued", promise, requeue_change, given))


@dead.command(
    epilog=examples(
        "onward dead discard 0193a1b2-c3d4-7e5f",
        "onward dead discard --task old.task --reason 'task was removed'",
        "onward dead discard --queue reports --older-than 30d --dry-run",
        note="A discarded job ends cancelled, with the reason. It cannot be brought back.",
    )
)
@click.option(
    "--reason", default="discarded", show_default=True, help="Why, for people who read the history."
)
@_act_options
@click.pass_obj
def discard(place: Place, /, reason: str, **given: Any) -> None:
    """Give dead jobs up for good.

    Name them by id, by a filter, or with --all. Only jobs that the filter shows at this moment
    are touched.
    """
    promise = "They end cancelled; this cannot be undone."
    carry_out(place, _request("discard", "discarded", promise, discard_change(reason), given))


def _request(
    verb: str, past: str, promise: str, decide: Callable[[Job], Change], given: Mapping[str, Any]
) -> Request:
    chosen = Filter(**{name: given[name] for name in ("task", "queue", "older_than", "error_like")})
    ways = [bool(given["ids"]), not chosen.empty, given["everything"]]
    if sum(ways) != 1:
        raise click.UsageError(
            f"say which jobs to {verb}: ids, or a filter (--task, --queue, --older-than, "
            "--error-like), or --all."
            if not any(ways)
            else "ids, a filter and --all are three ways to say which jobs: use one."
        )
    if chosen.error_like == "":
        raise click.UsageError("--error-like '' is in every error; --all means all dead jobs.")
    check_may_go_on(verb, yes=given["yes"], dry_run=given["dry_run"])
    rest = {
        name: given[name] for name in ("ids", "everything", "limit", "yes", "dry_run", "as_json")
    }
    return Request(
        kind=DEAD,
        verb=verb,
        past=past,
        promise=promise,
        schema=f"dead.{verb}/1",
        decide=decide,
        chosen=chosen,
        **rest,
    )
