"""`onward status` and `onward workers`: what one screen shows, and when it raises an alarm."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from onward import overdue
from onward.cli.root import root
from onward.policy import Returned
from onward.store import store
from tests.cli.shell import Shell, on_terminal
from tests.store.builders import hand
from tests.support.scene import FATAL, Scene

NOTHING_WRONG = 0
ALARM = 1


def alarms(shell: Shell) -> dict[str, str]:
    """The alarms that are on: code and text."""
    document = shell.json("status", code=ALARM)
    return {alarm["code"]: alarm["what"] for alarm in document["alarms"]}


def test_an_empty_system_is_quiet(scene: Scene, shell: Shell) -> None:
    document = shell.json("status")
    assert document["schema"] == "onward.status/1"
    assert document["alarms"] == []
    assert document["states"]["queued"] == 0
    assert shell.url.startswith(document["database"][:10])


def test_queues_are_counted_by_what_waits_in_them(scene: Scene, shell: Shell) -> None:
    scene.enqueue()
    scene.enqueue(delay=3600.0)
    scene.claim(scene.enqueue())
    scene.dead()
    (queue,) = shell.json("status")["queues"]
    assert 0 <= queue.pop("oldest") < 60
    assert queue == {
        "queue": "default",
        "due": 1,
        "later": 1,
        "waiting": 0,
        "running": 1,
        "dead": 1,
        "workers": 1,
        "slots": 10,
    }


def test_a_pipe_gets_lines_with_tabs(scene: Scene, shell: Shell) -> None:
    scene.enqueue()
    text = shell("status").stdout
    assert "\nqueued\t1\t0\n" in text
    assert "\ndefault\t1\t" in text
    assert "\x1b" not in text


# --- alarms ---------------------------------------------------------------------------------------


def test_jobs_in_a_queue_that_nobody_serves(scene: Scene, shell: Shell) -> None:
    scene.start_worker(queues=("emails",))
    scene.enqueue(queue="email")
    found = alarms(shell)
    assert found["queue_unserved"].startswith("email: 1 waiting, 0 workers")
    assert "did you mean emails?" in found["queue_unserved"]


def test_a_queue_without_due_jobs_needs_nobody(scene: Scene, shell: Shell) -> None:
    scene.enqueue(queue="email", delay=3600.0)
    shell("status", code=NOTHING_WRONG)


@pytest.mark.parametrize("end", ["stop", "drain", "lose", "silence"])
def test_a_worker_that_claims_no_more_serves_no_queue(scene: Scene, shell: Shell, end: str) -> None:
    if end == "silence":
        scene.start_worker(queues=("reports",), lease=-5.0)
    else:
        worker = scene.start_worker(queues=("reports",))
        args = () if end == "drain" else ("because",)
        assert scene.database.run(getattr(store, end), worker, *args)
    scene.enqueue(queue="reports")
    assert alarms(shell)["queue_unserved"].startswith("reports: 1 waiting, 0 workers")


def test_a_task_that_no_worker_of_its_queue_knows(scene: Scene, shell: Shell) -> None:
    scene.start_worker(queues=("other",), tasks=("shop.mial",))
    scene.enqueue(task="shop.mial")
    found = alarms(shell)
    assert found["task_unknown"].startswith("shop.mial: 1 waiting in default")
    assert "did you mean shop.mail?" in found["task_unknown"]


def test_the_fix_for_an_unknown_task_is_a_command_that_drops_its_jobs(
    scene: Scene, shell: Shell
) -> None:
    scene.start_worker(queues=("other",), tasks=("it's gone",))
    scene.enqueue(task="it's gone")
    kept = scene.enqueue(task="it's gone", queue="other")
    (alarm,) = shell.json("status", code=ALARM)["alarms"]
    command = alarm["fix"].partition("cancel the jobs: onward ")[2]
    assert shell(*shlex.split(command), "--yes").stdout == "1 cancelled\n"
    shell("status", code=NOTHING_WRONG)
    assert scene.job(kept).state == "queued"


# --- due jobs that nobody starts ------------------------------------------------------------------


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Makes the watch over a suspicion as short as two looks; what is in the list happens between
    them.
    """
    deeds: list[Callable[[], Any]] = []

    def pause(seconds: float) -> None:
        assert 0 < seconds < overdue.WATCH
        moments.append(overdue.WATCH)
        for deed in deeds:
            deed()

    moments = [0.0]
    monkeypatch.setattr(overdue, "sleep", pause)
    monkeypatch.setattr(overdue, "monotonic", lambda: sum(moments))
    return deeds


