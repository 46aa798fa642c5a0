"""A proxy that counts what a server sends through it."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 1 << 20


class Counter:
    """Counts the bytes that the server sends, headers included."""

    def __init__(self, listener: socket.socket, server: tuple[str, int]) -> None:
        self._listener = listener
        self._server = server
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.fetched = 0

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"http://{host}:{port}"

    def accept(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                with self._lock:
                    self._sockets += [client, server]
                threading.Thread(
                    target=self._pass_on, args=(client, server, False), daemon=True
                ).start()
                threading.Thread(
                    target=self._pass_on, args=(server, client, True), daemon=True
                ).start()

    def close(self) -> None:
        with self._lock:
            for sock in self._sockets:
                sock.close()

    def _pass_on(self, source: socket.socket, destination: socket.socket, counted: bool) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        with suppress(OSError):
            while got := source.recv_into(buffer):
                destination.sendall(buffer[:got])
                if counted:
                    with self._lock:
                        self.fetched += got
        with suppress(OSError):
            destination.shutdown(socket.SHUT_WR)


@contextmanager
def counting(server: tuple[str, int]) -> Iterator[Counter]:
    """Run a proxy in front of a server, in threads of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        counter = Counter(listener, server)
        threading.Thread(target=counter.accept, daemon=True).start()
        try:
            yield counter
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            counter.close()
