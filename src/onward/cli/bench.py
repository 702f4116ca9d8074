"""`onward bench`: how fast is my database?"""

from __future__ import annotations

import click

from onward.cli.options import Place, examples, json_option, place_options
from onward.cli.screen import Screen, message, print_json
from onward.cli.table import Column
from onward.cli.values import Cut

COLUMNS = (Column("figure"), Column("value"), Column("unit", ""), Column("meaning", wraps=True))


@click.command(
    epilog=examples(
        "onward bench",
        "onward bench --database postgresql://app@db/shop",
        "onward bench --jobs 100000 --seconds 10",
    )
)
@click.option(
    "--jobs",
    type=click.IntRange(1_000, 1_000_000),
    default=20_000,
    show_default=True,
    help="How many jobs are drained.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 60.0),
    default=3.0,
    show_default=True,
    help="How long each kind of enqueue goes on.",
)
@json_option
@place_options
@click.pass_obj
def bench(place: Place, jobs: int, seconds: float, as_json: bool) -> None:
    """Measure your database in half a minute.

    Your own jobs are left alone: on SQLite a file beside yours is measured, on PostgreSQL a schema
    of its own, and both are removed at the end. Jobs do nothing, so what is measured is the queue.
    """
    from onward.bench.course import figures
    from onward.bench.scratch import scratch

    place.check_schema(place.chosen)
    found: list[dict[str, object]] = []
    with scratch(place.chosen) as there:
        message(f"measuring beside {there.database.shown_url}: about half a minute")
        for figure in figures(there, seconds=seconds, jobs=jobs):
            shown = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.2f}"
            found.append(
                {
                    "figure": figure.name,
                    "value": figure.value if as_json else Cut(shown),
                    "unit": figure.unit,
                    "meaning": Cut(figure.meaning),
                }
            )
        facts = there.database.facts()
    if as_json:
        print_json("bench/1", items=found, database=facts)
        return
    screen = Screen()
    screen.table(COLUMNS, found)
    durable = [name for name in ("synchronous", "synchronous_commit", "fsync") if name in facts]
    told = ", ".join(f"{name} {facts[name]}" for name in durable)
    screen.line((f"one machine, one moment; {told}", "bright_black"))
