"""The demo runs as it is shipped, and what it says can be relied on: its checks can fail."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from onward import JobState, Onward
from onward.demo import check, files, report, scene, tour
from onward.demo.check import compare
from onward.demo.files import Sight, choose
from onward.demo.look import Line, read_jobs
from onward.demo.report import Outcome
from onward.demo.tasks import app as demo_app
from onward.demo.work import is_refused

COMMAND = [sys.executable, "-m", "onward.cli", "demo"]

LAST = re.compile(
    r"^✓ ([\d,]+) enqueued, ([\d,]+) succeeded, (\d+) dead, (\d+) recovered, 0 in limbo$",
    re.MULTILINE,
)

QUIET = {name: value for name, value in os.environ.items() if not name.startswith("ONWARD")}


def run(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The demo as a command, with its temporary folder inside `folder`."""
    env = QUIET | {"TMPDIR": str(folder)}
    return subprocess.run(
        [*COMMAND, *options], env=env, capture_output=True, text=True, timeout=110, check=False
    )


def numbers(output: str) -> list[int]:
    """Enqueued, succeeded, dead, recovered, as the last line says."""
    last = LAST.search(output)
    assert last, output
    return [int(number.replace(",", "")) for number in last.groups()]


# --- as it is shipped -----------------------------------------------------------------------------


