"""`onward db`: create, migrate, prune and compact the database, and read its SQL."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import click

from onward.cli.options import Place, examples, json_option, parse_duration, place_options
from onward.cli.places import file_of, named, opened, schema_inside
from onward.cli.root import NOT_FOUND, PROBLEM, Family
from onward.cli.screen import Screen, message, print_json, say
from onward.cli.table import Column
from onward.cli.values import Cut, State, duration
from onward.config import DAY, Settings
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.migrate import check_version, functions, missing, newest
from onward.store.statements import Twin, in_schema, postgres_text, sqlite_text, twins


@click.group(
    cls=Family,
    epilog=examples("onward db init", "onward db status", "onward db sql claim"),
)
def db() -> None:
    """Create, migrate, prune, compact and read the database."""


# --- schema ---------------------------------------------------------------------------------------


@db.command(
    epilog=examples(
        "onward db init",
        "onward db init --database sqlite:////var/lib/shop/jobs.db",
        "onward db init --database postgresql://app@db/shop --schema jobs",
    )
)
@json_option
@place_options
@click.pass_obj
def init(place: Place, as_json: bool) -> None:
    """Create Onward's tables. Where they are already, nothing is changed."""
    with opened(place, create=True) as database:
        _migrate(database, "init", as_json)


@db.command(
    epilog=examples(
        "onward db migrate",
        "onward db migrate --dry-run",
        "onward db migrate --database postgresql://owner@db/shop",
    )
)
@click.option("--dry-run", is_flag=True, help="Only show which migrations are missing.")
@json_option
@place_options
@click.pass_obj
def migrate(place: Place, dry_run: bool, as_json: bool) -> None:
    """Bring Onward's tables up to date with this version of Onward."""
    with opened(place, create=True) as database:
        applied = schema_inside(database)
        if applied == 0 or applied > newest(database.dialect):
            check_version(database, applied)
        if dry_run:
            names = [f"{m.version:04}_{m.name}" for m in missing(database.dialect, applied)]
            _say_migrated(database, "migrate", names, as_json, dry_run=True)
        else:
            _migrate(database, "migrate", as_json)


def _migrate(database: Database, command: str, as_json: bool) -> None:
    names = database.migrate()
    check_version(database, database.schema_version())
    _say_migrated(database, command, names, as_json)


def _say_migrated(
    database: Database, command: str, names: list[str], as_json: bool, *, dry_run: bool = False
) -> None:
    if as_json:
        print_json(f"db.{command}/1", database=database.shown_url, applied=names, dry_run=dry_run)
        return
    for name in names:
        say(f"{'missing' if dry_run else 'applied'} {name}")
    if not names:
        say(f"{database.shown_url} is up to date (schema {newest(database.dialect)})")


@db.command(
    "status",
    epilog=examples(
        "onward db status",
        "onward db status --json",
        "onward db status --database sqlite:///jobs.db",
    ),
)
@json_option
@place_options
@click.pass_obj
def show_status(place: Place, as_json: bool) -> None:
    """Show the schema's version and the database's settings.

    And how many jobs it holds, by state.
    """
    with opened(place) as database:
        version, wanted = database.schema_version(), newest(database.dialect)
        facts, counts = database.facts(), database.read(store.counts)
    found: dict[str, Any] = {
        "database": database.shown_url,
        "dialect": database.dialect,
        "schema_version": version,
        "newest_version": wanted,
        **facts,
    }
    if as_json:
        print_json("db.status/1", **found, states=counts)
    else:
        screen = Screen()
        screen.fields(found)
        screen.line("")
        screen.table(
            (Column("state"), Column("jobs")),
            [{"state": State(state), "jobs": count} for state, count in counts.items()],
        )
    if version != wanted:
        click.get_current_context().exit(PROBLEM)


# --- prune ----------------------------------------------------------------------------------------


