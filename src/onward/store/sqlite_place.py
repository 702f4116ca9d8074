"""Where a SQLite file may lie: a queue needs locks and shared memory for several processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onward.errors import DatabaseError

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ncpfs"}


def check_place(path: Path) -> None:
    """Refuse places where a queue cannot work, with the reason."""
    if path.is_dir():
        raise DatabaseError(f"{path} is a directory", fix="name a file, e.g. sqlite:///onward.db")
    if not path.parent.is_dir():
        raise DatabaseError(
            f"the directory {path.parent} does not exist",
            fix="create it, or name a file elsewhere: sqlite:///relative.db, sqlite:////absolute.db",
        )
    kind = _file_system(path.parent)
    if kind in _NETWORK:
        raise DatabaseError(
            f"{path} is on a network file system ({kind})",
            why="SQLite's locks do not work there, so two machines would claim the same job",
            fix='use a local disk, or PostgreSQL for several machines: Onward("postgresql://…")',
        )
    if not path.exists():
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _file_system(folder: Path) -> str | None:
    """The kind of file system that a folder is on, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    best, kind = "", None
    target = str(folder.resolve())
    for line in mounts.splitlines():
        _, mount, fs, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fs
    return kind


def check_mode(mode: str) -> None:
    if mode != "wal":
        raise DatabaseError(
            f"SQLite refuses the write-ahead log here (journal mode stays {mode})",
            why="the file system lacks shared memory, or the database is not a file",
            fix="put the file on a local disk",
        )
