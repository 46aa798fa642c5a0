"""The directories of one demo: made for it, private to it, and removed after it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  not a temporary file: it is node memory
COPIES: Final = 4  # in memory at once: two kept, one being staged, one that a kill left behind


@dataclass(frozen=True, slots=True)
class Workplace:
    """The places of the demo's memory, its stored checkpoints, and its journals and logs."""

    memory: Path
    storage: str
    records: Path
    in_tmpfs: bool

    def run_directory(self, run: str) -> Path:
        """Return the directory for the journals of a run, made if need be."""
        directory = self.records / run
        directory.mkdir(exist_ok=True)
        return directory


@contextmanager
def workplace(storage: str | None, state_bytes: int, keep: bool) -> Iterator[Workplace]:
    """Make a fresh workplace; without `storage`, checkpoints are stored in it and go with it.

    Under a given `storage`, the demo adds a directory of its own and leaves it there.

    `storage`: directory or URL for stored checkpoints; None for the workplace's own. `state_bytes`:
    bytes of a checkpoint: they decide whether memory is in tmpfs.
    """
    with ExitStack() as owned:
        work = Path(tempfile.mkdtemp(prefix=f"dcp_mem-demo-{os.getpid()}-")).resolve()
        if not keep:
            owned.callback(shutil.rmtree, work, ignore_errors=True)
        in_tmpfs = fits_shared_memory(COPIES * state_bytes)
        memory = SHARED_MEMORY / work.name if in_tmpfs else work / "memory"
        memory.mkdir(mode=0o700)
        owned.callback(forget, memory)
        records = work / "records"
        records.mkdir()
        stored = f"{storage.rstrip('/')}/{work.name}" if storage else str(work / "storage")
        yield Workplace(memory, stored, records, in_tmpfs)


def fits_shared_memory(needed_bytes: int) -> bool:
    """Tell whether this machine has a tmpfs with that much room; containers often have 64 MiB.

    `needed_bytes`: the room in bytes.
    """
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed_bytes


def forget(memory: Path) -> None:
    """Remove a memory root and everything in it, as the loss of the node would."""
    if memory.exists():
        # Out of the way first: whoever still works in it can't put new files where old ones go.
        shutil.rmtree(memory.rename(memory.with_name(f"{memory.name}.gone")))
