"""Any state dict comes back to the bit, on every road: our reader and torch's, both places."""

import contextlib
import functools
import glob
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from dcp_mem import DcpMemError, RankFailed
from tests.support.checkpoints import roundtrip
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.plans import SAVES, TorchPlanner, save_by_torch
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    bits,
    blank_of,
    comes_back,
    random_tensor,
)
from tests.support.processes.forks import raised_by

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
)


def survives(places: Places, state: State, **options: Any) -> None:
    """Survive two saves: one that dcp_mem plans, and one that torch plans."""
    roundtrip.survives(places, state, **options)
    if "save_planner" not in options:
        options = {"roads": ROADS[::3], **options, "save_planner": TorchPlanner}
        roundtrip.survives(places, state, **options)


# -- dtypes ----------------------------------------------------------------------------------------

ALL_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


UNPLANNABLE = {
    dtype for dtype in ALL_DTYPES if re.fullmatch(r"torch\.(u?int[1-7]|bits.*)", str(dtype))
}
"""torch's own planner fails over them: it knows no size of their elements."""
DENSE = [dtype for dtype in ALL_DTYPES if dtype not in QUANTISED | UNPLANNABLE]


def test_every_dense_dtype_survives(places: Places) -> None:
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.bool, torch.uint64} <= set(
        DENSE
    )
    state = {}
    for seed, dtype in enumerate(DENSE):
        state[f"{dtype} matrix"] = random_tensor(dtype, 5, 7, seed=seed)
        state[f"{dtype} scalar"] = random_tensor(dtype, seed=seed)
        state[f"{dtype} empty"] = random_tensor(dtype, 3, 0)
        state[f"{dtype} transposed"] = random_tensor(dtype, 5, 7, seed=seed).t()
        state[f"{dtype} every other"] = random_tensor(dtype, 5, 8, seed=seed)[:, 1::2]
    survives(places, state)


@pytest.mark.parametrize("dtype", sorted(UNPLANNABLE, key=str)[::9], ids=str)
def test_a_dtype_that_torch_cannot_plan_fails_there_and_harms_nothing(
    places: Places, dtype: torch.dtype
) -> None:
    good = {"a": torch.arange(4.0)}
    with places.writer(keep_memory=9) as writer:
        places.save(writer, good, "good")
        bad = {"a": random_tensor(torch.int32, 4).view(torch.uint8).view(dtype)}
        for number, save in enumerate(SAVES.values()):
            error = raised_by(
                functools.partial(save, bad, checkpoint_id="bad", storage_writer=writer)
            )
            assert "iinfo" in str(error) if error else save is not save_by_torch
            if not error:  # dcp_mem asks for no number of bits
                comes_back(places, "bad", bad, roads=("memory",))
            comes_back(places, "good", good)
            places.save(writer, good, f"after-{number}")
            comes_back(places, f"after-{number}", good)


def test_nan_payloads_and_negative_zeros_survive(places: Places) -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, -0x3FFFFF, -(2**31), 1, 0], dtype=torch.int32)
    survives(
        places,
        {"contiguous": patterns.view(torch.float32), "strided": patterns.view(torch.float32)[::2]},
    )


def test_quantised_tensors_survive_by_the_slow_road(places: Places) -> None:
    values = torch.randn(6, 8)
    state = {
        "per tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        "signed": torch.quantize_per_tensor(values, 0.05, 0, torch.qint8),
        "wide": torch.quantize_per_tensor(values, 0.05, 0, torch.qint32),
        "between": torch.arange(10.0),
    }

    def blank() -> State:
        zeros = torch.zeros(6, 8)
        return {
            "per tensor": torch.quantize_per_tensor(zeros, 0.1, 3, torch.quint8),
            "signed": torch.quantize_per_tensor(zeros, 0.05, 0, torch.qint8),
            "wide": torch.quantize_per_tensor(zeros, 0.05, 0, torch.qint32),
            "between": torch.zeros(10),
        }

    survives(places, state, blank=blank)


