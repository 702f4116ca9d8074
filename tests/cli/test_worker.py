"""`onward worker` and `onward demo`: what they hand on; and a worker that runs for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from onward import Onward
from onward.cli.root import root
from tests.cli.shell import Shell, in_process


class Called:
    """Stands where the supervisor is, and keeps what it was given."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> int:
        self.given = given
        return self.status


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    supervisor = Called()
    monkeypatch.setattr("onward.worker.supervisor.run", supervisor)
    return supervisor


def worker(*words: str) -> Result:
    return CliRunner().invoke(root, ["worker", "shop.jobs:app", *words])


def test_the_defaults(called: Called) -> None:
    assert worker().exit_code == 0
    assert called.given == {
        "target": "shop.jobs:app",
        "processes": 1,
        "concurrency": 10,
        "queues": None,
        "grace": None,
        "name": None,
        "database": None,
        "schema": None,
        "until_empty": False,
        "log_level": "INFO",
    }


def test_everything_is_handed_on(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_URL", "sqlite:///not-this.db")
    called.status = 7
    words = [
        "--processes",
        "4",
        "--concurrency",
        "16",
        "-q",
        "mail:4,reports",
        "-q",
        "a",
        "--grace",
        "2m",
        "--name",
        "big",
    ]
    more = ["--database", "sqlite:///x.db", "--until-empty", "--log-level", "WARNING"]
    assert worker(*words, *more).exit_code == 7
    assert called.given == {
        "target": "shop.jobs:app",
        "processes": 4,
        "concurrency": 16,
        "queues": (("mail", 4), ("reports", None), ("a", None)),
        "grace": 120.0,
        "name": "big",
        "database": "sqlite:///x.db",
        "schema": None,
        "until_empty": True,
        "log_level": "WARNING",
    }


def test_a_schema_is_handed_on_but_not_that_of_the_environment(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app, which enqueues, knows nothing of `ONWARD_SCHEMA` either."""
    assert worker("--schema", "jobs").exit_code == 0
    assert called.given["schema"] == "jobs"
    CliRunner().invoke(root, ["--schema", "jobs", "worker", "shop.jobs:app"])
    assert called.given["schema"] == "jobs"
    monkeypatch.setenv("ONWARD_SCHEMA", "others")
    assert worker().exit_code == 0
    assert called.given["schema"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("-q", ""),
        ("-q", " , "),
        ("-q", "mail:0"),
        ("-q", "mail:x"),
        ("-q", ":4"),
        ("-q", "*"),
        ("-q", "mail,mail"),
        ("-q", "mail", "-q", "mail:4"),
        ("--processes", "0"),
        ("--concurrency", "-1"),
        ("--grace", "soon"),
        ("--log-level", "loud"),
    ],
    ids=" ".join,
)
def test_wrong_usage_starts_nothing(called: Called, words: tuple[str, ...]) -> None:
    result = worker(*words)
    assert result.exit_code == 2
    assert called.given == {}


APP = """
from onward import Onward
app = Onward({url!r})

@app.task
def add(x: int, y: int) -> int:
    return x + y

if __name__ == "__main__":
    add.enqueue(1, 2)
"""


def test_a_worker_runs_what_there_is_and_ends(
    quick_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shopcli.py").write_text(APP.format(url=quick_database_url))
    monkeypatch.chdir(tmp_path)
    shell = Shell(quick_database_url)
    shell("db", "init")

    subprocess.run([sys.executable, "shopcli.py"], check=True)
    done = in_process("worker", "shopcli:app", "--until-empty")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].split()[3] == "supervisor.stopped"
    (row,) = shell.rows("job", "list")
    assert (row["state"], row["task"]) == ("succeeded", "shopcli.add")
    assert shell.json("job", "show", row["id"])["result"] == 3
    assert shell.json("workers")["items"][0]["state"] == "stopped"


def test_a_worker_serves_the_schema_that_it_is_told(
    postgres_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shopjobs.py").write_text(APP.format(url=postgres_database))
    monkeypatch.chdir(tmp_path)
    shell = Shell(postgres_database)
    shell("db", "init")
    shell("db", "init", "--schema", "jobs")
    app = Onward(postgres_database, schema="jobs")
    app.task(name="shopjobs.add")(lambda x, y: x + y).enqueue(1, 2)
    app.close()

    done = in_process("worker", "shopjobs:app", "--schema", "jobs", "--until-empty")
    assert done.returncode == 0, done.stderr
    (row,) = shell.rows("job", "list", "--schema", "jobs")
    assert row["state"] == "succeeded"


def test_an_app_on_sqlite_has_no_schema_to_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shopfile.py").write_text(APP.format(url="sqlite:///here.db"))
    monkeypatch.chdir(tmp_path)
    done = in_process("worker", "shopfile:app", "--schema", "jobs", "--until-empty")
    assert done.returncode == 2
    assert "only PostgreSQL has schemas" in done.stderr
    assert not Path("here.db").exists()


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("raise SystemExit(3)", 2, ["OW204", "cannot be imported", "SystemExit: 3"]),
        ("import os; os._exit(3)", 1, ["worker.died", "exit code 3"]),
    ],
    ids=["SystemExit", "os._exit"],
)
def test_an_app_that_ends_the_program_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, status: int, said: list[str]
) -> None:
    (tmp_path / "quitting.py").write_text(f"{line}\n")
    monkeypatch.chdir(tmp_path)
    done = in_process("worker", "quitting:app")
    assert done.returncode == status
    assert [words for words in said if words not in done.stderr] == []
    assert "supervisor.stopped" not in done.stderr


def test_an_app_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = in_process("worker", "nowhere:app")
    assert done.returncode != 0
    assert "there is no module 'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr
