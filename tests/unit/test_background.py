"""Threads that saves keep for later ones: a forked child has its own."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import dcp_mem
from dcp_mem import MemoryStorageWriter
from tests.support.processes.forks import forked


def _ends_well_in_a_child(act: Callable[[], object]) -> bool:
    """Fork this process and let the child act; False where it fails, or doesn't end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _save_in(root: str, name: str) -> None:
    # Enough for two threads to copy. Made by numpy: torch's own threads don't outlive a fork.
    state = {"w": torch.from_numpy(np.ones(4 << 20, np.float32))}
    with MemoryStorageWriter(None, memory_root=root, job=name) as writer:
        dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
        dcp_mem.async_save(state, checkpoint_id="step-2", storage_writer=writer).result(timeout=30)


def _saves_before_and_after_a_fork(root: str) -> bool:
    torch.set_num_threads(2)
    _save_in(root, "parent")
    return _ends_well_in_a_child(lambda: _save_in(root, "child"))


def test_a_forked_child_saves_with_threads_after_its_parent_has(memory_root: Path) -> None:
    assert forked(_saves_before_and_after_a_fork, str(memory_root), timeout=100)
