"""`python -m benchmarks.peers`: all systems, or those that are named: `… pgqueuer huey`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks import machine
from benchmarks.drains import LEFT
from benchmarks.measure import ROUNDS, Line, show
from benchmarks.peers.homes import Unavailable, prepare
from benchmarks.peers.places import durability
from benchmarks.peers.systems import JOBS, SYSTEMS, Store, System
from benchmarks.peers.workloads import Side, compare
from benchmarks.stage import worker_words

NAMES = [system.name for system in SYSTEMS]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[SYSTEM]...")
@click.option("--rounds", default=ROUNDS, show_default=True, help="How often each is run, in turn.")
@click.option("--jobs", help="Drain at most so many, for a trial.", type=click.IntRange(min=1))
@click.option(
    "--json", "path", type=click.Path(path_type=Path), help="Also write the figures here."
)
def main(names: tuple[str, ...], rounds: int, jobs: int | None, path: Path | None) -> None:
    """Measure Onward in turn with other systems: on SQLite with those on SQLite, with all others on
    PostgreSQL.
    """
    console = Console()
    console.print(machine.describe())
    lines: list[Line] = []
    written: dict[str, object] = {}
    for system in SYSTEMS:
        if names and system.name not in names:
            continue
        try:
            found = compare(system, *sides(system, jobs or JOBS), rounds)
        except (Unavailable, RuntimeError, TimeoutError) as error:
            written[system.name] = {"problem": str(error)}
            why = f"\n{system.name} {system.version}: not measured: {error}"
            console.print(why, style="red", markup=False)
            continue
        title = describe(system, jobs or JOBS)
        written[system.name] = {"title": title, "figures": [line._asdict() for line in found]}
        show(console, found, f"\n{title}")
        lines += found
    missed = [line for line in lines if line.reached is False]
    console.print(f"{len(lines)} figures, {len(missed)} of them short of their target.")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1))


def sides(system: System, most: int) -> tuple[Side, Side]:
    """The rival, and Onward on the database to compare it on."""
    return rival_side(system, most), onward_side(onward_store(system), most)


def rival_side(system: System, most: int) -> Side:
    """A worker of a rival is a process that its adapter starts."""
    adapter = prepare(system)

    def workers(url: str, processes: int) -> list[list[str]]:
        return [[*adapter, url, "work"]] * processes

    jobs = min(system.jobs, most)
    return Side(system.name, system.store, system.left, jobs, adapter, workers)


def onward_side(store: Store, most: int) -> Side:
    """Onward's worker is its own command, which starts all processes."""
    adapter = [sys.executable, "-m", "benchmarks.peers.adapters.on_onward"]

    def workers(url: str, processes: int) -> list[list[str]]:
        return [worker_words("--processes", str(processes), "--concurrency", "500")]

    return Side("Onward", store, LEFT[store], min(JOBS, most), adapter, workers)


def onward_store(system: System) -> Store:
    """Where Onward is when it is compared with this system."""
    return "sqlite" if system.store == "sqlite" else "postgresql"


def describe(system: System, most: int) -> str:
    """Both systems, what their commits are worth, and how many jobs they drain."""
    store = onward_store(system)
    return (
        f"{system.name} {system.version} on {system.store}"
        f" ({system.durability or durability(system.store)}), {min(system.jobs, most):,} jobs\n"
        f"Onward on {store} ({durability(store)}), {min(JOBS, most):,} jobs"
    )


if __name__ == "__main__":
    main()
