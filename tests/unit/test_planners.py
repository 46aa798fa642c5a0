"""Saves are right under every planner: torch's default with and without caching, and others."""

import inspect
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.plans import TorchPlanner
from tests.support.checkpoints.roundtrip import (
    ROADS,
    Places,
    State,
    assert_same,
    bits,
    blank_of,
    comes_back,
)

CACHING = "enable_plan_caching" in inspect.signature(dcp.DefaultSavePlanner).parameters
needs_caching = pytest.mark.skipif(not CACHING, reason=f"torch {torch.__version__} caches no plans")


@pytest.fixture(autouse=True)
def _no_plans_cached() -> Iterator[None]:
    """torch keeps cached plans in the class, for all planners of a process."""
    yield
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached") and isinstance(cache, dict):
            cache.clear()


def _caching_planner() -> dcp.DefaultSavePlanner:
    return TorchPlanner(enable_plan_caching=True)


def _metadata(places: Places, road: str, name: str) -> Metadata:
    directory = places.shown(name) if road.endswith("memory") else places.directory(road, name)
    return dcp.FileSystemReader(directory).read_metadata()


def _state(step: int) -> State:
    return {
        "w": torch.randn(30, 20) + step,
        "b": torch.randn(7),
        "step": step,
        "nested": {"n": torch.full((3,), step)},
    }


# -- planners that transform what they save --------------------------------------------------------


class _HalfUnplanned(dcp.DefaultSavePlanner):
    """Casts to half precision on the way, and leaves the plan at single precision."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return (
            data.half() if isinstance(data, torch.Tensor) and data.dtype is torch.float32 else data
        )


class _HalfPlanned(_HalfUnplanned):
    """The same with a plan that says so, as torch's documentation has it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype is torch.float32:
                item.tensor_data.properties.dtype = torch.float16
        return plan


@pytest.mark.parametrize("planner", [_HalfUnplanned, _HalfPlanned])
def test_a_planner_that_casts_saves_the_cast_values(
    places: Places, planner: type[dcp.DefaultSavePlanner]
) -> None:
    with places.writer() as writer:
        for step in range(3):
            state = _state(step)
            places.save(writer, state, f"step-{step}", planner=planner())
            cast = {**state, "w": state["w"].half(), "b": state["b"].half()}
            comes_back(places, f"step-{step}", cast)
            comes_back(
                places, f"step-{step}", {**cast, "w": cast["w"].float(), "b": cast["b"].float()}
            )


def test_a_casting_planner_and_the_default_one_in_turn_each_save_their_own(places: Places) -> None:
    with places.writer(keep_memory=3) as writer:
        for step in range(2):
            state = _state(step)
            for planner in (
                _HalfUnplanned(),
                TorchPlanner(),
                dcp.DefaultSavePlanner(),
                _HalfPlanned(),
                TorchPlanner(),
                dcp.DefaultSavePlanner(),
            ):
                places.save(writer, state, "latest", planner=planner)
                halved = isinstance(planner, _HalfUnplanned)
                expected = (
                    {**state, "w": state["w"].half(), "b": state["b"].half()} if halved else state
                )
                comes_back(places, "latest", expected)


def test_only_the_cast_bytes_are_kept(places: Places) -> None:
    with places.writer() as writer:
        dcp.save(
            {"w": torch.randn(1 << 20)},
            checkpoint_id="half",
            storage_writer=writer,
            planner=_HalfUnplanned(),
        )
        assert writer.status()[0].nbytes < (2 << 20) + 8192


class _Fickle(dcp.DefaultSavePlanner):
    """Hands out something else each time, under a plan that never changes."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self._transform = transform

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        data = super().transform_object(write_item, object)
        return data if write_item.type == WriteItemType.BYTE_IO else self._transform(data)


def test_a_planner_may_hand_out_other_dtypes_layouts_and_strides_each_time(places: Places) -> None:
    values = torch.randn(12, 10)
    as_expected: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor | None]] = [
        (lambda tensor: tensor, values),
        (lambda tensor: tensor.half(), values.half().float()),
        (lambda tensor: tensor.t().contiguous().t(), values),
        (lambda tensor: tensor.double(), values),
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint32).dequantize(), None),
        (lambda tensor: tensor.bfloat16(), values.bfloat16().float()),
        (lambda tensor: tensor.clone(), values),
        (lambda tensor: tensor, values),
    ]
    with places.writer() as writer:
        for step, (transform, expected) in enumerate(as_expected):
            if expected is None:
                expected = transform(values)
            places.save(writer, {"a": values, "step": step}, f"{step}", planner=_Fickle(transform))
            comes_back(places, f"{step}", {"a": expected, "step": step})


class _Reversed(dcp.DefaultSavePlanner):
    """Changes its own part after the global plan was made."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return super().finish_plan(replace(new_plan, items=list(reversed(new_plan.items))))


