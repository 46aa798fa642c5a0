"""Copies from devices into mapped slots, and back, beside what the devices compute.

The host only enqueues them, all of a save with one call. All that CUDA itself is needed for is in
`_CudaStream`; the rest goes by the two protocols, and runs on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Protocol

import numpy as np
import torch

from dcp_mem.common import faults
from dcp_mem.memory.copying import Columns
from dcp_mem.memory.cuda_batches import copy_to_device, copy_to_host


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


_streams: dict[torch.device, CopyStream] = {}


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return the stream for copies from a device; None for one whose copies block the caller.

    Args:
        device: Of a tensor.
    """
    if device.type != "cuda":
        return None
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = _CudaStream(device)
    return stream


class DeviceCopies:
    """Copies from devices that are under way, and the memory that they read.

    Leave nothing that they write to others before `finish` has returned.
    """

    def __init__(self) -> None:
        self._enqueued: list[Enqueued] = []
        self._read: list[torch.UntypedStorage] = []

    @property
    def are_under_way(self) -> bool:
        """Whether any have begun that `finish` hasn't waited for."""
        return bool(self._enqueued)

    def begin(self, targets: Columns, sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies, behind all that the caller has launched on the devices.

        Args:
            targets: Addresses in mapped memory.
            sources: On devices that have a `copy_stream`, one for each target; contiguous.

        Raises:
            RuntimeError: A device can't. Call `finish` all the same.
        """
        # Not the tensors: theirs may be another memory soon (`parameter.data = …`).
        self._read += map(torch.Tensor.untyped_storage, sources)
        numbers = np.fromiter(map(torch.Tensor.get_device, sources), np.int64, len(sources))
        for number in np.unique(numbers).tolist():
            is_here = numbers == number
            here = list(compress(sources, is_here.tolist()))
            stream = copy_stream(here[0].device)
            assert stream is not None
            self._enqueued.append(stream.to_host(targets[is_here], here))
        if self._enqueued:
            faults.point("devices.enqueued")

    def hold_devices(self) -> None:
        """Have the devices make the copies before what the caller launches on them from now on."""
        for enqueued in self._enqueued:
            enqueued.hold_device()

    def finish(self) -> None:
        """Return once the copies have been made, and let go of what they read.

        Raises:
            RuntimeError: A device has failed. No copy is under way any more then, either.
        """
        error: BaseException | None = None
        while self._enqueued:
            try:
                self._enqueued[-1].wait()
            except Exception as failure:
                error = failure
            except BaseException as interrupt:  # what a copy still writes to may not be left
                error = interrupt
                continue
            self._enqueued.pop()
        self._read.clear()
        if error is not None:
            raise error


class _CudaStream:
    """One stream for all copies of a process from a device, and to it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, targets: Columns, sources: Sequence[torch.Tensor]) -> Enqueued:
        return self._enqueue(lambda: copy_to_host(targets, sources, self._stream))

    def to_device(self, targets: Columns, sources: Columns, nbytes: Columns) -> Enqueued:
        return self._enqueue(lambda: copy_to_device(targets, sources, nbytes, self._stream))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _enqueue(self, copy: Callable[[], None]) -> Enqueued:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                copy()
            except BaseException:
                self._stream.synchronize()
                raise
            event = torch.cuda.Event(blocking=True)  # others may compute while somebody waits
            event.record(self._stream)
        return _CudaEnqueued(self._device, event)


class _CudaEnqueued:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
