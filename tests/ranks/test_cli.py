"""`dcp-mem`: every command on real checkpoints, for people and as JSON, with its exit codes."""

import contextlib
import json
import math
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcp_mem.integrations.nebula
from dcp_mem import FlushFailed, keep_last
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import (
    Job,
    committed_in,
    load,
    load_anew,
    make_state,
    number_of,
    save,
    save_in_two_places,
    save_unflushed,
    wait_until,
)
from tests.support.checkpoints.roundtrip import assert_same, random_tensor
from tests.support.command import command as run
from tests.support.processes import faults
from tests.support.processes.forks import forked, forked_ranks, forking
from tests.support.processes.launch import running_python
from tests.support.shell import COMMAND, Shell, options_for
from tests.support.storage.servers import StorageRoot

_POSIX = "dcp_mem.storage.posix.PosixStorage"


@pytest.fixture
def shell(job: Job) -> Shell:
    """A job with step-1 on storage, step-2 in both places, step-3 in memory only."""
    save_in_two_places(job)
    return Shell(job)


def _newest(shell: Shell) -> tuple[int, list[str]]:
    loaded = forked(load_anew, shell.job)
    return loaded.number, list(loaded.report.passed_over)


def _stored(job: Job, name: str) -> Path:
    return Path(job.url or "", name)


def _segment(directory: Path) -> Path:
    (found,) = directory.glob("__0_0-*.distcp")
    return found


# -- reject ----------------------------------------------------------------------------------------


def test_what_is_rejected_is_passed_over_until_that_is_taken_back(shell: Shell) -> None:
    for name in ("3", "step-2"):
        result = shell.run("reject", name, "--why", "the loss is NaN")
        assert result.exit_code == 0, result.output
    assert result.stdout == "step-2 is rejected: the loss is NaN (memory + storage)\n"
    number, passed_over = _newest(shell)
    assert number == 1
    assert any("step-2" in line and "the loss is NaN" in line for line in passed_over)
    assert shell.json("reject", "2", "--undo") == {
        "name": "step-2",
        "is_rejected": False,
        "why": "",
        "places": ["memory", "storage"],
    }
    assert _newest(shell)[0] == 2


def test_ls_and_show_tell_rejected_from_damaged(shell: Shell) -> None:
    save_id = shell.json("show", "step-1")["save_id"]
    assert shell.run("reject", save_id, "--why", "the loss is NaN").exit_code == 0
    listed = shell.run("ls")
    assert listed.exit_code == 0, "it lies whole on storage"
    (line,) = (line for line in listed.stdout.splitlines() if line.startswith("step-1 "))
    assert line.split()[2:4] == ["rejected", "storage"]
    assert line.endswith("the loss is NaN")
    assert "can't be loaded" not in listed.stderr
    said = [line.split(maxsplit=1) for line in shell.run("show", "step-1").stdout.splitlines()[:6]]
    assert ["state", "rejected"] in said
    assert ["rejected", "the loss is NaN"] in said
    facts = shell.json("show", "step-1")
    assert (facts["problem"], facts["rejected"]) == ("", "the loss is NaN")


def test_what_was_rejected_before_its_flush_is_flushed_once_that_is_taken_back(job: Job) -> None:
    forked(save_unflushed, job)
    shell = Shell(job)
    assert shell.run("reject", "step-1", "--why", "a test").exit_code == 0
    assert shell.json("flush")["flushed"] == []
    assert shell.run("reject", "step-1", "--undo").exit_code == 0
    assert [one["name"] for one in shell.json("flush")["flushed"]] == ["step-1"]
    assert _stored(job, "step-1").joinpath(".metadata").exists()


