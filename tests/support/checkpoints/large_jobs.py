"""What is done in portions for thousands of ranks, done so for a few."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dcp_mem.format import catalog, catalog_conversion
from dcp_mem.planning import find_reads, global_plan


@contextmanager
def as_large_jobs() -> Iterator[None]:
    """Let this process plan and read catalogs portion by portion, and metadata entry by entry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_plan, "_ITEMS_AT_ONCE", 1)
        patch.setattr(catalog, "_ROWS_AT_ONCE", 1)
        patch.setattr(find_reads, "_ROWS_AT_ONCE", 1)
        patch.setattr(find_reads, "_PAIRS_AT_ONCE", 1)
        patch.setattr(catalog_conversion, "_MANY_ROWS", 0)
        patch.setattr(catalog_conversion, "_FEW_ROWS_OF_ENTRY", 0)
        yield
