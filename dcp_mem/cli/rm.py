"""`dcp-mem rm`: remove checkpoints from memory and from storage."""

from __future__ import annotations

import sys

import click
from rich.text import Text

from dcp_mem.cli.options import CommonOptions
from dcp_mem.cli.screen import age, size
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import MEMORY, STORAGE, CheckpointStatus, shown
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointInUse, ConfigError
from dcp_mem.operations.housekeeping import delete, evict
from dcp_mem.operations.inventory import find_all


@value_class
class _Removed:
    name: str
    freed_nbytes: int
    kept: str  # why it is still there; "" if it is gone


def run(common: CommonOptions, ids: tuple[str, ...], yes: bool, force: bool) -> int:
    settings, known = common.find_all()
    wanted = {one.name for one in find_all(known, ids, settings)}
    chosen = [one for one in known if one.name in wanted]
    newest = next((one for one in known if one.is_durable), None)
    if newest is not None and newest in chosen and not force:
        raise ConfigError(
            f"{newest.name} is the newest durable checkpoint of the job: give --force to remove "
            f"it all the same"
        )
    if not yes:
        _ask(common, chosen)
    removed = [
        _remove(settings, name, [one for one in chosen if one.name == name], force)
        for name in sorted(wanted)
    ]
    common.screen.answer(removed=removed)
    for one in removed:
        if one.kept:
            common.screen.line(Text(shown(f"{one.name} stays: {one.kept}"), "red"))
        else:
            common.screen.line(f"{one.name} is gone; {size(one.freed_nbytes)} freed")
    return 1 if any(one.kept for one in removed) else 0


def _ask(common: CommonOptions, chosen: list[CheckpointStatus]) -> None:
    if common.screen.is_json or not sys.stdin.isatty():
        raise ConfigError("nobody can be asked here: give --yes to remove them")
    for one in chosen:
        common.screen.line(
            f"{one.name}: {size(one.nbytes)} ({' + '.join(one.places)}), {age(one.created)} old"
        )
    click.confirm("Remove them?" if len(chosen) > 1 else "Remove it?", abort=True)


def _remove(settings: Settings, name: str, chosen: list[CheckpointStatus], force: bool) -> _Removed:
    """Remove a name from memory and then from storage: what is pending would be flushed again."""
    freed, kept = 0, ""
    if any(MEMORY in one.places for one in chosen):
        freed, kept = evict(settings, name)
    if not kept and any(STORAGE in one.places for one in chosen):
        assert settings.url is not None
        try:
            freed += delete(
                settings.url, name, storage_options=settings.storage_options, force=force
            )
        except CheckpointInUse as error:
            kept = str(error)
    return _Removed(name, freed, kept)
