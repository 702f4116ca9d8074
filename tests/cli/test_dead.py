"""`onward dead`: what the filter shows is what is touched, and nothing else."""

from __future__ import annotations

import json

import msgspec
import pytest

from onward.cli.failures import headline_of_start
from onward.failure import ErrorText
from onward.lifecycle import JobState
from onward.policy import Raised, Returned
from onward.store import store
from tests.cli.conftest import Meanwhile
from tests.cli.shell import Shell, on_terminal
from tests.support.scene import FATAL, RAISED, Scene


def dead_with(scene: Scene, message: str, **given: str) -> str:
    error = msgspec.json.encode(ErrorText(type="ApiError", message=message, traceback="x" * 5_000))
    return scene.attempt(scene.enqueue(**given), Raised(error=error.decode(), final=True))


def listed(shell: Shell, *words: str) -> set[str]:
    return {item["id"] for item in shell.json("dead", "list", *words)["items"]}


# --- list -----------------------------------------------------------------------------------------


def test_the_dead_are_listed_with_their_last_error(scene: Scene, shell: Shell) -> None:
    first, second = scene.dead(), dead_with(scene, "timeout after 30 s")
    scene.enqueue()
    document = shell.json("dead", "list")
    assert document["schema"] == "onward.dead.list/1"
    assert [item["id"] for item in document["items"]] == [second, first]
    assert document["items"][0]["error"] == "ApiError: timeout after 30 s"
    assert "shop.ApiError: no such user: 7" in shell("dead", "list").stdout


def test_the_filter_compares_names_and_looks_into_errors_without_wildcards(
    scene: Scene, shell: Shell
) -> None:
    kinds = ["a_b", "axb", "50%", "500", "back\\slash", "o'clock"]
    tasks = {kind: dead_with(scene, "boom", task=kind) for kind in kinds}
    errors = {kind: dead_with(scene, f"got {kind} here") for kind in kinds}
    for kind in kinds:
        assert listed(shell, "--task", kind) == {tasks[kind]}
        assert listed(shell, "--error-like", f"got {kind} here") == {errors[kind]}
    assert listed(shell, "--error-like", "%") == {errors["50%"]}


def test_pages_of_a_filter_follow_each_other(scene: Scene, shell: Shell) -> None:
    wanted = [dead_with(scene, "this"), dead_with(scene, "this")]
    for _ in range(3):
        dead_with(scene, "that")
    first = shell.json("dead", "list", "--error-like", "this", "--limit", "1")
    second = shell.json(
        "dead", "list", "--error-like", "this", "--limit", "1", "--before", first["next"]
    )
    assert [page["items"][0]["id"] for page in (first, second)] == sorted(wanted, reverse=True)


def test_an_error_of_which_only_the_start_was_read_is_still_told() -> None:
    for message in (
        "plain",
        'quo"ted',
        "back\\slash",
        "line\nbreak",
        "größe",
        "\U0001f600" * 700,
        "x" * 3000,
    ):
        error = ErrorText(type="shop.Bad", message=message, traceback="t" * 9_000)
        stored = msgspec.json.encode(error).decode()
        for cut in (2_000, 1_999, 1_998, 1_997):
            told = headline_of_start(stored[:cut]) or ""
            assert told.startswith("shop.Bad: ")
            assert f"shop.Bad: {message}".startswith(told)
            assert len(message) > 600 or told == f"shop.Bad: {message}"


def test_an_escape_that_was_cut_is_left_out() -> None:
    stored = '{"type":"E","message":"ab\\ud83d\\ude00"'
    assert {headline_of_start(stored[:end]) for end in range(25, len(stored) - 1)} == {
        "E: ab",
    }


def test_what_is_no_error_of_ours_is_shown_as_it_is() -> None:
    assert headline_of_start("lost in space") == "lost in space"
    assert headline_of_start(None) is None


# --- requeue and discard --------------------------------------------------------------------------


