"""The greeting of a connection: both ends prove that they belong to one job.

    who dials   -> who listens   its number, a random text, and a proof
    who listens -> who dials     a proof

A proof is an HMAC of the number, the random text and the address that was dialled: who is dialled
in another's place can't pass it on. Its key is the listener's token, which is in the job's store,
and a secret, which is in no store:

    with $DCP_MEM_SECRET_FILE    what that file holds, for all connections
    else, on one machine         what `.secret` in the default memory root holds; where that can't
                                 be used, in a private directory for temporary files
    else                         nothing: who can read the store can greet
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import stat
import tempfile
import time
from collections.abc import Callable

from dcp_mem.comm.addresses import is_out_of_files
from dcp_mem.comm.timed_store import LOOK_SECONDS, NotCome
from dcp_mem.common.files import own_directory, settled
from dcp_mem.common.log import log_once
from dcp_mem.config import memory_root_path
from dcp_mem.errors import DcpMemError

_VARIABLE = "DCP_MEM_SECRET_FILE"
_TOKEN_NBYTES, _NUMBER_NBYTES, _NONCE_NBYTES, _PROOF_NBYTES = 16, 4, 16, 32
_HEAD_NBYTES = _NUMBER_NBYTES + _NONCE_NBYTES
_HELLO_NBYTES = _HEAD_NBYTES + _PROOF_NBYTES
_LEAST_NBYTES, _MOST_NBYTES = 16, 4096
"""Bytes of a secret."""
_DIALS, _LISTENS = b"dials", b"listens"
MOST_GREETINGS = 64
"""Connections whose greeting is awaited; a rank has fewer children."""
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 60,
    socket.TCP_KEEPINTVL: 15,
    socket.TCP_KEEPCNT: 8,
}
"""A peer's machine that is gone without a word is noticed within three minutes."""
_NOBODYS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that no machine has."""
Address = tuple[str, int]


class Unreachable(NotCome):
    """The peer isn't there, or doesn't prove that it belongs to this job."""


class Door:
    """A listening socket for ranks of the job; a connection that fails the greeting is closed.

    `address`: host and port, or the name of a socket of this node, and 0; whoever connects must
    know it by these. `token`: what they must know besides.
    """

    def __init__(self, listener: socket.socket) -> None:
        """Take over a socket that listens."""
        listener.setblocking(False)
        self._listener = listener
        self._greetings: dict[socket.socket, bytearray] = {}
        name = listener.getsockname()
        # The abstract name of a Unix socket, which begins with a zero, comes as bytes.
        self.address: Address = (name.decode(), 0) if isinstance(name, bytes) else name[:2]
        self.token = secrets.token_bytes(_TOKEN_NBYTES)

    def welcome(self, seconds: float) -> tuple[int, socket.socket] | None:
        """Go on with connections that begin; return one that has begun, with its number."""
        with selectors.PollSelector() as selector:
            for waiting in (self._listener, *self._greetings):
                selector.register(waiting, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(seconds)]
        for one in [one for one in self._greetings if one in ready]:
            if (heard := self._heard(one)) is not None:
                return heard
        if self._listener in ready:  # last: it may close the connection that is silent longest
            self._accept()
        return None

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()
        for connection in self._greetings:
            connection.close()
        self._greetings.clear()

    def _accept(self) -> None:
        is_full = False
        try:
            self._greetings[self._listener.accept()[0]] = bytearray()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            is_full = is_out_of_files(error) and bool(self._greetings)
            if not is_full:
                raise
        if is_full or len(self._greetings) > MOST_GREETINGS:  # strangers that say nothing
            oldest = next(iter(self._greetings))
            del self._greetings[oldest]
            oldest.close()

    def _heard(self, connection: socket.socket) -> tuple[int, socket.socket] | None:
        """Read of a greeting what there is, and answer it; close a stranger's connection."""
        hello = self._greetings[connection]
        try:
            data = connection.recv(_HELLO_NBYTES - len(hello), socket.MSG_DONTWAIT)
            hello += data
            if data and len(hello) < _HELLO_NBYTES:
                return None
            del self._greetings[connection]
            if len(hello) < _HELLO_NBYTES:
                raise ConnectionError
            head = bytes(hello[:_HEAD_NBYTES])
            is_near = connection.family == socket.AF_UNIX
            host = self.address[0] if is_near else connection.getpeername()[0]
            key = self.token + _secret_with(host)
            if hmac.compare_digest(hello[_HEAD_NBYTES:], _proof(key, _DIALS, self.address, head)):
                connection.sendall(_proof(key, _LISTENS, self.address, head))
                return int.from_bytes(head[:_NUMBER_NBYTES], "little"), connection
        except BlockingIOError:
            return None
        except OSError:
            self._greetings.pop(connection, None)
        except RuntimeError as error:  # whoever dialled may be a stranger; a rank raises it as well
            log_once(f"a connection is refused: {error}", logging.WARNING)
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None


def accepted(
    door: Door, deadline: float, look: Callable[[], None] = lambda: None
) -> tuple[int, socket.socket]:
    """Return the next connection that greets as one of this job, and the number that it gives.

    `deadline`: until when to wait, in seconds of the monotonic clock. `look`: called about once a
    second meanwhile; raises where waiting is in vain. Raises NotCome, RuntimeError.
    """
    while (left := deadline - time.monotonic()) > 0:
        try:
            come = door.welcome(min(left, LOOK_SECONDS))
        except OSError as error:
            raise RuntimeError(f"no connection can be accepted: {error}") from None
        if come is not None:
            return come[0], _tuned(come[1])
        look()
    raise NotCome


