"""The helpers that other tests stand on: servers that stop and come back, and the ledger."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.ledger import VARIABLE, Ledger
from tests.support.postgres import PostgresUnavailable, PrivatePostgres, StopMode


def read_one(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def test_a_fresh_database_is_empty_and_gone_afterwards(postgres_url: str) -> None:
    url = postgres.create_database(postgres_url)
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    assert read_one(url, tables) == 0
    with psycopg.connect(url):  # somebody is still connected
        postgres.drop_database(postgres_url, url)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(url)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_rows_survive_a_restart_on_the_same_port(
    private_postgres: PrivatePostgres, mode: StopMode
) -> None:
    url = postgres.create_database(private_postgres.url())
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    private_postgres.stop(mode)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    private_postgres.start()
    assert read_one(url, "SELECT n FROM kept") == 7


def test_settings_hold_when_configure_returns(private_postgres: PrivatePostgres) -> None:
    private_postgres.configure(work_mem="5MB", max_connections=50)
    assert read_one(private_postgres.url(), "SHOW work_mem") == "5MB"
    private_postgres.configure(work_mem=None)
    assert read_one(private_postgres.url(), "SHOW work_mem") == "4MB"
    assert read_one(private_postgres.url(), "SHOW max_connections") == "50"


@pytest.mark.parametrize("setting", [{"wrok_mem": "5MB"}, {"work_mem": "much"}])
def test_a_wrong_setting_is_an_error_and_changes_nothing(
    private_postgres: PrivatePostgres, setting: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"w\w+_mem: "):
        private_postgres.configure(**setting)
    private_postgres.restart()


def test_a_named_server_that_does_not_answer_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.SERVER_VARIABLE, "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(PostgresUnavailable, match="did not answer"):
        postgres.find_server()


def test_the_packaged_server_starts() -> None:
    server = PrivatePostgres(postgres.packaged_programs())
    try:
        server.start()
        assert int(str(read_one(server.url(), "SHOW server_version_num"))) >= 180_000
    finally:
        server.close()
    assert not server.directory.exists()


def test_a_killed_test_run_leaves_no_server() -> None:
    program = (
        "import os, signal\n"
        "from tests.support.postgres import PrivatePostgres\n"
        "server = PrivatePostgres(); server.start(); print(server.directory, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    directory = Path(run.stdout.strip())
    assert directory.name.startswith("onward-pg-"), run.stderr
    deadline = time.monotonic() + 20
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not directory.exists()


def test_lines_of_many_processes_do_not_mix(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.read() == []
    program = (
        "from tests.support.ledger import Ledger\n"
        "for n in range(200): Ledger.at().append(n=n, text='x' * 500)\n"
    )
    env = os.environ | {VARIABLE: str(ledger.path)}
    writers = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    lines = ledger.read()
    assert {(line["pid"], line["n"]) for line in lines} == {
        (writer.pid, n) for writer in writers for n in range(200)
    }


def test_a_line_of_the_ledger_that_a_kill_has_cut_is_not_said(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.append(n=1)
    with ledger.path.open("a") as file:
        file.write('\n{"n": 2, "task": "a.b"')
    ledger.append(n=3)
    assert [line["n"] for line in ledger.read()] == [1, 3]
