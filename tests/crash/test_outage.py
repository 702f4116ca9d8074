"""PostgreSQL goes away, comes back, loses connections, runs out of them, and answers with errors:
jobs that run go on, what they come to is written when it can be, and nothing stays deaf.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Literal
from urllib.parse import urlsplit

import psycopg
import pytest

from onward.store import postgres_link, store
from onward.store.postgres_link import ASK_SECONDS, MOST_CONNECTIONS
from onward.store.url import open_database
from tests.crash import listening
from tests.crash.conftest import Open
from tests.crash.field import BUSY, enqueue, live, wait_for_state, wait_until_begun, wait_until_over
from tests.crash.wire import Wire
from tests.support import history, postgres, tasks
from tests.support.launch import Launched
from tests.support.ledger import Ledger
from tests.support.postgres import PrivatePostgres
from tests.support.workers import ROOT, TARGET, alive, opened, running, wait_until


@pytest.fixture
def url(private_postgres: PrivatePostgres) -> Iterator[str]:
    """A fresh database on a server that may be treated roughly."""
    private_postgres.start()
    found = postgres.create_database(private_postgres.url())
    yield found
    private_postgres.start()
    postgres.drop_database(private_postgres.url(), found)


@pytest.fixture
def database_url(url: str) -> str:
    """Where `open_app` opens the app."""
    return url


def terminate_backends(url: str, which: str = "true") -> int:
    """End the sessions on this database, but for our own; returns how many there were."""
    with psycopg.connect(url, autocommit=True) as connection:
        return len(
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                f" current_database() AND pid <> pg_backend_pid() AND {which}".encode()
            ).fetchall()
        )


def rss(pid: int) -> int:
    """The resident memory of a process, in bytes."""
    text = Path(f"/proc/{pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_of_the_server_costs_nothing(
    private_postgres: PrivatePostgres,
    url: str,
    open_app: Open,
    ledger: Ledger,
    mode: Literal["fast", "immediate"],
) -> None:
    """The server stops, is away for a while, and starts again. Jobs go on meanwhile, and end
    meanwhile; what they came to is written afterwards, and new ones start. Nobody was restarted.
    """
    app = open_app(lease=12.0, beat=1.0)
    with running(url, processes=2, concurrency=8, ledger=ledger) as worker:
        pids = worker.pids()
        ids = enqueue(app, (tasks.nap.call(seconds) for seconds in (1.0, 1.5, 2.0, 4.0)))
        ids += enqueue(app, (tasks.block.call(seconds) for seconds in (1.5, 4.0)))
        wait_until_begun(app, ids)
        private_postgres.stop(mode)
        wait_until(lambda: len(ledger.read()) >= 10, 20, what="four ends while it is away")
        private_postgres.start()
        began = time.monotonic()
        ids += enqueue(app, [tasks.echo.call("after")])
        wait_for_state(app, ids[-1], "succeeded")
        assert time.monotonic() - began < 5.0 + BUSY
        wait_until_over(app)
        assert worker.pids() == pids
        assert "Traceback" not in worker.log()
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
    assert len(found.bodies) == len(ids)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(4.0, id="scaled"),
        pytest.param(600.0, id="as written", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_an_outage_does_not_fill_the_memory(
    private_postgres: PrivatePostgres,
    url: str,
    open_app: Open,
    ledger: Ledger,
    seconds: float,
) -> None:
    """Every stage tries again and again while the server is away, longer than a lease: what they
    hold does not grow, and when it is back they work as before.
    """
    app = open_app(lease=3.0, beat=0.5, sweep=0.2, poll=0.05)
    with running(url, ledger=ledger) as worker:
        (first,) = enqueue(app, [tasks.echo.call(1)])
        wait_for_state(app, first, "succeeded")
        supervisor = rss(worker.supervisor_pid)
        private_postgres.stop()
        time.sleep(seconds)
        assert rss(worker.supervisor_pid) - supervisor < 20_000_000
        private_postgres.start()
        (second,) = enqueue(app, [tasks.echo.call(2)])
        wait_for_state(app, second, "succeeded", 20)
        assert worker.running
        assert len(worker.log().splitlines()) < 30 + seconds / 6, "the log is flooded"
        assert "Traceback" not in worker.log()
    history.check(app.database, ledger, [first, second])


# --- connections ----------------------------------------------------------------------------------


def test_sessions_that_end_every_second_cost_no_lease(
    url: str, open_app: Open, ledger: Ledger
) -> None:
    """All sessions of a worker and its supervisor are ended again and again, for several leases:
    the lease belongs to no session, and the job runs once.
    """
    app = open_app(lease=2.0, beat=0.5, sweep=0.3)
    with running(url, processes=2, ledger=ledger) as worker:
        (id_,) = enqueue(app, [tasks.nap.call(6.0)])
        wait_until(ledger.read)
        ended = 0
        while app.get(id_).state == "running":
            ended += terminate_backends(url)
            time.sleep(0.7)
        wait_for_state(app, id_, "succeeded")
        assert ended >= 10, "too tame"
        assert "Traceback" not in worker.log()
    found = history.check(app.database, ledger, [id_])
    assert history.outcomes(found, id_) == ["succeeded"]
    assert len(found.bodies) == 1


def test_the_listening_session_is_opened_anew(url: str, open_app: Open, ledger: Ledger) -> None:
    """The session that listens for enqueues is ended three times in a row. Jobs start within the
    poll and a second each time; and in the end it listens again, so they start at once.
    """
    app = open_app(poll=8.0)
    with running(url, ledger=ledger):
        ids: list[str] = []
        for _ in range(3):
            wait_until(lambda: terminate_backends(url, "query LIKE 'LISTEN%'"), 10, what="listener")
            began = time.monotonic()
            ids += enqueue(app, [tasks.echo.call(1)])
            wait_for_state(app, ids[-1], "succeeded")
            assert time.monotonic() - began < 8.0 + 1.0
        time.sleep(2.0)
        began = time.monotonic()
        ids += enqueue(app, [tasks.echo.call(1)])
        wait_for_state(app, ids[-1], "succeeded")
        assert time.monotonic() - began < BUSY
    history.check(app.database, ledger, ids)


def test_connections_cut_at_random_leave_nothing_deaf(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """All connections are cut twenty times, and now and then none can be made: afterwards ten jobs
    start within 5 s, and none of those that ran has run twice.
    """
    chance = random.Random(20)
    with Wire(private_postgres.port) as wire:
        app = open_app(lease=6.0, beat=1.0)
        with running(
            url, processes=2, ledger=ledger, environment={"ONWARD_URL": wire.url(url)}
        ) as worker:
            ids: list[str] = []
            for number in range(20):
                ids += enqueue(app, (tasks.nap.call(chance.uniform(0, 1)) for _ in range(3)))
                time.sleep(chance.uniform(0.0, 0.3))
                wire.refuses = number % 4 == 0
                wire.cut()
                time.sleep(chance.uniform(0.0, 0.2))
                wire.refuses = False
            began = time.monotonic()
            last = enqueue(app, (tasks.echo.call(number) for number in range(10)))
            for id_ in last:
                wait_for_state(app, id_, "succeeded")
            assert time.monotonic() - began < 5.0 + BUSY
            wait_until_over(app)
            assert "Traceback" not in worker.log()
        found = history.check(app.database, ledger, [*ids, *last])
        assert {tuple(history.outcomes(found, id_)) for id_ in found.jobs} == {("succeeded",)}
        assert len(found.bodies) == len(found.jobs)


@pytest.mark.parametrize("silently", [False, True], ids=["by a reset", "silently"])
def test_idle_connections_that_are_cut_delay_nobody(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger, silently: bool
) -> None:
    """Something in between drops connections that were idle for a second, with a reset or without a
    word. A worker that polls less often than that starts each job within the poll and 3 s.
    """
    with Wire(private_postgres.port, idle_limit=1.0, silently=silently) as wire:
        app = open_app(lease=12.0, beat=3.0, sweep=2.0, poll=2.0)
        with running(url, ledger=ledger, environment={"ONWARD_URL": wire.url(url)}) as worker:
            ids: list[str] = []
            for _ in range(2):
                time.sleep(2.5)
                began = time.monotonic()
                ids += enqueue(app, [tasks.echo.call(1)])
                wait_for_state(app, ids[-1], "succeeded", 30)
                assert time.monotonic() - began < 2.0 + 3.0 + BUSY
            assert {line.state for line in worker.workers()} == {"active"}
            assert "Traceback" not in worker.log()
            assert wire.cuts >= 2, "too tame"
        found = history.check(app.database, ledger, ids)
        assert len(found.bodies) == 2


def test_a_wire_that_leads_nowhere_is_left(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """Every connection freezes, with nothing closed, for a moment in the middle of its work. Lease
    and jobs get over it on new ones.
    """
    with Wire(private_postgres.port) as wire:
        app = open_app(lease=20.0, beat=1.0, poll=0.2)
        with running(url, ledger=ledger, environment={"ONWARD_URL": wire.url(url)}):
            (id_,) = enqueue(app, [tasks.nap.call(2.0)])
            wait_until(ledger.read)
            wire.frozen = True
            time.sleep(3.0)
            wire.cut()
            wire.frozen = False
            wait_for_state(app, id_, "succeeded", 15)
            (after,) = enqueue(app, [tasks.echo.call(1)])
            wait_for_state(app, after, "succeeded", 5)
        found = history.check(app.database, ledger, [id_, after])
        assert history.outcomes(found, id_) == ["succeeded"]
        assert len(found.bodies) == 2


def test_a_listener_on_a_dead_wire_listens_again(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """The wire of the session that listens swallows everything and says nothing, twice. It is left
    when a question has had no answer, and then a job starts at once, long before the poll.
    """
    with Wire(private_postgres.port) as wire:
        app = open_app(poll=60.0)
        over = {listening.URL: wire.url(url)}
        target = "tests.crash.listening:app"
        with running(url, ledger=ledger, environment=over, target=target) as worker:
            ids: list[str] = []
            for _ in range(2):
                wait_until(lambda: wire.hears, what="a listener")
                wire.deafen()
                began = time.monotonic()
                wait_until(lambda: wire.hears, 30, what="another")
                assert time.monotonic() - began < listening.PING + ASK_SECONDS + 0.5 + BUSY
                began = time.monotonic()
                ids += enqueue(app, [tasks.echo.call(1)])
                wait_for_state(app, ids[-1], "succeeded", 30)
                assert time.monotonic() - began < 1.0 + BUSY
            assert "Traceback" not in worker.log()
        history.check(app.database, ledger, ids)


def test_a_beat_on_a_dead_wire_costs_no_lease(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """In the middle of a beat all connections of a supervisor and its worker go silent. The lease
    is renewed over others before it ends, and the jobs that run go on.
    """
    with Wire(private_postgres.port) as wire:
        app = open_app(lease=9.0, beat=3.0, sweep=0.3)
        with (
            running(url, name="A", ledger=ledger, environment={"ONWARD_URL": wire.url(url)}) as one,
            running(url, name="B", ledger=ledger),
        ):
            ids = enqueue(app, (tasks.nap.call(20.0) for _ in range(8)))
            wait_until_begun(app, ids)
            pids = one.pids()
            with held_beat(url, "A"):
                assert wire.deafen() >= 2, "too tame"
            wait_until(lambda: "beat.missed" in one.log())
            wait_until_over(app, 60)
            assert one.pids() == pids
            assert {line.state for line in one.workers()} == {"active"}
        found = history.check(app.database, ledger, ids)
        assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
        assert len(found.bodies) == len(ids)


def test_idle_connections_on_a_dead_wire_cost_one_question(
    private_postgres: PrivatePostgres, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the one that was used last does not answer, those that were idle for longer are not
    asked one after another.
    """
    monkeypatch.setattr(postgres_link, "FRESH_SECONDS", 0.0)

    async def main() -> float:
        await asyncio.gather(*(database.aread(store.now) for _ in range(MOST_CONNECTIONS)))
        assert wire.deafen() >= 6, "too tame"
        began = time.monotonic()
        await database.aread(store.now)
        took = time.monotonic() - began
        await database.aclose()
        return took

    with Wire(private_postgres.port) as wire, closing(open_database(wire.url(url))) as database:
        database.migrate()
        assert asyncio.run(main()) < ASK_SECONDS + BUSY


