"""What ranks send to each other is data: it comes back as it was, and runs nothing."""

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import CheckpointNotFound, RankFailed
from dcp_mem.comm.agreement import Attempted
from dcp_mem.common.sendable import decoded, encoded, sendable
from dcp_mem.format.frames import Specs
from dcp_mem.policy.admission import NodeMemory
from dcp_mem.policy.sharing import Piece
from dcp_mem.saving.values import Ballot

_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_KEYS = st.integers() | st.text() | st.tuples(st.text(), st.integers())
_VALUES = st.recursive(
    _PLAIN | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, min_size=17).map(tuple)
        | st.lists(st.lists(_PLAIN).map(tuple), min_size=17)
        | st.dictionaries(_KEYS, inner)
        | st.frozensets(_KEYS)
        | st.builds(Ballot, st.binary(), st.text(), st.booleans(), st.integers(), st.none())
        | st.builds(Piece, st.text(), st.tuples(*[st.integers()] * 2), st.none(), st.just((1, 2)))
    ),
    max_leaves=30,
)


def _same(sent: Any, came: Any) -> bool:
    if type(sent) is not type(came):
        return False
    if isinstance(sent, (tuple, list)):
        return len(sent) == len(came) and all(map(_same, sent, came))
    if isinstance(sent, dict):
        return _same(list(sent.items()), list(came.items()))
    return bool(sent == came)


@given(_VALUES)
def test_what_is_sent_comes_as_it_was(value: Any) -> None:
    assert _same(value, decoded(encoded(value)))


def test_what_only_ranks_send_comes_as_it_was() -> None:
    memory = NodeMemory(kept=(), used=1, spare=2, free=3, limit=None, needed=4)
    for value in (memory, range(3, 9, 2), Counter(a=2), torch.float8_e4m3fn, Attempted((1,))):
        assert _same(value, decoded(encoded(value)))
    specs = decoded(encoded(Specs([torch.bfloat16] * 20, [torch.Size([2, 3])] * 20)))
    assert list(specs) == [(torch.bfloat16, torch.Size([2, 3]))] * 20
    for array in (np.arange(6).reshape(2, 3).T, np.zeros((0, 2), np.int32), np.array([True])):
        came = decoded(encoded(array))
        assert came.dtype == array.dtype
        assert came.flags.writeable
        np.testing.assert_array_equal(came, array)


def test_errors_come_as_they_were() -> None:
    for error in (RankFailed("saving", [(1, "why")]), CheckpointNotFound("a", "b", ["c"], ["d"])):
        came = decoded(encoded(error))
        assert type(came) is type(error)
        assert str(came) == str(error)
        assert vars(came) == vars(error)


def test_what_is_one_object_is_sent_once() -> None:
    array, text = np.arange(1000), ("a", ("b",) * 50)
    first, second, third = decoded(encoded([array, {"of": array}, (text, text)]))
    assert first is second["of"]
    assert third[0] is third[1]
    assert len(encoded([array] * 100)) < 2 * len(encoded(array))


class _Stranger:
    """Not registered; as a pickle, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_class_that_has_not_been_named_is_refused_by_its_name(tmp_path: Path) -> None:
    for value in (_Stranger(tmp_path), torch.zeros(1), np.array([None]), object()):
        with pytest.raises(TypeError, match="can't be sent to other ranks"):
            encoded([value])
    with pytest.raises(ValueError, match="another Ballot is sent already"):
        sendable(type("Ballot", (Ballot,), {}))


def test_a_pickle_is_no_message_and_runs_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    stranger = pickle.dumps(_Stranger(made))
    for data in (stranger, len(stranger).to_bytes(8, "little") + stranger):
        with pytest.raises(ValueError, match="no message of a rank"):
            decoded(data)
    assert not made.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '[0,{"a":1}]',
        "[6,0]",
        "[6,-1]",
        "[4,1]",
        "[4,-1]",
        '[5,"|O",1]',
        '[5,"<i8",1]',
        '[5,"<i8",-1,-8]',
        "[2,0,[3,[1],[0]],[1,2]]",
        '["os.system","true"]',
        '["Ballot",1]',
        '["NodeMemory"]',
        '["ConfigError",1] ',
        "[" * 100_000,
        "9" * 10_000,
    ],
)
def test_a_message_that_contradicts_itself_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no message of a rank"):
        decoded(len(text).to_bytes(8, "little") + text.encode())


@given(_VALUES, st.data())
def test_a_message_with_another_byte_is_refused_or_is_another_value(
    value: Any, data: st.DataObject
) -> None:
    message = bytearray(encoded([value, np.arange(3)]))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    del message[data.draw(st.integers(len(message) - 8, len(message))) :]
    try:
        decoded(message)
    except ValueError:
        return
