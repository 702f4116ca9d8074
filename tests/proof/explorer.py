"""The explorer: every interleaving of the store's operations, on their real SQL, within bounds.

It goes breadth first over states (`explorer_state`): what the database holds, and what each
worker's process has in mind. From each it takes every step (`explorer_steps`): claims, outcomes in
time and too late, answers that get lost, renewals, losses, sweeps, clients' moves, deaths, time
passing. Every step is carried out by a database (`explorer_place`) and judged as a move
(`explorer_judge`); all rows that come of it are held against the invariants that ship; and from
all rows there must be a way to the end. What a deed does to given rows is asked of the database
once. A violation is told with the shortest story that leads to it.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple

from onward.invariants import CHECKS, closing_events, guards, last_moves
from onward.lifecycle import AttemptState, Event
from onward.store import store
from onward.store.store import FIRST_ID
from tests.proof.explorer_databases import SqlitePlace
from tests.proof.explorer_deeds import ALL, LANE, TASKS, Actor, Deed, registration
from tests.proof.explorer_judge import Case, judge
from tests.proof.explorer_place import (
    ERRORS,
    FORGOTTEN,
    NOW,
    Bounds,
    Dump,
    Names,
    Place,
    names,
    read_back,
    stored,
)
from tests.proof.explorer_state import (
    LIVE_WORKER,
    NO_MIND,
    Mind,
    Rows,
    State,
    barest,
    begun,
    canonical,
    empty,
    tick,
)
from tests.proof.explorer_steps import OWNED, Step, plain, probes, steps
from tests.proof.report import Budget, Report, Technique

DEEP = Bounds(workers=3, jobs=2, attempts=3, max_attempts=2, max_losses=1, lease=0.5)
MOST_FOUND = 20
RARELY = 64
"""The database's own soundness is looked at once for so many different rows."""
KEYS = {check.statement: check.key for check in CHECKS}
ALL_CHECKS = tuple(KEYS)
CHEAP = tuple(name for name in KEYS if name not in {"check_sound", "check_guards"})


class Effect(NamedTuple):
    """What a deed did to given rows."""

    rows: Rows
    answer: Any
    wrong: tuple[str, ...] = ()


class Known(NamedTuple):
    """Rows that were met, and what each deed does to them."""

    number: int
    rows: Rows
    ids: Names
    effects: dict[Deed, Effect]


