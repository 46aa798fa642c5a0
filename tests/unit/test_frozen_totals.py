"""The sum by which a frozen tensor on a device is known: it is computed alike on any device."""

import pytest
import torch

from dcp_mem.runtime.frozen import _total

_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64]


@pytest.mark.parametrize("count", [1, 7, 64, 1001])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_flipped_bit_anywhere_changes_the_sum(dtype: torch.dtype, count: int) -> None:
    tensor = torch.ones(count + 1).to(dtype)[1:]  # it doesn't begin at a whole word
    before = _total(tensor)
    raw = tensor.view(torch.uint8)
    for place in {0, len(raw) // 2, len(raw) - 1}:
        raw[place] ^= 1
        assert _total(tensor) != before
        raw[place] ^= 1
    assert _total(tensor) == before


def test_an_empty_tensor_has_a_sum() -> None:
    assert _total(torch.empty(0, 3)) == 0
