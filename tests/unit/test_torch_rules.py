"""What torch's planner looks at is known, and what it would plan otherwise is left to it."""

import ast
import dataclasses
import enum
import inspect
import io
import textwrap
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    _nested_dict,
    _sharded_tensor_utils,
    _traverse,
    default_planner,
    planner_helpers,
    utils,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from dcp_mem.planning import torch_rules
from dcp_mem.planning.plan_columns import ItemKind, LocalPlan, NotDescribable
from dcp_mem.planning.shard_marks import FIELDS, METHODS
from dcp_mem.planning.state_structure import DescribedState, Structure

State = dict[str, Any]

# -- what torch's planner looks at -----------------------------------------------------------------

_ASKED: list[Any] = [
    default_planner.create_default_local_save_plan,
    default_planner.create_default_local_load_plan,
    planner_helpers._create_write_items,
    planner_helpers._create_read_items,
    planner_helpers._create_chunk_list,
    utils.find_tensor_shard,
    utils.find_state_dict_object,
    _nested_dict.flatten_state_dict,
    _traverse.traverse_state_dict,
    _sharded_tensor_utils._flatten_sharded_tensors,
    *(getattr(DTensor, method) for method in METHODS),
]
"""What decides how torch plans a value, on its way into a checkpoint and out of it."""

_KNOWN = {
    "attributes": {*METHODS, "size"},
    "classes": {
        "BytesStorageMetadata",
        "DTensor",
        "Mapping",
        "ShardedTensor",
        "TensorStorageMetadata",
        "list",
        "torch.Tensor",
        "tuple",
    },
    "tests": set[str](),
    "fields": set[str](),
}
_SINCE_2_14 = {
    "tests": {"_is_checkpointable_tensor"},
    "fields": {"global_offsets", "global_shape", "local_offsets", "local_sizes"},
}

_WHAT_TO_DO = """torch {version}'s planner looks at something that dcp_mem doesn't know: {what}.
Read the functions in `_ASKED`. If a value that dcp_mem plans can have it (the classes in
`plain_tensors.PLAIN`, DTensor, ShardedTensor, any object), then
- leave such values to torch: a class in `state_structure._rows`, an attribute in `shard_marks`;
- see that copies keep it (`saving/ahead.py`), also on their way to another process;
- add a value of that kind to `_KINDS` below, and to tests/ranks/test_shards_by_attribute.py.
Then record the name here, with its torch."""


def _looked_at(function: Callable[..., Any]) -> dict[str, set[str]]:
    """What a function asks of values: names of attributes, of classes, of functions that test."""
    found: dict[str, set[str]] = {kind: set() for kind in _KNOWN}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("hasattr", "getattr"):
            found["attributes"].add(ast.literal_eval(node.args[1]))
        elif called in ("isinstance", "issubclass"):
            kinds = node.args[1]
            each = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
            found["classes"] |= set(map(ast.unparse, each))
        elif called.rpartition(".")[2].startswith(("_is_", "is_")) and called != "_is_terminal":
            found["tests"].add(called)
    return found


def test_every_kind_that_torchs_planner_tells_apart_is_known() -> None:
    known = {kind: set(names) for kind, names in _KNOWN.items()}
    if torch.__version__ >= "2.14":
        for kind, names in _SINCE_2_14.items():
            known[kind] |= names
    found: dict[str, set[str]] = {kind: set() for kind in known}
    for function in _ASKED:
        for kind, names in _looked_at(function).items():
            found[kind] |= names
    found["fields"] = set(FIELDS)
    new = {kind: sorted(found[kind] - known[kind]) for kind in known if found[kind] - known[kind]}
    assert not new, _WHAT_TO_DO.format(version=torch.__version__, what=new)
    assert {*METHODS} <= found["attributes"]  # else these functions tell nothing any more
    assert {"DTensor", "ShardedTensor", "torch.Tensor", "Mapping", "list"} <= found["classes"]


# -- values of every kind --------------------------------------------------------------------------


class _Sub(torch.Tensor):
    pass


class _SubParameter(torch.nn.Parameter):
    pass


class _Level(enum.IntEnum):
    LOW = 1


class _Color(enum.Enum):
    RED = "red"


_Pair = namedtuple("_Pair", ["one", "two"])


@dataclasses.dataclass
class _Record:
    tensor: torch.Tensor


class _PlansItself:
    """An object that isn't a tensor, and makes one of a name."""

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        return planner_helpers._create_write_items(fqn, torch.zeros(3))


