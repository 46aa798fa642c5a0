"""Nebula's checkpoints: files by name under a tag, each of them an object that can be pickled."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import torch

from dcp_mem.comm import has_groups, rank_in
from dcp_mem.comm.agreement import on_rank_0
from dcp_mem.common.log import log
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus
from dcp_mem.config import Settings, checkpoint_name
from dcp_mem.errors import CheckpointNotFound, ConfigError, DcpMemError
from dcp_mem.integrations.nebula.completion import EACH_FILE, ON_COMMIT
from dcp_mem.integrations.nebula.local_files import local_file
from dcp_mem.integrations.nebula.peers import Peers
from dcp_mem.integrations.nebula.run import Run, current, join, run_for
from dcp_mem.operations import inventory
from dcp_mem.operations.flush import promote
from dcp_mem.operations.streams import OpenStreams
from dcp_mem.saving.streams import NothingNew, name_of_rank
from dcp_mem.storage.listing import committed_under
from dcp_mem.storage.routes import storage_of
from dcp_mem.storage.streams import Body


class Checkpoint:
    """One checkpoint: files are saved under its tag, or loaded from there.

    A restart finds it once it is complete on all ranks, and not before. Make it on all ranks, also
    on those that save nothing. What is saved once it is complete adds to it; a new `Checkpoint` of
    its tag replaces it when that one is complete.
    """

    def __init__(self, tag: object = "", num_of_files: int = EACH_FILE) -> None:
        """Name the checkpoint, and say when it is complete.

        Args:
            tag: Its name, a text or a number; "" has one made, the same on all ranks that have one
                made as well.
            num_of_files: -1 completes it with each file that any rank saves; n, once the ranks
                have saved n files together; -2, once every rank has called `commit`.

        Raises:
            ConfigError: `num_of_files` is none of these.
        """
        if type(num_of_files) is not int or num_of_files < ON_COMMIT or num_of_files == 0:
            raise ConfigError(
                f"num_of_files={num_of_files!r}: give how many files make a checkpoint, "
                "-1 for any, -2 to call commit()"
            )
        self._num_of_files = num_of_files
        self._run: Run | None = None
        self._found: CheckpointStatus | None = None
        self._path: str | os.PathLike[str] | None = None
        self._tag = _text(tag)
        self._wanted = self._tag
        self._times_completed: int | None = None
        join()

    @classmethod
    def _of(
        cls,
        run: Run,
        wanted: str,
        found: CheckpointStatus | None,
        path: str | os.PathLike[str] | None,
    ) -> Checkpoint:
        checkpoint = cls("" if found is None else found.name, ON_COMMIT)
        checkpoint._run, checkpoint._found, checkpoint._path = run, found, path
        checkpoint._wanted = wanted
        return checkpoint

    def __repr__(self) -> str:
        return f"Checkpoint(tag={self._tag!r})"

    @property
    def tag(self) -> str:
        """The checkpoint's name; "" where a search has found none."""
        return self._tag

    def save(self, name: str, obj: Any) -> None:
        """Save an object as a file of this checkpoint; return once the file is in memory.

        Where this file completes the checkpoint, it is complete on return.

        Args:
            name: The file's name; several ranks may save files of one name.
            obj: Anything that can be pickled.

        Raises:
            MemoryBudgetExceeded: The node's memory budget is used up.
            DcpMemError: The checkpoint can't be completed.
        """
        run = self._own_run()
        tag = self._name_in(run)
        run.completing.save(
            tag,
            file_name(name),
            partial(write_pickled, obj),
            self._num_of_files,
            is_complete=self._is_complete_in(run, tag),
        )

    def commit(self) -> bool:
        """Complete the checkpoint; call this on all ranks.

        Returns:
            Whether it is complete, on all ranks; the log says why not. Where nothing was saved
            since it was completed, nothing happens.
        """
        run = self._own_run()
        try:
            tag = self._name_in(run)
            run.completing.commit(tag, is_complete=self._is_complete_in(run, tag))
        except ConfigError:
            raise
        except NothingNew:
            if run.completing.times_completed[tag] or _find(run, tag, None) is not None:
                return True
            log.error("%s is not complete: nothing was saved", tag)
            return False
        except DcpMemError as error:
            log.error("%s is not complete: %s", self._tag, error)
            return False
        return True

    def _name_in(self, run: Run) -> str:
        if not self._tag:
            self._tag = run.completing.new_tag()
        return checkpoint_name(run.settings.url, self._tag)

    def _is_complete_in(self, run: Run, tag: str) -> bool:
        """Return whether this checkpoint, and not an earlier one of its tag, is complete."""
        if self._times_completed is None:
            self._times_completed = run.completing.times_completed[tag]
        return run.completing.times_completed[tag] > self._times_completed

    def load(self, name: str, map_location: Any = None, *, weights_only: bool = False) -> Any:
        """Load an object of this checkpoint, from this node's memory, other nodes' or storage.

        Args:
            name: The file; where several ranks have saved one of that name, each gets its own.
            map_location: As in torch.load.
            weights_only: As in torch.load; without it, unpickling may run code, as in Nebula.

        Raises:
            ConfigError: There is no such file.
            CheckpointNotFound: There is no such checkpoint.
            SegmentCorrupt: The file is damaged in every place that has it.
        """
        with self.open(name) as file:
            return torch.load(file, map_location=map_location, weights_only=weights_only)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file of this checkpoint for reading, as `torch.save` has written it.

        Args:
            name: As in `load`, which raises the same errors.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
        """
        with self._opened(name) as (_, data):
            yield io.BufferedReader(Body(data))  # type: ignore[type-var]

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[str, memoryview]]:
        """Yield what a file is called among those of all ranks, and its bytes."""
        run = self._own_run()
        found = self._found
        if found is None and self._tag:  # without a tag, another checkpoint would be found
            found = _find(run, self._tag, self._path)
        if found is None:
            tags = [one["tag"] for one in list_checkpoints(self._path)]
            wanted = self._wanted or "checkpoint without a tag"
            raise CheckpointNotFound(wanted, str(self._path or run.settings.url), tags, [])
        with _streams(run, run.settings_for(self._path), found) as streams:
            item = _pick(file_name(name), sorted(streams.places)) or name
            yield item, streams.whole(item)

    def _own_run(self) -> Run:
        if self._run is None:
            self._run = current()
        return self._run


def list_checkpoints(persist_path: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Return the checkpoints in this node's memory and on storage, newest first, as plain values.

    Args:
        persist_path: The root of another job than the one that `init` has set.

    Returns:
        For each its tag, state, size in bytes, created (seconds since the epoch), tiers (where it
        is), its path on storage, and its problem ("": none is known).
    """
    run = run_for(persist_path)
    chosen = run.settings_for(persist_path)
    newest: dict[str, CheckpointStatus] = {}  # storage may still have an older save of a tag
    for one in filter(inventory.counts, inventory.list_checkpoints(chosen)):
        newest.setdefault(one.name, one)
    return [
        {
            "tag": one.name,
            "state": one.state.value,
            "size": one.nbytes,
            "created": one.created,
            "tiers": [{MEMORY: "tier1", STORAGE: "tier3"}[place] for place in one.places],
            "path": f"{chosen.url}/{one.name}" if chosen.url is not None and one.is_durable else "",
            "problem": one.problem or one.rejected,
        }
        for one in newest.values()
    ]


