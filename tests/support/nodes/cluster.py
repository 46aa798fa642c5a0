"""Several nodes on one machine, that can be killed, unplugged, throttled and replaced.

    with running_cluster(3) as cluster:
        job = cluster.launch(train, url, ranks_per_node=2, nnodes="2:3", max_restarts=1)
        cluster.nodes[2].kill()
        losses = job.results()

A node has a network, processes, mounts and a host name of its own: Linux namespaces, with a cable
to a switch (a bridge in a network namespace of its own) and a tmpfs on /dev/shm. All other files
are this machine's, which makes them the disk that all nodes share. Nothing has a name outside of
these namespaces, so clusters don't meet, and the kernel removes them with the processes in them,
which die with the test's process however that ends.

With DCP_MEM_TEST_ONE_MACHINE=1 the nodes share processes and IPC, as containers of one machine may.
Then they can read each other's memory, and NIXL goes over shared memory between them.

Needs root and the programs in `TOOLS`.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
from typing_extensions import TypeVarTuple, Unpack

from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import Job
from tests.support.nodes import torchrun
from tests.support.nodes.inside import Program
from tests.support.processes.launch import TETHER
from tests.support.storage.servers import ServerUnavailable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TOOLS = ("bash", "hostname", "ip", "mount", "nsenter", "setpriv", "tc", "unshare")

MEMORY = Path("/dev/shm")
"""Where every node has its tmpfs."""

IS_ONE_MACHINE = os.environ.get("DCP_MEM_TEST_ONE_MACHINE", "") == "1"
"""Whether nodes can read each other's memory."""


def job_on_nodes(storage: Path | None = None) -> Job:
    """A job with its memory in every node's own tmpfs, and its storage in a shared directory."""
    return Job(None if storage is None else str(storage), str(MEMORY / "dcp_mem"))


_SWITCH_ADDRESS = "10.77.0.254"
# Each job's rendezvous has a port of its own: that of a job which was killed may still be taken.
# They lie below those that the kernel gives to connections.
_FIRST_PORT = 29400
_MOST_NODES = 250
_FIRST_PLACE = 101  # Addresses are sorted as texts: each has to have three digits here.
_POLL_SECONDS = 0.01
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# The first process of its namespace adopts what detaches itself, and has to reap it: bash does.
_HOLD = "echo ready; while :; do sleep infinity & wait; done"
_NO_IPV6 = "if [ -e /proc/sys/net/ipv6 ]; then echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; fi"


