"""A TCP proxy in front of a server, which can be told to lose what passes: a network with faults on
order.

It forwards both ways until a fault is armed. A lost answer is one that the server has given and
nobody hears: the client cannot know whether what it asked for was done.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """A proxy on a free loopback port, until it is closed.

    Args:
        url: of the server that it stands in front of.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._faults: list[_Fault] = []
        self._open = True
        self.refusing = False
        """Whether new connections are closed at once."""
        self.lost: list[bytes] = []
        """What was lost so far, in order: requests that did not arrive, answers that were not
        heard.
        """
        port = self._listener.getsockname()[1]
        login = f"{parts.username}@" if parts.username else ""
        self.url = parts._replace(netloc=f"{login}127.0.0.1:{port}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answer(self, request: bytes, times: int = 1) -> None:
        """Cut the connection when the server has answered the next request that contains these
        bytes.
        """
        self._faults += [_Fault(request, answer=True)] * times

    def lose_request(self, request: bytes, times: int = 1) -> None:
        """Cut the connection before the next request that contains these bytes arrives."""
        self._faults += [_Fault(request, answer=False)] * times

    def cut(self) -> None:
        """Cut every connection that is open now."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def fault_for(self, data: bytes) -> _Fault | None:
        """The armed fault that a request meets, if any; each happens once."""
        with self._lock:
            for fault in self._faults:
                if fault.request in data:
                    self._faults.remove(fault)
                    return fault
        return None

    def _accept(self) -> None:
        while self._open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Fault:
    """One request to be unlucky with."""

    def __init__(self, request: bytes, *, answer: bool) -> None:
        self.request = request
        self.answer = answer


class _Link:
    """One connection through the proxy: a thread each way."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._deaf = False

    def start(self) -> None:
        for way in (self._up, self._down):
            threading.Thread(target=way, daemon=True).start()

    def _up(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(65_536):
                fault = self._proxy.fault_for(data)
                if fault is not None and not fault.answer:
                    self._proxy.lost.append(data)
                    break
                self._deaf = self._deaf or fault is not None
                self._server.sendall(data)
        self.close()

    def _down(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65_536):
                if self._deaf:
                    self._proxy.lost.append(data)
                    break
                self._client.sendall(data)
        self.close()

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._proxy.forget(self)
