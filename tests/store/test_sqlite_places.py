"""Where a SQLite file cannot be, cannot be written or cannot be had just now: what is said, and
that it heals.
"""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from onward.errors import DatabaseError, DatabaseUnavailable, DriverMissing, InvalidOption
from onward.store import sqlite as adapter
from onward.store import sqlite_place, store
from onward.store.database import Database
from onward.store.sqlite import SqliteDatabase
from onward.store.sqlite_wakeup import SqliteWakeup
from onward.store.url import open_database
from tests.store.builders import enqueue, hand, new_job, opened
from tests.store.forks import without_privileges
from tests.support.workers import wait_until

# --- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:///:memory:", "names no file"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:///folder/", "names no file"),
        ("sqlite://onward.db", "names no file"),
        ("sqlite://host/onward.db", "names no file"),
        ("sqlite:///onward.db?synchronous=off", "synchronous=off"),
        ("mysql://localhost/jobs", "names no database"),
        ("onward.db", "names no database"),
        ("", "names no database"),
        ("postgresql+psycopg://localhost/jobs", "names no database"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_with_one_that_does(url: str, words: str) -> None:
    """The mistake is told when the app is made, before anything is opened, with a spelling that
    works.
    """
    with pytest.raises(InvalidOption, match=words) as caught:
        open_database(url)
    assert "sqlite:///" in caught.value.fix or "full" in caught.value.fix


@pytest.mark.parametrize(
    ("url", "words", "fix"),
    [
        ("sqlite:///q.db#x", "behind a #", "%23"),
        ("sqlite:///q.db#", "behind a #", "%23"),
        ("sqlite:///q.db?synchronous=normal#x", "behind a #", "%23"),
        ("sqlite:///q.db?mode=memory", "'mode'", "synchronous"),
        ("sqlite:///q.db?sync=normal", "'sync'", "did you mean synchronous"),
        ("sqlite:///q.db?Synchronous=normal", "'Synchronous'", "did you mean synchronous"),
        ("sqlite:///q.db?normal", "'normal'", "synchronous=normal"),
        ("sqlite:///q.db?synchronous=full&cache=shared", "'cache'", "synchronous"),
        ("sqlite:///q.db?=x", "''", "synchronous"),
        ("sqlite:///q.db?a%1b%5b2J=1", r"'a\\x1b", "synchronous"),
        ("sqlite:///q.db?synchronous=", "synchronous=", "full"),
        ("sqlite:///q.db?synchronous=full&synchronous=normal", "more than once", "full"),
        ("sqlite:///q\n.db", "names no file", "sqlite:////home"),
        ("sqlite:///q\t.db", "names no file", "sqlite:////home"),
    ],
)
def test_no_part_of_a_url_is_dropped_without_a_word(url: str, words: str, fix: str) -> None:
    """Whoever wrote it meant something by it: another file, or another durability."""
    with pytest.raises(InvalidOption, match=words) as caught:
        open_database(url)
    assert fix in caught.value.fix
    assert caught.value.why or "synchronous=" in url


def test_no_secret_is_in_the_message_about_a_parameter() -> None:
    with pytest.raises(InvalidOption) as caught:
        open_database("sqlite:///q.db?me:s3cret@localhost/jobs")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a b.db", "50%25.db", "50%.db", "what?.db", "c#.db", "ü.db"])
def test_the_url_that_is_shown_leads_to_the_same_file(tmp_path: Path, name: str) -> None:
    """An error tells a command to run with it, and a Path is told to be written so."""
    with pytest.raises(InvalidOption) as caught:
        open_database(tmp_path / name)  # type: ignore[arg-type]
    written = ast.literal_eval(caught.value.fix.removeprefix("Onward(").removesuffix(")"))
    with closing(open_database(written)) as database:
        assert isinstance(database, SqliteDatabase)
        assert database.path == tmp_path / name
        assert database.shown_url == written


def test_a_driver_that_does_not_exist_is_refused() -> None:
    """There are two ways to open SQLite, and the error names both."""
    with pytest.raises(InvalidOption, match="sqlcipher") as caught:
        open_database("sqlite:///onward.db", sqlite_driver="sqlcipher")
    assert "apsw" in caught.value.fix
    assert "sqlite3" in caught.value.fix


def test_a_missing_postgres_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg is an extra: without it the error is one line to type."""
    import sys

    monkeypatch.setitem(sys.modules, "onward.store.postgres", None)
    with pytest.raises(DriverMissing) as caught:
        open_database("postgresql://localhost/jobs")
    assert "pip install" in caught.value.fix


def test_no_password_is_in_the_message_about_a_url() -> None:
    """A URL in an error is cut before its secrets."""
    with pytest.raises(InvalidOption) as caught:
        open_database("mysql://me:s3cret@localhost/jobs")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a b.db", "ü 漢.db", "50%25.db", "a%20b.db", "q;'x.db", "%23.db"])
def test_any_file_name_can_be_used(tmp_path: Path, name: str) -> None:
    """What a URL escapes is unescaped, and the rest is taken as it is."""
    from urllib.parse import unquote

    with closing(open_database(f"sqlite:///{tmp_path}/{name}")) as database:
        enqueue(database)
    assert (tmp_path / unquote(name)).exists()


def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app that changes its directory later still finds its jobs."""
    monkeypatch.chdir(tmp_path)
    with closing(open_database("sqlite:///jobs.db")) as database:
        other = tmp_path / "other"
        other.mkdir()
        monkeypatch.chdir(other)
        enqueue(database)
    assert (tmp_path / "jobs.db").exists()
    assert not (other / "jobs.db").exists()


@pytest.mark.parametrize(
    ("asked", "level"), [("", 2), ("?synchronous=normal", 1), ("?synchronous=EXTRA", 3)]
)
def test_a_commit_is_as_durable_as_asked(tmp_path: Path, asked: str, level: int) -> None:
    """By default it survives a power cut; less is said in the URL, never chosen silently."""
    with closing(open_database(f"sqlite:///{tmp_path}/onward.db{asked}")) as database:
        assert isinstance(database, SqliteDatabase)
        with closing(database.open_ready()) as connection:
            assert connection.rows("PRAGMA synchronous") == [(level,)]
            assert connection.rows("PRAGMA journal_mode") == [("wal",)]
        assert database.facts()["synchronous"] in {"FULL", "NORMAL", "EXTRA"}


# --- places ---------------------------------------------------------------------------------------


async def _aenqueue(database: Database) -> None:
    try:
        await database.aenqueue([new_job()])
    finally:
        await database.aclose()


USES: dict[str, Callable[[Database], Any]] = {
    "enqueue": lambda database: database.enqueue([new_job()]),
    "aenqueue": lambda database: asyncio.run(_aenqueue(database)),
    "read": lambda database: database.read(store.counts),
    "migrate": lambda database: database.migrate(),
    "facts": lambda database: database.facts(),
}

every_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


@pytest.fixture(params=["apsw", "sqlite3"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@every_use
def test_a_directory_is_no_database(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """The error says that it is a directory, not that it cannot be opened."""
    with closing(open_database(f"sqlite:///{tmp_path}", sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseError, match="is a directory"):
            use(database)


@every_use
def test_a_name_that_no_file_can_have_is_refused(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """What the system says about it is told as an error of ours."""
    url = f"sqlite:///{tmp_path}/{'n' * 300}.db"
    with closing(open_database(url, sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseError, match="cannot be a database") as caught:
            use(database)
        assert "too long" in caught.value.why


@every_use
def test_a_missing_directory_is_named(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """It is the folder that lacks; it is not made, and once it is there the same app goes on."""
    folder = tmp_path / "var"
    with closing(open_database(f"sqlite:///{folder}/onward.db", sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseError, match=f"{folder} does not exist"):
            use(database)
        assert not folder.exists()
        folder.mkdir()
        use(database)


@every_use
def test_a_file_that_is_something_else_is_named(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """Somebody's notes are left as they are."""
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 500)
    with closing(open_database(f"sqlite:///{path}", sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseUnavailable, match="cannot be used") as caught:
            use(database)
    assert caught.value.why == "the file is not a SQLite database"
    assert path.read_text().startswith("Dear diary")


@every_use
def test_a_damaged_file_is_named(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """Whatever is met first in the damage, the error is ours and says that the file is damaged."""
    path = tmp_path / "onward.db"
    with closing(open_database(f"sqlite:///{path}", sqlite_driver=driver)) as database:
        enqueue(database, 200)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)
    with closing(open_database(f"sqlite:///{path}", sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseUnavailable, match="cannot be used") as caught:
            use(database)
    assert caught.value.why in {"the file is damaged", "the file is not a SQLite database"}


NETWORK = ["nfs4", "cifs", "fuse.sshfs", "fuse.glusterfs", "ceph", "lustre", "beegfs"]
SHARES = ["9p", "virtiofs", "vboxsf"]


def mount(monkeypatch: pytest.MonkeyPatch, place: Path, kind: str) -> None:
    """Have the system say that a place is a mount of this kind."""
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {place} {kind} rw 0 0\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _: mounts.encode())


@pytest.mark.parametrize("kind", [*NETWORK, *SHARES])
def test_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SQLite's locks do not work there: two machines would have the same job."""
    mount(monkeypatch, tmp_path, kind)
    words = "network file system" if kind in NETWORK else "shared with a host"
    with closing(open_database(f"sqlite:///{tmp_path}/onward.db")) as database:
        with pytest.raises(DatabaseError, match=rf"{words} \({kind}\)"):
            enqueue(database)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "folder", "missing file", "the mount is one file"])
def test_a_link_to_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is where the file lies that counts, and nothing is made there."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    if what in {"file", "the mount is one file"}:
        (there / "onward.db").touch()
    (here / "onward.db").symlink_to(there / "onward.db")
    (here / "linked").symlink_to(there)
    path = here / "linked" / "onward.db" if what == "folder" else here / "onward.db"
    mount(monkeypatch, there / "onward.db" if what == "the mount is one file" else there, "nfs4")
    before = list(there.iterdir())
    with closing(open_database(f"sqlite:///{path}")) as database:
        with pytest.raises(DatabaseError, match="network file system"):
            enqueue(database)
    assert list(there.iterdir()) == before


def test_a_link_into_a_missing_folder_names_the_folder(tmp_path: Path, driver: str) -> None:
    (tmp_path / "onward.db").symlink_to(tmp_path / "gone" / "onward.db")
    url = f"sqlite:///{tmp_path}/onward.db"
    with closing(open_database(url, sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseError, match=f"{tmp_path}/gone does not exist"):
            enqueue(database)


def test_a_place_without_shared_memory_is_refused(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite says so by keeping another journal: then several processes cannot share the file."""
    database = open_database(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=driver)
    assert isinstance(database, SqliteDatabase)
    real = database.driver.open

    def without(path: Path, clock: Callable[[], float]) -> Any:
        connection: Any = real(path, clock)
        rows = connection.rows
        connection.rows = lambda text, params=None: (
            [("delete",)] if "journal_mode" in text else rows(text, params)
        )
        return connection

    monkeypatch.setattr(database.driver, "open", without, raising=False)
    with closing(database):
        with pytest.raises(DatabaseError, match="refuses the write-ahead log") as caught:
            enqueue(database)
    assert "local disk" in caught.value.fix


def test_a_system_that_tells_no_mounts_is_taken_at_its_word(
    tmp_path: Path, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every system has such a list: then nothing is known against a place."""

    monkeypatch.setattr(sqlite_place, "MOUNTS", tmp_path / "missing")
    sqlite_place.check_place(tmp_path / "onward.db")
    monkeypatch.undo()
    with closing(open_database(f"sqlite:///{tmp_path}/onward.db", sqlite_driver=driver)) as db:
        enqueue(db)


@every_use
def test_a_link_that_leads_back_to_itself_is_no_file(
    tmp_path: Path, driver: str, use: Callable[[Database], Any]
) -> None:
    """Nothing can be made where it leads: the error is ours."""
    path = tmp_path / "onward.db"
    path.symlink_to(tmp_path / "other.db")
    (tmp_path / "other.db").symlink_to(path)
    with closing(open_database(f"sqlite:///{path}", sqlite_driver=driver)) as database:
        with pytest.raises(DatabaseUnavailable, match="cannot be used") as caught:
            use(database)
    assert caught.value.why == "the file or its directory cannot be opened"


# --- one file by two paths ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["linked file", "linked folder", "dotted path"])
def test_one_file_by_two_paths_is_one_queue(tmp_path: Path, driver: str, way: str) -> None:
    """Whoever writes through one is seen through the other, while both are open."""
    folder = tmp_path / "real"
    folder.mkdir()
    first = folder / "onward.db"
    (tmp_path / "onward.db").symlink_to(first)
    (tmp_path / "linked").symlink_to(folder)
    second = {
        "linked file": tmp_path / "onward.db",
        "linked folder": tmp_path / "linked" / "onward.db",
        "dotted path": tmp_path / "linked" / ".." / "real" / "onward.db",
    }[way]
    with (
        closing(open_database(f"sqlite:///{first}", sqlite_driver=driver)) as one,
        closing(open_database(f"sqlite:///{second}", sqlite_driver=driver)) as other,
        ThreadPoolExecutor(4) as pool,
    ):
        enqueue(one)
        enqueue(other)
        for written in [pool.submit(enqueue, each) for each in (one, other) * 10]:
            written.result(10)
        assert one.read(store.counts)["queued"] == other.read(store.counts)["queued"] == 22
    assert sorted(path.name for path in folder.iterdir()) == ["onward.db"]


def test_a_file_with_two_names_is_refused(tmp_path: Path, driver: str) -> None:
    """SQLite would keep a log for each name: by either, the error says so, and with one name left
    the same app goes on.
    """
    path, second = tmp_path / "onward.db", tmp_path / "second.db"
    database = open_database(f"sqlite:///{path}", sqlite_driver=driver)
    enqueue(database)
    database.close()
    second.hardlink_to(path)
    with closing(database), closing(open_database(f"sqlite:///{second}")) as other:
        for each in (database, other):
            with pytest.raises(DatabaseError, match="has 2 names: it is hard-linked") as caught:
                enqueue(each)
            assert "samefile" in caught.value.fix
        second.unlink()
        enqueue(database)
        assert database.read(store.counts)["queued"] == 2


def test_a_file_that_is_mounted_by_itself_is_refused(tmp_path: Path, driver: str) -> None:
    """As `docker -v q.db:/q.db` does: SQLite would keep a log beside each of the two paths. By the
    folder that is mounted as a whole it is one file.
    """
    outside, inside = tmp_path / "outside", tmp_path / "inside \\ here"
    outside.mkdir()
    inside.mkdir()
    (inside / "onward.db").touch()
    with closing(open_database(f"sqlite:///{outside}/onward.db", sqlite_driver=driver)) as first:
        enqueue(first)
        with (
            bound(outside / "onward.db", inside / "onward.db"),
            closing(open_database(f"sqlite:///{inside}/onward.db")) as second,
        ):
            with pytest.raises(DatabaseError, match="is mounted by itself") as caught:
                enqueue(second)
            assert "sqlite:////jobs/onward.db" in caught.value.fix
        with (
            bound(outside, inside),
            closing(open_database(f"sqlite:///{inside}/onward.db", sqlite_driver=driver)) as second,
        ):
            enqueue(second)
            assert first.read(store.counts)["queued"] == 2


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    """What is at one place is at the other too."""
    mount = ["mount", "--bind", str(source), str(target)]
    run = subprocess.run(mount, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"needs root to mount: {run.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False)


@pytest.mark.parametrize(
    "name", ["on\tward.db", "on ward.db", "on\\ward.db", "on#ward.db", "\udcff.db"]
)
def test_a_file_that_is_mounted_is_known_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The list of mounts has some characters as numbers, and bytes that are no text."""
    path = tmp_path / name
    path.touch()
    spelt = str(path)
    for character in "\\ \t\n#":  # The backslash first: the others are written with it.
        spelt = spelt.replace(character, f"\\{ord(character):03o}")
    mounts = tmp_path / "mounts"
    mounts.write_bytes(
        b"/dev/sda / ext4 rw 0 0\n/dev/sda " + os.fsencode(spelt) + b" ext4 rw 0 0\n"
    )
    monkeypatch.setattr(sqlite_place, "MOUNTS", mounts)
    with pytest.raises(DatabaseError, match="is mounted by itself"):
        sqlite_place.check_place(path)


def test_a_link_to_a_file_that_is_mounted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the file that counts, not the link that leads to it."""
    mounted, link = tmp_path / "mounted.db", tmp_path / "onward.db"
    mounted.touch()
    link.symlink_to(mounted)
    mount(monkeypatch, mounted, "ext4")
    with pytest.raises(DatabaseError, match=r"onward.db is mounted by itself, as .*/mounted.db"):
        sqlite_place.check_place(link)


# --- a file that goes away under those who use it -------------------------------------------------


def remove(path: Path) -> None:
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


CALLS: dict[str, Callable[[Database], Any]] = {
    "enqueue": lambda database: database.enqueue([new_job()]),
    "aenqueue": lambda database: asyncio.run(database.aenqueue([new_job()])),
    "read": lambda database: database.read(store.counts),
}
every_call = pytest.mark.parametrize("use", CALLS.values(), ids=CALLS)


def in_use(database: Database) -> Path:
    """A database with two jobs, whose connections are open."""
    assert isinstance(database, SqliteDatabase)
    enqueue(database, 2)
    database.read(store.counts)
    return database.path


def queued(database: Database) -> int:
    return database.read(store.counts)["queued"]


@pytest.mark.parametrize("way", ["removed", "renamed", "exchanged"])
@every_call
def test_a_file_that_is_replaced_is_told_once_and_left(
    sqlite: Database, tmp_path: Path, way: str, use: Callable[[Database], Any]
) -> None:
    """Nobody would see what is written to it. Whoever calls is told, nothing is written, and the
    next call goes to the file that is there.
    """
    path = in_use(sqlite)
    other = open_database(f"sqlite:///{tmp_path}/other.db")
    enqueue(other, 5)
    other.close()
    if way == "removed":
        remove(path)
    elif way == "renamed":
        path.rename(tmp_path / "old.db")
        remove(path)
    else:
        with hand(sqlite) as dba:
            dba.sql(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            )  # Else its log would be taken for the new one's.
    (tmp_path / "other.db").rename(path)
    with pytest.raises(DatabaseUnavailable, match="is another file") as caught:
        use(sqlite)
    assert "removed, renamed or replaced" in caught.value.why
    wait_until(lambda: settled(sqlite))
    assert queued(sqlite) == 5
    use(sqlite)
    enqueue(sqlite)
    with opened(sqlite) as second:
        assert queued(second) == queued(sqlite) >= 6


def settled(database: Database) -> bool:
    """Whether the old file has been left."""
    try:
        database.read(store.counts)
    except DatabaseUnavailable:
        return False
    return True


@every_call
def test_a_file_that_is_gone_is_not_made_anew_by_who_had_it_open(
    sqlite: Database, tmp_path: Path, use: Callable[[Database], Any]
) -> None:
    """Whoever moves it may be about to put it back, or another in its place. Until then every call
    says so; back again, it is as it was.
    """
    path = in_use(sqlite)
    path.rename(tmp_path / "old.db")
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable, match="is gone") as caught:
            use(sqlite)
        assert "onward db init" in caught.value.fix
        with pytest.raises(DatabaseUnavailable, match="is gone"):
            sqlite.facts()
        time.sleep(0.02)
    assert not path.exists()
    (tmp_path / "old.db").rename(path)
    assert queued(sqlite) == 2
    use(sqlite)
    assert sqlite.facts()["quick_check"] == "ok"


def test_an_app_that_is_closed_takes_the_file_that_is_there(sqlite: Database) -> None:
    """It had nothing open any more: one that is gone is made as on first use."""
    path = in_use(sqlite)
    sqlite.close()
    remove(path)
    assert queued(sqlite) == 0
    sqlite.close()
    path.rename(path.with_name("old.db"))
    with opened(sqlite) as other:
        enqueue(other, 3)
    assert queued(sqlite) == 3


def test_who_waits_for_hints_hears_of_the_file_that_is_there(sqlite: Database) -> None:
    """A listener may never write: it follows when anybody of its process has noticed."""

    async def main() -> None:
        wakeup = await sqlite.wakeup()
        assert not await wakeup.wait(0.01)
        remove(in_use(sqlite))
        assert await wakeup.wait(5)
        with opened(sqlite) as other:
            enqueue(other)
            with pytest.raises(DatabaseUnavailable, match="is another file"):
                sqlite.read(store.counts)
            assert await wakeup.wait(5)
            await wakeup.wait(0.01)
            assert not await wakeup.wait(0.01)
            enqueue(other)
            assert await wakeup.wait(5)
        await wakeup.close()

    asyncio.run(main())


def test_many_callers_of_a_file_that_is_replaced_all_go_on(sqlite: Database) -> None:
    """Each write is told to have failed, or is in the file that is there now."""
    path = in_use(sqlite)
    remove(path)
    with opened(sqlite) as other:
        enqueue(other)

    def call(_: int) -> int:
        for tried in range(1_000):
            with suppress(DatabaseUnavailable):
                enqueue(sqlite)
                return tried
            time.sleep(0.001)
        raise AssertionError("it never went on")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(40)))
    assert queued(sqlite) == 41
    assert not [each for each in threading.enumerate() if each.name == "onward-leave"]


# --- permissions ----------------------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter and write to."""
    folder = Path(tempfile.mkdtemp(prefix="onward-places-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_file_can_be_read_and_says_why_it_cannot_be_written(
    open_folder: Path, driver: str
) -> None:
    """Counting jobs still works; an enqueue is an error about the file, not about the job."""
    url = f"sqlite:///{open_folder}/onward.db"
    database = open_database(url, sqlite_driver=driver)
    enqueue(database)
    database.close()
    (open_folder / "onward.db").chmod(0o444)

    def use() -> str:
        assert database.read(store.counts)["queued"] == 1
        try:
            database.enqueue([new_job()])
        except DatabaseUnavailable as error:
            return f"{error.why}; {error.fix}"
        return "it was written"

    said = without_privileges(use)
    assert said.startswith("the file or its directory is read-only")
    assert "permissions" in said
    for file in open_folder.iterdir():
        file.chmod(0o666)
    assert without_privileges(lambda: database.enqueue([new_job()])) == "None"
    with closing(database):
        assert database.read(store.counts)["queued"] == 2


def test_a_directory_without_permission_says_so(open_folder: Path, driver: str) -> None:
    """SQLite needs to make files beside the database, so the directory counts too."""
    closed = open_folder / "closed"
    closed.mkdir(mode=0o555)
    if os.geteuid() != 0:
        closed.chmod(0o555)

    def use() -> str:
        database = open_database(f"sqlite:///{closed}/onward.db", sqlite_driver=driver)
        try:
            database.enqueue([new_job()])
        except DatabaseUnavailable as error:
            return error.why
        return "it was written"

    assert without_privileges(use) == "the file or its directory cannot be opened"


# --- a full disk, a busy file ---------------------------------------------------------------------


def test_a_full_disk_is_told_to_all_and_heals(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not fit was not written, in part or whole; with space again the same app goes on."""
    assert isinstance(sqlite, SqliteDatabase)
    real, full = sqlite.driver.open, [True]

    def small(path: Path, clock: Callable[[], float]) -> Any:
        connection = real(path, clock)
        if full:
            connection.rows("PRAGMA max_page_count=60")
        return connection

    monkeypatch.setattr(sqlite.driver, "open", small, raising=False)
    sqlite.close()

    def fill() -> None:
        for _ in range(1000):
            sqlite.enqueue([new_job(args='"' + "x" * 5000 + '"')])

    with pytest.raises(DatabaseUnavailable) as caught:
        fill()
    assert caught.value.why == "the disk is full"
    counted = sqlite.read(store.counts)["queued"]
    full.clear()
    sqlite.enqueue([new_job()])
    assert sqlite.read(store.counts)["queued"] == counted + 1
    assert sqlite.facts()["quick_check"] == "ok"


def test_a_damaged_file_that_is_compacted_is_not_called_busy(sqlite: Database) -> None:
    """Whoever waits for a lock that nobody holds would wait for ever."""
    assert isinstance(sqlite, SqliteDatabase)
    enqueue(sqlite, 300)
    sqlite.close()
    content = bytearray(sqlite.path.read_bytes())
    content[-8192:] = b"\xff" * 8192
    sqlite.path.write_bytes(content)
    with pytest.raises(DatabaseUnavailable, match="cannot be used") as caught:
        sqlite.compact()
    assert caught.value.why == "the file is damaged"


def test_a_wakeup_whose_connection_fails_says_so_and_opens_another(sqlite: Database) -> None:
    """The worker hears that its database cannot be used just now, and afterwards of every
    commit.
    """

    async def main() -> None:
        wakeup = await sqlite.wakeup()
        assert isinstance(wakeup, SqliteWakeup)
        assert not await wakeup.wait(0.01)
        broken = wakeup._connection
        assert broken is not None
        broken.close()
        with pytest.raises(DatabaseUnavailable, match="cannot be used"):
            await wakeup.wait(0.01)
        assert await wakeup.wait(5)  # What came meanwhile may have been missed.
        assert not await wakeup.wait(0.01)
        with opened(sqlite) as other:
            enqueue(other)
        assert await wakeup.wait(5)
        await wakeup.close()

    asyncio.run(main())


def test_a_write_waits_for_another_process(sqlite: Database) -> None:
    """A short transaction of somebody else is no error; reading does not wait at all."""
    with hand(sqlite) as dba, ThreadPoolExecutor(1) as pool:
        dba.sql("BEGIN IMMEDIATE")
        writing = pool.submit(sqlite.enqueue, [new_job()])
        time.sleep(0.2)
        assert not writing.done()
        assert sqlite.read(store.counts)["queued"] == 0
        dba.sql("COMMIT")
        writing.result(5)
    assert sqlite.read(store.counts)["queued"] == 1


def test_a_file_that_is_held_too_long_is_unavailable_and_heals(
    sqlite: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process inside a transaction holds the file for all: everyone hears why, and
    nothing was written.
    """
    monkeypatch.setattr(adapter, "BUSY_SECONDS", 0.2)
    sqlite.close()
    with hand(sqlite) as dba, ThreadPoolExecutor(4) as pool:
        dba.sql("BEGIN IMMEDIATE")
        futures = [pool.submit(sqlite.enqueue, [new_job()]) for _ in range(4)]
        errors = [future.exception(10) for future in futures]
        for error in errors:
            assert isinstance(error, DatabaseUnavailable)
            assert "another process held the write lock for too long" in error.why
        dba.sql("COMMIT")
    assert sqlite.read(store.counts)["queued"] == 0
    enqueue(sqlite)
    assert sqlite.read(store.counts)["queued"] == 1


def test_many_processes_worth_of_writers_share_a_file(sqlite: Database) -> None:
    """Several databases write at once: each waits its turn, and nobody is told that the file is
    locked.
    """
    count = 4

    def write(number: int) -> None:
        with opened(sqlite) as mine:
            for _ in range(25):
                mine.enqueue([new_job()])

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(write, range(count)))
    assert sqlite.read(store.counts)["queued"] == count * 25


def test_a_failing_clock_is_its_callers_error_and_no_end_of_the_writer(sqlite: Database) -> None:
    """Whatever goes wrong inside a transaction, the thread that writes is there for the next."""
    assert isinstance(sqlite, SqliteDatabase)

    def broken() -> float:
        raise RuntimeError("no time")

    enqueue(sqlite)
    clock, sqlite.clock = sqlite.clock, broken
    with pytest.raises(RuntimeError, match="no time"):
        sqlite.enqueue([new_job()])
    sqlite.clock = clock
    enqueue(sqlite)
    assert sqlite.read(store.counts)["queued"] == 2
    assert threading.active_count() < 20