class Node:
    """A node. Its paths are those that its processes see."""

    memory = MEMORY
    interface = "eth0"

    def __init__(self, number: int, switch: "_Namespaces", memory: "_Tmpfs", hosts: Path) -> None:
        self.name = f"node{number}-{memory.token}"
        self.address = _address(number)
        self._switch = switch
        self._number = number
        self._port = f"port{number}"
        mount = (
            f"mount -t tmpfs -o size={memory.nbytes},huge={memory.huge},mode=1777"
            f" {self.name} {MEMORY}"
        )
        self._namespaces = _Namespaces(
            f"set -e; hostname {self.name}; {mount}; mount --bind {hosts} /etc/hosts;"
            f" {_NO_IPV6}; {_HOLD}",
            beside=switch if IS_ONE_MACHINE else None,
        )
        try:
            ends = (
                f"{self._port} netns {switch.pid}",
                f"{self.interface} netns {self._namespaces.pid}",
            )
            _shell(f"ip link add {ends[0]} type veth peer name {ends[1]}")
            switch.run(f"ip link set {self._port} master switch up")
            address = f"ip addr add {self.address}/16 dev {self.interface}"
            self._namespaces.run(f"ip link set lo up; {address}; ip link set {self.interface} up")
        except BaseException:
            self.kill()
            raise

    @property
    def root(self) -> Path:
        """This node's `/` as this process reaches it, while the node lives."""
        return Path(f"/proc/{self._namespaces.pid}/root")

    @property
    def holder(self) -> int:
        """Id of the process that this node lives as long as."""
        return int(self._namespaces.pid)

    @property
    def is_alive(self) -> bool:
        return self._namespaces.is_alive

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this node."""
        return self._namespaces.inside(command)

    def take_place(self, place: int) -> str:
        """One more address of this node, that sorts among those of the others as `place` does."""
        address = _address(self._number, _FIRST_PLACE + place)
        self._namespaces.run(f"ip addr replace {address}/16 dev {self.interface}")
        return address

    def processes(self) -> list[psutil.Process]:
        """What runs on this node."""
        return self._namespaces.processes()

    def stopped(self) -> list[psutil.Process]:
        """What stands still on this node."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # It has ended since.
                if process.status() == psutil.STATUS_STOPPED:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Lose this node: kill all of its processes at once, and free its memory.

        Peers see their connections closed, as when a virtual machine is destroyed. After `unplug`
        they see nothing, as when the power fails.
        """
        self._namespaces.close()

    def unplug(self) -> None:
        """Take the cable out of the switch: nothing comes or goes, and nobody is told."""
        self._switch.run(f"ip link set {self._port} down")

    def plug_in(self) -> None:
        """Put the cable back."""
        self._switch.run(f"ip link set {self._port} up")

    def throttle(self, rate: str | None) -> None:
        """Limit traffic to `rate` each way (as tc writes it: "200mbit"); None removes the limit."""
        for namespaces, device in ((self._switch, self._port), (self._namespaces, self.interface)):
            if rate is None:
                namespaces.run(f"tc qdisc del dev {device} root")
            else:
                namespaces.run(
                    f"tc qdisc replace dev {device} root tbf rate {rate} burst 128kb latency 50ms"
                )


class Cluster:
    """Nodes on one switch, and the jobs that run on them."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, memory: "_Tmpfs") -> None:
        self.token = memory.token
        """Occurs in the name of every node, and in the source of its tmpfs."""
        self._stack = stack
        self._directory = directory
        self._memory = memory
        self._jobs = 0
        self._made: list[Node] = []
        self._hosts = directory / "hosts"
        names = [f"{_address(number)} node{number}-{memory.token}" for number in range(_MOST_NODES)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        self._switch = _Namespaces(_HOLD)
        stack.callback(self._switch.close)
        # Its own hardware address: else it takes one of its ports', another one when that goes, and
        # who knew it is lost.
        bridge = "ip link add switch address 02:00:00:00:00:01 type bridge"
        address = f"ip addr add {_SWITCH_ADDRESS}/16 dev switch"
        self._switch.run(
            f"{_NO_IPV6}; ip link set lo up; {bridge}; {address}; ip link set switch up"
        )

    @property
    def nodes(self) -> list[Node]:
        """The nodes that live, oldest first."""
        return [node for node in self._made if node.is_alive]

    def add(self) -> Node:
        """Add a node with empty memory, and with a name and an address that no other node had."""
        node = Node(len(self._made), self._switch, self._memory, self._hosts)
        self._stack.callback(node.kill)
        self._made.append(node)
        return node

    def launch(
        self,
        target: Callable[[Unpack[Ts]], T],
        *args: Unpack[Ts],
        nodes: Sequence[Node] | None = None,
        ranks_per_node: int = 1,
        nnodes: str | None = None,
        max_restarts: int = 0,
        env: Mapping[str, str] | None = None,
        env_of: Mapping[Node, Mapping[str, str]] | None = None,
        store: str | None = None,
        patience: float = 20.0,
    ) -> torchrun.Job[T]:
        """Start `target(*args)` on every rank of a torchrun job; see `torchrun.py`.

        The job runs over `nodes` (default: all that live).

        dcp_mem's memory root is a directory in the node's own memory, unless `env` has another.
        """
        self._jobs += 1
        directory = self._directory / f"job{self._jobs}"
        directory.mkdir()
        job: torchrun.Job[T] = torchrun.start_job(
            self.nodes if nodes is None else nodes,
            directory,
            target,
            *args,
            port=_FIRST_PORT + self._jobs,
            ranks_per_node=ranks_per_node,
            nnodes=nnodes,
            max_restarts=max_restarts,
            env={"DCP_MEM_ROOT": str(MEMORY / "dcp_mem"), **(env or {})},
            env_of={node.name: more for node, more in (env_of or {}).items()},
            store=store,
            patience=patience,
        )
        self._stack.callback(job.close)
        return job

    def serve_store(self) -> str:
        """Serve a rendezvous store on the switch, needing no node; return its "host:port"."""
        output = self._directory / "store"
        output.touch()
        store = Program(self._switch.pid, output, os.environ, torchrun.serve_store, _SWITCH_ADDRESS)
        self._stack.callback(store.wait)
        self._stack.callback(store.kill)
        while not (
            said := re.search(rf"^{_SWITCH_ADDRESS}:\d+$\n", output.read_text(), re.MULTILINE)
        ):
            if store.poll() is not None:
                raise ServerUnavailable(
                    f"the rendezvous store does not start:\n{output.read_text()}"
                )
            time.sleep(_POLL_SECONDS)
        return said[0].strip()


@contextlib.contextmanager
def running_cluster(
    nodes: int, *, memory_bytes: int = 256 << 20, huge: str = "never"
) -> Iterator[Cluster]:
    """A cluster of so many nodes; nothing of it is left at the end.

    memory_bytes, huge: size and huge pages ("never", "within_size", "always") of each node's tmpfs.
    Raises ServerUnavailable, with the reason, where there can be none.
    """
    _check()
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp_mem-cluster-"))
        )
        memory = _Tmpfs(f"{os.getpid()}-{secrets.token_hex(4)}", memory_bytes, huge)
        cluster = Cluster(stack, directory, memory)
        for _ in range(nodes):
            cluster.add()
        yield cluster


