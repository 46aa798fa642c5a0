"""The network address at which other ranks reach this one, as torch's gloo has it; RDMA cards."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import struct
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_VARIABLE = "GLOO_SOCKET_IFNAME"
_INFINIBAND = "/sys/class/infiniband"
_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE, _HOST_SCOPE = "00", "10"
SOCKETS_OF_A_RANK = 64
"""The most sockets that a rank has open, in a job of any size."""
_SETS, _SOCKETS_OF_STORE = 3, 16
"""Sets of connections (saves, loads, copies); what they, and channels, have to the job's store."""


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port.

    Its address is that of the first network interface that $GLOO_SOCKET_IFNAME names (names are
    separated by commas). Without the variable, it is the address of this machine's name; where that
    is no address of this machine, it is the loopback address.

    Raises RuntimeError, OSError.
    """
    names = os.environ.get(_VARIABLE, "")
    for host in _addresses_of_interfaces(names) if names else _addresses_of_this_machine():
        with suppress(OSError):
            return _listening_at(host)
    if not names:
        return _listening_at("127.0.0.1")
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise RuntimeError(
        f"{_VARIABLE}={names!r}: no such interface has an address; there are {known}"
    )


def listening_on_node() -> socket.socket:
    """Return a socket for processes in this network namespace; it has no file that could be left.

    Raises OSError.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0dcp_mem-{uuid.uuid4().hex}")
        listener.listen(socket.SOMAXCONN)
    except BaseException:
        listener.close()
        raise
    return listener


def network_namespace() -> int:
    """Return the number of what a node's sockets are in: containers may share tmpfs alone."""
    return os.stat("/proc/self/ns/net").st_ino


def rdma_devices(root: str = _INFINIBAND) -> tuple[str, ...]:
    """Return the cards that do RDMA (InfiniBand, RoCE, EFA) and have a link."""
    found = []
    for state in sorted(Path(root).glob("*/ports/*/state")):
        with suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
    return tuple(dict.fromkeys(found))


def check_open_files(ranks: int) -> None:
    """Check that this process may open the sockets that a rank needs.

    Raises RuntimeError.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    needed = min(SOCKETS_OF_A_RANK, _SOCKETS_OF_STORE + _SETS * ranks)
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise RuntimeError(
            f"this process has {used} open files, and dcp_mem needs up to {needed} more for "
            f"connections to other ranks, but the limit is {limit}: raise it in the shell that "
            f"starts the ranks, by `ulimit -n {max(4096, used + needed)}` (the hard limit is "
            f"{highest})"
        )


def is_out_of_files(error: OSError) -> bool:
    """Return whether an error says that this process, or this machine, has too many open files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def _listening_at(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _addresses_of_this_machine() -> Iterator[str]:
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])


def _addresses_of_interfaces(names: str) -> Iterator[str]:
    for name in names.split(","):
        yield from addresses_of_interface(name.strip())


def addresses_of_interface(name: str) -> Iterator[str]:
    """Yield an interface's addresses; none where there is no such interface."""
    yield from _ipv4_addresses(name)
    yield from _ipv6_addresses(name)


def _ipv4_addresses(interface: str) -> Iterator[str]:
    request = struct.pack("256s", interface.encode()[:15])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        yield socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, request)[20:24])


def _ipv6_addresses(interface: str) -> Iterator[str]:
    """Yield the addresses that hold beyond one link: those of a link differ in name per machine."""
    with suppress(OSError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope in (_GLOBAL_SCOPE, _HOST_SCOPE):
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
