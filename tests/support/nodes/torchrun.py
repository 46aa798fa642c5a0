"""A function run by torchrun on several nodes: one elastic agent on each, c10d rendezvous, gloo.

    job = start_job(nodes, directory, train, url, port=29401, ranks_per_node=2, nnodes="2:3")
    losses = job.results()  # what each rank returned
    [first, second] = job.wait()  # how each node's torchrun ended, whatever the end

Functions and arguments are pickled, so functions are defined at module level. A rank joins the
process group before its function is called; after a restart by torchrun the function is called
again, in fresh processes.
"""

import contextlib
import faulthandler
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import psutil
import torch.distributed as dist
from typing_extensions import TypeVarTuple, Unpack

from tests.support import REPOSITORY
from tests.support.nodes.inside import Program, torchrun
from tests.support.processes.forks import leave_group

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_RESULT_SECONDS = 120.0
_KILL_SECONDS = 10.0
_POLL_SECONDS = 0.01
_OUTPUT_CHARACTERS = 16384

# The defaults are made for jobs of hours: a quarter of a minute until a lost agent counts as lost,
# half a minute for late ones, a minute for a store that says nothing.
_RENDEZVOUS = {
    "last_call_timeout": 5,
    "join_timeout": 60,
    "read_timeout": 20,
    "keep_alive_interval": 1,
}


class Host(Protocol):
    """What a job has to know of a node."""

    name: str
    interface: str

    @property
    def is_alive(self) -> bool: ...

    def take_place(self, place: int) -> str:
        """An address of this node, that sorts among those of the others as `place` does."""
        ...

    @property
    def holder(self) -> int:
        """Id of a process in the node's namespaces, as long as it lives."""
        ...


@dataclass(frozen=True, slots=True)
class Ending(Generic[T]):
    """How torchrun ended on one node."""

    node: str
    exit_code: int
    """Of a signal, its negative number."""
    returned: Mapping[int, T]
    """What the ranks of this node returned, by rank; of several runs, what the last one did."""
    output: str = field(repr=False)
    """The end of what torchrun and its ranks have printed."""


class JobFailed(AssertionError):
    """A job did not end as it should, or not in time; with what its nodes printed."""