def test_sparse_tensors_survive_by_the_slow_road(places: Places) -> None:
    dense = torch.zeros(8, 9)
    dense[1, 2], dense[7, 8] = 3.5, -1.0
    coo = dense.to_sparse_coo().coalesce()
    state = {
        "dense": torch.arange(3.0),
        "coo": coo,
        "csr": dense.to_sparse_csr(),
        "more": torch.arange(5),
    }
    if torch.__version__ >= "2.15":
        del state["csr"]  # torch's planner asks it for strides, which it doesn't have

    def blank() -> State:
        csr = (dense * 2).to_sparse_csr()  # torch copies compressed ones only onto as many elements
        blanks = {"coo": (dense * 0).to_sparse_coo(), "csr": csr}
        return {name: blanks.get(name, value) for name, value in blank_of(state).items()}

    # Only our roads: torch's own writer and reader can't do sparse tensors.
    survives(places, state, blank=blank, roads=ROADS[:2])


# -- shapes and memory -----------------------------------------------------------------------------


def test_scalars_and_empty_tensors_survive(places: Places) -> None:
    survives(
        places,
        {
            "scalar": torch.tensor(2.5),
            "one": torch.tensor([7]),
            "nothing": torch.empty(0),
            "no rows": torch.empty(0, 4, dtype=torch.int64),
            "no columns": torch.empty(4, 0, 2, dtype=torch.bool),
        },
    )


@pytest.mark.parametrize(
    "state", [{}, {"a": torch.empty(0)}, {"a": {}}, {"a": 1}], ids=["none", "empty", "dict", "int"]
)
def test_a_state_without_any_payload_survives(places: Places, state: State) -> None:
    survives(places, state)


def test_tensors_that_are_not_contiguous_survive(places: Places) -> None:
    base = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).reshape(2, 3, 8, 8)
    survives(
        places,
        {
            "transposed": base.transpose(1, 3),
            "channels last": base.contiguous(memory_format=torch.channels_last),
            "channels last 3d": base.unsqueeze(0).contiguous(memory_format=torch.channels_last_3d),
            "strided": base[:, ::2, 1::3, 5:],
            "column": base.reshape(-1, 8)[:, 3],
            "expanded": torch.arange(5.0).reshape(5, 1).expand(5, 7),
            "expanded scalar": torch.tensor(4).expand(3, 3),
            "overlapping": torch.arange(20.0).as_strided((6, 5), (2, 1)),
            "flipped": base.flip(0),
        },
    )


def test_values_go_into_targets_that_are_not_contiguous(places: Places) -> None:
    state = {
        "a": torch.randn(4, 6, 5, 5),
        "b": torch.randn(9),
        "c": torch.randn(3, 3, dtype=torch.complex64),
    }

    def blank() -> State:
        return {
            "a": torch.zeros(4, 6, 5, 5).contiguous(memory_format=torch.channels_last),
            "b": torch.zeros(18)[::2],
            "c": torch.zeros(3, 3, dtype=torch.complex64).conj(),
        }

    survives(places, state, blank=blank)


def test_values_are_cast_to_the_dtype_of_the_target_as_torch_does(places: Places) -> None:
    saved = {"a": torch.randn(5, 5), "b": torch.arange(6), "c": torch.randn(4, 4).t()}
    expected = {"a": saved["a"].bfloat16(), "b": saved["b"].double(), "c": saved["c"].half()}
    with places.writer() as writer:
        places.save(writer, saved, "step-1")
        comes_back(places, "step-1", expected)


def test_conjugate_and_negative_views_survive(places: Places) -> None:
    values = torch.randn(4, 5, dtype=torch.complex64)
    conjugate, negative = values.conj(), values.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    state = {"conj": conjugate, "neg": negative, "both transposed": conjugate.t()}
    survives(places, state, roads=ROADS[:2])
    # torch.load(weights_only=True) can read neither; so a stock reader is shown plain values.
    survives(Places(places.memory, places.url, "other"), state, roads=ROADS[2:])


def test_tensors_that_share_a_storage_survive_each_with_its_own_values(places: Places) -> None:
    base = torch.arange(100.0)
    survives(
        places,
        {
            "base": base,
            "head": base[:10],
            "tail": base[90:],
            "middle": base[40:60].view(4, 5),
            "again": base,
            "one of many": base[50],
        },
    )


