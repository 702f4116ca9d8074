"""`onward job cancel` with a filter: the jobs that wait are dropped, those that were shown and no
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from onward.job import Change
from onward.lifecycle import JobState
from onward.policy import Returned
from onward.store import store
from tests.cli.conftest import Meanwhile
from tests.cli.shell import Shell, on_terminal
from tests.store.builders import hand
from tests.support.scene import FATAL, Scene

DAY = 86_400.0

REST = (
    "task, queue, priority, state, attempt, run_at, finished_at, created_at, max_attempts, "
    "max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state, reason"
)
"""What a row of the cold table has to have, beside its id."""


def states(scene: Scene, ids: Sequence[str]) -> set[str]:
    return {scene.job(id).state.value for id in ids}


# --- what the filter takes ------------------------------------------------------------------------


def test_one_queue_is_purged(scene: Scene, shell: Shell) -> None:
    ids = {queue: [scene.enqueue(queue=queue) for _ in range(10)] for queue in "ab"}
    assert "--yes" in shell("job", "cancel", "--queue", "a", code=2).stderr
    assert states(scene, ids["a"]) == {"queued"}
    assert shell("job", "cancel", "--queue", "a", "--yes").stdout == "10 cancelled\n"
    assert states(scene, ids["a"]) == {"cancelled"}
    assert states(scene, ids["b"]) == {"queued"}
    assert shell.json("job", "show", ids["a"][0])["reason"] == "cancelled on request"


def test_the_old_jobs_of_one_task_are_dropped(
    scene: Scene, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps, and by the age of the job: not by when it is due."""
    monkeypatch.setattr("onward.cli.bulk.PAGE", 7)
    monkeypatch.setattr("onward.cli.filters.PAGE", 6)
    with scene.ago(DAY + 60):
        old = [scene.enqueue(task="old.task", delay=i * DAY) for i in range(20)]
        other = [scene.enqueue() for _ in range(3)]
    young = [scene.enqueue(task="old.task") for _ in range(10)]
    words = ("job", "cancel", "--task", "old.task", "--older-than", "1d", "--yes")
    assert shell(*words).stdout == "20 cancelled\n"
    assert states(scene, old) == {"cancelled"}
    assert states(scene, other + young) == {"queued"}


def test_only_jobs_that_wait_to_begin_are_dropped(scene: Scene, shell: Shell) -> None:
    made = scene.everything()
    waits = {id for id in made.values() if scene.job(id).state in {"queued", "waiting"}}
    before = {id: scene.job(id) for id in made.values()}
    document = shell.json("job", "cancel", "--queue", "default", "--yes")
    assert document["schema"] == "onward.job.cancel.matching/1"
    assert (set(document["ids"]), document["matched"]) == (waits, len(waits))
    assert (document["asked"], document["left"], document["refused"]) == ([], [], [])
    for id, job in before.items():
        assert scene.job(id) == job or id in waits
    assert states(scene, list(waits)) == {"cancelled"}


def test_a_limit_takes_the_newest_and_a_dry_run_nothing(scene: Scene, shell: Shell) -> None:
    ids = [scene.enqueue() for _ in range(4)]
    words = ("job", "cancel", "--task", "shop.mail", "--limit", "2")
    shown = shell(*words, "--dry-run")
    assert shown.stdout == "2 would be cancelled\n"
    assert "2 queued or waiting jobs (the newest enqueued now" in shown.stderr
    assert states(scene, ids) == {"queued"}
    assert shell(*words, "--yes").stdout == "2 cancelled\n"
    assert [scene.job(id).state.value for id in ids] == ["queued"] * 2 + ["cancelled"] * 2


# --- what nothing has -----------------------------------------------------------------------------


def test_a_queue_that_does_not_exist_is_not_found(scene: Scene, shell: Shell) -> None:
    scene.start_worker(queues=("reports",))
    id = scene.enqueue(queue="mails")
    for wrong, near in (("mail", "mails"), ("report", "reports")):
        told = shell("job", "cancel", "--queue", wrong, "--yes", code=3).stderr
        assert f"there is no queue '{wrong}'" in told
        assert f"did you mean {near}?" in told
    told = shell("job", "cancel", "--queue", "nope", "--yes", code=3).stderr
    assert "there is no queue 'nope'" in told
    assert "did you mean" not in told
    assert scene.job(id).state is JobState.QUEUED


def test_a_list_of_a_name_that_nothing_has_says_so(scene: Scene, shell: Shell) -> None:
    """And ends well: an empty list is an answer."""
    scene.dead()
    for words in (("job", "list"), ("dead", "list")):
        told = shell(*words, "--task", "shop.mial").stderr
        assert "there is no task 'shop.mial'" in told
        assert "did you mean shop.mail?" in told
        assert "there is no queue 'nope'" in shell(*words, "--queue", "nope").stderr
        assert "there is no" not in shell(*words).stderr
        assert shell.json(*words, "--task", "shop.mial")["items"] == []


