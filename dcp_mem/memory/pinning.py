"""Slots as pinned memory: CUDA copies from a device straight into tmpfs, without a buffer."""

from __future__ import annotations

import os
from typing import Any

import torch

from dcp_mem.common.log import log
from dcp_mem.memory.slot import Slot

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_pinned: set[tuple[int, int]] = set()
SYSTEM = "/sys"
"""Where Linux describes devices and nodes."""


def pin(slot: Slot) -> None:
    """Register a slot's mapping with CUDA, once; where that fails, copies work too, but slower."""
    if slot.mapping is None or not torch.cuda.is_initialized():
        return
    key = (slot.mapping.address, slot.mapping.nbytes)
    if key in _pinned:
        return
    device = _device_in_use()
    if device is None:
        return
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(*key, _PORTABLE))
    if error:
        log.warning(
            "cudaHostRegister of %d bytes failed (error %d): copies go through CUDA's own buffer",
            key[1],
            error,
        )
        return
    _pinned.add(key)
    slot.on_unmap.append(lambda: _unpin(key, device))


def is_pinned(low: int, high: int) -> bool:
    """Return whether memory belongs to a slot's mapping that is registered."""
    return any(start <= low and high < start + nbytes for start, nbytes in tuple(_pinned))


def touch_pages_near_device() -> None:
    """Have pages that the calling thread touches first lie near this process's device, if any.

    For a thread that does nothing else: it stays on the CPUs of the device's NUMA node.
    """
    device = _device_in_use() if torch.cuda.is_initialized() else None
    if device is not None:
        stay_near(torch.cuda.get_device_properties(device))


def _device_in_use() -> int | None:
    """Return a device on which this process has a context.

    A thread starts at device 0, and would make a context there for every rank.
    """
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return next(
        (device for device in range(torch.cuda.device_count()) if has_context(device)), None
    )


def _unpin(key: tuple[int, int], device: int) -> None:
    _pinned.discard(key)
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(key[0])


# -- NUMA nodes: pages lie on the node of the CPU that touches them first ------------------------


def stay_near(device: Any) -> None:
    """Keep the calling thread on the CPUs of a GPU's NUMA node, where that is known.

    Pages that the thread touches first then lie in the memory that the GPU copies into fastest.
    """
    try:
        near = cpus_near(device) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
    except (OSError, ValueError, AttributeError) as error:  # torch 2.6 has no PCI address
        log.debug("the GPU's NUMA node is unknown (%s): slots lie where they are touched", error)


def cpus_near(device: Any) -> set[int]:
    """Return the CPUs of a GPU's NUMA node; none where the machine has no such nodes."""
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    node = int(_read_system(f"bus/pci/devices/{address}/numa_node"))
    return (
        set() if node < 0 else _cpu_numbers(_read_system(f"devices/system/node/node{node}/cpulist"))
    )


def _cpu_numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8,10-11"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read_system(path: str) -> str:
    with open(os.path.join(SYSTEM, path)) as file:
        return file.read().strip()
