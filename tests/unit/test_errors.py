"""Errors: what their arguments are called, and that they are the same in another process."""

from __future__ import annotations

import inspect
import pickle

import pytest

import dcp_mem
from dcp_mem import DcpMemError

_ERRORS = [
    one
    for one in map(dcp_mem.__dict__.get, dcp_mem.__all__)
    if isinstance(one, type) and issubclass(one, DcpMemError)
]
_EXAMPLES: dict[str, object] = {
    "rank": 3,
    "needed_bytes": 1 << 31,
    "limit_bytes": 1 << 30,
    "claimed_bytes": 1 << 30,
}
_EXAMPLES |= {"held_bytes": 5, "generation": 2, "retry_after": 0.5}
_LISTS = {"reasons": ["a"], "available": ["b", "b"], "lacking": ["c"], "failures": [(1, "d")]}


@pytest.mark.parametrize("kind", _ERRORS)
def test_an_error_is_the_same_once_another_rank_has_it(kind: type[DcpMemError]) -> None:
    names = [
        name
        for name in inspect.signature(kind.__init__).parameters
        if name not in ("self", "args", "kwargs")
    ]
    examples = {**_EXAMPLES, **_LISTS}
    given = {name: examples.get(name, f"<{name}>") for name in names}
    error = kind(**given) if names else kind("text")
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), sent.args) == (kind, str(error), error.args)
    for name in names:
        assert getattr(sent, name) == getattr(error, name), name
        assert name in _LISTS or getattr(error, name) == given[name]
        assert name not in _LISTS or isinstance(getattr(error, name), tuple)
    assert str(error) == ("text" if not names else str(kind(*given.values())))
    assert "{" not in str(error)
