"""Copies from devices, with a device that is played: what CUDA does but for its own calls."""

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem import MemoryStorageReader
from dcp_mem.loading import device_reads, plan
from dcp_mem.memory import cuda_batches, device_copies
from dcp_mem.memory.copying import Columns, Move, moves_of
from dcp_mem.memory.device_copies import DeviceCopies
from dcp_mem.planning import plain_tensors
from dcp_mem.planning.plain_tensors import HOST
from dcp_mem.runtime.frozen import _total
from dcp_mem.saving import overlap as overlap_module
from dcp_mem.saving import stage
from dcp_mem.saving.overlap import StagingCopies
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.roundtrip import Places, assert_same

_ON_DEVICE = torch.float64
"""Tensors of this dtype pass for tensors on a device."""


class _Played:
    """A device's stream: copies are made once `run` is called, in order, in a thread of its own."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.log: list[str] = []
        self.filled: list[int] = []
        self.fails: Exception | None = None
        self._begun: list[_PlayedCopies] = []

    def to_host(self, targets: Columns, sources: Sequence[torch.Tensor]) -> "_PlayedCopies":
        if self.fails is not None:
            raise self.fails
        self.log.append(f"enqueue {len(sources)}")
        # A device knows addresses: it keeps nothing alive.
        moves = [
            (target, source.data_ptr(), source.nbytes)
            for target, source in zip(targets.tolist(), sources, strict=True)
        ]
        return _PlayedCopies(self, moves, self.log)

    def to_device(self, targets: Columns, sources: Columns, nbytes: Columns) -> "_PlayedCopies":
        self.filled.append(int(nbytes.sum()))
        self._begun.append(_PlayedCopies(self, moves_of(targets, sources, nbytes), []))
        return self._begun[-1]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        for one in list(self._begun):
            one.wait()


class _PlayedCopies:
    def __init__(self, stream: _Played, moves: Sequence[Move], log: list[str]) -> None:
        self._log = log

        def run() -> None:
            assert stream.may_run.wait(60)
            for move in moves:
                ctypes.memmove(*move)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        self._log.append("waited")

    def hold_device(self) -> None:
        self._log.append("hold")


def _is_there(tensor: torch.Tensor) -> bool:
    return tensor.dtype is _ON_DEVICE


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Played]:
    played = _Played()
    monkeypatch.setattr(plain_tensors, "_IS_CPU", lambda one: not _is_there(one))
    monkeypatch.setattr(plain_tensors, "_IS_CUDA", _is_there)
    monkeypatch.setattr(plain_tensors, "_DEVICE", lambda one: 0 if _is_there(one) else HOST)
    monkeypatch.setattr(plan, "may_copy_to_device", lambda: True)
    for module in (stage, device_copies, device_reads):
        monkeypatch.setattr(module, "copy_stream", lambda device: played)
    yield played
    played.may_run.set()


def _on_device(fill: float) -> torch.Tensor:
    return torch.full((40, 30), float(fill), dtype=_ON_DEVICE)


def test_a_plain_tensor_has_no_stream() -> None:
    assert device_copies.copy_stream(torch.device("cpu")) is None


def test_a_save_enqueues_once_and_waits(places: Places, stream: _Played) -> None:
    state = {"a": _on_device(1), "b": _on_device(2), "empty": _on_device(0)[:0]}
    state |= {"host": torch.arange(5.0)}
    stream.may_run.set()
    with places.writer(persist=False) as writer:
        for step in range(2):
            state["a"].fill_(step)
            dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
            assert torch.equal(_loaded(places, f"{step}", state)["a"], state["a"])
    assert stream.log == ["enqueue 2", "waited"] * 2


def test_tensors_that_are_not_contiguous_are_enqueued_together_as_well(
    places: Places, stream: _Played
) -> None:
    state = {"a": _on_device(1).t(), "b": _on_device(2).t(), "host": torch.arange(5.0)}
    stream.may_run.set()
    with places.writer(persist=False) as writer:
        for step in range(2):
            dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
            assert_same(state, _loaded(places, f"{step}", state))
    assert stream.log == ["enqueue 2", "waited"] * 2


def test_what_is_made_contiguous_is_copied_before_there_is_much_of_it(
    places: Places, stream: _Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_BATCH", 3 * _on_device(0).nbytes)
    state = {f"t{number}": _on_device(number).t() for number in range(7)}
    stream.may_run.set()
    with places.writer(persist=False) as writer:
        for step in range(2):
            stream.log.clear()
            saving: Any = dcp.async_save(state, checkpoint_id=f"{step}", storage_writer=writer)
            saving.result(60)
            assert_same(state, _loaded(places, f"{step}", state))
    batches = ["enqueue 3", "waited"] * 2
    assert stream.log == [*batches, "enqueue 1", "hold", "waited"]


def test_a_batch_that_fails_gives_its_slot_back_once_the_device_has_copied(
    places: Places, stream: _Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(moves: Sequence[Move]) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(stage, "_BATCH", 3 * _on_device(0).nbytes)
    monkeypatch.setattr(stage, "_copy_moves", fail)
    stream.may_run.set()
    state = {f"t{number}": _on_device(number).t() for number in range(4)}
    with (
        places.writer(persist=False) as writer,
        pytest.raises(dcp.CheckpointException, match="no more memory"),
    ):
        dcp.save(state, checkpoint_id="0", storage_writer=writer)
    assert stream.log == ["enqueue 3", "waited"]


def test_an_asynchronous_save_holds_the_device_and_never_the_host(
    places: Places, stream: _Played
) -> None:
    state = {"a": _on_device(1), "b": _on_device(2), "host": torch.arange(5.0)}
    expected = {key: value.clone() for key, value in state.items()}
    with places.writer(persist=False) as writer:
        stream.may_run.set()
        dcp.save(state, checkpoint_id="0", storage_writer=writer)
        stream.log.clear()
        stream.may_run.clear()
        future: Any = dcp.async_save(state, checkpoint_id="1", storage_writer=writer)
        assert stream.log == ["enqueue 2", "hold"]
        assert not future.done()
        state["host"].fill_(-1)
        stream.may_run.set()
        future.result(60)
        assert_same(expected, _loaded(places, "1", state))


def test_overlapped_copies_hold_the_device_and_never_the_host(
    places: Places, stream: _Played
) -> None:
    parameter = torch.nn.Parameter(_on_device(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state: dict[str, Any] = {"parameter": parameter.detach(), "buffer": _on_device(2)}
    with places.writer(persist=False) as writer:
        stream.may_run.set()
        dcp.save(state, checkpoint_id="0", storage_writer=writer)
        stream.log.clear()
        stream.may_run.clear()
        future = dcp_mem.async_save(
            state, checkpoint_id="1", storage_writer=writer, overlap=optimizer
        )
        # The buffer's copy comes before whatever the device is told next.
        assert stream.log == ["enqueue 1", "enqueue 1", "hold"]
        assert not future.done()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # The host goes on, though nothing has been copied.
        assert stream.log[3:] == ["hold"]
        assert not future.done()
        stream.may_run.set()
        future.result(60)
        assert torch.equal(_loaded(places, "1", state)["parameter"], parameter)


def _watched(fill: float) -> "tuple[torch.Tensor, weakref.ref[Any]]":
    """Return a tensor, and what tells whether its memory is still there."""
    memory = np.full((40, 30), float(fill))
    return torch.from_numpy(memory), weakref.ref(memory)


def _left(parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
    state.clear()


def _moved(parameter: torch.nn.Parameter, state: dict[str, Any]) -> None:
    state.clear()
    parameter.data = _on_device(7)


@pytest.mark.parametrize("leave", [_left, _moved])
@pytest.mark.parametrize("is_overlapped", [True, False])
def test_what_a_device_is_still_to_copy_is_kept_though_nobody_else_holds_it(
    places: Places, stream: _Played, is_overlapped: bool, leave: Callable[..., None]
) -> None:
    memory, of_parameter = _watched(1)
    parameter = torch.nn.Parameter(memory)
    temporary, of_temporary = _watched(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state: dict[str, Any] = {"parameter": parameter.detach(), "temporary": temporary}
    expected = {key: value.clone() for key, value in state.items()}
    overlap: Any = {"overlap": optimizer} if is_overlapped else {}
    with places.writer(persist=False) as writer:
        stream.may_run.set()
        dcp.save(state, checkpoint_id="0", storage_writer=writer)
        stream.may_run.clear()
        future = dcp_mem.async_save(state, checkpoint_id="1", storage_writer=writer, **overlap)
        del memory, temporary
        leave(parameter, state)
        gc.collect()
        assert of_parameter() is not None
        assert of_temporary() is not None
        stream.may_run.set()
        future.result(60)
        del future
        gc.collect()
        assert of_temporary() is None
    assert_same(expected, _loaded(places, "1", expected))


def test_validation_finds_a_tensor_on_a_device_that_was_written_to_before_the_step(
    places: Places, stream: _Played
) -> None:
    parameter = torch.nn.Parameter(_on_device(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state: dict[str, Any] = {"parameter": parameter.detach()}
    overlap = dcp_mem.Overlap(optimizer, validate=True)
    with places.writer(persist=False) as writer:
        stream.may_run.set()
        dcp.save(state, checkpoint_id="0", storage_writer=writer)

        def save(name: str, breaks_the_rule: bool) -> Any:
            stream.may_run.clear()
            future = dcp_mem.async_save(
                state, checkpoint_id=name, storage_writer=writer, overlap=overlap
            )
            if breaks_the_rule:
                with torch.no_grad():
                    parameter.add_(1)
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            stream.may_run.set()
            return future

        save("1", breaks_the_rule=False).result(60)
        with pytest.raises(dcp.CheckpointException, match="changed between the save and"):
            save("2", breaks_the_rule=True).result(60)
        save("3", breaks_the_rule=False).result(60)
    assert not places.directory("memory", "2").exists()
    assert places.directory("memory", "3").exists()


def test_a_device_that_fails_leaves_the_slot_to_nobody_before_others_have_copied() -> None:
    played = _Played()
    copies = DeviceCopies()
    target, source = torch.zeros(3), torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "copy_stream", lambda device: played)
        copies.begin(np.array([target.data_ptr()]), [source])
        assert copies.enqueued
        played.fails = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.begin(np.array([target.data_ptr()]), [source])
    waiting = threading.Thread(target=copies.finish)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    played.may_run.set()
    waiting.join(60)
    assert torch.equal(target, source)
    assert not copies.enqueued


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), KeyboardInterrupt()])
def test_all_copies_are_waited_for_whatever_happens_meanwhile(error: BaseException) -> None:
    waits: list[str] = []

    class Copies:
        def __init__(self, name: str, errors: list[BaseException]) -> None:
            self._name, self._errors = name, errors

        def wait(self) -> None:
            waits.append(self._name)
            if self._errors:
                raise self._errors.pop()

        def hold_device(self) -> None:
            raise AssertionError

    copies = DeviceCopies()
    copies.enqueued = [Copies("first", []), Copies("second", [error])]
    with pytest.raises(type(error)):
        copies.finish()
    again = [] if isinstance(error, Exception) else ["second"]
    assert waits == ["second", *again, "first"]
    assert not copies.enqueued


@pytest.mark.parametrize("verify", [True, False])
def test_a_load_reads_into_one_window_while_the_device_empties_the_other(
    places: Places, stream: _Played, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    for size, nbytes in {
        "_MOST_WINDOW": 1 << 14,
        "_LEAST_WINDOW": 1 << 14,
        "_SHARE": 1 << 12,
    }.items():
        monkeypatch.setattr(device_reads, size, nbytes)
    state: dict[str, Any] = {
        f"t{number}": torch.rand(number * 37 % 500, dtype=_ON_DEVICE) for number in range(50)
    }
    state["large"] = torch.rand(1_000_000, dtype=_ON_DEVICE)
    state |= {"host": torch.arange(5.0), "empty": _on_device(0)[:0]}
    stream.may_run.set()
    with places.writer() as writer:
        dcp_mem.save(state, checkpoint_id="0", storage_writer=writer)
        writer.wait("0", timeout=60)
    stream.may_run.clear()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    with MemoryStorageReader(
        None, memory_root=places.memory, job=places.job, verify=verify
    ) as reader:
        loading = threading.Thread(
            target=dcp_mem.load, args=(into,), kwargs={"storage_reader": reader}
        )
        loading.start()
        loading.join(0.3)
        assert loading.is_alive()
        assert len(stream.filled) == 2  # each window is full, and the device hasn't taken either
        stream.may_run.set()
        loading.join(60)
    assert_same(state, into)
    device_nbytes = sum(one.nbytes for one in state.values() if one.dtype is _ON_DEVICE)
    assert sum(stream.filled) == device_nbytes
    assert len(stream.filled) > 3


def test_what_is_damaged_in_memory_comes_to_the_device_from_storage(
    places: Places, stream: _Played
) -> None:
    state = {"a": torch.rand(5000, dtype=_ON_DEVICE), "host": torch.arange(5.0)}
    stream.may_run.set()
    with places.writer() as writer:
        dcp_mem.save(state, checkpoint_id="0", storage_writer=writer)
        writer.wait("0", timeout=60)
    flip(next(places.directory("memory", "0").glob("*.distcp")), 20_000)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    with MemoryStorageReader(places.url, memory_root=places.memory, job=places.job) as reader:
        dcp_mem.load(into, storage_reader=reader)
        assert set(reader.report().sources) == {"storage"}
    assert_same(state, into)


class _Stream:
    """What the driver's calls need of torch's streams."""

    device = torch.device("cuda", 0)
    cuda_stream = 0
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class _Driver:
    """CUDA's driver, whose call for many copies answers with an error, or isn't there."""

    def __init__(self, error: int | None, attributes: dict[int, int]) -> None:
        self.asked = 0
        self._attributes = attributes
        if error is not None:
            self.cuMemcpyBatchAsync = self._answer(error)

    def _answer(self, error: int) -> Any:
        def call(*_: object) -> int:
            self.asked += 1
            return error

        return call

    def cuDeviceGet(self, handle: Any, device: int) -> int:  # noqa: N802
        handle._obj.value = device + 7
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:  # noqa: N802
        assert handle.value == 7
        value._obj.value = self._attributes[attribute]
        return 0


@pytest.mark.parametrize(
    ("error", "attributes", "is_pinned", "asked"),
    [
        (None, {88: 1, 91: 1}, True, 0),  # an older driver
        (801, {88: 0, 91: 1}, True, 1),  # it refuses
        (801, {88: 1, 91: 0}, False, 1),
        (0, {88: 1, 91: 0}, True, 0),  # WSL2: it takes addresses of registered memory otherwise
        (0, {88: 0, 91: 1}, False, 0),
    ],
)
def test_where_the_driver_does_not_copy_many_at_once_copies_are_enqueued_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int | None,
    attributes: dict[int, int],
    is_pinned: bool,
    asked: int,
) -> None:
    driver, stream = _Driver(error, attributes), _Stream()
    monkeypatch.setattr(cuda_batches, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_batches, "_refused", set())
    monkeypatch.setattr(cuda_batches, "_has_attribute", cuda_batches._has_attribute.__wrapped__)
    sources = [
        torch.arange(12.0).reshape(3, 4),
        torch.tensor(True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, dtype=torch.complex64),
    ]
    for _ in range(2):
        targets = [torch.zeros_like(one) for one in sources]
        addresses = np.array([one.data_ptr() for one in targets])
        cuda_batches.copy_to_host(addresses, sources, stream, is_pinned=is_pinned)  # type: ignore[arg-type]
        assert all(map(torch.equal, targets, sources))
    assert driver.asked == stream.waits == asked  # once, and then no more
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == asked


def test_the_drivers_call_is_given_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(0, {88: 0, 91: 1})
    monkeypatch.setattr(cuda_batches, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_batches, "_has_attribute", lambda device, attribute: True)
    sources = [torch.ones(3), torch.ones(5)]
    targets = torch.zeros(8)
    addresses = np.array([targets.data_ptr(), targets.data_ptr() + 12])
    cuda_batches.copy_to_host(addresses, sources, _Stream(), is_pinned=True)  # type: ignore[arg-type]
    assert driver.asked == 1
    assert not targets.any()  # nobody else has copied


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_windows_are_host_memory_whatever_the_default_device_and_whether_it_can_be_pinned(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device(device):
        memory = device_copies.host_memory(1000)
    assert memory.device == torch.device("cpu")
    assert memory.fill_(1).sum() == 1000
    assert memory.is_pinned() == torch.cuda.is_available()
    assert len(caplog.messages) == (not torch.cuda.is_available())


def _one_host_copy() -> StagingCopies:
    """Return the copy of one parameter, of two batches, which is to be made behind the loop."""
    parameter = torch.nn.Parameter(torch.ones(overlap_module._BATCH // 4 + 1))
    copies = StagingCopies(dcp_mem.Overlap(torch.optim.SGD([parameter])), are_left=True)
    target = np.zeros(parameter.nbytes, np.uint8)
    columns = np.array([[target.ctypes.data], [parameter.data_ptr()], [parameter.nbytes]])
    assert copies.take(*columns).tolist() == [False]
    copies._copies.read.append(target)  # type: ignore[arg-type]  # kept like what is read
    return copies


def test_an_interrupt_while_copies_are_given_back_leaves_none_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    may_go_on, copies = threading.Event(), _one_host_copy()

    def copy_here(*_: object) -> None:
        assert may_go_on.wait(60)
        done.append("host")

    class Copies:
        def wait(self) -> None:
            if not done:
                done.append("interrupted")
                threading.Timer(0.1, may_go_on.set).start()
                raise KeyboardInterrupt
            done.append("device")

        def hold_device(self) -> None:
            raise AssertionError

    monkeypatch.setattr(overlap_module, "copy_many_here", copy_here)
    copies.begin()
    while not copies._host.made.running():  # type: ignore[union-attr]
        time.sleep(0.001)
    copies._copies.enqueued.append(Copies())
    with pytest.raises(KeyboardInterrupt):
        copies.cancel(lambda: done.append("given back"))
    assert done == ["interrupted", "device", "host", "given back"]


def test_a_collection_in_the_copiers_own_thread_gives_back_only_once_it_has_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    is_given_back, copies = threading.Event(), _one_host_copy()

    def give_back() -> None:
        done.append("given back")
        is_given_back.set()

    def copy_here(destination: Any, source: Any, nbytes: Any) -> None:
        copies.cancel(give_back)
        done.append(f"copied {len(nbytes)}")

    monkeypatch.setattr(overlap_module, "copy_many_here", copy_here)
    copies.begin()
    assert is_given_back.wait(60)
    assert done == ["copied 1", "given back"]
    assert copies not in overlap_module._pending
    copies.cancel(lambda: done.append("once more"))  # from any other thread: at once
    assert done[-1] == "once more"


def test_many_small_payloads_are_read_in_shares_for_all_threads() -> None:
    units = [(start, start + 4) for start in range(0, 128 * 20_000, 128)]
    shares = device_reads._Shares.of(units)
    assert (shares.stop - shares.start).max() <= device_reads._SHARE
    assert [unit for share in shares.units for unit in share] == units
    assert shares.nbytes <= 1 << 23


def test_a_save_from_a_signal_handler_may_wait_for_the_same_copies() -> None:
    copies = DeviceCopies()

    class Copies:
        def __init__(self, interrupts: bool) -> None:
            self._interrupts = interrupts

        def wait(self) -> None:
            if self._interrupts:
                self._interrupts = False
                copies.finish()

        def hold_device(self) -> None:
            raise AssertionError

    copies.enqueued = [Copies(False), Copies(True)]
    copies.finish()
    assert not copies.enqueued


def _loaded(places: Places, name: str, state: dict[str, Any]) -> dict[str, Any]:
    into = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    dcp.load(into, checkpoint_id=name, storage_reader=places.reader("memory", name))
    return into


# -- frozen tensors on devices ---------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_a_flipped_bit_anywhere_changes_the_sum_by_which_a_frozen_tensor_is_known(
    dtype: torch.dtype, count: int
) -> None:
    tensor = torch.ones(count + 1).to(dtype)[1:]  # it doesn't begin at a whole word
    before, raw = _total(tensor), tensor.view(torch.uint8)
    for place in {0, len(raw) // 2, len(raw) - 1}:
        raw[place] ^= 1
        assert _total(tensor) != before
        raw[place] ^= 1
    assert _total(tensor) == before
    assert _total(torch.empty(0, 3)) == 0
