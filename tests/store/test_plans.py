"""What runs all the time reads what it needs and no more, with a hundred thousand jobs in the way."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import psycopg
import pytest

from onward.job import Change, Job
from onward.lifecycle import JobState
from onward.store import store
from onward.store.database import Database
from onward.store.postgres import PostgresDatabase
from onward.store.sqlite import SqliteDatabase
from onward.store.statements import psycopg_text, sqlite_text
from onward.store.store import FIRST_ID
from onward.store.url import open_database
from onward.worker.lanes import EDGE
from tests.store.builders import (
    LANE,
    TASK,
    claim,
    enqueue,
    hand,
    register,
    release,
    succeed,
)
from tests.support import postgres
from tests.support.functions import written_out

UNKNOWN = 100_000
"""Due jobs in front of all others, of a task that no worker here knows: a rolling deploy."""

KNOWN = 20_000
LATER = 20_000
OWNED = 1_000
PAST_JOBS = 30_000

# Ids in the order of their numbers, so that both databases lay the rows out alike.
FILL = {
    "sqlite": """
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, args)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
SELECT printf('00000000-0000-7000-%04x-%012x', :kind, i), :task, 'default', 0, 'queued', 1, unixepoch() + :due, 0,
       3, 2, 0, 0, 1, '{}' FROM n
""",
    "postgres": """
INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at, created_at, max_attempts, max_losses,
                        failures, losses, budget_from, args)
SELECT CAST('00000000-0000-7000-' || lpad(to_hex(CAST(:kind AS integer)), 4, '0') || '-' || lpad(to_hex(i), 12, '0')
            AS uuid), CAST(:task AS text), 'default', 0, 'queued', 1,
       now() + CAST(:due AS integer) * interval '1 second', now(), 3, 2, 0, 0, 1, '{}'
FROM generate_series(1, CAST(:count AS integer)) AS i
""",
}
PAST = {
    "sqlite": """
INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
    max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state, result)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
SELECT printf('00000000-0000-7000-0009-%012x', i), 'shop.report', 'default', 0, 'succeeded', 2, i, :worker, i, i, i,
    3, 2, 1, 0, 1, '{}', 'running', 'succeed', 'succeeded', 'null' FROM n
""",
    "postgres": """
INSERT INTO onward.finished (id, task, queue, priority, state, attempt, run_at, worker, started_at, finished_at, created_at,
    max_attempts, max_losses, failures, losses, budget_from, args, ended_from, event, attempt_state, result)
SELECT CAST('00000000-0000-7000-0009-' || lpad(to_hex(i), 12, '0') AS uuid), 'shop.report', 'default', 0, 'succeeded', 2,
    to_timestamp(i), :worker, to_timestamp(i), to_timestamp(i), to_timestamp(i), 3, 2, 1, 0, 1, '{}', 'running', 'succeed',
    'succeeded', 'null'
FROM generate_series(1, CAST(:count AS integer)) AS i
""",
}
TABLES = ("job", "finished", "attempt")
REGCLASSES = ", ".join(f"'onward.{table}'::regclass" for table in TABLES)
ATTEMPTS = """
INSERT INTO onward.attempt (job, number, state, event, worker, started_at, ended_at, error)
SELECT id, 1, 'failed', 'retry', worker, started_at, finished_at, 'boom' FROM onward.finished
"""
ANALYZE = {"sqlite": "ANALYZE", "postgres": "ANALYZE onward.job, onward.finished, onward.attempt"}

# As if there had never been an ANALYZE. PostgreSQL's own would come at a moment of its choice.
FORGET = {
    "sqlite": ["DROP TABLE IF EXISTS sqlite_stat1"],
    "postgres": [
        *(f"ALTER TABLE onward.{table} SET (autovacuum_enabled = off)" for table in TABLES),
        f"DELETE FROM pg_statistic WHERE starelid IN ({REGCLASSES})",
        f"UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE oid IN ({REGCLASSES})",
    ],
}


class Crowd:
    """A database full of jobs, and who owns some of them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.worker = register(database, lease=1e6)
        gone = register(database, lease=1e6)
        enqueue(database, OWNED + 100, delay=-1.0)
        self.owned = claim(database, self.worker, OWNED)
        claim(database, gone, 100)
        database.run(store.lose, gone, "killed")
        with hand(database) as dba:
            for kind, count, task, due in (
                (1, UNKNOWN, "new.task", -500),
                (2, KNOWN, TASK, -100),
                (3, LATER, TASK, 86_400),
            ):
                fill = FILL[dba.dialect]
                dba.sql(fill, kind=kind, count=count, task=task, due=due)
            dba.sql(PAST[dba.dialect], count=PAST_JOBS, worker=gone)
            dba.sql(ATTEMPTS)


