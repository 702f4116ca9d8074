"""The command line: `onward`. A thin edge: it reads options, asks the store, shows what it found.

`main` is what the `onward` script calls. Each command lives in a module of its own, which is
imported only when it is called, so that `onward --help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import sys


def main() -> None:
    """Run the command line, and exit with its status."""
    from onward.cli.root import root

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(
                ValueError
            ):  # What the terminal cannot show is shown as an escape.
                stream.reconfigure(errors="backslashreplace")
    root(prog_name="onward")
