"""A stretch of wire between a worker and its server, which tests cut, freeze and mend.

with Wire(port) as wire:
    url = wire.url("postgresql://postgres@127.0.0.1:5432/shop")
    wire.cut()
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Self
from urllib.parse import urlsplit

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a time of 0: closing sends a reset and no good-bye."""


class Wire:
    """Forwards TCP connections to a port of this machine, on a thread of its own.

    `refuses` lets no new connection through; `frozen` holds every byte back and closes nothing, so
    that both sides believe in a connection that leads nowhere. `idle_limit` cuts a connection on
    which nothing has passed for so many seconds: by a reset, or `silently`, by freezing it alone.
    """

    def __init__(self, port: int, idle_limit: float | None = None, silently: bool = False) -> None:
        self._target = port
        self._idle_limit = idle_limit
        self._silently = silently
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._used: dict[socket.socket, float] = {}
        self._deaf: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._over = False
        self.frozen = False
        self.refuses = False
        self.cuts = 0
        self._door = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._door.setblocking(False)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def url(self, url: str) -> str:
        """The same database, over this wire."""
        parts = urlsplit(url)
        port = self._door.getsockname()[1]
        return parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()
        self.cut()
        self._door.close()

    def cut(self) -> int:
        """Reset every connection; returns how many there were."""
        with self._lock:
            ends = list(self._pairs)
            for end in ends:
                self._drop(end)
        return len(ends) // 2

    def deafen(self) -> int:
        """Swallow from now on what comes over the connections that there are, without a word; new
        ones work. Returns how many there are.
        """
        with self._lock:
            self._deaf |= set(self._pairs)
            return len(self._pairs) // 2

    @property
    def hears(self) -> bool:
        """Whether there is a connection that works."""
        with self._lock:
            return bool(self._pairs.keys() - self._deaf)

    @property
    def connections(self) -> int:
        return len(self._pairs) // 2

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            with self._lock:
                self._cut_idle()
                ready = self._ready()
                for end in ready:
                    if end is self._door:
                        self._accept()
                    elif end in self._pairs:
                        self._forward(end)
            if not ready:
                time.sleep(0.002)

    def _ready(self) -> list[socket.socket]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._door, selectors.EVENT_READ)
            if not self.frozen:
                for end in self._pairs.keys() - self._deaf:
                    selector.register(end, selectors.EVENT_READ)
            found = selector.select(0)
            return [key.fileobj for key, _ in found if isinstance(key.fileobj, socket.socket)]

    def _accept(self) -> None:
        near, _ = self._door.accept()
        far = None
        if not self.refuses:
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", self._target), 5)
        if far is None:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            one.settimeout(10)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = other
            self._used[one] = time.monotonic()

    def _forward(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            data = end.recv(65_536)
            if not data:
                raise ConnectionResetError
            other.sendall(data)
        except OSError:
            self._drop(end)
        else:
            self._used[end] = self._used[other] = time.monotonic()

    def _cut_idle(self) -> None:
        if self._idle_limit is None:
            return
        limit = time.monotonic() - self._idle_limit
        for end in [end for end, used in self._used.items() if used < limit]:
            if end not in self._pairs or end in self._deaf:
                continue
            self.cuts += 1
            if self._silently:
                self._deaf |= {end, self._pairs[end]}
            else:
                self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        other = self._pairs.pop(end, None)
        for side in (end, other):
            if side is not None:
                self._pairs.pop(side, None)
                self._used.pop(side, None)
                self._deaf.discard(side)
                with contextlib.suppress(OSError):
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                side.close()
