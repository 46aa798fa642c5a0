"""Names of files and directories, in memory and on storage."""

from __future__ import annotations

import re
import uuid

SEGMENT = re.compile(r"__(\d+)_(\d+)-([0-9a-f]{8})\.distcp")
PARITY = re.compile(r"__parity_(\d+)_([0-9a-f]{8})-([0-9a-f]{8})\.xor")
OWN = ".dcp_mem"
DCP_VERSION = "1.0.0"
"""What DCP calls the format of its metadata."""
COLLECTIVE = ""
"""Scope of a checkpoint that all ranks saved together; a rank that saved alone has the scope `r<rank>`."""


def new_save_id() -> str:
    """An id for one save attempt; it is part of every file name of that attempt."""
    return uuid.uuid4().hex[:8]


def segment_file(rank: int, save_id: str) -> str:
    return f"__{rank}_0-{save_id}.distcp"


def rank_of(file: str) -> int:
    """The rank that a segment's file is of, 0 for a file that is named otherwise."""
    match = SEGMENT.fullmatch(file)
    return int(match[1]) if match else 0


def parity_file(rank: int, key: str, save_id: str) -> str:
    """Parity that a rank keeps. key: of what; there may be other parity of that save in the same place."""
    return f"__parity_{rank}_{key}-{save_id}.xor"


def save_id_of(file: str) -> str:
    """The save that a segment, or parity, belongs to; "" for any other file."""
    match = SEGMENT.fullmatch(file) or PARITY.fullmatch(file)
    return match[3] if match else ""


def rank_scope(rank: int) -> str:
    return f"r{rank}"


def metadata_file(scope: str) -> str:
    """`.metadata`, or what torch calls it for a rank that saved without collectives."""
    return ".metadata" if scope == COLLECTIVE else f"__{scope[1:]}.metadata"


def manifest_file(scope: str) -> str:
    return f"{OWN}/manifest{scope and '-' + scope}.json"


def own_metadata_file(save_id: str, catalog: str) -> str:
    """The metadata of one attempt, made from this catalog, under a name that nothing else replaces."""
    return f"{OWN}/metadata-{save_id}-{catalog}"


def catalog_file(key: str) -> str:
    return f"{OWN}/catalog-{key}"


def flushing_file(save_id: str) -> str:
    """Whoever flushes this attempt holds it."""
    return f"{OWN}/flushing-{save_id}"


def flush_file(scope: str) -> str:
    return f"{OWN}/flush{scope and '-' + scope}.json"


def replication_file(scope: str) -> str:
    return f"{OWN}/replication{scope and '-' + scope}.json"


def checksums_file(file: str) -> str:
    """What a segment in memory is verified by; it has the save id in its name, as the segment has."""
    return f"{OWN}/checksums-{file.rpartition('.')[0]}.json"


def stripe_file(file: str) -> str:
    """What parity in memory is the parity of, and is verified by."""
    return f"{OWN}/{file[2:].rpartition('.')[0]}.json"


def stored_manifest(save_id: str) -> str:
    """Key of the whole checkpoint's manifest on storage."""
    return f"{OWN}/manifest-{save_id}.json"


def stored_node_manifest(save_id: str, node: str) -> str:
    """Key of one node's manifest on storage: its segments with their checksums."""
    return f"{OWN}/node-{save_id}-{node}.json"


def stored_segment_table(save_id: str, rank: int) -> str:
    """Key of the manifest of one segment on storage, which somebody has put there in place of its node."""
    return f"{OWN}/segment-{save_id}-{rank}.json"