def test_a_save_id_rejects_no_other_save_of_the_name(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        save(writer, 1)
        writer.wait("step-1", timeout=60)
        first = writer.status()[0].save_id
    forked(save_unflushed, job)
    shell = Shell(job)
    assert shell.json("reject", first, "--why", "the loss is NaN")["places"] == ["storage"]
    (second,) = _in_memory(shell)
    assert (second["save_id"] != first, second["rejected"]) == (True, "")
    assert (second["state"], second["persist"]) == ("complete", True)
    assert shell.run("reject", second["save_id"], "--why", "a test").exit_code == 0
    assert shell.json("reject", first, "--undo")["places"] == ["storage"]
    assert _in_memory(shell)[0]["rejected"] == "a test"
    assert "isn't marked" in shell.run("reject", first, "--undo").stderr


def _in_memory(shell: Shell) -> list[dict[str, Any]]:
    return [one for one in shell.listed() if "memory" in one["places"]]


def _save_and_wait(job: Job) -> None:
    faults.arm("flush.started:stop:1")
    with job.writer(agent="thread") as writer:
        save(writer, 1)


def test_flush_waits_for_the_flush_thread_of_a_live_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MEM_TIMEOUT", "1")
    with forking(_save_and_wait, None, job) as ranks:
        trainer = psutil.Process(ranks.pid())
        wait_until(lambda: trainer.status() == psutil.STATUS_STOPPED, "the flush to begin")
        assert "5 s" in Shell(job).json("flush", "--timeout", "5", code=1)["error"]
        trainer.resume()
        assert [one["error"] for one in Shell(job).json("flush")["flushed"]] == [""]
        ranks.join()


def test_reject_says_what_it_cannot_do(shell: Shell) -> None:
    assert shell.run("reject", "step-1").exit_code == 2
    assert shell.run("reject", "step-1", "--why", "x", "--undo").exit_code == 2
    assert "isn't marked" in shell.run("reject", "step-1", "--undo").stderr
    missing = shell.run("reject", "7", "--why", "x")
    assert (missing.exit_code, "step-7" in missing.stderr) == (1, True)


# -- ls --------------------------------------------------------------------------------------------


def test_ls_shows_what_is_where(shell: Shell) -> None:
    result = shell.run("ls")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["NAME", "STEP", "STATE", "WHERE", "SIZE", "AGE", "METRICS"]
    assert [line[0] for line in lines[1:]] == ["step-3", "step-2", "step-1"]
    assert lines[2][1:6] == ["2", "durable", "memory", "+", "storage"]
    assert lines[2][-1] == "loss=0.5"


def test_ls_without_root_lists_the_jobs_of_the_node(shell: Shell) -> None:
    result = run("ls", "--memory-root", shell.job.memory)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].startswith("job  dead, ")
    answer = json.loads(run("ls", "--memory-root", shell.job.memory, "--json").stdout)
    (found,) = answer["jobs"]
    assert (found["name"], found["is_live"], len(found["checkpoints"])) == ("job", False, 2)


def test_ls_counts_what_newer_checkpoints_have_superseded(job: Job) -> None:
    forked(partial(save_unflushed, job, *range(4), keep_memory=1))
    assert Shell(job).json("ls")["superseded"] == 3
    last = Shell(job).run("ls").stdout.splitlines()[-1]
    assert last == "3 saves were superseded by a newer one before the flush"


def test_what_retention_has_deleted_from_storage_is_complete_in_memory(job: Job) -> None:
    with job.writer(agent="thread", keep_memory=3, keep_storage=keep_last(1)) as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)
    stored = Path(job.url or "")
    wait_until(lambda: committed_in(stored) == {"step-2"}, "step-1 to be deleted from storage")
    newest, oldest = Shell(job).run("ls").stdout.splitlines()[1:]
    assert newest.split()[1] == "durable"
    assert oldest.split()[1] == "complete"
    assert oldest.endswith("storage has it no more")
    shown = Shell(job).run("show", "step-1").stdout
    assert "problem   storage has it no more" in shown


def test_piped_tables_are_narrow_and_have_no_spaces_at_the_end(job: Job) -> None:
    name = "step-" + "9" * 70
    with job.writer(agent="thread") as writer:
        writer.annotate_next_save(metrics={f"metric-{number}": number for number in range(9)})
        save(writer, 1, name)
    for command in (["ls"], ["show", name], ["verify"]):
        lines = Shell(job).run(*command).stdout.splitlines()
        assert lines
        assert [line for line in lines if line != line.rstrip()] == []
        assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("command", ["ls", "show", "rm", "watch", "flush", "verify"])
def test_commands_that_look_import_no_torch(command: str) -> None:
    code = f"import sys, dcp_mem.cli.{command}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- watch -----------------------------------------------------------------------------------------


def test_watch_shows_what_lies_in_memory_and_what_storage_has(shell: Shell) -> None:
    result = shell.run("watch", "--times", "2", "--every", "0.1")
    assert result.exit_code == 0
    looks = result.stdout.split(f"{shell.job.memory}: ")[1:]
    assert len(looks) == 2
    for look in looks:
        assert "no agent" in look
        assert re.search(r"job  dead, .*, step-2 durable \d s ago", look)
        assert re.search(r"step-3 .*complete .*stays in memory", look)
        assert re.search(r"step-2 +2  durable ", look)


def test_watch_answers_programs_line_by_line(shell: Shell) -> None:
    result = run(
        "watch", "--memory-root", shell.job.memory, "--times", "2", "--every", "0.1", "--json"
    )
    for line in result.stdout.splitlines():
        (job,) = json.loads(line)["jobs"]
        assert (job["name"], job["is_live"], job["durable"]["name"]) == ("job", False, "step-2")
        assert [(one["name"], one["state"]) for one in job["checkpoints"]] == [
            ("step-3", "complete"),
            ("step-2", "durable"),
        ]
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_pipe_has_each_look_at_once(shell: Shell, arguments: list[str]) -> None:
    command = *COMMAND[1:], "watch", *shell.places(), "--every", "60", *arguments
    with running_python(*command, env={"PYTHONUNBUFFERED": ""}) as process:
        assert process.stdout is not None
        assert shell.job.memory in process.stdout.readline()
        assert process.poll() is None


