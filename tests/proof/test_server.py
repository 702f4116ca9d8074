"""The search among failures of PostgreSQL, small: it finds nothing, and finds each seeded fault."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg
import pytest

from onward.errors import DatabaseUnavailable
from onward.job import Change, Job, NewJob
from onward.store import store
from onward.store.postgres import PostgresDatabase
from onward.store.postgres_link import popped, translated
from onward.store.statements import Op
from tests.proof.isolation import quiet
from tests.proof.report import Report
from tests.proof.server import (
    DEEDS,
    Strikes,
    crashes,
    migrated,
    partitions,
    strikes,
    unsteady_worker,
)
from tests.proof.tiers import first
from tests.support.postgres import PrivatePostgres

SEED = 5


@pytest.fixture(scope="module")
def url(postgres_url: str) -> Iterator[str]:
    """A database that the strikes take turns with: each deed has rows of its own."""
    with migrated(postgres_url) as found:
        yield found


def test_sessions_that_end_before_each_round_trip(url: str) -> None:
    """Each deed once, on a loop or not, pooled or not, killed before each of its round trips."""
    report = strikes(url, SEED, ["session"], most=60)
    assert report.violations == []
    assert report.did["session lost"] >= 60
    for what in ("struck and healed", "unknown and not done"):
        assert report.sometimes[what], what


def test_requests_and_answers_that_are_lost(url: str) -> None:
    """The wire is cut before a request, or before its answer, the COMMIT's among them."""
    report = strikes(url, SEED, ["request", "answer", "answer"], most=60)
    assert report.violations == []
    assert report.did["request lost"] + report.did["answer lost"] >= 60
    for what in ("struck and healed", "unknown and not done", "unknown and done"):
        assert report.sometimes[what], what


def test_a_worker_whose_sessions_end_all_the_time(postgres_url: str) -> None:
    """Its jobs come to their end all the same, each attempt as its body bears witness."""
    with quiet():
        report = unsteady_worker(postgres_url, SEED, 15)
    assert report.violations == []
    assert report.did["session of a worker lost"] >= 15
    assert report.did["jobs of a worker"] >= 10


def test_a_server_that_crashes_under_clients_and_a_worker(
    private_postgres: PrivatePostgres,
) -> None:
    """What was acknowledged is there, what is unknown is there wholly or not at all."""
    with quiet():
        report = crashes(private_postgres, SEED, 3)
    assert report.violations == []
    assert report.did["crashes of the server"] == 3
    assert report.did["jobs of a worker"] >= 36
    assert report.sometimes["client was told that the database is away"] >= 3


def test_a_wire_that_carries_nothing_for_a_while(postgres_url: str) -> None:
    """Requests whose senders have given them up arrive late, and double nothing."""
    with quiet():
        report = partitions(postgres_url, SEED, 1)
    assert report.violations == []
    assert report.did["partitions"] == 1
    assert report.sometimes["client was told that the database is away"] >= 2


# --- seeded faults --------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def opens_no_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def transaction(_: psycopg.Connection[Any]) -> Generator[None]:
        yield

    monkeypatch.setattr(psycopg.Connection, "transaction", transaction)


def takes_a_commit_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = psycopg.Connection.transaction

    @contextmanager
    def transaction(connection: psycopg.Connection[Any]) -> Generator[None]:
        before = real(connection)
        before.__enter__()
        yield
        with suppress(psycopg.OperationalError):
            before.__exit__(None, None, None)

    monkeypatch.setattr(psycopg.Connection, "transaction", transaction)


def repeats_blindly(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(self: PostgresDatabase, jobs: Sequence[NewJob]) -> None:
        try:
            self.run(store.enqueue, jobs)
        except DatabaseUnavailable:
            self.run(store.enqueue, jobs)

    monkeypatch.setattr(PostgresDatabase, "_enqueue_now", now)


def says_nothing_of_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = getattr(PostgresDatabase, "_write_new")  # noqa: B009

    def now(self: PostgresDatabase, jobs: Sequence[NewJob]) -> None:
        with suppress(DatabaseUnavailable):
            real(self, jobs)

    monkeypatch.setattr(PostgresDatabase, "_enqueue_now", now)


def knows_no_outcome_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.look

    def look(change: Change) -> Op[tuple[Job | None, bool]]:
        found, _ = yield from real(change)
        return found, False

    monkeypatch.setattr(store, "look", look)


def clings_to_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(self: Any, make: Callable[[], Op[Any]]) -> Any:
        with translated(self):
            connection = popped(self._idle) or self._connect_ready()
            return self._on(connection, make)

    monkeypatch.setattr(PostgresDatabase, "_run_once", once)


FAULTS: dict[str, tuple[Patch, str, str, str]] = {
    "no transaction": (opens_no_transaction, "finish with a child", "session", "D3: half"),
    "a commit for granted": (takes_a_commit_for_granted, "bury worker", "session", "D1"),
    "a blind repeat": (repeats_blindly, "enqueue", "answer", "Duplicate"),
    "an outage untold": (says_nothing_of_an_outage, "enqueue many", "session", "D1"),
    "an outcome unknown": (knows_no_outcome_again, "finish a mixed batch", "answer", "Unrecog"),
    "dead connections": (clings_to_the_dead, "renew", "session", "pooled"),
}


@pytest.mark.parametrize("fault", first(6, FAULTS))
def test_a_seeded_fault_is_found(url: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """One deed, struck at each of its round trips, shows it."""
    patch, deed, kind, told = FAULTS[fault]
    assert deed in DEEDS
    report = Report("server", "postgres", SEED)
    patch(monkeypatch)
    with closing(Strikes(url, report)) as place:
        place.every(deed, kind, on_loop=False, pooled=True)
    assert any(told in violation for violation in report.violations), report.violations


def test_a_server_that_forgets_what_it_acknowledged_is_found(
    private_postgres: PrivatePostgres,
) -> None:
    """With asynchronous commits one of three crashes takes back what clients were told."""
    private_postgres.configure(synchronous_commit="off", wal_writer_delay="10s")
    try:
        with quiet():
            report = crashes(private_postgres, SEED, 3)
    finally:
        private_postgres.configure(synchronous_commit=None, wal_writer_delay=None)
    assert any("D1" in violation for violation in report.violations)