def test_a_planner_that_reorders_its_finished_plan_survives(places: Places) -> None:
    with places.writer() as writer:
        for step in range(3):
            state = _state(step)
            places.save(
                writer, state, f"{step}", planner=_Reversed() if step != 1 else TorchPlanner()
            )
            comes_back(places, f"{step}", state)


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, TorchPlanner])
def test_a_state_whose_keys_change_places_survives(
    places: Places, planner: type[SavePlanner]
) -> None:
    one, two = torch.randn(5), torch.randn(5)
    with places.writer() as writer:
        for step, state in enumerate(
            [{"a": one, "b": two}, {"b": one, "a": two}, {"a": two, "c": one}]
        ):
            places.save(writer, state, f"{step}", planner=planner())
            comes_back(places, f"{step}", state)


@pytest.mark.parametrize(
    ("resolved", "message"), [("text", "resolved .* to a str"), (None, "resolved .* to a NoneType")]
)
def test_a_planner_that_resolves_to_something_else_is_told_so(
    places: Places, resolved: Any, message: str
) -> None:
    state = {"a": torch.randn(3), "step": 1}
    with places.writer() as writer:
        places.save(writer, state, "good")
        for kind in (torch.Tensor, io.BytesIO):
            planner = _Resolving(kind, resolved)
            with pytest.raises(dcp.CheckpointException, match=message):
                dcp.save(state, checkpoint_id="bad", storage_writer=writer, planner=planner)
        comes_back(places, "good", state)


class _Resolving(dcp.DefaultSavePlanner):
    """Resolves items of a kind to what it was given, or raises that."""

    def __init__(self, kind: type, resolved: Any) -> None:
        super().__init__()
        self._kind, self._resolved = kind, resolved

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if not isinstance(data, self._kind):
            return data
        if isinstance(self._resolved, Exception):
            raise self._resolved
        return self._resolved  # type: ignore[no-any-return]


class _Unpicklable(Exception):
    def __init__(self, one: object, two: object) -> None:
        super().__init__(f"{one} and {two}")
        self.handle = open  # an attribute pickles by name; the two arguments don't come back


@pytest.mark.parametrize("error", [OSError(5, "disk"), _Unpicklable(1, 2), KeyError("w")], ids=repr)
def test_a_planner_that_raises_fails_the_save_and_nothing_else(
    places: Places, error: Exception
) -> None:
    state = _state(1)
    with places.writer() as writer:
        places.save(writer, state, "good")
        for _ in range(3):
            with pytest.raises(dcp.CheckpointException, match=type(error).__name__):
                dcp.save(
                    _state(2),
                    checkpoint_id="bad",
                    storage_writer=writer,
                    planner=_Resolving(torch.Tensor, error),
                )
        comes_back(places, "good", state)
        places.save(writer, state, "after")
        comes_back(places, "after", state)
        assert [entry.name for entry in writer.status() if entry.in_memory] == ["after", "good"]
        assert len(list(Path(places.memory, places.job).rglob("*.distcp"))) == 2
        assert len(list(Path(places.memory, places.job).rglob("*.slot"))) <= 1


# -- planners that rename and describe -------------------------------------------------------------


class _RenamingSave(dcp.DefaultSavePlanner):
    """As in torch's documentation."""

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        renamed = {f"foo_{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class _RenamingLoad(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict(
            {f"foo_{key}": value for key, value in state_dict.items()}
        )
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn.removeprefix("foo_")] = torch.load(
            value, weights_only=False
        )


def test_planners_that_rename_keys_survive(places: Places) -> None:
    state = _state(1)
    with places.writer() as writer:
        places.save(writer, state, "step-1", planner=_RenamingSave())
        comes_back(places, "step-1", state, load_planner=_RenamingLoad)
        comes_back(places, "step-1", {f"foo_{key}": value for key, value in state.items()})
        places.save(writer, state, "step-2")
        comes_back(places, "step-2", state)