class Explorer:
    """One exhaustive search.

    Args:
        place: the database.
        bounds: how much there is of everything.
        report: takes what is done, met and found.
        most: how many violations end the search.
    """

    def __init__(
        self, place: Place, bounds: Bounds, report: Report, most: int = MOST_FOUND
    ) -> None:
        self._place = place
        self._bounds = bounds
        self._report = report
        self._most = most
        self._known: dict[Rows, Known] = {}
        self._sound: set[Rows] = set()
        self._held: tuple[Known, Dump] | None = None
        self._numbers: dict[State, int] = {}
        self._raw: dict[State, int] = {}
        self._stories: list[tuple[int, str]] = []
        self._states: list[State] = []
        self._params = {
            "seconds": 30.0,
            "limit": 5,
            "moves": store.dumps(last_moves()),
            "ends": store.dumps(closing_events()),
            "guards": store.dumps(guards(place.dialect)),
        }

    def run(self, budget: Budget) -> bool:
        """Search; returns whether nothing is left to be searched."""
        bounds = self._bounds
        start = empty(bounds.workers, bounds.jobs)
        if not bounds.rich:
            start = begun(bounds.workers, bounds.jobs, bounds.lease)
        level = [self._number(start, -1, "")]
        while level:
            following: list[int] = []
            level.sort(key=lambda number: self._rows(self._states[number].rows).number)
            for number in level:
                if not budget.left() or len(self._report.violations) >= self._most:
                    return False
                following += self._expand(number)
            level = following
            self._report.did["levels"] += 1
        return True

    # --- one state --------------------------------------------------------------------------------

    def _expand(self, number: int) -> list[int]:
        """Take every step from a state; returns the states that are new."""
        state = self._states[number]
        new: list[int] = []
        known = self._rows(state.rows)
        if not known.effects:
            self._first_look(known, number)
        for told, following in self._followers(state, known, number):
            self._report.did["edges"] += 1
            before = len(self._states)
            reached = self._number(following, number, told)
            if reached == before:
                new.append(reached)
        return new

    def _followers(self, state: State, known: Known, number: int) -> Iterator[tuple[str, State]]:
        for step in steps(state, self._bounds):
            effect = self._effect(known, step.deed)
            if effect.wrong:
                self._violate(number, step.told, effect.wrong)
                continue
            self._violate(number, step.told, tuple(_misled(step, state, effect)))
            following = self._thought(state, step, effect) if step.follow else None
            if following is None:
                continue
            self._note(state, step, effect)
            if any(job.attempt > self._bounds.attempts and not job.last for job in following.jobs):
                self._report.did["edges out of bounds"] += 1
            else:
                yield step.told, following
        looks = any(held.phase == "look" for mind in state.minds for held in mind.held)
        if looks and not self._bounds.rich:
            return
        yield "a tick", tick(state)
        for worker, mind in enumerate(state.minds):
            if mind.up and self._bounds.rich:
                yield f"w{worker} dies", state._replace(minds=_with(state.minds, worker, NO_MIND))

    def _thought(self, state: State, step: Step, effect: Effect) -> State | None:
        minds = state.minds
        if step.worker is not None and step.think is not None:
            mind = step.think(minds[step.worker], effect.answer)
            if mind is None:
                return None
            minds = _with(minds, step.worker, mind)
        return State(effect.rows.jobs, effect.rows.workers, minds)

    def _number(self, raw: State, parent: int, told: str) -> int:
        """The state's number; a new one gets the next, and is looked at."""
        if raw in self._raw:
            return self._raw[raw]
        state = canonical(barest(raw))
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self._states)
            self._states.append(state)
            self._stories.append((parent, told))
            self._report.did["states"] += 1
            self._violate(number, "", tuple(_believers(state)))
        self._raw[raw] = number
        return number

    # --- the database -----------------------------------------------------------------------------

    def _rows(self, rows: Rows) -> Known:
        known = self._known.get(rows)
        if known is None:
            turned = bool(zlib.crc32(repr((self._report.seed, rows)).encode()) & 1)
            known = Known(len(self._known), rows, names(self._bounds, turned), {})
            self._known[rows] = known
            self._report.did["rows"] += 1
        return known

    def _effect(self, known: Known, deed: Deed) -> Effect:
        effect = known.effects.get(deed)
        if effect is None:
            effect = known.effects[deed] = self._do(known, deed)
            self._report.did["deeds"] += 1
        return effect

    def _put(self, known: Known) -> Dump:
        """Have the database hold these rows; returns them as it holds them."""
        if self._held is None or self._held[0] is not known:
            dump = stored(known.rows, self._bounds, known.ids)
            self._place.put(dump)
            self._held = known, dump
        return self._held[1]

    def _do(self, known: Known, deed: Deed) -> Effect:
        before = self._put(known)
        actor = Actor(known.rows, self._bounds, known.ids)
        try:
            with self._place.passing():
                answer = self._place.run(actor.op(deed))
                after = self._place.dump() or before
                rows = known.rows if after is before else read_back(after, known.ids)
                alike = _alike(rows)
                wrong = [] if alike in self._sound else list(self._unsound())
        except ERRORS as error:
            return Effect(known.rows, None, (f"{type(error).__name__}: {error}",))
        changes = tuple(actor.change(write) for write in deed.writes)
        wrong += judge(Case(deed, before, after, answer, known.ids, self._bounds, changes))
        if not wrong:
            self._sound.add(alike)
        return Effect(rows, answer, tuple(wrong))

    def _unsound(self) -> Iterator[str]:
        """Which invariants the rows break that the database holds now."""
        self._report.did["invariants asked"] += 1
        rarely = self._report.did["invariants asked"] % RARELY == 1
        for name, id_, what in self._place.ask(ALL_CHECKS if rarely else CHEAP, self._params):
            yield f"{KEYS[name]} {name}: {id_} {what}"

    def _first_look(self, known: Known, number: int) -> None:
        """What is tried once on given rows: deeds of which nothing may come, and the way out."""
        for deed in probes(known.rows):
            effect = self._effect(known, deed)
            self._violate(number, f"probe: {deed}", effect.wrong)
        self._put(known)
        try:
            with self._place.passing():
                wrong = tuple(self._hopeless(known))
        except ERRORS as error:
            wrong = (f"{type(error).__name__}: {error}",)
        self._violate(number, "all workers die, and a new one comes", wrong)

    def _hopeless(self, known: Known) -> Iterator[str]:
        """D4: when all workers are gone, one sweep and one worker bring every job to its end."""
        place = self._place
        actor = Actor(known.rows, self._bounds, known.ids)
        for worker, row in enumerate(known.rows.workers):
            if row.state in LIVE_WORKER:
                place.run(actor.lose(Deed("lose", worker, how="proven")))
        place.run(actor.sweep(Deed("sweep")))
        params = self._params | {"seconds": 0.0}
        for row in place.run(store.read("check_no_limbo", **params)):
            yield f"D4 after a sweep: {row[0]} {row[1]}"
        place.run(store.register(registration(FORGOTTEN, 60.0)))
        place.clock(NOW + 10)
        claimed = place.run(store.claim(FORGOTTEN, TASKS, LANE, (0.0, FIRST_ID), ALL))
        for one in claimed:
            change = one.job.move(Event.SUCCEED, ended=AttemptState.SUCCEEDED, result="null")
            place.run(store.apply([change]))
        dump = place.dump()
        for id_, job in dump.jobs.items() if dump else ():
            if job["state"] != "dead":
                yield f"D4 no way to the end: {id_} stays {job['state']}"

    # --- what was met, what was found -------------------------------------------------------------

    def _note(self, state: State, step: Step, effect: Effect) -> None:
        met = self._report.sometimes
        kind, answer = step.deed.kind, effect.answer
        if kind == "claim" and answer:
            gone = {w for w, row in enumerate(state.workers) if row.state not in LIVE_WORKER}
            met["claims beside a job to be swept"] += any(
                job.owner in gone for job in state.jobs if job.state in OWNED
            )
            met["claims whose answer was lost"] += "never hears" in step.told
        elif kind == "owned":
            known = {held.job for held in state.minds[step.deed.worker].held}
            met["adopted"] += any(held.job not in known for held in answer)
        elif kind in {"sweep", "bury"}:
            swept: tuple[int, ...] = answer
            for row in (effect.rows.jobs[job] for job in swept):
                met[f"swept to {row.state}"] += 1
        elif kind == "beat":
            met["beats of the lost"] += not answer
        elif kind == "apply":
            for write in step.deed.writes:
                job = state.jobs[write.held.job]
                if write.held.job not in answer:
                    met["late ends"] += 1
                    met["late ends beside the next owner"] += job.state in OWNED and (
                        job.attempt > write.held.attempt
                    )
                    met["ends after a cancel"] += job.attempt == write.held.attempt and (
                        job.owner == write.worker and job.state == "cancelling"
                    )
        elif kind == "look":
            met["learnt that it took"] += answer[0]
            met["decided again"] += answer[1] is not None
            met["refusals kept"] += answer == (False, None)
        elif kind == "lose" and step.deed.how == "seen":
            met["leases that ran out"] += 1
        elif kind == "stop":
            met["stopped with jobs in hand"] += bool(state.minds[step.deed.worker].held)
        elif kind in {"cancel", "requeue", "discard"}:
            met[f"{kind}s that took"] += answer not in {"illegal", state.jobs[step.deed.job].state}

    def _violate(self, number: int, told: str, wrong: tuple[str, ...]) -> None:
        for what in wrong[: self._most]:
            self._report.violate(f"{what} | after: {'; '.join([*self._story(number), told])}")

    def _story(self, number: int) -> list[str]:
        """The shortest way to a state. Whoever is called w0 may be called w1 one step later."""
        told: list[str] = []
        while number > 0:
            number, step = self._stories[number]
            told.append(step)
        return told[::-1]


