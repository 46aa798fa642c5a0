"""The storage of a storm: a directory, or a server that is started once."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from random import Random

from tests.support.storage.servers import (
    BlobServer,
    S3Server,
    ServerUnavailable,
    StorageRoot,
    running_azurite,
    running_moto,
    running_radosgw,
)

AnyServer = S3Server | BlobServer
Running = Callable[[], AbstractContextManager[AnyServer]]

DIRECTORY = "directory"
ALL: Mapping[str, Running] = {
    "moto": running_moto,
    "azurite": running_azurite,
    "radosgw": running_radosgw,
}


@contextlib.contextmanager
def started(wanted: Mapping[str, Running]) -> Iterator[dict[str, AnyServer]]:
    """The servers that can be had here; the others are named."""
    with contextlib.ExitStack() as stack:
        found = {name: _entered(stack, name, running) for name, running in wanted.items()}
        yield {name: server for name, server in found.items() if server is not None}


def _entered(stack: contextlib.ExitStack, name: str, running: Running) -> AnyServer | None:
    try:
        return stack.enter_context(running())
    except ServerUnavailable as error:
        print(f"without {name}: {error}")
        return None


def chosen(servers: Mapping[str, AnyServer], share: float, chance: Random) -> str:
    """Name of a server for that share of rounds, else that of a directory."""
    return chance.choice(list(servers)) if servers and chance.random() < share else DIRECTORY


@contextlib.contextmanager
def fresh_root(servers: Mapping[str, AnyServer], name: str) -> Iterator[StorageRoot]:
    """An empty root there."""
    if name in servers:
        with servers[name].fresh_root() as root:
            yield root
    else:
        with tempfile.TemporaryDirectory(prefix="dcp_mem-storm-") as directory:
            yield StorageRoot(f"{directory}/root")