def test_a_filter_moves_what_it_shows_and_says_how_many(
    scene: Scene, shell: Shell, meanwhile: Meanwhile
) -> None:
    """Fifty of one kind and fifty of another; ten more of the first die before the move."""
    kind_a = {dead_with(scene, "boom", task="shop.a") for _ in range(50)}
    kind_b = {dead_with(scene, "boom", task="shop.b") for _ in range(50)}
    late: set[str] = set()
    meanwhile(lambda: late.update(dead_with(scene, "boom", task="shop.a") for _ in range(10)))
    result = shell("dead", "requeue", "--task", "shop.a", "--yes")
    assert result.stdout == "50 requeued\n"
    assert {scene.job(id).state for id in kind_a} == {JobState.QUEUED}
    assert {scene.job(id).state for id in kind_b | late} == {JobState.DEAD}
    assert len(late) == 10


def test_requeue_says_that_numbers_go_on_and_budgets_start_afresh(
    scene: Scene, shell: Shell
) -> None:
    id = scene.attempt(scene.attempt(scene.enqueue(max_attempts=2), RAISED), RAISED)
    told = shell("dead", "requeue", id, "--yes").stderr
    assert "Attempt numbers go on where they were" in told
    assert "budgets of failures and losses start afresh" in told
    assert scene.job(id).attempt == 3
    scene.attempt(scene.attempt(id, RAISED), RAISED)
    assert scene.job(id).state is JobState.DEAD
    assert [item["attempt"] for item in shell.json("dead", "list")["items"]] == [4]


def test_those_that_die_meanwhile_are_left_alone(
    scene: Scene, shell: Shell, meanwhile: Meanwhile
) -> None:
    early = {scene.dead() for _ in range(3)}
    late: list[str] = []
    meanwhile(lambda: late.append(scene.dead()))
    assert set(shell.json("dead", "requeue", "--all", "--yes")["ids"]) == early
    assert scene.job(late[0]).state is JobState.DEAD


def test_those_that_others_moved_meanwhile_are_left_alone(
    scene: Scene, shell: Shell, meanwhile: Meanwhile
) -> None:
    moved, died_again, still = scene.dead(), scene.dead(), scene.dead()

    def others() -> None:
        scene.requeue(moved)
        scene.attempt(scene.requeue(died_again), FATAL)

    meanwhile(others)
    told = shell("dead", "requeue", "--task", "shop.mail", "--yes").stdout
    assert told == "1 requeued; 2 had changed meanwhile and were left alone\n"
    assert scene.job(still).state is JobState.QUEUED
    assert scene.job(died_again).state is JobState.DEAD