def _believers(state: State) -> Iterator[str]:
    """L1, L3: whoever has not been declared lost owns what it holds, at the attempt it holds; so no
    two hold a job under live leases.
    """
    for worker, mind in enumerate(state.minds):
        for held in mind.held:
            job = state.jobs[held.job]
            own = job.state in OWNED and (job.owner, job.attempt) == (worker, held.attempt)
            if state.workers[worker].state in LIVE_WORKER and not (own or held.took):
                yield f"L1 w{worker} lives and holds {held}, and the job is {job}"
            if own and held.took:
                yield f"L3 w{worker} wrote the end of {held}, and the job is {job}"


def _misled(step: Step, state: State, effect: Effect) -> Iterator[str]:
    """D3: whoever looks learns whether the write took whose answer was lost."""
    if step.deed.kind == "look":
        (held,) = [
            held
            for held in state.minds[step.deed.worker].held
            if held.phase == "look" and plain(held) == step.deed.writes[0].held
        ]
        if effect.answer[0] != held.took:
            yield f"D3 it took: {held.took}, and its writer is told {effect.answer[0]}"


@cache
def _alike(rows: Rows) -> Rows:
    """The same rows for all that differ only in who is called what."""
    return canonical(State(rows.jobs, rows.workers, (NO_MIND,) * len(rows.workers))).rows


def _with(minds: tuple[Mind, ...], worker: int, mind: Mind) -> tuple[Mind, ...]:
    return (*minds[:worker], mind, *minds[worker + 1 :])


def explore(place: Place, bounds: Bounds, seed: int, budget: Budget, most: int = 1) -> Report:
    """One search; the report says how far it came."""
    shown = ", ".join(f"{name}={value:g}" for name, value in bounds._asdict().items())
    report = Report("explorer", f"{place.dialect} ({shown})", seed)
    gc.disable()  # Millions of values that stay: to look through them again and again takes longer.
    try:
        exhausted = Explorer(place, bounds, report, most).run(budget)
    finally:
        gc.enable()
    report.did["statements' operations"] = place.runs
    report.did["exhausted"] = int(exhausted)
    return report


def _deep(seed: int, budget: Budget) -> Report:
    with closing(SqlitePlace()) as place:
        return explore(place, DEEP, seed, budget, MOST_FOUND)


TECHNIQUES = [Technique("explorer", _deep, whole=True)]