class _ListThatPlansItself(_PlansItself, list[Any]):
    pass


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _shard() -> Any:
    whole = {"global_shape": (8, 3), "global_offsets": ((4, 0),)}
    part = {"local_offsets": ((0, 0),), "local_sizes": ((4, 3),)}
    return _with(torch.zeros(4, 3), **whole, **part)


def _fake() -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.zeros(2, 3)


def _methods_of(tensor: torch.Tensor) -> State:
    return {
        "__create_write_items__": lambda fqn, _: planner_helpers._create_write_items(fqn, tensor),
    }


_OURS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.zeros(2, 3),
    "number": lambda: torch.tensor(3),
    "nothing": lambda: torch.zeros(0, 3),
    "strided": lambda: torch.zeros(3, 4).t(),
    "conjugate": lambda: torch.zeros(2, dtype=torch.cfloat).conj(),
    "float8": lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
    "requires_grad": lambda: torch.zeros(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
    "with other attributes": lambda: _with(torch.zeros(2), partition_dim=1, is_sequence=True),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.zeros(2, device="meta"),
    "None": lambda: None,
    "int": lambda: 3,
    "text": lambda: "text",
    "enum": lambda: _Color.RED,
    "int enum": lambda: _Level.LOW,
    "stream": lambda: io.BytesIO(b"bytes"),
    "list": lambda: [1, "two", [3.0]],
    "list of tensors": lambda: [torch.zeros(2), torch.zeros(3)],
    "list of lists": lambda: [[torch.zeros(2)], [], 3],
    "tuple of tensors": lambda: (torch.zeros(2), torch.zeros(3)),
    "named tuple": lambda: _Pair(torch.zeros(2), 1),
    "dataclass": lambda: _Record(torch.zeros(2)),
    "ordered": lambda: OrderedDict(b=torch.zeros(2), a=1),
    "mapping": lambda: UserDict(b=torch.zeros(2), a=1),
    "empty mapping": dict,
    "keys of numbers": lambda: {0: torch.zeros(2), 1: {"a.b": 2}},
    "part of a CheckpointableTensor": lambda: _with(torch.zeros(2), global_shape=(8,)),
}
"""Values that dcp_mem plans."""

_TORCHS: dict[str, Callable[[], Any]] = {
    "subclass": lambda: torch.zeros(2).as_subclass(_Sub),
    "subclass of Parameter": lambda: _SubParameter(torch.zeros(2)),
    "uninitialised": torch.nn.UninitializedParameter,
    "fake": _fake,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
    "object that plans itself": _PlansItself,
    "list that plans itself": lambda: _ListThatPlansItself([1, 2]),
    "method of an object": lambda: _with(_Record(torch.zeros(1)), **_methods_of(torch.zeros(3))),
    "method of a tensor": lambda: _with(torch.zeros(2), **_methods_of(torch.zeros(3))),
    "chunks of a tensor": lambda: _with(torch.zeros(2), __create_chunk_list__=list),
    "shards of a tensor": lambda: _with(torch.zeros(2), __get_tensor_shard__=list),
}
"""Values that are left to torch, or that it refuses."""
if FIELDS:
    _TORCHS["CheckpointableTensor"] = _shard


def _planned_by_torch(state: State) -> list[Any]:
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state)
    return [
        (item.index.fqn, planner.mappings[item.index.fqn], item.type.name)
        + (_box(item.tensor_data) if item.tensor_data else ())
        for item in planner.create_local_plan().items
    ]


def _box(data: Any) -> tuple[Any, ...]:
    known = data.properties
    return (
        *map(tuple, (data.size, data.chunk.offsets, data.chunk.sizes)),
        (str(known.dtype), str(known.layout), known.requires_grad),
    )


def _planned_by_us(plan: LocalPlan) -> Iterator[Any]:
    types = {ItemKind.OBJECT: "BYTE_IO", ItemKind.TENSOR: "TENSOR", ItemKind.SHARD: "SHARD"}
    for row in range(len(plan)):
        name, kind = plan.name[row], ItemKind(plan.kind[row])
        item: tuple[Any, ...] = (plan.names[name], plan.paths[name], types[kind])
        if kind is not ItemKind.OBJECT:
            within = slice(int(plan.dimensions[row]))
            known = plan.table[plan.properties[row]]
            sides = (plan.size, plan.offset, plan.extent)
            item += (
                *(tuple(side[row, within].tolist()) for side in sides),
                (known.dtype, known.layout, known.requires_grad),
            )
        yield item


@pytest.mark.parametrize("kind", _OURS)
def test_a_value_that_dcp_mem_plans_is_planned_as_torch_would(kind: str) -> None:
    state = {"model": {"x": _OURS[kind](), "w": torch.zeros(2)}, "y": _OURS[kind]()}
    assert list(_planned_by_us(Structure(state).plan)) == _planned_by_torch(state)


