"""From one state, every step that anybody can take: what is done to the rows, and what the worker
makes of the answer.

Workers' processes here know only what they were told: a claim whose answer was lost is not known
of, a write whose answer was lost is made again, and a process that lost its jobs goes on to write
their outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.proof.explorer_deeds import ALL, OUTCOMES, Deed, Write
from tests.proof.explorer_place import Bounds
from tests.proof.explorer_state import (
    LIVE_WORKER,
    NO_MIND,
    NO_WORKER,
    Held,
    Mind,
    Rows,
    State,
)

OWNED = frozenset({"running", "cancelling"})
LEAN = frozenset({"succeed", "raise"})
"""Outcomes that a search that is not rich follows."""
DOUBTED = ("succeed", "raise", "release")
"""Outcomes whose answer may be lost, or which are followed on when they do not take."""
RARE = frozenset({"reject", "timeout", "snooze", "discard", "stop"})
"""Outcomes that are tried where there is no other job, on which nothing hangs that they do."""
TOGETHER = (("succeed", "succeed"), ("succeed", "raise"), ("raise", "release"))
"""Outcomes of two jobs that are written in one batch."""

Think = Callable[[Mind, Any], Mind | None]
"""What a process makes of an answer; None: no step of its own comes of it."""


class Step(NamedTuple):
    """A deed, and what its worker thinks afterwards; `told` names the step in a story."""

    told: str
    deed: Deed
    worker: int | None = None
    think: Think | None = None
    follow: bool = True


def steps(state: State, bounds: Bounds) -> Iterator[Step]:
    """Every step but the passing of time and the death of a process, which touch no row."""
    if not bounds.rich and (looks := list(_looks(state, bounds))):
        yield from looks  # At once: nobody comes between.
        return
    for worker, (row, mind) in enumerate(zip(state.workers, state.minds, strict=True)):
        if mind.up:
            yield from _of_process(state, worker, mind, bounds)
        if row.state in LIVE_WORKER:
            yield Step(f"w{worker} is buried", Deed("bury", worker), follow=bounds.rich)
            if row.lease < 0:
                yield Step(f"w{worker}'s lease ran out", Deed("lose", worker, how="seen"))
            else:
                yield Step(
                    f"w{worker} is proven dead",
                    Deed("lose", worker, how="proven"),
                    follow=bounds.rich,
                )
    if NO_WORKER in state.workers:
        worker = state.workers.index(NO_WORKER)
        yield Step(f"w{worker} starts", Deed("register", worker), worker, _starts, bounds.rich)
    yield from _of_others(state, bounds)


def _looks(state: State, bounds: Bounds) -> Iterator[Step]:
    for worker, mind in enumerate(state.minds):
        for held in mind.held:
            if held.phase == "look":
                yield from _finishes(state, worker, held, bounds)


def probes(rows: Rows) -> Iterator[Deed]:
    """Deeds of which nothing may come; tried once on given rows."""
    for worker, row in enumerate(rows.workers):
        if row.state:
            yield Deed("beat", worker, how="short")
            yield Deed("lose", worker, how="stale")
            yield Deed("lose", worker, how="seen")
            yield Deed("claim", worker, how="strange")
        if row.state and row.state not in LIVE_WORKER:
            yield from (Deed("drain", worker), Deed("stop", worker), Deed("bury", worker))
            yield Deed("lose", worker, how="proven")
    for job, row in enumerate(rows.jobs):
        if row.state:
            yield Deed("again", job=job)
        if row.state and not row.last:
            yield Deed("hold", job=job, how="stale")
            yield Deed("hold", job=job)


# --- a worker's process ---------------------------------------------------------------------------


def _of_process(state: State, worker: int, mind: Mind, bounds: Bounds) -> Iterator[Step]:
    row = state.workers[worker]
    yield from _claims(state, worker, bounds)
    yield Step(f"w{worker} beats", Deed("beat", worker), worker, _beaten)
    if row.state == "active":
        yield Step(f"w{worker} drains", Deed("drain", worker), follow=bounds.rich)
    if row.state in LIVE_WORKER:
        deed = Deed("stop", worker)
        yield Step(f"w{worker} stops", deed, worker, _stops, follow=bounds.rich)
        yield Step(f"w{worker} compares", Deed("owned", worker), worker, _adopts)
    if mind.held:
        yield Step(f"w{worker} asks for cancels", Deed("cancelling", worker), worker, _is_asked)
    for held in mind.held:
        yield from _finishes(state, worker, held, bounds)
    running = [held for held in mind.held if held.phase == "runs"]
    if len(running) == 2:
        for outcomes in TOGETHER:
            yield _batch(worker, running, outcomes, bounds.rich or LEAN.issuperset(outcomes))


def _claims(state: State, worker: int, bounds: Bounds) -> Iterator[Step]:
    due = [job for job, row in enumerate(state.jobs) if row.state == "queued" and not row.due]
    yield from _claim(worker, Deed("claim", worker), True)
    if len(due) > 1 and state.workers[worker].state == "active":
        yield from _claim(worker, Deed("claim", worker, limit=1), bounds.rich)
        for job in due:
            yield from _claim(worker, Deed("claim", worker, job=job, limit=1), bounds.rich)


def _claim(worker: int, deed: Deed, doubted: bool) -> Iterator[Step]:
    what = f"up to {deed.limit}" if deed.limit < ALL else "all"
    place = f" behind j{deed.job}" if deed.job >= 0 else ""
    yield Step(f"w{worker} claims {what}{place}", deed, worker, _begins)
    if doubted:
        yield Step(f"w{worker} claims {what}{place} and never hears of it", deed, worker, _unheard)


def _starts(mind: Mind, answer: Any) -> Mind:
    return Mind(True)


def _begins(mind: Mind, answer: Any) -> Mind:
    return Mind(True, (*mind.held, *answer))


def _unheard(mind: Mind, answer: Any) -> Mind | None:
    return mind if answer else None


def _beaten(mind: Mind, alive: Any) -> Mind:
    return mind if alive or mind.held else NO_MIND


def _stops(mind: Mind, answer: Any) -> Mind:
    return mind if mind.held else NO_MIND


def _adopts(mind: Mind, owned: Any) -> Mind:
    """A job that the database says we own and that we do not hold is run."""
    known = {held.job for held in mind.held}
    return Mind(True, (*mind.held, *(held for held in owned if held.job not in known)))


def _is_asked(mind: Mind, asked: Any) -> Mind:
    return Mind(
        True,
        tuple(
            held._replace(seen="cancelling")
            if held.phase == "runs" and (held.job, held.attempt) in asked
            else held
            for held in mind.held
        ),
    )


# --- outcomes -------------------------------------------------------------------------------------


def _finishes(state: State, worker: int, held: Held, bounds: Bounds) -> Iterator[Step]:
    """What can become of one attempt that a process holds."""
    who, core = f"w{worker}", plain(held)
    what = f"j{held.job} attempt {held.attempt}"
    if held.phase == "look":
        deed = Deed("look", worker, writes=(Write(worker, core, held.outcome),))
        yield Step(f"{who} looks again at {what}", deed, worker, _looked(held))
        return
    follows = OUTCOMES.keys() if bounds.rich else LEAN
    job = state.jobs[held.job]
    late = (job.owner, job.attempt) != (worker, held.attempt)
    others = sum(bool(row.state) and not row.last for row in state.jobs) > 1
    for outcome in (held.outcome,) if held.phase == "write" else OUTCOMES:
        if (outcome in RARE and others) or (outcome not in follows and late):
            continue
        if outcome == "follow" and all(row.state for row in state.jobs):
            continue
        deed = Deed("apply", worker, writes=(Write(worker, core, outcome),))
        think = _written(held, outcome)
        follow = outcome in follows
        yield Step(f"{who} ends {what}: {outcome}", deed, worker, think, follow)
        if held.phase == "runs" and outcome in DOUBTED and bounds.rich:
            told = f"{who} ends {what}: {outcome}, and the answer is lost"
            yield Step(told, deed, worker, _unanswered(held, outcome))


def plain(held: Held) -> Held:
    """What of it goes into a write: the same deed for every phase."""
    return held._replace(phase="runs", outcome="", took=False)


def _without(mind: Mind, held: Held, *instead: Held) -> Mind:
    return Mind(True, (*(one for one in mind.held if one != held), *instead))


def _written(held: Held, outcome: str) -> Think:
    def think(mind: Mind, taken: Any) -> Mind | None:
        if held.job in taken:
            return _without(mind, held)
        if held.phase == "runs" and outcome not in DOUBTED:
            return None
        return _without(mind, held, held._replace(phase="look", outcome=outcome))

    return think


def _unanswered(held: Held, outcome: str) -> Think:
    def think(mind: Mind, taken: Any) -> Mind:
        took = held.job in taken
        return _without(mind, held, held._replace(phase="write", outcome=outcome, took=took))

    return think


def _looked(held: Held) -> Think:
    def think(mind: Mind, answer: Any) -> Mind:
        _, state = answer
        if state is None:
            return _without(mind, held)
        return _without(mind, held, held._replace(phase="write", seen=state))

    return think


def _batch(worker: int, running: list[Held], outcomes: tuple[str, str], follow: bool) -> Step:
    writes = tuple(
        Write(worker, held, outcome) for held, outcome in zip(running, outcomes, strict=True)
    )

    def think(mind: Mind, taken: Any) -> Mind:
        for _, held, outcome in writes:
            late = () if held.job in taken else (held._replace(phase="look", outcome=outcome),)
            mind = _without(mind, held, *late)
        return mind

    told = f"w{worker} ends both: {', '.join(outcomes)}"
    return Step(told, Deed("apply", worker, writes=writes), worker, think, follow)


# --- everybody else -------------------------------------------------------------------------------


def _of_others(state: State, bounds: Bounds) -> Iterator[Step]:
    """Sweepers and clients, who have nothing in mind for longer than a transaction."""
    yield Step("a sweep", Deed("sweep"))
    owned = [number for number, job in enumerate(state.jobs) if job.state in OWNED]
    if sum(state.workers[state.jobs[job].owner].state not in LIVE_WORKER for job in owned) > 1:
        yield Step("a sweep of one", Deed("sweep", limit=1))
        for job in owned:
            yield Step(f"a sweep that leaves j{job}", Deed("sweep", job=job))
    for job, row in enumerate(state.jobs):
        if not row.state:
            yield Step(f"j{job} is enqueued", Deed("enqueue", job=job))
            break
    for job, row in enumerate(state.jobs):
        if row.state:
            for kind in ("cancel", "requeue", "discard"):
                yield Step(f"{kind} of j{job}", Deed(kind, job=job), follow=bounds.rich)
        if row.state == "queued":
            yield Step(f"j{job} is held back", Deed("hold", job=job), follow=bounds.rich)