def test_only_the_elements_of_a_view_are_saved_and_not_its_whole_storage(places: Places) -> None:
    base = torch.zeros(4 << 20, dtype=torch.uint8)
    views = {"view": base[:16], "of a subclass": base[:16].as_subclass(_Tagged), "last": base[-1]}
    with places.writer() as writer:
        places.save(writer, views, "step-1")
        assert writer.status()[0].nbytes < 8192


def test_parameters_survive_with_and_without_gradients(places: Places) -> None:
    state = {
        "parameter": nn.Parameter(torch.randn(3, 4)),
        "frozen": nn.Parameter(torch.randn(3, 4), requires_grad=False),
        "strided": nn.Parameter(torch.randn(4, 6)[:, ::2]),
        "leaf": torch.randn(2, requires_grad=True),
        "result": torch.randn(2, requires_grad=True) * 2,
        "buffer": torch.randn(3),
    }
    survives(places, state)


def test_loading_into_parameters_keeps_them_parameters_that_need_gradients(places: Places) -> None:
    saved = {"weight": nn.Parameter(torch.randn(3, 4))}
    with places.writer() as writer:
        places.save(writer, saved, "step-1")
        for road in ROADS:
            target = nn.Parameter(torch.zeros(3, 4))
            loaded = places.load(road, "step-1", {"weight": target})
            assert loaded["weight"] is target
            assert target.requires_grad
            assert bits(target) == bits(saved["weight"])


class _Tagged(torch.Tensor):
    """A subclass over a plain storage."""


def test_tensor_subclasses_survive(places: Places) -> None:
    state = {
        "tagged": torch.arange(12.0).reshape(3, 4).as_subclass(_Tagged),
        "plain": torch.arange(3),
    }
    survives(
        places,
        state,
        blank=lambda: blank_of(state),
        context=lambda: torch.serialization.safe_globals([_Tagged, set]),
    )


def test_many_small_tensors_survive(places: Places) -> None:
    survives(places, {f"layer.{i}": torch.full((i % 7, 3), float(i)) for i in range(1500)})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_over_4_gib_survives(places: Places) -> None:
    nbytes = (4 << 30) + 4096 + 3
    # Only pages that are written take memory.
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    marks = [0, 1, (2 << 30) - 1, 2 << 30, (4 << 30) - 1, 4 << 30, nbytes - 1]
    for value, position in enumerate(marks, start=1):
        tensor[position] = value
    with places.writer(keep_memory=1, memory_limit="5GiB", persist=False) as writer:
        dcp.save({"big": tensor, "step": 7}, checkpoint_id="step-1", storage_writer=writer)
        del tensor
    big = places.load("memory", "step-1", {"big": torch.empty(nbytes, dtype=torch.uint8)})["big"]
    assert big.count_nonzero() == len(marks)
    assert [int(big[position]) for position in marks] == list(range(1, len(marks) + 1))
    del big
    assert places.load("stock from memory", "step-1", {"step": 0}) == {"step": 7}
    # What torch's reader would make of the tensor, less its copies of it.
    segment = next(Path(places.memory).rglob("*.distcp"))
    info = _storage_info(places, "step-1", "big")
    assert info.offset == 0
    os.truncate(segment, info.length)
    mapped = torch.load(segment, mmap=True, weights_only=True)
    assert (mapped.dtype, mapped.shape) == (torch.uint8, (nbytes,))
    assert [int(mapped[position]) for position in marks] == list(range(1, len(marks) + 1))


def _storage_info(places: Places, name: str, fqn: str) -> Any:
    metadata = dcp.FileSystemReader(places.shown(name)).read_metadata()
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