def test_it_runs_kills_recovers_checks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("--files", "40", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    enqueued, succeeded, dead, recovered = numbers(done.stdout)
    assert enqueued == succeeded + dead
    assert 0 < dead <= files.STRANGERS
    assert recovered > 0
    assert re.search(r"^kill +kill -9 \d+", done.stdout, re.MULTILINE)
    assert "attempt 1 lost (signal SIGKILL); attempt 2" in done.stdout
    assert "failed (UnicodeDecodeError)" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_on_a_server_it_makes_the_tables_and_touches_nobody_elses_jobs(
    tmp_path: Path, postgres_database: str
) -> None:
    other = Onward(postgres_database)
    first = run(
        "--files", "5", "--processes", "2", "--database", postgres_database, folder=tmp_path
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert "schema    made: 0001_jobs" in first.stdout
    job = other.task(name="nothing")(lambda: None).enqueue()
    doomed = leave_dead(other, postgres_database)
    second = run(
        "--files", "5", "--processes", "1", "--database", postgres_database, folder=tmp_path
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "schema" not in second.stdout
    assert job.refresh().state == "queued"
    assert other.get(doomed).state == "dead"
    assert other.counts()["dead"] == 1  # its own are discarded
    other.close()


def leave_dead(app: Onward, url: str) -> str:
    """A dead job of somebody else's."""

    def fail() -> None:
        raise ValueError

    job = app.task(name="fail", max_attempts=1, queue="others")(fail).enqueue()
    app.worker(queues=["others"], until_empty=True).run()
    return job.id


def test_a_terminal_gets_a_bar_and_colours(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "TERM": "xterm-256color", "COLUMNS": "100"}
    screen = in_terminal([*COMMAND, "--files", "5", "--processes", "1"], env)
    assert "━" in screen
    assert "\x1b[32m✓" in screen
    assert re.search(r"\d+ enqueued, .* 0 in limbo", screen)


def in_terminal(command: Sequence[str], env: dict[str, str]) -> str:
    """What a command writes when a terminal is there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=QUIET | env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b"".join(iter(lambda: read(ours), b""))
        assert process.wait(60) == 0, said
    os.close(ours)
    return said.decode()


def read(fd: int) -> bytes:
    try:
        return os.read(fd, 65_536)
    except OSError:  # The other side is closed.
        return b""


def test_a_signal_ends_the_workers_too(tmp_path: Path) -> None:
    env = QUIET | {"TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--files", "300"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("kill"):
                break
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert not processes_of(process.pid)


def processes_of(demo: int) -> list[str]:
    """Workers that this demo has started and that are still there."""
    table = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in table.splitlines() if f"@{demo} " in line]


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(str(empty), folder=tmp_path)
    assert done.returncode == 2
    assert "has no file to work on" in done.stderr


def test_workers_that_cannot_start_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onward.demo.crew.TARGET", "onward.demo.tasks:nothing")
    assert tour.run(files=3, processes=1) == 1
    said = capsys.readouterr().out
    assert re.search(r"^✗ \d+ jobs have not ended", said, re.MULTILINE)
    assert "is no Onward app" in said
    assert re.search(r"^✗ \d+ enqueued, 0 succeeded", said, re.MULTILINE)


def test_jobs_that_go_nowhere_are_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tour, "PATIENCE", 4.0)
    monkeypatch.setattr(tour, "KILL_AT", 2.0)
    assert tour.run(files=3, processes=1) == 1
    assert "✗ 0 jobs taken back" in capsys.readouterr().out


# --- its checks can fail --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Onward, list[Sight], Path]]:
    """The database of a demo that went well, and its files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"a text, number {number}\n" * (number + 1))
    (folder / "picture").write_bytes(bytes(range(256)))
    path = tmp_path_factory.mktemp("played") / "onward.db"
    demo_app.use(f"sqlite:///{path}")
    assert tour.run(folder, f"sqlite:///{path}", processes=1, keep=True) == 0
    chosen = choose(folder, 100)
    demo_app.use(f"sqlite:///{path}")
    yield demo_app, chosen, path
    demo_app.close()


def all_lines(app: Onward) -> list[Line]:
    rows = app.database.read(all_rows)
    first, queue = min(row[0] for row in rows), str(rows[0][2])
    return read_jobs(app.database, queue, first)


def all_rows() -> Any:
    from onward.store import store

    return store.read("list", before=None, state=None, queue=None, task=None, limit=1000)


def problems(played: tuple[Onward, list[Sight], Path], lines: Sequence[Line]) -> list[str]:
    app, chosen, _ = played
    return compare(app, lines, chosen, tour.WATCHED).problems


def test_a_sound_run_has_no_problems(played: tuple[Onward, list[Sight], Path]) -> None:
    assert problems(played, all_lines(played[0])) == []


@pytest.mark.parametrize("task", check.FOR_EACH)
def test_a_job_too_few_is_noticed(played: tuple[Onward, list[Sight], Path], task: str) -> None:
    lines = all_lines(played[0])
    lines.remove(next(line for line in lines if line.task == task))
    (problem,) = problems(played, lines)
    assert f"has 0 jobs of {task}, not 1" in problem


def test_a_job_too_many_is_noticed(played: tuple[Onward, list[Sight], Path]) -> None:
    lines = all_lines(played[0])
    (problem,) = problems(played, [*lines, next(line for line in lines if line.task == "pack")])
    assert "has 2 jobs of pack, not 1" in problem


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        ("digest", '"abc"'),
        ("pack", '{"before":1,"after":1,"checksum":1}'),
        ("words", '{"lines":0,"words":0,"distinct":0,"longest_line":0}'),
        ("publish", "7"),
        ("watch", '"nothing"'),
    ],
)
def test_a_wrong_result_is_noticed(
    played: tuple[Onward, list[Sight], Path], task: str, wrong: str
) -> None:
    app, _, path = played
    lines = all_lines(app)
    id = next(line.id for line in lines if line.task == task and line.state == "succeeded")
    with past_the_trigger(path) as connection:
        find = "SELECT result FROM onward_finished WHERE id = ?"
        change = "UPDATE onward_finished SET result = ? WHERE id = ?"
        ((before,),) = connection.execute(find, (id,))
        connection.execute(change, (wrong, id))
        try:
            (problem,) = problems(played, lines)
        finally:
            connection.execute(change, (before, id))
    assert task in problem


@contextmanager
def past_the_trigger(path: Path) -> Generator[Any]:
    """A connection that may change finished rows, which a trigger forbids."""
    name = "onward_finished_is_final"
    with closing(apsw.Connection(str(path))) as opened:
        connection: Any = opened
        ((trigger,),) = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (name,))
        connection.execute(f"DROP TRIGGER {name}")
        yield connection
        connection.execute(trigger)


def test_a_file_that_changed_meanwhile_is_left_out(
    played: tuple[Onward, list[Sight], Path], tmp_path: Path
) -> None:
    app, chosen, _ = played
    other = tmp_path / "other"
    other.write_text("new")
    changed = [replace(chosen[0], path=other), *chosen[1:]]
    found = compare(app, all_lines(app), changed, tour.WATCHED)
    assert found.changed == 1
    assert found.problems == []
    other.unlink()
    assert compare(app, all_lines(app), changed, tour.WATCHED).changed == 1


