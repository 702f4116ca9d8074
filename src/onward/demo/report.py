"""What the demo says before and after: what it works on, what came of it, which promises held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from onward import JobState
from onward.demo.check import Comparison
from onward.demo.crew import Victim
from onward.demo.files import Sight, library
from onward.demo.look import Line, count, tally
from onward.demo.scene import Scene
from onward.demo.stage import Stage
from onward.demo.tasks import app
from onward.handle import read_error
from onward.invariants import NO_LIMBO, Finding
from onward.overview import WorkerLine
from onward.version import version

COLUMNS = ("task", "jobs", "succeeded", "dead", "attempts", "failed", "lost", "released")

MOST_PROBLEMS = 5

ID_LENGTH = 36


class Outcome(Struct, frozen=True, kw_only=True):
    """Everything that is known at the end. `status` is the supervisor's exit status, `log` the last
    that it said.
    """

    lines: Sequence[Line]
    victims: Sequence[Victim]
    workers: Sequence[WorkerLine]
    status: int
    comparison: Comparison
    findings: Sequence[Finding]
    log: Sequence[str]

    @property
    def recovered(self) -> list[Line]:
        """The jobs that were taken back from a worker that vanished."""
        return [line for line in self.lines if line.losses]


class Verdict(Struct, frozen=True):
    """One promise: whether it held, and what shows it. `details` are for when it did not."""

    holds: bool
    text: str
    details: Sequence[str] = ()


# --- before ---------------------------------------------------------------------------------------


def introduce(stage: Stage, place: Scene, files: Sequence[Sight], folder: Path | None) -> None:
    """What is about to happen, and on what."""
    stage.title(
        f"Onward {version()}", "real jobs on real files, and a worker killed in their midst"
    )
    size = sum(file.size for file in files) / 1e6
    where = folder.absolute() if folder else f"{library()} and of Onward itself"
    stage.say("files", f"{len(files):,} ({size:.1f} MB) of {where}")
    if strangers := sum(not file.is_text for file in files):
        stage.say(
            "", f"{count_of(strangers, 'is', 'are')} no text: to count the words must fail there"
        )
    stay = "stays" if place.keep else "removed at the end"
    stage.say("database", place.database.shown_url, f" ({stay})" if place.own else "")


def count_of(number: int, one: str, many: str) -> str:
    """A number with the word that goes with it."""
    return f"{number:,} {one if number == 1 else many}"


# --- after ----------------------------------------------------------------------------------------


def conclude(stage: Stage, place: Scene, outcome: Outcome) -> int:
    """Say what came of it; returns the exit status."""
    _tell_stories(stage, outcome)
    stage.gap()
    stage.table(COLUMNS, list(table(outcome.lines)))
    stage.gap()
    verdicts = list(judge(outcome, place))
    for verdict in verdicts:
        stage.verdict(verdict.holds, verdict.text)
        for detail in verdict.details[:MOST_PROBLEMS]:
            stage.say("", detail)
    sound = all(verdict.holds for verdict in verdicts)
    if not sound:
        for line in outcome.log:
            stage.say("log", line)
    stage.gap()
    stage.verdict(sound, (summary(outcome), "bold"))
    _point_onward(stage, place, outcome)
    return 0 if sound else 1


def _tell_stories(stage: Stage, outcome: Outcome) -> None:
    """The history of one job that was recovered, and of one that is dead."""
    for label, lines in (("recovered", outcome.recovered), ("dead", _dead(outcome))):
        if lines:
            stage.say(label, f"{lines[0].task} {lines[0].id[:18]}: {history(lines[0])}")


def history(line: Line) -> str:
    """Every attempt of a job in a few words; those that ended alike stand together."""
    parts: list[str] = []
    for (state, error), group in groupby(app.get(line.id).attempts(), lambda a: (a.state, a.error)):
        numbers = ", ".join(str(attempt.number) for attempt in group)
        parts.append(f"attempt {numbers} {state}" + (f" ({_why(error)})" if error else ""))
    return "; ".join(parts)


def _why(error: str) -> str:
    found = read_error(error)
    return found.type if found.traceback else found.message.rpartition(": ")[2]


def _dead(outcome: Outcome) -> list[Line]:
    return [line for line in outcome.lines if line.state is JobState.DEAD]


def table(lines: Sequence[Line]) -> Iterator[tuple[str | int, ...]]:
    """Jobs by state and attempts by how they ended, for each task and in all."""
    for task in dict.fromkeys(line.task for line in lines):
        yield _row(task, [line for line in lines if line.task == task])
    yield _row("all", lines)


def _row(name: str, lines: Sequence[Line]) -> tuple[str | int, ...]:
    return (
        name,
        len(lines),
        count(lines, lambda line: line.state is JobState.SUCCEEDED),
        count(lines, lambda line: line.state is JobState.DEAD),
        sum(line.attempt for line in lines),
        sum(line.failures for line in lines),
        sum(line.losses for line in lines),
        sum(line.releases for line in lines),
    )


# --- verdicts -------------------------------------------------------------------------------------


def judge(outcome: Outcome, place: Scene) -> Iterator[Verdict]:
    """Every promise that this run has tested."""
    yield _all_ended(outcome)
    yield _results(outcome.comparison)
    yield _only_strangers_dead(outcome)
    yield _recovery(outcome)
    yield _in_order(outcome)
    yield _rules(outcome, place)


def _all_ended(outcome: Outcome) -> Verdict:
    live = tally(outcome.lines).live
    text = (
        "every job has ended" if not live else f"{count_of(live, 'job has', 'jobs have')} not ended"
    )
    return Verdict(not live, text)


def _results(comparison: Comparison) -> Verdict:
    left_out = count_of(comparison.changed, "file", "files")
    note = f"; {left_out} changed meanwhile and left out" if comparison.changed else ""
    wrong = comparison.problems
    text = (
        f"{comparison.jobs:,} results compared with a direct computation, {len(wrong)} differ{note}"
    )
    return Verdict(not wrong, text, wrong)


def _only_strangers_dead(outcome: Outcome) -> Verdict:
    strange = [line for line in _dead(outcome) if line.task != "words"]
    text = f"{len(_dead(outcome))} dead, set aside for a human: files that are no text"
    if outcome.comparison.changed:  # A file that is gone cannot be worked on.
        return Verdict(True, text)
    return Verdict(not strange, text, [f"{line.task} {line.id} is dead" for line in strange])


def _recovery(outcome: Outcome) -> Verdict:
    jobs = count_of(len(outcome.recovered), "job", "jobs")
    killed = count_of(len(outcome.victims), "killed worker process", "killed worker processes")
    again = [line for line in outcome.recovered if line.attempt > line.losses]
    text = f"{jobs} taken back from {killed}, and run again"
    return Verdict(0 < len(again) == len(outcome.recovered), text)


def _in_order(outcome: Outcome) -> Verdict:
    """Those that were killed are lost; all others have stopped."""
    killed = {victim.worker for victim in outcome.victims}
    odd = [w for w in outcome.workers if w.state != ("lost" if w.id in killed else "stopped")]
    others = len(outcome.workers) - len(killed)
    text = f"{count_of(others, 'other worker process', 'other worker processes')} stopped in order"
    problems = [f"worker process {worker.pid} is {worker.state}" for worker in odd]
    return Verdict(not odd and outcome.status == 0, text, problems)


def _rules(outcome: Outcome, place: Scene) -> Verdict:
    broken = list(_broken(outcome, place))
    text = f"{len(outcome.findings)} rules of the contract asked, {len(broken)} broken"
    return Verdict(not broken, text, broken)


def _broken(outcome: Outcome, place: Scene) -> Iterator[str]:
    """What the rules found; what others left in a database of the user's is not our business."""
    ours = {line.id for line in outcome.lines} | {worker.id for worker in outcome.workers}
    for finding in outcome.findings:
        if finding.problem:
            yield f"{finding.check.name}: {finding.problem}"
        for offence in finding.offences:
            if place.own or offence.subject in ours or len(offence.subject) != ID_LENGTH:
                yield f"{finding.check.name}: {offence.subject} {offence.what}"


def summary(outcome: Outcome) -> str:
    """The last line."""
    states = Counter(line.state for line in outcome.lines)
    ours = {line.id for line in outcome.lines}
    limbo = next(finding for finding in outcome.findings if finding.check is NO_LIMBO)
    forgotten = sum(offence.subject in ours for offence in limbo.offences)
    numbers = {
        "enqueued": len(outcome.lines),
        "succeeded": states[JobState.SUCCEEDED],
        "dead": states[JobState.DEAD],
        "recovered": len(outcome.recovered),
        "in limbo": forgotten,
    }
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items())


def _point_onward(stage: Stage, place: Scene, outcome: Outcome) -> None:
    """What to look at now, where something has stayed to look at."""
    if not place.keep:
        return
    stage.gap()
    for command in ("status", "dead list", f"job show {_worth_showing(outcome).id}", "doctor"):
        stage.say("look", f"onward {command} {place.options}")


def _worth_showing(outcome: Outcome) -> Line:
    return (outcome.recovered or outcome.lines)[0]