def get_checkpoint(
    tag: object = "", persist_path: str | os.PathLike[str] | None = None
) -> Checkpoint:
    """Return the complete checkpoint of a tag, to load from.

    Args:
        tag: A text or a number; "" for the newest one.
        persist_path: The root of another job than the one that `init` has set.

    Returns:
        A checkpoint whose tag is "" where there is none; its `load` raises CheckpointNotFound.
    """
    run, wanted = run_for(persist_path), _text(tag)
    return Checkpoint._of(run, wanted, _find(run, wanted, persist_path), persist_path)


def get_latest_checkpoint(persist_path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Return the newest complete checkpoint in memory or on storage; its tag is "" for none.

    Args:
        persist_path: Another root on storage to look in; None for the job's own.
    """
    return get_checkpoint("", persist_path)


def get_latest_checkpoint_path(
    name: str, persist_path: str | os.PathLike[str] | None = None
) -> str:
    """Return the path of a file of the newest complete checkpoint, as `torch.save` writes it.

    The file is put into the directory for temporary files, once on each node. It stays until the
    processes that have asked for it end, or ask for the file of a newer checkpoint.

    Args:
        name: The file.
        persist_path: The root of another job than the one that `init` has set.

    Returns:
        "" where there is no checkpoint.

    Raises:
        ConfigError: The newest checkpoint has no such file.
        SegmentCorrupt: The file is damaged in every place that has it.
        OSError: There is no room for it.
    """
    newest = get_latest_checkpoint(persist_path)
    if newest._found is None:
        return ""
    with newest._opened(name) as (item, data):
        return local_file(newest._found.save_id, item, newest.tag, name, data)


def newest_files(preferred_tag: str = "") -> tuple[str, list[str]]:
    """Return tag and files of the newest complete checkpoint, as rank 0 finds it.

    Call this on all ranks, which get the same.

    Args:
        preferred_tag: The checkpoint of this tag is taken, if it is complete.

    Returns:
        "" and no files where there is no checkpoint.

    Raises:
        RankFailed: Rank 0 can't find out; on all ranks.
    """
    run = current()

    def find() -> tuple[str, list[str]]:
        found = _find(run, preferred_tag, None) if preferred_tag else None
        found = found or _find(run, "", None)
        if found is None:
            return "", []
        with _streams(run, run.settings, found) as streams:
            return found.name, sorted(streams.places)

    return on_rank_0(run.ranks(), "looking for the newest checkpoint", find)


def flush_persistence(tag: object = "") -> bool:
    """Flush a complete checkpoint to storage, and wait for that; call this on all ranks.

    Args:
        tag: The checkpoint's; "" for the newest one, and for all that is to reach storage anyway.

    Returns:
        Whether storage has it; the log says why not.
    """
    run = current()
    if run.settings.url is None:
        return False
    try:
        name = checkpoint_name(run.settings.url, _text(tag)) if _text(tag) else None
        promote(run.settings, newest=1, name=name)
        run.writer._saver.wake_agent()
        if name is not None and _is_on_storage(run, name):
            return True
        run.writer.wait(name, progress=False)
    except ConfigError:
        raise
    except DcpMemError as error:
        log.error("not everything is on storage: %s", error)
        return False
    return True


def _is_on_storage(run: Run, name: str) -> bool:
    """Return whether storage has a checkpoint that memory no longer has."""
    storage = storage_of(run.settings)
    return (
        storage is not None
        and not any(one.name == name for one in inventory.in_memory(run.settings))
        and bool(committed_under(storage, name))
    )


def _find(
    run: Run, tag: str, persist_path: str | os.PathLike[str] | None
) -> CheckpointStatus | None:
    """Return the newest checkpoint of that tag, or of all tags where none is given."""
    chosen = run.settings_for(persist_path)
    peers, storage = _peers(run, chosen), storage_of(chosen)
    found = _in_memory(chosen, {} if peers is None else peers.surveyed())
    if not tag:
        if storage is not None:
            found = inventory.merged(found, inventory.on_storage(storage))
    else:
        name = checkpoint_name(chosen.url, tag)
        found = [one for one in found if one.name == name]
        if storage is not None:
            found = inventory.merged(found, inventory.stored(committed_under(storage, name)))
    will_do = inventory.counts if tag else inventory.may_be_resumed_from
    return next(filter(will_do, found), None)


def _in_memory(
    chosen: Settings, surveyed: Mapping[str, CheckpointStatus | None]
) -> list[CheckpointStatus]:
    """Return what nodes have: this node its run's, all of them together all of earlier ones."""
    own = [one for one in inventory.in_memory(chosen) if one.save_id not in surveyed]
    return [*own, *(one for one in surveyed.values() if one is not None)]


def _streams(run: Run, chosen: Settings, found: CheckpointStatus) -> OpenStreams:
    return OpenStreams(chosen, storage_of(chosen), found, _peers(run, chosen))


def _peers(run: Run, chosen: Settings) -> Peers | None:
    """Return other nodes' memory of the run's job; None where there are no ranks to ask."""
    if chosen is not run.settings or not has_groups():
        return None
    return run.completing.peers


def _pick(name: str, files: Sequence[str]) -> str | None:
    """Return the file of that name: this rank's own, if several ranks saved one."""
    rank = rank_in() if has_groups() else int(os.environ.get("RANK") or 0)
    of_ranks = sorted(
        (int(file.rpartition("@")[2]), file)
        for file in files
        if file.rpartition("@")[0] == name and file[-1].isdigit()
    )
    own = [file for file in (name, name_of_rank(name, rank)) if file in files]
    if own or not of_ranks:
        return own[0] if own else None
    other, file = of_ranks[0]
    log.warning(
        "%s: several ranks have saved a file of that name, and none of them was rank %d; it gets "
        "that of rank %d. What differs between ranks needs names that say whose it is",
        name,
        rank,
        other,
    )
    return file


def _text(tag: object) -> str:
    return "" if tag is None else str(tag)


def file_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name={name!r}: give the file a name, such as 'model'")
    return name


def write_pickled(obj: Any, file: IO[bytes]) -> None:
    torch.save(obj, file)