@pytest.fixture
def idle(scene: Scene, watching: list[Callable[[], Any]]) -> str:
    """A worker of the queue `mail` with two slots, which has been there for a minute."""
    with scene.ago(60):
        return scene.start_worker(name="web-2", queues=("mail",), concurrency=2)


def overdue_in(shell: Shell) -> dict[str, str]:
    """What is said of queues whose due jobs nobody starts."""
    document = json.loads(CliRunner().invoke(root, ["--database", shell.url, *STATUS]).stdout)
    found = document["alarms"]
    return {alarm["subject"]: alarm["what"] for alarm in found if alarm["code"] == "overdue"}


STATUS = ["status", "--json"]


def test_due_jobs_that_nobody_starts_although_slots_are_free(
    scene: Scene, shell: Shell, idle: str
) -> None:
    with scene.ago(30):
        scene.enqueue(queue="mail")
    said = r"mail: 1 due for \d\d s, 2 slots free \(web-2\)"
    assert re.fullmatch(said, alarms(shell)["overdue"])
    for words in ("status", "doctor"):
        text = shell(words, code=ALARM).stdout
        assert re.search(said, text)
        assert "claim.waits" in text


def test_jobs_of_all_tasks_and_slots_of_all_workers_count_once(
    scene: Scene, shell: Shell, idle: str
) -> None:
    with scene.ago(60):
        scene.start_worker(name="web-3", queues=("mail",), tasks=("shop.mail", "shop.bill"))
    with scene.ago(30):
        for task in ("shop.mail", "shop.mail", "shop.bill"):
            scene.enqueue(task=task, queue="mail")
    scene.enqueue(queue="mail")
    assert re.fullmatch(
        r"mail: 4 due for \d\d s, 12 slots free \(web-2, web-3\)", overdue_in(shell)["mail"]
    )


def test_jobs_that_are_due_since_a_moment_are_no_alarm(
    scene: Scene, shell: Shell, idle: str
) -> None:
    with scene.ago(10):
        scene.enqueue(queue="mail")
    with scene.ago(500):
        scene.enqueue(queue="mail", delay=495.0)
        scene.enqueue(queue="mail", delay=5_000.0)
    shell("status", code=NOTHING_WRONG)


def test_a_worker_without_a_free_slot_is_only_busy(scene: Scene, shell: Shell, idle: str) -> None:
    with scene.ago(30):
        for _ in range(3):
            scene.enqueue(queue="mail")
        for _ in range(2):
            scene.claim(scene.enqueue(queue="other"), idle)
    shell("status", code=NOTHING_WRONG)


def test_a_worker_that_runs_others_of_the_queue_may_be_at_its_limit(
    scene: Scene, shell: Shell, idle: str
) -> None:
    """`-q mail:1` is known to the worker alone."""
    with scene.ago(30):
        scene.enqueue(queue="mail")
        scene.claim(scene.enqueue(queue="mail"), idle)
    shell("status", code=NOTHING_WRONG)


def test_a_worker_that_has_just_come_has_its_time(
    scene: Scene, shell: Shell, watching: list[Callable[[], Any]]
) -> None:
    with scene.ago(600):
        scene.enqueue()
    with scene.ago(10):
        scene.start_worker()
    shell("status", code=NOTHING_WRONG)


def test_jobs_that_no_worker_may_take_have_alarms_of_their_own(
    scene: Scene, shell: Shell, idle: str
) -> None:
    with scene.ago(30):
        scene.enqueue(queue="nobody")
        scene.enqueue(queue="mail", task="unknown")
    assert set(alarms(shell)) == {"queue_unserved", "task_unknown"}