def crowded(database: Database) -> Crowd:
    database.migrate()
    return Crowd(database)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crowd]:
    """One crowded database of each kind for all of these tests, which change nothing that counts."""
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("plans") / "onward.db"
        with closing(open_database(f"sqlite:///{path}")) as database:
            yield crowded(database)
        return
    server = request.getfixturevalue("postgres_url")
    url = postgres.create_database(server)
    with closing(open_database(url)) as database:
        yield crowded(database)
    postgres.drop_database(server, url)


@pytest.fixture(scope="module", params=["stale", "fresh"])
def statistics(request: pytest.FixtureRequest, full: Crowd) -> str:
    """Plans are looked at as they are before the first ANALYZE, and after one."""
    with hand(full.database) as dba:
        for statement in (
            FORGET[dba.dialect] if request.param == "stale" else [ANALYZE[dba.dialect]]
        ):
            dba.sql(statement)
    return str(request.param)


def params_of(full: Crowd) -> dict[str, dict[str, Any]]:
    """Each statement that runs all the time, with the values of a busy moment."""
    finished = [succeed(job) for job in full.owned[:500]]
    going_on = [release(job) for job in full.owned[500:]]
    ids = [job.id for job in full.owned]
    return {
        "claim": {
            "worker": full.worker,
            "tasks": store.dumps([TASK]),
            "queue": LANE[0],
            "priority": LANE[1],
            "after_time": 0.0,
            "after_id": FIRST_ID,
            "limit": 100,
        },
        "due": {
            "tasks": store.dumps([TASK]),
            "queue": LANE[0],
            "priority": LANE[1],
            "after_time": 0.0,
            "after_id": FIRST_ID,
            "limit": 100,
            "leave": store.dumps(ids),
        },
        "claim_these": {"worker": full.worker, "ids": store.dumps(ids[:100])},
        "lanes": {"queues": store.dumps(["default", "mail"])},
        "finish": store.finish_params(finished),
        "go_on": {"changes": store.dumps(going_on)},
        "hold": {"id": ids[0], "attempt": 1, "seconds": 1.0},
        "orphans": {"limit": 500, "leave": "[]"},
        "owned": {"worker": full.worker, "held": store.dumps(ids)},
        "cancelling": {"worker": full.worker},
        "job": {"id": ids[0]},
        "record": {"id": ids[0]},
        "attempts": {"id": ids[0]},
        "attempt": {"id": ids[0], "number": 1},
        "finished_among": {"ids": store.dumps(ids)},
        "dead": {"before": None, "queue": None, "task": None, "until": None, "limit": 50},
        "due_tasks": {},
        "held": {"ids": store.dumps([full.worker])},
        "prune": {"state": "succeeded", "keep": 100.0, "limit": 100},
        "waiting_queues": {},
        "due_again": {
            "queue": LANE[0],
            "priority": LANE[1],
            "step": 100_000.0,
            "before": time.time() + 100_000.0,
            "since": time.time() + 100_000.0,
            "limit": 100,
        },
    }


HOT = [
    "claim",
    "due",
    "claim_these",
    "lanes",
    "finish",
    "go_on",
    "hold",
    "orphans",
    "owned",
    "cancelling",
    "job",
    "record",
    "attempts",
    "attempt",
    "finished_among",
    "held",
    "dead",
    "prune",
    "waiting_queues",
    "due_again",
]


