"""Fresh stores, of rivals too.

PostgreSQL and SQLite are those of `benchmarks.stage`. Redis is a server of our own for each run,
from the `redis-server` on PATH, so that nobody's data is touched. RabbitMQ is the one that
`BENCH_AMQP` names, else the one on this machine; the adapter purges the queue that it uses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from benchmarks import stage
from benchmarks.peers.homes import Unavailable
from benchmarks.peers.systems import Store
from benchmarks.stage import Place

AMQP = "amqp://guest:guest@127.0.0.1:5672//"


class RedisPlace(Place):
    """A Redis server."""

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """The sum of what the commands answer, which are separated by semicolons."""
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port or 0), timeout=5) as link:
            link.sendall(text.replace(";", "\r\n").encode() + b"\r\n")
            with link.makefile("rb") as answers:
                return [(sum(int(answers.readline()[1:]) for _ in text.split(";")),)]

    def settle(self) -> None:
        """Nothing is left to be written."""


class RabbitPlace(Place):
    """A RabbitMQ server. It does not tell cheaply what has not been acknowledged."""

    def query(self, text: str) -> list[tuple[Any, ...]]:
        """Nothing is known to be left."""
        return [(0,)]

    def settle(self) -> None:
        """Nothing is left to be written."""


@contextlib.contextmanager
def fresh(store: Store) -> Generator[Place, None, None]:
    """An empty store.

    Raises:
        Unavailable: there is no such server.
    """
    if store in ("postgresql", "sqlite"):
        with stage.fresh(store) as place:
            yield place
        return
    folder = Path(tempfile.mkdtemp(prefix="onward-bench-"))
    try:
        if store == "rabbitmq":
            yield RabbitPlace(_rabbit(), folder)
        else:
            with _redis(folder) as place:
                yield place
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def durability(store: Store) -> str:
    """What a commit, or an answered call, is worth."""
    if store == "redis":
        return "appendonly yes, appendfsync everysec: up to a second is lost with the machine"
    if store == "rabbitmq":
        return "persistent messages on a durable queue, without confirms"
    if store == "sqlite":
        return "WAL, synchronous FULL: each commit is synced"
    with psycopg.connect(stage.server()) as link:
        rows = [link.execute(f"SHOW {name}").fetchone() for name in ("fsync", "synchronous_commit")]
    fsync, commit = (row[0] for row in rows if row)
    return f"fsync {fsync}, synchronous_commit {commit}"


@contextlib.contextmanager
def _redis(folder: Path) -> Generator[Place, None, None]:
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("needs Redis; there is no redis-server on PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ["--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "everysec"]
    server = subprocess.Popen(
        [program, "--port", port, "--dir", str(folder), "--save", "", *options],
        stdout=subprocess.DEVNULL,
    )
    try:
        _until_open("127.0.0.1", int(port))
        yield RedisPlace(f"redis://127.0.0.1:{port}/0", folder)
    finally:
        server.terminate()
        server.wait()


def _until_open(host: str, port: int) -> None:
    end = time.monotonic() + 10
    while not _open(host, port):
        if time.monotonic() > end:
            raise Unavailable("Redis did not start")
        time.sleep(0.02)


def _open(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def _rabbit() -> str:
    url = os.environ.get("BENCH_AMQP", AMQP)
    address = urlsplit(url)
    if not _open(address.hostname or "", address.port or 5672):
        raise Unavailable("needs RabbitMQ; none answers, and BENCH_AMQP can name one")
    return url
