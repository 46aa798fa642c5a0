"""Copies from devices, with a device that is played: what CUDA does but for its own calls."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_mem
from dcp_mem.memory import device_copies
from dcp_mem.saving import overlap, stage
from tests.support.checkpoints.roundtrip import Places


class _Played:
    """A device's stream: copies are made once `run` is called, in order, in a thread of its own."""

    def __init__(self) -> None:
        self.may_run = threading.Event()
        self.log: list[str] = []

    def enqueue(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> "_PlayedCopies":
        self.log.append(f"enqueue {len(targets)}")
        return _PlayedCopies(self, targets, sources)


class _PlayedCopies:
    def __init__(
        self, stream: _Played, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        self._log = stream.log
        # A device knows addresses: it keeps nothing alive.
        sources_then = list(map(weakref.ref, sources))

        def run() -> None:
            assert stream.may_run.wait(60)
            for target, source_then in zip(targets, sources_then, strict=True):
                source = source_then()
                target.copy_(torch.full_like(target, -1) if source is None else source)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def hold_device(self) -> None:
        self._log.append("hold")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Played]:
    """Tensors that aren't contiguous pass for tensors on a device."""
    played = _Played()
    for module in (stage, overlap):
        monkeypatch.setattr(module, "copy_stream", lambda device: played)
    yield played
    played.may_run.set()


def _on_device(fill: float) -> torch.Tensor:
    return torch.full((40, 30), float(fill)).t()


def test_a_plain_tensor_has_no_stream() -> None:
    assert device_copies.copy_stream(torch.device("cpu")) is None


def test_a_save_enqueues_once_and_waits(places: Places, stream: _Played) -> None:
    state = {"a": _on_device(1), "b": _on_device(2), "host": torch.arange(5.0)}
    stream.may_run.set()
    with places.writer(persist=False) as writer:
        for step in range(2):
            state["a"].fill_(step)
            dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer)
            assert torch.equal(_loaded(places, f"{step}", state)["a"], state["a"])
    assert stream.log == ["enqueue 2"] * 2


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
        assert stream.log == ["enqueue 1", "hold", "enqueue 1"]
        assert not future.done()
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # The host goes on, though nothing has been copied.
        assert stream.log[3:] == ["hold", "hold"]
        assert not future.done()
        stream.may_run.set()
        future.result(60)
        assert torch.equal(_loaded(places, "1", state)["parameter"], parameter)


def test_what_a_device_is_still_to_copy_is_kept_though_nobody_else_holds_it(
    places: Places, stream: _Played
) -> None:
    parameter = torch.nn.Parameter(_on_device(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state: dict[str, Any] = {"parameter": parameter.detach(), "temporary": _on_device(2)}
    expected = {key: value.clone() for key, value in state.items()}
    with places.writer(persist=False) as writer:
        stream.may_run.set()
        dcp.save(state, checkpoint_id="0", storage_writer=writer)
        stream.may_run.clear()
        future = dcp_mem.async_save(
            state, checkpoint_id="1", storage_writer=writer, overlap=optimizer
        )
        state.clear()
        gc.collect()
        stream.may_run.set()
        future.result(60)
    loaded = _loaded(places, "1", expected)
    for key, value in expected.items():
        assert torch.equal(loaded[key], value), key


def _loaded(places: Places, name: str, state: dict[str, Any]) -> dict[str, Any]:
    into = {key: torch.zeros(value.shape) for key, value in state.items()}
    dcp.load(into, checkpoint_id=name, storage_reader=places.reader("memory", name))
    return into