def test_a_metric_that_is_no_number_is_null_for_programs(memory_job: Job) -> None:
    with memory_job.writer(agent="thread") as writer:
        writer.annotate_next_save(metrics={"loss": math.nan, "most": math.inf, "least": 0.5})
        save(writer, 1)
    (job,) = Shell(memory_job).json("watch", "--times", "1")["jobs"]
    (listed,) = Shell(memory_job).listed()
    for found in (*job["checkpoints"], listed):
        assert found["metrics"] == {"loss": None, "most": None, "least": 0.5}


def test_watch_follows_a_flush_that_fails(job: Job) -> None:
    Path(job.url or "").write_text("in the way")
    with contextlib.suppress(FlushFailed), job.writer() as writer:
        save(writer, 1)
        wait_until(lambda: writer.status()[0].error, "the flush fails")
        result = Shell(job).run("watch", "--times", "1")
        assert "the agent runs" in result.stdout
        assert re.search(r"step-1 .*failed .*trying again", result.stdout)
        Path(job.url or "").unlink()


def test_watch_of_a_node_without_jobs(tmp_path: Path) -> None:
    result = run("watch", "--memory-root", str(tmp_path / "none"), "--times", "1")
    assert result.exit_code == 0
    assert "no job has memory here" in result.stdout


def test_colours_are_for_terminals_and_can_be_left_out(shell: Shell) -> None:
    command = [*COMMAND, "ls", shell.job.url or "", *shell.places()]
    assert b"\x1b[32mdurable" in _on_a_terminal(command)
    assert b"\x1b[" not in _on_a_terminal([*command, "--no-color"])


def _on_a_terminal(command: list[str], answer: bytes = b"") -> bytes:
    """What a command shows on a terminal, on which the answer is typed."""
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    os.write(ours, answer)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    process.wait(timeout=60)
    os.close(ours)
    return shown


def test_without_a_command_there_is_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "Commands:" in result.stdout


def test_where_nothing_is_ls_says_so_and_exits_with_1(job: Job) -> None:
    result = Shell(job).run("ls")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no checkpoints in memory (job job) and {job.url}" in result.stderr
    assert Shell(job).listed(code=1) == []


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("__0_0-*.distcp", "segment of rank 0: missing"),
        ("**/*[!a]", "lost: 1 of 1 segments are missing (__0_0-"),
    ],
    ids=["the segment", "all but .metadata"],
)
def test_ls_says_that_a_checkpoint_without_its_segments_is_lost_and_exits_with_1(
    shell: Shell, gone: str, said: str
) -> None:
    """As two runs at one root left it: `.metadata` of one, and the files of the other."""
    directory = _stored(shell.job, "step-1")
    other = f"__0_0-{'0' * 8}.distcp"
    _segment(directory).rename(directory / other)
    for path in directory.glob(gone):
        if path.is_file() and path.name not in (other, ".metadata"):
            path.unlink()
    (problem,) = (one["problem"] for one in shell.listed(code=1) if one["problem"])
    assert problem.startswith(said)
    assert "1 of 3 can't be loaded from anywhere: step-1" in shell.run("ls").stderr
    assert load_anew(shell.job).number == 3


def test_names_from_storage_cannot_steer_the_terminal(job: Job) -> None:
    dcp.save(make_state(1), checkpoint_id=str(_stored(job, "evil\x1b[2J")))
    result = Shell(job).run("ls")
    assert "evil\N{REPLACEMENT CHARACTER}[2J" in result.stdout
    assert "\x1b" not in result.stdout


# -- show ------------------------------------------------------------------------------------------


def test_show_tells_tensors_items_and_segments_of_each_place(shell: Shell) -> None:
    for name, places in (
        ("step-1", ["storage"]),
        ("step-2", ["memory", "storage"]),
        ("step-3", ["memory"]),
    ):
        answer = shell.json("show", name)
        tensors = {one["name"]: one for one in answer["tensors"]}
        assert tensors["sharded"] == {
            "name": "sharded",
            "dtype": "float32",
            "shape": [60, 10],
            "shards": 1,
            "bytes": 2400,
        }
        assert tensors["replicated"]["bytes"] == 66
        assert {one["name"] for one in answer["items"]} == {"nested.step", "text"}
        assert all(one["bytes"] > 0 for one in answer["items"])
        (segment,) = answer["segments"]
        assert segment["places"] == places
        assert answer["catalog"]
    text = shell.run("show", "step-1").stdout
    assert "metrics   loss=1" in text
    assert "sharded" in text
    assert "manifests on storage: 4" in text


