"""Real workers for the tests: `onward worker` as it runs in production, in processes of its own.

    with running(database_url, processes=2, concurrency=4) as worker:
        job = tasks.nap.enqueue(0.5)
        os.kill(worker.pids()[0], signal.SIGKILL)
        wait_until(lambda: job.refresh().state == "succeeded", 10)
        worker.terminate()
        assert worker.wait(10) == 0
        assert "Traceback" not in worker.log()

The tasks are those of `tests/support/tasks.py`, or of another `target`. `opened(url)` points that
app at a database, makes its tables, and gives the settings that suit a test; `running` hands the
same database and settings to the processes. Whatever a test does to them, the supervisor, its
worker processes and theirs are gone when the block ends, frozen ones too; and if the test run is
killed they end as well.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from onward.app import Onward
from onward.config import Settings
from onward.errors import DatabaseError
from onward.store import store
from onward.store.database import Database
from onward.store.url import open_database
from tests.support import tasks
from tests.support.launch import Launched
from tests.support.ledger import VARIABLE, Ledger

T = TypeVar("T")

ROOT = Path(__file__).parents[2]

TARGET = "tests.support.tasks:app"

QUICK: dict[str, Any] = {
    "lease": 3.0,
    "beat": 1.0,
    "sweep": 1.0,
    "poll": 0.1,
    "cancel_poll": 0.1,
    "cancel_raise_after": 0.3,
    "cancel_kill_after": 0.6,
    "timeout_grace": 0.3,
    "abandon_after": 0.5,
    "stall_after": 20.0,
}
"""Settings for tests, in seconds: as the defaults, but nobody has to wait for long."""

AS_SHIPPED: dict[str, Any] = asdict(Settings())
"""The defaults."""

CHILD = "onward.worker."
"""In the command line of every process that a worker starts."""


def wait_until(
    condition: Callable[[], T], seconds: float = 10.0, *, every: float = 0.02, what: str = ""
) -> T:
    """Look again and again until something is true; returns it.

    Args:
        condition: what to look at; its errors are the test's.
        seconds: how long at most. Generous: it is only used up by a test that fails.
        every: the pause between two looks.
        what: named when it does not come.
    """
    end = time.monotonic() + seconds
    while True:
        if found := condition():
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what or 'what was waited for'}")
        time.sleep(every)


def opened(url: str, **settings: Any) -> Onward:
    """The app of `tests/support/tasks.py` on this database, with its tables made.

    Args:
        url: of a fresh database, or of one that has the tables already.
        settings: other than `QUICK`.
    """
    tasks.app.settings = Settings(**(QUICK | settings))
    tasks.app.use(url)
    tasks.app.database.migrate()
    return tasks.app


class WorkerLine(Struct, frozen=True, kw_only=True):
    """A row of the workers' table."""

    id: str
    name: str
    pid: int
    state: str
    lease_left: float
    silent: float
    reason: str | None
    running: int


def workers(database: Database) -> list[WorkerLine]:
    """Every worker that the database remembers, oldest first."""
    rows = database.read(store.read, "workers", limit=1000)
    return [
        WorkerLine(
            id=row[0],
            name=row[1],
            pid=row[3],
            state=row[5],
            lease_left=row[10],
            silent=row[12],
            reason=row[14],
            running=row[15],
        )
        for row in reversed(rows)
    ]


