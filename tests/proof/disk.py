"""A disk for SQLite that can lose its power, answer with an error, or be full, at any operation.

In:  what SQLite asks of a file system (an apsw VFS), and one fault to be met on the way.
Out: what would be left on the platters.

Files are real, in a folder, and locks and shared memory are the operating system's; so SQLite runs
as it always does, write-ahead log included. Beside them stands a model of what is durable: a write
is safe once its file was synced, a name once its folder was. As on Linux, a folder is synced with
the first sync of a log or a journal by each who opened it, and by a deletion that asks for it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from onward.store.sqlite_apsw import ApswConnection, ApswDriver
from onward.store.sqlite_driver import Connection

SECTOR = 512

CUTS = ("dropped", "kept", "torn", "scrambled")
"""What becomes of what was not synced when the power goes: nothing of it is there, or all, or some
of its sectors; or some sectors, and some of them hold what nobody wrote.
"""

LIES, FORGETS = "lies", "forgets"
"""Flaws of a disk that no database can make good: it says that it has synced and has not; or what a
failed sync did not write is never written, although the next one succeeds (as Linux does it).
"""

ERRORS = ("error once", "error for ever", "full once", "full for ever", "unreadable once")
"""An operation fails, or every one from there; a disk that is full refuses writes only. And a read
fails.
"""

_numbers = itertools.count(1)


class Fault(NamedTuple):
    """What goes wrong, and at which operation, counted from 0."""

    kind: str
    at: int
    seed: int = 0


class Change:
    """A write of some bytes, or a truncation to a size; `safe` when it must survive, `adrift` when
    no sync will try it again.
    """

    def __init__(self, offset: int, data: bytes | None) -> None:
        self.offset = offset
        self.data = data
        self.safe = False
        self.adrift = False

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data

    def torn(self, chance: random.Random, likely: float, scramble: bool) -> list[Change]:
        """What of it reached the disk: a sector is written whole, or not, or with noise."""
        if self.data is None:
            return [self] if chance.random() < likely else []
        found: list[Change] = []
        start = 0
        while start < len(self.data):
            end = start + SECTOR - (self.offset + start) % SECTOR
            part = self.data[start:end]
            if chance.random() < likely:
                if scramble and chance.random() < 0.3:
                    part = chance.randbytes(len(part))
                found.append(Change(self.offset + start, part))
            start = end
        return found


class Inode:
    """The content of a file: what is safe, and what was done to it since."""

    def __init__(self, content: bytes = b"") -> None:
        self.base = bytearray(content)
        self.changes: list[Change] = []

    def sync(self) -> None:
        for change in self.changes:
            change.safe = not change.adrift
        while self.changes and self.changes[0].safe:
            self.changes.pop(0).apply(self.base)

    def forget(self) -> None:
        """What could not be written now never will be."""
        for change in self.changes:
            change.adrift = not change.safe

    def survivor(self, kind: str, chance: random.Random) -> bytes:
        content = bytearray(self.base)
        likely = chance.choice((0.1, 0.5, 0.9))
        for change in self.changes:
            parts = [change] if change.safe or kind == "kept" else []
            if not change.safe and kind in {"torn", "scrambled"}:
                parts = change.torn(chance, likely, kind == "scrambled")
            for part in parts:
                part.apply(content)
        return bytes(content)


class Disk:
    """One folder's worth of disk.

    Args:
        folder: an empty one, for the files as the running system sees them.
        files: what is on it, safe, to begin with.
        fault: what goes wrong.
        flaw: what is wrong with it all the time.
    """

    def __init__(
        self,
        folder: Path,
        files: dict[str, bytes] | None = None,
        fault: Fault | None = None,
        flaw: str = "",
    ) -> None:
        self.operations: list[str] = []
        self.met: str | None = None
        """The operation at which the fault struck."""
        self.dead = False
        self._fault = fault
        self._flaw = flaw
        self._chance = random.Random(fault.seed if fault else 0)
        self._names: dict[str, Inode] = {}
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
            self._names[name] = Inode(content)
        self._safe_names = dict(self._names)
        self.vfs = _Vfs(self)

    def heal(self) -> None:
        """The fault is gone."""
        self._fault = None

    def cut(self) -> None:
        """The power goes now."""
        self.dead = True

    def survivors(self, kind: str) -> dict[str, bytes]:
        """The files that are found when the power is back: of what was not synced as `kind` says.

        Whatever the system only kept in memory is gone, the index of the log among it.
        """
        names = dict(self._safe_names if kind == "dropped" else self._names)
        if kind in {"torn", "scrambled"}:
            for name in {*self._safe_names, *self._names}:
                found = self._chance.choice((self._safe_names, self._names)).get(name)
                names.pop(name, None)
                if found is not None:
                    names[name] = found
        return {name: inode.survivor(kind, self._chance) for name, inode in sorted(names.items())}

    # --- what the VFS tells -----------------------------------------------------------------------

    def inode(self, name: str) -> Inode:
        """The content under a name."""
        return self._names.setdefault(name, Inode())

    def delete(self, name: str, sync: bool) -> None:
        self.step(f"delete {name}", apsw.SQLITE_IOERR_DELETE)
        self._names.pop(name, None)
        if sync:
            self.sync_folder()

    def sync_folder(self) -> None:
        if self._flaw != LIES:
            self._safe_names = dict(self._names)

    def sync(self, inode: Inode, name: str) -> None:
        try:
            self.step(f"sync {name}", apsw.SQLITE_IOERR_FSYNC)
        except apsw.IOError:
            if self._flaw == FORGETS:
                inode.forget()
            raise
        if self._flaw != LIES:
            inode.sync()

    def reached(self, size: int) -> int:
        """How many bytes of a write that has just failed were written. When the power goes under
        it, all of them are on their way.
        """
        return size if self.dead else self._chance.choice((0, self._chance.randrange(size)))

    def step(self, what: str, code: int, *, grows: bool = False) -> None:
        """Count an operation; raises if it is one that fails. Space is asked for by writes only."""
        self.awake(code)
        number = len(self.operations)
        self.operations.append(what)
        fault = self._fault
        if fault is None or number < fault.at or fault.kind.startswith("unreadable"):
            return
        if fault.kind.startswith("full") and not grows:
            return
        self.met = self.met or what
        if fault.kind in CUTS:
            self.cut()
        if fault.kind.endswith("once"):
            self.heal()
        if fault.kind.startswith("full"):
            raise _error(apsw.FullError, apsw.SQLITE_FULL)
        raise _error(apsw.IOError, code)

    def read(self) -> None:
        """A read is no operation that is counted, but it can fail."""
        self.awake(apsw.SQLITE_IOERR_READ)
        fault = self._fault
        if fault and fault.kind.startswith("unreadable") and len(self.operations) >= fault.at:
            self.heal()
            self.met = "a read"
            raise _error(apsw.IOError, apsw.SQLITE_IOERR_READ)

    def awake(self, code: int) -> None:
        """Without power nothing is answered any more."""
        if self.dead:
            raise _error(apsw.IOError, code)


def _error(kind: type[apsw.Error], code: int) -> Exception:
    error: Any = kind("the disk fails")
    error.result = code & 0xFF
    error.extendedresult = code
    return error


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self.name = f"proof-{next(_numbers)}"
        self.disk = disk
        super().__init__(self.name, "")

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        return _File(self.disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.disk.delete(Path(filename).name, syncdir)
        super().xDelete(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        path = None if name is None else name if isinstance(name, str) else name.filename()
        self._name = path.rpartition("/")[2] if path else ""
        self._temporary = not path
        self._inode = disk.inode(self._name) if path else Inode()
        kinds = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
        self._syncs_folder = bool(flags[0] & kinds and flags[0] & apsw.SQLITE_OPEN_CREATE)

    def xRead(self, amount: int, offset: int) -> bytes:
        self._disk.read()
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:
        code = apsw.SQLITE_IOERR_WRITE
        self._disk.awake(code)
        try:
            if not self._temporary:
                self._disk.step(f"write {self._name} at {offset}", code, grows=True)
        except apsw.Error:
            self._written(bytes(data)[: self._disk.reached(len(data))], offset)
            raise
        self._written(bytes(data), offset)

    def _written(self, data: bytes, offset: int) -> None:
        self._inode.changes.append(Change(offset, data))
        super().xWrite(data, offset)  # pyright: ignore[reportUnknownMemberType]

    def xTruncate(self, newsize: int) -> None:
        if not self._temporary:
            code = apsw.SQLITE_IOERR_TRUNCATE
            self._disk.step(f"truncate {self._name} to {newsize}", code)
            self._inode.changes.append(Change(newsize, None))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        if self._temporary:
            return
        self._disk.sync(self._inode, self._name)
        if self._syncs_folder:
            self._disk.sync_folder()
            self._syncs_folder = False


class _Connection(ApswConnection):
    """SQLite's close succeeds whatever the disk says; through apsw an error would come out of it,
    because a disk in Python can only raise one.
    """

    def close(self) -> None:
        with contextlib.suppress(apsw.Error):
            super().close()


class DiskDriver(ApswDriver):
    """apsw on such a disk. The log is checkpointed early, so that short scripts meet it.

    Args:
        disk: whose files are opened.
        pages: after how many the log is checkpointed.
        modelled: whether the disk hears of it; if not, the files are plain ones.
    """

    def __init__(self, disk: Disk, pages: int = 12, *, modelled: bool = True) -> None:
        self.disk = disk
        self._vfs = disk.vfs.name if modelled else None
        self._pages = pages
        self._opened: list[Any] = []

    def open(self, path: Path, clock: Callable[[], float]) -> Connection:
        connection: Any = apsw.Connection(str(path), vfs=self._vfs)
        self._opened.append(connection)
        connection.create_scalar_function("onward_clock", clock, 0, deterministic=True)
        connection.set_busy_timeout(0)
        connection.execute(f"PRAGMA wal_autocheckpoint={self._pages}").fetchall()
        return _Connection(connection)

    def close(self) -> None:
        """Let go of whatever is still open: the machine is off."""
        for connection in self._opened:
            with contextlib.suppress(apsw.Error):
                connection.close(True)
        self.disk.vfs.unregister()
