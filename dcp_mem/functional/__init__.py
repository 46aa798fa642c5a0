"""`dcp_mem.save`, `async_save` and `load`: drop-ins for torch's, by plans of dcp_mem's own."""

from dcp_mem.functional.calls import raising_cause
from dcp_mem.functional.loads import load
from dcp_mem.functional.saves import async_save, save
from dcp_mem.functional.stateful import HasOptional, without_stateful

__all__ = ["HasOptional", "async_save", "load", "raising_cause", "save", "without_stateful"]
