"""The benchmarks run: at a hundredth of their size, and without a look at how fast anything is."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import bare, drains, enqueues, long, pages, stage
from benchmarks.measure import Line, compared, in_turn, line


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    """The server of the tests, synced or not."""
    monkeypatch.setattr(stage, "_server", [postgres_url])


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_onward_and_the_bare_loop_drain_the_same_number_of_jobs(dialect: str) -> None:
    assert drains.drain_bare(dialect, "cold", 2_000) > 0
    assert drains.drain_bare(dialect, "plain", 2_000) > 0
    assert drains.drain_onward(dialect, 2_000) > 0


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_enqueues_are_timed_on_both_sides(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("ONE_BY_ONE", 20), ("PRODUCERS", 5), ("EACH", 4), ("BULK", 500)):
        monkeypatch.setattr(enqueues, name, small)
    marks = [each.mark for each in enqueues.one_by_one(dialect, 1)]
    assert marks == ["S4"] * (5 if dialect == "sqlite" else 4) + ["S5"]
    assert [each.mark for each in enqueues.in_bulk(dialect, 1)] == ["S6", "S6"]


def test_many_clients_enqueue_with_and_without_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("CLIENTS", 2), ("CLIENT_SECONDS", 0.2), ("STARTING", 1.5)):
        monkeypatch.setattr(enqueues, name, small)
    silent, woken = enqueues.clients(1)
    assert (silent.mark, woken.mark) == ("S15", "S15")
    assert silent.value > 0
    assert woken.value > 0


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_full_tables_are_filled_and_drained_beside(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, small in (("KEPT", 300), ("UNKNOWN", 50), ("JOBS", 500)):
        monkeypatch.setattr(drains, name, small)
    lines = list(drains.full_tables(dialect, 1))
    assert [each.mark for each in lines] == ["S8"] * 3
    assert all(each.value > 0 for each in lines)


def test_a_snapshot_is_held_over_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("STEP", 200), ("STEPS", 4)):
        monkeypatch.setattr(drains, name, small)
    assert [each.mark for each in drains.held_snapshot(1)] == ["S9"] * 3


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_sleepers_and_many_jobs_are_measured_in_a_worker(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, small in (("SLEEPERS", 50), ("MILLION", 400), ("FIRST", 200)):
        monkeypatch.setattr(long, name, small)
    took, grown = long.sleepers(dialect, 1)
    assert took.value >= 0
    assert grown.unit == "KB"
    held, _ = long.million(dialect, 1)
    assert held.value > 10


def test_the_bare_cold_loop_leaves_a_job_as_onward_does() -> None:
    """It moves to the cold table with its attempt, and only if it is as it was seen."""
    with stage.fresh("sqlite") as place:
        bare.make_sqlite(place.url)
        bare.fill_sqlite(place.url, 3)
        connection = bare.open_sqlite(place.url)
        with bare.transaction(connection):
            ((id_, attempt, _), *_) = connection.execute(bare.SQLITE_CLAIM, ("w", 3)).fetchall()
            for worker in ("another", "w"):
                seen = (id_, attempt, worker)
                connection.execute(bare.SQLITE_COLD_INSERT, ("null", *seen))
                connection.execute(bare.SQLITE_COLD_DELETE, seen)
        connection.close()
        assert place.query("SELECT count(*) FROM finished") == [(1,)]
        assert place.query("SELECT count(*) FROM job") == [(2,)]


def test_runs_take_turns_and_medians_are_compared() -> None:
    order: list[str] = []

    def run(name: str, figure: float) -> float:
        order.append(name)
        return figure

    found = in_turn({"a": lambda: run("a", 2.0), "b": lambda: run("b", 1.0)}, 2)
    assert order == ["a", "b", "a", "b"]
    slow = compared("S0", "b", found["b"], found["a"], "a", target=0.6)
    assert (slow.ratio, slow.reached) == (0.5, False)
    assert line("S0", "a", found["a"]).reached is None


def test_figures_fill_the_page_and_the_chart() -> None:
    lines = [
        Line(**each) for each in msgspec.to_builtins([line("S1", "one", [1.0, 3.0])._asdict()])
    ]
    page = pages.fill_in("<!-- x -->\nold\n<!-- end of x -->", "x", pages.table(lines))
    assert "old" not in page
    assert "| S1 | one | 2 jobs/s | 1 – 3 |" in page
    picture = pages.drawn([pages.Bar("Onward", 10.0, ours=True), pages.Bar("x", 5.0, ours=False)])
    assert picture.count("<rect") == 2
    with pytest.raises(ValueError, match="no place for y"):
        pages.fill_in(page, "y", "")