class RunningWorker:
    """A supervisor under test and its worker processes. Made by `running`."""

    def __init__(
        self, url: str, orders: Mapping[str, Any], environment: Mapping[str, str], wanted: int
    ) -> None:
        self._wanted = wanted
        self._tells = orders["log_level"] in {"DEBUG", "INFO"}
        self.database = open_database(url)
        self._before = {worker.id for worker in workers(self.database)}
        self._log = Path(tempfile.mkstemp(prefix="onward-worker-", suffix=".log")[1])
        self.process = Launched(orders, os.environ | environment, ROOT, self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        if error is not None:
            error.add_note(f"the worker's log ended:\n{self.log()[-6000:]}")
        self._log.unlink(missing_ok=True)

    # --- look -------------------------------------------------------------------------------------

    @property
    def supervisor_pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the supervisor lives."""
        return self.process.poll() is None

    def workers(self) -> list[WorkerLine]:
        """What the workers' table says of this supervisor's processes, dead ones included.

        Of two supervisors that run at once, use different names to tell theirs apart.
        """
        return [w for w in workers(self.database) if w.id not in self._before]

    def pids(self) -> list[int]:
        """The worker processes that are registered, active or draining, and alive; oldest first."""
        return [
            worker.pid
            for worker in self.workers()
            if worker.state in {"active", "draining"} and _parent(worker.pid) == self.supervisor_pid
        ]

    def isolated_pids(self) -> list[int]:
        """The processes of their own in which attempts run, or have run."""
        return [pid for worker in self.pids() for pid in _children(worker)]

    def log(self) -> str:
        """All that the supervisor and its processes have written so far."""
        return self._log.read_text(errors="replace")

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Wait until as many worker processes as wanted are registered and have been let go: from
        then on they stop in order when they are told to.
        """

        def ready() -> bool:
            if not self.running:
                raise AssertionError(f"the supervisor ended: {self.process.returncode}")
            with suppress(DatabaseError):
                return self._let_go() >= self._wanted and len(self.pids()) >= self._wanted
            return False

        wait_until(ready, seconds, what="all worker processes registered")

    def _let_go(self) -> float:
        """How many processes the log says have started; a log that is too quiet does not tell."""
        return self.log().count(" worker.started ") if self._tells else math.inf

    # --- act --------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """SIGTERM to the supervisor: stop in order; the second time at once."""
        self.process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGINT to the supervisor, as Ctrl-C sends it."""
        self.process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for the supervisor's end; returns its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the supervisor has not ended within {seconds:g} s") from None

    def kill(self) -> None:
        """SIGKILL the supervisor and all its processes: as if the machine went down."""
        with suppress(ProcessLookupError):
            # A stopped supervisor starts no successor while we look for its children.
            self.process.send_signal(signal.SIGSTOP)
        for pid in [*_descendants(self.supervisor_pid), *self._orphans(), self.supervisor_pid]:
            _kill(pid)
        self.process.wait(30)

    def close(self) -> None:
        """End everything that was started here."""
        self.kill()
        self.process.let_go()
        self.database.close()

    def _orphans(self) -> list[int]:
        """Worker processes whose supervisor was killed, and their own processes."""
        try:
            known = {worker.pid for worker in self.workers()}
        except DatabaseError:
            return []
        found = [pid for pid in known if CHILD in _command(pid)]
        return [*(child for pid in found for child in _descendants(pid)), *found]


@contextmanager
def running(
    url: str,
    *,
    processes: int = 1,
    concurrency: int = 4,
    queues: Sequence[tuple[str, int | None]] | None = None,
    grace: float | None = None,
    name: str | None = None,
    until_empty: bool = False,
    target: str = TARGET,
    log_level: str = "INFO",
    ledger: Ledger | None = None,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Generator[RunningWorker, None, None]:
    """Run a supervisor with real worker processes, until the block ends.

    Args:
        url: the database. Its tables must be there: `opened(url)` makes them.
        processes, concurrency, queues, grace, name, until_empty, log_level: as of `onward worker`.
        target: where the app is.
        ledger: where tasks append what they do (through ONWARD_LEDGER).
        settings: other than those that `opened` has set last.
        environment: more variables for the processes.
        ready: return only when all worker processes are registered.
    """
    given = {field: getattr(tasks.app.settings, field) for field in Settings.__struct_fields__}
    variables = {
        "ONWARD_URL": url,
        tasks.SETTINGS_VARIABLE: json.dumps(given | dict(settings or {})),
        **({VARIABLE: str(ledger.path)} if ledger else {}),
        **(environment or {}),
    }
    orders = {
        "target": target,
        "processes": processes,
        "concurrency": concurrency,
        "queues": queues,
        "grace": grace,
        "name": name,
        "until_empty": until_empty,
        "log_level": log_level,
    }
    with RunningWorker(url, orders, variables, processes) as worker:
        if ready:
            worker.wait_ready()
        yield worker


# --- Processes ---------------------------------------------------------------------------------

PROC = Path("/proc")
HAS_PROC = (PROC / "self/stat").exists()
"""Linux. Tests look at processes many times a second, and a `ps` takes longer than a hundred of
these looks: then the looking would be most of the work.
"""


class Process(NamedTuple):
    """What the system says of a process; it may be a zombie."""

    parent: int
    state: str


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    found = _look_at(pid)
    return found is not None and not found.state.startswith("Z")


def cpu_seconds(pids: Iterable[int]) -> float:
    """How long these processes have computed so far; 0 where the system does not show that."""
    return sum(map(_computed, pids))


def _computed(pid: int) -> float:
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int | None:
    found = _look_at(pid)
    return found.parent if found else None


def _children(pid: int) -> list[int]:
    return [child for child, parent in _table() if parent == pid]


def _descendants(pid: int) -> list[int]:
    """All below a process, the lowest first."""
    table = _table()

    def below(parent: int) -> Iterator[int]:
        for child, its_parent in table:
            if its_parent == parent:
                yield from below(child)
                yield child

    return list(below(pid))


def _table() -> list[tuple[int, int]]:
    """Every process with its parent."""
    if HAS_PROC:
        looks = ((int(path.name), _look_at(int(path.name))) for path in PROC.glob("[0-9]*"))
        return [(pid, found.parent) for pid, found in looks if found]
    lines = _ps("-A", "-o", "pid=,ppid=").splitlines()
    return [(int(pid), int(parent)) for pid, parent in (line.split() for line in lines)]


def _look_at(pid: int) -> Process | None:
    if HAS_PROC:
        try:
            stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, parent, *_ = stat.rpartition(")")[2].split()
    else:
        words = _ps("-o", "stat=,ppid=", "-p", str(pid)).split()
        if not words:
            return None
        state, parent = words
    return Process(int(parent), state)


def _command(pid: int) -> str:
    if HAS_PROC:
        with suppress(FileNotFoundError, ProcessLookupError):
            return (PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
        return ""
    return _ps("-o", "command=", "-p", str(pid))


def _ps(*args: str) -> str:
    return subprocess.run(["ps", *args], capture_output=True, text=True, check=False).stdout


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