def dialled(
    address: Address,
    token: bytes,
    deadline: float,
    look: Callable[[], None] = lambda: None,
    number: int = 0,
) -> socket.socket:
    """Return a connection to a peer that listens, once it has proved that it is of this job.

    `deadline`, `look`: as of `accepted`. Raises NotCome, Unreachable, RuntimeError.
    """
    where = f"{address[0]}, port {address[1]}" if address[1] else address[0][1:]
    try:
        connection = _connected(address, max(deadline - time.monotonic(), 0.001))
    except OSError as error:
        if is_out_of_files(error):
            raise RuntimeError(f"no connection can be made: {error}") from None
        raise Unreachable(f"can't be reached at {where}: {error}") from None
    try:
        _greet(connection, address, token, number, deadline, look)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise Unreachable(f"its connection has closed at {where}: {error}") from None
        raise
    return _tuned(connection)


def _connected(address: Address, seconds: float) -> socket.socket:
    if address[1]:
        return socket.create_connection(address, seconds)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(address[0])
    except BaseException:
        connection.close()
        raise
    return connection


def _greet(
    connection: socket.socket,
    address: Address,
    token: bytes,
    number: int,
    deadline: float,
    look: Callable[[], None],
) -> None:
    """Greet who listens at the address that was dialled, and wait for the proof of who it is."""
    head = number.to_bytes(_NUMBER_NBYTES, "little") + secrets.token_bytes(_NONCE_NBYTES)
    key, answer = token + _secret_with(address[0]), b""
    connection.sendall(head + _proof(key, _DIALS, address, head))
    while len(answer) < _PROOF_NBYTES:
        left = deadline - time.monotonic()
        connection.settimeout(max(min(left, LOOK_SECONDS), 0.001))
        try:
            data = connection.recv(_PROOF_NBYTES - len(answer))
        except TimeoutError:
            if left <= 0:
                raise NotCome from None
            look()
            continue
        if not data:
            raise ConnectionError(
                f"it has ended, or has another secret than this process: {_where()}"
            )
        answer += data
    if not hmac.compare_digest(answer, _proof(key, _LISTENS, address, head)):
        raise ConnectionError(f"somebody else answers there, without the secret: {_where()}")


def _tuned(connection: socket.socket) -> socket.socket:
    """Have a connection not block, send small messages at once, and notice a lost machine."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _proof(key: bytes, role: bytes, address: Address, head: bytes) -> bytes:
    return hmac.digest(key, b" ".join([role, *map(str.encode, map(str, address)), head]), "sha256")


def _secret_with(host: str) -> bytes:
    """Return the secret for connections with a host; b"" where there is none in common."""
    if path := os.environ.get(_VARIABLE, ""):
        try:
            return _secret(_made(path))
        except OSError as error:
            raise _unusable(path, str(error)) from None
    return _secret_of_machine() if _is_here(host) else b""


def _secret_of_machine() -> bytes:
    root, temporary = memory_root_path(None), os.path.realpath(tempfile.gettempdir())
    try:
        path = _made_in(root)
    except (OSError, DcpMemError) as error:
        try:
            path = _made_in(os.path.join(temporary, f"dcp_mem-{os.geteuid()}"))
        except (OSError, DcpMemError):
            raise _unusable(root, str(error)) from None
    return _secret(path, os.O_NOFOLLOW)


def _made_in(root: str) -> str:
    """Return the path of a secret in a private directory, both made where they are missing."""
    return _made(os.path.join(own_directory(root), ".secret"))


def _made(path: str) -> str:
    """Return a path at which the first process that asks makes a secret."""
    if not os.path.lexists(path):
        try:
            settled(path, secrets.token_hex(32).encode())
        except DcpMemError as error:
            raise OSError(str(error)) from None
    return path


def _secret(path: str, flags: int = 0) -> bytes:
    """Return the secret in a private file."""
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with open(os.open(path, flags), "rb") as stream:
            facts = os.fstat(stream.fileno())
            # Of root, as Kubernetes mounts secrets, the group of the pod may read it.
            others = 0o077 if facts.st_uid == os.geteuid() else 0o007
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
                raise _unusable(path, "it isn't a file of yours")
            if facts.st_mode & others:
                raise _unusable(path, "others may read it (chmod 600)")
            secret = stream.read(_MOST_NBYTES).strip()
    except OSError as error:
        raise _unusable(path, str(error)) from None
    if len(secret) < _LEAST_NBYTES:
        raise _unusable(path, f"it holds less than {_LEAST_NBYTES} bytes")
    return secret


def _unusable(path: str, why: str) -> RuntimeError:
    return RuntimeError(f"{path} can't keep the ranks' secret: {why} ({_VARIABLE} names a file)")


def _where() -> str:
    """Return where the secret comes from, for people."""
    if path := os.environ.get(_VARIABLE, ""):
        return f"{_VARIABLE}={path} must be set alike on all ranks"
    return (
        f"ranks of one machine find it in {memory_root_path(None)} (set DCP_MEM_ROOT alike on all "
        f"of them, or {_VARIABLE} to one file that all ranks can read)"
    )


def _is_here(host: str) -> bool:
    """Return whether an address is one of this machine, or of its network namespace."""
    if host.startswith("\0"):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Some machines bind any address: nothing is known of theirs.
    return _binds(family, host) and not _binds(family, _NOBODYS[family])


def _binds(family: socket.AddressFamily, host: str) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        try:
            trying.bind((host, 0))
        except OSError:
            return False
        return True
