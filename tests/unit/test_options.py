"""Options: every taker shows them all, and refuses what isn't one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp_mem
from dcp_mem import CheckpointManager, ConfigError, MemoryStorageReader, MemoryStorageWriter

_TAKERS = [CheckpointManager, MemoryStorageReader, MemoryStorageWriter, dcp_mem.follow]
_TAKERS += [dcp_mem.serve]


@pytest.mark.parametrize("taker", _TAKERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("memory_rot", "did you mean memory_root=?"),
        ("max_to_keep", "keep_storage="),
        ("save_top_k", "keep_storage="),
        ("keep_latest_k", "keep_storage="),
        ("save_total_limit", "keep_storage="),
        ("qwerty", r"help\(\w+\) shows those it has"),
    ],
)
def test_a_name_that_is_no_option_is_refused_with_the_nearest(
    taker: Callable[..., Any], name: str, meant: str
) -> None:
    if "keep_storage" in meant and "keep_storage" not in inspect.signature(taker).parameters:
        meant = ""
    text = f"{taker.__name__} has no option {name}=: .*{meant}"
    with pytest.raises(ConfigError, match=text) as raised:
        taker("/root", **{name: 1})
    assert isinstance(raised.value, TypeError)


@pytest.mark.parametrize("taker", _TAKERS, ids=lambda one: one.__name__)
def test_help_describes_every_option_once(taker: Callable[..., Any]) -> None:
    described = re.findall(r"^ +(\w+): ", inspect.getdoc(taker) or "", re.MULTILINE)
    options = [name for name in inspect.signature(taker).parameters if name != "options"]
    assert {"memory_root", "job", "storage_options", "transport"} <= set(options)
    assert [described.count(name) for name in options] == [1] * len(options), options


def test_dir_lists_what_is_public() -> None:
    assert set(dir(dcp_mem)) == {*dcp_mem.__all__, "__version__"}


def test_a_repr_names_root_job_and_newest_checkpoint(memory_root: Path) -> None:
    with CheckpointManager(job="job", memory_root=memory_root) as manager:
        assert repr(manager) == (
            "<CheckpointManager of <MemoryStorageWriter memory only, job job>>"
        )
        manager.save(3, {"n": 1})
        assert "job job, newest step-3>" in repr(manager)
    reader = MemoryStorageReader("s3://bucket/run", job="absent", memory_root=memory_root)
    assert repr(reader) == "<MemoryStorageReader s3://bucket/run, job absent>"
    with MemoryStorageReader(job="job", memory_root=memory_root) as reader:
        assert repr(reader) == "<MemoryStorageReader memory only, job job, newest step-3>"
        dcp_mem.load({"n": 0}, storage_reader=reader)
        assert repr(reader) == (
            "<MemoryStorageReader memory only, job job, newest step-3, "
            "loaded step-3 (step 3) from memory>"
        )
