"""Children of the test's own process: quick to start, and with what it has already opened."""

from __future__ import annotations

import os
import pwd
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

Body = Callable[[], object]

PATIENCE = 30
"""How many seconds a child may take before it is taken to hang, and ends."""


class Child:
    """A forked child that runs a function and says what came of it: its answer as text, or its
    traceback.
    """

    def __init__(self, body: Body) -> None:
        reader, writer = os.pipe()
        with (
            warnings.catch_warnings()
        ):  # Since Python 3.12 a fork beside threads is worth a warning.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _run(body, writer)
        os.close(writer)
        self._reader = reader

    def result(self) -> str:
        """What it said, once it has ended."""
        with os.fdopen(self._reader, "rb") as pipe:
            text = pipe.read().decode()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"{text}\nended with status {status}"
        return text


def _run(body: Body, writer: int) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    status = 1
    try:
        answer = str(body())
        status = 0
    except BaseException:
        answer = traceback.format_exc()
    try:
        os.write(writer, answer.encode())
    finally:  # Whatever happens, no second run of these tests goes on from here.
        os._exit(status)


def at_once(bodies: Sequence[Body]) -> list[str]:
    """Run functions in children that all start at the same moment; returns what they said."""
    reader, writer = os.pipe()

    def waiting(body: Body) -> Body:
        def run() -> object:
            os.close(writer)
            os.read(reader, 1)  # The end of the pipe is the starting shot.
            return body()

        return run

    children = [Child(waiting(body)) for body in bodies]
    os.close(reader)
    os.close(writer)
    return [child.result() for child in children]


def without_privileges(body: Body) -> str:
    """Run a function as somebody whom file permissions bind: root may do anything."""

    def run() -> object:
        if os.geteuid() == 0:
            account = pwd.getpwnam("nobody")
            os.setgroups([])
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        return body()

    return Child(run).result()