# --- plans ----------------------------------------------------------------------------------------


def plan(full: Crowd, name: str) -> list[str]:
    """How the database would go about a statement: one line for each table or index that it reads."""
    params = params_of(full)[name]
    if isinstance(full.database, SqliteDatabase):
        return _sqlite_plan(full.database, name, params)
    assert isinstance(full.database, PostgresDatabase)
    return list(_nodes(explained(full.database, name, params)))


def explained(
    database: PostgresDatabase, name: str, params: dict[str, Any], how: str = ""
) -> dict[str, Any]:
    """The plan as the server makes it, with what `how` asks for; nothing of it stays. What runs in
    a function of the schema is planned as its session keeps it: for any values.
    """
    written = written_out(name)
    with closing(psycopg.connect(database.url, prepare_threshold=None)) as connection:
        if not written.settings:
            text = f"EXPLAIN (FORMAT JSON{how}) {psycopg_text(name, database.schema).decode()}"
            row = connection.execute(text.encode(), params).fetchone()
        else:
            for setting in written.settings:
                connection.execute(f"SET {setting}".encode())
            text, names = written.numbered
            connection.execute(f"PREPARE this AS {text}".encode())
            values = ", ".join(f"%({name})s" for name in names)
            row = (
                psycopg.ClientCursor(connection)
                .execute(f"EXPLAIN (FORMAT JSON{how}) EXECUTE this ({values})".encode(), params)
                .fetchone()
            )
    assert row is not None
    found: dict[str, Any] = row[0][0]["Plan"]
    return found


def expected_cost(database: PostgresDatabase, name: str, params: dict[str, Any]) -> float:
    return float(explained(database, name, params)["Total Cost"])


def _sqlite_plan(database: SqliteDatabase, name: str, params: dict[str, Any]) -> list[str]:
    with hand(database) as dba:
        dba.connection.create_scalar_function("onward_clock", time.time, 0)
        return [
            row[3]
            for step in sqlite_text(name)
            for row in dba.connection.execute(f"EXPLAIN QUERY PLAN {step}", params)
        ]


def _nodes(node: dict[str, Any]) -> Iterator[str]:
    if "Relation Name" in node or "Index Name" in node:
        index = f" USING INDEX {node['Index Name']}" if "Index Name" in node else ""
        yield f"{node['Node Type']} {node.get('Relation Name', '')}{index}"
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def full_scans(lines: list[str]) -> list[str]:
    """The lines that read a whole table of jobs."""
    tables = r"(onward_)?(job|finished|attempt)\b"
    return [
        line
        for line in lines
        if (re.search(rf"Seq Scan {tables}", line))
        or (re.match(rf"SCAN {tables}|SCAN j\b|SCAN f\b", line) and "USING" not in line)
    ]


@pytest.mark.parametrize("name", HOT)
def test_postgres_compiles_nothing_that_runs_all_the_time(
    full: Crowd, statistics: str, name: str
) -> None:
    """From an expected cost of 100,000 on (`jit_above_cost`) it would compile the statement each
    time, for tens of milliseconds. SQLite expects no costs: it is asked only for its plan.
    """
    assert plan(full, name)
    if isinstance(full.database, PostgresDatabase):
        assert expected_cost(full.database, name, params_of(full)[name]) < 50_000


@pytest.mark.parametrize("name", HOT)
def test_what_runs_all_the_time_scans_no_table(full: Crowd, statistics: str, name: str) -> None:
    """With and without fresh statistics, rows are found through an index: cost follows what is
    taken.
    """
    lines = plan(full, name)
    assert lines
    assert full_scans(lines) == []


@pytest.mark.parametrize(("name", "index"), [("claim", "job_due"), ("lanes", "job_first")])
def test_the_claim_and_the_lanes_go_through_their_partial_index(
    full: Crowd, statistics: str, name: str, index: str
) -> None:
    """The index of queued jobs in their order is what makes a claim cheap: nothing is sorted,
    nothing else is read. So it is for the look; on SQLite by the same index.
    """
    index = "job_due" if full.database.dialect == "sqlite" else index
    lines = [line for line in plan(full, name) if "due" in line or "first" in line]
    used = [line for line in lines if "job_due" in line or "job_first" in line]
    assert used
    assert all(index in line for line in used)
    assert not [line for line in plan(full, name) if "TEMP B-TREE FOR ORDER BY" in line] or (
        name == "lanes"
    )


