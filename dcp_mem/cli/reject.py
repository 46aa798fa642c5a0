"""`dcp-mem reject`: mark a checkpoint as not to be resumed from, or take that back."""

from __future__ import annotations

import click

from dcp_mem.cli.options import INTERACTIVE_RETRIES, CommonOptions, subcommand
from dcp_mem.common.values import MEMORY, STORAGE, shown
from dcp_mem.config import Settings
from dcp_mem.errors import ConfigError
from dcp_mem.operations.inventory import find_all, list_checkpoints
from dcp_mem.operations.rejecting import reject_in_memory, reject_on_storage

_HELP = """Mark a checkpoint as not to be resumed from, in this node's memory and on storage.

ID is a step, a name or a save id; a save id means that save alone, and no later one of its name.
Restarts pass over the checkpoint from then on, and their report has TEXT; a load that names it
still takes it. It stays where it is until `dcp-mem rm` removes it, and retention doesn't count it.
--undo takes the mark back: run it on each node whose memory has one (`dcp-mem ls` shows it). Exit
code 1 if there is no such checkpoint.

Examples:
  dcp-mem reject s3://ckpts/run-42 1200 --why "the loss is NaN"
  dcp-mem reject /mnt/nfs/run-42 step-1200 --undo
  dcp-mem reject - 7 --job my-run --why "wrong learning rate"
"""


@subcommand("reject", _HELP)
@click.argument("checkpoint_id", metavar="ID")
@click.option("--why", metavar="TEXT", help="The reason, for people.")
@click.option("--undo", is_flag=True, help="Take the mark back.")
def command(common: CommonOptions, checkpoint_id: str, why: str | None, undo: bool) -> int:
    settings = common.settings()
    if undo == bool(why):
        raise click.UsageError("give either --why TEXT or --undo")
    name, save_id = _meant(settings, checkpoint_id)
    reason = None if undo else why
    # Storage last: what it says holds for all nodes.
    marked = [
        reject(settings, name, reason, save_id) for reject in (reject_in_memory, reject_on_storage)
    ]
    what = f"{name} (save {save_id})" if save_id else name
    if not any(marked):
        raise ConfigError(
            f"{what} isn't marked here" if undo else f"{what} can't be marked: it has no manifest"
        )
    places = [
        place for place, is_marked in zip((MEMORY, STORAGE), marked, strict=True) if is_marked
    ]
    common.screen.answer(name=name, is_rejected=not undo, why=why or "", places=places)
    done = "is not rejected any more" if undo else f"is rejected: {why}"
    common.screen.line(shown(f"{what} {done} ({' + '.join(places)})"))
    return 0


def _meant(settings: Settings, checkpoint_id: str) -> tuple[str, str]:
    """Return the name of a checkpoint that there is, and its save id where that was given."""
    known = list_checkpoints(settings, retry_policy=INTERACTIVE_RETRIES)
    is_known = any(checkpoint_id in (one.name, one.save_id) for one in known)
    if checkpoint_id.isdecimal() and not is_known:
        checkpoint_id = f"step-{int(checkpoint_id)}"
    (found,) = find_all(known, [checkpoint_id], settings)
    return found.name, "" if checkpoint_id == found.name else found.save_id
