"""The life of a job drawn and tabulated from `lifecycle.py`: `onward lifecycle`, and the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onward.lifecycle import (
    ATTEMPT_ENDS,
    ATTEMPT_MEANING,
    ATTEMPT_MOVES,
    BORN,
    JOB_MEANING,
    JOB_MOVES,
    TERMINAL,
    WORKER_MEANING,
    WORKER_MOVES,
    AttemptState,
    Event,
    JobState,
    WorkerEvent,
    WorkerState,
)

Table = tuple[tuple[str, ...], Sequence[tuple[str, ...]]]
"""A header and its rows."""


def job_states() -> Table:
    """Each state of a job, what it means, and where it leads."""
    rows = [(state.value, JOB_MEANING[state], _next(_after(state))) for state in JobState]
    return ("state", "meaning", "next"), rows


def job_moves() -> Table:
    """Each legal move: its arrow, its event, and how the attempt may end with it."""
    rows = [
        (f"{before} > {after}", event.value, _ends(before, event))
        for (before, event), after in JOB_MOVES.items()
    ]
    return ("move", "event", "the attempt ends"), rows


def attempt_states() -> Table:
    """Each state of an attempt, what it means, and where it leads."""
    rows = [
        (state.value, ATTEMPT_MEANING[state], _next(_in_order(ATTEMPT_MOVES[state])))
        for state in AttemptState
    ]
    return ("state", "meaning", "next"), rows


def worker_states() -> Table:
    """Each state of a worker, what it means, and where it leads."""
    rows = [
        (state.value, WORKER_MEANING[state], _next(_worker_after(state))) for state in WorkerState
    ]
    return ("state", "meaning", "next"), rows


def mermaid() -> str:
    """The job's state machine as a Mermaid diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state}: {Event.ENQUEUE}" for state in JobState if state in BORN]
    lines += [
        f"    {before} --> {after}: {', '.join(events)}" for before, after, events in _edges()
    ]
    lines += [f"    {state} --> [*]" for state in JobState if state in TERMINAL]
    return "\n".join(lines) + "\n"


def drawing() -> str:
    """The job's state machine as plain text: each state with the arrows that leave it."""
    wide = max(len(state) for state in JobState)
    lines: list[str] = []
    for state in JobState:
        arrows = [(after, events) for before, after, events in _edges() if before is state]
        for place, (after, events) in enumerate(arrows):
            name = state.value if place == 0 else ""
            lines.append(f"{name:>{wide}} ──▶ {after:<{wide}}  {', '.join(events)}")
        if not arrows:
            lines.append(f"{state:>{wide}} ──■ the end")
    return "\n".join(lines) + "\n"


def document() -> dict[str, Any]:
    """The tables as one JSON document's content."""
    return {
        "states": [
            {"state": s, "meaning": JOB_MEANING[s], "terminal": s in TERMINAL, "born": s in BORN}
            for s in JobState
        ],
        "moves": [
            {
                "from": before,
                "event": event,
                "to": after,
                "attempt_ends": sorted(ATTEMPT_ENDS.get((before, event), ())),
            }
            for (before, event), after in JOB_MOVES.items()
        ],
        "attempts": [
            {"state": s, "meaning": ATTEMPT_MEANING[s], "next": _in_order(ATTEMPT_MOVES[s])}
            for s in AttemptState
        ],
        "workers": [
            {"state": s, "meaning": WORKER_MEANING[s], "next": _worker_after(s)}
            for s in WorkerState
        ],
    }


def page() -> str:
    """The page `docs/lifecycle.md`."""
    parts = [
        "# The life of a job",
        "<!-- Made by `onward lifecycle --format markdown`; do not edit by hand. -->",
        "Every move that a job can make stands in one table, `onward/lifecycle.py`. A move that is "
        "not in it does not exist: `Job.move` raises `IllegalTransition`, the conditional write "
        "changes no row, and the database's trigger refuses it. This page is made from that table.",
        f"```mermaid\n{mermaid()}```",
        "## States of a job",
        _markdown(job_states()),
        "No state is called *scheduled* or *retrying*: such a job is `queued`, due later.",
        "## Moves",
        "The event names the move; logs, metrics and history tell by it why a job is where it is.",
        _markdown(job_moves()),
        "## States of an attempt",
        "An attempt is one try at a job, numbered 1, 2, 3 and so on. A closed attempt is history "
        "and never changes; the next number is given out when the attempt before it is closed.",
        _markdown(attempt_states()),
        "## States of a worker",
        "A worker is one process start. One that was stopped or lost never comes back: a new start "
        "is a new worker.",
        _markdown(worker_states()),
    ]
    return "\n\n".join(parts) + "\n"


def _edges() -> list[tuple[JobState, JobState, list[Event]]]:
    """The moves with one arrow for each pair of states; its events share it."""
    shared: dict[tuple[JobState, JobState], list[Event]] = {}
    for (before, event), after in JOB_MOVES.items():
        shared.setdefault((before, after), []).append(event)
    return [(before, after, events) for (before, after), events in shared.items()]


def _after(state: JobState) -> Sequence[str]:
    reached = {after for (before, _), after in JOB_MOVES.items() if before is state}
    return [after for after in JobState if after in reached]


def _worker_after(state: WorkerState) -> list[WorkerState]:
    events = [event for event in WorkerEvent if (state, event) in WORKER_MOVES]
    return [WORKER_MOVES[state, event] for event in events]


def _in_order(states: Iterable[AttemptState]) -> list[AttemptState]:
    return [state for state in AttemptState if state in states]


def _ends(before: JobState, event: Event) -> str:
    return " or ".join(_in_order(ATTEMPT_ENDS.get((before, event), ()))) or "–"


def _next(states: Sequence[str]) -> str:
    return ", ".join(states) or "–"


def _markdown(table: Table) -> str:
    head, rows = table
    lines = [head, tuple("---" for _ in head), *(_coded(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _coded(row: tuple[str, ...]) -> tuple[str, ...]:
    """The first cell is a name of ours; the last may hold several."""
    return (f"`{row[0]}`", *row[1:])
