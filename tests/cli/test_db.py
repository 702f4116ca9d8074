"""`onward db`: init, migrate, status, prune, compact, sql."""

from __future__ import annotations

import json
import re
import shlex
import time
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from click.testing import CliRunner

from onward.cli.root import root
from onward.lifecycle import JobState
from onward.policy import Returned
from onward.store import sqlite, store
from onward.store.database import Database
from onward.store.migrate import newest
from onward.store.statements import twins
from onward.store.url import open_database
from tests.cli.shell import Shell, on_terminal
from tests.store.builders import TASK, apply, claim, enqueue, get, hand, new_job, register, succeed
from tests.support.scene import Scene
from tests.support.workers import wait_until

# --- schema ---------------------------------------------------------------------------------------


def test_init_makes_the_tables_once(quick_database_url: str) -> None:
    shell = Shell(quick_database_url)
    assert shell("db", "init").stdout.startswith("applied 0001_jobs\n")
    assert "is up to date" in shell("db", "init").stdout
    assert shell.json("db", "init")["applied"] == []
    assert shell.json("status")["states"]["queued"] == 0


def test_init_in_a_schema_of_its_own(postgres_database: str) -> None:
    """Where it is not there, the schema is named, and the command that makes it is whole."""
    shell = Shell(postgres_database)
    told = shell("status", "--schema", "jobs", code=5).stderr
    assert "has no Onward schema named jobs\n" in told
    (command,) = re.findall(r"fix: onward (.*)", told)
    assert CliRunner().invoke(root, shlex.split(command)).exit_code == 0
    with closing(open_database(postgres_database, schema="jobs")) as database:
        assert database.schema_version() == newest(database.dialect)
    assert "has no Onward schema named onward\n" in shell("status", code=5).stderr


def test_migrate_does_not_create(quick_database_url: str) -> None:
    shell = Shell(quick_database_url)
    assert "onward db init" in shell("db", "migrate", code=5).stderr


def test_migrate_of_an_old_schema(scene: Scene, shell: Shell) -> None:
    assert "is up to date" in shell("db", "migrate").stdout
    with hand(scene.database) as dba:
        dba.sql("UPDATE onward.migration SET version = 1000")
    assert "upgrade the onward package" in shell("db", "migrate", code=5).stderr
    assert "upgrade the onward package" in shell("status", code=5).stderr


def test_a_dry_run_names_what_is_missing(
    scene: Scene, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onward.store.migrate import Migration

    later = Migration(2, "later", "SELECT 1")
    monkeypatch.setattr("onward.cli.db.missing", lambda *_: [later])
    assert shell("db", "migrate", "--dry-run").stdout == "missing 0002_later\n"


def test_status_tells_versions_settings_and_counts(scene: Scene, shell: Shell) -> None:
    scene.enqueue()
    document = shell.json("db", "status")
    assert document["schema"] == "onward.db.status/1"
    assert document["schema_version"] == document["newest_version"]
    assert document["states"]["queued"] == 1
    facts = {"sqlite": "journal_mode", "postgres": "server_version"}
    assert document[facts[scene.database.dialect]]
    assert "\nqueued\t1\n" in shell("db", "status").stdout


# --- prune ----------------------------------------------------------------------------------------


@pytest.fixture
def old(scene: Scene) -> Scene:
    """Three succeeded jobs, two cancelled, one dead, two hours old; and one that just succeeded."""
    for _ in range(3):
        scene.attempt(scene.enqueue(), Returned(result="1"))
    for _ in range(2):
        scene.ask_cancel(scene.enqueue())
    scene.dead()
    with hand(scene.database) as dba:
        ago = "7200" if dba.dialect == "sqlite" else "interval '2 hours'"
        guard = "onward_finished_is_final" if dba.dialect == "sqlite" else "finished_is_final"
        on = "" if dba.dialect == "sqlite" else " ON onward.finished"
        dba.sql(f"DROP TRIGGER {guard}{on}")
        dba.sql(f"UPDATE onward.finished SET finished_at = finished_at - {ago}")
    scene.attempt(scene.enqueue(), Returned(result="1"))
    return scene


def left(scene: Scene) -> dict[str, int]:
    counts = scene.database.read(store.counts)
    return {state: count for state, count in counts.items() if count}


def test_prune_takes_what_ended_long_ago_and_never_the_dead(old: Scene, shell: Shell) -> None:
    assert shell("db", "prune", "--keep", "1h", "--yes").stdout == "5 deleted\n"
    assert left(old) == {"succeeded": 1, "dead": 1}


def test_prune_keeps_a_week_by_default(old: Scene, shell: Shell) -> None:
    assert shell("db", "prune", "--yes").stdout == "0 deleted\n"


def test_prune_of_one_state_up_to_a_limit(old: Scene, shell: Shell) -> None:
    words = ["db", "prune", "--state", "succeeded", "--keep", "1h", "--limit", "2", "--yes"]
    document = shell.json(*words)
    assert (document["pruned"], document["prunable"]) == ({"succeeded": 2}, {"succeeded": 2})
    assert left(old) == {"succeeded": 2, "cancelled": 2, "dead": 1}


def test_prune_only_looks_or_asks(old: Scene, shell: Shell) -> None:
    before = left(old)
    assert shell("db", "prune", "--keep", "1h", "--dry-run").stdout == "5 would be deleted\n"
    assert "--yes" in shell("db", "prune", "--keep", "1h", code=2).stderr
    words = ["db", "prune", "--keep", "1h", "--database", shell.url]
    code, text = on_terminal(*words, answer="n\n")
    assert (code, left(old)) == (1, before)
    assert "3 succeeded jobs ended more than 1 h ago" in text
    code, text = on_terminal(*words, answer="y\n")
    assert code == 0
    assert left(old) == {JobState.SUCCEEDED: 1, JobState.DEAD: 1}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("3d", 259_200),
        ("1.5h", 5400),
        ("2 H", 7200),
    ],
)
def test_durations(scene: Scene, shell: Shell, text: str, seconds: float) -> None:
    assert shell.json("db", "prune", "--keep", text, "--dry-run")["keep"]["succeeded"] == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "1h30m", "nan", "inf"])
