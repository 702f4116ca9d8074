"""Values that no column should hold: refused where they are written, and where one got in by other
means, it stops nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from onward import Onward
from onward.store import store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from onward.store.store import Lane
from onward.worker.lanes import Lanes
from tests.store.builders import DATABASE_ERRORS, Hand, enqueue, hand, loosen, register
from tests.store.exhaustive import ALWAYS, NEVER

TYPES = {
    "a moment as text": "datetime('now')",
    "a word": "'soon'",
    "a BLOB": "x'00'",
    "a number as a BLOB": "CAST('1.5' AS BLOB)",
}
NOTHING = {"nothing": "NULL", "no number": "9e999 - 9e999"}


@pytest.mark.parametrize("value", [*TYPES.values(), *NOTHING.values()], ids=[*TYPES, *NOTHING])
def test_sqlite_takes_no_due_time_that_is_no_number(sqlite: Database, value: str) -> None:
    """By default its columns take anything, and a due time is compared, subtracted and indexed."""
    enqueue(sqlite)
    with hand(sqlite) as dba:
        with pytest.raises(DATABASE_ERRORS, match=r"value in REAL|NOT NULL"):
            dba.sql(f"UPDATE onward.job SET run_at = {value}")


def test_every_table_of_sqlite_takes_only_what_its_columns_are_of(sqlite: Database) -> None:
    with hand(sqlite) as dba:
        tables = dba.sql("SELECT name, strict FROM pragma_table_list WHERE type = 'table'")
    strict = {name: bool(is_) for name, is_ in tables if name.startswith("onward_")}
    assert len(strict) == 6
    assert all(strict.values()), strict


ENDS = {"never": NEVER, "always": ALWAYS}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_with_an_endless_delay_is_not_born(database: Database, end: str) -> None:
    """Neither by the statements of an enqueue nor by a hand."""
    with hand(database) as dba:
        with pytest.raises(DATABASE_ERRORS, match=r"job_time|refuses nothing > queued"):
            dba.sql(
                "INSERT INTO onward.job (id, task, queue, priority, state, attempt, run_at,"
                " created_at, max_attempts, max_losses, failures, losses, budget_from, args)"
                f" VALUES ('00000000-0000-7000-8000-000000000000', 't', 'q', 0, 'queued', 1,"
                f" {ENDS[end][dba.dialect]}, {dba.clock}, 1, 0, 0, 0, 1, '')"
            )


# --- what got in by other means -------------------------------------------------------------------


@contextmanager
def unguarded(dba: Hand) -> Iterator[None]:
    """Have due times that are no times stored: by a restore past the triggers, say."""
    if dba.dialect == "sqlite":
        loosen(dba)
        dba.sql("PRAGMA ignore_check_constraints = ON")
        yield
    else:
        dba.sql("ALTER TABLE onward.job DISABLE TRIGGER job_moves")
        yield
        dba.sql("ALTER TABLE onward.job ENABLE ALWAYS TRIGGER job_moves")


def spoil(database: Database, id_: str, value: str) -> None:
    with hand(database) as dba, unguarded(dba):
        dba.sql(f"UPDATE onward.job SET run_at = {value} WHERE id = :id", id=id_)


every_time_that_is_none = pytest.mark.parametrize(
    ("database", "value"),
    [
        *(
            pytest.param(kind, ends[dialect], id=f"{kind}-{end}")
            for end, ends in ENDS.items()
            for kind, dialect in (("apsw", "sqlite"), ("sqlite3", "sqlite"), ("postgres",) * 2)
        ),
        *(
            pytest.param(kind, text, id=f"{kind}-{name}")
            for name, text in TYPES.items()
            for kind in ("apsw", "sqlite3")
        ),
    ],
    indirect=["database"],
)


PLACES: dict[str, Callable[[Database], str]] = {
    "before the others": lambda database: enqueue(database)[0],
    "of another task": lambda database: enqueue(database, task="other")[0],
    "alone in its lane": lambda database: enqueue(database, priority=7)[0],
    "alone in its queue": lambda database: enqueue(database, queue="mail")[0],
}


@every_time_that_is_none
@pytest.mark.parametrize("place", PLACES)
def test_a_due_time_that_is_no_time_takes_no_look_down(
    database: Database, value: str, place: str
) -> None:
    """Wherever it stands, the others are found, and whoever looks can reckon with what is said."""
    damaged = PLACES[place](database)
    enqueue(database, 2)
    enqueue(database, 1, delay=50.0, priority=-1)
    spoil(database, damaged, value)
    found = database.read(store.lanes, ["mail", "default"], {"shop.report", "other"})
    assert lane(found, "default", 0).due_in <= 0
    assert lane(found, "default", -1).due_in == pytest.approx(50, abs=5)
    lanes = Lanes()
    lanes.looked(found, 0.0)
    assert ("default", 0) in [where for where, _ in lanes.order()]
    assert 0 < lanes.next_due < 60


def lane(lanes: list[Lane], queue: str, priority: int) -> Lane:
    (found,) = [lane for lane in lanes if (lane.queue, lane.priority) == (queue, priority)]
    return found


@every_time_that_is_none
def test_a_due_time_that_is_no_time_holds_up_no_worker(
    request: pytest.FixtureRequest, database: Database, value: str
) -> None:
    """The jobs behind it and beside it run; it itself waits for somebody who mends it."""
    url = getattr(database, "url", None) or f"sqlite:///{getattr(database, 'path', '')}"
    driver = database.driver.name if isinstance(database, SqliteDatabase) else "apsw"
    app = Onward(url, sqlite_driver=driver)
    request.addfinalizer(app.close)

    @app.task(name="shop.report")
    async def report() -> None: ...

    damaged = report.enqueue()
    spoil(app.database, damaged.id, value)
    with app.worker(queues=["default", "mail"]):
        report.using(queue="mail").enqueue().wait(timeout=10)
        report.enqueue().wait(timeout=10)
    assert app.counts()["queued"] == 1


@pytest.mark.parametrize("column", ["lease_until", "beat_at"])
@pytest.mark.parametrize("end", ENDS)
def test_a_lease_without_an_end_is_refused(database: Database, column: str, end: str) -> None:
    """It would never be over, and no age can be told of it."""
    register(database)
    with hand(database) as dba:
        with pytest.raises(DATABASE_ERRORS, match="worker_times"):
            dba.sql(f"UPDATE onward.worker SET {column} = {ENDS[end][dba.dialect]}")
