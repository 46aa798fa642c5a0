"""NUMA nodes: pages lie on the node of the CPU that touches them first."""

from __future__ import annotations

import os
from typing import Any

from dcp_mem.common.log import log

SYSTEM = "/sys"
"""Where Linux describes devices and nodes."""


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
    node = int(_read(f"bus/pci/devices/{address}/numa_node"))
    return set() if node < 0 else _numbers(_read(f"devices/system/node/node{node}/cpulist"))


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8,10-11"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: str) -> str:
    with open(os.path.join(SYSTEM, path)) as file:
        return file.read().strip()
