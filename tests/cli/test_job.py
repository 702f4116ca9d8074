"""`onward job`: list, show, cancel, requeue."""

from __future__ import annotations

import json
import re
from datetime import datetime

import pytest

from onward.lifecycle import JobState
from onward.policy import Returned
from onward.store import store
from tests.cli.shell import Shell, on_terminal
from tests.support.scene import RAISED, Scene

# --- list -----------------------------------------------------------------------------------------


def test_jobs_in_every_state_are_listed_the_newest_first(scene: Scene, shell: Shell) -> None:
    made = scene.everything()
    rows = shell.rows("job", "list")
    assert [row["id"] for row in rows] == sorted(made.values(), reverse=True)
    assert {row["state"] for row in rows} == set(JobState)


def test_the_json_document_is_complete(scene: Scene, shell: Shell) -> None:
    id = scene.attempt(scene.enqueue(), RAISED)
    document = shell.json("job", "list")
    assert (document["schema"], document["next"]) == ("onward.job.list/1", None)
    (item,) = document["items"]
    assert item["id"] == id
    assert (item["failures"], item["max_attempts"], item["attempt"]) == (1, 3, 2)
    assert item["damaged"] is None
    assert datetime.fromisoformat(item["created_at"]).tzinfo is not None
    assert item["created_at"].endswith("Z")


def test_failures_are_shown_as_failures(scene: Scene, shell: Shell) -> None:
    scene.attempt(scene.enqueue(), RAISED)
    (row,) = shell.rows("job", "list")
    assert row["failed"] == "1/3"


def test_filters_are_exact(scene: Scene, shell: Shell) -> None:
    names = ["a_b", "axb", "50%", "500", "back\\slash", "o'clock"]
    ids = {name: scene.enqueue(task=name) for name in names}
    for name in names:
        assert [row["id"] for row in shell.rows("job", "list", "--task", name)] == [ids[name]]


def test_filters_go_together(scene: Scene, shell: Shell) -> None:
    wanted = scene.dead(queue="mail")
    scene.dead()
    scene.enqueue(queue="mail")
    rows = shell.rows("job", "list", "--queue", "mail", "--state", "dead")
    assert [row["id"] for row in rows] == [wanted]


def test_pages_follow_each_other(scene: Scene, shell: Shell) -> None:
    ids = [scene.enqueue() for _ in range(5)]
    seen: list[str] = []
    before: list[str] = []
    while True:
        page = shell.json("job", "list", "--limit", "2", *before)
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            break
        before = ["--before", page["next"]]
    assert seen == sorted(ids, reverse=True)


def test_nothing_to_list_is_no_error(scene: Scene, shell: Shell) -> None:
    assert "there are no jobs yet" in shell("job", "list").stderr
    assert "no job matches" in shell("job", "list", "--task", "nope").stderr
    assert shell.json("job", "list")["items"] == []


def test_a_state_that_does_not_exist_is_wrong_usage(scene: Scene, shell: Shell) -> None:
    assert "'queued'" in shell("job", "list", "--state", "retrying", code=2).stderr


def test_a_terminal_shows_ids_that_can_be_typed_back(scene: Scene, shell: Shell) -> None:
    id = scene.enqueue()
    code, text = on_terminal("job", "list", "--database", shell.url)
    assert code == 0
    short = text.splitlines()[1].split()[0]
    assert short == id[:18]
    assert shell.json("job", "show", short)["id"] == id


# --- show -----------------------------------------------------------------------------------------


def test_a_job_is_shown_with_its_attempts_and_errors(scene: Scene, shell: Shell) -> None:
    id = scene.attempt(scene.attempt(scene.enqueue(), RAISED), Returned(result='{"sent":1}'))
    document = shell.json("job", "show", id)
    assert document["schema"] == "onward.job.show/1"
    assert document["args"] == {"user_id": 7}
    assert document["result"] == {"sent": 1}
    assert [a["state"] for a in document["attempts"]] == ["failed", "succeeded"]
    assert document["attempts"][0]["error"]["type"] == "shop.ApiError"
    text = shell("job", "show", id).stdout
    assert "shop.ApiError: no such user: 7" in text
    assert "Traceback (most recent call last):" in text
    assert "user_id = 7" in text


def test_of_a_lost_attempt_the_last_sign_of_life_is_shown(scene: Scene, shell: Shell) -> None:
    """Apart from when that was noticed, which is the end of the attempt."""
    with scene.ago(3600):
        worker = scene.start_worker()
        id = scene.claim(scene.enqueue(), worker)
    scene.lose_worker(worker)
    scene.recover()
    scene.attempt(id, Returned(result="1"))
    document = shell.json("job", "show", id)
    lost, succeeded = document["attempts"]
    last, noticed = (datetime.fromisoformat(lost[name]) for name in ("last_beat_at", "ended_at"))
    assert 3590 < (noticed - last).total_seconds() < 3700
    assert succeeded["last_beat_at"] is None
    assert document["damaged"] is None
    code, text = on_terminal("job", "show", id, "--database", shell.url, columns=200)
    assert code == 0
    assert "LAST SIGN" in text


