"""`python -m benchmarks`: all workloads, or those that are named: `python -m benchmarks S1 S3`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from benchmarks import drains, enqueues, long, machine, pickup
from benchmarks.measure import ROUNDS, Line, show

BOTH = ("postgresql", "sqlite")

Workload = Callable[[int], Iterable[Line]]


def _on(dialects: Iterable[str], run: Callable[[str, int], Iterable[Line]]) -> list[Workload]:
    return [partial(run, dialect) for dialect in dialects]


WORKLOADS: dict[str, list[Workload]] = {
    "S1 S2 S12": _on(["postgresql"], drains.plain),
    "S3 S12": _on(["sqlite"], drains.plain),
    "S4 S5": _on(BOTH, enqueues.one_by_one),
    "S6": _on(BOTH, enqueues.in_bulk),
    "S7": _on(BOTH, pickup.pick_up),
    "S8": _on(BOTH, drains.full_tables),
    "S9": [drains.held_snapshot],
    "S10": _on(BOTH, long.sleepers),
    "S11": _on(BOTH, long.million),
    "S13": [long.start_up],
    "S14": [long.idle],
    "S15": [enqueues.clients],
}
"""What is run for which marks, in this order."""


@click.command()
@click.argument("marks", nargs=-1)
@click.option("--rounds", default=ROUNDS, show_default=True, help="How often each is run, in turn.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path), help="Also write the figures here."
)
def main(marks: tuple[str, ...], rounds: int, path: Path | None) -> None:
    """Measure Onward beside the bare loop."""
    console = Console()
    chosen = {mark.upper() for mark in marks}
    if unknown := chosen - {mark for names in WORKLOADS for mark in names.split()}:
        raise click.BadParameter(f"no workload is named {', '.join(sorted(unknown))}")
    console.print(machine.describe())
    lines: list[Line] = []
    for names, workloads in WORKLOADS.items():
        if chosen and not chosen & set(names.split()):
            continue
        for workload in workloads:
            found = list(workload(rounds))
            lines += found
            show(console, found, "")
    missed = [line for line in lines if line.reached is False]
    console.print(f"{len(lines)} figures, {len(missed)} of them short of their target.")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([line._asdict() for line in lines], indent=1))


if __name__ == "__main__":
    main()
