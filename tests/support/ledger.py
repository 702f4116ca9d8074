"""A record of what happened that no part of Onward writes: tests of crashes compare the two.

Many processes append to one file. Each line is one `write` to a descriptor opened with O_APPEND, so
lines never mix, and what was written stays when the writer is killed the next moment. Killed in the
very moment, it may leave the first part of its line, up to the end of a page of the file: that has
not been said. So each line brings the end of the one before along.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "ONWARD_LEDGER"


class Ledger:
    """A file of JSON lines that any process may append to."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def at(cls, variable: str = VARIABLE) -> "Ledger":
        """The ledger whose path is in the environment, for code that runs in a worker."""
        path = os.environ.get(variable)
        if not path:
            raise LookupError(f"{variable} is not set: the test must pass the ledger's path in it")
        return cls(path)

    def append(self, **fields: Any) -> None:
        """Write one line, with this process's id and the monotonic time (one clock per machine)."""
        line = json.dumps(fields | {"pid": os.getpid(), "at": time.monotonic()})
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, f"\n{line}\n".encode())
        finally:
            os.close(fd)

    def read(self) -> list[dict[str, Any]]:
        """Every line so far, in the order written; none if nobody has written yet."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]
