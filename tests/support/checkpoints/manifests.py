"""Manifests as saves leave them, for tests of what reads them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dcp_mem.common.values import Segment
from dcp_mem.format.manifest import Manifest
from dcp_mem.format.segments import Segments


def make_manifest(segments: Iterable[Segment] = (), **fields: Any) -> Manifest:
    """The manifest of step-1, of these segments, with other fields in the place of the usual."""
    usual = {
        "name": "step-1",
        "save_id": "aa",
        "scope": "",
        "job": "job",
        "created": 1.0,
        "world_size": 1,
        "persist": True,
        "committer": "node",
        "catalog": "0123456789abcdef",
    }
    found = {**usual, **fields}
    return Manifest(**found, segments=Segments.of(found["save_id"], segments))


def of_four_ranks(nbytes: Callable[[int], int]) -> Iterator[Segment]:
    """The segments of four ranks on two nodes, of so many bytes by rank, of the save "aa"."""
    for rank in range(4):
        file = f"__{rank}_0-aa.distcp"
        yield Segment(rank=rank, node=f"node{rank // 2}", file=file, nbytes=nbytes(rank))
