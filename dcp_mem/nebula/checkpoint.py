"""Checkpoints as Nebula has them: files by name under a tag, each of them any object that can be pickled."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any

import torch
import torch.distributed as dist

from dcp_mem.config import Settings, checkpoint_name
from dcp_mem.dcp_call import direct_call
from dcp_mem.errors import CheckpointNotFound, ConfigError, DcpMemError, RankFailed
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.nebula.completing import EACH_FILE, ON_COMMIT
from dcp_mem.nebula.peers import Peers, Prior
from dcp_mem.nebula.run import Run, current, join, run_elsewhere, run_for
from dcp_mem.operating import housekeeping, inventory
from dcp_mem.operating.contents import contents
from dcp_mem.operating.inventory import MEMORY, STORAGE
from dcp_mem.operating.promote import promote
from dcp_mem.operating.streams import open_stream
from dcp_mem.saving.streams import name_of_rank
from dcp_mem.storage import Storage
from dcp_mem.storage.listing import committed_under
from dcp_mem.storage.routes import open_storage


class Checkpoint:
    """One checkpoint: files are saved under its tag, or loaded from there.

    tag: its name; "" has one made, the same on all ranks that make one as well. num_of_files: when it is complete. -1: with each
    file that any rank saves; n: once the ranks have saved n files together; -2: once every rank has called `commit`. It is there
    for a restart once it is complete on all ranks, and not before. Make it on all ranks, also those that save nothing. Raises
    ConfigError.
    """

    def __init__(self, tag: str = "", num_of_files: int = EACH_FILE) -> None:
        if type(num_of_files) is not int or num_of_files < ON_COMMIT or num_of_files == 0:
            raise ConfigError(
                f"num_of_files={num_of_files!r}: give how many files make a checkpoint, -1 for any, -2 to call commit()"
            )
        self._num_of_files = num_of_files
        self._run: Run | None = None
        self._found: inventory.Checkpoint | None = None
        self._path: str | os.PathLike[str] | None = None
        self._tag = str(tag)
        join()

    @classmethod
    def _of(cls, run: Run, found: inventory.Checkpoint | None, path: str | os.PathLike[str] | None) -> Checkpoint:
        made = cls("" if found is None else found.name, ON_COMMIT)
        made._run, made._found, made._path = run, found, path
        return made

    def __repr__(self) -> str:
        return f"Checkpoint(tag={self._tag!r})"

    @property
    def tag(self) -> str:
        """The checkpoint's name; "" where a search has found none."""
        return self._tag

    def save(self, name: str, obj: Any) -> None:
        """Save an object as a file of this checkpoint; returns once it lies in memory.

        Where this file makes the checkpoint complete, it is so on return. Raises MemoryBudgetExceeded, and whatever keeps the
        checkpoint from being complete.
        """
        run = self._own_run()
        if not self._tag:
            self._tag = run.completing.new_tag()
        tag = checkpoint_name(run.settings.url, self._tag)
        run.completing.save(tag, _file_name(name), partial(_pickle, obj), self._num_of_files)

    def commit(self) -> bool:
        """Complete the checkpoint: call it on all ranks. Returns whether it is complete, on all of them; the log says why not."""
        run = self._own_run()
        try:
            if not self._tag:
                self._tag = run.completing.new_tag()
            run.completing.commit(checkpoint_name(run.settings.url, self._tag))
        except ConfigError:
            raise
        except DcpMemError as error:
            log.error("%s is not complete: %s", self._tag, error)
            return False
        return True

    def load(self, name: str, map_location: Any = None, *, weights_only: bool = False) -> Any:
        """An object of this checkpoint, from this node's memory where it lies there, else from other nodes', else from storage.

        name: where several ranks have saved a file of that name, each gets its own. weights_only: as in torch.load; without
        it, what is unpickled may run code, as in Nebula. Raises ConfigError where there is no such file, CheckpointNotFound
        where there is no such checkpoint, SegmentCorrupt where it is damaged wherever it lies.
        """
        with self.open(name) as file:
            return torch.load(file, map_location=map_location, weights_only=weights_only)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A file of this checkpoint, to be read: what `torch.save` has written. Raises as `load` does."""
        run = self._own_run()
        found = self._found or _find(run, self._tag, self._path)
        if found is None:
            raise CheckpointNotFound(self._tag, str(self._path or run.settings.url), [], [])
        chosen = run.settings_for(self._path)
        with open_stream(
            chosen, _storage(chosen), found, partial(_pick, _file_name(name)), name, _peers(run, chosen)
        ) as data:
            yield io.BufferedReader(_View(data))

    def _own_run(self) -> Run:
        if self._run is None:
            self._run = current()
        return self._run


def save_alone(
    tag: str, name: str, obj: Any, is_best: bool = False, persist_path: str | os.PathLike[str] | None = None
) -> None:
    """Save a checkpoint of one file, which this rank completes without any other.

    is_best: storage is to have it, however long ago it got the last one. persist_path: of another job than `init` has set.
    """
    run = run_elsewhere(persist_path)
    if is_best:
        run.writer.tell(persist=True, metrics={"is_best": 1.0})
    run.alone.save(checkpoint_name(run.settings.url, tag), _file_name(name), partial(_pickle, obj), EACH_FILE)


def delete_checkpoint(tag: str) -> None:
    """Delete a checkpoint from this node's memory and from storage; one that isn't there is none. Raises CheckpointInUse."""
    chosen = current().settings
    name = checkpoint_name(chosen.url, tag)
    housekeeping.evict(chosen, name)
    if chosen.url is not None:
        with suppress(CheckpointNotFound):
            housekeeping.delete(chosen.url, name, storage_options=chosen.storage_options)


def list_checkpoints(persist_path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """What there is in this node's memory and on storage, newest first, as plain values (for JSON).

    Each has its tag, state, size in bytes, created (seconds since the epoch), where it lies, and its path on storage.
    """
    run = run_for(persist_path)
    chosen = run.settings_for(persist_path)
    newest: dict[str, inventory.Checkpoint] = {}  # storage may still have an older save of a tag
    for one in filter(_counts, inventory.inventory(chosen)):
        newest.setdefault(one.name, one)
    return [
        {
            "tag": one.name,
            "state": one.state.value,
            "size": one.nbytes,
            "created": one.created,
            "tiers": [{MEMORY: "tier1", STORAGE: "tier3"}[place] for place in one.places],
            "path": f"{chosen.url}/{one.name}" if chosen.url is not None and one.is_durable else "",
            "problem": one.problem,
        }
        for one in newest.values()
    ]


def get_checkpoint(tag: str = "", persist_path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """The complete checkpoint of a tag, to load from; its own tag is "" where there is none. tag "": the newest one."""
    run = run_for(persist_path)
    return Checkpoint._of(run, _find(run, tag, persist_path), persist_path)


def get_latest_checkpoint(persist_path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """The newest complete checkpoint in memory or on storage; its tag is "" where there is none."""
    return get_checkpoint("", persist_path)


def get_latest_checkpoint_path(name: str, persist_path: str | os.PathLike[str] | None = None) -> str:
    """The path of a file of the newest complete checkpoint, as `NebulaCheckpointIO` loads it; "" where there is no checkpoint."""
    run = run_for(persist_path)
    found = _find(run, "", persist_path)
    return "" if found is None else f"{run.settings_for(persist_path).url or ''}/{found.name}/{_file_name(name)}"


def newest_files() -> tuple[str, list[str]]:
    """Tag and files of the newest complete checkpoint, as rank 0 finds it, the same on all ranks; "" where there is none.

    Call it on all ranks. Raises RankFailed, on all of them.
    """
    run = current()
    ranks = direct_call(None, False, f"save {run.settings.job}").ranks
    tag, files, trouble = "", list[str](), ""
    if ranks.rank == 0:
        try:
            found = _find(run, "", None)
            if found is not None:
                storage = _storage(run.settings)
                tag, files = found.name, [item.name for item in contents(run.settings, storage, found).items]
        except Exception as error:  # the others wait for what this one finds
            trouble = f"{type(error).__name__}: {error}"
    tag, files, trouble = ranks.broadcast((tag, files, trouble))
    if trouble:
        raise RankFailed("looking for the newest checkpoint", [(0, trouble)])
    return tag, files


def flush_persistence() -> bool:
    """Have storage get the newest complete checkpoint, and wait until it has; call it on all ranks.

    Returns whether storage has it; the log says why not.
    """
    run = current()
    if run.settings.url is None:
        return False
    try:
        promote(run.settings, newest=1)
        run.writer.wake_agent()
        run.writer.wait(progress=False)
    except DcpMemError as error:
        log.error("not everything is on storage: %s", error)
        return False
    return True


def _find(run: Run, tag: str, persist_path: str | os.PathLike[str] | None) -> inventory.Checkpoint | None:
    """The newest of that tag, of all where none is given."""
    chosen = run.settings_for(persist_path)
    peers = _peers(run, chosen)
    there = _in_memory(chosen, {} if peers is None else peers.prior())
    if not tag:
        storage = _storage(chosen)
        there = there if storage is None else inventory.merged(there, inventory.on_storage(storage))
    else:
        name = checkpoint_name(chosen.url, tag)
        there = [one for one in there if one.name == name]
        storage = _storage(chosen)
        if storage is not None:
            there = inventory.merged(there, inventory.stored(committed_under(storage, name)))
    return next((one for one in there if _counts(one)), None)


def _in_memory(chosen: Settings, prior: Mapping[str, Prior]) -> list[inventory.Checkpoint]:
    """What can be read from the nodes' memory: of what was there before this run, what they have all of together."""
    here = [one for one in inventory.in_memory(chosen) if one.save_id not in prior]
    return [*here, *(one.checkpoint for one in prior.values() if one.is_whole)]


