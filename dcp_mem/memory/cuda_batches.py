"""Thousands of copies from a CUDA device, or to it, with one call.

torch has none for that: with a call for each, two thousand tensors keep the host busy for longer
than the device needs to copy a quarter of a gigabyte. Where the driver has no such call, refuses
it, or can't take the host's addresses as they are, copies are enqueued one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from dcp_mem.common.log import log, log_once
from dcp_mem.memory.copying import Columns, addresses_of, sizes_of

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_TAKES_ANY_MEMORY = 88  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
_TAKES_REGISTERED_MEMORY = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_refused: set[int] = set()
"""Errors of the driver's call for many copies. Once there is one, it isn't called any more."""


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
    targets: Columns,
    sources: Sequence[torch.Tensor],
    stream: torch.cuda.Stream,
    *,
    is_pinned: bool,
) -> None:
    """Enqueue copies from a device; some may be under way when this raises.

    `sources`: on the stream's device, one for each target; contiguous, and none is empty. Raises
    RuntimeError.
    """
    if _goes_at_once(stream, is_pinned=is_pinned) and _is_copied_at_once(
        targets, addresses_of(sources), sizes_of(sources), stream
    ):
        return
    for address, source in zip(targets.tolist(), sources, strict=True):
        place = (ctypes.c_char * source.nbytes).from_address(address)
        target = torch.frombuffer(place, dtype=torch.uint8)
        target.copy_(source.detach().view(-1).view(torch.uint8), non_blocking=True)


def may_copy_to_device() -> bool:
    """Return whether `copy_to_device` is there."""
    return torch.cuda.is_initialized() and hasattr(_driver(), "cuMemcpyHtoDAsync_v2")


def copy_to_device(
    targets: Columns,
    sources: Columns,
    nbytes: Columns,
    stream: torch.cuda.Stream,
    *,
    is_pinned: bool,
) -> None:
    """Enqueue copies to a device; some may be under way when this raises.

    Raises RuntimeError.
    """
    at_once = _goes_at_once(stream, is_pinned=is_pinned)
    if at_once and _is_copied_at_once(targets, sources, nbytes, stream):
        return
    copy = _driver().cuMemcpyHtoDAsync_v2
    copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for move in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
        if error := copy(*move, stream.cuda_stream):
            raise RuntimeError(f"cuMemcpyHtoDAsync of {move[2]} bytes failed: error {error}")


def _goes_at_once(stream: torch.cuda.Stream, *, is_pinned: bool) -> bool:
    """Return whether the driver is to be asked for many copies with one call.

    It takes addresses as they are; torch's copies translate those of registered memory.
    """
    if _refused:
        return False
    needed = _TAKES_REGISTERED_MEMORY if is_pinned else _TAKES_ANY_MEMORY
    if not hasattr(_driver(), "cuMemcpyBatchAsync"):
        why = "there is no call for many, which CUDA 12.8 and newer have"
    elif not _has_attribute(stream.device.index, needed):
        why = f"it can't take addresses of {'registered' if is_pinned else 'unpinned'} memory"
    else:
        return True
    log_once(f"copies of {stream.device} are enqueued one by one: {why}")
    return False


def _is_copied_at_once(
    targets: Columns, sources: Columns, nbytes: Columns, stream: torch.cuda.Stream
) -> bool:
    """Enqueue copies with one call; where that fails, wait, and return False from now on."""
    columns = [np.ascontiguousarray(column) for column in (targets, sources, nbytes)]
    attributes, first, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(), ctypes.c_size_t()
    address, size = ctypes.c_void_p, ctypes.c_size_t
    call = _driver().cuMemcpyBatchAsync
    call.argtypes = address, address, address, size, address, address, size, address, address
    error = call(
        *(column.ctypes.data for column in columns),
        len(nbytes),
        ctypes.byref(attributes),
        ctypes.byref(first),  # the attributes are those of all copies from the first one on
        1,
        ctypes.byref(failed),
        stream.cuda_stream,
    )
    if not error:
        return True
    _refused.add(error)
    log.warning(
        "cuMemcpyBatchAsync of %d copies failed (error %d): this process enqueues copies from and "
        "to devices one by one, which takes longer",
        len(nbytes),
        error,
    )
    stream.synchronize()  # some may be under way
    return False


@cache
def _driver() -> Any:
    """Return CUDA's driver; None on ROCm, or where there is none."""
    if torch.version.hip:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        log.debug("no driver of CUDA's: %s", error)
        return None


@cache
def _has_attribute(device: int, attribute: int) -> bool:
    handle, value = ctypes.c_int(), ctypes.c_int()
    found = _driver()
    failed = found.cuDeviceGet(ctypes.byref(handle), device) or found.cuDeviceGetAttribute(
        ctypes.byref(value), attribute, handle
    )
    return not failed and bool(value.value)
