"""`MemoryCheckpointing`: Megatron's `dist_checkpointing` for checkpoints in node memory."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from typing_extensions import Unpack

from dcp_mem.comm.agreement import attempt, on_rank_0
from dcp_mem.comm.bridge.calls import direct_call
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.common.parallel import before_pools_end
from dcp_mem.config import root_url
from dcp_mem.errors import CheckpointNotFound, ConfigError, DcpMemError, FlushFailed
from dcp_mem.integrations.megatron.common import (
    Common,
    files_beside,
    load_common,
    make_directory,
    put_beside,
    stand_in,
)
from dcp_mem.integrations.megatron.releases import load_arguments
from dcp_mem.integrations.megatron.strategies import (
    Directory,
    MemoryLoadStrategy,
    MemorySaveStrategy,
    iteration_of,
    name_of,
    not_found,
)
from dcp_mem.manager.options import OnError
from dcp_mem.options import DEFAULTS, WriterOptions
from dcp_mem.reader import MemoryStorageReader, RecoveryReport, reader_of
from dcp_mem.writer import MemoryStorageWriter

T = TypeVar("T")

_TRACKER = "latest_checkpointed_iteration.txt"

_all_writers: list[MemoryStorageWriter] = []
"""Writers of all `MemoryCheckpointing` objects, which may be gone before the process exits."""


@takes(WriterOptions, DEFAULTS)
class MemoryCheckpointing:
    """Megatron's `dist_checkpointing` through node memory: its functions as methods.

    Arguments and results are the same. Call the methods on all ranks, in the same order.

        dist_checkpointing = MemoryCheckpointing(persist=every_n_saves(10), replicas=1)

    A checkpoint_dir such as "/ckpts/run/iter_0000010" (or a URL, "abfs://ckpts/run/iter_0000010")
    names the checkpoint "iter_0000010" of the root "/ckpts/run". A save returns when the checkpoint
    is complete in memory, common state included; the flush to the root goes on behind training. A
    load takes it from memory if it is there, else from the root; what Megatron itself has saved
    there is loaded by Megatron.

    Where the process ends without `close`, as with Megatron-LM's own scripts, the newest checkpoint
    goes to storage as well, and the agent flushes it once the process is gone; not after an
    exception, when the next start goes on from memory.

    Args:
        storage: Other roots for some directories that Megatron names, such as
            {"/ckpts/run": "abfs://ckpts/run"}.
        on_error: "warn" (the default) logs a save that fails on all ranks together, or what `close`
            couldn't flush, and training goes on; "raise" raises it. Arguments that are wrong on all
            ranks always raise.
        **options: Arguments of `MemoryStorageWriter`, for the writer of each root.

    Raises:
        ConfigError: An argument can't work.
    """

    def __init__(
        self,
        *,
        storage: Mapping[str, str] | None = None,
        on_error: OnError = "warn",
        **options: Unpack[WriterOptions],
    ) -> None:
        self._on_error = on_error
        self._storage = {
            root_url(directory): root_url(root) for directory, root in (storage or {}).items()
        }
        self._options = options
        self._writers: dict[str, MemoryStorageWriter] = {}
        self._told: dict[str, Any] = {}
        self._report: RecoveryReport | None = None

    # -- Megatron's functions ----------------------------------------------------------------------

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Directory,
        sharded_strategy: Any = None,
        *rest: Any,
        **options: Any,
    ) -> AsyncRequest | None:
        """Save as `dist_checkpointing.save` does; return when the checkpoint is complete in memory.

        If checkpoint_dir is a directory that exists, rank 0 also writes Megatron's `common.pt` and
        `metadata.json` there.

        The strategy is None, Megatron's own for "torch_dist", or FullyParallelSaveStrategyWrapper
        around that. With async_sharded_save=True a request is returned to schedule and finalize,
        which has nothing left to write.

        Raises:
            ConfigError: The strategy is another one.
            CheckpointException: The save has failed, as from `dcp.save`, with on_error="raise".
        """
        root, name = self._place(checkpoint_dir)
        writer = self.writer(root)
        told, self._told = self._told, {}
        strategy = _through_memory(
            sharded_strategy,
            MemorySaveStrategy(writer, on_error=self._on_error, **told),
            TorchDistSaveShardedStrategy,
            FullyParallelSaveStrategyWrapper,
        )
        parent = tempfile.TemporaryDirectory(prefix="dcp_mem-megatron-", ignore_cleanup_errors=True)
        try:
            directory = make_directory(parent.name, name)
            request = dist_checkpointing.save(
                sharded_state_dict, directory, strategy, *rest, **options
            )
        except BaseException:
            parent.cleanup()
            raise
        was_skipped = writer._saver.last_save is None  # Memory was full, or the save failed.

        def finish() -> None:
            if dist.get_rank() == 0 and not was_skipped:
                put_beside(os.fspath(checkpoint_dir), files_beside(directory))
            parent.cleanup()

        if request is None:
            finish()
        else:
            request.add_finalize_fn(finish)
        return request

    def load(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: Directory,
        sharded_strategy: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Load as `dist_checkpointing.load` does.

        Raises:
            MegatronCheckpointNotFound: There is no checkpoint of that name; the error lists those
                that can be loaded.
            DcpMemError: The checkpoint was saved again while it was loaded.
        """
        root, name = self._place(checkpoint_dir)
        directory = os.fspath(checkpoint_dir)
        given = load_arguments(sharded_state_dict, directory, sharded_strategy, *rest, **options)
        reader = self._reader(root, given.get("process_group"))
        common = self._load_common(reader, root, checkpoint_dir)
        if common is None:
            return dist_checkpointing.load(**given)
        given.pop("verify_integrity", None)  # by SHA-256 of Megatron's files; ours have checksums
        strategy = _through_memory(
            sharded_strategy,
            MemoryLoadStrategy(reader),
            TorchDistLoadShardedStrategy,
            FullyParallelLoadStrategyWrapper,
        )
        save_id = reader.report().save_id
        with stand_in(name, common) as directory:
            given |= {"checkpoint_dir": directory, "sharded_strategy": strategy}
            loaded = dist_checkpointing.load(**given)
        self._report = reader.report()
        if self._report.save_id != save_id:
            raise DcpMemError(f"{name} was saved again while it was loaded: load it once more")
        return loaded

    def load_common_state_dict(self, checkpoint_dir: Directory) -> Any:
        """Return the common state of a checkpoint. Raises MegatronCheckpointNotFound."""
        root, name = self._place(checkpoint_dir)
        common = self._load_common(self._reader(root), root, checkpoint_dir)
        if common is None:
            return dist_checkpointing.load_common_state_dict(os.fspath(checkpoint_dir))
        with stand_in(name, common) as directory:
            # A save that was killed as soon as it was complete has left no files there, and
            # Megatron-LM looks for them next.
            files = files_beside(directory, common)
            put = partial(put_beside, os.fspath(checkpoint_dir), files, missing_only=True)
            self._by_rank_0(root, put, None)
            return dist_checkpointing.load_common_state_dict(directory)

    def load_content_metadata(
        self, checkpoint_dir: Directory | None = None, *, preloaded_state_dict: Any = None
    ) -> dict[str, Any] | None:
        """Return what `save(…, content_metadata=…)` was given; None if that was nothing.

        Args:
            checkpoint_dir: Directory or URL that names the checkpoint.
            preloaded_state_dict: The common state, if it has been loaded; then no directory is
                needed.

        Raises:
            ConfigError: Neither is given.
        """
        if preloaded_state_dict is None:
            if checkpoint_dir is None:
                raise ConfigError(
                    "load_content_metadata: give checkpoint_dir or preloaded_state_dict"
                )
            preloaded_state_dict = self.load_common_state_dict(checkpoint_dir)
        found: dict[str, Any] | None = dist_checkpointing.load_content_metadata(
            preloaded_state_dict=preloaded_state_dict
        )
        return found

    def load_tensors_metadata(
        self, checkpoint_dir: Directory, sharded_strategy: Any = None
    ) -> dict[str, Any]:
        """Return every tensor of the checkpoint by its key, whole and without data."""
        root, _ = self._place(checkpoint_dir)
        return MemoryLoadStrategy(self._reader(root)).load_tensors_metadata(checkpoint_dir)

    def load_plain_tensors(self, checkpoint_dir: Directory) -> dict[str, Any]:
        """Return every tensor of the checkpoint by its key, whole, on each rank."""
        state = self.load_tensors_metadata(checkpoint_dir)
        loaded: dict[str, Any] = self.load(state, checkpoint_dir, validate_access_integrity=False)
        return {key: loaded[key] for key in state}

    def check_is_distributed_checkpoint(self, checkpoint_dir: Directory) -> bool:
        """Tell whether there is a checkpoint of that name, Megatron's or ours."""
        root, name = self._place(checkpoint_dir)
        if self._is_megatrons(root, checkpoint_dir):
            return True
        return name in self._reader(root).recoverable()

    # -- what else a training script needs ---------------------------------------------------------

    def latest(self, save_dir: Directory) -> int:
        """Return the newest iteration of a root that can be loaded; -1 for none.

        Megatron-LM's tracker file may name a checkpoint that was lost with a node's memory.
        """
        root = self._root(save_dir)
        for name in self._reader(root).recoverable():
            iteration = iteration_of(name)
            if iteration is not None:
                return iteration
        return self._tracked(root, save_dir)

    def annotate_next_save(
        self, *, metrics: Mapping[str, Any] | None = None, persist: bool = False
    ) -> None:
        """Keep metrics with the next checkpoint, or have it persisted whatever the policy says.

        Rank 0's arguments count.

        Args:
            metrics: Figures by name.
            persist: Have storage get it.
        """
        self._told = {"metrics": metrics, "persist": persist}

    def report(self) -> RecoveryReport:
        """Return what the last `load` took, from where, and what it passed over.

        Raises ConfigError.
        """
        if self._report is None:
            raise ConfigError("nothing has been loaded through memory yet")
        return self._report

    def writer(self, save_dir: Directory) -> MemoryStorageWriter:
        """Return the writer of a root, for its `wait`, `status` and so on."""
        root = self._root(save_dir)
        if root not in self._writers:
            writer = self._writers[root] = MemoryStorageWriter(root, **self._options)
            _all_writers.append(writer)
        return self._writers[root]

    def close(
        self, flush: bool = True, *, progress: bool = False, persist_newest: bool = True
    ) -> None:
        """Close the writers: wait until storage has what it should have, and give back memory.

        Raises:
            FlushFailed: Storage refuses a checkpoint, which stays in memory (logged with
                on_error="warn").
        """

        def close(writer: MemoryStorageWriter) -> None:
            try:
                writer.close(flush, progress=progress, persist_newest=persist_newest)
            except FlushFailed as error:
                if self._on_error == "raise":
                    raise
                log.warning("%s", error)

        with ExitStack() as closing:  # all of them, whatever one raises
            for writer in self._writers.values():
                closing.callback(close, writer)

    # -- where things are --------------------------------------------------------------------------

    def _root(self, directory: Directory) -> str:
        root = root_url(directory)
        assert root is not None
        return self._storage.get(root) or root

    def _place(self, checkpoint_dir: Directory) -> tuple[str, str]:
        """Return the root and the name of a checkpoint."""
        text = os.fspath(checkpoint_dir).rstrip("/")
        text = text if "://" in text else os.path.abspath(text)
        return self._root(os.path.dirname(text)), name_of(text)

    def _reader(
        self, root: str, process_group: dist.ProcessGroup | None = None
    ) -> MemoryStorageReader:
        return reader_of(self.writer(root).settings, process_group)

    def _load_common(
        self, reader: MemoryStorageReader, root: str, checkpoint_dir: Directory
    ) -> Common | None:
        """Load the common state of a checkpoint of ours; None for one that Megatron is to load."""
        try:
            common = load_common(reader, name_of(checkpoint_dir))
        except CheckpointNotFound as error:
            if not self._is_megatrons(root, checkpoint_dir, reader._process_group):
                raise not_found(error, checkpoint_dir) from None
            return None
        is_ours = reader.report().save_id != ""
        if is_ours or not self._is_megatrons(root, checkpoint_dir, reader._process_group):
            return common
        return None

    # -- directories that Megatron has written -----------------------------------------------------

    def _is_megatrons(
        self,
        root: str,
        checkpoint_dir: Directory,
        process_group: dist.ProcessGroup | None = None,
    ) -> bool:
        """Tell whether that is a directory which Megatron's own functions can load."""
        directory = os.fspath(checkpoint_dir)

        def look() -> bool:
            is_named = dist_checkpointing.check_is_distributed_checkpoint(directory)
            return bool(is_named) and os.path.exists(os.path.join(directory, ".metadata"))

        return self._by_rank_0(root, look, False, process_group)

    def _tracked(self, root: str, save_dir: Directory) -> int:
        """Return the iteration of Megatron-LM's tracker file if Megatron can load it; else -1."""

        def look() -> int:
            text = Path(save_dir, _TRACKER).read_text().strip()
            return int(text) if text.isdecimal() else -1

        iteration = self._by_rank_0(root, look, -1)
        is_there = iteration >= 0 and self._is_megatrons(
            root, os.path.join(save_dir, f"iter_{iteration:07d}")
        )
        return iteration if is_there else -1

    def _by_rank_0(
        self,
        root: str,
        look: Callable[[], T],
        otherwise: T,
        process_group: dist.ProcessGroup | None = None,
    ) -> T:
        """Return what rank 0 finds, on all ranks, which may see other files."""
        ranks = direct_call(process_group, False, self.writer(root).settings.purpose("load")).ranks

        def attempted() -> T:
            try:
                return look()
            except Exception as error:
                log.debug("Megatron's files: %s", error)
                return otherwise

        return on_rank_0(ranks, "looking at Megatron's files", attempted)


def _through_memory(given: Any, ours: T, replaced: type, wrapper: type) -> T:
    """Put our strategy in place of Megatron's own, alone or in its wrapper for replicas."""
    if given is None or isinstance(given, (tuple, replaced)):
        return ours
    if isinstance(given, wrapper):
        given.base_strategy = _through_memory(given.base_strategy, ours, replaced, wrapper)  # type: ignore[attr-defined]
        return given  # type: ignore[return-value]
    raise ConfigError(
        f"sharded_strategy is a {type(given).__name__}: give None, Megatron's own for "
        f"'torch_dist', or {wrapper.__name__}"
    )


def _promote_newest_at_exit() -> None:
    if getattr(sys, "last_value", None) is not None:
        return
    for writer in _all_writers:
        error = attempt(writer._promote_newest).error  # no flush, and no other rank, is waited for
        if error is not None:
            log.error("%s: the newest checkpoint stays in memory: %s", writer.settings.job, error)


# Before sessions let their flush threads finish: what is registered last is called first.
before_pools_end(_promote_newest_at_exit)
