"""Copies from devices into mapped slots, beside what the devices compute.

The host only enqueues them. All that CUDA itself is needed for is in `_CudaStream`; the rest goes
by the two protocols, and runs on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Enqueued(Protocol):
    """Copies that a device has been told to make."""

    def wait(self) -> None:
        """Block the caller until the copies have been made."""

    def hold_device(self) -> None:
        """Have the device make the copies before what the caller launches from now on.

        The caller goes on at once.
        """


class CopyStream(Protocol):
    """One device's copies to the host; they are made in order."""

    def enqueue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Enqueued:
        """Enqueue copies, behind all that the caller has launched on the device.

        Args:
            targets: In the host's memory; they must stay mapped until the copies have been made.
            sources: On the device, one for each target, of its dtype and shape.
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


class _CudaStream:
    """One stream for all copies of a process from a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def enqueue(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Enqueued:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Resolved here: torch would conjugate or negate a target while its copy is under way.
            plain = [source.resolve_conj().resolve_neg() for source in sources]
            torch._foreach_copy_(list(targets), plain, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        for source in plain:
            source.record_stream(self._stream)  # so that its memory isn't given to others
        return _CudaEnqueued(self._device, event)


class _CudaEnqueued:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
