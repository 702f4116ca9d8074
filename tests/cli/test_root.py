"""What holds for all commands: help, near names, exit codes, errors, secrets, speed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import click
import pytest
from click.testing import CliRunner

import onward
from onward import errors
from onward.cli.root import root
from onward.cli.troubles import exit_code
from onward.store.database import Refused
from onward.version import version
from tests.cli.shell import Shell, in_process
from tests.support.scene import Scene


def every_command(
    group: click.Group = root, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


COMMANDS = dict(every_command())
ASKS_NO_DATABASE = {("lifecycle",), ("job",), ("dead",), ("db",)}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_page_says_what_it_does_and_has_examples(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(root, [*path, "--help"])
    assert result.exit_code == 0
    examples = result.output.split("Examples:")[1].split("\n\n")[0].strip().splitlines()
    assert len(examples) >= 3
    assert all(line.strip().startswith("onward ") for line in examples)
    assert COMMANDS[path].get_short_help_str()


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_that_looks_at_a_database_can_be_told_which(path: tuple[str, ...]) -> None:
    names = {parameter.name for parameter in COMMANDS[path].params}
    assert ("database" in names) == (path not in ASKS_NO_DATABASE)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_that_shows_something_has_json(path: tuple[str, ...]) -> None:
    names = {parameter.name for parameter in COMMANDS[path].params}
    runs = isinstance(COMMANDS[path], click.Group) or path in {("worker",), ("demo",)}
    assert ("as_json" in names) == (not runs)


def test_the_examples_can_be_parsed() -> None:
    """Words that are no options lead to a command, and the options of an example exist."""
    for path, command in COMMANDS.items():
        for line in (command.epilog or "").splitlines():
            words = line.strip().partition("onward ")[2].split()
            if not line.startswith("  onward ") or not words:
                continue
            known = next(
                c
                for p, c in sorted(COMMANDS.items(), key=lambda x: -len(x[0]))
                if p == tuple(words[: len(p)])
            )
            options = {o for parameter in known.params for o in parameter.opts}
            used = {word for word in words if word.startswith("-")}
            assert used <= options, (path, line)


def test_the_first_page_lists_every_command_with_its_own_words() -> None:
    text = CliRunner().invoke(root, ["--help"]).output
    for path, command in COMMANDS.items():
        if len(path) == 1:
            assert path[0] in text
            assert (command.help or "").split(".")[0].split(";")[0][:20] in text


def loaded_by(program: str) -> set[str]:
    """The modules that a program has imported in the end."""
    tell = "; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program + tell], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def of_others(modules: set[str]) -> set[str]:
    """The packages among them that are neither Python's nor Onward's."""
    packages = {name.partition(".")[0] for name in modules}
    return {name for name in packages - sys.stdlib_module_names if not name.startswith("_")}


def test_the_first_page_is_quick() -> None:
    """Time goes into imports: it has click, and its own few files. No command is loaded, nothing
    that draws, no database and no event loop.
    """
    page = loaded_by("from onward.cli.root import root; root(['--help'], standalone_mode=False)")
    own = {name for name in page if name.partition(".")[0] == "onward"}
    assert own == {"onward", "onward.cli", "onward.cli.options", "onward.cli.root", "onward.errors"}
    assert of_others(page) - of_others(loaded_by("pass")) == {"click", "onward"}
    assert not {"asyncio", "ssl", "sqlite3", "rich", "psycopg", "apsw"} & page


def test_an_import_alone_loads_nothing_and_every_public_name_is_there() -> None:
    """Names are imported when they are asked for; each is the one of its own module."""
    alone = loaded_by("import onward")
    assert {name for name in alone if name.partition(".")[0] in {"onward", "msgspec"}} == {"onward"}
    for name in onward.__all__:
        assert getattr(onward, name) is not None
        assert name in dir(onward)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onward.nothing  # pyright: ignore


def test_version() -> None:
    result = CliRunner().invoke(root, ["--version"])
    assert result.output == f"onward {version()}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["stauts"], "'status'"),
        (["job", "cancle", "x"], "'cancel'"),
        (["dead", "requeu"], "'requeue'"),
    ],
)
def test_a_wrong_command_is_met_with_the_nearest(words: list[str], near: str) -> None:
    result = CliRunner().invoke(root, words)
    assert result.exit_code == 2
    assert f"Did you mean {near}?" in result.stderr


def test_a_command_like_no_other_is_met_with_none() -> None:
    result = CliRunner().invoke(root, ["xyzzy"])
    assert result.exit_code == 2
    assert "there is no command 'xyzzy'." in result.stderr
    assert "Did you mean" not in result.stderr


# --- which database -------------------------------------------------------------------------------


def test_the_option_nearest_to_the_command_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_URL", f"sqlite:///{tmp_path}/from-environment.db")
    far, near = f"sqlite:///{tmp_path}/far.db", f"sqlite:///{tmp_path}/near.db"
    assert "from-environment.db" in CliRunner().invoke(root, ["status"]).stderr
    assert "far.db" in CliRunner().invoke(root, ["--database", far, "status"]).stderr
    words = ["--database", far, "status", "--database", near]
    assert "near.db" in CliRunner().invoke(root, words).stderr


READS = [
    ("status",),
    ("workers",),
    ("job", "list"),
    ("job", "show", "01"),
    ("job", "cancel", "01"),
    ("job", "requeue", "01"),
    ("dead", "list"),
    ("dead", "requeue", "--all", "--yes"),
    ("dead", "discard", "--all", "--yes"),
    ("db", "status"),
    ("db", "migrate"),
    ("db", "prune", "--yes"),
    ("db", "compact"),
    ("doctor",),
]


@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_a_file_that_is_not_there_is_not_created(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "typo.db"
    result = CliRunner().invoke(root, ["--database", f"sqlite:///{path}", *words])
    assert result.exit_code == 5
    told = result.stderr + result.stdout
    assert "typo.db" in told
    assert "onward db init" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_somebody_elses_file_is_left_as_it_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = tmp_path / "theirs.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = path.read_bytes()
    result = CliRunner().invoke(root, ["--database", f"sqlite:///{path}", *words])
    assert result.exit_code == 5
    told = result.stderr + result.stdout
    assert "has no Onward schema" in told
    assert "onward db init" in told
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n" * 200)
    result = CliRunner().invoke(root, ["--database", f"sqlite:///{path}", "status"])
    assert result.exit_code == 5
    assert "notes.txt" in result.stderr
    assert path.read_text().startswith("buy milk")


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("doctor",),
        ("db", "init"),
        ("db", "sql", "claim"),
        ("job", "list"),
        ("bench",),
        ("demo",),
        ("worker", "shop.jobs:app"),
    ],
    ids=" ".join,
)
def test_sqlite_has_no_schemas(tmp_path: Path, words: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    result = CliRunner().invoke(root, ["--database", url, *words, "--schema", "jobs"])
    assert result.exit_code == 2
    assert "only PostgreSQL has schemas" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_schema_of_the_environment_counts_least_and_is_none_on_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_SCHEMA", "others")
    words = ["--schema", "jobs", "db", "sql", "claim", "--dialect", "postgres"]
    assert 'UPDATE "jobs".job' in CliRunner().invoke(root, words).stdout
    assert 'UPDATE "others".job' in CliRunner().invoke(root, words[2:]).stdout
    words = ["db", "init", "--database", f"sqlite:///{tmp_path}/jobs.db"]
    assert CliRunner().invoke(root, words).exit_code == 0


def test_an_empty_server_database_is_told_how_to_start(postgres_database: str) -> None:
    result = CliRunner().invoke(root, ["--database", postgres_database, "status"])
    assert result.exit_code == 5
    assert "has no Onward schema" in result.stderr
    assert "onward db init --database" in result.stderr


# --- errors and secrets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://ana:hunter2secret@127.0.0.1:1/shop", 5),
        ("postgresql://127.0.0.1:1/shop?user=ana&password=hunter2secret", 5),
        ("postgresql://ana:hunter2%73ecret@127.0.0.1:1/shop?nonsense=1", 2),
        ("postgresql://ana:hunter2secret%@127.0.0.1:1/shop", 2),
        ("postgresql://ana:hunter2@secret@127.0.0.1:1/shop", 2),
        ("postgresql://ana:hunter2 secret@127.0.0.1:1/shop", 2),
        ("mysql://ana:hunter2secret@127.0.0.1/shop", 2),
    ],
)
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_password_in_the_url_is_never_shown(url: str, code: int, command: str) -> None:
    result = CliRunner().invoke(root, ["--database", url, command])
    assert result.exit_code == code
    assert "hunter2" not in result.output
    assert "secret" not in result.output


def test_an_error_says_what_why_and_how_to_fix_it(shell: Shell) -> None:
    told = shell("job", "show", "ffffffff", code=3).stderr
    assert told.startswith("error [OW402] no job has an id that begins with ffffffff\n")
    assert "\n  why: " in told
    assert "\n  fix: " in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.JobFailed("x"), 1),
        (errors.OnwardError("x"), 1),
        (errors.InvalidOption("x"), 2),
        (errors.JobNotFound("x"), 3),
        (errors.UnknownTask("x"), 3),
        (errors.AppNotFound("x"), 3),
        (errors.DatabaseError("x"), 5),
        (errors.DatabaseUnavailable("x"), 5),
        (errors.SchemaMissing("x"), 5),
        (errors.DriverMissing("x"), 5),
        (errors.IllegalTransition("x"), 6),
        (Refused("x"), 6),
        (errors.WaitTimeout("x"), 7),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_has_its_exit_status(error: errors.OnwardError, code: int) -> None:
    assert exit_code(error) == code


def test_interrupted(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onward.cli.status.look", stop)
    assert "interrupted" in shell("status", code=130).stderr


def test_a_closed_pipe_is_no_traceback(scene: Scene, shell: Shell) -> None:
    for _ in range(50):
        scene.enqueue()
    done = subprocess.run(
        f"{sys.executable} -m onward.cli job list --database '{shell.url}' | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("ID\t")
    assert "Traceback" not in done.stderr


def test_colour_can_be_forced_into_a_pipe(scene: Scene, shell: Shell) -> None:
    scene.enqueue()
    words = ["job", "list", "--database", shell.url]
    assert "\x1b[" in in_process(*words, FORCE_COLOR="1").stdout
    assert "\x1b" not in in_process(*words).stdout
    assert "\x1b" not in in_process(*words, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_terminal_without_utf8_gets_ascii(scene: Scene, shell: Shell) -> None:
    scene.enqueue(task="shop.kaffee_größe")
    for words in (["status"], ["job", "list"], ["doctor"], ["lifecycle"], ["db", "sql"]):
        place = [] if words == ["lifecycle"] else ["--database", shell.url]
        done = in_process(*words, *place, PYTHONIOENCODING="ascii")
        assert done.stdout.isascii()
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("dead", "list", "--task"),
        ("job", "list", "--queue"),
        ("dead", "discard", "--all", "--yes", "--reason"),
        ("worker", "shop:app", "--name"),
        ("worker",),
    ],
)
def test_bytes_that_are_no_text_are_refused_at_the_door(
    shell: Shell, words: tuple[str, ...]
) -> None:
    """No database, and no process that is started, would take them."""
    told = shell(*words, "bad\udcff", code=2).stderr
    assert r"'bad\udcff' is no text" in told
