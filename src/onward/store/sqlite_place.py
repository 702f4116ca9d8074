"""Where a SQLite file may lie: a queue needs locks and shared memory for several processes.

It is the file that counts, not the link that leads to it: SQLite follows symbolic links, and keeps
its `-wal` and `-shm` beside the file. It cannot follow a hard link, so a file with two names would
have two logs, and each of them is half of the truth.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onward.errors import DatabaseError

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ncpfs", "davfs", "fuse.davfs"}
    # Locks are this client's alone, or are none at all, unless it is mounted with other options.
    | {"fuse.sshfs", "lustre", "beegfs"}
    # Locks are everybody's, but what one client has mapped another does not see change.
    | {"ceph", "fuse.ceph", "fuse.ceph-fuse", "glusterfs", "fuse.glusterfs"}
)
_SHARES = frozenset({"9p", "virtiofs", "fuse.virtiofs", "vboxsf", "fuse.vmhgfs-fuse", "prl_fs"})
"""What a host shares with a virtual machine. There is no common memory to map, or it is one that
goes wrong under load: on virtiofs, writers of one machine damage a file within minutes.
"""


def check_place(path: Path) -> None:
    """Refuse places where a queue cannot work, with the reason."""
    try:
        _check_place(path)
    except OSError as error:
        raise DatabaseError(
            f"{path} cannot be a database",
            why=f"the system says: {error.strerror}",
            fix="name a file that this user can read and write, e.g. sqlite:///onward.db",
        ) from None


def _check_place(path: Path) -> None:
    if path.is_dir():
        raise DatabaseError(f"{path} is a directory", fix="name a file, e.g. sqlite:///onward.db")
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir():
        raise DatabaseError(
            f"the directory {file.parent} does not exist",
            fix="create it, or name a file elsewhere: sqlite:///relative.db, sqlite:////absolute.db",
        )
    _check_file_system(path, file)
    if not file.exists():
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    _check_names(path, file)


def _check_file_system(path: Path, file: Path) -> None:
    kind = _file_system(file)
    if kind not in _NETWORK | _SHARES:
        return
    place = "a network file system" if kind in _NETWORK else "a folder shared with a host"
    raise DatabaseError(
        f"{path} is on {place} ({kind})" + (f", as {file}" if path.is_symlink() else ""),
        why="SQLite's locks and shared memory do not work there, so two machines would claim the"
        " same job, or damage the file",
        fix='use a local disk, or PostgreSQL for several machines: Onward("postgresql://…")',
    )


def _check_names(path: Path, file: Path) -> None:
    try:
        names = file.stat().st_nlink
    except OSError:
        return
    if names > 1:
        raise DatabaseError(
            f"{path} has {names} names: it is hard-linked",
            why="SQLite keeps a write-ahead log beside each name, so what is written through one is"
            " not seen through another, and may be lost",
            fix=f"remove the others (find them with: find DIR -samefile {file}), or use symbolic"
            " links",
        )


def _file_system(file: Path) -> str | None:
    """The kind of file system that a file is on, where the system tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    best, kind = "", None
    target = str(file)
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