def test_a_task_that_does_not_exist_is_not_found(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    for words in (("job", "cancel"), ("dead", "requeue"), ("dead", "discard")):
        told = shell(*words, "--task", "shop.mial", "--yes", code=3).stderr
        assert "there is no task 'shop.mial'" in told
        assert "did you mean shop.mail?" in told
    assert scene.job(id).state is JobState.DEAD


def test_a_queue_where_nothing_waits_exists_all_the_same(scene: Scene, shell: Shell) -> None:
    scene.claim(scene.enqueue())
    told = shell("job", "cancel", "--queue", "default", "--yes", code=3).stderr
    assert told == "no queued or waiting job matches: queue 'default'; nothing was changed\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("01", "--queue", "default"),
        ("01", "--dry-run"),
        ("01", "--limit", "1"),
        ("--queue", "default", "--limit", "0"),
        ("--older-than", "soon"),
    ],
    ids=" ".join,
)
def test_unclear_orders_are_wrong_usage(scene: Scene, shell: Shell, words: tuple[str, ...]) -> None:
    id = scene.enqueue(id="01" * 16)
    shell("job", "cancel", *words, "--yes", code=2)
    assert scene.job(id).state is JobState.QUEUED


# --- what happens meanwhile -----------------------------------------------------------------------


def test_what_arrives_after_the_question_is_left_alone(
    scene: Scene, shell: Shell, meanwhile: Meanwhile
) -> None:
    shown = [scene.enqueue() for _ in range(3)]
    late: list[str] = []
    meanwhile(lambda: late.append(scene.enqueue()))
    assert shell("job", "cancel", "--queue", "default", "--yes").stdout == "3 cancelled\n"
    assert states(scene, shown) == {"cancelled"}
    assert states(scene, late) == {"queued"}


def test_what_began_meanwhile_is_asked_to_stop_and_what_ended_is_left_alone(
    scene: Scene, shell: Shell, meanwhile: Meanwhile
) -> None:
    began, done, dead, waits = (scene.enqueue(max_attempts=1) for _ in range(4))

    def go_on() -> None:
        scene.claim(began)
        scene.attempt(done, Returned(result="1"))
        scene.attempt(dead, FATAL)

    meanwhile(go_on)
    told = shell("job", "cancel", "--queue", "default", "--yes").stdout
    assert told == (
        "1 cancelled; 1 had begun meanwhile and was asked to stop; "
        "2 had changed meanwhile and were left alone\n"
    )
    found = [scene.job(id).state.value for id in (began, done, dead, waits)]
    assert found == ["cancelling", "succeeded", "dead", "cancelled"]


def test_what_moves_between_the_look_and_the_write_is_looked_at_again(
    scene: Scene, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a worker claims it just then: the write finds it otherwise and takes nothing."""
    ids = [scene.enqueue() for _ in range(3)]
    apply, calls = store.apply, iter([True])

    def slips(changes: Sequence[Change]) -> Iterator[Any]:
        if next(calls, False):
            return (yield from apply(changes[1:]))
        return (yield from apply(changes))

    monkeypatch.setattr(store, "apply", slips)
    assert shell("job", "cancel", "--queue", "default", "--yes").stdout == "3 cancelled\n"
    assert states(scene, ids) == {"cancelled"}


def test_a_job_that_the_database_refuses_to_move_hinders_no_other(
    scene: Scene, shell: Shell
) -> None:
    """Its id is in both tables: something that no hand of ours does, and no guard can see."""
    ids = [scene.enqueue() for _ in range(5)]
    twin = scene.ask_cancel(scene.enqueue())
    with hand(scene.database) as dba:
        own = ":id" if dba.dialect == "sqlite" else "CAST(:id AS uuid)"
        dba.sql(
            f"INSERT INTO onward.finished (id, {REST}) SELECT {own}, {REST} "
            "FROM onward.finished WHERE id = :twin",
            id=ids[2],
            twin=twin,
        )
    result = shell("job", "cancel", "--queue", "default", "--yes", code=6)
    assert result.stdout == "4 cancelled; 1 was refused by the database\n"
    assert "error" in result.stderr
    rows = {row["id"]: row["state"] for row in shell.rows("job", "list", "--state", "queued")}
    assert rows == {ids[2]: "queued"}


# --- asking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code", "state"), [("y\n", 0, "cancelled"), ("n\n", 1, "queued")]
)
def test_on_a_terminal_it_shows_a_sample_and_asks(
    scene: Scene, shell: Shell, answer: str, code: int, state: str
) -> None:
    ids = [scene.enqueue() for _ in range(7)]
    status, text = on_terminal(
        "job", "cancel", "--queue", "default", "--database", shell.url, answer=answer
    )
    assert status == code
    assert "7 queued or waiting jobs (the newest enqueued " in text
    assert ids[-1] in text
    assert ids[0] not in text
    assert "… and 2 more" in text
    assert "One that begins meanwhile is asked to stop." in text
    assert "Cancel these 7? [y/N]" in text
    assert states(scene, ids) == {state}
