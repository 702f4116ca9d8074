"""Ways to run `onward`: in this process, in a process of its own, and on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

from click.testing import CliRunner, Result

from onward.cli.root import root


class Shell:
    """`onward`, called in this process on one database; stdin and stdout are no terminal."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, *words: str, code: int = 0) -> Result:
        """Run a command, which must end with this exit status."""
        result = CliRunner().invoke(root, ["--database", self.url, *words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"{result.exit_code}: {result.output}"
        return result

    def rows(self, *words: str, code: int = 0) -> list[dict[str, str]]:
        """What a list shows in a pipe: heading and value of each column."""
        head, *lines = self(*words, code=code).stdout.splitlines()
        names = head.lower().split("\t")
        return [dict(zip(names, line.split("\t"), strict=True)) for line in lines]

    def json(self, *words: str, code: int = 0) -> Any:
        """The JSON document of a command."""
        return json.loads(self(*words, "--json", code=code).stdout)


def in_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`onward` in a process of its own, with pipes."""
    return subprocess.run(
        [sys.executable, "-m", "onward.cli", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def on_terminal(
    *words: str, answer: str = "", columns: int = 110, **environment: str
) -> tuple[int, str]:
    """`onward` on a terminal; returns the exit status and everything that was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "onward.cli", *words],
        env=os.environ | {"TERM": "xterm-256color"} | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    if answer:
        os.write(ours, answer.encode())
    text = b""
    with contextlib.suppress(OSError):  # The other end is closed: it has ended.
        while part := os.read(ours, 65_536):
            text += part
    os.close(ours)
    return process.wait(), text.decode(errors="replace").replace("\r\n", "\n")