def test_show_counts_shards_and_finds_a_checkpoint_by_save_id(job: Job) -> None:
    forked_ranks(save_in_two_places, 2, job)
    shell = Shell(job)
    save_id = shell.json("show", "step-2")["save_id"]
    answer = shell.json("show", save_id)
    assert answer["name"] == "step-2"
    assert next(one for one in answer["tensors"] if one["name"] == "sharded")["shards"] == 2
    assert [one["rank"] for one in answer["segments"]] == [0, 1]
    assert "saved by  2 ranks on 1 node" in shell.run("show", "step-2").stdout


def test_show_reads_what_torch_wrote(job: Job) -> None:
    dcp.save(make_state(1), checkpoint_id=str(_stored(job, "theirs")))
    answer = Shell(job).json("show", "theirs")
    assert answer["is_foreign"]
    assert next(one for one in answer["tensors"] if one["name"] == "sharded")["bytes"] == 2400


class _Own:
    """What a load refuses by default."""


@pytest.mark.parametrize("place", ["memory", "storage", "torch"])
def test_show_marks_byte_items_that_a_load_refuses(job: Job, place: str) -> None:
    state = {"mine": _Own(), "path": Path("a"), "plain": {"a": [1, "b"]}, "weight": torch.ones(2)}
    if place == "torch":
        dcp.save(state, checkpoint_id=str(_stored(job, "step-1")))
    else:
        with job.writer(agent="thread") as writer:
            dcp_mem.save(state, checkpoint_id="step-1", storage_writer=writer)
            writer.wait("step-1")
    shell = Shell(job if place == "memory" else replace(job, memory=f"{job.memory}-elsewhere"))
    refused = {one["name"]: one["refused"] for one in shell.json("show", "step-1")["items"]}
    assert "_Own" in refused.pop("mine")
    assert refused
    assert not any(refused.values())
    text = shell.run("show", "step-1").stdout
    (marked,) = [line for line in text.splitlines() if line.endswith(" refused")]
    assert marked.startswith("mine")
    assert "weights_only=False" in text


def test_unknown_checkpoint_is_told_with_what_there_is(shell: Shell) -> None:
    answer = shell.json("show", "step-9", code=1)
    assert "step-9" in answer["error"]
    assert "step-3, step-2, step-1" in answer["error"]
    result = shell.run("show", "step-9")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no step-9 in memory (job job) and ")


# -- verify ----------------------------------------------------------------------------------------


def test_verify_finds_whole_what_is_whole(shell: Shell) -> None:
    answer = shell.json("verify")
    found = {(one["name"], one["place"]): one for one in answer["results"]}
    assert not answer["is_damaged"]
    for key in (("step-1", "storage"), ("step-2", "storage"), ("step-2", "memory")):
        assert found[key]["checked_bytes"] > 2000, key
        assert found[key]["unchecked_bytes"] == 0
    assert found["step-3", "memory"]["checked_bytes"] > 2000


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_verify_names_the_block_of_the_tensor_that_is_damaged(shell: Shell, place: str) -> None:
    directory = (
        _stored(shell.job, "step-2") if place == "storage" else shell.job.directory / "step-2"
    )
    flip(_segment(directory), 1000)
    answer = shell.json("verify", "step-2", code=1)
    (damaged,) = [one for one in answer["results"] if one["damages"]]
    (damage,) = damaged["damages"]
    assert (damaged["place"], damage["item"], damage["block"], damage["rank"]) == (
        place,
        "sharded",
        0,
        0,
    )
    assert damage["start"] <= 1000 < damage["stop"]
    result = shell.run("verify", "step-2")
    assert result.exit_code == 1
    assert "MiB 0 of sharded: CRC32C" in result.stdout


def test_verify_tells_segments_that_are_short_or_missing(job: Job) -> None:
    forked_ranks(save_in_two_places, 2, job)
    stored = _stored(job, "step-2")
    for rank in (0, 1):
        (segment,) = stored.glob(f"__{rank}_0-*.distcp")
        segment.unlink() if rank else segment.write_bytes(segment.read_bytes()[:-1])
    (segment,) = (job.directory / "step-2").glob("__1_0-*.distcp")
    segment.unlink()
    found = {
        one["place"]: one["damages"]
        for one in Shell(job).json("verify", "step-2", code=1)["results"]
    }
    told = {one["rank"]: one["what"] for one in found["storage"]}
    assert told.keys() == {0, 1}
    assert re.fullmatch(r"it has (\d+) of \d+ bytes", told[0])
    assert told[1] == "it is missing"
    assert [one["rank"] for one in found["memory"]] == [1]


