"""A server that drops bodies in the kernel and serves zeros, so that only clients are measured.

    python -m benchmarks.harness.storage.sink [NICE]

prints its port, and serves until its standard input ends.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from contextlib import suppress

from benchmarks.harness.storage.dialects import KEPT_BYTES, Answer, Store, headers, parsed

MOST_AT_ONCE = 64 << 20
HEAD_BYTES = 64 << 10
NOWHERE = mmap.mmap(-1, MOST_AT_ONCE)
"""Where dropped bytes would go: MSG_TRUNC writes nothing, so its pages never exist."""


class Closed(Exception):
    """The client has gone."""


class Connection:
    """One client's requests, answered one after the other."""

    def __init__(self, sock: socket.socket, store: Store, zeros: int) -> None:
        self._socket = sock
        self._store = store
        self._zeros = zeros
        self._ahead = bytearray()

    def serve(self) -> None:
        with suppress(Closed, OSError), self._socket:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                self._serve_one()

    def _serve_one(self) -> None:
        head = self._until(b"\r\n\r\n")
        fields = headers(head.split("\r\n")[1:])
        if fields.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fields.get("transfer-encoding", "").lower() == "chunked":
            nbytes, body = self._drop_chunks(), b""
        else:
            nbytes = int(fields.get("content-length", "0"))
            body = self._take(nbytes) if nbytes <= KEPT_BYTES else self._drop(nbytes)
        nbytes = int(fields.get("x-amz-decoded-content-length", nbytes))
        request = parsed(head, nbytes, body)
        self._send(self._store.answer(request), fields, only_head=request.method == "HEAD")

    def _send(self, answer: Answer, fields: dict[str, str], *, only_head: bool) -> None:
        nbytes = len(answer.body) if answer.served is None else answer.nbytes
        lines = [
            f"HTTP/1.1 {answer.status}",
            *(f"{name}: {value}" for name, value in answer.headers),
            'ETag: "0x8DC0000000000"',
            "Last-Modified: Fri, 01 Nov 2024 00:00:00 GMT",
            "Date: Fri, 01 Nov 2024 00:00:00 GMT",
            "x-ms-version: 2021-12-02",
            "x-ms-request-id: 1",
            "x-ms-request-server-encrypted: true",
            f"x-ms-client-request-id: {fields.get('x-ms-client-request-id', '')}",
            "x-amz-request-id: 1",
            "x-goog-generation: 1",
        ]
        if not answer.status.startswith("204"):
            lines.append(f"Content-Length: {nbytes}")
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        if only_head:
            return
        if answer.served is None:
            self._socket.sendall(answer.body)
        elif answer.served.body is not None:
            self._socket.sendall(
                memoryview(answer.served.body)[answer.start : answer.start + nbytes]
            )
        else:
            self._send_zeros(nbytes)

    def _send_zeros(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= os.sendfile(self._socket.fileno(), self._zeros, 0, min(nbytes, MOST_AT_ONCE))

    def _until(self, end: bytes) -> str:
        """Return what comes before `end`; bytes read behind it are kept."""
        while (found := self._ahead.find(end)) < 0:
            got = self._socket.recv(HEAD_BYTES)
            if not got:
                raise Closed
            self._ahead += got
        before = self._ahead[:found].decode("latin-1")
        del self._ahead[: found + len(end)]
        return before

    def _take(self, nbytes: int) -> bytes:
        while len(self._ahead) < nbytes:
            got = self._socket.recv(HEAD_BYTES)
            if not got:
                raise Closed
            self._ahead += got
        taken = bytes(self._ahead[:nbytes])
        del self._ahead[:nbytes]
        return taken

    def _drop(self, nbytes: int) -> bytes:
        known = min(nbytes, len(self._ahead))
        del self._ahead[:known]
        nbytes -= known
        while nbytes:
            # All of it in one call: this process is a neighbour of the client that is measured.
            flags = socket.MSG_TRUNC | socket.MSG_WAITALL
            got = self._socket.recv_into(NOWHERE, min(nbytes, MOST_AT_ONCE), flags)
            if not got:
                raise Closed
            nbytes -= got
        return b""

    def _drop_chunks(self) -> int:
        total = 0
        while size := int(self._until(b"\r\n").partition(";")[0], 16):
            self._drop(size)
            self._until(b"\r\n")
            total += size
        while self._until(b"\r\n"):  # trailers
            pass
        return total


def main() -> None:
    if sys.argv[1:]:
        os.nice(int(sys.argv[1]))
    zeros = os.memfd_create("zeros")
    os.truncate(zeros, MOST_AT_ONCE)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(listener, zeros), daemon=True).start()
    sys.stdin.buffer.read()


def _accept(listener: socket.socket, zeros: int) -> None:
    store = Store()
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=Connection(sock, store, zeros).serve, daemon=True).start()


if __name__ == "__main__":
    main()
