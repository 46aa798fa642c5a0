"""State on CUDA devices: copied straight into pinned slots, whole. Skipped without a device."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dcp_mem
from dcp_mem import MemoryStorageReader
from dcp_mem.common import faults
from dcp_mem.memory import pinning
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    bits,
    random_tensor,
)
from tests.support.processes.forks import killed_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or a torch without CUDA"
    ),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def places(memory_root: Path, tmp_path: Path) -> Places:
    torch.cuda.init()
    return Places(str(memory_root), str(tmp_path / "storage"))


def _on_cpu(state: State) -> State:
    return {
        key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _comes_back(places: Places, name: str, state: State, device: str) -> None:
    """Load on every road into tensors on a device; check that they stay there, bit for bit."""
    expected = _on_cpu(state)
    for road in ROADS:
        into: State = {
            key: torch.zeros(value.shape, dtype=value.dtype, device=device)
            for key, value in state.items()
        }
        targets = dict(into)
        places.load(road, name, into)
        for key, target in targets.items():
            assert into[key] is target, (road, key)
            assert bits(target.cpu()) == bits(expected[key]), (road, key)


def _registered(places: Places) -> list[tuple[str, int]]:
    """List (file, bytes) of every slot mapping that CUDA has pinned, by the kernel's account."""
    pinned = dict(pinning._pinned)
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*?(/\S+)", line)
        if match is not None and match[3].startswith(places.memory):
            start = int(match[1], 16)
            if start in pinned:
                found.append((match[3], pinned[start]))
    return found


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.int64,
    torch.float64,
]


def test_tensors_on_a_device_survive_in_every_dtype(places: Places) -> None:
    state = {str(dtype): random_tensor(dtype, 65, 33).cuda() for dtype in DTYPES}
    state |= {"scalar": torch.tensor(3.0).cuda(), "empty": torch.empty(0, 5).cuda()}
    with places.writer() as writer:
        for step in range(3):
            places.save(writer, state, f"{step}")
            _comes_back(places, f"{step}", state, "cuda")
        _comes_back(places, "2", state, "cpu")


def test_device_tensors_that_are_not_contiguous_survive(places: Places) -> None:
    base = torch.randn(6, 3, 16, 16, device="cuda")
    values = torch.randn(50, 40, dtype=torch.complex64, device="cuda")
    state = {
        "transposed": base.transpose(1, 3),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "strided": base[:, ::2, 1::3, 5:],
        "expanded": torch.arange(5.0, device="cuda").reshape(5, 1).expand(5, 700),
        "conj": values.conj(),
        "neg": values.conj().imag,
        "conj transposed": values.t().conj(),
    }
    with places.writer() as writer:
        places.save(writer, state, "step-1")
        _comes_back(places, "step-1", state, "cuda")


def test_device_and_host_tensors_in_one_state_survive(places: Places) -> None:
    state: State = {}
    for i in range(40):
        tensor = torch.randn(1000 + i)
        state[f"t{i}"] = tensor.cuda() if i % 3 else tensor
    state["large"] = torch.randn(20 << 20, device="cuda")
    with places.writer() as writer:
        places.save(writer, state, "step-1")
        _comes_back(places, "step-1", state, "cpu")


def test_the_slots_mapping_is_registered_as_pinned_memory_and_given_back(places: Places) -> None:
    state = {"a": torch.randn(1 << 20, device="cuda")}
    with places.writer(keep_memory=2) as writer:
        for step in range(5):
            dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
        segment = next(places.directory("memory", "4").glob("*.distcp"))
        registered = _registered(places)
        assert str(segment) in [file for file, _ in registered], (
            "the newest segment's mapping is not pinned"
        )
        assert all(nbytes >= 4 << 20 for _, nbytes in registered)
        assert len(registered) <= 3
    assert not _registered(places)
    assert not pinning._pinned


def test_prepared_slots_are_pinned_before_the_first_save(places: Places) -> None:
    state = {"a": torch.randn(1 << 20, device="cuda")}
    with places.writer(keep_memory=2) as writer:
        writer.prepare(state).wait(60)
        assert len(_registered(places)) == 3
        places.save(writer, state, "step-1")
        assert len(_registered(places)) == 3
        _comes_back(places, "step-1", state, "cuda")


