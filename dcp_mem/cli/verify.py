"""`dcp-mem verify`: compare every byte of checkpoints with its checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from dcp_mem.cli.options import INTERACTIVE_RETRIES, CommonOptions
from dcp_mem.cli.screen import Screen, size
from dcp_mem.common.values import shown
from dcp_mem.operations.inventory import searched_places
from dcp_mem.storage.routes import storage_of

if TYPE_CHECKING:  # it imports torch
    from dcp_mem.operations.verify import Damage, Verified

_MOST = 20


def run(common: CommonOptions, checkpoint_id: str | None) -> int:
    screen = common.screen
    with screen.progress("looking for checkpoints"):
        if checkpoint_id is not None:
            settings, one, storage = common.find(checkpoint_id)
            chosen = [one]
        else:
            settings, chosen = common.find_all()
            storage = storage_of(settings, INTERACTIVE_RETRIES)
    with screen.progress("importing torch"):
        from dcp_mem.operations.verify import verify
    results: list[Verified] = []
    with screen.progress("verifying") as progress:
        for checkpoint in chosen:
            results += verify(settings, storage, checkpoint, progress)
    is_damaged = any(result.damages for result in results)
    common.screen.answer(is_damaged=is_damaged, results=results)
    _show(common.screen, results)
    if not chosen:
        common.screen.note(f"no checkpoints in {searched_places(settings)}")
    return 1 if is_damaged or not chosen else 0


def _show(screen: Screen, results: list[Verified]) -> None:
    screen.table(
        results,
        {
            "NAME": lambda one: one.name,
            "WHERE": lambda one: one.place,
            "VERDICT": _verdict,
            ">CHECKED": lambda one: size(one.checked_nbytes),
            "NOT CHECKED, SINCE": lambda one: one.why_unchecked,
        },
    )
    for result in results:
        if result.damages:
            screen.line()
            where = f"on {result.place}" if result.place == "storage" else f"in {result.place}"
            screen.line(Text(shown(f"{result.name} {where}:"), "bold"))
        for damage in result.damages[:_MOST]:
            screen.line(f"  {_damage_text(damage)}")
        if len(result.damages) > _MOST:
            screen.line(f"  … and {len(result.damages) - _MOST} more (--json has all)")


def _verdict(result: Verified) -> Text:
    if result.damages:
        return Text("damaged", "bold red")
    return Text("whole", "green") if result.checked_nbytes else Text("not checked", "yellow")


def _damage_text(damage: Damage) -> str:
    if not damage.file:
        return damage.what
    segment = f"segment of rank {damage.rank} ({damage.file})"
    if damage.block < 0:
        return f"{segment}: {damage.what}"
    item = f"MiB {damage.block} of {damage.item or 'an item'}"
    return f"{item}: {damage.what}; bytes {damage.start} to {damage.stop} of the {segment}"
