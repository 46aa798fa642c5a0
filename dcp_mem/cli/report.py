"""`dcp-mem report`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import click

from dcp_mem.cli.options import PATIENCE, Asked, places_of, subcommand
from dcp_mem.cli.screen import shown, size
from dcp_mem.errors import ConfigError
from dcp_mem.operating.history import History, Totals, history, totals
from dcp_mem.operating.report import counted, duration, page, troubles_of

_HELP = """Write an HTML page of what became of a job's checkpoints: saves, flushes and recoveries over time, sizes, throughput,
what saves cost training, and what went wrong.

One file, without scripts, that needs no network. It goes by the histories on storage and in this node's memory; on another node
than the job's it knows only what became durable. FILE is replaced. Exits with 1 where nothing is known of the job.

Examples:
  dcp-mem report s3://ckpts/run-42
  dcp-mem report s3://ckpts/run-42 -o run-42.html
  dcp-mem report --job my-run               # a job that is in memory only
  dcp-mem report /mnt/nfs/run-42 -o - | mail -a 'Content-Type: text/html' ops@example.org
  dcp-mem report /mnt/nfs/run-42 --json | jq .totals.blocked_share
"""


@subcommand("report", _HELP, needs_root=False)
@click.option(
    "-o", "--output", metavar="FILE", default="report.html", show_default=True, help="Where to; - for standard output."
)
def command(asked: Asked, output: str) -> int:
    settings = asked.settings()
    if output == "-" and asked.screen.is_json:
        raise ConfigError("--json answers on standard output too: give -o FILE")
    found = history(settings, patience=PATIENCE)
    sums, text = totals(found), page(found).encode()
    path = _write(output, text)
    asked.screen.answer(job=found.job, root=found.url, output=path, totals=asdict(sums), **_facts(found))
    if path:
        asked.screen.line(f"{path}: {_told(sums)} ({size(len(text))})")
    is_empty = not found.checkpoints and not found.recoveries
    if is_empty:
        asked.screen.note(f"nothing is known of checkpoints in {places_of(settings)}")
    for trouble in found.troubles:
        asked.screen.note(shown(trouble))
    return 1 if is_empty else 0


def _write(output: str, text: bytes) -> str:
    """Returns the path; "" for standard output."""
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


def _told(sums: Totals) -> str:
    saves, recoveries = counted(sums.saves, "save", "saves"), counted(sums.recoveries, "recovery", "recoveries")
    told = f"{saves}, {sums.durable:,} durable, {recoveries}, {sums.failed:,} failed"
    return told + (f", training blocked for {duration(sums.blocked_seconds)}" if sums.blocked_seconds else "")


def _facts(found: History) -> dict[str, Any]:
    return {
        "recoveries": [
            {"time": one.time, "name": one.name, "step": one.step, "seconds": one.seconds, "sources": dict(one.sources)}
            | {"passed_over": list(one.passed_over), "world_size": one.world_size}
            for one in found.recoveries
        ],
        "troubles": [asdict(one) for one in troubles_of(found)],
        "unread": list(found.troubles),
    }
