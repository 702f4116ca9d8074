"""`onward worker`: run jobs. Reads the options; the supervisor does the rest."""

from __future__ import annotations

import click

from onward.cli.options import (
    Place,
    database_option,
    examples,
    parse_duration,
    schema_option,
)
from onward.config import MOST_CONCURRENCY
from onward.names import check_name

QueueLimits = tuple[tuple[str, int | None], ...]


MOST_DIGITS = 9


def parse_queues(
    _: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> QueueLimits | None:
    """For `-q`: names parted by commas, each with a limit if it has one: `mail:4,reports`."""
    if not given:
        return None
    parts = [part.strip() for text in given for part in text.split(",")]
    found = [_queue(part, parameter) for part in parts if part]
    names = [name for name, _ in found]
    if not found:
        raise click.BadParameter(
            "no queue is named. Leave the option out to serve all queues of the app's tasks.",
            param=parameter,
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.BadParameter(f"the queue {twice[0]!r} is named twice.", param=parameter)
    return tuple(found)


def _queue(text: str, parameter: click.Parameter) -> tuple[str, int | None]:
    name, colon, limit = text.rpartition(":")
    if not colon:
        return check_name(text, "queue"), None
    if not limit.isdecimal() or len(limit) > MOST_DIGITS or int(limit) < 1:
        raise click.BadParameter(
            f"{text!r}: the limit behind the colon is a whole number from 1.", param=parameter
        )
    return check_name(name, "queue"), int(limit)


@click.command(
    epilog=examples(
        "onward worker shop.jobs:app",
        "onward worker shop.jobs:app --processes 4 --concurrency 16",
        "onward worker shop.jobs:app -q mail:4,reports --grace 2m",
        "onward worker shop.jobs:app --until-empty",
        note="A first Ctrl-C or SIGTERM lets running jobs end within the grace time; a second one "
        "stops at once.",
    )
)
@click.argument("target", metavar="MODULE:APP")
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    metavar="N",
    default=1,
    show_default=True,
    help="Worker processes.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, MOST_CONCURRENCY),
    metavar="N",
    default=10,
    show_default=True,
    help="Jobs at once, in each process.",
)
@click.option(
    "-q",
    "--queues",
    multiple=True,
    callback=parse_queues,
    metavar="A,B | A:4,B",
    help="Queues to serve, with a limit of jobs at once [default: those of the app's tasks].",
)
@click.option(
    "--grace",
    metavar="DURATION",
    callback=parse_duration,
    help="How long running jobs may go on after a stop [default: the app's, 30s].",
)
@click.option("--name", help="The worker's name in lists [default: host and process id].")
@click.option("--until-empty", is_flag=True, help="End when no due job is left.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="What is logged to stderr.",
)
@database_option("Instead of the app's own: sqlite:///file.db or postgresql://user@host/name.")
@schema_option("PostgreSQL only: instead of the app's own.")
@click.pass_obj
def worker(
    place: Place,
    target: str,
    processes: int,
    concurrency: int,
    queues: QueueLimits | None,
    grace: float | None,
    name: str | None,
    until_empty: bool,
    log_level: str,
) -> None:
    """Run jobs.

    MODULE:APP is where your code keeps its app: shop.jobs:app, or path/to/jobs.py:app. The
    database is the app's own, unless --database names another.
    """
    from onward.worker import supervisor

    place.check_schema(place.url or "")
    status = supervisor.run(
        target=target,
        processes=processes,
        concurrency=concurrency,
        queues=queues,
        grace=grace,
        name=name,
        database=place.url,
        schema=place.told_schema,
        until_empty=until_empty,
        log_level=log_level.upper(),
    )
    click.get_current_context().exit(status)
