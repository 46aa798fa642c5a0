"""A real NFSv4.2 mount for tests: nfs-ganesha here, and a guest kernel that mounts its export.

    with running_nfs(directory) as server, server.guest() as guest:
        # This runs in the guest, where the export is mounted on MOUNT.
        call = guest.start(save, "job")
        server.kill()
        server.start()
        assert call.result() == 7

The guest is User-Mode Linux: one CPU, whose root is this machine's file system, read-only, so that
it runs the same Python on the same code. Functions are sent by name, so they are defined at module
level. Server and guest have a network of their own, so ports and addresses are free, and nothing of
either outlives the context.

Needs root, /dev/net/tun and the programs in `TOOLS`; Debian's packages are named in `.ci/nfs`.
"""

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from tests.support import REPOSITORY
from tests.support.processes.launch import TETHER
from tests.support.storage.servers import ServerUnavailable

P = ParamSpec("P")
T = TypeVar("T")

MOUNT = "/mnt/nfs"
"""Where the guest has the export."""

EXCHANGE = "/mnt/exchange"
"""Where the guest has the directory through which it is told what to run."""

TOOLS = (
    "ganesha.nfsd",
    "ip",
    "linux.uml",
    "modprobe",
    "mount.nfs4",
    "nsenter",
    "setpriv",
    "unshare",
)

_MODULES = Path("/usr/lib/uml/modules")
_SERVER_ADDRESS, _GUEST_ADDRESS = "10.98.1.1", "10.98.1.2"
_MEMORY = "1G"
_SERVER_SECONDS = 120.0
_BOOT_SECONDS = 400.0  # most of it is importing torch
_CALL_SECONDS = 400.0  # the whole suite runs beside it, and the guest has one processor
_POLL_SECONDS = 0.005
_LOG_CHARACTERS = 4096

# Attributes are not cached: what a test puts straight into the exported directory is served at
# once, like the files of another client. After a restart the guest comes back within a lease, and
# the grace period ends then, so both are short; but a guest that gets no time for some seconds
# keeps its lease.
_CONFIGURATION = """
NFS_CORE_PARAM { Protocols = 4; NFS_Port = 2049; \
Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }
NFSV4 {
  Minor_Versions = 1, 2; Lease_Lifetime = 10; Grace_Period = 12; \
RecoveryRoot = @DIRECTORY@/recovery;
  Only_Numeric_Owners = true; Allow_Numeric_Owners = true;
}
MDCACHE { Dir_Chunk = 0; }
EXPORT {
  Export_Id = 1; Path = @DIRECTORY@/export; Pseudo = /export; \
Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
  Transports = TCP; Protocols = 4; Attr_Expiration_Time = 0; FSAL { Name = VFS; }
}
LOG { Default_Log_Level = EVENT; }
"""

_GUEST_INIT = f"""#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
fail() {{ echo "guest: $*"; halt -f -p; }}
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /mnt \
|| fail "no file systems"
mkdir -p /dev/shm /mnt/lib /mnt/tmp {MOUNT} {EXCHANGE}
mount -t tmpfs tmpfs /dev/shm && mount -t hostfs none {EXCHANGE} -o "$DIRECTORY/exchange" \
|| fail "no exchange"
ln -s {_MODULES} /mnt/lib/modules
modprobe -d /mnt nfsv4 || fail "no NFS client"
ip link set lo up && ip addr add {_GUEST_ADDRESS}/24 dev vec0 && ip link set vec0 up \
|| fail "no network"
mount -t nfs4 -o vers=4.2,proto=tcp,hard,sec=sys {_SERVER_ADDRESS}:/export {MOUNT} \
|| fail "can't mount"
cd "$REPOSITORY" && TMPDIR=/mnt/tmp PYTHONPATH=. OMP_NUM_THREADS=1 \
"$PYTHON" -B -m tests.support.storage.nfs_guest
fail "the server of calls has ended"
"""


class GuestFailed(AssertionError):
    """A call in the guest raised, died, or did not end in time; with what it printed."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A function that runs in the guest."""

    name: str
    exchange: Path = field(repr=False)
    guest: "subprocess.Popen[bytes]" = field(repr=False)

    @property
    def has_ended(self) -> bool:
        return self._status.exists()

    def result(self, timeout: float = _CALL_SECONDS) -> T:
        """What the function returned, as soon as it has. Raises GuestFailed."""
        deadline = time.monotonic() + timeout
        while not self.has_ended:
            if self.guest.poll() is not None or time.monotonic() > deadline:
                raise GuestFailed(
                    f"call {self.name} has not ended within {timeout:.0f} s\n{self._output()}"
                )
            time.sleep(_POLL_SECONDS)
        if self._status.read_text() != "0":
            raise GuestFailed(
                f"call {self.name} ended with {self._status.read_text()}\n{self._output()}"
            )
        returned: T = pickle.loads((self.exchange / f"{self.name}.returned").read_bytes())
        return returned

    def wait_for(self, word: str, timeout: float = _CALL_SECONDS) -> None:
        """Wait until the function has told this word (`tests.support.storage.nfs_guest.tell`).

        Raises GuestFailed.
        """
        deadline = time.monotonic() + timeout
        while not (self.exchange / f"{word}.word").exists():
            if self.has_ended or self.guest.poll() is not None or time.monotonic() > deadline:
                raise GuestFailed(f"call {self.name} has not told {word!r}\n{self._output()}")
            time.sleep(_POLL_SECONDS)

    @property
    def _status(self) -> Path:
        return self.exchange / f"{self.name}.status"

    def _output(self) -> str:
        return _tail(self.exchange / f"{self.name}.output")


