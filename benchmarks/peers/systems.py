"""The systems that Onward is measured beside, and how to ask each what is left to do.

How a worker is set is in its adapter; all of them are at the fastest settings that were found. A
system that runs less than about ten thousand jobs a second gets fewer of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

Store = Literal["postgresql", "sqlite", "redis", "rabbitmq"]

REQUIREMENTS = Path(__file__).parent / "requirements"
JOBS = 100_000


class System(NamedTuple):
    """One system on one store.

    Args:
        name: as it is called on the command line.
        key: names its environment, its pins and its adapter.
        store: where its jobs are.
        left: asks the store how many jobs are not recorded as run: a query; on Redis, commands
            whose answers are added. Empty: no client can tell, and the end is the last job's.
        jobs: how many are drained.
        bulk: whether it has a call that enqueues many.
        durability: of a commit, where it is not what the store gives.
        one: the target of one process's drain, Onward's speed over this one's.
        two: the same of two processes.
        python: the oldest that it runs on.
        node: it runs on Node.
    """

    name: str
    key: str
    store: Store
    left: str
    jobs: int = JOBS
    bulk: bool = True
    durability: str = ""
    one: float | None = None
    two: float | None = None
    python: tuple[int, int] = (3, 11)
    node: bool = False

    @property
    def pins(self) -> Path:
        """The versions that are installed."""
        return REQUIREMENTS / f"{self.key}.{'json' if self.node else 'txt'}"

    @property
    def adapter(self) -> str:
        """The program that drives it."""
        return f"{self.key}.cjs" if self.node else f"on_{self.key}"

    @property
    def version(self) -> str:
        """The one that is pinned."""
        text = self.pins.read_text()
        if self.node:
            return str(next(iter(json.loads(text)["dependencies"].values())))
        return text.splitlines()[0].partition("==")[2]


SYSTEMS = [
    System(
        "pgqueuer",
        "pgqueuer",
        "postgresql",
        "SELECT count(*) FROM pgqueuer WHERE status IN ('queued', 'picked')",
        one=2.0,
        two=1.5,
    ),
    System(
        "graphile-worker",
        "graphile",
        "postgresql",
        "SELECT count(*) FROM graphile_worker._private_jobs",
        one=1.2,
        node=True,
    ),
    System(
        "huey",
        "huey",
        "sqlite",
        "SELECT count(*) FROM task",
        jobs=20_000,
        bulk=False,
        durability="WAL, synchronous FULL by default; a job leaves the file before it runs",
        one=10.0,
    ),
    System(
        "procrastinate",
        "procrastinate",
        "postgresql",
        "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
        jobs=5_000,
    ),
    System("celery-redis", "celery", "redis", "LLEN celery; HLEN unacked", jobs=5_000, bulk=False),
    System("celery-rabbitmq", "celery", "rabbitmq", "", jobs=5_000, bulk=False),
    System(
        "rq",
        "rq",
        "redis",
        "LLEN rq:queue:default; ZCARD rq:wip:default; LLEN rq:queue:default:intermediate",
        jobs=1_000,
    ),
    System("dramatiq", "dramatiq", "redis", "HLEN dramatiq:default.msgs", jobs=10_000, bulk=False),
    System(
        "chancy",
        "chancy",
        "postgresql",
        "SELECT count(*) FROM chancy_jobs WHERE state IN ('pending', 'running', 'retrying')",
        jobs=20_000,
    ),
    System(
        "dbos",
        "dbos",
        "postgresql",
        "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')",
        jobs=5_000,
        bulk=False,
    ),
    System(
        "oban",
        "oban",
        "postgresql",
        "SELECT count(*) FROM oban_jobs WHERE state IN ('available', 'executing', 'retryable')",
        jobs=10_000,
        python=(3, 12),
    ),
    System(
        "litequeue",
        "litequeue",
        "sqlite",
        'SELECT count(*) FROM "Queue" WHERE status IN (0, 1)',
        jobs=20_000,
        durability="WAL, synchronous NORMAL: a commit is not synced",
        python=(3, 12),
    ),
    System("saq", "saq", "redis", "ZCARD saq:default:incomplete", jobs=10_000, bulk=False),
    System("arq", "arq", "redis", "ZCARD arq:queue", jobs=5_000, bulk=False),
]