@contextmanager
def held_beat(url: str, name: str) -> Iterator[None]:
    """A renewal of this worker's lease waits for a lock until the block ends."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1 FROM onward.worker WHERE name = %s FOR UPDATE", [name])
        waits = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock' AND query LIKE 'UPDATE onward.worker%SET lease_until%'"
        )
        wait_until(lambda: connection.execute(waits).fetchone() != (0,), what="a beat")
        yield


@pytest.mark.soak
def test_a_worker_that_is_cut_off_stops_before_others_take_over(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """A supervisor cannot reach the server while the loop of its worker is blocked, so that nothing
    in there can notice. The supervisor ends it; others run the job.
    """
    with Wire(private_postgres.port) as wire:
        app = open_app(lease=2.0, beat=0.5, sweep=0.3)
        with (
            running(url, name="A", ledger=ledger, environment={"ONWARD_URL": wire.url(url)}),
            ExitStack() as later,
        ):
            (id_,) = enqueue(app, [tasks.block_loop_once.call(60)])
            wait_until(ledger.read)
            victim = ledger.read()[0]["pid"]
            later.enter_context(running(url, name="B", ledger=ledger))
            wire.refuses = True
            wire.cut()
            wait_for_state(app, id_, "succeeded", 15)
            wait_until(lambda: not alive(victim), 15, what="its end")
        found = history.check(app.database, ledger, [id_])
        assert history.outcomes(found, id_) == ["lost (lost)", "succeeded"]


def test_a_server_without_free_connections_is_waited_for(
    private_postgres: PrivatePostgres, ledger: Ledger, tmp_path: Path
) -> None:
    """Workers start while the server refuses connections: none ends, and none pretends to run. When
    there is room they register and work, with no more connections than they are said to need.
    """
    private_postgres.configure(max_connections=24)
    url = postgres.create_database(private_postgres.url())
    app = opened(url, lease=12.0, beat=1.0)
    ids = enqueue(app, (tasks.nap.call(0.5) for _ in range(20)))
    app.close()
    with ExitStack() as stack:
        with hogged(url):
            workers = [
                stack.enter_context(unready(url, number, ledger, tmp_path / f"log {number}"))
                for number in range(3)
            ]
            time.sleep(3.0)
            assert [worker.poll() for worker in workers] == [None] * 3
            assert ledger.read() == []
        wait_until_over(app)
        assert [worker.poll() for worker in workers] == [None] * 3
    found = history.check(app.database, ledger, ids)
    assert len(found.bodies) == 20
    app.close()
    postgres.drop_database(private_postgres.url(), url)
    private_postgres.configure(max_connections=None)


def test_a_worker_takes_no_more_connections_than_it_is_said_to(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """Counted at each process while it is busy, with bodies that enqueue from many threads. The
    numbers are those of the page for who operates it.
    """
    page = (ROOT / "docs/operating.md").read_text("utf-8")
    said = re.search(r"worker process takes at most (\d+) connections[^.]* supervisor (\d+)", page)
    assert said
    of_worker, of_supervisor = int(said[1]), int(said[2])
    assert (of_worker, of_supervisor) == (2 * MOST_CONNECTIONS + 1, MOST_CONNECTIONS)
    app = open_app()
    with running(url, processes=2, concurrency=30, ledger=ledger) as worker:
        seen: dict[int, int] = {worker.supervisor_pid: 0} | dict.fromkeys(worker.pids(), 0)
        ids = enqueue(app, (tasks.spread.call(20) for _ in range(100)))
        while live(app):
            for pid in seen:
                seen[pid] = max(seen[pid], connections(pid, private_postgres.port))
        wait_until_over(app, 60)
        supervisor = seen.pop(worker.supervisor_pid)
    assert 1 <= supervisor <= of_supervisor
    assert min(seen.values()) >= 3
    assert max(seen.values()) <= of_worker
    assert app.counts()["succeeded"] == len(ids) * 21


def connections(pid: int, port: int) -> int:
    """How many connections to this port a process has, as the system tells it."""
    ours: set[str] = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[2].endswith(f":{port:04X}") and words[3] == ESTABLISHED:
            ours.add(f"socket:[{words[9]}]")
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(entry.readlink()) in ours
    return found


ESTABLISHED = "01"


@contextmanager
def unready(url: str, number: int, ledger: Ledger, log: Path) -> Iterator[Launched]:
    """A supervisor, without a word to the database from here."""
    orders = {"target": TARGET, "processes": 1, "concurrency": 4, "name": f"worker {number}"}
    variables = {"ONWARD_URL": url, "ONWARD_LEDGER": str(ledger.path)}
    process = Launched(orders, os.environ | variables, ROOT, log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.let_go()


@contextmanager
def hogged(url: str) -> Iterator[None]:
    """Whatever connections the server has are taken, until the block ends."""
    with ExitStack() as stack:
        with suppress(psycopg.OperationalError):
            while True:
                stack.enter_context(psycopg.connect(url))
        yield


# --- answers --------------------------------------------------------------------------------------


def test_outcomes_that_meet_passing_errors_are_written_again(
    url: str, open_app: Open, ledger: Ledger
) -> None:
    """The server answers the write of an outcome with a serialization failure, a deadlock, a
    cancelled query and a lost connection, twice each: it is written, and the job has run once.
    """
    app = open_app(lease=20.0, beat=1.0)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(PASSING_ERRORS)
    with running(url, concurrency=1, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.echo.call(number) for number in range(6)))
        wait_until_over(app, 40)
        assert "Traceback" not in worker.log()
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT last_value FROM met").fetchone()
        assert row
        assert row[0] >= 8
        connection.execute("DROP TRIGGER passing ON onward.finished")
    found = history.check(app.database, ledger, ids)
    assert all(history.outcomes(found, id_) == ["succeeded"] for id_ in ids)
    assert len(found.bodies) == 6
    assert history.rows(app.database, "SELECT * FROM onward.refusal") == []


PASSING_ERRORS = """
CREATE SEQUENCE met;
CREATE FUNCTION passing() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number integer := nextval('met');
    codes text[] := ARRAY['40001', '40001', '40P01', '40P01', '57014', '57014', '08006', '08006'];