def test_where_nothing_was_lost_no_last_sign_is_shown(scene: Scene, shell: Shell) -> None:
    id = scene.attempt(scene.enqueue(), Returned(result="1"))
    assert "LAST SIGN" not in on_terminal("job", "show", id, "--database", shell.url)[1]
    assert "LAST SIGN" in shell("job", "show", id).stdout


def test_a_clock_that_was_set_back_damages_nothing(scene: Scene, shell: Shell) -> None:
    """The job was enqueued and begun while the clock was an hour ahead: no duration is less than
    nothing, and nothing that has been is yet to come.
    """
    with scene.ago(-3600):
        id = scene.attempt(scene.enqueue(), RAISED)
        scene.claim(id)
    scene.settle(id, Returned(result="1"))
    document = shell.json("job", "show", id)
    assert document["damaged"] is None
    assert [attempt["took"] >= 0 for attempt in document["attempts"]] == [True, True]
    assert document["attempts"][1]["took"] == 0
    assert "damaged" not in shell("job", "show", id).stderr
    assert "damaged" not in shell("job", "list").stderr
    for words in (["job", "show", id], ["job", "list"]):
        _, text = on_terminal(*words, "--database", shell.url, columns=200, NO_COLOR="1")
        assert not re.search(r"in (1 h|59 min)", text)


def test_refused_writes_are_shown(scene: Scene, shell: Shell) -> None:
    id = scene.claim(scene.enqueue())
    refusal = store.refusal_of(
        scene.job(id).move("succeed", ended="succeeded", result="1"),  # type: ignore[arg-type]
        None,
    )
    scene.database.run(store.refuse, [refusal])
    assert shell.json("job", "show", id)["refusals"][0]["event"] == "succeed"
    assert "Refused writes" in shell("job", "show", id).stdout


@pytest.mark.parametrize("short", [8, 13, 18, 30])
def test_an_id_may_be_shortened_while_it_is_unique(scene: Scene, shell: Shell, short: int) -> None:
    id = scene.enqueue(id="0193a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")
    assert shell.json("job", "show", id[:short].upper())["id"] == id


def test_an_id_of_several_jobs_is_wrong_usage(scene: Scene, shell: Shell) -> None:
    scene.enqueue(id="0193a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b")
    scene.enqueue(id="0193a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5c")
    told = shell("job", "show", "0193a1b2", code=2).stderr
    assert "0193a1b2 is not unique" in told
    assert "0c1d2e3f4a5b" in told


@pytest.mark.parametrize(
    ("id", "code"), [("0193", 3), ("xyz", 2), ("", 2), ("%", 2), ("0" * 33, 2)]
)
def test_an_id_of_no_job(scene: Scene, shell: Shell, id: str, code: int) -> None:
    shell("job", "show", id, code=code)


def test_secrets_are_hidden_wherever_they_nest(scene: Scene, shell: Shell) -> None:
    args = {
        "user": "ana",
        "password": "hunter2",
        "deep": [{"api_key": "hunter2", "n": 1}, {"Authorization": {"x": "hunter2"}}],
    }
    id = scene.attempt(
        scene.enqueue(args=json.dumps(args)), Returned(result='{"token":"hunter2","ok":true}')
    )
    document = shell("job", "show", id, "--json").stdout
    assert "hunter2" not in document
    assert json.loads(document)["args"]["deep"][0] == {"api_key": "***", "n": 1}
    assert json.loads(document)["result"] == {"token": "***", "ok": True}
    for words in (
        ["job", "show", id],
        ["job", "list"],
        ["job", "list", "--json"],
        ["dead", "list"],
    ):
        assert "hunter2" not in shell(*words).output


# --- move -----------------------------------------------------------------------------------------


def test_cancel_says_what_became_of_each(scene: Scene, shell: Shell) -> None:
    queued, running = scene.enqueue(), scene.claim(scene.enqueue())
    assert shell("job", "cancel", queued, running).stdout == (
        f"{queued}\tcancelled\n{running}\tcancelling\n"
    )
    assert scene.job(running).state is JobState.CANCELLING


def test_cancel_of_a_job_that_is_over_is_refused_and_the_others_are_cancelled(
    scene: Scene, shell: Shell
) -> None:
    done, queued = scene.attempt(scene.enqueue(), Returned(result="1")), scene.enqueue()
    result = shell("job", "cancel", done, queued, code=6)
    assert "it is succeeded" in result.stderr
    assert result.stdout == f"{queued}\tcancelled\n"


def test_cancel_in_json(scene: Scene, shell: Shell) -> None:
    id = scene.enqueue()
    document = shell.json("job", "cancel", id)
    assert document == {
        "schema": "onward.job.cancel/1",
        "items": [{"id": id, "state": "cancelled", "error": None}],
    }


def test_requeue_opens_the_next_attempt(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    assert shell("job", "requeue", id).stdout == f"{id}\tqueued\n"
    job = scene.job(id)
    assert (job.attempt, job.failures, job.budget_from) == (2, 0, 2)


def test_requeue_of_a_living_job_is_refused(scene: Scene, shell: Shell) -> None:
    assert "it is queued" in shell("job", "requeue", scene.enqueue(), code=6).stderr
