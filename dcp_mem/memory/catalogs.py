"""Catalogs in a node's memory, and `.metadata` made of them, for torch's own readers.

Each catalog is written once, mapped by its readers, and linked beside every checkpoint that it
describes. Nothing of dcp_mem's depends on a `.metadata`.
"""

from __future__ import annotations

import mmap
import os
import threading
import uuid
from collections.abc import Collection
from typing import Any

from dcp_mem.common import files
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format import names
from dcp_mem.format.catalog import Catalog, catalog_key, catalog_named
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata_template import MetadataTemplate, template_of
from dcp_mem.memory.checkpoint import files_in
from dcp_mem.memory.root import private_directory


class Catalogs:
    """The catalogs of one job. Those that this process has put or asked for stay mapped.

    A save puts, links and drops catalogs in its turn; any thread may look for one.
    """

    def __init__(self, directory: str) -> None:
        self._directory = private_directory(os.path.join(directory, ".catalogs"))
        self._mapped: dict[str, mmap.mmap] = {}
        self._guard = threading.Lock()  # not held while a catalog is written

    def put(self, data: Any) -> str:
        """Write a catalog, and return its key."""
        key = catalog_key(data)
        if not os.path.exists(self._path(key)):
            files.write_atomically(self._path(key), data)
        while self.find(key) is None:  # another process may just have removed it
            files.write_atomically(self._path(key), data)
        return key

    def link(self, key: str, checkpoint_directory: str) -> None:
        """Put a catalog beside a checkpoint's segments."""
        path = os.path.join(checkpoint_directory, names.catalog_file(key))
        try:
            files.link(self._path(key), path)
        except FileExistsError:
            return
        except FileNotFoundError:  # another process has closed its writer, and removed it
            with self._guard:
                data = self._mapped[key]
            files.write_atomically(path, data)

    def find(self, key: str) -> mmap.mmap | None:
        """Return a catalog's bytes, mapped; None where the job's last writer has been closed."""
        with self._guard:
            data = self._mapped.get(key)
            if data is None:
                try:
                    data = self._mapped[key] = _mapped(self._path(key))
                except FileNotFoundError:
                    return None
            return data

    def get(self, key: str) -> Catalog:
        """Return a catalog."""
        data = self.find(key)
        if data is None:
            raise ManifestInvalid(f"the catalog {key} has left memory")
        return Catalog.from_bytes(data)

    def keep_only(self, keys: Collection[str]) -> None:
        """Unmap and remove all others: no plan of this process needs them any more.

        `keys`: of the catalogs that stay; others go only if this process has them mapped.
        """
        with self._guard:
            for key in [key for key in self._mapped if key not in keys]:
                del self._mapped[key]
                files.remove(self._path(key))

    def clear(self) -> None:
        """Remove all catalogs from here; a checkpoint's own are linked beside it."""
        for entry in files_in(self._directory):
            files.remove(os.path.join(self._directory, entry))

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, key)


def read_catalog(checkpoint_directory: str, key: str) -> Catalog:
    """Return the catalog that lies beside a checkpoint."""
    return catalog_named(key, _mapped(os.path.join(checkpoint_directory, names.catalog_file(key))))


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as stream:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ManifestInvalid(f"{os.path.basename(path)} is empty") from None


# -- .metadata -------------------------------------------------------------------------------------


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
