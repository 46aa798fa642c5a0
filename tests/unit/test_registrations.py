"""Registrations of a job with its flusher: who saves nothing brings only the way to storage."""

from dataclasses import replace
from pathlib import Path

from dcp_mem.flushing.flusher import JobFlusher
from dcp_mem.flushing.registration import Registration

OF_RUN = Registration(
    job="job",
    url="/storage",
    overwrite=False,
    upload_limit=5,
    persists_all=True,
    on_nonfinite="reject",
    nodes=frozenset({"one"}),
    run="r1",
)


def test_who_saves_nothing_brings_only_the_way_to_storage(memory_root: Path) -> None:
    flusher = JobFlusher(str(memory_root), OF_RUN)
    way = {"url": "/mnt/storage", "storage_options": {"key": 1}, "now": True}
    flusher.register(Registration(job="job", overwrite=True, **way))  # type: ignore[arg-type]
    assert flusher.registration == replace(OF_RUN, **way)  # type: ignore[arg-type]


def test_the_next_run_brings_all(memory_root: Path) -> None:
    flusher = JobFlusher(str(memory_root), OF_RUN)
    of_next = Registration(job="job", url="/storage", overwrite=True, run="r2")
    flusher.register(of_next)
    assert flusher.registration == replace(of_next, nodes=OF_RUN.nodes)