def _busy(device: str = "cuda") -> None:
    """Keep the current stream at work for some tens of milliseconds."""
    torch.cuda._sleep(50_000_000)


def test_a_save_waits_for_the_kernels_that_make_its_tensors(places: Places) -> None:
    with places.writer() as writer:
        for step in range(4):
            tensor = torch.zeros(1 << 20, device="cuda")
            _busy()
            tensor += step + 1
            dcp.save({"a": tensor}, checkpoint_id=f"{step}", storage_writer=writer)
            into = places.load("memory", f"{step}", {"a": torch.zeros(1 << 20)})
            assert_same({"a": torch.full((1 << 20,), step + 1.0)}, into)


class _CastsOnTheDevice(dcp.DefaultSavePlanner):
    """Launches work for every tensor as it is resolved."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        data = super().transform_object(write_item, object)
        if isinstance(data, torch.Tensor):
            _busy()
            data = data * 2
        return data


def test_a_planner_that_launches_work_for_each_tensor_is_waited_for(places: Places) -> None:
    state = {f"t{i}": torch.full((1 << 16,), float(i), device="cuda") for i in range(8)}
    with places.writer() as writer:
        places.save(writer, state, "step-1", planner=_CastsOnTheDevice())
        _comes_back(places, "step-1", {key: value * 2 for key, value in state.items()}, "cpu")


def test_the_values_at_the_time_of_the_save_are_what_loads(places: Places) -> None:
    tensor = torch.zeros(8 << 20, device="cuda")
    with places.writer() as writer:
        dcp.save({"a": tensor}, checkpoint_id="step-1", storage_writer=writer)
        tensor.fill_(9)
        writer.wait("step-1", timeout=60)
        _comes_back(places, "step-1", {"a": torch.zeros(8 << 20)}, "cpu")


@pytest.mark.parametrize("call", [dcp.async_save, dcp_mem.async_save])
def test_an_asynchronous_save_has_the_state_of_its_call_and_the_host_goes_on(
    places: Places, call: Callable[..., Any]
) -> None:
    state: State = {"large": torch.zeros(64 << 20, device="cuda"), "host": torch.zeros(9)}
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(4):
            _busy()
            saving = call(state, checkpoint_id=f"{step}", storage_writer=writer)
            is_over = saving.done()
            for tensor in state.values():
                tensor += 1
            saving.result(60)
            assert step == 0 or not is_over  # the device was still busy
            into: State = {key: torch.zeros(value.shape) for key, value in state.items()}
            places.load("memory", f"{step}", into)
            assert_same({key: torch.full_like(value, step) for key, value in into.items()}, into)


def test_an_overlapped_save_has_the_state_from_before_the_step_and_the_host_goes_on(
    places: Places,
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8 << 20, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    buffer = torch.zeros(1 << 20, device="cuda")
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(4):
            state = {"parameter": parameter.detach(), "buffer": buffer}
            _busy()
            saving = dcp_mem.async_save(
                state, checkpoint_id=f"{step}", storage_writer=writer, overlap=optimizer
            )
            buffer += 1
            parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            is_over = saving.done()
            saving.result(60)
            assert step == 0 or not is_over  # the device was still busy
            into: State = {"parameter": torch.zeros(8 << 20), "buffer": torch.zeros(1 << 20)}
            places.load("memory", f"{step}", into)
            expected = {key: torch.full_like(value, step) for key, value in into.items()}
            assert_same(expected, into)


def test_memory_that_is_given_up_after_an_overlapped_call_is_still_what_was_saved(
    places: Places,
) -> None:
    model = torch.nn.Linear(4000, 4000, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with places.writer(keep_memory=3, persist=False) as writer:
        for step in range(3):
            torch.nn.init.constant_(model.weight, step)
            weight = model.weight.detach()
            state: State = {"weight": weight, "temporary": torch.add(weight, 1)}
            _busy()
            saving = dcp_mem.async_save(
                state, checkpoint_id=f"{step}", storage_writer=writer, overlap=optimizer
            )
            del state, weight
            model.half()  # the parameter's memory is another one from here on
            taken = [torch.full((4000, 4000), -1.0, device="cuda") for _ in range(4)]
            model.float()
            saving.result(60)
            del taken
            into: State = {"weight": torch.zeros(4000, 4000), "temporary": torch.zeros(4000, 4000)}
            places.load("memory", f"{step}", into)
            expected = {
                "weight": torch.full((4000, 4000), float(step)),
                "temporary": torch.full((4000, 4000), step + 1.0),
            }
            assert_same(expected, into)


def test_validation_finds_what_is_written_to_before_the_step(places: Places) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    overlap = dcp_mem.Overlap(torch.optim.SGD([parameter], lr=1.0), validate=True)
    with places.writer(persist=False) as writer:
        for step in range(3):
            state = {"parameter": parameter.detach()}
            saving = dcp_mem.async_save(
                state, checkpoint_id=f"{step}", storage_writer=writer, overlap=overlap
            )
            if step < 2:
                saving.result(60)
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(dcp.CheckpointException, match="changed between the save and"):
            saving.result(60)


def _many(step: int) -> State:
    """A state as AdamW has it: small and large, and counters that stay on the host."""
    state: State = {}
    for number in range(3000):
        state[f"weight.{number}"] = torch.full((number % 700,), float(number + step), device="cuda")
        state[f"step.{number}"] = torch.tensor(float(step))
    state["large"] = torch.full((5_000_000,), float(step), device="cuda")
    return state


def _never(slot: Any) -> None:
    """Stand in for `pin` where CUDA can't register memory."""