# --- verdicts -------------------------------------------------------------------------------------


@pytest.fixture
def outcome(played: tuple[Onward, list[Sight], Path]) -> Outcome:
    """What is known after a demo that went well, made again from its database."""
    from onward.demo.crew import Victim
    from onward.invariants import run_checks
    from onward.overview import read_workers

    app, chosen, _ = played
    lines = all_lines(app)
    workers = read_workers(app.database)
    lost = next(worker for worker in workers if worker.state == "lost")
    return Outcome(
        lines=lines,
        victims=[Victim(lost.id, lost.pid, 1)],
        workers=workers,
        status=0,
        comparison=compare(app, lines, chosen, tour.WATCHED),
        findings=run_checks(app.database),
        log=[],
    )


PLACE = scene.Scene(folder=Path(), url="", schema="onward", own=True, keep=False)


def crosses(outcome: Outcome) -> list[str]:
    return [verdict.text for verdict in report.judge(outcome, PLACE) if not verdict.holds]


def test_a_sound_outcome_has_no_crosses(outcome: Outcome) -> None:
    assert crosses(outcome) == []


def test_each_thing_that_is_off_has_its_cross(outcome: Outcome) -> None:
    first = outcome.lines[0]
    rest = outcome.lines[1:]
    queued = replace(first, state=JobState.QUEUED)
    dead = replace(first, state=JobState.DEAD, task="pack")
    assert crosses(replace(outcome, lines=[queued, *rest])) != []
    assert crosses(replace(outcome, lines=[dead, *rest])) != []
    stuck = [replace(line, losses=line.attempt) for line in outcome.lines]
    assert any("taken back" in text for text in crosses(replace(outcome, lines=stuck)))
    never = [replace(line, losses=0) for line in outcome.lines]
    assert any("0 jobs taken back" in text for text in crosses(replace(outcome, lines=never)))
    assert any("stopped in order" in text for text in crosses(replace(outcome, status=1)))
    assert any("stopped in order" in text for text in crosses(replace(outcome, victims=[])))
    wrong = replace(outcome.comparison, problems=["one"])
    assert any("1 differ" in text for text in crosses(replace(outcome, comparison=wrong)))
    broken = replace(outcome.findings[0], problem="no such table")
    assert any("1 broken" in text for text in crosses(replace(outcome, findings=[broken])))


# --- files ----------------------------------------------------------------------------------------


def test_files_come_from_all_over_and_those_that_are_no_text_are_few(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number:02}.txt").write_text("text")
        (tmp_path / f"{number:02}.png").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden").write_text("text")
    (tmp_path / "empty").touch()
    (tmp_path / "large").write_text("x" * (files.MOST_BYTES + 1))
    (tmp_path / "link").symlink_to("00.txt")
    os.mkfifo(tmp_path / "pipe")
    chosen = choose(tmp_path, 10)
    texts = [file.path.name for file in chosen if file.is_text]
    assert len(texts) == 10
    assert max(texts) > "80.txt"
    assert len(chosen) == 10 + files.STRANGERS
    everything = choose(tmp_path, 1000)
    assert len(everything) == 100 + files.STRANGERS


def test_a_folder_of_texts_only_gets_strangers_of_python(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    chosen = choose(tmp_path, 10)
    assert [file.is_text for file in chosen] == [True, *[False] * (len(chosen) - 1)]


def test_the_far_end_refuses_some_and_always_gives_in() -> None:
    digests = [f"{number:064x}" for number in range(0, 2**16, 7)]
    digests = [digest[::-1] for digest in digests]
    refused = sum(is_refused(digest, 1) for digest in digests)
    assert 0 < refused < len(digests)
    assert not any(is_refused(digest, 4) for digest in digests)


def test_it_is_quick_to_import() -> None:
    """The command line's first page must not pay for it."""
    code = "import onward.cli.root, sys; sys.exit('onward.demo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_server_database_is_named_without_its_password() -> None:
    place = scene.Scene(folder=Path(), url="", schema="other", own=False, keep=True)
    demo_app.use("postgresql://me:secret@localhost/x", schema="other")
    assert place.options == "--database postgresql://me@localhost/x --schema other"
