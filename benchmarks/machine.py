"""What was measured on: without it a figure means nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import apsw
import psycopg

from benchmarks.stage import server
from onward.version import version

SETTINGS = ("server_version", "fsync", "synchronous_commit", "wal_sync_method", "shared_buffers")


def describe() -> str:
    """Cores, processor, versions, and how durable a commit is."""
    with psycopg.connect(server()) as link:
        found = {
            name: row[0]
            for name in SETTINGS
            if (row := link.execute(f"SHOW {name}".encode()).fetchone())
        }
    postgres = ", ".join(f"{name} {value}" for name, value in found.items())
    return "\n".join(
        (
            f"Onward {version()}, Python {platform.python_version()}",
            f"{os.cpu_count()} cores, {_processor()}",
            f"PostgreSQL: {postgres}",
            f"SQLite {apsw.sqlite_lib_version()}: WAL, synchronous FULL",
        )
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((each.partition(":")[2].strip() for each in lines if "model name" in each), "")
