"""`onward doctor`: what it examines, and that each fault is found."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest

from onward.cli import examination
from onward.invariants import CHECKS
from onward.store.url import open_database
from tests.cli.shell import Shell
from tests.store.builders import hand
from tests.support.scene import Scene
from tests.test_invariants import unguard


def findings(shell: Shell, code: int) -> dict[str, dict[str, Any]]:
    document = shell.json("doctor", code=code)
    assert document["schema"] == "onward.doctor/1"
    return {finding["code"]: finding for finding in document["findings"]}


@pytest.fixture(autouse=True)
def durable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server for tests may run without fsync; that has a test of its own."""
    monkeypatch.setattr(examination, "_fsync", lambda _: examination._sound("fsync", "on"))


def test_a_healthy_system_is_sound(scene: Scene, shell: Shell) -> None:
    scene.enqueue()
    found = findings(shell, 0)
    assert {finding["level"] for finding in found.values()} <= {"ok", "note"}
    rules = {check.statement.removeprefix("check_") for check in CHECKS}
    assert rules <= set(found)
    assert {"versions", "database", "schema", "workers", "queues"} <= set(found)
    text = shell("doctor").stdout
    assert text.splitlines()[0].startswith("✓ versions")
    assert text.splitlines()[-1].endswith(" 0 bad")


def test_a_broken_rule_is_told_with_its_rows(scene: Scene, shell: Shell) -> None:
    id = scene.claim(scene.enqueue())
    with hand(scene.database) as dba:
        unguard(dba)
        dba.sql("UPDATE onward.job SET worker = NULL WHERE id = :id", id=id)
    found = findings(shell, 1)
    assert found["live_columns"]["level"] == "bad"
    assert found["live_columns"]["rows"] == [
        f"{id}  running without a worker, with a start, without an end,"
        " at attempt 1, budgets from 1"
    ]
    assert found["guards"]["level"] == "bad"
    text = shell("doctor", code=1).stdout
    assert "✗ M4 columns of live jobs" in text
    assert "    fix: rows were changed past Onward's guards" in text


def test_jobs_that_nobody_can_run_are_bad(scene: Scene, shell: Shell) -> None:
    scene.enqueue(queue="email")
    scene.enqueue(task="shop.mial")
    found = findings(shell, 1)
    assert found["queue_unserved"]["level"] == "bad"
    assert found["task_unknown"]["level"] == "bad"


def test_dead_jobs_and_lost_workers_are_worth_a_look(scene: Scene, shell: Shell) -> None:
    scene.dead()
    scene.lose_worker(scene.start_worker())
    found = findings(shell, 0)
    assert found["dead"]["what"] == "1 wait for a human"
    assert found["worker_lost"]["level"] == "note"


def test_workers_of_another_version_are_worth_a_look(scene: Scene, shell: Shell) -> None:
    scene.start_worker(version="0.0.1")
    assert "0.0.1" in findings(shell, 0)["mixed_versions"]["what"]


def test_a_file_that_others_may_read_is_worth_a_look(tmp_path: Any) -> None:
    shell = Shell(f"sqlite:///{tmp_path}/onward.db")
    shell("db", "init")
    assert findings(shell, 0)["file"]["level"] == "ok"
    os.chmod(tmp_path / "onward.db", 0o644)
    found = findings(shell, 0)["file"]
    assert (found["level"], found["fix"]) == ("note", f"chmod 600 {tmp_path}/onward.db")


def test_less_than_full_durability_is_worth_a_look(tmp_path: Any) -> None:
    shell = Shell(f"sqlite:///{tmp_path}/onward.db?synchronous=normal")
    shell("db", "init")
    assert findings(shell, 0)["synchronous"]["what"] == "NORMAL, not EXTRA or FULL"


@pytest.mark.parametrize(
    ("version", "level"),
    [("3.40.1", "bad"), ("3.51.2", "bad"), ("3.51.3", "ok"), ("3.54.1", "ok"), ("4.0", "ok")],
)
def test_the_age_of_the_sqlite_library(version: str, level: str) -> None:
    assert examination._library(version, "sqlite3").level == level


def test_a_server_without_fsync_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [examination._fsync(value).level for value in ("on", "off")] == ["ok", "bad"]


def test_a_server_that_commits_later_is_worth_a_look() -> None:
    levels = [examination._synchronous_commit(value).level for value in ("on", "local", "off")]
    assert levels == ["ok", "note", "note"]


def test_an_old_server_is_worth_a_look() -> None:
    facts = {"server_version": "13.4", "fsync": "on", "synchronous_commit": "on"}
    assert next(iter(examination._postgres(facts))).level == "note"


def test_clocks_that_differ_are_worth_a_look(postgres_database: str) -> None:
    with closing(open_database(postgres_database)) as database:
        database.migrate()
        with hand(database) as dba:
            dba.sql(
                "CREATE OR REPLACE FUNCTION onward.clock() RETURNS timestamptz LANGUAGE sql STABLE"
                " AS $$ SELECT now() + interval '1 hour' $$"
            )
    found = findings(Shell(postgres_database), 0)["clock"]
    assert found["level"] == "note"
    assert found["what"] == "this machine is 1 h behind the database" or "59 min" in found["what"]


def test_a_database_that_does_not_answer_ends_the_examination() -> None:
    shell = Shell("postgresql://ana:hunter2@127.0.0.1:1/shop")
    found = findings(shell, 5)
    assert found["database"]["level"] == "bad"
    assert list(found) == ["versions", "database"]
