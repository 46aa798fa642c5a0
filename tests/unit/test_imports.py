"""What a trainer imports: it starts, and restarts, as quickly as that."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SHOW = "import sys, {}; print(*sorted(sys.modules))"
_COUNT = """
import sys, torch.distributed.checkpoint
made = []
sys.addaudithook(lambda event, of: made.append(of[1]) if event == "compile" else None)
import dcp_mem.writer, dcp_mem.reader
print(made.count("<string>"))
"""


def _imported_with(modules: str) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-c", _SHOW.format(modules)], capture_output=True, text=True, check=True
    )
    return set(shown.stdout.split())


@pytest.mark.parametrize("modules", ["dcp_mem.writer, dcp_mem.reader", "dcp_mem.cli.ls"])
def test_nothing_that_flushes_is_imported_by_those_who_leave_it_to_the_agent(modules: str) -> None:
    imported = _imported_with(modules)
    assert "dcp_mem.flushing.agent_handle" in imported
    flushers = {name for name in imported if name.startswith("dcp_mem.flushing.")}
    assert flushers == {"dcp_mem.flushing.agent_handle", "dcp_mem.flushing.registration"}


def test_no_transport_is_imported_by_those_who_take_tcp() -> None:
    imported = _imported_with("dcp_mem.writer, dcp_mem.reader, dcp_mem.operations.network")
    assert "dcp_mem.comm.transports" in imported
    assert not {name for name in imported if "nixl" in name}


def test_importing_compiles_few_functions_of_values() -> None:
    """A value's methods are compiled when the first value is made: most are never made."""
    shown = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True
    )
    assert int(shown.stdout) < 160  # 330 where each dataclass compiles its own at once
