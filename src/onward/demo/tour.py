"""The course of the demo: enqueue, run under `onward worker`, kill a worker process, check all.

In:  files, and a database.    Out: what is seen, and the exit status, 1 if anything is off.
It counts only its own jobs, which are in a queue of their own. In a database that it was given it
tidies up behind itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onward.demo import report, tasks
from onward.demo.check import compare
from onward.demo.crew import Crew, Victim
from onward.demo.files import Sight, choose
from onward.demo.look import Line, read_jobs, tally
from onward.demo.report import Outcome
from onward.demo.scene import Scene, make_tables, scene
from onward.demo.stage import Stage
from onward.invariants import run_checks
from onward.lifecycle import JobState
from onward.task import Call

FILES = 1_000

EACH = 4
"""How many jobs there are for each file in the end: two are enqueued, and two follow."""

KILL_AT = 0.3
"""The share of jobs that have ended when a worker process is killed."""

MOST_KILLS = 3

PATIENCE = 60.0
"""Seconds without a change after which the demo gives up."""

LOOK = 0.1

WATCHED = "somebody was killed, and the work went on"
"""What the jobs that watch read at last."""


def run(
    folder: Path | None = None,
    database: str | None = None,
    *,
    files: int | None = None,
    processes: int = 3,
    keep: bool = False,
    schema: str = "onward",
) -> int:
    """Run the demo; returns the exit status.

    Args:
        folder: whose files; None: those of Onward and of Python's standard library.
        database: where; None: a temporary SQLite file, removed at the end.
        files: how many.
        processes: how many worker processes.
        keep: leave the database and the dead jobs for a look around.
        schema: PostgreSQL only: the schema of Onward's tables.

    Raises:
        OnwardError: the folder has no files, or the database cannot be used.
    """
    chosen = choose(folder, files or FILES)
    with _ended_by_signals(), scene(database, schema=schema, keep=keep) as place:
        stage = Stage()
        report.introduce(stage, place, chosen, folder)
        return Tour(stage, place, chosen, processes).run()


@contextmanager
def _ended_by_signals() -> Generator[None]:
    """A signal that would end us ends the workers first."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    try:
        before = [signal.signal(number, _end) for number in numbers]
    except ValueError:  # Not in the main thread: signals are somebody else's.
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


