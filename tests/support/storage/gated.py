"""A storage in this process whose uploads wait at a gate, or fail, as the test says.

`install()` makes it known as `gated://` and returns the gate; writers to it need `agent="thread"`.
"""

import threading
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_PATIENCE_SECONDS = 60.0


class Gate:
    """What uploads of segments pass. Open, and without failures, at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._changed = threading.Condition()
        self.arrived: list[str] = []
        """Paths of the segments that have come to the gate so far."""
        self.failure: Exception | None = None

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_for_arrival(self, count: int = 1) -> None:
        """Until so many segments have come to the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, _PATIENCE_SECONDS)

    def pass_by(self, path: str) -> None:
        with self._changed:
            self.arrived.append(path)
            self._changed.notify_all()
        assert self._open.wait(_PATIENCE_SECONDS)
        if self.failure is not None:
            raise self.failure


class GatedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    protocol = "gated"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    gate = Gate()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and path.endswith(".distcp"):
            self.gate.pass_by(path)
        return super()._open(path, mode, **options)


def install() -> Gate:
    """Make `gated://` known to fsspec in this process; returns the gate that all of it shares."""
    fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
    return GatedFileSystem.gate


def files() -> list[str]:
    """Everything stored there."""
    return sorted(path.lstrip("/") for path in GatedFileSystem.store)
