"""`.metadata` beside a complete checkpoint in memory, for torch's own readers.

Nothing of dcp_mem's depends on it.
"""

from __future__ import annotations

import os
import uuid

from dcp_mem.common import files
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import MetadataTemplate, template_of
from dcp_mem.memory.catalogs import read_catalog


def put_stock_metadata(
    directory: str, manifest: Manifest, template: MetadataTemplate | None = None
) -> None:
    """Put `.metadata` beside a checkpoint that lies on one node alone.

    No other reader gets at the segments of other nodes.

    `directory`: the checkpoint's; the caller holds its turn. `template`: of the checkpoint's
    catalog; None: it is made of the catalog in the directory.
    """
    if len(manifest.nodes) > 1:
        return
    own = _own_path(directory, manifest)
    if not os.path.exists(own):
        template = template or template_of(read_catalog(directory, manifest.catalog))
        metadata = template.render(manifest.save_id, manifest.tails, manifest.name)
        files.write_atomically(own, metadata)
    target = os.path.join(directory, names.metadata_file(manifest.scope))
    temporary = f"{target}.{uuid.uuid4().hex[:8]}"
    files.link(own, temporary)
    os.rename(temporary, target)
    files.remove(temporary)  # a rename onto another name of the same file leaves both


def lend_stock_metadata(directory: str, manifest: Manifest) -> None:
    """Put `.metadata` beside links to all segments of a checkpoint, of whichever nodes they are.

    `directory`: the links'; the caller's alone.
    """
    target = os.path.join(directory, names.metadata_file(manifest.scope))
    try:
        files.link(_own_path(directory, manifest), target)
    except FileNotFoundError:  # it was about to be made, or the segments are of several nodes
        template = template_of(read_catalog(directory, manifest.catalog))
        metadata = template.render(manifest.save_id, manifest.tails, manifest.name)
        files.write_atomically(target, metadata)


def has_stock_metadata(directory: str, manifest: Manifest) -> bool:
    """Return whether the `.metadata` that lies in the directory is that of this checkpoint."""
    target = os.path.join(directory, names.metadata_file(manifest.scope))
    try:
        return os.path.samefile(_own_path(directory, manifest), target)
    except FileNotFoundError:
        return False


def _own_path(directory: str, manifest: Manifest) -> str:
    file = names.own_metadata_file(manifest.save_id, manifest.catalog)
    return os.path.join(directory, file)
