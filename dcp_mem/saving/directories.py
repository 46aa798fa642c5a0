"""The directory of a checkpoint on storage, made with the save and not with its flush.

Programs that name only a path put files of their own there once the save has returned, list it, or
remove it. What it has inside from then on tells the flush that nobody has removed it.
"""

from __future__ import annotations

from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.errors import DcpMemError
from dcp_mem.flushing.registration import umask_for
from dcp_mem.format import names
from dcp_mem.saving.values import SaveContext
from dcp_mem.storage.posix import PosixStorage

_MOST_SECONDS = 10.0
"""For which a save waits for a file system that doesn't answer."""


def make_directory(context: SaveContext) -> str | None:
    """Make the checkpoint's directory, where its writer does; return what a manifest has of it.

    What goes wrong is logged: the checkpoint in memory is worth more than its directory.
    """
    url = context.settings.url
    if not context.settings.makes_directories or url is None or "://" in url:
        return None
    made: list[str] = []
    errors: list[DcpMemError] = []

    def make() -> None:
        try:
            made.append(_made(url, context))
        except DcpMemError as error:
            errors.append(error)

    daemon(make, "dcp_mem-directory").join(_MOST_SECONDS)
    if not made:
        why = errors[0] if errors else f"no answer within {_MOST_SECONDS:.0f} s"
        log.warning("%s/%s appears with its flush alone: %s", url, context.name, why)
        return None
    return made[0]


def _made(url: str, context: SaveContext) -> str:
    """Make a directory; return the identity of the `.metadata` that lay there, "" for none."""
    mode, file = context.settings.storage_mode, names.metadata_file(context.scope)
    storage = PosixStorage(url, None if mode is None else 0o777 & ~umask_for(mode))
    replaced = {entry.name: entry.identity for entry in storage.ls(context.name)}.get(file, "")
    storage.make_directory(f"{context.name}/{names.OWN}")
    return replaced
