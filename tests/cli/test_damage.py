"""Rows that nobody should have written: they are shown, marked, and take no list down."""

from __future__ import annotations

import json
import pickle
from contextlib import closing

import pytest
from click.testing import Result

from onward import JobFailed, Onward
from onward.errors import PayloadUnreadable
from tests.cli.shell import Shell, on_terminal
from tests.store.builders import Hand, hand
from tests.support.scene import Scene
from tests.test_invariants import unguard

TERRIBLE = "a\x1b[2J\x07b\u202ec\rd\x9be\u2028f\tg"

LISTS = [
    ("status",),
    ("job", "list"),
    ("dead", "list"),
    ("workers", "--all"),
    ("doctor",),
    ("db", "status"),
]


def moment(dba: Hand, seconds: float) -> str:
    return str(seconds) if dba.dialect == "sqlite" else f"to_timestamp({seconds})"


@pytest.fixture
def damaged(scene: Scene) -> dict[str, str]:
    """Damaged jobs by what is wrong with them, among sound ones of every kind."""
    scene.everything()
    ids = {
        "state": scene.enqueue(),
        "json": scene.enqueue(args='{"password": "hunter2", '),
        "error": scene.dead(),
        "no error": scene.dead(),
        "year 9999": scene.enqueue(),
        "year 0": scene.enqueue(),
        "text": scene.enqueue(task=TERRIBLE, queue=TERRIBLE),
    }
    with hand(scene.database) as dba:
        unguard(dba)
        dba.sql("UPDATE onward.job SET state = 'retrying' WHERE id = :id", id=ids["state"])
        for name, seconds in (("year 9999", 253402300000.0), ("year 0", -62135596900.0)):
            due = moment(dba, seconds)
            dba.sql(f"UPDATE onward.job SET run_at = {due} WHERE id = :id", id=ids[name])
        dba.sql(
            "UPDATE onward.attempt SET error = :error WHERE job = :id",
            id=ids["error"],
            error="E" * 5_000_000,
        )
        dba.sql("UPDATE onward.attempt SET reason = NULL WHERE job = :id", id=ids["no error"])
    return ids


def test_lists_show_the_others_and_mark_the_damaged(
    scene: Scene, shell: Shell, damaged: dict[str, str]
) -> None:
    for words in LISTS:
        code = 1 if words in {("status",), ("doctor",)} else 0
        result = shell(*words, code=code)
        assert json.loads(shell(*words, "--json", code=code).stdout)
        assert "hunter2" not in result.output
        check_list(words, result, damaged)


def check_list(words: tuple[str, ...], result: Result, damaged: dict[str, str]) -> None:
    if words == ("job", "list"):
        assert len(result.stdout.splitlines()) == 1 + 19 + len(damaged)
        assert (
            f"damaged: {damaged['state']}: state 'retrying' is none that Onward knows"
            in result.stderr
        )
        assert f"damaged: {damaged['year 0']}: run_at" in result.stderr
        assert damaged["year 9999"] not in result.stderr
    if words == ("dead", "list"):
        assert "E" * 300 in result.stdout
        assert len(result.stdout) < 50_000
        assert f"damaged: {damaged['no error']}: reason is missing" in result.stderr


def test_every_damaged_job_can_be_looked_at(
    scene: Scene, shell: Shell, damaged: dict[str, str]
) -> None:
    marks = {
        "state": "state 'retrying' is none that Onward knows",
        "json": "24 characters that are no JSON",
        "year 0": "is no time",
    }
    for name, id in damaged.items():
        result = shell("job", "show", id)
        document = shell.json("job", "show", id)
        assert document["id"] == id
        assert len(result.stdout) < 200_000
        if name in marks:
            assert marks[name] in result.stderr
            assert document["damaged"]
        assert "hunter2" not in result.output + json.dumps(document)


def test_a_damaged_job_is_not_moved(scene: Scene, shell: Shell, damaged: dict[str, str]) -> None:
    for words in (["job", "cancel"], ["job", "requeue"], ["dead", "requeue", "--yes"]):
        told = shell(*words, damaged["state"], code=1).stderr
        assert "is damaged: its state is 'retrying'" in told


def test_no_control_character_reaches_a_terminal(
    scene: Scene, shell: Shell, damaged: dict[str, str]
) -> None:
    words: list[list[str]] = [["job", "list"], ["job", "show", damaged["text"]], ["status"]]
    for each in words:
        environment = {"NO_COLOR": "1"}
        _, text = on_terminal(*each, "--database", shell.url, columns=200, **environment)
        assert set(text) & set(TERRIBLE) <= set("abcdefg[2J")
        plain = shell(*each, code=1 if each == ["status"] else 0).output
        document = shell(*each, "--json", code=1 if each == ["status"] else 0).stdout
        assert not set(plain) & {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028"}
        assert not set(document) & {"\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028"}
    assert shell.json("job", "show", damaged["text"])["task"] == TERRIBLE


def test_a_pickle_in_any_text_is_told_by_lists_and_handles(
    scene: Scene, shell: Shell, ready_database_url: str
) -> None:
    """Texts that a foreign hand has replaced; on SQLite, where a column takes one, by a BLOB."""
    jobs = scene.everything()
    done, gone, dead = jobs["succeeded"], jobs["discarded"], jobs["dead"]
    found = pickle.dumps(object(), 0 if scene.database.dialect == "postgres" else 5)
    pickled = found.decode() if scene.database.dialect == "postgres" else found
    with hand(scene.database) as dba:
        unguard(dba)
        dba.sql("UPDATE onward.finished SET result = :p, args = :p, reason = :p", p=pickled)
        dba.sql("UPDATE onward.attempt SET error = :p, reason = :p", p=pickled)
        dba.sql("UPDATE onward.job SET args = :p", p=pickled)
    for words in (*LISTS, ("dead", "list", "--error-like", "builtins")):
        code = 1 if words in {("status",), ("doctor",)} else 0
        assert json.loads(shell(*words, "--json", code=code).stdout)
        shell(*words, code=code)
    for id in jobs.values():
        shell("job", "show", id)
        assert any("args" in flaw for flaw in shell.json("job", "show", id)["damaged"])
    with closing(Onward(ready_database_url)) as app:
        for read in (lambda: app.get(done).result, lambda: app.get(done).args, app.get(done).wait):
            with pytest.raises(PayloadUnreadable, match=r"no JSON|malformed"):
                read()
        assert app.get(gone).reason
        with pytest.raises(JobFailed):
            app.get(dead).wait()