class Guest:
    """A running guest. Each call is forked from a process that has imported torch and dcp_mem."""

    def __init__(self, exchange: Path, process: "subprocess.Popen[bytes]") -> None:
        self._exchange = exchange
        self._process = process
        self._count = 0

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Begin a call of a function that is defined at module level."""
        self._count += 1
        call: Call[T] = Call(str(self._count), self._exchange, self._process)
        _publish(self._exchange / f"{call.name}.call", pickle.dumps((function, args, kwargs)))
        return call

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns in the guest. Raises GuestFailed."""
        return self.start(function, *args, **kwargs).result()

    def tell(self, word: str) -> None:
        """Let a call go on that waits for this word (`nfs_guest.wait_for`)."""
        _publish(self._exchange / f"{word}.word", b"")


class NfsServer:
    """An NFS server whose exported directory lies on this machine, and the guests that mount it."""

    def __init__(self, directory: Path, namespaces: Sequence[str]) -> None:
        self._directory = directory
        self._inside = (*TETHER, *namespaces)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def export(self) -> Path:
        """The directory that is exported."""
        return self._directory / "export"

    def start(self) -> None:
        """Serve. After a kill, clients that come back find their files as they were.

        Raises ServerUnavailable.
        """
        log = self._directory / "ganesha.log"
        log.unlink(missing_ok=True)
        configuration = self._directory / "ganesha.conf"
        configuration.write_text(_CONFIGURATION.replace("@DIRECTORY@", str(self._directory)))
        pid_file = self._directory / "ganesha.pid"
        command = [
            "ganesha.nfsd",
            "-F",
            "-f",
            str(configuration),
            "-L",
            str(log),
            "-p",
            str(pid_file),
        ]
        self._process = subprocess.Popen(
            [*self._inside, *command], stdin=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + _SERVER_SECONDS
        while "NFS SERVER INITIALIZED" not in _text(log):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerUnavailable(f"nfs-ganesha does not start\n{_tail(log)}")
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """End the server at once; what its clients ask for waits until it is started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def guest(self) -> Iterator[Guest]:
        """A guest with the export mounted, ready for calls. Raises ServerUnavailable."""
        exchange, init, console = (
            self._directory / name for name in ("exchange", "init", "console")
        )
        exchange.mkdir()
        init.write_text(_GUEST_INIT)
        init.chmod(0o700)
        kernel = [
            *(
                "linux.uml",
                "rootfstype=hostfs",
                "rootflags=/",
                "ro",
                f"mem={_MEMORY}",
                f"uml_dir={self._directory}/",
            ),
            *(
                "con=null",
                "con0=null,fd:1",
                "vec0:transport=tap,ifname=tap0,depth=128,gro=1",
                f"init={init}",
            ),
            # What the kernel doesn't know it hands to init as environment.
            *(
                f"DIRECTORY={self._directory}",
                f"REPOSITORY={REPOSITORY}",
                f"PYTHON={sys.executable}",
            ),
        ]
        # In a process namespace of its own: the processes of the guest are ptraced children that
        # would outlive it.
        contained = [
            "unshare",
            "--pid",
            "--mount",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--",
            *kernel,
        ]
        with console.open("wb") as output, _process([*self._inside, *contained], output) as process:
            deadline = time.monotonic() + _BOOT_SECONDS
            while not (exchange / "ready").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerUnavailable(f"the guest does not come up\n{_tail(console)}")
                time.sleep(_POLL_SECONDS)
            yield Guest(exchange, process)


@contextlib.contextmanager
def running_nfs(directory: Path) -> Iterator[NfsServer]:
    """Start a server that exports a new directory below `directory`.

    `directory` must lie on a file system with handles (not overlay).

    Raises ServerUnavailable where a tool or a right is missing.
    """
    _check_tools()
    for name in ("export", "recovery"):
        (directory / name).mkdir()
    with contextlib.ExitStack() as stack:
        server = NfsServer(directory, stack.enter_context(_namespaces(directory)))
        stack.callback(server.kill)
        server.start()
        yield server


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise ServerUnavailable("only root may start an NFS server and a guest's network")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not _MODULES.is_dir():
        raise ServerUnavailable(
            f"{', '.join(missing) or _MODULES} is missing: `bash .ci/nfs` brings it"
        )
    if not Path("/dev/net/tun").exists():
        raise ServerUnavailable("/dev/net/tun is missing: the guest can have no network")


@contextlib.contextmanager
def _namespaces(directory: Path) -> Iterator[Sequence[str]]:
    """Make a network with the guest's device and separate mounts; yield the command's prefix."""
    network = (
        "set -e; ip link set lo up; ip tuntap add dev tap0 mode tap;"
        f" ip addr add {_SERVER_ADDRESS}/24 dev tap0; ip link set tap0 up;"
        f" touch {directory}/network; exec sleep infinity"
    )
    log = directory / "network.log"
    with (
        log.open("wb") as output,
        _process([*TETHER, "unshare", "--net", "--mount", "bash", "-c", network], output) as holder,
    ):
        deadline = time.monotonic() + _SERVER_SECONDS
        while not (directory / "network").exists():
            if holder.poll() is not None or time.monotonic() > deadline:
                raise ServerUnavailable(f"no network of its own can be made here\n{_tail(log)}")
            time.sleep(_POLL_SECONDS)
        yield (
            "nsenter",
            "--target",
            str(holder.pid),
            "--net",
            "--mount",
            f"--wd={directory}",
            "--",
        )


@contextlib.contextmanager
def _process(command: Sequence[str], output: Any) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _publish(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tail(path: Path) -> str:
    return _text(path)[-_LOG_CHARACTERS:]
