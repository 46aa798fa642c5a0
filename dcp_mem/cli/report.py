"""`dcp-mem report`: write an HTML page about a job's checkpoints."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

from dcp_mem.cli.options import INTERACTIVE_RETRIES, CommonOptions
from dcp_mem.cli.screen import size
from dcp_mem.common.values import counted, shown
from dcp_mem.errors import ConfigError
from dcp_mem.operations.history import History, Totals, read_history, totals
from dcp_mem.operations.inventory import refuse_checkpoint_as_root, searched_places
from dcp_mem.operations.report import duration, render_page, troubles_of

_OF_RECOVERY = ("time", "name", "step", "seconds", "sources", "passed_over", "world_size")


def run(common: CommonOptions, output: str) -> int:
    settings = common.settings()
    found = read_history(settings, retry_policy=INTERACTIVE_RETRIES)
    is_empty = not found.checkpoints and not found.recoveries
    if is_empty:
        refuse_checkpoint_as_root(settings, INTERACTIVE_RETRIES)
    sums, text = totals(found), render_page(found).encode()
    path = _write(output, text)
    common.screen.answer(
        job=found.job, root=found.url, output=path, totals=asdict(sums), **_facts(found)
    )
    if path:
        common.screen.line(f"{path}: {_summary(sums)} ({size(len(text))})")
    if is_empty:
        common.screen.note(f"nothing is known of checkpoints in {searched_places(settings)}")
    for trouble in found.troubles:
        common.screen.note(shown(trouble))
    return 1 if is_empty else 0


def _write(output: str, text: bytes) -> str:
    """Write the page and return its path; "" for standard output."""
    if output == "-":
        sys.stdout.buffer.write(text)
        return ""
    temporary = f"{output}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as stream:
            stream.write(text)
        os.replace(temporary, output)
    except OSError as error:
        raise ConfigError(f"{output} can't be written: {error.strerror or error}") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return output


def _summary(sums: Totals) -> str:
    saves = counted(sums.saves, "save")
    recoveries = counted(sums.recoveries, "recovery", "recoveries")
    text = f"{saves}, {sums.durable:,} durable, {recoveries}, {sums.failed:,} failed"
    return text + (
        f", training blocked for {duration(sums.blocked_seconds)}" if sums.blocked_seconds else ""
    )


def _facts(found: History) -> dict[str, Any]:
    return {
        "recoveries": [
            {name: getattr(one, name) for name in _OF_RECOVERY} for one in found.recoveries
        ],
        "troubles": [asdict(one) for one in troubles_of(found)],
        "unread": list(found.troubles),
    }
