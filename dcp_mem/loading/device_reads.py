"""Payloads of segments that lie here, read into tensors, on the host and on devices.

What goes to a device passes through two windows of pinned memory, as it lies in the segment: the
host reads into one, and holds it against its checksums, while the device empties the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dcp_mem.common.value_class import value_class
from dcp_mem.format.catalog import Extent, Ints
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.memory.copying import read_threads, work_off
from dcp_mem.memory.device_copies import CopyStream, Enqueued, copy_stream
from dcp_mem.planning.plain_tensors import HOST
from dcp_mem.planning.reads import DirectRead

_LEAST_WINDOW, _MOST_WINDOW = 8 << 20, 64 << 20
"""A window takes time to pin: 0.4 ms a MiB. Many threads fill a large one more quickly."""
_WINDOWS = 16
"""So many windows of bytes are read, or more."""
_SHARE = 2 << 20
"""Bytes that a thread reads at a time: of less, it would often wait for the interpreter's lock."""
_MOST_BETWEEN = 4 << 10
"""Bytes between units that are rather read than left out; the frame of a tensor has fewer."""
_ALIGNMENT = 64


def read_payloads(memory: MemorySource, file: str, payloads: DirectRead, *, verify: bool) -> None:
    """Read payloads of a segment as they are into tensors.

    `verify`: hold them against the checksums beside the segment, if they have been made. Raises
    SegmentCorrupt, RuntimeError.
    """
    for number in np.unique(payloads.device).tolist():
        of_device = payloads.only(payloads.device == number)
        if number == HOST:
            memory.read_many(file, of_device, verify=verify)
            continue
        stream = copy_stream(torch.device("cuda", number))
        assert stream is not None
        of_device = of_device.only(of_device.nbytes > 0)
        units = memory.units_of(file, of_device, _SHARE, verify=verify)
        if units:
            _Reads(memory, file, _Shares.of(units), verify).to_device(of_device, stream)


@value_class(eq=False, kw_only=True)
class _Shares:
    """Stretches of a segment, each for one thread to read, and their places in windows."""

    units: Sequence[Sequence[Extent]]
    start: Ints
    stop: Ints
    window: Ints  # number of the window that each is read into, ascending
    place: Ints  # where in the window, in bytes
    nbytes: int

    @staticmethod
    def of(units: Sequence[Extent]) -> _Shares:
        """Put neighbouring units together, and place them in windows one behind the other."""
        start, stop = np.array(units, np.int64).T
        is_cut = (np.diff(start // _SHARE) > 0) | (start[1:] - stop[:-1] > _MOST_BETWEEN)
        first = np.append(0, np.flatnonzero(is_cut) + 1)
        last = np.append(first[1:], len(units)) - 1
        start, stop = start[first], stop[last]
        taken = -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
        before, largest = np.cumsum(taken) - taken, int(taken.max())
        nbytes = _window(int(taken.sum()), 2 * largest)
        return _Shares(
            units=[units[low : high + 1] for low, high in zip(first, last, strict=True)],
            start=start,
            stop=stop,
            window=before // (nbytes - largest),
            place=before % (nbytes - largest),
            nbytes=nbytes,
        )


def _finish(stream: CopyStream) -> None:
    """Return once all copies have been made, whatever comes: others get the windows then."""
    interrupt: BaseException | None = None
    while True:
        try:
            stream.synchronize()
            break
        except Exception:  # the device is lost: it copies nothing any more
            raise
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _window(nbytes: int, least: int) -> int:
    """Return the bytes of a window for so many in all: a power of two, as torch takes such."""
    wanted = max(_LEAST_WINDOW, min(nbytes // _WINDOWS, _MOST_WINDOW), least)
    return 1 << (wanted - 1).bit_length()


@value_class(eq=False)
class _Reads:
    """The reads of what devices take of one segment."""

    memory: MemorySource
    file: str
    shares: _Shares
    verify: bool

    def to_device(self, payloads: DirectRead, stream: CopyStream) -> None:
        """Read payloads into a device's memory."""
        shares, share_of, payload_of = self.shares, *_overlaps(payloads, self.shares)
        start = np.maximum(payloads.offset[payload_of], shares.start[share_of])
        ends = payloads.offset + payloads.nbytes
        nbytes = np.minimum(ends[payload_of], shares.stop[share_of]) - start
        target = (payloads.address - payloads.offset)[payload_of] + start
        place = (shares.place - shares.start)[share_of] + start
        count = int(shares.window[-1]) + 1
        windows = [stream.host_memory(shares.nbytes) for _ in range(min(2, count))]
        emptied: dict[int, Enqueued] = {}
        try:
            for number in range(count):
                turn = number % 2
                if turn in emptied:
                    emptied[turn].wait()
                address = windows[turn].data_ptr()
                self._read_window(number, address)
                here = shares.window[share_of] == number
                emptied[turn] = stream.to_device(target[here], address + place[here], nbytes[here])
                emptied[turn].hold_device()
        finally:
            _finish(stream)

    def _read_window(self, number: int, address: int) -> None:
        shares = self.shares

        def read(share: int) -> None:
            place = address + int(shares.place[share])
            self.memory.read_units(self.file, shares.units[share], place, verify=self.verify)

        first, last = np.searchsorted(shares.window, [number, number + 1]).tolist()
        work_off(range(first, last), read, read_threads())


def _overlaps(payloads: DirectRead, shares: _Shares) -> tuple[Ints, Ints]:
    """Return the numbers of shares and payloads that have bytes in common.

    Payloads may overlap: several tensors may be loaded from the same bytes.
    """
    first = np.searchsorted(shares.stop, payloads.offset, "right")
    last = np.searchsorted(shares.start, payloads.offset + payloads.nbytes, "left")
    counts = last - first
    share = np.arange(counts.sum()) + np.repeat(last - np.cumsum(counts), counts)
    return share, np.repeat(np.arange(len(counts)), counts)