class _WithNote(dcp.DefaultSavePlanner):
    """Puts a word of its own into the metadata's planner data."""

    def __init__(self, note: str, *, in_place: bool) -> None:
        super().__init__()
        self._note, self._in_place = note, in_place

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        noted = {**(metadata.planner_data or {}), "note": (self._note,)}
        if self._in_place:
            metadata.planner_data = noted
            return plans, metadata
        return plans, replace(metadata, planner_data=noted)


@pytest.mark.parametrize("in_place", [False, True])
def test_metadata_that_a_planner_alters_is_what_memory_and_storage_hold(
    places: Places, in_place: bool
) -> None:
    with places.writer(keep_memory=5) as writer:
        for step, note in enumerate(["one", "two", "two", "three"]):
            state = _state(step)
            places.save(writer, state, f"step-{step}", planner=_WithNote(note, in_place=in_place))
            comes_back(places, f"step-{step}", state)
            for road in ("memory", "storage"):
                metadata = _metadata(places, road, f"step-{step}")
                assert metadata.planner_data["note"] == (note,), road
        places.save(writer, state, "plain")
        assert "note" not in _metadata(places, "memory", "plain").planner_data
        assert _metadata(places, "memory", "step-0").planner_data["note"] == ("one",)


def test_metadata_that_only_finish_gets_is_what_memory_and_storage_hold_in_the_end(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only dcp.save tells a planner's metadata before `finish`; other drivers don't."""
    monkeypatch.setattr("dcp_mem.writer.global_metadata", lambda: None)
    with places.writer(keep_memory=5) as writer:
        for step, note in enumerate(["one", "two", "two"]):
            state = _state(step)
            places.save(writer, state, f"step-{step}", planner=_WithNote(note, in_place=False))
            for road in ROADS:
                wait_until(
                    lambda road=road, step=step, note=note: (  # type: ignore[misc]
                        _metadata(places, road, f"step-{step}").planner_data.get("note") == (note,)
                    ),
                    f"the metadata of step-{step} on the road {road}",
                    timeout=20,
                )
            comes_back(places, f"step-{step}", state)


class _WithWords(dcp.DefaultSavePlanner):
    """Planner data that is no dict, as in torch's documentation."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in plans])


def test_planner_data_of_any_kind_survives(places: Places) -> None:
    state = {"a": torch.randn(4), "b": 3}
    with places.writer() as writer:
        for step in range(2):
            places.save(writer, state, f"{step}", planner=_WithWords())
            for road in ("memory", "storage"):
                assert _metadata(places, road, f"{step}").planner_data == ["per-rank-data"]
            comes_back(
                places, f"{step}", state, load_planner=lambda: dcp.DefaultLoadPlanner(False, False)
            )


# -- planners of one's own -------------------------------------------------------------------------


class _OwnSavePlanner(SavePlanner):
    """Nothing of torch's: each tensor in two halves, objects as their text."""

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._state = state_dict

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, value in self._state.items():
            if not isinstance(value, torch.Tensor):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            for start, stop in self._halves(value):
                chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start]))
                properties = TensorProperties(dtype=value.dtype)
                data = TensorWriteData(chunk, properties, value.size())
                items.append(
                    WriteItem(MetadataIndex(key, [start]), WriteItemType.SHARD, tensor_data=data)
                )
        return SavePlan(items, planner_data="mine")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        described: dict[str, Any] = {}
        for item in (item for plan in all_plans for item in plan.items):
            if item.tensor_data is None:
                described[item.index.fqn] = BytesStorageMetadata()
            else:
                known = TensorStorageMetadata(
                    item.tensor_data.properties, item.tensor_data.size, []
                )
                described.setdefault(item.index.fqn, known).chunks.append(item.tensor_data.chunk)
        return all_plans, Metadata(described, planner_data={"by": "an own planner"})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._state[write_item.index.fqn]
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(str(value).encode())
        assert write_item.tensor_data is not None
        (start,), (length,) = (
            write_item.tensor_data.chunk.offsets,
            write_item.tensor_data.chunk.sizes,
        )
        part: torch.Tensor = value[start : start + length]
        return part

    @staticmethod
    def _halves(tensor: torch.Tensor) -> list[tuple[int, int]]:
        middle = len(tensor) // 2
        return [(0, middle), (middle, len(tensor))]


