"""torchft on dcp_mem: replicas that are killed heal from the memory of those that live."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

from dcp_mem import (
    ConfigError,
    DcpMemError,
    MemoryRootRefused,
    SegmentCorrupt,
    UntrustedObject,
    WaitTimeout,
)
from tests.support.checkpoints.jobs import wait_until
from tests.support.docs import blocks
from tests.support.processes.forks import Forks, forking, raised_by

torchft = pytest.importorskip("torchft")

from dcp_mem.integrations.torchft import MemoryCheckpointTransport, pulling, serving  # noqa: E402
from tests.support.frameworks.torchft_training import Notes, end_at, train  # noqa: E402

_SECONDS = timedelta(seconds=20)
_SHORT = timedelta(seconds=0.3)
_ROADS = ["file", "channel"]
"""How the state comes: as from the same machine, and as from another one."""
Transport = MemoryCheckpointTransport[Any]


@pytest.fixture(params=_ROADS)
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "channel":
        monkeypatch.setattr(pulling, "_opened", lambda offer: None)
    return str(request.param)


@pytest.fixture
def made(memory_root: Path) -> Iterator[Callable[..., Transport]]:
    """Makes transports, which are shut down at the end."""
    with ExitStack() as stack:

        def make(**options: Any) -> Transport:
            transport: Transport = MemoryCheckpointTransport(memory_root=memory_root, **options)
            stack.callback(transport.shutdown)
            return transport

        yield make


def _state(step: int = 1) -> dict[str, Any]:
    tied = torch.randn(40, 30)
    return {
        "user": {
            "default": {
                "large": torch.arange(5 << 20, dtype=torch.int32) + step,
                "small": [torch.full((n,), float(step)) for n in range(20)],
                "half": torch.randn(33, 5).bfloat16(),
                "bools": torch.tensor([True, False, True]),
                "complex": torch.randn(7, dtype=torch.complex64).conj(),
                "strided": torch.arange(100.0).view(10, 10)[:, ::3],
                "scalar": torch.tensor(3.5),
                "nothing": torch.empty(0, 4),
                "sparse": torch.eye(4).to_sparse(),
                "tied": tied,
                "tied too": tied,
                "text": "text",
                5: {None: (1, 2.5, None), "set": {1, 2}},
                "ordered": OrderedDict(b=1, a=2),
            }
        },
        "torchft": {"step": step, "batches_committed": 2 * step},
    }


def _assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert torch.equal(found.to_dense(), expected.to_dense())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            _assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)
    else:
        assert found == expected


_open_before: set[str] = set()


@pytest.fixture(autouse=True)
def _what_other_tests_left_open() -> None:
    _open_before.clear()
    _open_before.update(_nameless())


def _slots() -> int:
    """The slots without a name that this process has opened for torchft in this test."""
    return len(_nameless() - _open_before)


def _nameless() -> set[str]:
    return {
        path
        for path in map(_target, os.listdir("/proc/self/fd"))
        if path.startswith("/dev/shm/dcp_mem-test") and path.endswith(" (deleted)")
    }


def _target(descriptor: str) -> str:
    with suppress(FileNotFoundError):  # closed meanwhile
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


# -- torchft's own test of transports --------------------------------------------------------------


def test_torchfts_own_test_of_transports_passes(road: str, memory_root: Path) -> None:
    from torchft.checkpointing.transport_test import run_multi_recovery_test

    def make(rank: int, world_size: int) -> Transport:
        return MemoryCheckpointTransport(memory_root=memory_root)

    run_multi_recovery_test(TestCase(), make, torch.device("cpu"))


# -- what comes ------------------------------------------------------------------------------------


def test_a_state_comes_as_it_was(road: str, made: Callable[..., Transport]) -> None:
    sender, receiver, state = made(), made(), _state()
    sender.send_checkpoint([1], 1, state, _SECONDS)
    found = receiver.recv_checkpoint(0, sender.metadata(), 1, _SECONDS)
    _assert_equal(found, state)
    default = found["user"]["default"]
    assert default["tied"] is default["tied too"]


def test_what_training_changes_after_the_send_does_not_come(
    road: str, made: Callable[..., Transport]
) -> None:
    sender, receiver, state = made(), made(), _state()
    sender.send_checkpoint([1], 1, state, _SECONDS)
    sender.disallow_checkpoint()
    state["user"]["default"]["large"].zero_()
    state["torchft"]["step"] = 9
    found = receiver.recv_checkpoint(0, sender.metadata(), 1, _SECONDS)
    assert torch.equal(found["user"]["default"]["large"], _state()["user"]["default"]["large"])
    assert found["torchft"]["step"] == 1


def test_an_empty_state_comes(road: str, made: Callable[..., Transport]) -> None:
    sender = made()
    for step, state in enumerate([{}, {"n": torch.empty(0)}, {"x": 1}]):
        sender.send_checkpoint([1], step, state, _SECONDS)
        _assert_equal(made().recv_checkpoint(0, sender.metadata(), step, _SECONDS), state)


def test_a_sharded_tensor_comes_with_its_mesh(road: str, made: Callable[..., Transport]) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        sharded = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        sender = made()
        sender.send_checkpoint([1], 4, {"w": sharded}, _SECONDS)
        found = made().recv_checkpoint(0, sender.metadata(), 4, _SECONDS)["w"]
        assert isinstance(found, DTensor)
        assert found._spec == sharded._spec
        assert torch.equal(found.to_local(), sharded.to_local())
        assert torch.equal(found.full_tensor(), sharded.full_tensor())
    finally:
        dist.destroy_process_group()


def test_several_replicas_heal_at_once_and_the_memory_is_given_back_after_the_last(
    road: str, made: Callable[..., Transport]
) -> None:
    sender, receivers, state = made(), [made() for _ in range(3)], _state()
    sender.send_checkpoint([1, 2, 3], 1, state, _SECONDS)
    assert _slots() == 1
    found: list[Any] = []

    def heal(receiver: Transport) -> None:
        found.append(receiver.recv_checkpoint(0, sender.metadata(), 1, _SECONDS))

    threads = [threading.Thread(target=heal, args=(one,)) for one in receivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for one in found:
        _assert_equal(one, state)
    wait_until(lambda: not _slots(), "the memory is given back")


# -- steps and time-outs ---------------------------------------------------------------------------


def test_a_replica_that_asks_too_early_waits_for_the_step(
    road: str, made: Callable[..., Transport]
) -> None:
    sender, receiver, found = made(), made(), []
    sender.send_checkpoint([1], 1, {"x": 1}, _SECONDS)

    def heal() -> None:
        found.append(receiver.recv_checkpoint(0, sender.metadata(), 2, _SECONDS))

    thread = threading.Thread(target=heal)
    thread.start()
    time.sleep(0.2)
    assert not found
    sender.send_checkpoint([1], 2, {"x": 2}, _SECONDS)
    thread.join(30)
    assert found == [{"x": 2}]


def test_a_step_that_never_comes_times_out(made: Callable[..., Transport]) -> None:
    sender, receiver = made(), made()
    with pytest.raises(WaitTimeout, match="timed out waiting for replica 7"):
        receiver.recv_checkpoint(7, sender.metadata(), 3, _SHORT)


def test_a_step_that_is_over_is_refused_at_once(made: Callable[..., Transport]) -> None:
    sender, receiver = made(), made()
    sender.send_checkpoint([1], 5, {"x": 5}, _SECONDS)
    with pytest.raises(DcpMemError, match="step 4 was asked for, and step 5 is staged here"):
        receiver.recv_checkpoint(0, sender.metadata(), 4, _SECONDS)


def test_what_nobody_asks_for_leaves_memory_when_the_time_is_over(
    made: Callable[..., Transport],
) -> None:
    made().send_checkpoint([1], 1, _state(), _SHORT)
    assert _slots() == 1
    wait_until(lambda: not _slots(), "the memory is given back")


def test_a_second_send_takes_the_memory_of_the_first(made: Callable[..., Transport]) -> None:
    sender = made()
    for step in range(3):
        sender.send_checkpoint([1], step, _state(step), _SECONDS)
        assert _slots() == 1
    sender.shutdown()
    assert _slots() == 0


def test_a_replica_that_is_nowhere_is_named(made: Callable[..., Transport]) -> None:
    gone = made()
    metadata = gone.metadata()
    gone.shutdown()
    with pytest.raises(DcpMemError, match="replica 3: can't be reached"):
        made().recv_checkpoint(3, metadata, 1, _SECONDS)


def test_a_replica_with_another_transport_is_named(made: Callable[..., Transport]) -> None:
    with pytest.raises(DcpMemError, match="replica 3 uses another checkpoint transport"):
        made().recv_checkpoint(3, "http://host:1234/checkpoint/", 1, _SECONDS)


# -- damage and trust ------------------------------------------------------------------------------


def test_damage_in_the_memory_of_the_same_machine_is_found(
    made: Callable[..., Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, opened = made(), pulling._opened

    def damaging(offer: Any) -> int | None:
        descriptor = opened(offer)
        staged = sender._server._staged
        assert staged is not None
        staged.checksums()
        staged._view(1 << 20, 1)[0] ^= 1
        return descriptor

    monkeypatch.setattr(pulling, "_opened", damaging)
    sender.send_checkpoint([1], 1, _state(), _SECONDS)
    with pytest.raises(SegmentCorrupt, match="another checksum"):
        made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS)


class _Own:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Own)

    def __hash__(self) -> int:
        return 0


def test_what_could_run_code_is_refused_unless_the_replicas_are_trusted(
    made: Callable[..., Transport],
) -> None:
    sender = made()
    sender.send_checkpoint([1, 2], 1, {"own": _Own()}, _SECONDS)
    with pytest.raises(UntrustedObject, match=r"weights_only=False"):
        made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS)
    trusting = made(weights_only=False)
    assert trusting.recv_checkpoint(0, sender.metadata(), 1, _SECONDS) == {"own": _Own()}


def test_what_cannot_be_sent_is_an_error_that_leaves_nothing(
    made: Callable[..., Transport],
) -> None:
    with pytest.raises(DcpMemError, match="can't be pickled"):
        made().send_checkpoint([1], 1, {"f": lambda: 1, "x": torch.ones(9)}, _SECONDS)
    with pytest.raises(DcpMemError, match="meta device"):
        made().send_checkpoint([1], 1, {"x": torch.ones(9, device="meta")}, _SECONDS)
    assert _slots() == 0


def test_strangers_that_connect_hold_up_nobody(made: Callable[..., Transport]) -> None:
    sender = made()
    sender.send_checkpoint([1], 1, {"x": 1}, _SECONDS)
    facts = json.loads(sender.metadata())
    port = facts["host"], facts["port"]
    with ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            stranger = stack.enter_context(closing(socket.create_connection(port)))
            stranger.sendall(said)
        assert made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS) == {"x": 1}


def test_arguments_that_cannot_work_are_refused(memory_root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transport"):
        MemoryCheckpointTransport(memory_root=memory_root, transport="pigeon")
    link = tmp_path / "link"
    link.symlink_to(memory_root)
    with pytest.raises(MemoryRootRefused):
        MemoryCheckpointTransport(memory_root=link)


# -- processes that die ----------------------------------------------------------------------------


def _sends(memory_root: str, address: str) -> None:
    transport: Transport = MemoryCheckpointTransport(memory_root=memory_root)
    transport.send_checkpoint([1], 1, _state(), _SECONDS)
    Path(address).with_suffix(".part").write_text(transport.metadata())
    Path(address).with_suffix(".part").rename(address)
    time.sleep(60)


@contextmanager
def _sender(memory_root: Path, tmp_path: Path) -> Iterator[tuple[Forks[None], str]]:
    """A process that has sent a state, and what its transport is reached by."""
    address = tmp_path / "address"
    with forking(_sends, None, str(memory_root), str(address)) as process:
        wait_until(address.exists, "the other process sends")
        yield process, address.read_text()


def test_another_process_on_this_machine_is_read_from(
    made: Callable[..., Transport], memory_root: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with _sender(memory_root, tmp_path) as (_, metadata):
        found = made().recv_checkpoint(0, metadata, 1, _SECONDS)
    assert torch.equal(found["user"]["default"]["large"], _state()["user"]["default"]["large"])


def test_a_sender_that_dies_before_it_is_asked_fails_at_once(
    made: Callable[..., Transport], memory_root: Path, tmp_path: Path
) -> None:
    with _sender(memory_root, tmp_path) as (process, metadata):
        process.kill()
        with pytest.raises(DcpMemError, match="replica 0"):
            made().recv_checkpoint(0, metadata, 1, _SECONDS)
    assert [entry for entry in os.listdir(memory_root) if not entry.startswith(".")] == []


def test_a_sender_that_dies_while_a_step_is_awaited_fails_at_once(
    made: Callable[..., Transport], memory_root: Path, tmp_path: Path
) -> None:
    with _sender(memory_root, tmp_path) as (process, metadata):
        started, errors = time.monotonic(), []
        receiver = made()

        def heal() -> None:
            errors.append(
                raised_by(lambda: receiver.recv_checkpoint(0, metadata, 2, timedelta(seconds=50)))
            )

        thread = threading.Thread(target=heal)
        thread.start()
        time.sleep(0.3)
        process.kill()
        thread.join(60)
    assert "replica 0 is gone" in str(errors[0])
    assert time.monotonic() - started < 30


def test_a_sender_that_dies_while_its_bytes_come_fails_at_once(
    made: Callable[..., Transport],
    memory_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulling, "_opened", lambda offer: None)
    chunks = pulling._chunks
    with _sender(memory_root, tmp_path) as (process, metadata):

        def killing(*args: Any) -> Iterator[Any]:
            for number, chunk in enumerate(chunks(*args)):
                if number == 1:
                    process.kill()
                yield chunk

        monkeypatch.setattr(pulling, "_chunks", killing)
        started = time.monotonic()
        with pytest.raises(DcpMemError, match="replica 0"):
            made().recv_checkpoint(0, metadata, 1, timedelta(seconds=50))
        assert time.monotonic() - started < 30


def test_a_file_that_is_open_is_read_though_the_sender_dies(
    made: Callable[..., Transport],
    memory_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = pulling.CheckedReader  # type: ignore[attr-defined]
    with _sender(memory_root, tmp_path) as (process, metadata):

        def killing(*args: Any) -> Any:
            process.kill()
            return reader(*args)

        monkeypatch.setattr(pulling, "CheckedReader", killing)
        found = made().recv_checkpoint(0, metadata, 1, _SECONDS)
    assert torch.equal(found["user"]["default"]["large"], _state()["user"]["default"]["large"])


def _receives(memory_root: str, metadata: str, road: str) -> None:
    if road == "channel":
        pulling._opened = lambda offer: None
    transport: Transport = MemoryCheckpointTransport(memory_root=memory_root)
    transport.recv_checkpoint(0, metadata, 1, _SECONDS)


def test_a_receiver_that_dies_holds_up_no_other_and_its_share_of_memory_is_given_back(
    road: str, made: Callable[..., Transport], memory_root: Path
) -> None:
    sender, state = made(), _state()
    sender.send_checkpoint([1, 2], 1, state, _SECONDS)  # the first process takes a while to start
    armed = {"DCP_MEM_FAULTS": "torchft.pulling:kill:1"}
    with forking(_receives, None, str(memory_root), sender.metadata(), road, env=armed) as dying:
        wait_until(lambda: dying._processes[0].exitcode == -signal.SIGKILL, "it is killed")
        _assert_equal(made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS), state)
    wait_until(lambda: not _slots(), "the memory is given back")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_ends_takes_nothing_with_it(
    road: str, made: Callable[..., Transport]
) -> None:
    sender, state = made(), _state()
    sender.send_checkpoint([1], 1, state, _SECONDS)
    child = os.fork()
    if not child:
        serving._close_all()  # as an interpreter that ends does
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    _assert_equal(made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS), state)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_neither_the_memory_nor_the_connections(
    made: Callable[..., Transport],
) -> None:
    sender = made()
    sender.send_checkpoint([1], 1, _state(), _SECONDS)
    staged = sender._server._staged
    assert staged is not None
    descriptor = os.dup(staged.descriptor)
    begun, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(begun, 1)
        os._exit(0)
    try:
        made().recv_checkpoint(0, sender.metadata(), 1, _SECONDS)
        wait_until(lambda: not os.fstat(descriptor).st_blocks, "the memory is given back")
    finally:
        os.close(end)
        os.close(begun)
        os.close(descriptor)
        os.waitpid(child, 0)


def test_many_heals_leave_nothing_behind(road: str, made: Callable[..., Transport]) -> None:
    held = []
    for step in range(25):
        sender, receiver = made(), made()
        sender.send_checkpoint([1], step, {"x": torch.ones(1000)}, _SECONDS)
        receiver.recv_checkpoint(0, sender.metadata(), step, _SECONDS)
        sender.shutdown()
        receiver.shutdown()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    for last, settled in zip(held[-1], held[5], strict=True):
        assert last <= settled + 4, held


# -- with torchft's manager ------------------------------------------------------------------------


def test_the_docs_one_line_runs(memory_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from torchft._torchft import LighthouseServer

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    for name, value in {
        "DCP_MEM_ROOT": memory_root,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "RANK": 0,
        "WORLD_SIZE": 1,
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
    }.items():
        monkeypatch.setenv(name, str(value))
    model = torch.nn.Linear(2, 2)
    given: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "load_state_dict": lambda state: None,
    }
    exec(blocks("python")["docs/torchft.md 1"], given)
    assert isinstance(given["manager"]._checkpoint_transport, MemoryCheckpointTransport)
    given["manager"].shutdown(wait=False)
    lighthouse.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("near", "is_async"),
    [
        pytest.param(True, True, id="file", marks=pytest.mark.variant),
        pytest.param(False, True, id="channel"),
        pytest.param(True, False, id="synchronous quorum", marks=pytest.mark.variant),
    ],
)
def test_a_replica_that_is_killed_heals_and_is_equal_to_the_survivor_to_the_bit(
    memory_root: Path, tmp_path: Path, near: bool, is_async: bool
) -> None:
    from torchft._torchft import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=1000
    )
    notes = {life: Notes(tmp_path, *life) for life in ((0, 0), (1, 0), (1, 1))}

    def life(stack: ExitStack, replica: int, number: int) -> Forks[None]:
        place = (lighthouse.address(), str(tmp_path), str(memory_root))
        return stack.enter_context(forking(train, None, *place, replica, number, near, is_async))

    def reaches(key: tuple[int, int], step: int, what: str) -> None:
        wait_until(lambda: any(note["step"] >= step for note in notes[key].all()), what, 120)

    try:
        with ExitStack() as stack:
            survivor, victim = life(stack, 0, 0), life(stack, 1, 0)
            reaches((0, 0), 1, "the survivor trains")  # the victim may have begun by itself
            reaches((1, 0), 5, "the replicas train together")
            victim.kill()
            killed_at = notes[0, 0].all()[-1]["step"]
            reaches((0, 0), killed_at + 4, "the survivor goes on alone")
            healed = life(stack, 1, 1)
            reaches((1, 1), killed_at + 4, "the replica has healed")
            last = notes[1, 1].all()[-1]["step"] + 8
            end_at(tmp_path, last)
            survivor.join(120)
            healed.join(60)
    finally:
        lighthouse.shutdown()
    by_step = {note["step"]: note for note in notes[0, 0].all()}
    after = notes[1, 1].all()
    assert [note["step"] for note in after] == list(range(after[0]["step"], last + 1))
    assert after[-1]["received"] == 1
    # At the beginning one of the two has healed from the other, and now the second one from it.
    assert by_step[last]["sent"] + by_step[last]["received"] == 2
    assert by_step[last]["sent"] >= 1
    assert by_step[last]["participants"] == 2
    for note in after:
        assert note["digest"] == by_step[note["step"]]["digest"], note["step"]
    assert os.listdir(memory_root) == []
