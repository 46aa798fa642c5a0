"""The metadata that a save returns: made when somebody looks at it.

DCP sends what `dcp.save` returns from its coordinator to all ranks. For twenty thousand tensors
that takes longer than the save. Every rank knows the checkpoint by then, so the name of the save
travels in the metadata's place.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.comm.dcp_call import is_broadcast_by_dcp
from dcp_mem.common.values import SaveInfo
from dcp_mem.errors import DcpMemError
from dcp_mem.format.catalog import Catalog
from dcp_mem.format.catalog_conversion import metadata_of
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.metadata import LazyMetadata
from dcp_mem.runtime.session import Session

_known: WeakValueDictionary[str, ReturnedMetadata] = WeakValueDictionary()


class ReturnedMetadata(LazyMetadata):
    """The metadata of a save, on one rank.

    Other ranks of the node may be about to publish the checkpoint when this rank's part of it is
    complete, so its catalog is looked for later: when the save returns.
    """

    def __new__(cls, save_id: str = "", **changed: Any) -> Any:
        # dataclasses.replace calls this with fields, and gets a plain Metadata.
        return object.__new__(cls) if save_id else Metadata(**changed)

    def __init__(self, save_id: str) -> None:
        """Stand for the metadata of a save that isn't complete yet.

        Args:
            save_id: The save attempt.
        """

        def make() -> Metadata:
            raise DcpMemError("the checkpoint isn't complete, so it has no metadata")

        super().__init__(make)
        self.__dict__["_save_id"] = save_id
        _known[save_id] = self

    def settle(self, session: Session, manifest: Manifest, info: SaveInfo) -> None:
        """Take note of this rank's part of the checkpoint.

        Args:
            session: This process's session of the job.
            manifest: Of the checkpoint.
            info: What its coordinator's training loop said of it.
        """
        self.__dict__["_of_checkpoint"] = manifest, info
        self.__dict__["_find"] = lambda: session.catalogs.find(manifest.catalog)
        self.__dict__["_of"] = lambda catalog: metadata_of(
            Catalog.from_bytes(catalog), manifest.save_id, manifest.tails, manifest.name
        )

    def keep(self) -> ReturnedMetadata:
        """Keep the catalog of the complete checkpoint mapped for as long as this is in use."""
        find, of = self.__dict__.pop("_find", None), self.__dict__.pop("_of", None)
        if find is not None:
            catalog = find() or b""
            self.__dict__["_make"] = lambda: of(catalog)
        return self

    @property
    def made(self) -> tuple[Manifest, SaveInfo]:
        """The checkpoint's manifest, and what its coordinator's training loop said of it."""
        made: tuple[Manifest, SaveInfo] = self.__dict__["_of_checkpoint"]
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if is_broadcast_by_dcp():
            return _own_metadata_of, (self.__dict__["_save_id"],)
        return super().__reduce__()


def _own_metadata_of(save_id: str) -> Metadata:
    """Return this rank's metadata of a save, which another rank has named."""
    known = _known.get(save_id)
    if known is None:
        raise DcpMemError(f"this rank knows nothing of save {save_id}")
    return known.keep()