@dataclass(frozen=True, slots=True)
class _Tmpfs:
    """What nodes have for memory.

    token: part of their names, and of nothing else on this machine.
    """

    token: str
    nbytes: int
    huge: str


def _address(number: int, network: int = 0) -> str:
    return f"10.77.{network}.{number + 1}"


class _Namespaces:
    """A network, mounts, processes and a host name, held by a process; they end with it."""

    _OWN, _SHARED = ("--net", "--mount", "--uts"), ("--ipc", "--pid")
    _KINDS = (*_OWN, *_SHARED)

    def __init__(self, script: str, beside: "_Namespaces | None" = None) -> None:
        """script: what the holding process does; it says "ready", and doesn't end.

        beside: whose processes and IPC to share.
        """
        self._is_beside = beside is not None
        enter = (
            () if beside is None else ("nsenter", "--target", str(beside.pid), *self._SHARED, "--")
        )
        self._parent = subprocess.Popen(
            [
                *TETHER,
                *enter,
                "unshare",
                *(self._KINDS if beside is None else self._OWN),
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                script,
            ],
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._parent.stdout is not None
        with self._parent.stdout as output:
            said = output.readline()
            if said != "ready\n":
                self._parent.kill()
                self._parent.wait()
                raise ServerUnavailable(f"no namespaces can be made here: {said}{output.read()}")
        (holder,) = psutil.Process(self._parent.pid).children()
        if beside is not None:  # nsenter has a child of its own
            (holder,) = holder.children()
        self.pid: int = holder.pid

    @property
    def is_alive(self) -> bool:
        return self._parent.poll() is None

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` here."""
        if not self.is_alive:
            raise RuntimeError("killed before")
        return [
            "nsenter",
            "--target",
            str(self.pid),
            *self._KINDS,
            f"--wd={REPOSITORY}",
            "--",
            *command,
        ]

    def run(self, script: str) -> None:
        """Run a line of shell here.

        Raises ServerUnavailable with what it printed where that fails.
        """
        _shell(script, self.inside)

    def processes(self) -> list[psutil.Process]:
        """What runs here."""
        kind = "net" if self._is_beside else "pid"
        ours = _namespace(self.pid, kind)
        return [one for one in psutil.process_iter() if _namespace(one.pid, kind) == ours != ""]

    def close(self) -> None:
        """Kill all that runs here, and wait until it is gone."""
        if self.is_alive and self._is_beside:
            self._kill_each()
        elif self.is_alive:
            # The kernel ends a namespace's first process only after all others.
            os.kill(self.pid, signal.SIGKILL)
        self._parent.wait()

    def _kill_each(self) -> None:
        """Kill what runs here one by one, until nothing is left that was started meanwhile."""
        ours = _namespace(self.pid, "net")
        assert ours != _namespace(os.getpid(), "net")
        while left := [pid for pid in psutil.pids() if _namespace(pid, "net") == ours != ""]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def _shell(script: str, where: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
    command = where(["bash", "-e", "-c", script])
    done = subprocess.run(
        command, env={**os.environ, "PATH": _PATH}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ServerUnavailable(f"{script}: {done.stderr.strip()}")


def _namespace(pid: int, kind: str) -> str:
    """Which namespace a process is in; "" where it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def _check() -> None:
    if os.geteuid() != 0:
        raise ServerUnavailable("only root may make nodes: they are namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        raise ServerUnavailable(
            f"{', '.join(missing)} missing: Debian's iproute2, mount and util-linux have them"
        )
