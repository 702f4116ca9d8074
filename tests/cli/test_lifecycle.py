"""`onward lifecycle` and the page in the docs: made from the table, and never stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from onward import diagram
from onward.cli.root import root
from onward.lifecycle import ATTEMPT_ENDS, JOB_MOVES, TERMINAL, AttemptState, JobState, WorkerState

PAGE = Path(__file__).parents[2] / "docs" / "lifecycle.md"


def run(*words: str) -> str:
    result = CliRunner().invoke(root, ["lifecycle", *words])
    assert result.exit_code == 0
    return result.stdout


def test_the_page_in_the_docs_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == diagram.page(), (
        "make it again: onward lifecycle --format markdown > docs/lifecycle.md"
    )
    assert run("--format", "markdown") == diagram.page()


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_tables_have_every_state_and_every_move(form: str) -> None:
    text = run("--format", form)
    for state in (*JobState, *AttemptState, *WorkerState):
        assert re.search(rf"^\W*{state}\W", text, re.MULTILINE)
    for (before, event), after in JOB_MOVES.items():
        assert re.search(rf"{before} > {after}`?[\t |]+{event}\b", text)


def test_the_diagram_has_every_move_and_no_other() -> None:
    text = run("--format", "mermaid")
    found = {
        (before, event.strip(), after)
        for before, after, events in re.findall(r"(\w+) --> (\w+): (.*)", text)
        for event in events.split(",")
    }
    moves = {(str(before), str(event), str(after)) for (before, event), after in JOB_MOVES.items()}
    assert found == moves
    assert text.startswith("stateDiagram-v2\n    [*] --> waiting: enqueue\n")
    assert {s for s in JobState if f"{s} --> [*]" in text} == TERMINAL


def test_the_drawing_has_every_arrow() -> None:
    text = diagram.drawing()
    assert len(text.splitlines()) == len({(b, a) for (b, _), a in JOB_MOVES.items()}) + len(
        TERMINAL
    )
    for _, event in JOB_MOVES:
        assert event in text


def test_json_is_the_table() -> None:
    document = json.loads(run("--json"))
    assert document == json.loads(run("--format", "json"))
    assert document["schema"] == "onward.lifecycle/1"
    moves = {(m["from"], m["event"]): m["to"] for m in document["moves"]}
    assert moves == {(str(b), str(e)): str(a) for (b, e), a in JOB_MOVES.items()}
    ends = {(m["from"], m["event"]): set(m["attempt_ends"]) for m in document["moves"]}
    assert all(ends[move] == set(ATTEMPT_ENDS.get(move, ())) for move in JOB_MOVES)