class Tour:
    """One run of the demo.

    Args:
        stage: what is seen.
        place: the folder and the database.
        files: what the jobs work on.
        processes: how many worker processes.
    """

    def __init__(self, stage: Stage, place: Scene, files: Sequence[Sight], processes: int) -> None:
        self._stage = stage
        self._place = place
        self._files = files
        self._processes = processes
        self._queue = f"onward-demo-{os.urandom(3).hex()}"
        self._crew = Crew(
            self._queue, processes, place.environment, log=place.folder / "worker.log"
        )
        self._signal = place.folder / "signal.txt"
        self._first = ""
        self._victims: list[Victim] = []
        self._killed_at = 0.0

    @property
    def _expected(self) -> int:
        """How many jobs there will be."""
        return EACH * len(self._files) + self._processes

    def run(self) -> int:
        """Enqueue, run, check, and say what came of it."""
        if made := make_tables(self._place.database):
            self._stage.say("schema", f"made: {', '.join(made)}")
        try:
            self._enqueue()
            outcome = self._examine(self._work(), self._crew.stop())
            return report.conclude(self._stage, self._place, outcome)
        finally:
            self._signal.touch()
            self._crew.stop()
            self._tidy_up()

    # --- enqueue ----------------------------------------------------------------------------------

    def _enqueue(self) -> None:
        began = time.monotonic()
        jobs = tasks.app.enqueue_many(self._calls())
        self._first = min(job.id for job in jobs)
        seconds = time.monotonic() - began
        self._stage.say("enqueue", f"{len(jobs):,} jobs in one transaction, {seconds:.2f} s")

    def _calls(self) -> list[Call[object]]:
        watch = tasks.watch.using(queue=self._queue)
        digest, words = tasks.digest.using(queue=self._queue), tasks.words.using(queue=self._queue)
        calls: list[Call[object]] = [watch.call(str(self._signal)) for _ in range(self._processes)]
        for file in self._files:
            calls += [digest.call(str(file.path)), words.call(str(file.path))]
        return calls

    # --- run --------------------------------------------------------------------------------------

    def _work(self) -> list[Line]:
        """Have the jobs run until all have ended, and kill a worker process meanwhile."""
        self._crew.start()
        began = time.monotonic()
        self._stage.say("workers", self._crew.shown)
        with self._stage.progress(self._expected):
            lines = self._follow()
        self._signal.touch()  # Whatever came of it, nobody watches any longer.
        seconds = time.monotonic() - began
        self._stage.say("run", f"{tally(lines).ended:,} jobs have ended after {seconds:.1f} s")
        return lines

    def _follow(self) -> list[Line]:
        """Look until two looks in a row find every job ended, or until nothing goes on any more."""
        seen: list[Line] = []
        changed = time.monotonic()
        while time.monotonic() - changed < PATIENCE and not self._crew.has_ended:
            began = time.monotonic()
            lines = read_jobs(self._place.database, self._queue, self._first)
            now = tally(lines)
            self._stage.show(now, self._expected)
            if lines == seen and not now.live:
                break
            if lines != seen:
                changed = time.monotonic()
            seen = lines
            self._strike(lines)
            time.sleep(LOOK + 2 * (time.monotonic() - began))
        return seen

    def _strike(self, lines: Sequence[Line]) -> None:
        """Kill a worker process once enough has ended; another if the first took no job with it."""
        if recovered := [line for line in lines if line.losses]:
            self._let_go(recovered)
        elif tally(lines).ended >= KILL_AT * self._expected and self._may_kill():
            self._kill()

    def _kill(self) -> None:
        if victim := self._crew.kill_one(self._place.database):
            self._victims.append(victim)
            self._killed_at = time.monotonic()
            self._stage.say("kill", f"kill -9 {victim.pid}, a worker process")

    def _let_go(self, recovered: Sequence[Line]) -> None:
        """The kill has met work: the jobs that waited for that may end."""
        if self._signal.exists():
            return
        draft = self._signal.with_suffix(".draft")
        draft.write_text(WATCHED, encoding="utf-8")
        draft.rename(self._signal)  # Whoever sees it sees all of it.
        seconds = time.monotonic() - self._killed_at
        jobs = report.count_of(len(recovered), "job that it ran is", "jobs that it ran are")
        self._stage.say("recover", f"{jobs} taken back, {seconds:.1f} s later")

    def _may_kill(self) -> bool:
        """Not too often, and not before the jobs of the last victim have been taken back."""
        if not self._victims:
            return True
        workers = {worker.id: worker for worker in self._crew.workers(self._place.database)}
        last = workers[self._victims[-1].worker]
        return len(self._victims) < MOST_KILLS and not last.alive and not last.running

    # --- the end ----------------------------------------------------------------------------------

    def _examine(self, lines: Sequence[Line], status: int) -> Outcome:
        self._stage.say(
            "check", "every result against a direct computation, and every rule of the contract"
        )
        return Outcome(
            lines=lines,
            victims=self._victims,
            workers=self._crew.workers(self._place.database),
            status=status,
            comparison=compare(tasks.app, lines, self._files, WATCHED),
            findings=run_checks(self._place.database),
            log=self._crew.last_words(),
        )

    def _tidy_up(self) -> None:
        """Leave nothing that needs a human in a database of the user's."""
        if self._place.own or self._place.keep or not self._first:
            return
        for line in read_jobs(self._place.database, self._queue, self._first):
            if line.state is JobState.DEAD:
                tasks.app.discard(line.id, reason="the demo is over")
            elif line.state is JobState.QUEUED:
                tasks.app.cancel(line.id)
