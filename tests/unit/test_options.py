"""Options: every taker shows them all, refuses what isn't one, and type checkers see them."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp_mem
from dcp_mem import CheckpointManager, ConfigError, MemoryStorageReader, MemoryStorageWriter

_TAKERS = [CheckpointManager, MemoryStorageReader, MemoryStorageWriter, dcp_mem.follow]
_TAKERS += [dcp_mem.serve]
_USER = """
import dcp_mem
from dcp_mem import CheckpointManager, MemoryStorageReader, MemoryStorageWriter, every_n_saves

MemoryStorageWriter("/root", keep_memory=3, on_full="skip", persist=every_n_saves(2))
MemoryStorageWriter("/root", keep_memmory=3)  # wrong
MemoryStorageWriter("/root", on_full="sometimes")  # wrong
MemoryStorageWriter(path=None, job="job", frozen="model.base.*")
MemoryStorageReader("/root", verify=False, broadcast=True)
MemoryStorageReader("/root", keep_memory=3)  # wrong
CheckpointManager("/root", replicas=1, on_error="raise", crash_loop_steps=9)
CheckpointManager("/root", save_top_k=3)  # wrong
CheckpointManager("/root", replicas="two")  # wrong
dcp_mem.serve("/root", memory_limit="64GiB", verify=False)
dcp_mem.serve("/root", memory_limt="64GiB")  # wrong
dcp_mem.follow("/root", poll_seconds=2.0, verify=False)
dcp_mem.follow("/root", poll=2.0)  # wrong
dcp_mem.async_save({}, checkpoint_id="a").result().state_dict_metadata
dcp_mem.async_save({}, checkpoint_id="a").resutl()  # wrong
"""
_SEEN = "dcp_mem,dcp_mem.config,dcp_mem.options,dcp_mem.writer,dcp_mem.reader,dcp_mem.serving"
_SEEN += ",dcp_mem.manager.*,dcp_mem.policy.*,dcp_mem.following.follower,dcp_mem.functional.saves"
_CONFIG = f"""[mypy]
follow_imports = skip
ignore_missing_imports = True
[mypy-{_SEEN}]
follow_imports = silent
"""


@pytest.mark.parametrize("taker", _TAKERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("memory_rot", "did you mean memory_root=?"),
        ("max_to_keep", "here it is keep_storage="),
        ("save_top_k", "here it is keep_storage="),
        ("keep_latest_k", "here it is keep_storage="),
        ("save_total_limit", "here it is keep_storage="),
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


@pytest.mark.parametrize(
    ("taker", "name"),
    [
        *((MemoryStorageWriter, f"on_{name}") for name in ("full", "slow_storage", "replication")),
        (MemoryStorageWriter, "agent"),
        (CheckpointManager, "on_nonfinite"),
        (CheckpointManager, "on_error"),
        (CheckpointManager, "on_crash_loop"),
    ],
)
def test_a_choice_that_there_is_not_is_refused_by_name(
    taker: Callable[..., Any], name: str, memory_root: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='odd': choose '\w+'.* or '\w+'$"):
        taker(job="job", memory_root=memory_root, **{name: "odd"})


def test_a_type_checker_finds_each_misspelt_option_and_no_right_one(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(_USER)
    (tmp_path / "mypy.ini").write_text(_CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"]
    environment = {"MYPYPATH": str(Path(dcp_mem.__file__).parents[1])}
    done = subprocess.run(  # it ends with 1: it has found errors
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    found = re.findall(r"^user\.py:(\d+): error", done.stdout, re.MULTILINE)
    lines = enumerate(_USER.splitlines(), 1)
    wrong = [str(number) for number, line in lines if line.endswith("# wrong")]
    assert sorted(set(found), key=int) == wrong, done.stdout


def test_dir_lists_what_is_public() -> None:
    assert set(dir(dcp_mem)) == {*dcp_mem.__all__, "__version__"}


def test_a_repr_names_root_job_and_newest_checkpoint(memory_root: Path) -> None:
    with CheckpointManager(job="job", memory_root=memory_root) as manager:
        assert repr(manager) == (
            "<CheckpointManager of <MemoryStorageWriter memory only, job job>>"
        )
        manager.save(3, {"n": 1})
        assert "job job, newest step-3>" in repr(manager)
    reader = MemoryStorageReader("s3://bucket/run", job="job", memory_root=memory_root)
    assert repr(reader) == "<MemoryStorageReader s3://bucket/run, job job>"
