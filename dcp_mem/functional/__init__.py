"""`dcp_mem.save`, `async_save` and `load`: drop-ins for torch's, by plans of dcp_mem's own."""

from dcp_mem.functional.loads import load, load_or_raise_cause
from dcp_mem.functional.saves import async_save, save, save_or_raise_cause
from dcp_mem.functional.stateful import HasOptional, without_stateful

__all__ = [
    "HasOptional",
    "async_save",
    "load",
    "load_or_raise_cause",
    "save",
    "save_or_raise_cause",
    "without_stateful",
]
