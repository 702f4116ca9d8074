"""How a job is to be enqueued: what cannot work is refused at the caller's line."""

from __future__ import annotations

import enum
import math
import time
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from onward import BURY, Backoff, InvalidOption, Onward, Settings
from onward.ids import new_id
from onward.running import Current
from onward.store import store
from onward.task import SyncTask
from onward.text import safe_repr
from tests.support import by_hand

# --- names ----------------------------------------------------------------------------------------

GOOD_NAMES = [
    "all",
    "default",
    "in ner",
    "NULL",
    "None",
    "it's; DROP TABLE job --",
    'say "so"',
    "📦",
    "é" * 200,
    "x" * 200,
    "%s%n",
    "$1",
    "{0}",
    "../../etc",
]
BAD_NAMES = [
    "*",
    "a,b",
    " lead",
    "trail ",
    "-q",
    "--",
    "x" * 201,
    "x" * 300,
    "",
    " ",
    "a\nb",
    "a\x00b",
    "a\x1b[31mb",
    "a\ud800b",
    "a\u202eb",
    "a\u200bb",
    "a:b",
    "a=b",
]


def work(what: str = "") -> None:
    """What the tasks here are made of."""


@pytest.mark.parametrize("name", GOOD_NAMES, ids=ascii)
def test_a_queue_of_a_good_name_comes_back_equal_and_can_be_reached(
    app: Onward, send: SyncTask[..., int], name: str
) -> None:
    job = send.using(queue=name).enqueue()
    assert app.get(job.id).queue == name
    by_hand.succeed(app, job.id)  # By a claim for exactly this name.


def test_a_worker_for_exactly_such_a_queue_runs_its_job(
    app: Onward, send: SyncTask[..., int]
) -> None:
    for name in GOOD_NAMES:
        job = send.using(queue=name).enqueue("x")
        with app.worker(queues=[name]):
            assert job.wait(timeout=10) == 3


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_a_queue_of_another_name_is_refused_by_it(idle_app: Onward, name: str) -> None:
    for refusing in (idle_app.task(work).using, idle_app.task):
        with pytest.raises(InvalidOption) as refused:
            refusing(queue=name)
        assert repr(name[:60]) in refused.value.what
        assert "1 to 200 printable characters" in refused.value.why


@pytest.mark.parametrize("name", ["", "a,b", "x" * 201, "a\x00b", 5])
def test_a_task_with_such_a_name_is_refused_where_it_is_declared(
    idle_app: Onward, name: Any
) -> None:
    with pytest.raises(InvalidOption, match=r"task .* cannot be used as a name"):
        idle_app.task(name=name)(work)


def test_a_name_from_an_enum_is_its_text(app: Onward, send: SyncTask[..., int]) -> None:
    class Queues(str, enum.Enum):  # noqa: UP042 - whose text is not what str() says
        MAIL = "mail"

    job = send.using(queue=Queues.MAIL).enqueue()
    assert type(job.queue) is str
    assert job.queue == app.get(job.id).queue == "mail"


# --- options --------------------------------------------------------------------------------------

BAD_OPTIONS: list[dict[str, Any]] = [
    {"queue": 5},
    {"queue": b"mail"},
    {"priority": 101},
    {"priority": -101},
    {"priority": 1.5},
    {"priority": True},
    {"priority": "high"},
    {"priority": 10**5000},
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": math.nan},
    {"timeout": math.inf},
    {"timeout": "30"},
    {"timeout": timedelta(0)},
    {"timeout": timedelta.max},
    {"timeout": True},
    {"max_attempts": 0},
    {"max_attempts": 1.0},
    {"max_attempts": 10**6},
    {"max_losses": -1},
    {"max_losses": "3"},
]

BAD_USING: list[dict[str, Any]] = [
    {"run_after": datetime(2030, 1, 1)},  # noqa: DTZ001
    {"run_after": datetime.max.replace(tzinfo=UTC)},
    {"run_after": date(2030, 1, 1)},
    {"run_after": "tomorrow"},
    {"run_after": math.nan},
    {"run_after": math.inf},
    {"run_after": timedelta(days=4000)},
    {"run_after": True},
    {"id": "job-1"},
    {"id": 5},
    {"id": ""},
    {"id": "x" * 36},
]