class _OwnLoadPlanner(LoadPlanner):
    """Gives buffers of its own to read into, and takes what has been read when it is committed."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._state, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for key, known in self._metadata.state_dict_metadata.items():
            if isinstance(known, BytesStorageMetadata):
                index, none = MetadataIndex(key), torch.Size([0])
                items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
                continue
            for chunk in known.chunks:
                index, zero = MetadataIndex(key, chunk.offsets), torch.Size([0])
                items.append(
                    ReadItem(LoadItemType.TENSOR, index, chunk.offsets, index, zero, chunk.sizes)
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._state[read_item.dest_index.fqn] = value.read().decode()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._buffers[id(read_item)] = torch.zeros(read_item.lengths)
        return self._buffers[id(read_item)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        start = read_item.dest_offsets[0]
        self._state[read_item.dest_index.fqn][start : start + len(tensor)] = self._buffers.pop(
            id(read_item)
        )
        self.committed.append(f"{read_item.dest_index.fqn}@{start}")


def test_planners_that_owe_torch_nothing_survive(places: Places) -> None:
    with places.writer() as writer:
        for step in range(3):
            state: State = {
                "a": torch.randn(9) + step,
                "b": torch.randn(4),
                "c": "words",
                "d": torch.randn(2),
            }
            places.save(writer, state, f"{step}", planner=_OwnSavePlanner())
            for road in ROADS:
                into = {key: torch.zeros_like(value) for key, value in state.items() if key != "c"}
                planner = _OwnLoadPlanner()
                dcp_state = {**into, "c": None}
                places.load(road, f"{step}", dcp_state, planner=planner)
                assert_same(state, dict(sorted(dcp_state.items())), road)
                assert sorted(planner.committed) == ["a@0", "a@4", "b@0", "b@2", "d@0", "d@1"], road
            for road in ("memory", "storage"):
                assert _metadata(places, road, f"{step}").planner_data == {"by": "an own planner"}


def test_what_an_own_planner_saved_loads_with_torchs_default_planner(places: Places) -> None:
    state = {"a": torch.randn(9), "d": torch.randn(2)}
    with places.writer() as writer:
        places.save(writer, state, "own", planner=_OwnSavePlanner())
        comes_back(places, "own", state)


class _NoPlannerData(_OwnSavePlanner):
    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=None)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=None)


def test_an_own_planner_without_planner_data_survives(places: Places) -> None:
    state = {"a": torch.randn(9), "d": torch.randn(2)}
    with places.writer() as writer:
        places.save(writer, state, "own", planner=_NoPlannerData())
        comes_back(places, "own", state)
        assert _metadata(places, "storage", "own").planner_data is None


# -- loading ---------------------------------------------------------------------------------------


class _Counting(dcp.DefaultLoadPlanner):
    """Notes what is committed, and whether its values were there by then."""

    def __init__(self, expected: State) -> None:
        super().__init__()
        self._expected = expected
        self.committed: list[str] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        fqn = read_item.dest_index.fqn
        assert bits(tensor) == bits(self._expected[fqn]), (
            f"{fqn} was committed before it had been read"
        )
        self.committed.append(fqn)


def test_every_tensor_is_committed_once_and_with_its_values_in_place(places: Places) -> None:
    state = {f"t{i}": torch.randn(50 + i) for i in range(20)} | {"strided": torch.randn(6, 6).t()}
    with places.writer() as writer:
        places.save(writer, state, "step-1")
        for road in ROADS:
            planner = _Counting(state)
            into = {key: torch.zeros(value.shape) for key, value in state.items()}
            into["t3"] = torch.zeros(2 * 53)[::2]  # one that can't be read into directly
            places.load(road, "step-1", into, planner=planner)
            assert sorted(planner.committed) == sorted(state), road


class _ActingAtLoad(dcp.DefaultLoadPlanner):
    """A planner that acts in a load, after the checkpoint was chosen and before it is read."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        self._act()
        return plan


