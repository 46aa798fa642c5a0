"""Where pages of slots lie, on a machine with several NUMA nodes: played by a tree of files."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcp_mem.memory import pinning

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)


def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cpus: str) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    nodes = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    nodes.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (nodes / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(pinning, "SYSTEM", str(tmp_path))


def test_a_gpus_cpus_are_those_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(tmp_path, monkeypatch, "1", "0-3,8,10-11")
    assert pinning.cpus_near(GPU) == {0, 1, 2, 3, 8, 10, 11}


def _affinity_after_staying_near(gpu: object) -> set[int]:
    found: list[set[int]] = []

    def work() -> None:
        pinning.stay_near(gpu)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_one_thread_stays_near_the_gpu_and_the_others_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    nearest = min(allowed)
    _machine(tmp_path, monkeypatch, "1", f"{nearest},{max(allowed) + 1}-{max(allowed) + 4}")
    assert _affinity_after_staying_near(GPU) == {nearest}
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize(
    ("node", "cpus"), [("-1", "0"), ("7", "0"), ("?", "0"), ("1", ""), ("1", "many")]
)
def test_a_thread_stays_where_it_is_on_a_machine_that_says_nothing_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cpus: str
) -> None:
    _machine(tmp_path, monkeypatch, node, cpus)
    allowed = os.sched_getaffinity(0)
    assert _affinity_after_staying_near(GPU) == allowed
    assert _affinity_after_staying_near(SimpleNamespace()) == allowed