def test_verify_says_what_took_long(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_mem.cli.screen._LONG_SECONDS", 0.0)
    lines = shell.run("verify").stderr.splitlines()
    assert [line.partition(" took ")[0] for line in lines] == [
        "looking for checkpoints",
        "importing torch",
        "verifying",
    ]


def test_verify_finds_damaged_checksums_and_a_missing_manifest(shell: Shell) -> None:
    own = _stored(shell.job, "step-1") / ".dcp_mem"
    (node,) = own.glob("node-*.json")
    flip(node)
    assert shell.json("verify", "step-1", code=1)["results"][0]["damages"]
    (manifest,) = own.glob("manifest-*.json")
    manifest.unlink()
    (damage,) = shell.json("verify", "step-1", code=1)["results"][0]["damages"]
    assert "its manifest is missing" in damage["what"]


def test_verify_has_only_lengths_to_check_of_what_torch_wrote(job: Job) -> None:
    dcp.save(make_state(1), checkpoint_id=str(_stored(job, "theirs")))
    shell = Shell(job)
    (result,) = shell.json("verify")["results"]
    assert "no checksums" in result["why_unchecked"]
    file = _stored(job, "theirs") / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:100])
    assert shell.json("verify", code=1)["results"][0]["damages"][0]["file"] == "__0_0.distcp"


def test_commands_work_on_every_storage(memory_root: Path, storage_root: StorageRoot) -> None:
    job = Job(storage_root.url, str(memory_root), storage_root.storage_options)
    save_in_two_places(job)
    shell = Shell(job)
    assert len(shell.listed()) == 3
    assert len(shell.json("show", "step-1")["tensors"]) == 3
    assert not shell.json("verify")["is_damaged"]
    assert not shell.json("doctor")["is_failed"]
    assert shell.json("rm", "step-1", "--yes")["removed"][0]["freed_bytes"] > 2000
    assert [one["name"] for one in shell.listed()] == ["step-3", "step-2"]
    assert not any("doctor" in name for name in storage_root.names())


# -- rm --------------------------------------------------------------------------------------------


def test_rm_takes_a_checkpoint_from_both_places(shell: Shell) -> None:
    assert shell.run("rm", "step-2", "--yes", "--force").exit_code == 0
    assert not _stored(shell.job, "step-2").exists()
    assert [one["name"] for one in shell.listed()] == ["step-3", "step-1"]
    assert os.listdir(shell.job.directory / ".slots") == [], "nobody saves into them any more"


def test_rm_of_what_isnt_there_says_so_and_lists_ten(job: Job) -> None:
    with job.writer(keep_memory=12, agent="thread") as writer:
        for number in range(12):
            save(writer, number)
    result = Shell(job).run("rm", "step-3", "nosuch", "other", "--yes")
    assert result.exit_code == 1
    there = ", ".join(f"step-{number}" for number in range(11, 1, -1))
    assert result.stderr.startswith("error: no nosuch, other in memory (job job) and ")
    assert result.stderr.strip().endswith(f"(there are, newest first: {there} and 2 more)")
    assert "step-3" in Shell(job).run("ls").stdout


def test_rm_leaves_the_newest_durable_one_unless_it_is_forced(shell: Shell) -> None:
    result = shell.run("rm", "step-2", "--yes")
    assert result.exit_code == 2
    assert "newest durable checkpoint" in result.stderr
    assert _stored(shell.job, "step-2").exists()
    assert shell.run("rm", "step-3", "--yes").exit_code == 0  # newer, but storage doesn't have it


def test_rm_asks_somebody_or_needs_to_be_told(shell: Shell) -> None:
    result = shell.run("rm", "step-1", stdin="y\n")  # no terminal
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert _stored(shell.job, "step-1").exists()


def test_rm_does_what_it_is_answered(shell: Shell) -> None:
    command = [
        *COMMAND,
        "rm",
        shell.job.url or "",
        "step-1",
        *shell.places(),
    ]
    assert b"aborted" in _on_a_terminal(command, b"n\n")
    assert _stored(shell.job, "step-1").exists()
    assert b"step-1 is gone" in _on_a_terminal(command, b"y\n")
    assert not _stored(shell.job, "step-1").exists()


def test_rm_leaves_what_is_being_read(shell: Shell) -> None:
    with shell.job.reader() as reader:
        reader.reset("step-2")
        reader.read_metadata()
        answer = shell.json("rm", "step-2", "--yes", "--force", code=1)
    assert "being read" in answer["removed"][0]["kept"]
    assert _stored(shell.job, "step-2").exists(), "a restart finds it whole"


# -- gc --------------------------------------------------------------------------------------------


def test_gc_only_looks_unless_it_is_told(shell: Shell) -> None:
    shutil.copytree(_stored(shell.job, "step-1"), _stored(shell.job, "step-0"))
    (_stored(shell.job, "step-0") / ".metadata").unlink()
    time.sleep(0.01)
    result = shell.run("gc", "--older-than", "0")
    assert result.exit_code == 0
    assert "would be given back" in result.stdout
    assert "--yes does it" in result.stderr
    assert shell.job.directory.is_dir()
    answer = shell.json("gc", "--older-than", "0", "--yes")
    assert [one["job"] for one in answer["memory"]] == ["job"]
    assert {one["key"].split("/")[0] for one in answer["storage"]} == {"step-0"}
    assert not shell.job.directory.exists()
    assert not [path for path in _stored(shell.job, "step-0").rglob("*") if path.is_file()]
    assert _stored(shell.job, "step-1").exists()


