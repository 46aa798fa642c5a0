"""`dcp-mem flush`: bring the checkpoints in this node's memory to storage."""

from __future__ import annotations

from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import size
from dcp_mem.common.progress_bar import progress_bar
from dcp_mem.common.values import shown
from dcp_mem.operations.flush import flush_now, promote


def run(common: CommonOptions, is_all: bool, newest: int | None, timeout: float | None) -> int:
    settings = common.settings()
    promoted = promote(settings, newest) if is_all else []
    with progress_bar(not common.screen.is_json) as show:
        flushed = flush_now(settings, is_promoted=bool(promoted), show=show, timeout=timeout)
    common.screen.answer(promoted=promoted, flushed=flushed)
    common.screen.table(
        flushed,
        {
            "NAME": lambda one: one.name,
            ">SIZE": lambda one: size(one.nbytes),
            "OUTCOME": lambda one: (
                Text(shown(one.error), "red") if one.error else Text("durable", "green")
            ),
        },
    )
    if not flushed:
        common.screen.note("nothing in this node's memory awaits its flush")
    return 1 if any(one.error for one in flushed) else 0