def test_a_sweep_goes_through_the_owned_jobs_only(full: Crowd, statistics: str) -> None:
    """A hundred thousand queued jobs are none of its business."""
    assert any("job_owned" in line for line in plan(full, "orphans"))


# --- what it costs --------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a statement took, counted and not timed."""

    units: int
    """Steps of SQLite's machine, or pages that PostgreSQL looked at."""
    in_vain: int
    """PostgreSQL only: rows that were fetched and thrown away."""
    rows: list[tuple[Any, ...]]


def cost(full: Crowd, name: str, **others: Any) -> Cost:
    """Run a statement with the values of a busy moment, or others, count, and undo it."""
    params = params_of(full)[name] | others
    if isinstance(full.database, SqliteDatabase):
        return _steps(full.database, name, params)
    assert isinstance(full.database, PostgresDatabase)
    return _pages(full.database, name, params)


def _steps(database: SqliteDatabase, name: str, params: dict[str, Any]) -> Cost:
    every, ticks = 10, itertools.count()
    with hand(database) as dba, dba.undone():
        dba.connection.create_scalar_function("onward_clock", time.time, 0)
        dba.connection.set_progress_handler(lambda: next(ticks) < 0, every)
        steps = sqlite_text(name)
        rows = [row for step in steps for row in dba.connection.execute(step, params)]
        dba.connection.set_progress_handler(None)
    return Cost(next(ticks) * every, 0, rows)


def _pages(database: PostgresDatabase, name: str, params: dict[str, Any]) -> Cost:
    with closing(psycopg.connect(database.url, prepare_threshold=None)) as connection:
        rows = connection.execute(psycopg_text(name, database.schema), params).fetchall()
    plan = explained(database, name, params, ", ANALYZE, BUFFERS")
    return Cost(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], _in_vain(plan), rows)


def _in_vain(node: dict[str, Any]) -> int:
    """Rows that a filter threw away, in a node of a plan and below it."""
    own = node.get("Rows Removed by Filter", 0) * node["Actual Loops"]
    return int(own) + sum(_in_vain(child) for child in node.get("Plans", ()))


def test_jobs_of_an_unknown_task_in_front_do_not_slow_a_claim(full: Crowd, statistics: str) -> None:
    """A hundred thousand of them: SQLite does not leave the index to pass over them, on PostgreSQL
    the look has said where the first job is that the worker knows.
    """
    (lane,) = [lane for lane in full.database.read(store.lanes, ["default"], {TASK}) if lane.known]
    found = cost(full, "claim", after_time=lane.first - EDGE)
    assert len(found.rows) == 100
    assert {row[1] for row in found.rows} == {TASK}
    if full.database.dialect == "postgres":
        assert found.in_vain <= 200
        assert found.units < 20 * len(found.rows)
    else:
        (front,) = [line for line in plan(full, "claim") if "job_due" in line]
        assert "COVERING INDEX" in front
        assert found.units < 15 * UNKNOWN + 1_000 * len(found.rows)


def test_jobs_of_tomorrow_do_not_slow_a_poll(full: Crowd, statistics: str) -> None:
    """Looking what there is to do costs a few probes, however many jobs are scheduled."""
    found = cost(full, "lanes")
    assert {row[:2] for row in found.rows} == {LANE}
    # SQLite reads its statistics anew on each connection; that counts.
    assert found.units < (50 if full.database.dialect == "postgres" else 5_000)


def test_moving_what_a_step_of_the_clock_froze_costs_what_is_moved(
    full: Crowd, statistics: str
) -> None:
    """A hundred jobs at a time among a hundred thousand others that are due."""
    found = cost(full, "due_again")
    assert len(found.rows) == 100
    assert found.units < (50 if full.database.dialect == "postgres" else 500) * len(found.rows)