# -- parts of tensors ------------------------------------------------------------------------------

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, lengths) of a part of a tensor."""


class _Boxes(dcp.DefaultLoadPlanner):
    """Asks for boxes of tensors, as a planner does for the shards of another world size."""

    def __init__(self, boxes: dict[str, list[Box]], targets: dict[str, list[torch.Tensor]]) -> None:
        super().__init__()
        self._boxes, self._targets = boxes, targets

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for fqn, boxes in self._boxes.items():
            known = self.metadata.state_dict_metadata[fqn]
            assert isinstance(known, TensorStorageMetadata)
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
                for offsets, lengths in boxes
            ]
            items += create_read_items_for_chunk_list(fqn, known, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        target: torch.Tensor = self._targets[index.fqn][index.index]
        return target


@st.composite
def _tensors_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes: list[Box] = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        lengths = tuple(
            draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
        )
        boxes.append((offsets, lengths))
    return shape, boxes


@pytest.fixture
def kept_writer(places: Places) -> Iterator[Any]:
    """A writer that all examples of a test share, as a training run would."""
    with places.writer() as writer:
        yield writer


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    _tensors_and_boxes(),
    st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.complex128]),
)
def test_any_box_of_a_tensor_loads_as_that_slice(
    places: Places, kept_writer: Any, drawn: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype
) -> None:
    shape, boxes = drawn
    whole = random_tensor(dtype, *shape, seed=math.prod(shape))
    places.save(kept_writer, {"a": whole}, "boxes")
    for road in ROADS:
        targets = {"a": [torch.zeros(lengths, dtype=dtype) for _, lengths in boxes]}
        places.load(road, "boxes", {}, planner=_Boxes({"a": boxes}, targets))
        for (offsets, lengths), target in zip(boxes, targets["a"], strict=True):
            part = whole[
                tuple(
                    slice(start, start + length)
                    for start, length in zip(offsets, lengths, strict=True)
                )
            ]
            assert bits(part) == bits(target), (road, shape, offsets, lengths)


_DTYPES_DRAWN = [
    torch.float32,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
    torch.float16,
]
_VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t(),
    lambda tensor: tensor[:, ::2],
    lambda tensor: tensor[1:],
    lambda tensor: tensor[:, :1].expand(-1, 3),
    lambda tensor: tensor.unsqueeze(1),
    lambda tensor: tensor.reshape(-1)[:0],
    lambda tensor: (
        tensor.sum() if tensor.dtype is torch.float32 else tensor.reshape(-1)[:1].clone()
    ),
]
_DRAWN_TENSORS = st.builds(
    lambda dtype, rows, columns, view, seed: view(random_tensor(dtype, rows, columns, seed=seed)),
    st.sampled_from(_DTYPES_DRAWN),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(_VIEWS),
    st.integers(0, 99),
)
_DRAWN_OBJECTS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=9), st.binary(max_size=2000)
)
_DRAWN_STATES = st.dictionaries(
    st.text("abcde.", min_size=1, max_size=4),
    st.recursive(
        st.one_of(_DRAWN_TENSORS, _DRAWN_OBJECTS),
        lambda inner: st.one_of(
            st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
        ),
        max_leaves=6,
    ),
    max_size=5,
)


def _paths(value: Any, path: str = "") -> Iterator[str]:
    """The names that flattening gives to the leaves."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if inner is None:
        yield path
        return
    for key, each in inner:
        yield from _paths(each, f"{path}.{key}" if path else str(key))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_DRAWN_STATES, st.booleans())
def test_any_state_survives_whatever_the_same_writer_saved_before(
    places: Places, kept_writer: Any, state: State, flatten: bool
) -> None:
    paths = list(_paths(state))
    if len(set(paths)) < len(paths):
        return  # torch flattens {"a.b": …, "a": {"b": …}} onto one name
    places.save(
        kept_writer, state, "drawn", planner=dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    )
    comes_back(
        places,
        "drawn",
        state,
        load_planner=dcp.DefaultLoadPlanner if flatten else _unflattening_load_planner,
    )


# -- objects ---------------------------------------------------------------------------------------


@dataclass
class _Progress:
    step: int
    losses: list[float]


