"""`dcp-mem rm`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click
from rich.text import Text

from dcp_mem.cli.options import PATIENCE, Asked, places_of, subcommand
from dcp_mem.cli.screen import age, shown, size
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointInUse, ConfigError
from dcp_mem.operating.housekeeping import delete, evict
from dcp_mem.operating.inventory import MEMORY, STORAGE, Checkpoint, find, inventory

_HELP = """Remove checkpoints from this node's memory and from storage.

ID: a name, or a save id; all that lies under the name goes. Asks first on a terminal; elsewhere it needs --yes. The newest
checkpoint that is durable and whole stays unless --force: a restart would have nothing to load. What somebody reads or flushes
at the moment stays (exit code 1; on storage, --force removes it). On storage, what makes it a checkpoint goes first: broken off,
the command can be repeated.

Examples:
  dcp-mem rm s3://ckpts/run-42 step-100 step-200
  dcp-mem rm /mnt/nfs/run-42 step-100 --yes
  dcp-mem rm - step-1 --job my-run --yes --force
"""


@dataclass(frozen=True, slots=True)
class _Removed:
    """What became of a name. kept: why it is still there ("" if it isn't)."""

    name: str
    freed_nbytes: int
    kept: str


@subcommand("rm", _HELP)
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also the newest durable checkpoint, and what is being read from storage.")
def command(asked: Asked, ids: tuple[str, ...], yes: bool, force: bool) -> int:
    settings = asked.settings()
    there = inventory(settings, patience=PATIENCE)
    wanted = {find(there, one, places_of(settings)).name for one in ids}
    chosen = [one for one in there if one.name in wanted]
    _refuse_the_newest(there, chosen, force)
    if not yes:
        _ask(asked, chosen)
    removed = [_remove(settings, name, [one for one in chosen if one.name == name], force) for name in sorted(wanted)]
    asked.screen.answer(
        removed=[{"name": one.name, "freed_bytes": one.freed_nbytes, "kept": one.kept} for one in removed]
    )
    for one in removed:
        if one.kept:
            asked.screen.line(Text(shown(f"{one.name} stays: {one.kept}"), "red"))
        else:
            asked.screen.line(f"{one.name} is gone; {size(one.freed_nbytes)} freed")
    return 1 if any(one.kept for one in removed) else 0


def _refuse_the_newest(there: list[Checkpoint], chosen: list[Checkpoint], force: bool) -> None:
    newest = next((one for one in there if one.is_durable), None)
    if newest in chosen and not force:
        assert newest is not None
        raise ConfigError(
            f"{newest.name} is the newest durable checkpoint of the job: give --force to remove it all the same"
        )


def _ask(asked: Asked, chosen: list[Checkpoint]) -> None:
    if asked.screen.is_json or not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: give --yes to remove them")
    for one in chosen:
        asked.screen.line(f"{one.name}: {size(one.nbytes)} ({' + '.join(one.places)}), {age(one.created)} old")
    click.confirm("Remove them?" if len(chosen) > 1 else "Remove it?", abort=True)


def _remove(settings: Settings, name: str, chosen: list[Checkpoint], force: bool) -> _Removed:
    """Memory first: what is pending there would be flushed again."""
    freed, kept = 0, ""
    if any(MEMORY in one.places for one in chosen):
        freed, kept = evict(settings, name)
    if not kept and any(STORAGE in one.places for one in chosen):
        assert settings.url is not None
        try:
            freed += delete(settings.url, name, storage_options=settings.storage_options, force=force)
        except CheckpointInUse as error:
            kept = str(error)
    return _Removed(name, freed, kept)
