"""`serve`: saves and loads that name only a path go through dcp_mem, below one root."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any

from typing_extensions import Unpack

from dcp_mem.comm.bridge.choice import Choice, install
from dcp_mem.common.arguments import takes
from dcp_mem.common.log import log
from dcp_mem.common.parallel import before_pools_end
from dcp_mem.config import is_checkpoint_name, root_url
from dcp_mem.errors import ConfigError, DcpMemError, WaitTimeout
from dcp_mem.operations.flush import flush_now
from dcp_mem.options import DEFAULTS, ReaderOptions, ServeOptions, WriterOptions, of_kind
from dcp_mem.reader import MemoryStorageReader
from dcp_mem.runtime.session import open_session
from dcp_mem.writer import MemoryStorageWriter


class ServedWriter(MemoryStorageWriter):
    """A writer whose saves make the checkpoint's directory at once, as torch's do."""

    _of_kind = MappingProxyType({"makes_directories": True})


class Served:
    """A root whose checkpoints go through dcp_mem, whoever saves and loads them; see `serve`.

    As a context manager it stops at the end of the block, like a writer's `with`.

    Attributes:
        root: As an absolute path or URL.
        writer: What saves go through: for `wait`, `status` and `annotate_next_save`.
    """

    def __init__(self, root: str, options: ServeOptions) -> None:
        """Make the writer. Raises ConfigError."""
        self.root = root
        self._options = options
        self._for_readers = of_kind(ReaderOptions, options)
        self.writer: MemoryStorageWriter = ServedWriter(root, **of_kind(WriterOptions, options))
        self._real_root = "" if "://" in root else os.path.realpath(root)
        self._home = os.getpid()
        self._noted: set[str] = set()

    def stop(self, flush: bool = True) -> None:
        """Leave calls below the root to torch again, as before; stopping twice is fine.

        Saves that have begun are completed. Where no root is served any more, torch has its own
        functions back.

        Args:
            flush: Wait until all that is meant for storage is durable, as `writer.close` does;
                False leaves that to the agent.

        Raises:
            FlushFailed: Storage refuses; the text says what stays in memory.
        """
        if _forget(self):
            self.writer.close(flush=flush)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *raised: Any) -> None:
        if _forget(self):
            self.writer.__exit__(*raised)

    def __repr__(self) -> str:
        state = "served" if self in _all_served else "stopped"
        return f"<{type(self).__name__} {self.root} ({state})>"

    def _choose(self, checkpoint_id: Any, is_load: bool) -> Choice | None:
        """Return what a call goes through; None for what isn't directly below the root."""
        name = self._below(checkpoint_id, is_load)
        if name is None:
            return None
        if not is_checkpoint_name(name):
            self._note_left(checkpoint_id, name)
            return None
        full, verb = f"{self.root}/{name}", "load" if is_load else "save"
        log.debug("dcp_mem.serve: the %s of %s goes through dcp_mem", verb, full)
        if is_load:
            return Choice(MemoryStorageReader(self.root, **self._for_readers), full)
        return Choice(self.writer, full)

    def _below(self, checkpoint_id: Any, is_load: bool) -> str | None:
        """Return an id's path below the root, "" for the root; None for what lies elsewhere."""
        try:
            text = os.fspath(checkpoint_id)
        except TypeError:
            return None
        if not isinstance(text, str):
            return None
        protocol, separator, rest = text.partition("://")
        if not self._real_root:
            return _rest(self.root, _url_or_nothing(text)) if separator else None
        if separator and protocol not in ("file", "local"):
            return None
        path = rest if separator else text
        # A save doesn't look at storage, which may be slow, if the path says enough.
        if not is_load and ".." not in path.split("/"):
            found = _rest(self.root, os.path.abspath(path))
            if found is not None:
                return found
        return _rest(self._real_root, os.path.realpath(path))

    def _note_left(self, checkpoint_id: Any, name: str) -> None:
        """Say once of each kind of name why torch has it."""
        if not name:
            kind, advice = "the root", f"serve {os.path.dirname(self.root)}"
        elif "/" in name:
            parent = f"{self.root}/{os.path.dirname(name)}"
            kind, advice = "deeper", f"serve {parent}, if checkpoints lie directly in it"
        else:
            kind, advice = "name", "choose a name of letters, digits and _.-=+,@%~$:"
        if kind not in self._noted:
            self._noted.add(kind)
            log.warning(
                "dcp_mem.serve leaves %s to torch: only names directly below %s are served (%s)",
                checkpoint_id,
                self.root,
                advice,
            )


class _ServedRank:
    """What a rank runs that a served program has started: the program's function, served."""

    def __init__(
        self, function: Callable[..., Any], roots: Sequence[tuple[str, ServeOptions]]
    ) -> None:
        self._function, self._roots = function, roots

    def __call__(self, *arguments: Any) -> Any:
        with ExitStack() as served:
            for root, options in self._roots:
                # What an earlier run has left is the starting process's to flush.
                served.enter_context(serve(root, flush_seconds=0, **options))
            return self._function(*arguments)


