"""Was everything done, once, and right? Each result is held against a direct computation.

In:  the jobs as the database has them, and the files.    Out: what is wrong, in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from onward import AttemptState, Handle, JobState, Onward
from onward.demo.files import Sight
from onward.demo.look import Line
from onward.demo.work import digest_of, is_refused, packed, words_of

Jobs = Mapping[tuple[str, str], Handle[Any]]
"""The jobs by task and path."""

FOR_EACH = ("digest", "words", "pack", "publish")
"""The tasks that have one job for each file."""


class Comparison(Struct, frozen=True, kw_only=True):
    """How many jobs were compared, how many files were left out because they changed meanwhile, and
    what is wrong.
    """

    jobs: int
    changed: int
    problems: list[str]


def compare(app: Onward, lines: Sequence[Line], files: Sequence[Sight], watched: str) -> Comparison:
    """Hold every job's result against a direct computation.

    Args:
        app: reads the jobs.
        lines: all jobs of the demo.
        files: what they worked on.
        watched: the text that every job that watched must have returned.
    """
    handles = [app.get(line.id) for line in lines]
    jobs = {(_short(handle), str(handle.args["path"])): handle for handle in handles}
    watchers = [handle for handle in handles if _short(handle) == "watch"]
    found = {file: list(_of_file(jobs, file)) for file in files}
    same = [file for file in files if file.is_unchanged()]  # Asked last: it may change till then.
    problems = [
        *not_once(handles, same),
        *(problem for file in same for problem in found[file]),
        *(
            f"watch ended {job.state} with {job.result!r}"
            for job in watchers
            if job.result != watched
        ),
    ]
    return Comparison(
        jobs=len(watchers) + len(FOR_EACH) * len(same),
        changed=len(files) - len(same),
        problems=problems,
    )


def not_once(handles: Iterable[Handle[Any]], files: Sequence[Sight]) -> Iterator[str]:
    """Which files do not have one job of each task: a lost attempt must have enqueued nothing."""
    counts = Counter((_short(handle), str(handle.args["path"])) for handle in handles)
    for file in files:
        for task in FOR_EACH:
            if counts[task, str(file.path)] != 1:
                yield f"{file.path} has {counts[task, str(file.path)]} jobs of {task}, not 1"


def _of_file(jobs: Jobs, file: Sight) -> Iterator[str]:
    try:
        data = file.path.read_bytes()
    except OSError:  # It is gone, so it will be left out.
        return
    digest = digest_of(data)
    checks: dict[str, Callable[[Handle[Any]], bool]] = {
        "digest": lambda job: job.result == digest,
        "pack": lambda job: job.result == packed(data),
        "words": lambda job: _is_right(job, data, file.is_text),
        "publish": lambda job: _got_through(job, digest),
    }
    for task, is_right in checks.items():
        job = jobs.get((task, str(file.path)))
        if job is not None and not is_right(job):
            yield f"{task} of {file.path} ended {job.state} with {job.result!r}"


def _is_right(job: Handle[Any], data: bytes, is_text: bool) -> bool:
    """A text has its statistics; what is no text is dead, after as many failures as it may have."""
    if is_text:
        return bool(job.result == words_of(data))
    ends = [attempt.state for attempt in job.attempts()]
    return job.state is JobState.DEAD and ends.count(AttemptState.FAILED) == 3


def _got_through(job: Handle[Any], digest: str) -> bool:
    """The far end took the last attempt, and it had refused each that failed."""
    if job.attempt == 1:
        return bool(job.result == 1 and not is_refused(digest, 1))
    failed = [a.number for a in job.attempts() if a.state is AttemptState.FAILED]
    return (
        job.result == job.attempt
        and not is_refused(digest, job.attempt)
        and all(is_refused(digest, number) for number in failed)
    )


def _short(handle: Handle[Any]) -> str:
    return handle.task.rpartition(".")[2]
