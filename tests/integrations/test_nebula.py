"""Nebula's API: what a script that was written for it does, and what it finds again."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_mem import (
    CheckpointNotFound,
    ConfigError,
    DcpMemError,
    MemoryStorageWriter,
    SegmentCorrupt,
    every_n_saves,
)
from dcp_mem.integrations import nebula
from dcp_mem.integrations.nebula import run
from tests.support.channels import PROBE_NBYTES, UsedChannel
from tests.support.checkpoints.jobs import Job, committed_in, wait_until
from tests.support.command import reject
from tests.support.nodes.cluster import Cluster
from tests.support.processes.forks import forked, forked_ranks, killed_ranks, on_ranks, raised_by


@pytest.fixture(autouse=True)
def _another_run(memory_root: Path) -> Iterator[None]:
    """`init` is for the rest of a process."""
    yield
    if run._run is not None:
        run._run.close()
        run._run.writer.close(flush=False)
    run._run = None


def _init(root: Path, url: Path | None, **options: Any) -> None:
    chosen = {
        "persistent_time_interval": 0,
        "memory_root": root,
        **({"job": "job"} if url is None else {}),
        **options,
    }
    nebula.init(url, **chosen)


def _tensors(number: int) -> dict[str, Any]:
    return {
        "weights": torch.full((70_001,), float(number)),
        "number": number,
        "names": ["a", ("b", number)],
    }


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return torch.equal(one["weights"], other["weights"]) and one["names"] == other["names"]


def _tags() -> list[str]:
    return [one["tag"] for one in nebula.list_checkpoints()]


# -- one process -----------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_from_memory_and_once_that_is_gone_from_storage(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-1")
    checkpoint.save("model", _tensors(1))
    assert _equal(nebula.get_latest_checkpoint().load("model"), _tensors(1))
    assert nebula.flush_persistence()
    [listed] = nebula.list_checkpoints()
    assert json.loads(json.dumps(listed)) == listed
    assert (listed["tag"], listed["state"], listed["tiers"]) == (
        "step-1",
        "durable",
        ["tier1", "tier3"],
    )
    assert listed["path"] == f"{url}/step-1"
    shutil.rmtree(memory_root / run.current().settings.job / "step-1")
    found = nebula.get_checkpoint("step-1", persist_path=url)
    assert found.tag == "step-1"
    assert _equal(found.load("model", map_location="cpu"), _tensors(1))
    assert (url / "checkpointHistories.csv").exists()


def test_a_file_on_storage_is_read_by_torch_alone(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-1", 2)
    checkpoint.save("model", _tensors(1))
    checkpoint.save("optimizer", _tensors(2))
    assert nebula.flush_persistence()
    found: dict[str, Any] = {"model": None, "optimizer": None}
    dcp.load(found, storage_reader=dcp.FileSystemReader(url / "step-1"))
    assert _equal(found["model"], _tensors(1))
    assert _equal(found["optimizer"], _tensors(2))
    with nebula.get_checkpoint("step-1").open("optimizer") as file:
        assert _equal(torch.load(file, weights_only=False), _tensors(2))


def test_a_checkpoint_of_one_file_on_storage_is_what_torch_saves(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    nebula.Checkpoint("step-1").save("model", _tensors(1))
    assert nebula.flush_persistence()
    [segment] = (url / "step-1").glob("*.distcp")
    assert _equal(torch.load(segment, weights_only=False), _tensors(1))


def test_a_checkpoint_of_n_files_is_complete_with_the_last_of_them(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-1", 3)
    for number, name in enumerate(["a", "b", "c"]):
        assert _tags() == []
        assert nebula.get_checkpoint("step-1").tag == ""
        checkpoint.save(name, number)
    assert _tags() == ["step-1"]
    found = nebula.get_checkpoint("step-1")
    assert [found.load(name) for name in "abc"] == [0, 1, 2]


def test_a_checkpoint_for_commit_is_complete_with_that_alone(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-1", -2)
    checkpoint.save("a", 1)
    checkpoint.save("a", 2)
    assert _tags() == []
    assert checkpoint.commit()
    assert _tags() == ["step-1"]
    assert checkpoint.load("a") == 2


def test_each_file_completes_a_checkpoint_that_keeps_the_earlier_ones(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-1")
    for number, name in enumerate(["a", "b", "a"]):
        checkpoint.save(name, _tensors(number))
        assert _tags() == ["step-1"]
    assert _equal(checkpoint.load("a"), _tensors(2))
    assert _equal(checkpoint.load("b"), _tensors(1))
    assert nebula.flush_persistence()


def test_a_tag_that_is_saved_anew_has_the_new_files_alone(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    for number, name in enumerate(["a", "b"]):
        checkpoint = nebula.Checkpoint("step-1", -2)
        checkpoint.save(name, number)
        assert checkpoint.commit()
    assert checkpoint.load("b") == 1
    with pytest.raises(ConfigError, match="step-1 has no 'a'; it has b"):
        checkpoint.load("a")


# -- what is complete stays as it is, or grows ----------------------------------------------------


def _loaded(tag: str, *names: str) -> list[Any]:
    found = nebula.get_checkpoint(tag)
    return [found.load(name) for name in names]


@pytest.mark.parametrize("num_of_files", [1, 2, -1, -2])
def test_a_commit_with_nothing_new_leaves_a_complete_checkpoint_as_it_is(
    memory_root: Path, url: Path, num_of_files: int
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-5", num_of_files)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    for _ in range(2):
        assert checkpoint.commit()
        assert _loaded("step-5", "a", "b") == [1, 2]
    assert nebula.Checkpoint("step-5", num_of_files).commit()
    assert _loaded("step-5", "a", "b") == [1, 2]


def test_a_commit_in_another_process_leaves_a_complete_checkpoint_as_it_is(
    memory_root: Path, url: Path
) -> None:
    assert forked(_saves_two, memory_root, url) == ["step-5"]
    _init(memory_root, url)
    assert nebula.Checkpoint("step-5", 2).commit()
    assert _loaded("step-5", "a", "b") == [1, 2]


def _saves_two(root: Path, url: Path) -> list[str]:
    _init(root, url)
    checkpoint = nebula.Checkpoint("step-5", 2)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    return _tags()


def test_a_commit_of_nothing_at_all_makes_no_checkpoint(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    assert not nebula.Checkpoint("step-5", -2).commit()
    assert _tags() == []


def test_a_further_file_adds_to_a_checkpoint_that_is_complete_by_its_count(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-5", 2)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    for number, name in enumerate(["c", "d"], 3):
        checkpoint.save(name, number)
        assert _loaded("step-5", "a", "b", name) == [1, 2, number]
        assert checkpoint.commit()
    assert _loaded("step-5", "a", "b", "c", "d") == [1, 2, 3, 4]


def test_a_file_that_is_committed_later_adds_to_its_checkpoint(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    checkpoint = nebula.Checkpoint("step-5", -2)
    for number, name in enumerate(["a", "b"]):
        checkpoint.save(name, number)
        assert checkpoint.commit()
    assert _loaded("step-5", "a", "b") == [0, 1]


def test_a_checkpoint_that_is_saved_anew_never_has_old_and_new_files(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    held = nebula.Checkpoint("best", 2)
    for epoch in range(4):
        made = nebula.Checkpoint("best", 2) if epoch > 1 else held
        made.save("a", epoch)
        if epoch:
            assert _loaded("best", "a", "b") == [epoch - 1] * 2
        made.save("b", epoch)
        assert _loaded("best", "a", "b") == [epoch] * 2


def test_a_file_of_an_older_tag_adds_to_it(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    for step in (1, 2):
        nebula.Checkpoint(f"step-{step}").save("model", step)
    nebula.Checkpoint("step-1").save("optimizer", 3)
    assert _loaded("step-1", "model", "optimizer") == [1, 3]


def test_a_further_file_of_a_checkpoint_that_has_left_memory_is_refused(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url, num_of_version_in_retention=1)
    checkpoint = nebula.Checkpoint("step-1", 2)
    checkpoint.save("a", 1)
    checkpoint.save("b", 2)
    assert nebula.flush_persistence()
    for step in (2, 3):
        nebula.Checkpoint(f"step-{step}").save("a", step)
    wait_until(lambda: not (memory_root / run.current().settings.job / "step-1").exists())
    with pytest.raises(DcpMemError, match="has left this node's memory"):
        checkpoint.save("c", 3)
    assert _loaded("step-1", "a", "b") == [1, 2]


def test_a_commit_ends_the_count_of_files(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    early = nebula.Checkpoint("best", 3)
    early.save("a", 0)
    assert early.commit()
    again = nebula.Checkpoint("best", 3)
    for name in ("a", "b"):
        again.save(name, 1)
        assert _loaded("best", "a") == [0]
    again.save("c", 1)
    assert _loaded("best", "a", "b", "c") == [1, 1, 1]


# -- what isn't there is not replaced by something else --------------------------------------------


def test_a_checkpoint_that_does_not_exist_loads_nothing(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    nebula.Checkpoint("step-1").save("model", 1)
    for checkpoint, wanted in (
        (nebula.get_checkpoint("nope"), "nope"),
        (nebula.get_checkpoint(7), "7"),
        (nebula.Checkpoint(), "checkpoint without a tag"),
        (nebula.Checkpoint("nope"), "nope"),
    ):
        with pytest.raises(CheckpointNotFound, match=f"no {wanted} in .*step-1"):
            checkpoint.load("model")
        with pytest.raises(CheckpointNotFound), checkpoint.open("model"):
            pass


def test_a_tag_may_be_a_number(memory_root: Path, url: Path) -> None:
    _init(memory_root, url, num_of_version_in_retention=3)
    for step in (0, 10, 20):
        nebula.Checkpoint(step).save("model", step)
    assert nebula.get_checkpoint(10).load("model") == 10
    assert nebula.get_checkpoint(0).load("model") == 0
    assert nebula.get_checkpoint(None).load("model") == 20
    assert nebula.Checkpoint(None).tag == ""


def test_one_checkpoint_is_flushed_by_its_tag(memory_root: Path, url: Path) -> None:
    _init(memory_root, url, persistent_time_interval=3600, num_of_version_in_retention=4)
    for step in range(4):
        nebula.Checkpoint(step).save("model", step)
    assert nebula.flush_persistence(2)
    assert (url / "2" / ".metadata").exists()
    # The first save is due by the interval, and needn't be flushed first.
    wait_until((url / "0" / ".metadata").exists, "the first save to be flushed")
    assert committed_in(url) == {"0", "2"}
    assert nebula.flush_persistence("0")
    assert not nebula.flush_persistence("nope")


def test_a_rejected_checkpoint_is_loaded_by_its_tag_alone(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    for number in (1, 2):
        nebula.Checkpoint(number).save("model", _tensors(number))
    assert nebula.flush_persistence()
    reject(Job(str(url), str(memory_root), name=None), "2")
    assert nebula.get_latest_checkpoint().tag == "1"
    assert _equal(nebula.get_checkpoint(2).load("model"), _tensors(2))


def test_a_run_that_is_shut_down_has_flushed_and_another_may_follow(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    nebula.Checkpoint("step-1").save("model", 1)
    path = nebula.get_latest_checkpoint_path("model")
    nebula._shutdown()
    assert (url / "step-1" / ".metadata").exists()
    assert not os.path.exists(path)
    nebula._shutdown()
    _init(memory_root, url)
    assert _loaded("step-1", "model") == [1]


def test_the_path_of_the_newest_checkpoint_is_one_of_a_file_until_there_is_a_newer_one(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    assert nebula.get_latest_checkpoint_path("model") == ""
    nebula.Checkpoint("step-1").save("../model", _tensors(1))
    first = nebula.get_latest_checkpoint_path("../model")
    assert _equal(torch.load(first), _tensors(1))
    assert nebula.get_latest_checkpoint_path("../model") == first
    with pytest.raises(ConfigError, match="has no 'model'"):
        nebula.get_latest_checkpoint_path("model")
    # Another process has the same file, and leaves it to this one.
    assert forked(_path_of_newest, memory_root, url, "../model") == first
    assert os.path.exists(first)
    nebula.Checkpoint("step-2").save("model", _tensors(2))
    second = nebula.get_latest_checkpoint_path("model")
    assert _equal(torch.load(second), _tensors(2))
    assert not os.path.exists(first)


def test_files_of_a_process_that_was_killed_are_removed_by_the_next_one(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _init(memory_root, url)
    nebula.Checkpoint("step-1").save("model", 1)
    killed_ranks(
        _path_of_newest,
        None,
        memory_root,
        url,
        "model",
        str(tmp_path),
    )
    assert len(list(tmp_path.glob("*-files/*"))) == 1
    nebula.Checkpoint("step-2").save("model", 2)
    assert nebula.get_latest_checkpoint_path("model")
    assert len(list(tmp_path.glob("*-files/*"))) == 1


def _path_of_newest(root: Path, url: Path, name: str, dies_with_files_in: str = "") -> str:
    _init(root, url)
    tempfile.tempdir = dies_with_files_in or tempfile.tempdir
    path = nebula.get_latest_checkpoint_path(name)
    if dies_with_files_in:
        os.kill(os.getpid(), signal.SIGKILL)
    return path


def test_memory_keeps_as_many_as_are_to_be_retained_and_storage_gets_one_now_and_then(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url, num_of_version_in_retention=2, persistent_time_interval=3600)
    for step in range(5):
        nebula.Checkpoint(f"step-{step}").save("model", step)
        run.current().writer.wait("step-0")
    assert {one["tag"]: one["tiers"] for one in nebula.list_checkpoints()} == {
        "step-4": ["tier1"],
        "step-3": ["tier1"],
        "step-0": ["tier3"],
    }
    assert nebula.get_latest_checkpoint(url).tag == "step-4"
    path = nebula.get_latest_checkpoint_path("model", url)
    assert path.endswith("/step-4/model")
    assert torch.load(path) == 4
    assert nebula.flush_persistence()
    assert (url / "step-4" / ".metadata").exists()


def test_a_tag_is_made_where_none_is_given(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    for number in range(2):
        checkpoint = nebula.Checkpoint()
        checkpoint.save("model", number)
        assert _tags()[0] == checkpoint.tag != ""
    assert len(_tags()) == 2


def test_damage_in_memory_is_passed_over_where_storage_has_the_file(
    memory_root: Path, url: Path
) -> None:
    _init(memory_root, url)
    nebula.Checkpoint("step-1").save("model", _tensors(1))
    assert nebula.flush_persistence()
    [segment] = (memory_root / run.current().settings.job / "step-1").glob("*.distcp")
    segment.unlink()
    assert _equal(nebula.get_checkpoint("step-1").load("model"), _tensors(1))
    [stored] = (url / "step-1").glob("*.distcp")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.write_bytes(data)
    with pytest.raises((SegmentCorrupt, DcpMemError), match="CRC32C"):
        nebula.get_checkpoint("step-1").load("model")


@pytest.mark.parametrize(
    ("buffer", "limit"), [("4GiB", 2 << 30), ("200000000", 100_000_000)], ids=["GiB", "bytes"]
)
def test_the_environment_says_what_arguments_do_not(
    memory_root: Path, url: Path, monkeypatch: pytest.MonkeyPatch, buffer: str, limit: int
) -> None:
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    monkeypatch.setenv("NEBULA_PERSISTENT_STORAGE_PATH", str(url))
    monkeypatch.setenv("NEBULA_PERSISTENT_TIME_INTERVAL", "7")
    monkeypatch.setenv("NEBULA_MEMORY_BUFFER_SIZE", buffer)
    nebula.Checkpoint("step-1").save("model", 1)
    chosen = run.current().settings
    assert (chosen.url, chosen.persist.seconds, chosen.memory_limit) == (str(url), 7.0, limit)


def test_without_init_nor_environment_one_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="call init"):
        nebula.Checkpoint("step-1").save("model", 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"persistent_time_interval": "soon"}, "persistent_time_interval='soon'"),
        ({"persistent_time_interval": -1}, "persistent_time_interval=-1"),
        ({"num_of_version_in_retention": 0}, "num_of_version_in_retention=0"),
    ],
    ids=["interval", "negative", "retention"],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        nebula.init(tmp_path, **options)


@pytest.mark.parametrize("count", [0, -3, "2"])
def test_a_number_of_files_that_means_nothing_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match="num_of_files"):
        nebula.Checkpoint("step-1", count)


def test_other_checkpoints_of_the_job_are_listed_too_and_have_no_files_of_that_name(
    memory_root: Path, url: Path
) -> None:
    with MemoryStorageWriter(url, memory_root=memory_root, persist=every_n_saves(1)) as writer:
        dcp.save(
            {"weights": torch.ones(3), "number": 7}, checkpoint_id="step-1", storage_writer=writer
        )
    _init(memory_root, url)
    assert _tags() == ["step-1"]
    assert nebula.get_latest_checkpoint().load("number") == 7
    with pytest.raises(ConfigError, match="has no 'model'"):
        nebula.get_latest_checkpoint().load("model")


def _imports_by_the_old_names(root: Path, url: Path) -> list[Any]:
    nebula.install()
    import nebulaml  # type: ignore[import-not-found]
    import torch_nebula  # type: ignore[import-not-found]

    nebulaml.init(persistent_storage_path=str(url), persistent_time_interval=2, memory_root=root)
    torch_nebula.Checkpoint("step-1").save("model", 1)
    return [nebulaml is torch_nebula, nebulaml.get_latest_checkpoint().load("model")]


def test_the_old_names_mean_this_package_once_it_is_installed_and_not_before(
    memory_root: Path, url: Path
) -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("nebulaml")
    assert forked(_imports_by_the_old_names, memory_root, url) == [True, 1]


def test_another_package_of_the_old_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nebulaml", os)
    with pytest.raises(ConfigError, match="nebulaml has been imported already"):
        nebula.install()


# -- several ranks ---------------------------------------------------------------------------------


def _rank() -> int:
    return torch.distributed.get_rank()


def _commits_together(root: Path, url: Path) -> list[Any]:
    _init(root, url)
    for step in (1, 2):
        checkpoint = nebula.Checkpoint(f"step-{step}", -2)
        if _rank() == 0:
            checkpoint.save("model", _tensors(step))
        checkpoint.save(f"optimizer-{_rank()}", _tensors(10 * step + _rank()))
        checkpoint.save("own", _rank())
        torch.distributed.barrier()
        before = f"step-{step}" in _tags()
        torch.distributed.barrier()
        assert checkpoint.commit()
    found = nebula.get_latest_checkpoint()
    other = 1 - _rank()
    equal = [
        _equal(found.load("model"), _tensors(2)),
        _equal(found.load(f"optimizer-{other}"), _tensors(20 + other)),
    ]
    return [before, found.tag, found.load("own"), *equal]


def test_ranks_commit_together_and_load_each_others_files(memory_root: Path, url: Path) -> None:
    for rank, found in enumerate(forked_ranks(_commits_together, 2, memory_root, url)):
        assert found == [False, "step-2", rank, True, True]
    _init(memory_root, url)
    assert nebula.get_latest_checkpoint().tag == "step-2"


def test_a_rank_that_has_saved_no_file_of_a_name_is_told_whose_it_gets(
    memory_root: Path,
    url: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forked_ranks(_commits_together, 2, memory_root, url)
    _init(memory_root, url)
    for rank in (1, 5):
        monkeypatch.setenv("RANK", str(rank))
        found = nebula.get_latest_checkpoint()
        assert found.load("own") == (rank if rank < 2 else 0)
        assert _equal(found.load("model"), _tensors(2))
        assert ("none of them was rank 5" in caplog.text) == (rank == 5)


def _one_never_commits(root: Path, url: Path) -> list[Any]:
    _init(root, url)
    checkpoint = nebula.Checkpoint("step-1", -2)
    checkpoint.save(f"part-{_rank()}", 1)
    committed = checkpoint.commit() if _rank() == 0 else None
    return [committed, _tags()]


def test_a_checkpoint_that_one_rank_has_not_committed_is_none(memory_root: Path, url: Path) -> None:
    found = forked_ranks(_one_never_commits, 2, memory_root, url, env={"DCP_MEM_TIMEOUT": "3"})
    assert found[0] == [False, []]
    assert found[1][0] is None


@on_ranks(2)
def test_a_checkpoint_of_n_files_counts_those_of_all_ranks(memory_root: Path, url: Path) -> None:
    _init(memory_root, url)
    rank = _rank()
    for step in range(3):
        checkpoint = nebula.Checkpoint(f"step-{step}", 3)
        if rank == step % 2:  # two files of one rank, and one of the other
            checkpoint.save("more", step)
        checkpoint.save(f"part-{rank}", 10 * step + rank)
    torch.distributed.barrier()
    wait_until(lambda: _tags()[:1] == ["step-2"])
    found = nebula.get_latest_checkpoint()
    assert [found.tag, found.load("part-0"), found.load("part-1"), found.load("more")] == [
        "step-2",
        20,
        21,
        2,
    ]


def _each_file_counts(root: Path, url: Path) -> list[Any]:
    _init(root, url)
    checkpoint = nebula.Checkpoint("", -1)
    if _rank() == 1:
        checkpoint.save("late", 1)
        seen = nebula.get_latest_checkpoint().load("late")
    torch.distributed.barrier()
    if _rank() == 0:
        again = nebula.Checkpoint(_tags()[0])
        again.save("later", 2)
        seen = [again.load("late"), again.load("later")]
    torch.distributed.barrier()
    return [seen, len(_tags())]


def test_with_each_file_of_any_rank_there_is_a_checkpoint(memory_root: Path, url: Path) -> None:
    assert forked_ranks(_each_file_counts, 2, memory_root, url) == [[[1, 2], 1], [1, 1]]


def _saves_where_one_has_no_room(root: Path, url: Path) -> list[Any]:
    _init(root, url, memory_limit="1MB", on_full="raise")
    checkpoint = nebula.Checkpoint("step-1", -2)
    error = (
        raised_by(lambda: checkpoint.save("model", torch.ones(1 << 20))) if _rank() == 1 else None
    )
    return [type(error).__name__, checkpoint.commit(), _tags()]


def test_a_commit_that_finds_no_room_is_false_on_all_ranks(memory_root: Path, url: Path) -> None:
    found = forked_ranks(_saves_where_one_has_no_room, 2, memory_root, url)
    assert [one[1:] for one in found] == [[False, []]] * 2


def _unset() -> str:
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0"}
    nebula.init("/nowhere")
    return str(raised_by(lambda: nebula.Checkpoint("step-1").save("model", 1)))


def test_ranks_that_have_not_met_are_told_so() -> None:
    assert "init_process_group" in forked(_unset)


@on_ranks(2)
def test_what_was_complete_before_another_init_stays_as_it_was(
    memory_root: Path, url: Path
) -> None:
    found = []
    for step in range(3):
        _init(memory_root, url)  # as a script does that makes its engine anew
        checkpoint = nebula.Checkpoint(f"step-{step}", -2)
        checkpoint.save(f"part-{_rank()}", step)
        assert checkpoint.commit()
        found += [nebula.get_checkpoint(f"step-{max(step - 1, 0)}").load("part-0")]
    assert found == [0, 0, 1]


def _adds_and_commits_again(root: Path, url: Path) -> list[Any]:
    _init(root, url)
    checkpoint = nebula.Checkpoint("step-5", 2)
    checkpoint.save(f"part-{_rank()}", _rank())
    torch.distributed.barrier()
    wait_until(lambda: _tags() == ["step-5"])
    first = checkpoint.commit()
    if _rank() == 1:
        checkpoint.save("further", 2)
    torch.distributed.barrier()
    second = checkpoint.commit()
    found = nebula.get_checkpoint("step-5")
    return [first, second, *(found.load(name) for name in ("part-0", "part-1", "further"))]


def test_commits_and_further_files_of_several_ranks_lose_nothing(
    memory_root: Path, url: Path
) -> None:
    found = forked_ranks(_adds_and_commits_again, 2, memory_root, url)
    assert found == [[True, True, 0, 1, 2]] * 2


# -- several nodes ---------------------------------------------------------------------------------


def _saves_on_two_nodes(url: str, replicas: int) -> int:
    """Step 1 reaches storage; step 2 stays in memory, with copies if there are to be some."""
    nebula.init(url, 3600, replicas=replicas)
    for step in (1, 2):
        checkpoint = nebula.Checkpoint(f"step-{step}", -2)
        if _rank() == 0:
            checkpoint.save("model", _tensors(step))
        checkpoint.save(f"optimizer-{_rank()}", _tensors(10 * step + _rank()))
        assert checkpoint.commit()
        if step == 1:
            run.current().writer.wait("step-1")
    if replicas:
        run.current().writer.wait("step-2", "replicated")
    return 0


def _loads_the_newest(url: str) -> list[Any]:
    nebula.init(url, 3600)
    found = nebula.get_latest_checkpoint()
    step = int(found.tag[-1])
    equal = [_equal(found.load("model"), _tensors(step))]
    equal += [
        _equal(found.load(f"optimizer-{rank}"), _tensors(10 * step + rank)) for rank in range(2)
    ]
    by_tag = nebula.get_checkpoint(found.tag)
    equal.append(_equal(by_tag.load("model"), _tensors(step)))
    newest, files = nebula.newest_files()
    equal.append((newest, sorted(files)) == (found.tag, ["model", "optimizer-0", "optimizer-1"]))
    # a rank that has all it needs goes on to train, and answers the others meanwhile
    torch.distributed.barrier()
    return [found.tag, *equal]


@pytest.mark.nodes(2)
def test_a_restart_reads_files_of_other_nodes_from_their_memory(
    cluster: Cluster, tmp_path: Path
) -> None:
    url = str(tmp_path / "storage")
    assert cluster.launch(_saves_on_two_nodes, url, 0).results() == [0, 0]
    assert not (tmp_path / "storage" / "step-2").exists()
    assert cluster.launch(_loads_the_newest, url).results() == [["step-2", *[True] * 5]] * 2


@pytest.mark.nodes(2)
@pytest.mark.parametrize(
    ("replicas", "newest"), [pytest.param(0, "step-1", marks=pytest.mark.variant), (1, "step-2")]
)
def test_with_a_node_lost_all_ranks_load_the_newest_that_is_whole(
    cluster: Cluster, tmp_path: Path, replicas: int, newest: str
) -> None:
    url = str(tmp_path / "storage")
    assert cluster.launch(_saves_on_two_nodes, url, replicas).results() == [0, 0]
    cluster.nodes[0].kill()
    added = cluster.add()  # rank 0 is there, and knows nothing of what the other node has
    nodes = [added, cluster.nodes[0]]
    results = cluster.launch(_loads_the_newest, url, nodes=nodes).results()
    assert results == [[newest, *[True] * 5]] * 2


def _loads_over_channels_that_err(url: str, times: int) -> tuple[str, str]:
    """The newest checkpoint, and what loading its model raises if so many messages change."""
    nebula.init(url, 3600)
    send, left = UsedChannel.send, [times]

    def send_badly(channel: Any, data: Any) -> Any:
        if 800 < len(data) != PROBE_NBYTES and left[0]:
            left[0] -= 1
            data = bytearray(data)
            data[500] ^= 1
        return send(channel, data)

    UsedChannel.send = send_badly  # type: ignore[method-assign, assignment]
    found = nebula.get_latest_checkpoint()
    error = raised_by(lambda: found.load("model"))
    torch.distributed.barrier()
    return found.tag, str(error or "")


@pytest.mark.nodes(2)
def test_what_changes_on_its_way_from_another_node_is_sent_again_or_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    url = str(tmp_path / "storage")
    assert cluster.launch(_saves_on_two_nodes, url, 0).results() == [0, 0]
    once = cluster.launch(_loads_over_channels_that_err, url, 1).results()
    assert once == [("step-2", "")] * 2
    (_, own), (_, others) = cluster.launch(_loads_over_channels_that_err, url, 10**6).results()
    assert own == ""  # the model lies on its node
    assert "changed on its way" in others
