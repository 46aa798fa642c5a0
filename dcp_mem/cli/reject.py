"""`dcp-mem reject`: mark a checkpoint as not to be resumed from, or take that back."""

from __future__ import annotations

from dcp_mem.cli.options import CommonOptions
from dcp_mem.common.values import MEMORY, STORAGE, shown
from dcp_mem.errors import ConfigError
from dcp_mem.operations.housekeeping import reject_in_memory, reject_on_storage


def run(common: CommonOptions, checkpoint_id: str, why: str | None, undo: bool) -> int:
    settings, found, _ = common.find(checkpoint_id)
    name, save_id = found.name, found.save_id if checkpoint_id == found.save_id else ""
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