def test_a_claim_without_statistics_does_not_read_all_that_waits(own_postgres: Database) -> None:
    """A queue that has just been filled: the planner knows nothing of it, and would read the whole
    index of what is queued beside the ids.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    with hand(own_postgres) as dba:
        for text in FORGET["postgres"]:
            dba.sql(text)
        dba.sql(FILL["postgres"], kind=3, count=3_000, task=TASK, due=-60)
    params = {
        "worker": register(own_postgres),
        "tasks": store.dumps([TASK]),
        "queue": LANE[0],
        "priority": LANE[1],
        "after_time": 0.0,
        "after_id": FIRST_ID,
        "limit": 100,
    }
    assert len(_pages(own_postgres, "claim", params).rows) == 100
    nodes = list(_nodes(explained(own_postgres, "claim", params)))
    assert not [node for node in nodes if "Bitmap Index Scan" in node]


@pytest.mark.parametrize("ends", [succeed, release], ids=["finish", "go_on"])
def test_one_job_among_some_thousand_ends_without_a_look_at_the_others(
    own_postgres: Database, ends: Callable[[Job], Change]
) -> None:
    """A table that is small enough to be read from end to end is not, for the sake of one job."""
    assert isinstance(own_postgres, PostgresDatabase)
    worker = register(own_postgres)
    enqueue(own_postgres)
    (job,) = claim(own_postgres, worker)
    with hand(own_postgres) as dba:
        dba.sql(FILL["postgres"], kind=3, count=3_000, task=TASK, due=86_400)
        dba.sql("ANALYZE onward.job")
    change = ends(job)
    name = "finish" if ends is succeed else "go_on"
    params = (
        store.finish_params([change]) if ends is succeed else {"changes": store.dumps([change])}
    )
    nodes = list(_nodes(explained(own_postgres, name, params)))
    assert [node for node in nodes if "Index Scan job USING INDEX job_pkey" in node]
    assert full_scans(nodes) == []


@pytest.mark.parametrize("analyzed", [False, True], ids=["stale", "fresh"])
def test_a_session_from_a_day_with_few_jobs_ends_jobs_by_their_ids(
    own_postgres: Database, analyzed: bool
) -> None:
    """Functions and triggers keep their plans: what was small when the plan was made may have grown
    since.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    worker = register(own_postgres)
    enqueue(own_postgres, 24)
    finish = psycopg_text("finish", own_postgres.schema)
    changes = [succeed(job) for job in claim(own_postgres, worker, 24)]
    *early, late = [store.finish_params(changes[at : at + 3]) for at in range(0, 24, 3)]
    with hand(own_postgres) as dba:
        for text in ["ANALYZE onward.job, onward.finished"] if analyzed else FORGET["postgres"]:
            dba.sql(text)
        with psycopg.connect(own_postgres.url, autocommit=True) as session:
            for params in early:
                assert session.execute(finish, params).fetchall()
            dba.sql(PAST["postgres"], count=5_000, worker=worker)
            dba.sql(FILL["postgres"], kind=3, count=5_000, task=TASK, due=86_400)
            with session.transaction():
                assert session.execute(finish, late).fetchall()
                read = session.execute(
                    "SELECT relname, seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables"
                    " WHERE relname IN ('finished', 'job') ORDER BY relname"
                ).fetchall()
    assert {name for name, _ in read} == {"finished", "job"}
    # What the session read before counts too, until it has reported it.
    assert all(rows <= 24 for _, rows in read), read


CLAIM = psycopg_text("claim", "onward")
ONE_LANE = {
    "tasks": store.dumps([TASK]),
    "queue": LANE[0],
    "priority": LANE[1],
    "after_time": 0.0,
    "after_id": FIRST_ID,
    "limit": 10,
}


