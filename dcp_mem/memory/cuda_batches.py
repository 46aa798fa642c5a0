"""Thousands of copies from a CUDA device, or to it, with one call.

torch has none for that: with a call for each, two thousand tensors keep the host busy for longer
than the device needs to copy a quarter of a gigabyte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from dcp_mem.common.log import log
from dcp_mem.memory.copying import Columns

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("number", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def copy_to_host(
    targets: Columns, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream
) -> None:
    """Enqueue copies from a device; some may be under way when this raises.

    Args:
        targets: Addresses in the host's memory.
        sources: On the stream's device, one for each target; contiguous, and none is empty.
        stream: The current one.

    Raises:
        RuntimeError: CUDA can't.
    """
    if _driver_call() is None:
        _copy_one_by_one(targets, sources)
        return
    addresses = np.fromiter(map(torch.Tensor.data_ptr, sources), np.int64, len(sources))
    nbytes = np.array([source.nbytes for source in sources], np.int64)
    _copy_at_once(targets, addresses, nbytes, stream)


def may_copy_to_device() -> bool:
    """Return whether `copy_to_device` is there."""
    return _driver_call() is not None


def copy_to_device(
    targets: Columns, sources: Columns, nbytes: Columns, stream: torch.cuda.Stream
) -> None:
    """Enqueue copies to a device; some may be under way when this raises.

    Args:
        targets: Addresses on the stream's device.
        sources: Address in the host's memory of each.
        nbytes: Bytes of each; not 0.
        stream: The current one.

    Raises:
        RuntimeError: CUDA can't.
    """
    _copy_at_once(targets, sources, nbytes, stream)


def _copy_at_once(
    targets: Columns, sources: Columns, nbytes: Columns, stream: torch.cuda.Stream
) -> None:
    columns = [np.ascontiguousarray(column) for column in (targets, sources, nbytes)]
    attributes, first, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(), ctypes.c_size_t()
    error = _driver_call()(
        *(column.ctypes.data for column in columns),
        len(nbytes),
        ctypes.byref(attributes),
        ctypes.byref(first),  # the attributes are those of all copies from the first one on
        1,
        ctypes.byref(failed),
        stream.cuda_stream,
    )
    if error:
        raise RuntimeError(f"cuMemcpyBatchAsync of {len(nbytes)} copies failed: error {error}")


def _copy_one_by_one(targets: Columns, sources: Sequence[torch.Tensor]) -> None:
    for address, source in zip(targets.tolist(), sources, strict=True):
        place = (ctypes.c_char * source.nbytes).from_address(address)
        target = torch.frombuffer(place, dtype=torch.uint8)
        target.copy_(source.detach().view(-1).view(torch.uint8), non_blocking=True)


@cache
def _driver_call() -> Any:
    """Return cuMemcpyBatchAsync as CUDA 12.8 has it; None with an older driver, or on ROCm."""
    try:
        found = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        log.debug("copies from the device are enqueued one by one: %s", error)
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    found.argtypes = (
        address,
        address,
        address,
        size,
        address,
        address,
        size,
        address,
        address,
    )
    found.restype = ctypes.c_int
    return found