@db.command(
    epilog=examples(
        "onward db prune",
        "onward db prune --keep 30d --yes",
        "onward db prune --state cancelled --keep 1d --dry-run",
        note="Workers prune by themselves, as the app's settings say. Dead jobs are never pruned.",
    )
)
@click.option(
    "--state",
    type=click.Choice([JobState.SUCCEEDED.value, JobState.CANCELLED.value]),
    multiple=True,
    help="Only jobs that ended so; may be given twice [default: both].",
)
@click.option(
    "--keep",
    metavar="DURATION",
    callback=parse_duration,
    help="Keep what ended within this time [default: 7d].",
)
@click.option(
    "--limit", type=click.IntRange(1), metavar="N", help="How many jobs of each state at most."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show how many would go.")
@json_option
@place_options
@click.pass_obj
def prune(
    place: Place,
    state: tuple[str, ...],
    keep: float | None,
    limit: int | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete jobs that ended long ago.

    Their history goes with them, and so do workers that ended then.
    """
    if not yes and not dry_run and not sys.stdin.isatty():
        raise click.UsageError(
            "prune asks first, and here is no terminal: --yes says yes, --dry-run only looks."
        )
    states = [JobState(name) for name in state] or [JobState.SUCCEEDED, JobState.CANCELLED]
    kept = {each: _kept(each, keep) for each in states}
    with opened(place) as database:
        there = {each: _prunable(database, each, kept[each], limit) for each in states}
        _say_prunable(there, kept)
        if dry_run or not any(there.values()):
            gone = dict.fromkeys(states, 0)
        elif yes or click.confirm("Delete them? This cannot be undone.", err=True):
            gone = {each: _prune(database, each, kept[each], there[each]) for each in states}
            database.run(store.prune_workers, max(kept.values()))
        else:
            message("nothing was changed")
            click.get_current_context().exit(PROBLEM)
    if as_json:
        print_json("db.prune/1", prunable=there, pruned=gone, keep=kept, dry_run=dry_run)
    elif dry_run:
        say(f"{sum(there.values()):,} would be deleted")
    else:
        say(f"{sum(gone.values()):,} deleted")


def _kept(state: JobState, keep: float | None) -> float:
    settings = Settings()
    default = settings.keep_succeeded if state is JobState.SUCCEEDED else settings.keep_cancelled
    return keep if keep is not None else default or 7 * DAY


def _prunable(database: Database, state: JobState, keep: float, limit: int | None) -> int:
    rows = database.read(store.read, "prunable", state=state.value, keep=keep)
    count = int(rows[0][0])
    return count if limit is None else min(count, limit)


def _say_prunable(there: dict[JobState, int], kept: dict[JobState, float]) -> None:
    for state, count in there.items():
        message(f"{count:,} {state} jobs ended more than {duration(kept[state])} ago")


def _prune(database: Database, state: JobState, keep: float, most: int) -> int:
    """In small steps, so that no step holds others up; not more than was shown."""
    gone = 0
    while gone < most:
        step = database.run(store.prune, state, keep, min(500, most - gone))
        if step == 0:
            break
        gone += step
    return gone


# --- compact --------------------------------------------------------------------------------------


@db.command(
    epilog=examples(
        "onward db compact",
        "onward db compact --json",
        "onward db compact --database sqlite:////var/lib/shop/jobs.db",
        note="What jobs leave behind is used again by new ones, so this is seldom needed: after"
        " a flood, or when less is kept than before.",
    )
)
@json_option
@place_options
@click.pass_obj
def compact(place: Place, as_json: bool) -> None:
    """Give back the space of jobs that are gone.

    On SQLite the file is written anew, and nobody else can write meanwhile. On PostgreSQL the
    space is freed for new rows (VACUUM), beside everything that runs.
    """
    with opened(place) as database:
        before = _size(database)
        message(COMPACTING[database.dialect].format(size=_megabytes(before)))
        done = database.compact()
        after = _size(database)
    sizes = {"before": before, "after": after}
    if as_json:
        print_json("db.compact/1", database=database.shown_url, **sizes, waits_for_reader=not done)
        return
    say(f"{_megabytes(before)} before, {_megabytes(after)} now")
    if not done:
        message("the file shrinks when the reader that is open now has ended")


COMPACTING = {
    "sqlite": "the file is written anew: workers and enqueues wait until that is done; up to {size}"
    " more are needed beside it, and as much in the folder for temporary files",
    "postgres": "VACUUM of the tables, {size}: workers go on; what is free is used by new rows, and"
    " goes back to the disk only at a table's end (VACUUM FULL gives back all, and locks)",
}


def _size(database: Database) -> int:
    """In bytes: of the file and its log as they lie on the disk, or as the server counts."""
    path = file_of(database)
    if path is not None:
        log = path.with_name(f"{path.name}-wal")
        return path.stat().st_size + (log.stat().st_size if log.exists() else 0)
    return int(database.read(store.read, "size")[0][0])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


# --- sql ------------------------------------------------------------------------------------------


@db.command(
    epilog=examples(
        "onward db sql",
        "onward db sql claim",
        "onward db sql claim --dialect postgres",
    )
)
@click.argument("name", required=False)
@click.option(
    "--dialect",
    type=click.Choice(["sqlite", "postgres"]),
    help="Whose SQL [default: the database's].",
)
@json_option
@place_options
@click.pass_obj
def sql(place: Place, name: str | None, dialect: str | None, as_json: bool) -> None:
    """Show the SQL that runs, with its reasons.

    `:name` is a parameter. Nothing is connected to and nothing is run.
    """
    dialect = dialect or named(place).dialect
    if name is None:
        _list_statements(dialect, as_json)
    elif name in twins():
        _show_statement(name, twins()[name], dialect, place.schema, as_json)
    else:
        from difflib import get_close_matches

        near = get_close_matches(name, list(twins()), n=1)
        message(
            f"there is no statement {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
        click.get_current_context().exit(NOT_FOUND)


def _list_statements(dialect: str, as_json: bool) -> None:
    if as_json:
        items = [{"name": name, "why": twin.why} for name, twin in twins().items()]
        print_json("db.sql.list/1", dialect=dialect, items=items)
        return
    rows = [{"name": name, "why": Cut(twin.why)} for name, twin in twins().items()]
    Screen().table((Column("name"), Column("why", elastic=True)), rows)


def _show_statement(name: str, twin: Twin, dialect: str, schema: str, as_json: bool) -> None:
    text = ";\n".join(sqlite_text(name)) if dialect == "sqlite" else postgres_text(name, schema)
    called = [] if dialect == "sqlite" else _functions_in(twin.texts["postgres"], schema)
    if as_json:
        print_json("db.sql/1", name=name, dialect=dialect, why=twin.why, sql=text, functions=called)
        return
    for line in textwrap.wrap(twin.why, 96):
        say(f"-- {line}")
    say(f"{text};")
    for function in called:
        say(f"\n-- The function that it calls:\n{function}")


def _functions_in(text: str, schema: str) -> list[str]:
    """What a statement calls in the schema does its work there: it is shown with it."""
    return [
        in_schema(body, schema)
        for name, body in functions().items()
        if f"FROM onward.{name}(" in text or f"SELECT onward.{name}(" in text
    ]
