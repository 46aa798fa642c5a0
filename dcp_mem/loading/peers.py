"""Bytes that one rank alone needs of another node's memory: sent to it while all else goes on.

Each pair of ranks has a channel of its own for the length of a load. Pieces are checked before they
leave, and when they come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from dcp_mem.comm import Ranks
from dcp_mem.comm.agreement import described
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.transfer import CHUNK, IncomingChunk, OutgoingChunk, receive, send
from dcp_mem.common import faults
from dcp_mem.errors import RankFailed
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.pending import PendingItems
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.policy.shares import LoadShare, PeerPiece

Scratch = npt.NDArray[np.uint8]


class PeerTransfer:
    """The transfers of one rank to and from other ranks, in threads.

    Errors are kept: which rank's fault they are is known when all threads have ended.
    """

    def __init__(
        self,
        ranks: Ranks,
        token: str,
        memory: MemorySource | None,
        pending: PendingItems,
        *,
        transport: str,
    ) -> None:
        """Prepare a transfer; nothing is sent yet.

        `pending`: the items that received bytes are for. `transport`: what moves the bytes.
        """
        self._transport = transport
        self._ranks, self._token, self._memory, self._pending = ranks, token, memory, pending
        self._own_errors: list[Exception] = []
        self._broken_channels: list[tuple[int, str]] = []
        self._channels: list[Channel] = []
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, share: LoadShare) -> None:
        """Start the threads that do a share: one for each peer and direction.

        Where one can't be started, that is kept as an error of this rank, and nothing is sent.
        """
        rank = self._ranks.rank
        acts = [partial(self._send, rank, peer, pieces) for peer, pieces in _by_peer(share.sends)]
        acts += [
            partial(self._receive, peer, rank, pieces) for peer, pieces in _by_peer(share.receives)
        ]
        for index, act in enumerate(acts):
            thread = threading.Thread(target=act, name="dcp_mem-pass", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except Exception as error:
                self._own_errors.append(error)
                self.stop()
                for left in acts[index:]:  # their peers learn of it as the channels close
                    left()
                return

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            if thread.is_alive():  # one that couldn't be started isn't
                thread.join()

    def stop(self) -> None:
        """Have the threads end before their next piece: the load has failed on this rank."""
        self._stopped.set()

    def close(self) -> None:
        """Close the channels in the background: gloo takes a while for each."""
        channels, self._channels = self._channels, []
        if not channels:
            return
        try:
            threading.Thread(target=_close, args=(channels,), name="dcp_mem-end").start()
        except RuntimeError:  # there can't be any more threads
            _close(channels)

    def raise_own(self) -> None:
        """Raise what went wrong on this rank."""
        if self._own_errors:
            raise self._own_errors[0]

    def raise_broken(self) -> None:
        """Raise for channels that broke, though no rank has failed.

        Raises RankFailed.
        """
        if self._broken_channels:
            raise RankFailed("passing on what lies in memory", self._broken_channels)

    # -- threads -----------------------------------------------------------------------------------

    def _send(self, sender: int, receiver: int, pieces: Sequence[PeerPiece]) -> None:
        outgoing = self._outgoing(pieces)
        self._on_channel(
            sender, receiver, lambda channel: send(channel, outgoing, self._raise_if_stopped)
        )

    def _receive(self, sender: int, receiver: int, pieces: Sequence[PeerPiece]) -> None:
        incoming = self._incoming(pieces)
        self._on_channel(
            sender, receiver, lambda channel: receive(channel, incoming, self._raise_if_stopped)
        )

    def _on_channel(self, sender: int, receiver: int, act: Callable[[Channel], object]) -> None:
        """Use the channel to a peer; close it if that fails, so that the peer doesn't wait."""
        peer = receiver if sender == self._ranks.rank else sender
        channel: Channel | None = None
        try:
            channel = self._ranks.channel(sender, receiver, self._token, self._transport)
            act(channel)
            self._channels.append(channel)
            return
        except _OwnError as error:
            self._own_errors.append(error.cause)
        except Exception as error:
            self._broken_channels.append((peer, described(error).split("\n")[0]))
        if channel is not None:
            channel.close()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _LoadFailed("the load has failed elsewhere")

    def _outgoing(self, pieces: Sequence[PeerPiece]) -> Iterator[OutgoingChunk]:
        for file, start, stop in _chunks(pieces):
            with _as_own_error():
                assert self._memory is not None
                data, crc = self._memory.checked(file, start, stop)
            yield OutgoingChunk(data, partial(int, crc))

    def _incoming(self, pieces: Sequence[PeerPiece]) -> Iterator[IncomingChunk]:
        """Yield where chunks go: into the tensor that takes them all, else into scratch memory."""
        free: list[Scratch] = []
        for file, start, stop in _chunks(pieces):
            data = self._pending.place_for(file, start, stop)
            if data is not None:
                accept = partial(self._mark_received, file, start, stop)
            else:
                scratch = free.pop() if free else np.empty(CHUNK, np.uint8)
                data = memoryview(scratch.data).cast("B")[: stop - start]
                accept = partial(self._take, file, start, stop, scratch, free)
            yield IncomingChunk(data, partial(checksum, data), accept)
            faults.point("load.batch")

    def _mark_received(self, file: str, start: int, stop: int) -> None:
        with _as_own_error():
            self._pending.mark_received(file, start, stop)

    def _take(
        self, file: str, start: int, stop: int, scratch: Scratch, free: list[Scratch]
    ) -> None:
        with _as_own_error():
            self._pending.take(file, start, stop, scratch.ctypes.data)
        free.append(scratch)


@contextmanager
def peer_transfer(
    ranks: Ranks,
    token: str,
    share: LoadShare,
    memory: MemorySource | None,
    pending: PendingItems,
    *,
    transport: str,
) -> Iterator[PeerTransfer]:
    """Send and receive this rank's share in threads, which have ended when the context ends.

    `pending`: the items that received bytes are for. `transport`: what moves the bytes.
    """
    transfer = PeerTransfer(ranks, token, memory, pending, transport=transport)
    try:
        transfer.start(share)
        yield transfer
    except BaseException:
        transfer.stop()
        raise
    finally:
        transfer.join()
        transfer.close()


class _LoadFailed(Exception):
    """The load has failed, and nothing more is to be sent or received."""


class _OwnError(Exception):
    """Something that went wrong on this rank, and not with the channel."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def _as_own_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _OwnError(error) from error


def _close(channels: Sequence[Channel]) -> None:
    for channel in channels:
        channel.close()


def _by_peer(pieces: Sequence[PeerPiece]) -> list[tuple[int, list[PeerPiece]]]:
    found: dict[int, list[PeerPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.peer, []).append(piece)
    return list(found.items())


def _chunks(pieces: Sequence[PeerPiece]) -> Iterator[tuple[str, int, int]]:
    for piece in pieces:
        for start in range(piece.start, piece.stop, CHUNK):
            yield piece.file, start, min(start + CHUNK, piece.stop)