# -- flush -----------------------------------------------------------------------------------------


def test_flush_brings_to_storage_what_a_killed_job_left(job: Job) -> None:
    blocked = Path(job.url or "")
    blocked.write_text("no directory")
    forked(_save_without_waiting, job)
    shell = Shell(job)
    answer = shell.json("flush", "--timeout", "30", code=1)
    assert answer["flushed"][0]["error"]
    blocked.unlink()
    answer = shell.json("flush", "--timeout", "60")
    assert [(one["name"], one["error"]) for one in answer["flushed"]] == [("step-1", "")]
    assert (blocked / "step-1" / ".metadata").exists()
    assert shell.json("flush")["flushed"] == []


def _save_without_waiting(job: Job) -> None:
    save(job.writer(), 1)


def test_flush_leaves_what_was_to_stay_in_memory_unless_all_is_wanted(shell: Shell) -> None:
    assert shell.json("flush") == {"promoted": [], "flushed": []}
    assert shell.run("flush", "--newest", "1").exit_code == 2
    answer = shell.json("flush", "--all", "--newest", "1")
    assert answer["promoted"] == ["step-3"]
    assert [one["error"] for one in answer["flushed"]] == [""]
    shutil.rmtree(shell.job.directory)
    assert load_anew(shell.job, "step-3").number == 3


def test_flush_takes_a_live_jobs_memory_to_storage_and_the_job_goes_on(
    job: Job, tmp_path: Path
) -> None:
    with forking(_save_and_stay, None, job, tmp_path):
        wait_until((tmp_path / "saved").exists)
        assert Shell(job).json("flush", "--all")["promoted"] == ["step-1"]
        (tmp_path / "go on").touch()
        wait_until((tmp_path / "saved more").exists)
        found = {one["name"]: one["places"] for one in Shell(job).listed()}
        assert found == {"step-2": ["memory"], "step-1": ["memory", "storage"]}


def _save_and_stay(job: Job, marks: Path) -> None:
    writer = job.writer(persist=False)
    save(writer, 1)
    (marks / "saved").touch()
    wait_until((marks / "go on").exists)
    save(writer, 2)
    (marks / "saved more").touch()
    wait_until(lambda: False)


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_checks_machine_and_storage_and_leaves_nothing(shell: Shell) -> None:
    before = sorted(Path(shell.job.url or "").rglob("*"))
    answer = shell.json("doctor")
    checks = {one["name"]: one for one in answer["checks"]}
    assert checks["memory root"]["verdict"] == "ok"
    assert {
        "python",
        "torch",
        "room in memory",
        "huge pages",
        "container's memory",
        "open files",
        "names",
        "agent",
    } <= checks.keys()
    storage = [name for name in checks if name.startswith("storage: ")]
    assert storage == [
        f"storage: {one}"
        for one in ("list", "put", "get", "commit", "conditions", "clock", "delete")
    ]
    assert all(checks[name]["verdict"] == "ok" for name in storage)
    assert sorted(Path(shell.job.url or "").rglob("*")) == before


@pytest.mark.parametrize(
    ("has_conditions", "is_fair", "verdict"),
    [(True, True, "ok"), (False, True, "warn"), (True, False, "fail")],
)
def test_doctor_says_what_storage_without_conditions_means(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    has_conditions: bool,
    is_fair: bool,
    verdict: str,
) -> None:
    monkeypatch.setattr(f"{_POSIX}.has_conditions", lambda _: has_conditions)
    if not is_fair:
        monkeypatch.setattr(f"{_POSIX}.swap", lambda *_: True)
    checks = Shell(job).json("doctor", code=int(verdict == "fail"))["checks"]
    (check,) = (one for one in checks if one["name"] == "storage: conditions")
    assert check["verdict"] == verdict
    assert ("one run at a time" in check["advice"]) == (verdict == "warn")
    assert list(Path(job.url or "").rglob("*")) == []


def test_doctor_fails_where_storage_cannot_be_written(job: Job) -> None:
    Path(job.url or "").write_text("a file")
    answer = Shell(job).json("doctor", code=1)
    assert answer["is_failed"]
    assert answer["checks"][-1]["verdict"] == "fail"
    assert answer["checks"][-1]["advice"]


def test_doctor_fails_where_memory_is_open_to_others(memory_root: Path) -> None:
    (memory_root / "open").mkdir()
    (memory_root / "open").chmod(0o777)
    result = run("doctor", "--memory-root", str(memory_root / "open"))
    assert result.exit_code == 1
    assert "fail memory root" in result.stdout
    (memory_root / "open").rmdir()