BEGIN
    IF number <= 8 THEN
        RAISE EXCEPTION 'number % of the errors that pass', number USING ERRCODE = codes[number];
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER passing BEFORE INSERT ON onward.finished
    FOR EACH STATEMENT EXECUTE FUNCTION passing();
"""


@pytest.mark.parametrize(
    ("processes", "jobs"),
    [
        pytest.param(4, 400, id="scaled"),
        pytest.param(8, 2_000, id="as written", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_stricter_isolation_level_changes_nothing(
    url: str, open_app: Open, ledger: Ledger, level: str, processes: int, jobs: int
) -> None:
    """The database's default is stricter than what Onward needs: the same results, and no error a
    job in the log.
    """
    name = postgres.database_name(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'".encode()
        )
    app = open_app(lease=12.0, beat=2.0)
    with running(url, processes=processes, ledger=ledger) as worker:
        ids = enqueue(app, (tasks.aecho.call(number) for number in range(jobs)))
        ids += enqueue(app, (tasks.link.call(1, 2, 0.0) for _ in range(20)))
        wait_until_over(app, 90)
        log = worker.log()
    found = history.check(app.database, ledger, ids, born_inside=True)
    assert history.states(found) == {"succeeded": jobs + 40}
    assert {job.attempt for job in found.jobs.values()} == {1}
    assert "could not serialize" not in log


# --- a pooler in between --------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_pooler_that_keeps_no_sessions_changes_nothing(
    private_postgres: PrivatePostgres, url: str, open_app: Open, ledger: Ledger
) -> None:
    """PgBouncer in transaction mode hands each transaction to another session: each job runs once,
    retries and follow-ups work, jobs start by the poll, and the log has no complaint. Needs the
    program `pgbouncer`; as root on Debian the test installs it.
    """
    with pgbouncer(private_postgres) as port:
        pooled = urlsplit(url)._replace(netloc=f"postgres@127.0.0.1:{port}").geturl()
        app = open_app(lease=12.0, beat=1.0)
        over = {"ONWARD_URL": pooled}
        with running(url, processes=4, ledger=ledger, environment=over) as worker:
            ids = enqueue(app, (tasks.aecho.call(number) for number in range(2_000)))
            ids += enqueue(app, (tasks.link.call(1, 3, 0.0) for _ in range(50)))
            ids += enqueue(app, (tasks.fail.using(max_attempts=3).call() for _ in range(50)))
            wait_until_over(app, 120)
            log = worker.log()
        found = history.check(app.database, ledger, ids, born_inside=True)
        assert history.states(found) == {"succeeded": 2_150, "dead": 50}
        assert not any(word in log for word in ("Traceback", "prepared statement", "not owned"))


@contextmanager
def pgbouncer(server: PrivatePostgres) -> Iterator[int]:
    """A pooler in front of a server, in transaction mode; yields its port."""
    if shutil.which("pgbouncer") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "pgbouncer"]):
            subprocess.run(
                ["apt-get", *words], env=os.environ | quiet, capture_output=True, check=False
            )
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("needs the program pgbouncer (Debian: apt-get install pgbouncer)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    # Under a folder of its own that the other user may enter: the test's own is closed to it.
    folder = Path(tempfile.mkdtemp(prefix="onward-pooler-"))
    folder.chmod(0o755)
    settings = folder / "pgbouncer.ini"
    users = folder / "users"
    users.write_text('"postgres" ""\n')
    settings.write_text(POOLER.format(server=server.port, port=port, users=users))
    as_other = ["-u", "postgres"] if os.geteuid() == 0 else []
    process = Popen([program, *as_other, str(settings)], stdin=DEVNULL, stderr=DEVNULL)
    try:
        wait_until(lambda: _answers(port), 20, what="the pooler")
        yield port
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


POOLER = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
auth_type = trust
auth_file = {users}
pool_mode = transaction
default_pool_size = 10
max_client_conn = 200
unix_socket_dir =
ignore_startup_parameters = extra_float_digits
"""