@pytest.mark.parametrize("end", ["drain", "stop", "silence"])
def test_a_worker_that_takes_no_more_leaves_nothing_lying(
    scene: Scene, shell: Shell, watching: list[Callable[[], Any]], end: str
) -> None:
    with scene.ago(60):
        worker = scene.start_worker(queues=("mail",), lease=30.0 if end == "silence" else 3600.0)
    if end != "silence":
        assert scene.database.run(getattr(store, end), worker, *([] if end == "drain" else ["x"]))
    with scene.ago(30):
        scene.enqueue(queue="mail")
    assert overdue_in(shell) == {}


def test_a_worker_that_claims_after_all_is_no_alarm(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    """It had a slot free for a moment: one look cannot tell, so it is watched."""
    with scene.ago(30):
        first, _ = scene.enqueue(queue="mail"), scene.enqueue(queue="mail")
    watching.append(lambda: scene.claim(first, idle))
    assert overdue_in(shell) == {}


def test_a_worker_that_starts_others_meanwhile_is_no_alarm(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    """A slot is free in each look, and yet it claims: jobs of a higher priority."""
    with scene.ago(30):
        scene.enqueue(queue="mail")
    other = scene.enqueue(queue="other")
    watching.append(lambda: scene.claim(other, idle))
    assert overdue_in(shell) == {}


def test_a_worker_that_starts_and_ends_others_meanwhile_is_no_alarm(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    """Jobs so short that nobody ever sees one run."""
    with scene.ago(30):
        scene.enqueue(queue="mail")
    short = scene.enqueue(queue="other")
    watching.append(lambda: scene.settle(scene.claim(short, idle), Returned(result="1")))
    assert overdue_in(shell) == {}


def test_jobs_that_get_fewer_are_no_alarm(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    """Somebody begins them."""
    with scene.ago(30):
        first, _ = scene.enqueue(queue="mail"), scene.enqueue(queue="mail")
    watching.append(lambda: scene.attempt(first, FATAL))
    assert overdue_in(shell) == {}


def test_jobs_that_get_more_are_an_alarm_all_the_same(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    with scene.ago(30):
        scene.enqueue(queue="mail")
    watching.append(lambda: scene.enqueue(queue="mail"))
    assert overdue_in(shell)["mail"].startswith("mail: 2 due for ")


def test_nothing_is_watched_where_nothing_is_overdue(
    scene: Scene, shell: Shell, idle: str, watching: list[Callable[[], Any]]
) -> None:
    watching.append(lambda: pytest.fail("a healthy system is told at once"))
    scene.enqueue(queue="mail")
    shell("status", code=NOTHING_WRONG)


# --- limbo, and workers that are gone -------------------------------------------------------------


def test_jobs_in_limbo(scene: Scene, shell: Shell) -> None:
    id = scene.claim(scene.enqueue(), scene.start_worker(lease=-60.0))
    found = alarms(shell)
    assert found["limbo"] == (
        "1 job is in limbo, the first: running under a worker whose lease is over"
    )
    assert "its lease was over 60 s ago" in found["worker_lost"]
    document = shell.json("status", code=ALARM)
    assert document["limbo"] == 1
    assert document["alarms"][0]["subject"] == id


def test_a_worker_that_was_lost_a_moment_ago(scene: Scene, shell: Shell) -> None:
    scene.lose_worker(scene.start_worker(name="web-2"))
    assert alarms(shell)["worker_lost"].startswith("worker web-2 was lost 0 s ago: its process")


def test_a_loss_is_never_ahead_of_the_clock(scene: Scene, shell: Shell) -> None:
    """That was set back meanwhile."""
    with scene.ago(-3600):
        scene.lose_worker(scene.start_worker(name="web-2"))
    assert alarms(shell)["worker_lost"].startswith("worker web-2 was lost 0 s ago: its process")


def test_a_worker_that_was_lost_long_ago_is_no_news(scene: Scene, shell: Shell) -> None:
    worker = scene.start_worker()
    scene.lose_worker(worker)
    with hand(scene.database) as dba:
        ago = "ended_at - 3600" if dba.dialect == "sqlite" else "ended_at - interval '1 hour'"
        dba.sql(f"UPDATE onward.worker SET ended_at = {ago} WHERE id = :id", id=worker)
    shell("status", code=NOTHING_WRONG)


# --- on a terminal --------------------------------------------------------------------------------


def test_the_screen_has_columns_and_colours(scene: Scene, shell: Shell) -> None:
    scene.everything()
    scene.enqueue(queue="email")
    code, text = on_terminal("status", "--database", shell.url)
    assert code == ALARM
    assert "\x1b[" in text
    assert "1 worker, 10 slots" in text
    assert "email: 1 waiting, 0 workers" in text
    assert max(len(line) for line in text.splitlines() if "default" in line) < 200


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "TERM=dumb"]
)
def test_without_colour_no_escape_is_sent(
    scene: Scene, shell: Shell, environment: dict[str, str]
) -> None:
    scene.everything()
    for words in (["status"], ["job", "list"]):
        _, text = on_terminal(*words, "--database", shell.url, **environment)
        assert "\x1b" not in text


def test_a_narrow_screen_cuts_lines_instead_of_wrapping(scene: Scene, shell: Shell) -> None:
    scene.enqueue(task="shop." + "x" * 150)
    environment = {"NO_COLOR": "1"}
    _, text = on_terminal("job", "list", "--database", shell.url, columns=90, **environment)
    assert len(text.splitlines()) == 2
    assert all(len(line) <= 90 for line in text.splitlines())
    assert "…" in text


def test_without_rich_a_terminal_gets_plain_lines(
    scene: Scene, shell: Shell, tmp_path: Path
) -> None:
    id = scene.enqueue()
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['rich'] = None\n")
    _, text = on_terminal("job", "list", "--database", shell.url, PYTHONPATH=str(tmp_path))
    assert f"{id}\tqueued\t" in text
    assert "\x1b" not in text


# --- workers --------------------------------------------------------------------------------------


def test_workers_are_listed_with_how_they_are(scene: Scene, shell: Shell) -> None:
    scene.claim(scene.enqueue())
    silent = scene.start_worker(name="web-2", lease=-60.0)
    lost = scene.start_worker(name="web-3")
    scene.lose_worker(lost)
    items = {item["id"]: item for item in shell.json("workers")["items"]}
    assert set(items) == {scene.worker, silent, lost}
    assert items[scene.worker]["running"] == 1
    assert [items[id]["alive"] for id in (scene.worker, silent, lost)] == [True, False, False]
    assert items[silent]["note"] == "its lease is over: it will be declared lost"
    assert items[lost]["reason"] == "its process was killed by signal 9"


def test_workers_that_ended_long_ago_are_listed_on_demand(scene: Scene, shell: Shell) -> None:
    old = scene.start_worker()
    scene.lose_worker(old)
    with hand(scene.database) as dba:
        ago = "ended_at - 7200" if dba.dialect == "sqlite" else "ended_at - interval '2 hours'"
        dba.sql(f"UPDATE onward.worker SET ended_at = {ago} WHERE id = :id", id=old)
    assert old not in shell("workers").output
    assert old in shell("workers", "--all").output


def test_of_a_lost_worker_the_last_sign_of_life_is_told(scene: Scene, shell: Shell) -> None:
    """Apart from when that was noticed."""
    with scene.ago(3600):
        lost, stopped = scene.start_worker(), scene.start_worker()
    scene.lose_worker(lost)
    assert scene.database.run(store.stop, stopped, "told to stop")
    items = {item["id"]: item for item in shell.json("workers", "--all")["items"]}
    last, noticed = (
        datetime.fromisoformat(items[lost][name]) for name in ("last_beat_at", "ended_at")
    )
    assert 3590 < (noticed - last).total_seconds() < 3700
    assert items[lost]["note"] == (
        "its process was killed by signal 9; last sign of life 1 h before that was noticed"
    )
    assert items[stopped]["note"] == "told to stop"
    assert items[scene.worker]["last_beat_at"]
