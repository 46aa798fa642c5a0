"""The metadata that a save returns: made when somebody looks at it.

For twenty thousand tensors that takes longer than the save. Every rank knows the checkpoint when
the save returns, so each makes it by itself.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import DcpMemError
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import LazyMetadata
from dcp_mem.runtime.session import Session


class ReturnedMetadata(LazyMetadata):
    """The metadata of a save, on one rank. DCP has to be given it before the save is complete."""

    def __new__(cls, **changed: Any) -> Any:
        # dataclasses.replace calls this with fields, and gets a plain Metadata.
        return Metadata(**changed) if changed else object.__new__(cls)

    def __init__(self) -> None:
        """Stand for the metadata of a save that isn't complete yet."""

        def make() -> Metadata:
            raise DcpMemError("the checkpoint isn't complete, so it has no metadata")

        super().__init__(make)

    def settle(self, session: Session, manifest: Manifest, info: SaveInfo) -> ReturnedMetadata:
        """Note the complete checkpoint, and keep its catalog mapped while this is in use."""
        catalog = session.catalogs.find(manifest.catalog) or b""
        self.__dict__["_of_checkpoint"] = manifest, info
        self.__dict__["_make"] = lambda: metadata_of(
            Catalog.from_bytes(catalog), manifest.save_id, manifest.tails, manifest.name
        )
        return self

    @property
    def made(self) -> tuple[Manifest, SaveInfo]:
        """The checkpoint's manifest, and what its coordinator's training loop said of it."""
        made: tuple[Manifest, SaveInfo] = self.__dict__["_of_checkpoint"]
        return made
