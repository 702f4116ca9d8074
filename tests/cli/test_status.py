"""`onward status` and `onward workers`: what one screen shows, and when it raises an alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.store import store
from tests.cli.shell import Shell, on_terminal
from tests.store.builders import hand
from tests.support.scene import Scene

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