class Job(Generic[T]):
    """A running job. Whoever starts one closes it."""

    def __init__(self, start: Callable[[Host, int], "_Agent"]) -> None:
        self._start = start
        self._agents: list[_Agent] = []

    def join(self, node: Host) -> None:
        """Start torchrun on one more node; its ranks come last. `nnodes` must leave room for it."""
        self._agents.append(self._start(node, len(self._agents)))

    def wait(self, timeout: float = _RESULT_SECONDS) -> list[Ending[T]]:
        """How torchrun ended on each node, as soon as it has on all of them.

        Raises JobFailed after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while running := [
            agent.node.name for agent in self._agents if agent.process.poll() is None
        ]:
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"{', '.join(running)} still running after {timeout:.0f} s\n{self.output()}"
                )
            time.sleep(_POLL_SECONDS)
        return [agent.ending() for agent in self._agents]

    def results(self, timeout: float = _RESULT_SECONDS) -> list[T]:
        """What the ranks returned, by rank.

        Raises JobFailed where torchrun failed on a node that lives, or took longer.
        """
        self.wait(timeout)
        endings = [agent.ending() for agent in self._agents if agent.node.is_alive]
        if failed := [
            f"{ending.node}: {ending.exit_code}" for ending in endings if ending.exit_code
        ]:
            raise JobFailed(f"torchrun failed: {', '.join(failed)}\n{self.output()}")
        returned = {rank: value for ending in endings for rank, value in ending.returned.items()}
        return [returned[rank] for rank in sorted(returned)]

    def kill(self) -> None:
        """Kill torchrun and the ranks on every node. Detached processes, as the agent, live on."""
        for agent in self._agents:
            agent.kill()

    def output(self) -> str:
        """The end of what was printed on each node."""
        return "\n".join(f"--- {agent.node.name}\n{agent.output()}" for agent in self._agents)

    def close(self) -> None:
        """Kill what is left, and print all output: pytest shows it where the test failed."""
        self.kill()
        print(self.output())


def start_job(
    nodes: Sequence[Host],
    directory: Path,
    target: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    port: int,
    ranks_per_node: int = 1,
    nnodes: str | None = None,
    max_restarts: int = 0,
    env: Mapping[str, str] | None = None,
    env_of: Mapping[str, Mapping[str, str]] | None = None,
    store: str | None = None,
    patience: float = 20.0,
) -> Job[T]:
    """Start `target(*args)` on every rank; ranks are numbered in the order of `nodes`.

    directory: an empty one that all nodes share. port: where the rendezvous listens on the first
    node. nnodes: as torchrun's, by default all of `nodes`.
    env_of: more variables, for the nodes of these names. store: "host:port" of a rendezvous store
    that `serve_store` runs; by default the first node has it.
    patience: seconds that a collective waits for the others.
    """
    (directory / "job").write_bytes(pickle.dumps((target, args, patience)))
    endpoint = store or f"{nodes[0].take_place(0)}:{port}"

    def start(node: Host, place: int) -> _Agent:
        settings = _RENDEZVOUS | {"is_host": int(store is None and place == 0)}
        arguments = [
            f"--nnodes={nnodes or len(nodes)}",
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}",
                f"--rdzv-id={directory.name}",
            ),
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in settings.items())}",
            # torchrun numbers its ranks in the order of these addresses.
            *(f"--local-addr={node.take_place(place)}", f"--nproc-per-node={ranks_per_node}"),
            *(f"--max-restarts={max_restarts}", "-m", __name__, str(directory)),
        ]
        home = directory / node.name
        home.mkdir()
        environment = {
            **_environment(node, home),
            **(env or {}),
            **(env_of or {}).get(node.name, {}),
        }
        return _Agent(node, home, arguments, environment)

    job: Job[T] = Job(start)
    for node in nodes:
        job.join(node)
    return job


class _Agent:
    """One node's torchrun, and the files through which its ranks answer."""

    def __init__(
        self, node: Host, home: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.node = node
        self._home = home
        self._output = home / "output"
        self._output.touch()
        self.process = Program(node.holder, self._output, environment, torchrun, arguments, _main)

    def kill(self) -> None:
        if self.process.poll() is None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # It ends in this moment.
                family = psutil.Process(self.process.pid).children(recursive=True)
            for process in family:  # Parents come first, so torchrun starts no other ranks.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=_KILL_SECONDS)
            self.process.kill()
        self.process.wait()

    def ending(self) -> Ending[Any]:
        returned = dict(pickle.loads(path.read_bytes()) for path in self._home.glob("returned-*"))
        return Ending(self.node.name, self.process.wait(), returned, self.output())

    def output(self) -> str:
        return self._output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:].rstrip()


def _environment(node: Host, home: Path) -> dict[str, str]:
    paths = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GLOO_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": "1",
        "DCP_MEM_TEST_HOME": str(home),
    }


def serve_store(address: str) -> None:
    """Serve a rendezvous store on a free port until killed, and print its "host:port"."""
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    print(f"{store.host}:{store.port}", flush=True)
    while True:
        time.sleep(3600)


def _main(command: Sequence[str]) -> None:
    """The life of one rank."""
    directory = Path(command[-1])
    faulthandler.enable()
    warnings.filterwarnings("error", module=r"dcp_mem(\.|$)")
    target, args, patience = pickle.loads((directory / "job").read_bytes())
    answer = Path(os.environ["DCP_MEM_TEST_HOME"], f"returned-{os.environ['LOCAL_RANK']}")
    answer.unlink(missing_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    # one that ended sooner, with little to do, would break off the others' connecting
    dist.barrier()
    returned = pickle.dumps((dist.get_rank(), target(*args)))
    leave_group()
    temporary = answer.with_name(f".{answer.name}")
    temporary.write_bytes(returned)
    temporary.rename(answer)