def test_objects_of_any_kind_and_size_survive(places: Places) -> None:
    survives(
        places,
        {
            "none": None,
            "flag": True,
            "step": 12345678901234567890,
            "name": "prob\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}",
            "nothing": b"",
            "bytes": os.urandom(100_001),
            "large": os.urandom(50 << 20),
            "object": _Progress(3, [0.5, 0.25]),
            "numpy scalar": np.float32(1.5),
            "set": {1, 2, 3},
            "range": range(9),
            "tensor after": torch.arange(4),
        },
    )


def test_objects_that_grow_and_shrink_between_saves_survive(places: Places) -> None:
    with places.writer() as writer:
        for step, nbytes in enumerate([10, 3 << 20, 10, 0, 1 << 20, 6 << 20, 64, 64]):
            state = {
                "weight": torch.full((100,), float(step)),
                "log": os.urandom(nbytes),
                "step": step,
                "more": os.urandom(nbytes // 3),
            }
            places.save(writer, state, f"step-{step}")
            comes_back(places, f"step-{step}", state)


def test_nested_containers_survive(places: Places) -> None:
    state = {
        "model": {
            "layers": [
                {"w": torch.randn(2), "b": torch.randn(3)},
                {"w": torch.randn(4), "name": "last"},
            ]
        },
        "history": (1, 2.5, (torch.arange(3), "x")),
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "deep": {"a": {"b": {"c": {"d": torch.tensor(1)}}}},
    }
    survives(places, state)


def test_a_state_that_is_not_flattened_survives(places: Places) -> None:
    state = {
        "nested": {"w": torch.randn(5), "more": {"b": torch.randn(3), "n": 3}},
        "tensor": torch.randn(4),
        "list": [torch.randn(2), "text"],
    }
    survives(
        places,
        state,
        blank=lambda: {"nested": None, "tensor": torch.zeros(4), "list": None},
        save_planner=lambda: dcp.DefaultSavePlanner(flatten_state_dict=False),
        load_planner=_unflattening_load_planner,
    )


def test_keys_of_any_spelling_survive(places: Places) -> None:
    keys = ["a.b", "a", "with space", "sl/ash", "..", "ключ", "", "__0_0.distcp", "-" * 300]
    survives(places, {key: torch.full((3,), float(i)) for i, key in enumerate(keys)})


def _unflattening_load_planner() -> dcp.DefaultLoadPlanner:
    # Flattening sharded tensors copies the dict, and what torch then loads into the copy never
    # comes back.
    return dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


@dataclass
class _Application:
    """Stateful, as in torch's tutorial."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: State) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def _trained(steps: int, *, seed: int, amsgrad: bool = False) -> _Application:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), amsgrad=amsgrad)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _Application(model, optimizer)


def test_stateful_modules_and_optimizers_survive(places: Places) -> None:
    saved = _trained(3, seed=0, amsgrad=True)
    with places.writer() as writer:
        places.save(writer, {"app": saved, "step": 3}, "step-3")
        for road in ROADS:
            fresh = _trained(1, seed=1, amsgrad=True)
            loaded = places.load(road, "step-3", {"app": fresh, "step": 0})
            assert loaded["step"] == 3
            assert_same(saved.state_dict(), fresh.state_dict(), road)
            assert fresh.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]


def test_a_model_trains_on_from_a_checkpoint_as_if_it_had_never_stopped(places: Places) -> None:
    def train(app: _Application, steps: int) -> None:
        torch.manual_seed(99)
        for _ in range(steps):
            app.model(torch.randn(4, 6)).square().sum().backward()
            app.optimizer.step()
            app.optimizer.zero_grad()

    saved = _trained(3, seed=0)
    with places.writer() as writer:
        dcp.save({"app": saved}, checkpoint_id="step-3", storage_writer=writer)
        train(saved, 4)
        resumed = _trained(1, seed=5)
        places.load("memory", "step-3", {"app": resumed})
    train(resumed, 4)
    assert_same(saved.state_dict(), resumed.state_dict())


def test_model_and_optimizer_state_dicts_of_their_own_survive(places: Places) -> None:
    app = _trained(2, seed=0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(app.model),
        "optimizer": get_optimizer_state_dict(app.model, app.optimizer, options=options),
    }
    survives(places, state)


# -- one writer, over and over ---------------------------------------------------------------------


def test_the_values_at_the_time_of_the_save_are_what_loads(places: Places) -> None:
    tensor = torch.zeros(1000)
    with places.writer() as writer:
        dcp.save({"a": tensor}, checkpoint_id="step-1", storage_writer=writer)
        tensor.fill_(9)
        writer.wait("step-1", timeout=60)
        comes_back(places, "step-1", {"a": torch.zeros(1000)})


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, TorchPlanner])
def test_plans_that_change_from_save_to_save_survive(
    places: Places, planner: type[SavePlanner]
) -> None:
    plans: list[State] = [
        {"a": torch.randn(10), "b": torch.randn(3, 3)},
        {"a": torch.randn(10), "b": torch.randn(3, 3), "new group": torch.randn(7)},  # grows
        {"a": torch.randn(200_000), "b": torch.randn(3, 3)},  # another shape
        {"a": torch.randn(10)},  # shrinks
        {"a": torch.randn(10).double()},  # another dtype
        {"a": torch.arange(10.0).to_sparse()},  # no dense payload any more
        {"a": torch.randn(10)},  # and back
        {"b": torch.randn(10)},  # another name, same layout
        {"b": 3},  # an object
        {"a": {"b": torch.randn(10)}},  # nested ...
        {"a.b": torch.randn(10)},  # ... and not
        {},
        {"a": torch.randn(10), "b": torch.randn(3, 3)},
    ]
    with places.writer() as writer:
        for step, state in enumerate(plans):
            places.save(writer, state, f"step-{step}", planner=planner())
            sparse = any(
                isinstance(value, torch.Tensor) and value.is_sparse for value in state.values()
            )
            roads = ROADS[:2] if sparse else ROADS
            comes_back(
                places,
                f"step-{step}",
                state,
                blank=functools.partial(_blank_sparse, state),
                roads=roads,
            )


def _blank_sparse(state: State) -> State:
    return {
        key: (value * 0) if isinstance(value, torch.Tensor) and value.is_sparse else blank_of(value)
        for key, value in state.items()
    }


def test_slots_that_are_much_too_large_for_a_new_plan_are_cut_down(places: Places) -> None:
    with places.writer(keep_memory=1) as writer:
        for step in range(3):
            dcp.save(
                {"a": torch.full((100 << 20,), step, dtype=torch.uint8)},
                checkpoint_id=f"{step}",
                storage_writer=writer,
            )
        for step in range(3, 7):
            state = {"a": torch.full((100,), step, dtype=torch.uint8)}
            places.save(writer, state, f"{step}")
            comes_back(places, f"{step}", state)
        assert _allocated(Path(places.memory)) < 32 << 20


def test_two_models_saved_in_turn_by_one_writer_survive(places: Places) -> None:
    with places.writer(keep_memory=4) as writer:
        for step in range(3):
            one = {"layer.weight": torch.full((40,), float(step)), "step": step}
            # the same names, dtypes and shapes flattened, but another structure
            two = {"layer": {"weight": torch.full((40,), -float(step))}, "step": step}
            planner = TorchPlanner if step % 2 else dcp.DefaultSavePlanner
            places.save(writer, one, f"one-{step}", planner=planner())
            places.save(writer, two, f"two-{step}", planner=planner())
            comes_back(places, f"one-{step}", one)
            comes_back(places, f"two-{step}", two)
            assert _unflattened(places, f"one-{step}") == {"layer.weight", "step"}
            assert _unflattened(places, f"two-{step}") == {"layer", "step"}


def test_two_writers_of_one_job_in_turn_each_save_their_own_structure(places: Places) -> None:
    with places.writer(keep_memory=4) as first, places.writer(keep_memory=4) as second:
        for step in range(3):
            places.save(first, {"layer.weight": torch.full((40,), float(step))}, f"one-{step}")
            places.save(
                second, {"layer": {"weight": torch.full((40,), -float(step))}}, f"two-{step}"
            )
            assert _unflattened(places, f"one-{step}") == {"layer.weight"}
            assert _unflattened(places, f"two-{step}") == {"layer"}


def _unflattened(places: Places, name: str) -> set[str]:
    """Top-level keys that torch's own tool for whole checkpoints finds, the same on every road."""
    found = []
    for road in ROADS:
        state: State = {}
        reader = places.reader(road, name)
        reader.reset(None if road.startswith("stock") else name)
        _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        found.append(set(state))
    assert all(keys == found[0] for keys in found), found
    return found[0]


def test_hundreds_of_saves_leave_nothing_behind(places: Places) -> None:
    keep = 2
    with places.writer(keep_memory=keep) as writer:
        job = Path(places.memory, places.job)

        def save(step: int) -> None:
            state = {"a": torch.full((5000,), float(step)), "b": torch.randn(17), "step": step}
            road = save_by_torch if step % 3 == 0 else dcp.save
            road(state, checkpoint_id=f"step-{step}", storage_writer=writer)

        for step in range(20):
            save(step)
        writer.wait()
        descriptors, threads = _descriptors(), threading.active_count()
        for step in range(20, 320):
            save(step)
            # pathlib's glob raises where the agent removes a directory meanwhile.
            segments = glob.glob(f"{job}/*/*.distcp") + glob.glob(f"{job}/.slots/*.slot")
            assert len(segments) <= keep + 1
        writer.wait()
        wait_until(
            lambda: _descriptors() <= descriptors + 2, "what the last saves opened is closed"
        )
        assert threading.active_count() <= threads + 1
        left = [
            path.name for path in job.iterdir() if path.is_dir() and not path.name.startswith(".")
        ]
        assert len(left) <= keep, left
        assert len(list(job.rglob("*"))) < 40
        comes_back(places, "step-319", {"a": torch.full((5000,), 319.0)}, roads=ROADS[:3])


@pytest.mark.parametrize("keep", [1, 2])
def test_saving_under_one_name_over_and_over_takes_no_more_memory(
    places: Places, keep: int
) -> None:
    with places.writer(keep_memory=keep) as writer:
        job = Path(places.memory, places.job)
        for step in range(30):
            state = {"a": torch.full((5000,), float(step)), "step": step}
            road = save_by_torch if step % 3 == 0 else dcp.save
            road(state, checkpoint_id="latest", storage_writer=writer)
            assert len(list(job.glob("*/*.distcp"))) == 1
            # There is one more while a flush reads the replaced checkpoint.
            assert len(list(job.glob(".slots/*.slot"))) <= keep + 1
            comes_back(places, "latest", state, roads=("memory", "stock from memory"))
        writer.wait("latest", timeout=60)
        comes_back(places, "latest", state)


def test_nothing_is_left_in_memory_but_what_is_kept_when_a_writer_is_closed(places: Places) -> None:
    with places.writer(keep_memory=1) as writer:
        for step in range(4):
            dcp.save(
                {"a": torch.full((5000,), step)},
                checkpoint_id=f"step-{step}",
                storage_writer=writer,
            )
    job = Path(places.memory, places.job)
    assert [path.parent.name for path in job.glob("*/*.distcp")] == ["step-3"]
    assert not list(job.glob(".slots/*"))
    comes_back(places, "step-3", {"a": torch.full((5000,), 3)})


def test_a_writer_saves_on_after_it_was_closed(places: Places) -> None:
    writer = places.writer()
    for step in range(3):
        state = {"a": torch.full((50,), step)}
        with contextlib.closing(writer):
            places.save(writer, state, f"step-{step}")
        comes_back(places, f"step-{step}", state)


def test_an_error_in_a_tensor_of_the_state_names_it_and_leaves_the_writer_usable(
    places: Places,
) -> None:
    good = {"a": torch.arange(3.0)}
    with places.writer() as writer:
        places.save(writer, good, "good")
        with pytest.raises(dcp.CheckpointException, match="meta device") as failure:
            dcp.save(
                {"a": torch.empty(3, device="meta")}, checkpoint_id="bad", storage_writer=writer
            )
        assert isinstance(failure.value.failures[0][0], (DcpMemError, RankFailed))
        places.save(writer, good, "after")
        comes_back(places, "after", good)
        comes_back(places, "good", good)


def _allocated(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