@pytest.mark.parametrize(
    "options", BAD_OPTIONS + BAD_USING, ids=lambda options: safe_repr(options, 60)
)
def test_an_option_that_cannot_work_is_refused_at_the_callers_line(
    idle_app: Onward, options: dict[str, Any]
) -> None:
    (name,) = options
    task = idle_app.task(work)
    with pytest.raises(InvalidOption) as refused:
        task.using(**options)
    assert name in refused.value.what or name == "id"
    assert refused.value.why


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: safe_repr(options, 60))
def test_a_task_that_cannot_work_is_refused_where_it_is_declared(
    idle_app: Onward, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption):
        idle_app.task(**options)


@pytest.mark.parametrize(
    "rules",
    [
        {"backoff": 5},
        {"backoff": Backoff},
        {"on_error": {ValueError: "bury"}},
        {"on_error": {"ValueError": BURY}},
        {"on_error": {ValueError: None}},
        {"on_error": {int: BURY}},
        {"on_error": [ValueError]},
        {"on_error": ValueError},
        {"on_error": {ValueError}},
        {"on_error": "bury"},
        {"isolation": "thread"},
        {"isolation": ["process"]},
    ],
    ids=str,
)
def test_a_rule_for_failures_that_cannot_work_is_refused(
    idle_app: Onward, rules: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption) as refused:
        idle_app.task(**rules)
    assert refused.value.fix


@pytest.mark.parametrize("base", [0, -1, math.nan, math.inf])
def test_a_backoff_without_a_positive_base_is_refused(base: float) -> None:
    with pytest.raises(InvalidOption, match="base"):
        Backoff(base=base)


@pytest.mark.parametrize("failures", [1, 64, 1_023, 2_000, 100_000])
def test_a_delay_after_absurdly_many_failures_is_capped_and_can_be_stored(
    app: Onward, send: SyncTask[..., int], failures: int
) -> None:
    assert Backoff(cap=3600, jitter=0).delay(max(failures, 10), 0) == 3600
    longest = Backoff(cap=None, jitter=0).delay(failures, 0)
    assert 0 < longest <= 10 * 365 * 86_400
    job = send.using(run_after=longest).enqueue()
    assert app.get(job.id).run_at > datetime.now(UTC)


def test_options_arrive_as_they_were_given(app: Onward, send: SyncTask[..., int]) -> None:
    job = send.using(
        queue="mail", priority=-7, max_attempts=2, max_losses=9, timeout=timedelta(seconds=90)
    ).enqueue("x", to="me")
    stored = app.database.read(by_hand.store.get, job.id)
    assert (stored.queue, stored.priority, stored.timeout) == ("mail", -7, 90.0)
    assert (stored.max_attempts, stored.max_losses) == (2, 9)
    assert app.get(job.id).args == {"what": "x", "to": "me"}


@pytest.mark.parametrize(
    ("options", "losses"),
    [({}, 3), ({"max_attempts": 1}, 0), ({"max_attempts": 1, "max_losses": 2}, 2)],
    ids=str,
)
def test_one_attempt_is_at_most_one_unless_said_otherwise(
    app: Onward, send: SyncTask[..., int], options: dict[str, Any], losses: int
) -> None:
    job = send.using(**options).enqueue()
    assert app.database.read(by_hand.store.get, job.id).max_losses == losses


def test_what_using_leaves_out_stays_and_the_task_itself_does_not_change(
    app: Onward, send: SyncTask[..., int]
) -> None:
    urgent = send.using(priority=50)
    both = urgent.using(queue="mail")
    assert (both.options.priority, both.options.queue) == (50, "mail")
    assert (urgent.options.queue, send.options.priority) == ("default", 0)
    assert both.name == send.name