def _serve_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs another one in a served process, if options can go there."""
    served = _ServedRank(function, [(one.root, one._options) for one in _all_served])
    try:
        ForkingPickler.dumps(served)
    except Exception as error:
        log.warning(
            "dcp_mem.serve: the ranks that this process starts aren't served, for its options "
            "can't be sent there (%s): call serve in each of them",
            error,
        )
        return function
    return served


_all_served: tuple[Served, ...] = ()
_put_back: Callable[[], bool] | None = None  # None: torch has its own functions
_guard = threading.Lock()


@takes(ServeOptions, DEFAULTS)
def serve(
    root: str | os.PathLike[str], *, flush_seconds: float = 60.0, **options: Unpack[ServeOptions]
) -> Served:
    """Have DCP calls that name only a path below this root go through dcp_mem.

    That is `dcp.save`, `dcp.async_save` and `dcp.load` with `checkpoint_id=` and without a writer
    or reader, in this process, from now on. All that doesn't lie directly below the root, one name
    deep, is left to torch. Call it on all ranks, and before `from … import async_save`. Ranks that
    this process starts by `torch.multiprocessing.spawn` are served as well. Several roots may be
    served.

    At the end of the process the root is closed, as by `Served.stop`. After an error that nobody
    caught, it doesn't wait for storage; the agent goes on.

    Args:
        root: The directory or fsspec URL that the checkpoints' paths begin with.
        flush_seconds: How long to wait for what an earlier run has left in this node's memory to
            get to storage, so that a script that lists the root finds it; 0 doesn't wait.
        **options: Any of `WriterOptions`, and of `ReaderOptions` for loads. Here `on_slow_storage`
            is "all" by default: each path that was saved gets to storage.

    Returns:
        What ends it. A root that is served already gives the same object, with the same options or
        none.

    Raises:
        ConfigError: The options can't work, the root is served with other ones, or this torch
            chooses its writers in another way.
    """
    global _all_served, _put_back
    url = root_url(root)
    if url is None:
        raise ConfigError("root=None: give the directory or URL that the checkpoints lie in")
    # A program that names its paths expects each of them to be there.
    is_asked_for = not options
    options.setdefault("on_slow_storage", "all")
    with _guard:
        earlier = next((one for one in _all_served if one.root == url), None)
        if earlier is not None:
            if is_asked_for or earlier._options == options:
                return earlier
            raise ConfigError(
                f"{url} is served already, with other options: dcp_mem.serve({url!r}).stop() first"
            )
        served = Served(url, options)
        if _put_back is None:
            _put_back = install(_choose, _serve_ranks)
        _all_served = (*_all_served, served)
    log.info(
        "dcp_mem.serve: saves and loads directly below %s that name only a path go through node "
        "memory (%s); all others are torch's",
        served.root,
        served.writer.settings.memory_root,
    )
    _flush_what_was_left(served, flush_seconds)
    return served


def _choose(checkpoint_id: Any, is_load: bool) -> Choice | None:
    for served in _all_served:
        choice = served._choose(checkpoint_id, is_load)
        if choice is not None:
            return choice
    return None


def _forget(served: Served) -> bool:
    """Serve a root no more; return whether it was served."""
    global _all_served, _put_back
    with _guard:
        if served not in _all_served:
            return False
        _all_served = tuple(one for one in _all_served if one is not served)
        if not _all_served and _put_back is not None:
            if not _put_back():
                log.info("dcp_mem.serve: others have replaced torch's functions, too; theirs stay")
            _put_back = None
    log.info("dcp_mem.serve: %s is left to torch again", served.root)
    return True


def _flush_what_was_left(served: Served, seconds: float) -> None:
    settings = served.writer.settings
    if seconds <= 0 or settings.agent != "process" or open_session(settings) is not None:
        return
    try:
        flushed = flush_now(settings, timeout=seconds)
    except (DcpMemError, OSError) as error:
        why = "the time is up" if isinstance(error, WaitTimeout) else str(error)
        log.warning("%s: what an earlier run left is in memory alone: %s", served.root, why)
        return
    for one in flushed:
        if one.error:
            log.warning("%s/%s is in memory alone: %s", served.root, one.name, one.error)


def _rest(root: str, path: str) -> str | None:
    if path.rstrip("/") == root:
        return ""
    return path.removeprefix(root + "/").rstrip("/") if path.startswith(root + "/") else None


def _url_or_nothing(text: str) -> str:
    """Return a URL in the form that roots have; "" for one that no root can be."""
    try:
        return root_url(text) or ""
    except ConfigError:
        return ""


def _stop_at_exit() -> None:
    has_failed = getattr(sys, "last_value", None) is not None
    for served in _all_served:
        if served._home != os.getpid():
            continue  # A fork's: the root is the parent's to close.
        try:
            served.stop(flush=not has_failed)
        except Exception as error:
            log.error("dcp_mem.serve: %s: %s", served.root, error)


def _forget_parent() -> None:
    """After a fork: another thread of the parent may have had the guard."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
before_pools_end(_stop_at_exit)