@pytest.mark.parametrize("kind", _TORCHS)
def test_a_value_that_dcp_mem_doesnt_know_is_left_to_torch(kind: str) -> None:
    for plan in (Structure, DescribedState):
        with pytest.raises(NotDescribable):
            plan({"model": {"x": _TORCHS[kind](), "w": torch.zeros(2)}})


@pytest.mark.parametrize("kind", ["method of a tensor", "method of an object"])
def test_a_value_that_begins_to_plan_itself_is_noticed(kind: str) -> None:
    known = {"method of a tensor": torch.zeros(2), "method of an object": _Record(torch.zeros(1))}
    structure = Structure({"x": known[kind]})
    assert structure.recognise({"x": known[kind]}) is not None
    assert structure.recognise({"x": _TORCHS[kind]()}) is None


def test_a_tensor_that_becomes_a_shard_is_noticed() -> None:
    structure = Structure({"x": torch.zeros(4, 3), "y": torch.nn.Parameter(torch.zeros(2))})
    becoming = {"x": _shard(), "y": torch.nn.Parameter(torch.zeros(2))}
    assert (structure.recognise(becoming) is None) == bool(FIELDS)


# -- kinds that a newer torch may know -------------------------------------------------------------


def _knows_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch take tensors with an attribute for halves of a whole."""
    write, read = planner_helpers._create_write_items, planner_helpers._create_read_items

    def is_half(value: Any) -> bool:
        return hasattr(value, "is_half")

    def items(fqn: str, value: Any) -> list[Any]:
        (item,) = write(fqn, value)
        if is_half(value):
            assert item.tensor_data is not None
            data = dataclasses.replace(item.tensor_data, size=torch.Size([4]))
            item = dataclasses.replace(item, type=WriteItemType.SHARD, tensor_data=data)
        return [item]

    def reads(fqn: str, metadata: Any, value: Any) -> list[Any]:
        found = read(fqn, metadata, value)
        return found[:-1] if is_half(value) else found

    monkeypatch.setattr(default_planner, "_create_write_items", items)
    monkeypatch.setattr(default_planner, "_create_read_items", reads)


def _state_with_half() -> State:
    tensors: list[Any] = [torch.zeros(2) for _ in range(1000)]
    tensors[700].is_half = True
    return {"model": dict(zip(map(str, range(1000)), tensors, strict=True)), "step": 3}


def test_what_a_newer_torch_would_save_otherwise_is_left_to_it_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Structure(_state_with_half())
    _knows_halves(monkeypatch)
    for _ in range(2):
        with pytest.raises(NotDescribable, match=r"model\.700"):
            Structure(_state_with_half())
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "model.700: 1 items ([2] at [0] of [4]) to torch" in warning
    assert "1 items ([2] at [0] of [2]) to dcp_mem" in warning


def test_what_a_newer_torch_would_load_otherwise_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = DescribedState(_state_with_half())
    torch_rules.refuse_other_load(described.plan, described.leaves)
    _knows_halves(monkeypatch)
    with pytest.raises(NotDescribable, match=r"model\.700: nothing of this rank's to torch"):
        torch_rules.refuse_other_load(described.plan, described.leaves)


def test_what_a_newer_torch_takes_apart_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flatten = default_planner.flatten_state_dict

    def taking_tuples_apart(state: State) -> tuple[State, dict[str, Any]]:
        flat, paths = flatten(state)
        for name in [name for name, value in flat.items() if isinstance(value, tuple)]:
            for number, value in enumerate(flat.pop(name)):
                flat[f"{name}.{number}"] = value
                paths[f"{name}.{number}"] = (*paths[name], number)
            del paths[name]
        return flat, paths

    state = {"a": {"b": (1, 2)}, "w": torch.zeros(2)}
    Structure(state)
    monkeypatch.setattr(default_planner, "flatten_state_dict", taking_tuples_apart)
    with pytest.raises(NotDescribable, match=r"a\.b: no entry to torch, 1 items \(bytes\)"):
        Structure(state)


def test_what_torch_refuses_is_left_to_it_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fqn: str, value: Any) -> list[Any]:
        raise ValueError("no such tensors any more")

    monkeypatch.setattr(default_planner, "_create_write_items", refuse)
    with pytest.raises(NotDescribable, match="no such tensors any more"):
        Structure({"w": torch.zeros(2)})


def test_a_state_that_is_recognised_asks_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    structure = Structure(_state_with_half())
    _knows_halves(monkeypatch)
    monkeypatch.setattr(default_planner, "_create_write_items", None)
    assert structure.recognise(_state_with_half()) is not None