def test_saves_during_a_load_leave_what_is_being_loaded_alone(places: Places) -> None:
    def state(value: float) -> State:
        return {"a": torch.full((5000,), value), "o": f"object {value}"}

    with places.writer(keep_memory=2) as writer:
        places.save(writer, state(1.0), "one")

        def save_others() -> None:
            for step in range(6):
                dcp.save(state(2.0), checkpoint_id=f"other-{step}", storage_writer=writer)

        into = places.load(
            "memory", "one", blank_of(state(0.0)), planner=_ActingAtLoad(save_others)
        )
        assert_same(state(1.0), into)

        def save_over() -> None:
            for _ in range(6):
                dcp.save(state(3.0), checkpoint_id="other-5", storage_writer=writer)

        into = places.load(
            "memory", "other-5", blank_of(state(0.0)), planner=_ActingAtLoad(save_over)
        )
        assert_same(state(2.0), into)
        comes_back(places, "other-5", state(3.0), roads=("memory", "stock from memory"))
        dcp.save(state(4.0), checkpoint_id="last", storage_writer=writer)
    assert len(list(Path(places.memory, places.job).rglob("*.distcp"))) == 2


# -- plan caching ----------------------------------------------------------------------------------


@needs_caching
def test_plan_caching_with_two_models_in_turn_saves_each_ones_own(places: Places) -> None:
    with places.writer(keep_memory=3) as writer:
        for step in range(3):
            one = {"a": torch.randn(20), "b": {"c": torch.randn(5)}}
            two = {"a": torch.randn(20), "b.c": torch.randn(5)}
            for name, state in (("one", one), ("two", two), ("two again", two)):
                places.save(
                    writer, state, f"{name.replace(' ', '-')}-{step}", planner=_caching_planner()
                )
                comes_back(places, f"{name.replace(' ', '-')}-{step}", state)


@needs_caching
def test_plan_caching_works_on_after_a_failed_save(places: Places) -> None:
    class Failing(dcp.DefaultSavePlanner):
        fails = False

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            if self.fails:
                raise OSError("disk")
            return super().resolve_data(write_item)

    planner = Failing(enable_plan_caching=True)
    with places.writer() as writer:
        for step, fails in enumerate([True, False, False, True, True, False, False]):
            state, planner.fails = _state(step), fails
            if fails:
                with pytest.raises(dcp.CheckpointException, match="disk"):
                    dcp.save(state, checkpoint_id=f"{step}", storage_writer=writer, planner=planner)
            else:
                places.save(writer, state, f"{step}", planner=planner)
                comes_back(places, f"{step}", state)


# -- preparing -------------------------------------------------------------------------------------


def test_a_prepared_save_finds_its_slots_ready(places: Places) -> None:
    state: State = {"w": torch.randn(1 << 20), "step": 1}
    with places.writer(keep_memory=2) as writer:
        assert writer.prepare(state).wait(30)
        slots = set(_slots(places))
        assert len(slots) == 3
        assert all(
            path.stat().st_blocks * 512 >= 4 << 20 for path in Path(places.memory).rglob("*.slot")
        )
        for step in range(4):
            state["w"].fill_(step)
            places.save(writer, state, f"{step}")
            comes_back(places, f"{step}", state)
            assert set(_slots(places)) <= slots, "a slot was made anew"


def _slots(places: Places) -> list[int]:
    files = [*Path(places.memory).rglob("*.slot"), *Path(places.memory).rglob("*.distcp")]
    return [path.stat().st_ino for path in files]


def test_preparing_needs_no_second_look_at_the_planner(places: Places) -> None:
    state = _state(1)
    with places.writer() as writer:
        writer.prepare(state, _HalfPlanned()).wait(30)
        places.save(writer, state, "half", planner=_HalfPlanned())
        comes_back(places, "half", {**state, "w": state["w"].half(), "b": state["b"].half()})
        places.save(writer, state, "full")
        comes_back(places, "full", state)


@needs_caching
def test_preparing_with_a_caching_planner_leaves_the_cache_as_it_was(places: Places) -> None:
    with places.writer() as writer:
        for step in range(4):
            state = _state(step)
            if step in (0, 2):
                writer.prepare(state, _caching_planner()).wait(30)
            places.save(writer, state, f"{step}", planner=_caching_planner())
            comes_back(places, f"{step}", state)


def test_preparing_for_another_state_than_is_saved_does_no_harm(places: Places) -> None:
    with places.writer() as writer:
        writer.prepare({"x": torch.randn(5000), "y": "object"}).wait(30)
        state = _state(1)
        places.save(writer, state, "step-1")
        comes_back(places, "step-1", state)
        writer.prepare({}).wait(30)
        places.save(writer, state, "step-2")
        comes_back(places, "step-2", state)
