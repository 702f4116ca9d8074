"""Where a SQLite file may lie: a queue needs locks and shared memory for several processes.

It is the file that counts, not the link that leads to it: SQLite follows symbolic links, and keeps
its `-wal` and `-shm` beside the file. It cannot follow a hard link, nor a file that is mounted by
itself: what has two names or paths would have two logs, and each of them is half of the truth.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path, PurePath

from onward.errors import DatabaseError, DatabaseUnavailable

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


def url_of(path: PurePath) -> str:
    """The URL that leads to a file, whatever characters its name has."""
    return "sqlite:///" + re.sub("[%?#]", lambda found: f"%{ord(found[0]):02X}", str(path))


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
    _check_mount(path, file)
    if not file.exists():
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    _check_names(path, file)


def _check_mount(path: Path, file: Path) -> None:
    mount, kind = _mount(file)
    whole = f", as {file}" if path.is_symlink() else ""
    if kind in _NETWORK | _SHARES:
        place = "a network file system" if kind in _NETWORK else "a folder shared with a host"
        raise DatabaseError(
            f"{path} is on {place} ({kind})" + whole,
            why="SQLite's locks and shared memory do not work there, so two machines would claim"
            " the same job, or damage the file",
            fix='use a local disk, or PostgreSQL for several machines: Onward("postgresql://…")',
        )
    if mount == str(file):
        raise DatabaseError(
            f"{path} is mounted by itself" + whole,
            why="SQLite keeps a write-ahead log beside each path, so what is written by one is not"
            " seen by the other, and may be lost",
            fix="mount the folder that it lies in: docker run -v /srv/jobs:/jobs, and"
            f" sqlite:////jobs/{file.name}",
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


MOUNTS = Path("/proc/self/mounts")


def _mount(file: Path) -> tuple[str, str]:
    """The mount that a file is on, and its kind of file system; empty where no system tells."""
    try:
        lines = os.fsdecode(MOUNTS.read_bytes()).split("\n")
    except OSError:
        return "", ""
    best, kind = "", ""
    target = str(file)
    for line in filter(None, lines):
        _, mount, fs, *_ = line.split(" ")
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount)
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fs
    return best, kind


FileId = tuple[int, int]


def file_at(path: Path) -> FileId | None:
    """Which file lies there; None: none that can be found."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def another_file(shown_url: str, *, gone: bool, make: str) -> DatabaseUnavailable:
    """A file that is open here is no longer the one to which its path leads, as an error.

    Args:
        shown_url: the URL of that path.
        gone: whether it leads to none.
        make: the command that makes a new one.
    """
    return DatabaseUnavailable(
        f"{shown_url} is gone" if gone else f"{shown_url} is another file than before",
        why="it was removed, renamed or replaced while it was open here: what is written to it now"
        " nobody would see, so nothing was",
        fix=f"put it back, or make a new one: {make}"
        if gone
        else "call again: the file that is there now is used from here on. To exchange one, stop"
        " whoever uses it, and take its -wal and -shm away with it",
    )


def check_mode(mode: str) -> None:
    if mode != "wal":
        raise DatabaseError(
            f"SQLite refuses the write-ahead log here (journal mode stays {mode})",
            why="the file system lacks shared memory, or the database is not a file",
            fix="put the file on a local disk",
        )
