"""`dcp-mem report`: write an HTML page about a job's checkpoints."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Any

import click

from dcp_mem.cli.options import INTERACTIVE_RETRIES, CommonOptions, subcommand
from dcp_mem.cli.screen import size
from dcp_mem.common.values import shown
from dcp_mem.errors import ConfigError
from dcp_mem.operations.history import History, Totals, read_history, totals
from dcp_mem.operations.inventory import searched_places
from dcp_mem.operations.report import counted, duration, render_page, troubles_of

_HELP = """Write an HTML page about a job's checkpoints: saves, flushes and recoveries over time,
sizes, throughput, what saves cost training, and what went wrong.

The page is one file without scripts, and needs no network. It is made from the histories on storage
and in this node's memory; on a node where the job never ran, only what became durable is known. An
existing FILE is replaced. Exit code 1 if nothing is known of the job.

Examples:
  dcp-mem report s3://ckpts/run-42
  dcp-mem report s3://ckpts/run-42 -o run-42.html
  dcp-mem report --job my-run               # a job that is in memory only
  dcp-mem report /mnt/nfs/run-42 -o - | mail -a 'Content-Type: text/html' ops@example.org
  dcp-mem report /mnt/nfs/run-42 --json | jq .totals.blocked_share
"""


_OF_RECOVERY = ("time", "name", "step", "seconds", "sources", "passed_over", "world_size")


@subcommand("report", _HELP, needs_root=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="The file to write; - for standard output.",
)
def command(common: CommonOptions, output: str) -> int:
    settings = common.settings()
    if output == "-" and common.screen.is_json:
        raise ConfigError("--json answers on standard output too: give -o FILE")
    found = read_history(settings, retry_policy=INTERACTIVE_RETRIES)
    sums, text = totals(found), render_page(found).encode()
    path = _write(output, text)
    common.screen.answer(
        job=found.job, root=found.url, output=path, totals=asdict(sums), **_facts(found)
    )
    if path:
        common.screen.line(f"{path}: {_summary(sums)} ({size(len(text))})")
    is_empty = not found.checkpoints and not found.recoveries
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
    saves, recoveries = (
        counted(sums.saves, "save", "saves"),
        counted(sums.recoveries, "recovery", "recoveries"),
    )
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