def test_what_is_no_duration(scene: Scene, shell: Shell, text: str) -> None:
    assert "is no duration" in shell("db", "prune", "--keep", text, "--dry-run", code=2).stderr


# --- compact --------------------------------------------------------------------------------------


def test_compact_gives_space_back(scene: Scene, shell: Shell) -> None:
    """On SQLite to the disk, as much as was pruned; on PostgreSQL to new rows. What it needs and
    whom it holds up is said first.
    """
    kept = enqueue(scene.database, delay=3600.0)
    flood_and_prune(scene.database)
    told = shell("db", "compact")
    before, after = (float(size) for size in re.findall(r"([\d.]+) MB", told.stdout))
    assert before > 2.0
    if scene.database.dialect == "sqlite":
        assert after < before / 2
        assert "wait until that is done" in told.stderr
    else:
        assert "workers go on" in told.stderr
        wait_until(lambda: vacuumed(scene.database) == TABLES)
    document = shell.json("db", "compact")
    assert document["schema"] == "onward.db.compact/1"
    assert 0 < document["after"] < before * 1e6
    assert get(scene.database, kept[0]).state is JobState.QUEUED


def flood_and_prune(database: Database) -> None:
    """Two megabytes of jobs come and go."""
    jobs = [new_job(args=json.dumps("x" * 1_000)) for _ in range(2_000)]
    database.run(store.enqueue, jobs)
    worker = register(database, tasks=[TASK], concurrency=2_000)
    apply(database, *(succeed(job) for job in claim(database, worker, 2_000)))
    database.run(store.prune, JobState.SUCCEEDED, -60.0, 2_000)


TABLES = {"job", "finished", "attempt", "refusal", "worker"}


def vacuumed(database: Database) -> set[str]:
    with hand(database) as dba:
        return {
            row[0]
            for row in dba.sql("SELECT relname FROM pg_stat_user_tables WHERE vacuum_count > 0")
        }


def test_compact_empties_the_log_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with closing(open_database(url)) as database:
        database.run(store.enqueue, [new_job() for _ in range(1_000)])
        (log,) = tmp_path.glob("*-wal")
        assert log.stat().st_size > 100_000
        Shell(url)("db", "compact")
        assert log.stat().st_size == 0


def test_compact_says_what_an_open_reader_keeps(tmp_path: Path) -> None:
    """The sizes are those of the files; nobody is held up for long; later the space is back."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    shell = Shell(url)
    with closing(open_database(url)) as database:
        flood_and_prune(database)
        before = on_disk(tmp_path)
        reader = apsw.Connection(str(tmp_path / "jobs.db"))
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM onward_job").fetchall()
        began = time.monotonic()
        document = shell.json("db", "compact")
        assert time.monotonic() - began < 5
        assert document["waits_for_reader"]
        assert document["after"] == on_disk(tmp_path) > before / 2
        assert "when the reader that is open now has ended" in shell("db", "compact").stderr
        reader.close()
        document = shell.json("db", "compact")
        assert not document["waits_for_reader"]
        assert document["after"] == on_disk(tmp_path) < before / 2


def on_disk(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in ("jobs.db", "jobs.db-wal"))


def test_compact_beside_a_long_transaction_is_told_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    url = f"sqlite:///{tmp_path}/jobs.db"
    shell = Shell(url)
    shell("db", "init")
    writer = apsw.Connection(str(tmp_path / "jobs.db"))
    writer.execute("BEGIN IMMEDIATE")
    told = shell("db", "compact", code=5).stderr
    assert "cannot be compacted now" in told
    assert "using(connection" not in told
    writer.close()


# --- sql ------------------------------------------------------------------------------------------


def test_a_statement_is_shown_with_its_reason_as_it_runs() -> None:
    sqlite = (
        CliRunner().invoke(root, ["--database", "sqlite:///none.db", "db", "sql", "claim"]).stdout
    )
    assert sqlite.startswith("-- queued > running for up to :limit due jobs")
    assert "UPDATE onward_job SET state = 'running'" in sqlite
    words = ["--database", "postgresql://x/y", "--schema", "jobs", "db", "sql", "claim"]
    postgres = CliRunner().invoke(root, words).stdout
    assert "UPDATE \"jobs\".job SET state = 'running'" in postgres
    assert "FOR UPDATE SKIP LOCKED" in postgres
    words = ["db", "sql", "claim", "--dialect", "postgres", "--json"]
    told = json.loads(CliRunner().invoke(root, words).stdout)
    assert "onward.claim(" in told["sql"]
    assert [text.splitlines()[0][:30] for text in told["functions"]] == [
        "CREATE FUNCTION onward.claim(c"
    ]
    assert not Path("none.db").exists()


def test_the_list_has_every_statement() -> None:
    shell = Shell("sqlite:///none.db")
    assert {row["name"] for row in shell.rows("db", "sql")} == set(twins())
    assert {item["name"] for item in shell.json("db", "sql")["items"]} == set(twins())
    assert shell.json("db", "sql", "lanes", "--dialect", "postgres")["dialect"] == "postgres"


def test_a_statement_that_is_not_there() -> None:
    told = Shell("sqlite:///none.db")("db", "sql", "clam", code=3).stderr
    assert "Did you mean 'claim'?" in told