@pytest.mark.parametrize(
    "settings",
    [
        {"lease": 0},
        {"beat": 8.0},
        {"beat": 0},
        {"poll": math.nan},
        {"poll": math.inf},
        {"sweep": "2"},
        {"grace": -1},
        {"prune_step": 0},
        {"prune_step": 0.5},
        {"keep_succeeded": -1},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(InvalidOption, match=name) as refused:
        Settings(**settings)
    assert refused.value.fix


@pytest.mark.parametrize(
    "settings", [{"lease": 5}, {}, Settings, 5.0, "lease=5", False], ids=lambda given: repr(given)
)
def test_settings_of_another_kind_are_refused_where_the_app_is_made(settings: Any) -> None:
    with pytest.raises(InvalidOption, match="settings=") as refused:
        Onward("sqlite:///never-opened.db", settings=settings)
    assert "settings=Settings(" in refused.value.fix


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        (Path("/tmp/x.db"), "Onward('sqlite:////tmp/x.db')"),
        (Path("x.db"), "Onward('sqlite:///x.db')"),
        (PurePosixPath("a/50%#.db"), "Onward('sqlite:///a/50%25%23.db')"),
        (b"sqlite:///x.db", "sqlite:///onward.db"),
        (b"postgresql://me:s3cret@db/shop", "postgresql://"),
        (b"", "sqlite:///onward.db"),
        (5, "sqlite:///onward.db"),
        (False, "sqlite:///onward.db"),
        (["sqlite:///x.db"], "sqlite:///onward.db"),
    ],
    ids=str,
)
def test_a_url_that_is_no_text_is_refused_with_one_that_is(url: Any, fix: str) -> None:
    with pytest.raises(InvalidOption, match="is no text") as refused:
        Onward(url)
    assert fix in refused.value.fix
    assert "s3cret" not in str(refused.value)


def test_without_a_url_the_default_counts(
    monkeypatch: pytest.MonkeyPatch, idle_app: Onward
) -> None:
    """None and an empty text are what is found where nothing was set."""
    monkeypatch.setenv("ONWARD_URL", "sqlite:///elsewhere.db")
    for url in (None, ""):
        assert Onward(url).url == "sqlite:///elsewhere.db"
    with pytest.raises(InvalidOption, match="is no text"):
        idle_app.use(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="listen_url is no text"):
        Onward("postgresql://db/shop", listen_url=Path("/tmp/x"))  # type: ignore[arg-type]


def test_a_lease_brings_its_beat_along() -> None:
    assert Settings().with_lease(3).beat == 1
    assert Settings(keep_succeeded=None, grace=0).keep_succeeded is None


# --- when -----------------------------------------------------------------------------------------


class NoOffset(tzinfo):
    """A zone that does not say what it is: a naive time in disguise."""

    def utcoffset(self, _: datetime | None) -> None:
        return None


def in_chicago(fold: int) -> datetime:
    """Half past one in the night when the clocks go back: it happens twice."""
    return datetime(2040, 11, 4, 1, 30, tzinfo=ZoneInfo("America/Chicago"), fold=fold)


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2040, 6, 1, 12, 0, 0, 123_456, tzinfo=UTC),
        datetime(2040, 6, 1, 12, 0, 0, 999_999, tzinfo=timezone(timedelta(hours=5, minutes=45))),
        datetime(2040, 6, 1, 12, 0, tzinfo=ZoneInfo("America/Chicago")),
        in_chicago(0),
        in_chicago(1),
        datetime(8999, 12, 31, tzinfo=UTC),
    ],
    ids=str,
)
def test_an_aware_moment_is_stored_to_the_microsecond(
    app: Onward, send: SyncTask[..., int], moment: datetime
) -> None:
    job = send.using(run_after=moment).enqueue()
    assert app.get(job.id).run_at == moment.astimezone(UTC)


def test_the_two_halves_of_a_repeated_hour_are_an_hour_apart(
    app: Onward, send: SyncTask[..., int]
) -> None:
    first, second = (
        app.get(send.using(run_after=in_chicago(fold)).enqueue().id).run_at for fold in (0, 1)
    )
    assert second - first == timedelta(hours=1)