@pytest.mark.parametrize(
    ("what", "stands_in"),
    [
        (None, None),
        ("dcp_mem.memory.cuda_batches._has_attribute", lambda *_: False),  # of WSL2, say
        ("dcp_mem.memory.cuda_batches._refused", {801}),
        ("dcp_mem.memory.pinning.pin", _never),
    ],
)
@pytest.mark.parametrize("save", [dcp.save, dcp_mem.save, dcp.async_save])
def test_thousands_of_tensors_survive_whatever_cuda_can_do(
    places: Places,
    save: Callable[..., Any],
    what: str | None,
    stands_in: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if what is not None:
        monkeypatch.setattr(what, stands_in)
    with places.writer(persist=False) as writer:
        for step in range(3):
            state = _many(step)
            expected = _on_cpu(state)
            saving = save(state, checkpoint_id=f"{step}", storage_writer=writer)
            for value in state.values():
                value.fill_(-1)
            if save is dcp.async_save:
                saving.result(60)
            into: State = {key: torch.zeros_like(value) for key, value in expected.items()}
            places.load("memory", f"{step}", into)
            assert_same(expected, into)


@pytest.mark.parametrize("is_copied_at_once", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_thousands_of_tensors_are_loaded_into_a_device(
    places: Places, verify: bool, is_copied_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_copied_at_once:
        monkeypatch.setattr("dcp_mem.memory.cuda_batches._refused", {801})
    state = _many(5)
    state["huge"] = torch.randn(40_000_000, device="cuda")  # of several windows
    with places.writer() as writer:
        dcp_mem.save(state, checkpoint_id="5", storage_writer=writer)
        writer.wait("5", timeout=60)
    into: State = {key: torch.full_like(value, -1) for key, value in state.items()}
    targets = dict(into)
    with MemoryStorageReader(
        None, memory_root=places.memory, job=places.job, verify=verify
    ) as reader:
        _busy()
        into["huge"].fill_(-2)  # under way when the load begins
        versions = {key: value._version for key, value in into.items() if value.is_cuda}
        with torch.device("cuda"):  # the windows are on the host all the same
            dcp.load(into, checkpoint_id="5", storage_reader=reader)
    assert_same(_on_cpu(state), _on_cpu(into))
    assert all(into[key]._version > version for key, version in versions.items())
    assert all(into[key] is target for key, target in targets.items())


def test_what_is_damaged_in_memory_comes_to_the_device_from_storage(places: Places) -> None:
    state = {"a": torch.randn(5000, 300, device="cuda")}
    with places.writer() as writer:
        dcp_mem.save(state, checkpoint_id="0", storage_writer=writer)
        writer.wait("0", timeout=60)
    flip(next(places.directory("memory", "0").glob("*.distcp")), 3_000_000)
    into: State = {"a": torch.zeros(5000, 300, device="cuda")}
    with MemoryStorageReader(places.url, memory_root=places.memory, job=places.job) as reader:
        dcp_mem.load(into, storage_reader=reader)
        assert set(reader.report().sources) == {"storage"}
    assert_same(_on_cpu(state), _on_cpu(into))


def test_threads_that_have_not_used_the_device_yet_can_save(places: Places) -> None:
    state = {"a": torch.zeros(1 << 20, device="cuda")}
    errors: list[BaseException] = []

    def save(writer: Any, step: int) -> None:
        try:
            state["a"].fill_(step)
            dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
        except BaseException as error:
            errors.append(error)

    with places.writer(persist=False) as writer:
        for step in range(3):
            thread = threading.Thread(target=save, args=(writer, step))
            thread.start()
            thread.join(60)
            assert not errors
            into = places.load("memory", f"{step}", {"a": torch.zeros(1 << 20)})
            assert_same({"a": torch.full((1 << 20,), float(step))}, into)


_CALLS: dict[str, Callable[..., Any]] = {
    "dcp.save": dcp.save,
    "dcp.async_save": dcp.async_save,
    "overlapped": dcp_mem.async_save,
}


def _save_until_killed(places: Places, call: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(32 << 20, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    options: dict[str, Any] = {"overlap": optimizer} if call == "overlapped" else {}
    writer = places.writer(keep_memory=2, persist=False)
    for step in range(9):
        parameter.data.fill_(step)
        state = {"parameter": parameter.detach(), "step": step}
        if step == 4:
            faults.arm("devices.enqueued:kill:1")
        saving: Any = _CALLS[call](state, checkpoint_id=f"{step}", storage_writer=writer, **options)
        if call != "dcp.save":
            saving.result(60)


@pytest.mark.parametrize("call", _CALLS)
def test_a_kill_while_the_device_copies_leaves_the_checkpoint_before(
    places: Places, call: str
) -> None:
    killed_ranks(_save_until_killed, None, places, call)
    into: State = {"parameter": torch.zeros(32 << 20), "step": -1}
    with MemoryStorageReader(None, memory_root=places.memory, job=places.job) as reader:
        dcp_mem.load(into, storage_reader=reader)  # the newest whole one
    assert into["step"] == 3
    assert_same({"parameter": torch.full((32 << 20,), 3.0)}, {"parameter": into["parameter"]})


def test_a_model_and_its_optimizer_on_a_device_survive(places: Places) -> None:
    model = torch.nn.Linear(300, 70).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300, device="cuda")).sum().backward()
    optimizer.step()
    state = get_state_dict(model, optimizer)
    saved = {"model": state[0], "optimizer": state[1]}
    expected = [bits(parameter.cpu()) for parameter in model.parameters()]
    with places.writer() as writer:
        places.save(writer, saved, "step-1")
        for road in ROADS:
            fresh = torch.nn.Linear(300, 70).cuda()
            its = torch.optim.AdamW(fresh.parameters())
            model_state, optimizer_state = get_state_dict(fresh, its)
            into: State = {"model": model_state, "optimizer": optimizer_state}
            places.load(road, "step-1", into)
            set_state_dict(
                fresh, its, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
            )
            assert [bits(parameter.cpu()) for parameter in fresh.parameters()] == expected, road


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_on_several_devices_survive(places: Places) -> None:
    state = {
        f"t{i}": torch.randn(5000, device=f"cuda:{i % torch.cuda.device_count()}") for i in range(8)
    }
    with places.writer() as writer:
        places.save(writer, state, "step-1")
        _comes_back(places, "step-1", state, "cpu")
