"""What each side does: drains, enqueues and idle pick-up, on Onward and the rival in turn."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Line, compared, in_turn, line, percentile
from benchmarks.peers.places import fresh
from benchmarks.peers.systems import Store, System
from benchmarks.stage import ROOT, Place, children, drained, running
from benchmarks.tally import counted

ONE_BY_ONE = 2_000
PICK_UPS = 200
SOON = 60.0


class Side(NamedTuple):
    """One side of a comparison.

    Args:
        name: of the system.
        store: where its jobs are.
        left: asks the store what is not recorded as run.
        jobs: how many are drained.
        adapter: the words that start its adapter.
        workers: the words of the programs that are so many workers on a store.
    """

    name: str
    store: Store
    left: str
    jobs: int
    adapter: list[str]
    workers: Callable[[str, int], list[list[str]]]


class Drained(NamedTuple):
    """What one drain shows.

    Args:
        filled: jobs a second by the fastest way to enqueue.
        rate: jobs a second from the start of the first to the record of the last.
        held: megabytes, the most that each worker's processes held, added up.
    """

    filled: float
    rate: float
    held: float


def compare(system: System, rival: Side, onward: Side, rounds: int) -> list[Line]:
    """All workloads."""
    return [
        *_drains(system, rival, onward, rounds),
        *_enqueues(rival, onward, rounds),
        *_pick_ups(rival, onward, rounds),
    ]


# --- Drains ---------------------------------------------------------------------------------------


def _drains(system: System, rival: Side, onward: Side, rounds: int) -> list[Line]:
    runs = {
        f"{side.name} {processes}": partial(drain, side, processes)
        for processes in (1, 2)
        for side in (rival, onward)
    }
    found = in_turn(runs, rounds)

    def pair(
        what: str, processes: int, figure: str, unit: str = "jobs/s", target: float | None = None
    ) -> list[Line]:
        ours, theirs = (
            [getattr(each, figure) for each in found[f"{side.name} {processes}"]]
            for side in (onward, rival)
        )
        return _pair(what, rival, onward, theirs, ours, unit, target)

    return [
        *pair("drain, one process", 1, "rate", target=system.one),
        *pair("drain, two processes", 2, "rate", target=system.two),
        *pair("peak memory, one process", 1, "held", "MB"),
        *(pair("enqueue in bulk", 1, "filled") if system.bulk else []),
    ]


def drain(side: Side, processes: int) -> Drained:
    """Enqueue all jobs, then start the workers."""
    with fresh(side.store) as place, ExitStack() as stack:
        _ask(side, place, "make")
        filled = _speed(side, place, "fill", side.jobs)
        place.settle()
        started = [
            stack.enter_context(running(place, words))
            for words in side.workers(place.url, processes)
        ]
        _begun(place, started)
        rate = side.jobs / drained(place, side.jobs, side.left)
        held = sum(_most(pid) for each in started for pid in children(each.pid))
    return Drained(filled, rate, held)


def _begun(place: Place, started: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the first job, but not for a worker that has ended."""
    end = time.monotonic() + SOON
    while not counted(place.tally)[0]:
        if any(each.poll() is not None for each in started):
            said = (place.folder / "log").read_text()[-2_000:]
            raise RuntimeError(f"a worker ended before the first job:\n{said}")
        if time.monotonic() > end:
            raise TimeoutError(f"no job began within {SOON:g} s")
        time.sleep(0.01)


def _most(pid: int) -> float:
    """Megabytes that a process held at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith("VmHWM:")) / 1024


# --- Enqueues -------------------------------------------------------------------------------------


def _enqueues(rival: Side, onward: Side, rounds: int) -> list[Line]:
    runs = {side.name: partial(one_by_one, side) for side in (rival, onward)}
    found = in_turn(runs, rounds)
    return _pair("enqueue one at a time", rival, onward, found[rival.name], found[onward.name])


def one_by_one(side: Side) -> float:
    """Calls a second, each after the last has returned."""
    with fresh(side.store) as place:
        _ask(side, place, "make")
        return _speed(side, place, "one", ONE_BY_ONE)


# --- Idle pick-up ---------------------------------------------------------------------------------


def _pick_ups(rival: Side, onward: Side, rounds: int) -> list[Line]:
    runs = {side.name: partial(pick_up, side) for side in (rival, onward)}
    found = in_turn(runs, rounds)
    lines: list[Line] = []
    for percent in (50, 99):
        theirs, ours = (
            [percentile(each, percent) for each in found[side.name]] for side in (rival, onward)
        )
        lines += _pair(f"idle pick-up, p{percent}", rival, onward, theirs, ours, "ms")
    return lines


def pick_up(side: Side) -> list[float]:
    """Milliseconds from the call to the first line of the job in a worker that is idle."""
    with fresh(side.store) as place, ExitStack() as stack:
        _ask(side, place, "make")
        started = [
            stack.enter_context(running(place, words)) for words in side.workers(place.url, 1)
        ]
        _ask(side, place, "fill", 1)
        _begun(place, started)
        time.sleep(1.0)
        _ask(side, place, "paced", PICK_UPS)
        return [took * 1000 for took in _arrived(place)]


def _arrived(place: Place) -> list[float]:
    end = time.monotonic() + SOON
    while True:
        found = place.arrivals.read_text().split() if place.arrivals.exists() else []
        if len(found) >= PICK_UPS:
            return [float(text) for text in found]
        if time.monotonic() > end:
            raise TimeoutError(f"only {len(found)} of {PICK_UPS} jobs arrived")
        time.sleep(0.05)


# --- Both -----------------------------------------------------------------------------------------


def _speed(side: Side, place: Place, command: str, jobs: int) -> float:
    """Jobs a second, as the adapter found it."""
    return float(_ask(side, place, command, jobs).split()[-1])


def _ask(side: Side, place: Place, command: str, *count: int) -> str:
    """Let the adapter do something, and return what it says."""
    words = [*side.adapter, place.url, command, *(str(each) for each in count)]
    done = subprocess.run(
        words, cwd=ROOT, env=place.environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{side.name} could not {command}:\n{done.stderr[-2_000:]}")
    return done.stdout


def _pair(
    what: str,
    rival: Side,
    onward: Side,
    theirs: list[float],
    ours: list[float],
    unit: str = "jobs/s",
    target: float | None = None,
) -> list[Line]:
    return [
        line("", f"{what}: {rival.name}", theirs, unit),
        compared("", f"{what}: Onward", ours, theirs, rival.name, target=target, unit=unit),
    ]