@pytest.mark.parametrize("zone", [None, NoOffset()], ids=["no zone", "a zone without an offset"])
def test_a_naive_moment_is_refused_whatever_the_machines_zone(
    idle_app: Onward, zone: tzinfo | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/Chicago")
    time.tzset()
    try:
        with pytest.raises(InvalidOption, match="no time zone"):
            idle_app.task(work).using(run_after=datetime(2040, 1, 1, tzinfo=zone))
    finally:
        monkeypatch.undo()
        time.tzset()


class Text(str):
    """A text of a class of its own, as libraries make them."""


class Number(int):
    """A number of a class of its own."""


@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "follow-up"])
def test_values_of_classes_of_their_own_are_plain_ones_from_the_call_on(
    app: Onward, send: SyncTask[..., int], how: str
) -> None:
    id = new_id()
    task = send.using(
        id=Text(id),
        queue=Text("mail"),
        priority=Number(3),
        max_attempts=Number(4),
        max_losses=Number(1),
        timeout=Number(9),
    )
    match how:
        case "enqueue":
            task.enqueue()
        case "enqueue_many":
            app.enqueue_many([task.call(), send.call()])
        case _:
            me = Current(by_hand.claim(app, send.enqueue().id), app)
            me.enqueue(task.call())
            app.database.run(store.enqueue, me.follow_ups)
    job = app.database.read(store.get, app.get(Text(id)).id)
    assert (job.queue, job.priority, job.max_attempts, job.max_losses) == ("mail", 3, 4, 1)


@pytest.mark.parametrize("run_after", [date(2030, 1, 1), "tomorrow"])
def test_who_is_refused_a_due_time_is_shown_a_moment_too(
    send: SyncTask[..., int], run_after: Any
) -> None:
    with pytest.raises(InvalidOption) as refused:
        send.using(run_after=run_after)
    assert "datetime.now(UTC)" in str(refused.value)


@pytest.mark.parametrize("run_after", [0, -5, timedelta(days=-1), datetime(1900, 1, 1, tzinfo=UTC)])
def test_a_time_that_is_past_is_now(app: Onward, send: SyncTask[..., int], run_after: Any) -> None:
    job = app.get(send.using(run_after=run_after).enqueue().id)
    assert job.run_at == job.created_at
    by_hand.succeed(app, job.id)


@pytest.mark.parametrize("run_after", [30, 30.0, timedelta(seconds=30)])
def test_a_delay_counts_from_the_databases_now(
    app: Onward, send: SyncTask[..., int], run_after: Any
) -> None:
    job = app.get(send.using(run_after=run_after).enqueue().id)
    assert abs(job.run_at - job.created_at - timedelta(seconds=30)) < timedelta(milliseconds=1)


def test_of_two_times_the_last_one_counts(app: Onward, send: SyncTask[..., int]) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    sooner = send.using(run_after=timedelta(days=10)).using(run_after=tomorrow)
    assert app.get(sooner.enqueue().id).run_at == tomorrow
    now = app.get(send.using(run_after=tomorrow).using(run_after=0).enqueue().id)
    assert now.run_at == now.created_at


def test_a_worker_starts_a_job_at_its_instant_whatever_zone_it_was_given_in(
    app: Onward, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, float] = {}

    @app.task(name="shop.note")
    def note(zone: str) -> None:
        ran[zone] = time.time()

    zones = [UTC, timezone(timedelta(hours=5, minutes=45)), ZoneInfo("America/Chicago")]
    monkeypatch.setenv("TZ", "America/Chicago")
    time.tzset()
    try:
        with app.worker():
            due = time.time() + 1
            moments = [datetime.fromtimestamp(due, zone) for zone in zones]
            jobs = [note.using(run_after=moment).enqueue(str(moment)) for moment in moments]
            for job in jobs:
                job.wait(timeout=10)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert len(ran) == len(zones)
    for at in ran.values():
        # Within a second on a machine of its own; the tests may share theirs.
        assert -0.01 < at - due < 5


def test_a_lambda_is_no_task(app: Onward) -> None:
    with pytest.raises(InvalidOption, match="a lambda has no name"):
        app.task(lambda: None)


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True])
def test_a_worker_without_slots_is_refused_where_it_is_made(app: Onward, concurrency: Any) -> None:
    with pytest.raises(InvalidOption, match="concurrency"):
        app.worker(concurrency=concurrency)
