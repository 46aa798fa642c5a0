"""Typical mistakes of a newcomer, a line each: the call, and how the error's text begins.

Every one is a ConfigError, or another error of dcp_mem's, that says what to give instead.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_mem
from dcp_mem import ConfigError, DcpMemError, MemoryStorageWriter

_MANAGERS = """
CheckpointManager(root, keep_memmory=3) | CheckpointManager has no option keep_memmory=: did you mean keep_memory=?
CheckpointManager(root, on_eror="raise") | CheckpointManager has no option on_eror=: did you mean on_error=?
CheckpointManager(root, max_to_keep=3) | CheckpointManager has no option max_to_keep=: did you mean keep_storage= or keep_memory=?
CheckpointManager(root, save_top_k=3) | CheckpointManager has no option save_top_k=: did you mean keep_storage= or keep_memory=?
CheckpointManager(root, keep_latest_k=3) | CheckpointManager has no option keep_latest_k=: did you mean keep_storage= or keep_memory=?
CheckpointManager(root, save_total_limit=3) | CheckpointManager has no option save_total_limit=: did you mean keep_storage= or keep_memory=?
CheckpointManager(root, save_interval=3) | CheckpointManager has no option save_interval=: did you mean save_interval_steps=?
CheckpointManager(root, save_steps=3) | CheckpointManager has no option save_steps=: did you mean save_interval_steps=?
CheckpointManager(root, every_n_train_steps=3) | CheckpointManager has no option every_n_train_steps=: did you mean save_interval_steps=?
CheckpointManager(root, checkpoint_interval=3) | CheckpointManager has no option checkpoint_interval=: did you mean save_interval_steps=?
CheckpointManager(root, every_n_saves=3) | CheckpointManager has no option every_n_saves=: did you mean persist=?
CheckpointManager(root, enable_async_checkpointing=True) | CheckpointManager has no option enable_async_checkpointing=: did you mean async_save=?
CheckpointManager(directory=root) | CheckpointManager has no option directory=: did you mean path=?
CheckpointManager(dirpath=root) | CheckpointManager has no option dirpath=: did you mean path=?
CheckpointManager(url=root) | CheckpointManager has no option url=: did you mean path=?
CheckpointManager(root, run_name="a") | CheckpointManager has no option run_name=: did you mean job=?
CheckpointManager(root, verify=False) | CheckpointManager has no option verify=: MemoryStorageReader has it
CheckpointManager(root, timeout=60) | CheckpointManager has no option timeout=: set DCP_MEM_TIMEOUT
CheckpointManager(root, qwerty=1) | CheckpointManager has no option qwerty=: help(CheckpointManager) shows those it has
CheckpointManager(root, "run-1") | CheckpointManager takes path without a name: name the others, as memory_root=
CheckpointManager() | memory-only checkpoints (path=None) need a name that a restart finds again: give job='my-run'
CheckpointManager(3) | path=3: give a text or a path, not an int
CheckpointManager("") | path='': give a directory, an fsspec URL
CheckpointManager([root]) | path=[
CheckpointManager(root, save_interval_steps="10") | save_interval_steps='10': give a number of steps, at least 1
CheckpointManager(root, save_interval_steps=0) | save_interval_steps=0: give a number of steps, at least 1
CheckpointManager(root, save_interval_steps=1.5) | save_interval_steps=1.5: give a number of steps
CheckpointManager(root, async_save="yes") | async_save='yes': give True or False
CheckpointManager(root, async_save=None) | async_save=None: give True or False
CheckpointManager(root, overlap=model) | overlap=Linear(in_features=2, out_features=2, bias=True): give the optimizers whose step
CheckpointManager(root, overlap=[]) | overlap=None: give the optimizers whose step
CheckpointManager(root, on_error="ignore") | on_error='ignore': choose 'warn' or 'raise'
CheckpointManager(root, preemption="SIGTREM") | preemption='SIGTREM': give names of signals
CheckpointManager(root, preemption=15) | preemption=15: give names of signals
CheckpointManager(root, preemption="SIGKILL") | preemption='SIGKILL': give names of signals that can be handled
CheckpointManager(job="j", preemption="SIGTERM") | preemption=: there is no storage to go to; give a path
CheckpointManager(root, preemption_deadline="25") | preemption_deadline='25': give a number of seconds
CheckpointManager(root, preemption_deadline=-1) | preemption_deadline=-1: give a number of seconds above 0
CheckpointManager(root, crash_loop_steps="9") | crash_loop_steps='9': give a number of steps, at least 1
CheckpointManager(root, on_crash_loop=True) | on_crash_loop=True: choose 'ignore', 'warn' or 'fall_back'
CheckpointManager(root, compare_replicas=0) | compare_replicas=0: give a number of saves, at least 1
CheckpointManager(root, trackers=print) | trackers=<built-in function print>: give a list of objects with track() and close()
CheckpointManager(root, trackers=[3]) | trackers=[3]: give a list of objects with track() and close()
CheckpointManager(root, keep_memory=0) | keep_memory=0: give a whole number, at least 1
CheckpointManager(root, keep_storage="all") | keep_storage='all': give a number of checkpoints
CheckpointManager(root, preemption=["SIGKILL"]) | preemption='SIGKILL': give names of signals that can be handled
CheckpointManager(root, preemption="SIGTERM", preemption_deadline=0) | preemption_deadline=0: give a number of seconds above 0
CheckpointManager(root, crash_loop_steps=0) | crash_loop_steps=0: give a number of steps, at least 1
CheckpointManager(root, overlap=[None]) | overlap=None: give the optimizers whose step
CheckpointManager(root, overlap="AdamW") | overlap='AdamW': give the optimizers whose step
CheckpointManager(root, frozen=["base.*", None]) | frozen=['base.*', None]: give names, patterns, or a function
CheckpointManager(root, frozen=b"base") | frozen=b'base': give names, patterns, or a function
CheckpointManager(root, frozen=True) | frozen=True: give names, patterns, or a function
CheckpointManager(root, trackers="metrics.jsonl") | trackers='metrics.jsonl': give a list of objects with track() and close()
CheckpointManager(root, storage_mode=0o444) | storage_mode=0o444: give a mode of files, as 0o640 or 0o664
"""
_WRITERS = """
MemoryStorageWriter(root, keep_memory="3") | keep_memory='3': give a number of checkpoints, keep_last(n)
MemoryStorageWriter(root, keep_memory=0) | keep_memory=0: give a whole number, at least 1
MemoryStorageWriter(root, keep_memory=keep_every(100)) | keep_memory=KeepEvery(steps=100): memory would fill up
MemoryStorageWriter(root, keep_storage=[1]) | keep_storage=[1]: give a number of checkpoints
MemoryStorageWriter(root, replicas="1") | replicas='1' (or DCP_MEM_REPLICAS): give a whole number of copies
MemoryStorageWriter(root, replicas=-1) | replicas=-1 (or DCP_MEM_REPLICAS): give a whole number of copies
MemoryStorageWriter(root, redundancy=2) | redundancy=2: give dcp_mem.parity(k)
MemoryStorageWriter(root, redundancy=parity(2), replicas=1) | redundancy=Parity(k=2): give dcp_mem.parity(k), and no replicas= beside it
MemoryStorageWriter(root, persist="always") | persist='always': give True, False, every_n_saves(n)
MemoryStorageWriter(root, persist=10) | persist=10: give True, False, every_n_saves(n)
MemoryStorageWriter(root, memory_limit="64 potatoes") | memory_limit='64 potatoes': give bytes, or a text such as '64GiB'
MemoryStorageWriter(root, memory_limit=0.5) | memory_limit=0.5: give bytes
MemoryStorageWriter(root, upload_limit="fast") | upload_limit='fast': give bytes
MemoryStorageWriter(root, on_full="drop") | on_full='drop': choose 'wait', 'skip' or 'raise'
MemoryStorageWriter(root, on_full=None) | on_full=None: choose 'wait', 'skip' or 'raise'
MemoryStorageWriter(root, on_slow_storage="wait") | on_slow_storage='wait': choose 'newest' or 'all'
MemoryStorageWriter(root, on_replication="raise") | on_replication='raise': choose 'wait', 'skip' or 'cancel'
MemoryStorageWriter(root, on_nonfinite=True) | on_nonfinite=True: choose 'ignore', 'warn' or 'reject'
MemoryStorageWriter(root, overwrite="no") | overwrite='no': give True or False
MemoryStorageWriter(root, reuse_stored=None) | reuse_stored=None: give True or False
MemoryStorageWriter(root, agent="thraed") | agent='thraed': choose 'process' or 'thread'
MemoryStorageWriter(root, frozen=3) | frozen=3: give names, patterns, or a function
MemoryStorageWriter(root, process_group="nccl") | process_group='nccl': give what torch.distributed.new_group(
MemoryStorageWriter(root, process_group=3) | process_group=3: give what torch.distributed.new_group(
MemoryStorageWriter(root, storage_options="key") | storage_options is a str: give a mapping, as fsspec takes it
MemoryStorageWriter(root, storage_options={"lock": lock}) | storage_options can't be sent to the agent
MemoryStorageWriter(root, transport="rdma") | transport='rdma' (or DCP_MEM_TRANSPORT): choose 'auto', 'nixl' or 'tcp'
MemoryStorageWriter(root, memory_root=3) | memory_root=3: give a text or a path, not an int
MemoryStorageWriter(root, job="a/b") | job='a/b': use up to 128 letters
MemoryStorageWriter(root, failure_domain=3) | failure_domain=3: give a text, such as the name of the rack
MemoryStorageWriter(root, export="hf") | export='hf': give a dcp_mem.HuggingFaceExport
MemoryStorageWriter(root, storage_mode="0o640") | storage_mode='0o640': give a mode of files, as 0o640
MemoryStorageWriter(root, storage_mode=640) | storage_mode=0o1200: give a mode of files, as 0o640
MemoryStorageWriter(root, thread_count=4) | MemoryStorageWriter has no option thread_count=: leave it out
MemoryStorageWriter(root, single_file_per_rank=True) | MemoryStorageWriter has no option single_file_per_rank=: leave it out
MemoryStorageWriter(root, async_save=True) | MemoryStorageWriter has no option async_save=: CheckpointManager has it
MemoryStorageWriter(root, save_interval_steps=9) | MemoryStorageWriter has no option save_interval_steps=: CheckpointManager has it
MemoryStorageWriter(root, 4) | MemoryStorageWriter takes path without a name: name the others
MemoryStorageWriter("s3x://bucket/run") | path='s3x://bucket/run': fsspec knows no protocol 's3x'
MemoryStorageWriter("s3://") | path='s3://': a bucket, container or directory is missing after s3://
MemoryStorageWriter("s3:/bucket/run") | path='s3:/bucket/run': did you mean s3://bucket/run?
MemoryStorageWriter("s3://user:pw@bucket/run") | path=s3://… holds a password or a signature
MemoryStorageWriter(" ") | path=' ': give a directory, an fsspec URL
MemoryStorageWriter(b"run") | path=b'run': give a text or a path, not a bytes
MemoryStorageWriter(root, job=7) | job=7: give a text or a path, not an int
MemoryStorageWriter(root, job="../other") | job='../other': use up to 128 letters
MemoryStorageWriter(root, memory_limit=0) | memory_limit=0: give bytes, or a text such as '64GiB'
MemoryStorageWriter(root, upload_limit="0 MB") | upload_limit='0 MB': give bytes, or a text such as '64GiB'
MemoryStorageWriter(root, frozen=2.5) | frozen=2.5: give names, patterns, or a function
MemoryStorageWriter(root, frozen=[3]) | frozen=[3]: give names, patterns, or a function
MemoryStorageWriter(root, storage_mode=0o750) | storage_mode=0o750: give a mode of files, as 0o640 or 0o664
MemoryStorageWriter(root, storage_mode=True) | storage_mode=True: give a mode of files, as 0o640 or 0o664
"""
_OTHERS = """
MemoryStorageReader(root, keep_memory=3) | MemoryStorageReader has no option keep_memory=: MemoryStorageWriter has it
MemoryStorageReader(root, verify="no") | verify='no': give True or False
MemoryStorageReader(root, broadcast="yes") | broadcast='yes': give True or False
MemoryStorageReader(root, weights_only=True) | MemoryStorageReader has no option weights_only=: dcp_mem.load has it
serve(None) | root=None: give the directory or URL that the checkpoints lie in
serve(root, keep_memmory=3) | serve has no option keep_memmory=: did you mean keep_memory=?
serve(root, save_total_limit=3) | serve has no option save_total_limit=: did you mean keep_storage= or keep_memory=?
serve(root, flush_seconds="60") | flush_seconds='60': give a number of seconds
follow(root, poll=1) | follow has no option poll=: help(follow) shows those it has
follow(root, timeout="10") | timeout='10': give a number of seconds
follow(root, timeout=-1) | timeout=-1: give seconds, or None to wait for ever
follow(root, poll_seconds=0) | poll_seconds=0: give seconds above 0
follow(root, model) | state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear
follow(root, state, skip=3) | skip=3: give names, patterns, or a function
follow(None, job="j", only_durable=True) | only_durable=True: without a root nothing becomes durable
every_n_saves(0) | every_n_saves(0): give a whole number of saves, at least 1
every_seconds("60") | every_seconds('60'): give a number of seconds above 0
keep_last("3") | keep_last('3'): give a whole number, at least 1
keep_best(3, 1) | keep_best(3, 1, mode='min'): give the name of a metric that is passed to save
keep_best("loss", mode="lowest") | keep_best('loss', 1, mode='lowest'): choose mode='min' or 'max'
any_of([keep_last(3)]) | any_of([…]): give the policies one by one, as any_of(first, second)
auto(mtbf="12 parsecs") | mtbf='12 parsecs': give seconds above 0, or a text such as '12h'
parity(1) | parity(1): give a whole number of nodes from 2 up
TrainState(state) | model is a dict: give the torch.nn.Module
TrainState(model, "adam") | optimizer='adam': give the optimizer, or several as a list
TrainState(model, torch.optim.SGD) | optimizer=<class 'torch.optim.sgd.SGD'>: give the optimizer
TrainState(model, optim=3) | TrainState has no option optim=: did you mean optimizer=?
TrainState(model, lr_scheduler=3) | TrainState has no option lr_scheduler=: did you mean scheduler=?
TrainState(model, scheduler=3) | scheduler is an int, which lacks state_dict() or load_state_dict()
TrainState(model, rng="no") | rng='no': give True or False
TrainState(model, extra=[3]) | extra is a list: give values by name, as a dict
save(state, "step-1") | save takes state_dict without a name: name the others, as checkpoint_id=
save(state, checkpoint="a", storage_writer=writer) | save has no option checkpoint=: did you mean checkpoint_id=?
save(state, checkpoint_id="a", storage_writer=root) | storage_writer is '
save(state, checkpoint_id="a", storage_writer=reader) | storage_writer is a MemoryStorageReader: give an object such as MemoryStorageWriter(path)
save(state, checkpoint_id="a", storage_writer=MemoryStorageWriter) | storage_writer is the class MemoryStorageWriter: give an object
save(model, checkpoint_id="a", storage_writer=writer) | state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear
save(state, checkpoint_id="a", storage_writer=writer, process_group=3) | process_group=3: give what
async_save(state, checkpoint_id="a", storage_writer=writer, overlap=3) | overlap=3: give the optimizers whose step
load(state, reader=reader) | load has no option reader=: did you mean storage_reader=?
load(state, storage_reader=writer) | storage_reader is a MemoryStorageWriter: give an object such as MemoryStorageReader(path)
load(state, storage_reader=reader, weights_only="no") | weights_only='no': give True or False
reader.report() | nothing has been loaded through this reader yet
writer.wait("step-1", "complet") | state='complet': wait for 'complete', 'replicated' or 'durable'
writer.wait(3) | checkpoint_id=3: give a text or a path, not an int
writer.annotate_next_save(step="x") | step='x': give the number of the training step, 0 or more
writer.annotate_next_save(metric={"loss": 1}) | MemoryStorageWriter.annotate_next_save has no option metric=: did you mean metrics=?
writer.prepare(model) | state: give a dict such as
writer.close("no") | flush='no': give True or False
every_n_saves(True) | every_n_saves(True): give a whole number of saves, at least 1
every_seconds(0) | every_seconds(0): give a number of seconds above 0
every_seconds(-1) | every_seconds(-1): give a number of seconds above 0
async_save(state, checkpoint_id="a", storage_writer=root) | storage_writer is '
async_save(state, checkpoint_id="a", storage_writer=reader) | storage_writer is a MemoryStorageReader: give an object such as MemoryStorageWriter(path)
async_save(model, checkpoint_id="a", storage_writer=writer) | state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear
async_save(state, checkpoint_id="a", overlap=torch.optim.SGD(model.parameters())) | overlap= needs a MemoryStorageWriter that stages by itself
load(state, storage_reader=root) | storage_reader is '
load(state, storage_reader=MemoryStorageReader) | storage_reader is the class MemoryStorageReader: give an object such as MemoryStorageReader(path)
load(model, storage_reader=reader) | state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear
TrainState(model, scheduler=[]) | scheduler is a list, which lacks state_dict() or load_state_dict()
TrainState(model, dataloader=[]) | dataloader is a list, which lacks state_dict() or load_state_dict()
TrainState(model, extra={1: "one"}) | extra=[1]: give names as keys
writer.annotate_next_save(step=-1) | step=-1: give the number of the training step, 0 or more
writer.annotate_next_save(step=True) | step=True: give the number of the training step, 0 or more
writer.annotate_next_save(step=1.5) | step=1.5: give the number of the training step, 0 or more
writer.annotate_next_save(metrics=[1]) | metrics=[1]: give figures by name, such as {'loss': 0.3}
writer.annotate_next_save(metrics={"loss": "low"}) | metrics: 'loss' is 'low', which is no number
writer.annotate_next_save(metrics={1: 1}) | metrics: 1 is no name; give texts
"""
_CALLS = """
manager.save(state, 1) | step is a dict: give the number of the training step, then the state
manager.save(2, model) | state: give a dict such as {"app": TrainState(model, optimizer)}, not a Linear
manager.save(2, state, {"loss": 1}) | CheckpointManager.save takes step and state without a name: name the others, as metrics=
manager.save(2, state, metrics=[1]) | metrics=[1]: give figures by name, such as {'loss': 0.3}
manager.save(2, state, metrics={"loss": "low"}) | metrics: 'loss' is 'low', which is no number
manager.save(2, state, force=True) | CheckpointManager.save has no option force=: did you mean force_persist=?
manager.save(2, state, force_persist="no") | force_persist='no': give True or False
manager.save(-1, state) | step=-1: give the number of the training step, 0 or more
manager.save(1.0, state) | step=1.0: give the number of the training step, 0 or more
manager.save("step-1", state) | step='step-1': give the number of the training step, 0 or more
manager.save(None, state) | step=None: give the number of the training step
manager.restore(model) | state: give a dict such as
manager.restore(state, "latest") | step='latest': give the number of the training step, 0 or more
manager.restore(state, step=99) | no step-99 in memory (job
manager.restore(state, skip=3) | skip=3: give names, patterns, or a function
manager.wait(1, timeout="10") | timeout='10': give a number of seconds
manager.wait(1, 10) | state=10: wait for 'complete', 'replicated' or 'durable'
manager.wait(77, "complete") | no step-77 in job
manager.wait(1, "replicated") | nothing is replicated: the writer has replicas=0, and no parity
manager.delete(99) | no step-99 in job
manager.reject(99, "NaN") | no step-99 in job
manager.advice("soon") | mtbf='soon': give seconds above 0
manager.report() | nothing has been restored yet
manager.close(flush="no") | flush='no': give True or False
closed.save(2, state) | save() after close(): make the manager again, or enter it again by `with`
closed.restore(state) | restore() after close(): make the manager again
closed.delete(1) | delete() after close(): make the manager again
closed.reject(1, "NaN") | reject() after close(): make the manager again
manager.save(True, state) | step=True: give the number of the training step, 0 or more
"""
_LINES = [one for one in (_MANAGERS + _WRITERS + _OTHERS + _CALLS).splitlines() if one]


@pytest.fixture
def names(
    tmp_path: Path, memory_root: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[dict[str, Any]]:
    """What a user's script has at hand; only a line that needs a manager has one that has saved."""
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    root, line = str(tmp_path / "run"), request.node.callspec.params["line"]
    state = {"x": torch.ones(3)}
    found = {name: getattr(dcp_mem, name) for name in dcp_mem.__all__}
    found |= {"root": root, "state": state, "model": nn.Linear(2, 2), "torch": torch}
    found |= {"lock": threading.Lock()}
    found |= {"writer": MemoryStorageWriter(root), "reader": dcp_mem.MemoryStorageReader(root)}
    with contextlib.ExitStack() as ending:
        for name in ("manager", "closed"):
            if line.startswith(name):
                made = dcp_mem.CheckpointManager(job="mistakes", on_error="raise")
                found[name] = made
                ending.callback(made.close)
                made.save(0, state)
                made.save(1, state)
        if "closed" in found:
            found["closed"].close()
        yield found


@pytest.mark.parametrize("line", _LINES, ids=[one.partition(" | ")[0] for one in _LINES])
def test_a_mistake_is_named_with_its_remedy(line: str, names: dict[str, Any]) -> None:
    call, _, beginning = line.partition(" | ")
    with pytest.raises(DcpMemError) as raised:
        eval(call, names)
    assert str(raised.value).startswith(beginning)
    assert len(str(raised.value).partition("\n")[0]) < 300
    if "has no option" in beginning or "without a name" in beginning:
        assert isinstance(raised.value, ConfigError)
        assert isinstance(raised.value, TypeError)
    copied = pickle.loads(pickle.dumps(raised.value))  # DCP sends it to other ranks
    assert (type(copied), str(copied)) == (type(raised.value), str(raised.value))


def test_there_are_enough_mistakes() -> None:
    assert len(set(_LINES)) == len(_LINES) >= 150


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    for name, meant in (("svae", "save"), ("MemoryStorgeWriter", "MemoryStorageWriter")):
        with pytest.raises(AttributeError, match=rf"'{name}': did you mean {meant}\?"):
            getattr(dcp_mem, name)
    assert not hasattr(dcp_mem, "__wrapped__")


def test_switches_may_be_numpy_s_and_torch_s(memory_root: Path) -> None:
    import numpy as np

    with dcp_mem.CheckpointManager(job="j", memory_root=memory_root) as manager:
        for step, switch in enumerate((np.bool_(True), torch.tensor(True), 1, True)):
            assert manager.save(step, {"n": step}, force_persist=switch)  # type: ignore[arg-type]
        assert manager.restore({"n": 0}) == 3


# -- what outlives a call --------------------------------------------------------------------------


def test_a_reader_and_a_writer_can_be_pickled_and_copied_after_use(memory_root: Path) -> None:
    writer = MemoryStorageWriter(job="j", memory_root=memory_root)
    reader = dcp_mem.MemoryStorageReader(job="j", memory_root=memory_root)
    state = {"x": torch.ones(3)}
    with writer:
        dcp_mem.save(state, checkpoint_id="a", storage_writer=writer)
        dcp_mem.load(state, storage_reader=reader)
        for again in (pickle.loads(pickle.dumps(reader)), copy.deepcopy(reader)):
            loaded = {"x": torch.zeros(3)}
            dcp_mem.load(loaded, storage_reader=again)
            assert loaded["x"].tolist() == [1, 1, 1]
        saved = pickle.loads(pickle.dumps(writer))
        dcp_mem.save(state, checkpoint_id="b", storage_writer=saved)
        assert reader.recoverable() == ["b", "a"]


def test_a_manager_that_is_pickled_says_that_it_stays_in_its_process(memory_root: Path) -> None:
    manager = dcp_mem.CheckpointManager(job="j", memory_root=memory_root)
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(manager)


def test_a_writer_and_a_reader_go_on_after_close_and_say_so(
    memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MemoryStorageWriter(job="j", memory_root=memory_root)
    reader = dcp_mem.MemoryStorageReader(job="j", memory_root=memory_root)
    state = {"x": torch.ones(3)}
    begun = dcp_mem.async_save(state, checkpoint_id="begun", storage_writer=writer)
    writer.close()
    assert begun.result().state_dict_metadata
    assert "after close()" not in caplog.text
    dcp_mem.save(state, checkpoint_id="a", storage_writer=writer)
    dcp_mem.save(state, checkpoint_id="b", storage_writer=writer)
    assert caplog.text.count("job j: a save after close(): call close() again at the end") == 1
    writer.close()
    dcp_mem.load(state, storage_reader=reader)
    dcp_mem.load(state, storage_reader=reader)
    reader.close()
    assert "load after close()" not in caplog.text
    dcp_mem.load(state, storage_reader=reader)
    assert caplog.text.count("job j: a load after close()") == 1


def test_a_manager_that_was_closed_answers_and_can_be_entered_again(
    memory_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dcp_mem.CheckpointManager(job="j", memory_root=memory_root) as manager:
        manager.save(1, {"n": 1})
    assert repr(manager).endswith(", newest step-1>, closed>")
    assert manager.latest() == 1
    assert [one.name for one in manager.list()] == ["step-1"]
    with manager:
        manager.save(2, {"n": 2})
        assert manager.restore({"n": 0}) == 2
    assert "after close()" not in caplog.text


# -- notebooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_a_cell_that_makes_the_manager_anew_goes_on_where_the_last_run_of_it_was(
    memory_root: Path, url: Path, is_async: bool
) -> None:
    for run in range(3):
        manager = dcp_mem.CheckpointManager(
            url, memory_root=memory_root, async_save=is_async, preemption="SIGTERM"
        )
        state = {"n": torch.tensor(0)}
        assert manager.restore(state) == (run - 1 if run else None)
        manager.save(run, {"n": torch.tensor(run + 1)})
    manager.close(progress=False)
    assert manager.latest() == 2


def test_a_cell_that_serves_again_gets_what_is_served_or_hears_how_to_end_it(
    memory_root: Path, url: Path
) -> None:
    served = dcp_mem.serve(url, memory_root=memory_root)
    try:
        assert dcp_mem.serve(url, memory_root=memory_root) is served
        with pytest.raises(ConfigError, match=rf"dcp_mem\.serve\('{url}'\)\.stop\(\) first"):
            dcp_mem.serve(url, memory_root=memory_root, keep_memory=3)
    finally:
        dcp_mem.serve(url).stop()
    with dcp_mem.serve(url, memory_root=memory_root, keep_memory=3) as again:
        assert again is not served


# -- what an interpreter shows ---------------------------------------------------------------------


def test_reprs_say_what_of_and_never_raise(memory_root: Path) -> None:
    model = nn.Linear(2, 2)
    state = dcp_mem.TrainState(model, torch.optim.SGD(model.parameters()), extra={"step": 3})
    assert repr(state) == "<TrainState of Linear, SGD, step>"
    options: dict[str, Any] = {"memory_root": memory_root, "storage_options": {"key": "secret"}}
    writer = MemoryStorageWriter("s3://bucket/run", job="j", **options)
    assert repr(writer) == "<MemoryStorageWriter s3://bucket/run, job j>"
    follower = dcp_mem.follow("/ckpts/run", job="j", memory_root=memory_root)
    assert repr(follower) == "<Follower of /ckpts/run, job j>"
    in_the_way = memory_root / "other"
    in_the_way.write_text("no directory")
    writer = MemoryStorageWriter("s3://bucket/run", job="other", **options)
    assert repr(writer) == "<MemoryStorageWriter s3://bucket/run, job other>"
    in_the_way.unlink()
