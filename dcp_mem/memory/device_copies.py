"""Copies from devices into mapped slots, and back, beside what the devices compute.

The host only enqueues them, all of a save with one call. All that CUDA itself is needed for is in
`_CudaStream`; the rest goes by the two protocols, and runs on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from typing import Protocol

import numpy as np
import torch

from dcp_mem.common import faults
from dcp_mem.common.log import log
from dcp_mem.memory.copying import Columns
from dcp_mem.memory.cuda_batches import copy_to_device, copy_to_host
from dcp_mem.memory.pinning import is_pinned


class Enqueued(Protocol):
    """Copies that a device has been told to make."""

    def wait(self) -> None:
        """Block the caller until the copies have been made."""

    def hold_device(self) -> None:
        """Have the device make the copies before what the caller launches from now on.

        The caller goes on at once.
        """


class CopyStream(Protocol):
    """One device's copies from and to the host; they are made in order of the calls."""

    def to_host(self, targets: Columns, sources: Sequence[torch.Tensor]) -> Enqueued:
        """Enqueue copies, behind all that the caller has launched on the device.

        Args:
            targets: Addresses in the host's memory; it must stay mapped until the copies have been
                made.
            sources: On the device, one for each target. They are contiguous, none is empty, and
                their memory stays theirs until the copies have been made.

        Raises:
            RuntimeError: The device can't; no copy is under way then.
        """

    def to_device(self, targets: Columns, sources: Columns, nbytes: Columns) -> Enqueued:
        """Enqueue copies, behind all that the caller has launched on the device.

        Args:
            targets: Addresses on the device.
            sources: Address in the host's memory of each; it stays as it is until the copies have
                been made, and so do the targets.
            nbytes: Bytes of each; not 0.

        Raises:
            RuntimeError: The device can't; no copy is under way then.
        """

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory of the host that the device copies from fastest.

        Args:
            nbytes: Of the memory.
        """

    def synchronize(self) -> None:
        """Block the caller until all copies have been made that were enqueued so far."""


_streams: dict[torch.device, CopyStream] = {}


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return the stream for copies from a device; None for one whose copies block the caller."""
    if device.type != "cuda":
        return None
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = _CudaStream(device)
    return stream


class DeviceCopies:
    """Copies that are `enqueued`, by devices or others, and the memory that is still `read`.

    Leave nothing that they write to others before `finish` has returned.
    """

    def __init__(self) -> None:
        self.enqueued: list[Enqueued] = []
        self.read: list[torch.UntypedStorage] = []

    def begin(self, targets: Columns, sources: Sequence[torch.Tensor]) -> Sequence[Enqueued]:
        """Enqueue copies, behind all that the caller has launched on the devices; return them.

        `sources`: on devices that have a `copy_stream`, one for each target; contiguous. Raises
        RuntimeError.
        """
        # Not the tensors: theirs may be another memory soon (`parameter.data = …`).
        self.read += map(torch.Tensor.untyped_storage, sources)
        numbers = np.fromiter(map(torch.Tensor.get_device, sources), np.int64, len(sources))
        already = len(self.enqueued)
        for number in np.unique(numbers).tolist():
            is_here = numbers == number
            here = list(compress(sources, is_here.tolist()))
            stream = copy_stream(here[0].device)
            assert stream is not None
            try:
                self.enqueued.append(stream.to_host(targets[is_here], here))
            except BaseException:  # an interrupt may have come once they were enqueued
                stream.synchronize()
                raise
        begun = self.enqueued[already:]
        if begun:
            faults.point("devices.enqueued")
        return begun

    def finish(self) -> None:
        """Return once the copies have been made, and let go of what they read.

        Raises RuntimeError.
        """
        error: BaseException | None = None
        while last := self.enqueued[-1:]:
            try:
                last[0].wait()
            except Exception as failure:
                error = failure
            except BaseException as interrupt:  # what a copy still writes to may not be left
                error = interrupt
                continue
            with suppress(ValueError):  # a signal handler, or another thread, has waited as well
                self.enqueued.remove(last[0])
        self.read.clear()
        if error is not None:
            raise error


def host_memory(nbytes: int, *, pinned: bool = True) -> torch.Tensor:
    """Return memory of the host, pinned if that can be."""
    try:  # The device is named: a program may have another default.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise
        log.warning("%d bytes can't be pinned (%s): devices copy more slowly", nbytes, error)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@contextmanager
def on_stream_of(caller: tuple[int, torch.cuda.Stream] | None) -> Iterator[None]:
    """Launch on the stream that another thread launches on: what it has launched comes first."""
    if caller is None:
        yield
        return
    device, stream = caller
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def current_stream() -> tuple[int, torch.cuda.Stream] | None:
    """Return the calling thread's device and stream, for `on_stream_of`; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), torch.cuda.current_stream()


class _CudaStream:
    """One stream for all copies of a process from a device, and to it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pins = True

    def to_host(self, targets: Columns, sources: Sequence[torch.Tensor]) -> Enqueued:
        pinned = is_pinned(int(targets.min()), int(targets.max()))
        return self._enqueue(lambda: copy_to_host(targets, sources, self._stream, is_pinned=pinned))

    def to_device(self, targets: Columns, sources: Columns, nbytes: Columns) -> Enqueued:
        pinned = self._pins
        return self._enqueue(
            lambda: copy_to_device(targets, sources, nbytes, self._stream, is_pinned=pinned)
        )

    def host_memory(self, nbytes: int) -> torch.Tensor:
        memory = host_memory(nbytes, pinned=self._pins)
        if not memory.is_pinned():
            self._pins = False
        return memory

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _enqueue(self, copy: Callable[[], None]) -> Enqueued:
        # The device first: leaving a stream's context alone would make a context on device 0.
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                try:
                    copy()
                    event = torch.cuda.Event(blocking=True)  # others may compute meanwhile
                    event.record(self._stream)
                except BaseException:
                    self._stream.synchronize()
                    raise
        return _CudaEnqueued(self._device, event)


class _CudaEnqueued:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
