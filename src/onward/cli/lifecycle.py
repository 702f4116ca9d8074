"""`onward lifecycle`: the state machine, made from the table of the job's life."""

from __future__ import annotations

import click

from onward import diagram
from onward.cli.options import examples, json_option
from onward.cli.screen import Screen, print_json, say
from onward.cli.table import Column
from onward.cli.values import Item, State


@click.command(
    epilog=examples(
        "onward lifecycle",
        "onward lifecycle --format mermaid",
        "onward lifecycle --format markdown > docs/lifecycle.md",
    )
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "json", "markdown"]),
    default="text",
    show_default=True,
    help="How it is printed.",
)
@json_option
def lifecycle(form: str, as_json: bool) -> None:
    """Show every state and every legal move of a job.

    A move that is not shown does not exist: the code, the SQL and the database's triggers all
    refuse it.
    """
    if as_json or form == "json":
        print_json("lifecycle/1", **diagram.document())
    elif form == "mermaid":
        say(diagram.mermaid(), nl=False)
    elif form == "markdown":
        say(diagram.page(), nl=False)
    else:
        _print_text(Screen())


def _print_text(screen: Screen) -> None:
    screen.line(("The life of a job", "bold"))
    for line in diagram.drawing().splitlines():
        screen.line("  " + line)
    for title, (head, rows) in (
        ("States of a job", diagram.job_states()),
        ("Moves", diagram.job_moves()),
        ("States of an attempt", diagram.attempt_states()),
        ("States of a worker", diagram.worker_states()),
    ):
        screen.title(title)
        columns = [Column(name, wraps=place > 0) for place, name in enumerate(head)]
        screen.table(columns, [_item(head, row) for row in rows])


def _item(head: tuple[str, ...], row: tuple[str, ...]) -> Item:
    cells: dict[str, object] = dict(zip(head, row, strict=True))
    return cells | {"state": State(row[0])} if head[0] == "state" else cells
