"""The agent's side of an export: what an agent that ends makes of the program that runs."""

import os
from pathlib import Path

import pytest

from dcp_mem import ExportState
from dcp_mem.config import ExportOrder
from dcp_mem.flushing.exporter import Exporter
from dcp_mem.flushing.exports import JobExports
from dcp_mem.flushing.registration import Registration
from dcp_mem.policy.persistence import every_n_saves
from tests.support.checkpoints.manifests import make_manifest


def _begun(root: Path, request: bytes) -> Exporter:
    """An exporter whose program has begun; it answers at once, or waits for the agent's end."""
    (root / "job").mkdir()
    order = ExportOrder(
        program="tests.support.processes.export_programs",
        to="out",
        every=every_n_saves(1),
        of_complete=True,
        request=request,
    )
    registration = Registration(job="job", url=str(root / "run"), overwrite=True, export=order)
    exports, exporter = JobExports(str(root), "job"), Exporter(str(root))
    exports.look_at(order, make_manifest(generation=1, count=1))
    exporter.go_on([(exports, registration)])
    assert exporter.is_busy
    return exporter


def _wait_for_the_program(exporter: Exporter) -> None:
    assert exporter._running is not None
    os.waitid(os.P_PID, exporter._running.process.pid, os.WEXITED | os.WNOWAIT)


def _state(root: Path) -> ExportState:
    """What a successor finds."""
    successor = JobExports(str(root), "job").next_due()
    return ExportState.EXPORTED if successor is None else successor.state


@pytest.mark.parametrize(
    ("request_", "expected"),
    [(b"answer", ExportState.EXPORTED), (b"wait", ExportState.RUNNING)],
)
def test_an_agent_that_ends_begins_nothing_again_that_was_done_and_leaves_no_descriptor(
    tmp_path: Path, request_: bytes, expected: ExportState
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    exporter = _begun(tmp_path, request_)
    if request_ == b"answer":
        _wait_for_the_program(exporter)
    exporter.stop()
    assert not exporter.is_busy
    assert _state(tmp_path) is expected
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.timeout(60)
def test_an_answer_is_taken_though_the_program_has_left_a_process_behind(tmp_path: Path) -> None:
    exporter = _begun(tmp_path, b"answer and leave a process")
    _wait_for_the_program(exporter)
    exporter.go_on([])
    assert not exporter.is_busy
    assert _state(tmp_path) is ExportState.EXPORTED
