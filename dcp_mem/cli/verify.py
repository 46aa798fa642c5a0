"""`dcp-mem verify`."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.text import Text

from dcp_mem.cli.options import PATIENCE, Asked, places_of, subcommand
from dcp_mem.cli.screen import Screen, shown, size
from dcp_mem.operating.inventory import find, inventory
from dcp_mem.operating.verify import Damage, Verified, verify
from dcp_mem.storage.routes import open_storage

_HELP = """Read every byte of checkpoints, in this node's memory and on storage, and hold it against its CRC32Cs.

ID: one checkpoint, by name or save id; by default all. Exits with 1 where anything is damaged, and says which MiB of which
tensor. What lies in memory only has no checksums yet, unless it was copied between nodes: the flush computes them.

Examples:
  dcp-mem verify s3://ckpts/run-42
  dcp-mem verify s3://ckpts/run-42 step-100
  dcp-mem verify /mnt/nfs/run-42 --json | jq '.results[].damages[]'
"""
_MOST = 20


@subcommand("verify", _HELP)
@click.argument("checkpoint_id", metavar="[ID]", required=False)
def command(asked: Asked, checkpoint_id: str | None) -> int:
    settings = asked.settings()
    there = inventory(settings, patience=PATIENCE)
    chosen = there if checkpoint_id is None else [find(there, checkpoint_id, places_of(settings))]
    storage = None if settings.url is None else open_storage(settings.url, settings.storage_options, PATIENCE)
    results: list[Verified] = []
    with asked.screen.progress("verifying") as progress:
        for checkpoint in chosen:
            results += verify(settings, storage, checkpoint, progress)
    is_damaged = any(result.damages for result in results)
    asked.screen.answer(is_damaged=is_damaged, results=[_facts(result) for result in results])
    _show(asked.screen, results)
    if not chosen:
        asked.screen.note(f"no checkpoints in {places_of(settings)}")
    return 1 if is_damaged or not chosen else 0


def _facts(result: Verified) -> dict[str, object]:
    facts = asdict(result)
    facts["checked_bytes"], facts["unchecked_bytes"] = facts.pop("checked_nbytes"), facts.pop("unchecked_nbytes")
    return facts


def _show(screen: Screen, results: list[Verified]) -> None:
    rows: list[list[str | Text]] = [
        [result.name, result.place, _verdict(result), size(result.checked_nbytes), result.why_unchecked]
        for result in results
    ]
    screen.table(["NAME", "WHERE", "VERDICT", ">CHECKED", "NOT CHECKED, SINCE"], rows)
    for result in results:
        if result.damages:
            screen.line()
            where = f"on {result.place}" if result.place == "storage" else f"in {result.place}"
            screen.line(Text(shown(f"{result.name} {where}:"), "bold"))
        for damage in result.damages[:_MOST]:
            screen.line(f"  {_said(damage)}")
        if len(result.damages) > _MOST:
            screen.line(f"  … and {len(result.damages) - _MOST} more (--json has all)")


def _verdict(result: Verified) -> Text:
    if result.damages:
        return Text("damaged", "bold red")
    return Text("whole", "green") if result.checked_nbytes else Text("not checked", "yellow")


def _said(damage: Damage) -> str:
    if not damage.file:
        return damage.what
    segment = f"segment of rank {damage.rank} ({damage.file})"
    if damage.block < 0:
        return f"{segment}: {damage.what}"
    item = f"MiB {damage.block} of {damage.item or 'an item'}"
    return f"{item}: {damage.what}; bytes {damage.start} to {damage.stop} of the {segment}"