def test_many_are_moved_in_steps(
    scene: Scene, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.cli.bulk.PAGE", 3)
    for _ in range(8):
        scene.dead()
    assert shell("dead", "discard", "--all", "--yes").stdout == "8 discarded\n"
    assert scene.database.read(store.counts)["cancelled"] == 8


def test_discard_keeps_the_reason(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    shell("dead", "discard", id, "--yes", "--reason", "task was removed")
    document = shell.json("job", "show", id)
    assert (document["state"], document["reason"]) == ("cancelled", "task was removed")


def test_a_dry_run_changes_nothing(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    result = shell("dead", "discard", "--all", "--dry-run")
    assert result.stdout == "1 would be discarded\n"
    assert id in result.stderr
    assert scene.job(id).state is JobState.DEAD


def test_a_limit_takes_the_newest(scene: Scene, shell: Shell) -> None:
    ids = [scene.dead() for _ in range(3)]
    document = shell.json("dead", "requeue", "--all", "--yes", "--limit", "2")
    assert document["schema"] == "onward.dead.requeue/1"
    assert (document["matched"], document["changed"]) == (2, 2)
    assert set(document["ids"]) == set(ids[1:])


def test_ids_that_are_not_dead_are_refused_and_nothing_is_touched(
    scene: Scene, shell: Shell
) -> None:
    id, alive = scene.dead(), scene.enqueue()
    over = scene.attempt(scene.enqueue(), Returned(result="1"))
    for other in (alive, over):
        assert "cannot requeue job" in shell("dead", "requeue", id, other, "--yes", code=6).stderr
    assert scene.job(id).state is JobState.DEAD


def test_an_error_is_found_without_wildcards_and_only_its_job_is_requeued(
    scene: Scene, shell: Shell
) -> None:
    kinds = ["a_b", "axb", "50%", "500", "back\\slash", "o'clock"]
    ids = {kind: dead_with(scene, f"got {kind} here") for kind in kinds}
    assert shell("dead", "requeue", "--error-like", "50%", "--yes").stdout == "1 requeued\n"
    found = {kind: scene.job(id).state.value for kind, id in ids.items()}
    assert found == dict.fromkeys(kinds, "dead") | {"50%": "queued"}


def test_the_dead_of_one_queue_are_discarded(scene: Scene, shell: Shell) -> None:
    ids = {queue: [scene.dead(queue=queue) for _ in range(10)] for queue in "ab"}
    assert shell("dead", "discard", "--queue", "a", "--yes").stdout == "10 discarded\n"
    assert {scene.job(id).state.value for id in ids["a"]} == {"cancelled"}
    assert {scene.job(id).state.value for id in ids["b"]} == {"dead"}


def test_the_dead_are_chosen_by_when_they_died(scene: Scene, shell: Shell) -> None:
    with scene.ago(86_400.0 + 60):
        old = {scene.dead() for _ in range(3)}
        late = scene.enqueue()
    young = {scene.dead(), scene.attempt(late, FATAL)}
    assert listed(shell, "--older-than", "1d") == old
    assert listed(shell, "--older-than", "3d") == set()
    document = shell.json("dead", "discard", "--older-than", "1d", "--yes")
    assert set(document["ids"]) == old
    assert {scene.job(id).state.value for id in young} == {"dead"}
    told = shell("dead", "requeue", "--older-than", "1d", "--yes", code=3).stderr
    assert "no dead job matches: older than 1 d; nothing was changed" in told


def test_a_filter_that_matches_nothing_is_not_found(scene: Scene, shell: Shell) -> None:
    scene.dead()
    told = shell("dead", "discard", "--queue", "nope", "--yes", code=3).stderr
    assert "no dead job matches: queue 'nope'; nothing was changed" in told
    shell("dead", "requeue", "ffffffff", "--yes", code=3)


def test_all_of_none_is_done(scene: Scene, shell: Shell) -> None:
    assert shell("dead", "requeue", "--all", "--yes").stdout == "0 requeued\n"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--all", "--task", "x"),
        ("01", "--all"),
        ("01", "--queue", "x"),
        ("--error-like", ""),
        ("--all", "--limit", "0"),
    ],
    ids=" ".join,
)
def test_unclear_orders_are_wrong_usage(scene: Scene, shell: Shell, words: tuple[str, ...]) -> None:
    id = scene.dead()
    for verb in ("requeue", "discard"):
        shell("dead", verb, *words, "--yes", code=2)
    assert scene.job(id).state is JobState.DEAD


# --- asking ---------------------------------------------------------------------------------------


def test_without_a_terminal_and_without_yes_it_refuses(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    assert "--yes" in shell("dead", "discard", "--all", code=2).stderr
    assert scene.job(id).state is JobState.DEAD


@pytest.mark.parametrize(
    ("answer", "code", "state"), [("y\n", 0, "queued"), ("n\n", 1, "dead"), ("\n", 1, "dead")]
)
def test_on_a_terminal_it_shows_a_sample_and_asks(
    scene: Scene, shell: Shell, answer: str, code: int, state: str
) -> None:
    ids = [scene.dead() for _ in range(7)]
    status, text = on_terminal(
        "dead", "requeue", "--task", "shop.mail", "--database", shell.url, answer=answer
    )
    assert status == code
    assert "7 dead jobs (the newest died " in text
    assert ids[-1] in text
    assert ids[0] not in text
    assert "… and 2 more" in text
    assert "Requeue these 7? [y/N]" in text
    assert {scene.job(id).state.value for id in ids} == {state}


def test_a_question_that_is_interrupted_changes_nothing(scene: Scene, shell: Shell) -> None:
    id = scene.dead()
    status, text = on_terminal("dead", "discard", "--all", "--database", shell.url, answer="\x04")
    assert status == 130
    assert "interrupted" in text
    assert scene.job(id).state is JobState.DEAD


def test_json_is_one_document(scene: Scene, shell: Shell) -> None:
    scene.dead()
    text = shell("dead", "discard", "--all", "--yes", "--json").stdout
    assert json.loads(text)["changed"] == 1