def pages_of_a_claim(session: psycopg.Connection, worker: str) -> int:
    """Pages that ten jobs take, in a session with its plans; the table has a hundred and more."""
    row = session.execute(
        b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + CLAIM, ONE_LANE | {"worker": worker}
    ).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    assert plan["Actual Rows"] == 10
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_a_session_from_a_day_with_few_jobs_claims_through_the_index(
    own_postgres: Database,
) -> None:
    """A worker keeps its session, and the session the plan of its first claim: that was made of
    empty tables.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    worker = register(own_postgres)
    with hand(own_postgres) as dba:
        for forget in FORGET["postgres"]:
            dba.sql(forget)
        with psycopg.connect(own_postgres.url, prepare_threshold=None) as session:
            for _ in range(10):
                assert session.execute(CLAIM, ONE_LANE | {"worker": worker}).fetchall() == []
                session.commit()
            dba.sql(FILL["postgres"], kind=3, count=5_000, task=TASK, due=-60)
            assert pages_of_a_claim(session, worker) < 150


@pytest.mark.parametrize("name", ["claim", "finish"])
def test_a_session_plans_what_runs_for_each_job_once(own_postgres: Database, name: str) -> None:
    """The planner takes longer than the work. Left alone it would be asked for a claim each time: it
    takes the plan for any values for the dearer one.
    """
    assert isinstance(own_postgres, PostgresDatabase)
    worker = register(own_postgres)
    enqueue(own_postgres, 12)
    done = claim(own_postgres, worker, 10)
    params = [ONE_LANE | {"worker": worker, "limit": 0}] * 10
    if name == "finish":
        params = [store.finish_params([succeed(job)]) for job in done]
    with hand(own_postgres) as dba:
        dba.sql(FILL["postgres"], kind=3, count=5_000, task=TASK, due=-60)
        dba.sql("ANALYZE onward.job")
    planned: list[str] = []
    with psycopg.connect(own_postgres.url, prepare_threshold=None) as session:
        session.execute("SET client_min_messages = log")
        session.execute("SET log_planner_stats = on")
        session.add_notice_handler(lambda notice: planned.append(str(notice.message_primary)))
        for each in params:
            planned.clear()
            session.execute(psycopg_text(name, own_postgres.schema), each)
    assert planned == ["PLANNER STATISTICS"], "its own text, and nothing inside the function"


@pytest.mark.parametrize("analyzed", [False, True], ids=["stale", "fresh"])
def test_counting_what_is_due_reads_nothing_that_is_due_tomorrow(
    quick_database_url: str, analyzed: bool
) -> None:
    """`onward status` asks for it: among many jobs of tomorrow, of several lanes, three are due."""
    with closing(open_database(quick_database_url)) as database:
        database.migrate()
        enqueue(database, 3, delay=-1.0)
        with hand(database) as dba:
            for text in [] if analyzed else FORGET[dba.dialect]:
                dba.sql(text)
            dba.sql(FILL[dba.dialect], kind=3, count=LATER, task=TASK, due=86_400)
            dba.sql(
                "UPDATE onward.job SET priority = 5 WHERE run_at > created_at AND id > :middle",
                middle=f"00000000-0000-7000-0003-{LATER // 2:012x}",
            )
            if analyzed:
                dba.sql(ANALYZE[dba.dialect])
        if isinstance(database, PostgresDatabase):
            found, most = _pages(database, "due_tasks", {}), 50
        else:
            assert isinstance(database, SqliteDatabase)
            found, most = _steps(database, "due_tasks", {}), 5_000
    assert [row[:3] for row in found.rows] == [("default", TASK, 3)]
    assert (found.units < most, found.in_vain <= 3) == (True, True)


def test_a_batch_of_finishes_costs_what_it_finishes(full: Crowd, statistics: str) -> None:
    """Five hundred at once among a hundred thousand others, and as cheap with statistics as
    without.
    """
    found = cost(full, "finish")
    assert len(found.rows) == 500
    assert found.units < (30 if full.database.dialect == "postgres" else 500) * len(found.rows)


def test_the_crowd_is_there(full: Crowd) -> None:
    """The tests above say something only if the table is as full as they think."""
    counts = full.database.read(store.counts)
    assert counts[JobState.QUEUED] >= UNKNOWN + LATER
    assert counts[JobState.RUNNING] >= OWNED
