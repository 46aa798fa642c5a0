"""State dicts are taken apart as torch takes them apart, runs of equal dicts among them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcp_mem.planning.flatten import collect_leaves, flatten

_LEAVES = st.sampled_from([0, "text", None, (1, 2), [3]]) | st.builds(torch.zeros, st.just(2))
_KEYS = st.sampled_from(["exp_avg", "step", "a.b", "", 0, 1, True])
_DICTS = st.dictionaries(_KEYS, _LEAVES, max_size=3)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(_KEYS, inner, max_size=2).map(OrderedDict),
        # As an optimizer has them: one dict for each parameter, mostly with the same keys.
        st.lists(st.sampled_from(["exp_avg", "step"]) | inner, max_size=6).map(
            lambda values: {
                number: {value: number, "other": value} if isinstance(value, str) else value
                for number, value in enumerate(values)
            }
        ),
    )


@given(st.dictionaries(st.text("ab.", max_size=3), st.recursive(_LEAVES | _DICTS, _containers)))
def test_a_state_dict_has_the_leaves_names_and_paths_that_torch_gives_it(
    state: dict[str, Any],
) -> None:
    try:
        expected, paths = flatten_state_dict(state)
    except ValueError:
        expected, paths = {}, {}
    try:
        root, leaves = flatten(state)
    except ValueError:
        assert not expected  # two entries of one name
        return
    assert leaves.names == list(expected)
    assert leaves.paths == list(paths.values())
    assert all(map(lambda one, other: one is other, leaves.values, expected.values()))
    again: list[Any] = []
    assert collect_leaves(state, root, again)
    assert list(map(id, again)) == list(map(id, leaves.values))
