"""One look at a whole system: what needs a human, said by the queue it is about."""

from __future__ import annotations

from onward import Onward
from onward.overview import Alarm, alarms, look
from onward.task import SyncTask
from tests.store.builders import hand, loosen, register


def unserved(app: Onward) -> list[Alarm]:
    return [alarm for alarm in alarms(look(app.database)) if alarm.code == "queue_unserved"]


def test_jobs_that_no_worker_takes_are_an_alarm_which_names_what_is_served_instead(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """A worker for a name with a slip in it is no worker for the queue."""
    send.using(queue="mails").enqueue()
    (alarm,) = unserved(app)
    assert alarm.subject == "mails"
    assert alarm.what == "mails: 1 waiting, 0 workers (no worker is alive)"
    assert alarm.fix.endswith(" -q mails")
    register(app.database, queues=("default", "mail"))
    (alarm,) = unserved(app)
    assert alarm.what.endswith("(served: default, mail); did you mean mail?")
    register(app.database, queues=("mails",))
    assert unserved(app) == []


def test_a_damaged_list_of_a_worker_names_nothing_and_takes_no_look_down(
    app: Onward, send: SyncTask[..., int]
) -> None:
    """PostgreSQL keeps such a list as one; in SQLite it is a text, which a hand may have spoilt."""
    send.enqueue()
    worker = register(app.database)
    if app.database.dialect == "postgres":
        spoilt = ["'{}'"]
    else:
        spoilt = ["'[\"default\"'", "'{}'", "'[1]'", "x'ff'"]
    for text in spoilt:
        with hand(app.database) as dba:
            if text.startswith("x"):
                loosen(dba)
            dba.sql(f"UPDATE onward.worker SET queues = {text}, tasks = {text}")
        seen = look(app.database)
        (line,) = seen.workers
        assert (line.id, line.queues, line.tasks) == (worker, (), ())
        assert [alarm.subject for alarm in unserved(app)] == ["default"]
