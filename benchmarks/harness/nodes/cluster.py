"""Nodes as Linux namespaces on one switch: made, lost and throttled.

A node has a host name, a network, processes and mounts of its own, with a tmpfs on /dev/shm; all
other files are this machine's. A process holds the namespaces: when it ends, the kernel ends every
process in them and frees their memory. Each holder dies with the process that made it.

Needs root and the programs in `TOOLS`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.runs import BENCHMARKS
from benchmarks.harness.scratch import Skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOOLS = ("bash", "hostname", "ip", "mount", "nsenter", "setpriv", "tc", "unshare")
MEMORY = Path("/dev/shm")
"""Where every node has its tmpfs."""
INTERFACE = "eth0"
MOST_NODES = 100

_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
_KINDS = ("--net", "--mount", "--uts", "--ipc", "--pid")
_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
# The first process of a namespace adopts what detaches itself, and has to reap it: bash does.
_HOLD = "echo ready; while :; do sleep infinity & wait; done"
_NO_IPV6 = "if [ -e /proc/sys/net/ipv6 ]; then echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; fi"


class Namespaces:
    """Namespaces of their own, held by a process."""

    def __init__(self, script: str) -> None:
        """Start the holding process.

        Args:
            script: What it does; it says "ready", and doesn't end.

        Raises:
            Skipped: No namespaces can be made here.
        """
        unshare = ("unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc")
        self._parent = subprocess.Popen(
            [*_DIES_WITH_PARENT, *unshare, "bash", "-c", script],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._parent.stdout is not None
        with self._parent.stdout as output:
            if (said := output.readline()) != "ready\n":
                self._parent.kill()
                self._parent.wait()
                raise Skipped(f"no namespaces can be made here: {said}")
        children = Path(f"/proc/{self._parent.pid}/task/{self._parent.pid}/children")
        self.pid = int(children.read_text())

    @property
    def is_alive(self) -> bool:
        return self._parent.poll() is None

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in here, in the repository's root."""
        directory = f"--wd={BENCHMARKS.parent}"
        return ["nsenter", "--target", str(self.pid), *_KINDS, directory, "--", *command]

    def run(self, script: str) -> None:
        """Run a line of shell in here."""
        _run(self.inside(["bash", "-e", "-c", script]))

    def close(self) -> None:
        """Kill all processes in here, and wait until they are gone."""
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)  # the kernel kills all other processes in here first
        self._parent.wait()


@dataclass(frozen=True, slots=True)
class Node:
    """A node, its address and the switch that it is connected with."""

    address: str
    port: str
    namespaces: Namespaces
    switch: Namespaces

    def lose(self) -> None:
        """Kill all of the node's processes; its memory is gone."""
        self.namespaces.close()

    def throttle(self, rate: str) -> None:
        """Limit what goes in and out of the node.

        Args:
            rate: As tc writes it ("4gbit").
        """
        for namespaces, device in ((self.switch, self.port), (self.namespaces, INTERFACE)):
            limit = f"tbf rate {rate} burst 128kb latency 50ms"
            namespaces.run(f"tc qdisc replace dev {device} root {limit}")


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Nodes on one switch; jobs keep their files in `directory`."""

    directory: Path
    memory_bytes: int
    huge: str
    switch: Namespaces
    stack: ExitStack
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    made: list[Node] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that live, oldest first."""
        return [node for node in self.made if node.namespaces.is_alive]

    def add(self) -> Node:
        """Add a node with an empty memory, and a name and an address that no other had."""
        number = len(self.made)
        name, port = f"node{number}-{self.token}", f"port{number}"
        mount = f"size={self.memory_bytes},huge={self.huge},mode=1777 {name} {MEMORY}"
        hosts = f"mount --bind {self.directory / 'hosts'} /etc/hosts"
        namespaces = Namespaces(
            f"set -e; hostname {name}; mount -t tmpfs -o {mount}; {hosts}; {_NO_IPV6}; {_HOLD}"
        )
        self.stack.callback(namespaces.close)
        ends = f"{port} netns {self.switch.pid} type veth peer name {INTERFACE}"
        _run(["bash", "-e", "-c", f"ip link add {ends} netns {namespaces.pid}"])
        self.switch.run(f"ip link set {port} master switch up")
        address = f"ip addr add {_address(number)}/16 dev {INTERFACE}"
        namespaces.run(f"ip link set lo up; {address}; ip link set {INTERFACE} up")
        self.made.append(Node(_address(number), port, namespaces, self.switch))
        return self.made[-1]


@contextmanager
def running_cluster(count: int, *, memory_bytes: int, huge: str) -> Iterator[Cluster]:
    """Make a cluster of so many nodes; nothing of it is left at the end.

    Args:
        memory_bytes: Size of each node's tmpfs.
        huge: Its huge pages: "never", "within_size" or "always".

    Raises:
        Skipped: No nodes can be made here.
    """
    _check()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp_mem-bench-nodes-"))
        switch = Namespaces(_HOLD)
        stack.callback(switch.close)
        # A hardware address of its own: else the switch takes a port's, and changes it with that.
        bridge = "ip link add switch address 02:00:00:00:00:01 type bridge"
        switch.run(f"{_NO_IPV6}; ip link set lo up; {bridge}; ip link set switch up")
        cluster = Cluster(
            directory=Path(directory),
            memory_bytes=memory_bytes,
            huge=huge,
            switch=switch,
            stack=stack,
        )
        hosts = [f"{_address(one)} node{one}-{cluster.token}" for one in range(MOST_NODES)]
        (cluster.directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        for _ in range(count):
            cluster.add()
        yield cluster


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"{command[-1]}: {done.stderr.strip()}")


def _check() -> None:
    if os.geteuid() != 0:
        raise Skipped("only root may make nodes: they are namespaces")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None]
    if missing:
        raise Skipped(f"{', '.join(missing)} missing: Debian's iproute2, mount and util-linux")