def _peers(run: Run, chosen: Settings) -> Peers | None:
    """Other nodes' memory of the run's job, where there are ranks to ask."""
    if chosen is not run.settings or not (dist.is_available() and dist.is_initialized()):
        return None
    return run.completing.peers


def _storage(chosen: Settings) -> Storage | None:
    return open_storage(chosen.url, chosen.storage_options) if chosen.url is not None else None


def _counts(one: inventory.Checkpoint) -> bool:
    """Whether it can be loaded, as far as is known, and is all ranks'."""
    is_readable = MEMORY in one.places or not one.problem
    return is_readable and one.scope == names.COLLECTIVE and not one.is_foreign


def _pick(name: str, there: Sequence[str]) -> str | None:
    """What a file is called: several ranks may have one of its name."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK") or 0)
    others = sorted(
        (int(one.rpartition("@")[2]), one) for one in there if one.rpartition("@")[0] == name and one[-1].isdigit()
    )
    candidates = [name, name_of_rank(name, rank), *(one for _, one in others)]
    return next((one for one in candidates if one in there), None)


def _file_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={name!r}: give the file a name, such as 'model'")
    return name


def _pickle(obj: Any, file: IO[bytes]) -> None:
    torch.save(obj, file)


class _View(io.RawIOBase):
    """Reads from memory that somebody else owns."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._place = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), len(self._data) - self._place))
        view[:count] = self._data[self._place : self._place + count]
        self._place += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._data)}[whence])
        return self._place

    def tell(self) -> int:
        return self._place