def test_doctor_says_what_slow_name_servers_do_to_large_jobs(tmp_path: Path) -> None:
    """The name server of a mount namespace answers nothing."""
    if os.geteuid() or os.environ.get("DCP_MEM_NO_NODES"):
        pytest.skip("it takes root and mount namespaces")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.99\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    mounts = " && ".join(
        f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.99", 53))
        inside = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
        done = subprocess.run(
            [*inside, *COMMAND, "doctor", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    (check,) = (one for one in json.loads(done.stdout)["checks"] if one["name"] == "names")
    assert check["verdict"] == "warn"
    assert "RES_OPTIONS" in check["advice"]


def test_doctor_finds_the_tightest_limit_of_the_container(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "/proc/self/cgroup": "0::/pod/container\n",
        "/sys/fs/cgroup/pod/container/memory.max": "max\n",
        "/sys/fs/cgroup/pod/memory.max": f"{1 << 30}\n",
        "/sys/fs/cgroup/pod/memory.current": f"{1 << 29}\n",
    }
    monkeypatch.setattr("dcp_mem.operations.doctor._read", lambda path: told.get(path, ""))
    result = run("doctor", "--memory-root", str(memory_root), "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["container's memory"]["found"] == "512.0 MiB of 1.0 GiB used"
    assert checks["huge pages"]["verdict"] == "warn", "this kernel says nothing of them"


# -- export ----------------------------------------------------------------------------------------


def _load(directory: Path) -> int:
    return load(dcp.FileSystemReader(str(directory)))


@pytest.mark.parametrize("name", ["step-1", "step-2", "step-3"])
def test_export_makes_a_directory_that_torch_and_we_load(
    shell: Shell, tmp_path: Path, name: str
) -> None:
    answer = shell.json("export", name, str(tmp_path / "out" / "kept"))
    assert answer["bytes"] > 2000
    number = int(name[-1])
    assert _load(tmp_path / "out" / "kept") == number
    elsewhere = Job(str(tmp_path / "out"), shell.job.memory, name="elsewhere")
    assert load_anew(elsewhere).number == number
    assert not Shell(elsewhere).json("verify")["is_damaged"]
    assert "already" in shell.json("export", name, str(tmp_path / "out" / "kept"), code=2)["error"]


def _exportable(job: Job, kind: str) -> None:
    """Save what can be exported in that form: step-1 is on storage, step-3 in memory only."""
    if kind == "files":
        forked_ranks(_save_files, 2, job)
    else:
        save_in_two_places(job)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("dcp", "step-1"), ("dcp", "step-3"), ("torch", "step-1"), ("torch", "step-3")),
        *(("safetensors", "step-1"), ("safetensors", "step-3"), ("files", "step-1")),
    ],
)
def test_export_gives_files_the_modes_that_the_umask_asks_for(
    job: Job, tmp_path: Path, kind: str, name: str
) -> None:
    _exportable(job, kind)
    target = tmp_path / "new" / "kept" / ("model.pt" if kind == "torch" else name)
    before = os.umask(0o027)
    try:
        result = Shell(job).run("export", name, str(target), "--format", kind)
        assert result.exit_code == 0, result.output
    finally:
        os.umask(before)
    found = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    modes = {path: path.stat().st_mode & 0o777 for path in found}
    assert any(path.is_file() for path in found)
    assert {path: 0o640 if path.is_file() else 0o750 for path in found} == modes


def test_export_to_a_relative_path_of_what_torch_wrote(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save(make_state(4), checkpoint_id=str(_stored(job, "theirs")))
    monkeypatch.chdir(tmp_path)
    Shell(job).json("export", "theirs", "kept")
    assert _load(tmp_path / "kept") == 4


def test_export_between_stores(memory_root: Path, s3_root: StorageRoot, tmp_path: Path) -> None:
    job = Job(s3_root.url, str(memory_root), s3_root.storage_options)
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    Shell(job).json("export", "step-2", str(tmp_path / "kept"))
    assert _load(tmp_path / "kept") == 2
    options = options_for("--target-option", s3_root.storage_options)
    Shell(job).json("export", "step-2", f"{s3_root.url}/other/kept", *options)
    assert (
        load_anew(Job(f"{s3_root.url}/other", str(memory_root), s3_root.storage_options)).number
        == 2
    )


def test_damage_is_not_exported(shell: Shell, tmp_path: Path) -> None:
    flip(_segment(_stored(shell.job, "step-1")), 1000)
    for kind in ("dcp", "torch", "safetensors"):
        target = tmp_path / kind
        shell.json("export", "step-1", str(target), "--format", kind, code=1)
        assert not (target / ".metadata").exists()
        assert not target.is_file()
        assert not list(target.glob("model*"))


def test_export_to_one_file_of_torchs(job: Job, tmp_path: Path) -> None:
    forked_ranks(save_in_two_places, 2, job)
    Shell(job).json("export", "step-2", str(tmp_path / "model.pt"), "--format", "torch")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert number_of(state) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_export_to_safetensors(job: Job, tmp_path: Path) -> None:
    with job.writer(agent="thread") as writer:
        tensors = {
            "model": {
                "a": random_tensor(torch.bfloat16, 7, 3),
                "b": random_tensor(torch.float8_e4m3fn, 5),
                "c": torch.ones(()),
            },
            "other": torch.zeros(3),
            "text": "no tensor",
        }
        dcp.save(tensors, checkpoint_id="step-1", storage_writer=writer)
    chosen = ["--format", "safetensors", "--prefix", "model."]
    answer = Shell(job).json("export", "step-1", str(tmp_path / "hf"), *chosen)
    assert [Path(file).name for file in answer["files"]] == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    found = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert found.keys() == {"a", "b", "c"}
    for name, tensor in found.items():
        assert_same(tensors["model"][name], tensor, name)  # type: ignore[index]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 42 + 5 + 4
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}


def _save_files(job: Job) -> None:
    dcp_mem.integrations.nebula.init(
        job.url, persistent_time_interval=0, memory_root=job.memory, job=job.name
    )
    rank = dist.get_rank()
    checkpoint = dcp_mem.integrations.nebula.Checkpoint("step-1", -2)
    checkpoint.save(f"zero/rank{rank}.pt", {"weights": torch.full((9,), float(rank))})
    checkpoint.save("same", rank)
    assert checkpoint.commit()
    assert dcp_mem.integrations.nebula.flush_persistence()
    dist.barrier()


@pytest.mark.parametrize("place", ["memory", "storage"])
def test_export_to_the_files_that_were_saved(job: Job, tmp_path: Path, place: str) -> None:
    forked_ranks(_save_files, 2, job)
    shutil.rmtree(job.directory if place == "storage" else str(job.url))
    target = tmp_path / "files"
    answer = Shell(job).json("export", "step-1", str(target), "--format", "files")
    assert {str(Path(file).relative_to(target)) for file in answer["files"]} == {
        *("zero/rank0.pt", "zero/rank1.pt", "same@0", "same@1")
    }
    for rank in range(2):
        assert torch.load(target / f"zero/rank{rank}.pt")["weights"].tolist() == [rank] * 9
    assert (torch.load(target / "same@0"), torch.load(target / "same@1")) == (0, 1)
    assert (
        "already"
        in Shell(job).json("export", "step-1", str(target), "--format", "files", code=2)["error"]
    )


def test_files_are_exported_neither_elsewhere_nor_of_tensors(
    shell: Shell, job: Job, tmp_path: Path
) -> None:
    target = str(tmp_path / "files")
    assert "tensors" in shell.json("export", "step-2", target, "--format", "files", code=2)["error"]
    with job.writer(agent="thread") as writer:
        dcp.save({"../../out": "of bounds"}, checkpoint_id="step-4", storage_writer=writer)
    assert (
        "isn't below"
        in shell.json("export", "step-4", target, "--format", "files", code=2)["error"]
    )
    assert not Path(target).exists()


def test_safetensors_are_cut_into_files(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_in_two_places(job)
    monkeypatch.setattr("dcp_mem.operations.export.SHARD_NBYTES", 100)
    chosen = str(tmp_path / "hf"), "--format", "safetensors"
    *files, _ = Shell(job).json("export", "step-2", *chosen)["files"]
    assert len(files) == 2
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found.keys() == {"sharded", "replicated", "nested.scalar"}
    assert torch.equal(found["sharded"], make_state(2)["sharded"])


# -- errors and help -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["ls", "nope://bucket/run"], 2, "fsspec knows no protocol"),
        (["show", "-", "step-1"], 2, "say which job"),
        (["ls", "--nope"], 2, "No such option"),
        (["nope"], 2, "No such command"),
        (["ls", "/run", "--storage-option", "key"], 2, "give KEY=VALUE"),
        (["verify"], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_and_code_2(
    arguments: list[str], code: int, text: str
) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    told = run(*arguments, "--json")
    assert told.exit_code == code
    assert text in json.loads(told.stdout)["error"]


def test_storage_that_is_not_there_is_code_3(memory_root: Path) -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "hush-hush"}
    result = Shell(Job("s3://bucket/run", str(memory_root), options)).run("ls")
    assert result.exit_code == 3
    assert "is unavailable" in result.stderr
    assert "hush-hush" not in result.output


def test_the_installed_command_runs_in_a_process_of_its_own(shell: Shell) -> None:
    told = ["ls", shell.job.url or "", "--memory-root", shell.job.memory, "--job", "job", "--json"]
    command = [*COMMAND, *told]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(ended.stdout)["checkpoints"]) == 3
    assert ended.stderr == ""
