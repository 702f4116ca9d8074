"""`onward demo`: real jobs on real files, and a worker killed in their midst."""

from __future__ import annotations

from pathlib import Path

import click

from onward.cli.options import SCHEMA, Place, database_option, examples, schema_option


@click.command(
    epilog=examples(
        "onward demo",
        "onward demo ~/notes --files 200",
        "onward demo --keep",
        "onward demo --database postgresql://app@localhost/demo",
    )
)
@click.argument(
    "folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--files",
    type=click.IntRange(1, 100_000),
    default=1_000,
    show_default=True,
    help="How many files the jobs work on.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=3,
    show_default=True,
    help="Worker processes.",
)
@click.option(
    "--keep", is_flag=True, help="Leave the database and the dead jobs for a look around."
)
@database_option(
    "sqlite:///file.db or postgresql://user@host/name [default: a temporary file; not ONWARD_URL]."
)
@schema_option(SCHEMA, "ONWARD_SCHEMA")
@click.pass_obj
def demo(place: Place, folder: Path | None, files: int, processes: int, keep: bool) -> None:
    """See Onward at work: jobs, a crash, a recovery.

    Four jobs for each file of FOLDER, by default for files of Python's standard library. They are
    only read. A worker process is killed meanwhile; in the end every result is checked. Exit status
    1 if anything is off.

    The database is a temporary file that is removed at the end, unless --database names another.
    There the demo has a queue of its own, makes Onward's tables if there are none, and discards its
    dead jobs; those that succeeded stay until they are pruned.
    """
    from onward import demo as tour

    place.check_schema(place.url or "sqlite:")  # A file of its own.
    status = tour.run(
        folder,
        place.url,
        files=files,
        processes=processes,
        keep=keep,
        schema=place.schema,
    )
    click.get_current_context().exit(status)
