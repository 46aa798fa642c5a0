"""Torch's guards notice every change of a tensor, and a state is recognised alike without them."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem.planning import tensor_guards
from dcp_mem.planning.plain_tensors import BLOCK, SourcesByBlock, Where, is_plain
from dcp_mem.planning.state_structure import Structure
from dcp_mem.planning.tensor_guards import Guards


def _made_in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 3)


_COMPLEX = torch.zeros(2, 3, dtype=torch.cfloat)
_VARIANTS: dict[str, Callable[[], Any]] = {
    "as it was": lambda: torch.ones(2, 3),
    "another shape": lambda: torch.zeros(3, 2),
    "another rank": lambda: torch.zeros(2, 3, 1),
    "strides": lambda: torch.zeros(3, 2).t(),
    "dtype": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "layout": lambda: torch.zeros(2, 3).to_sparse(),
    "device": lambda: torch.zeros(2, 3, device="meta"),
    "gradients": lambda: torch.zeros(2, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "complex": lambda: torch.zeros(2, 3, dtype=torch.cfloat),
    "conjugate": _COMPLEX.conj,
    "imaginary part": lambda: _COMPLEX.imag,
    "negative": lambda: _COMPLEX.conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
    "in inference mode": _made_in_inference,
}
_NAMES = st.sampled_from(list(_VARIANTS))


@pytest.fixture
def _torch_without_guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tensor_guards, "TensorGuards", None)
    tensor_guards._notice_everything.cache_clear()
    yield
    tensor_guards._notice_everything.cache_clear()


@pytest.mark.parametrize("is_grad_enabled", [True, False])
@pytest.mark.parametrize("before", _VARIANTS)
@pytest.mark.parametrize("after", _VARIANTS)
def test_a_change_is_noticed(before: str, after: str, is_grad_enabled: bool) -> None:
    with torch.set_grad_enabled(is_grad_enabled):
        guards = Guards([torch.zeros(5), _VARIANTS[before]()])
        holds = guards.hold([torch.ones(5), _VARIANTS[after]()])
    assert holds == (before == after)


def test_what_is_no_tensor_is_noticed() -> None:
    assert not Guards([torch.zeros(2)]).hold(["a text"])


def test_plain_is_said_of_none_that_is_not() -> None:
    for make in _VARIANTS.values():
        assert is_plain(make()) or Guards([torch.zeros(2), make()]).where is not Where.HOST
    assert Guards([torch.zeros(2), torch.ones(3)]).where is Where.HOST


def test_guards_hold_none_of_the_tensors() -> None:
    tensor = torch.zeros(3)
    watched = weakref.ref(tensor)
    guards = Guards([tensor])
    assert guards.hold([tensor])
    del tensor
    gc.collect()
    assert watched() is None
    assert guards.hold([torch.zeros(3)])


def test_a_tensor_that_occurs_twice_is_left_to_the_comparison_one_by_one() -> None:
    tied = torch.zeros(3)
    structure = Structure({"a": tied, "b": tied})
    sources = SourcesByBlock([True, True], may_be_conj=False)
    assert structure.recognise({"a": tied, "b": tied}, sources.look_at) == [tied, tied]
    assert sources.found is not None
    assert sources.found.addresses == [tied.data_ptr()] * 2
    assert sources.found.devices is None


@given(st.lists(st.tuples(_NAMES, _NAMES), min_size=1, max_size=6), st.integers(0, 3))
def test_states_are_recognised_alike_with_and_without_guards(
    pairs: list[tuple[str, str]], same: int
) -> None:
    pairs = [*pairs, *[("as it was", "as it was")] * same]
    before = {str(number): _VARIANTS[one]() for number, (one, _) in enumerate(pairs)}
    after = {str(number): _VARIANTS[other]() for number, (_, other) in enumerate(pairs)}
    found = [_recognised(before, after)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_guards, "_notice_everything", lambda: False)
        found.append(_recognised(before, after))
    assert found[0] == found[1]


def _recognised(before: dict[str, Any], after: dict[str, Any]) -> tuple[bool, list[int] | None]:
    """Return whether a state is recognised, and the addresses if all its tensors are plain."""
    structure = Structure(before)
    is_strided = all(one.layout is torch.strided for one in before.values())
    sources = SourcesByBlock([True] * len(before), may_be_conj=True)
    leaves = structure.recognise(after, sources.look_at if is_strided else None)
    found = sources.found if leaves is not None else None
    return leaves is not None, list(found.addresses) if found is not None else None


def test_a_change_in_the_last_of_several_blocks_is_noticed() -> None:
    state = {str(number): torch.zeros(2) for number in range(2 * BLOCK + 1)}
    structure = Structure(state)
    assert structure.recognise(state) is not None
    assert structure.recognise({**state, str(2 * BLOCK): torch.zeros(3)}) is None


@pytest.mark.usefixtures("_torch_without_guards")
def test_a_torch_without_guards_compares_one_by_one() -> None:
    guards = Guards([torch.zeros(2)])
    assert not guards.hold([torch.zeros(2)])
    assert guards.where is None
    structure = Structure({"a": torch.zeros(2)})
    assert structure.recognise({"a": torch.ones(2)}) is not None
    assert structure.recognise({"a": torch.ones(3)}) is None


class _Careless:
    """Guards that notice no change of strides."""

    def __init__(self, *tensors: torch.Tensor, **_: object) -> None:
        self._shapes = [one.shape for one in tensors]

    def check(self, *tensors: Any) -> bool:
        return [getattr(one, "shape", None) for one in tensors] == self._shapes


class _AskedOtherwise:
    def __init__(self, tensors: object) -> None:
        pass


@pytest.mark.parametrize("guards", [_Careless, _AskedOtherwise])
def test_guards_that_notice_too_little_are_not_asked(
    guards: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tensor_guards._notice_everything()
    monkeypatch.setattr(tensor_guards, "TensorGuards", guards)
    assert not tensor_guards._notice_everything.__wrapped__()
