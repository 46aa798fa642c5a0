"""Names of files and directories, in memory and on storage."""

from __future__ import annotations

import re
import uuid
from functools import cache

SEGMENT = re.compile(r"__(\d+)_(\d+)-([0-9a-f]{8})\.distcp")
PARITY = re.compile(r"__parity_(\d+)_([0-9a-f]{8})-([0-9a-f]{8})\.xor")
OWN = ".dcp_mem"
"""Directory of our own files, beside the segments."""
SAVE_ID_NBYTES = 8
DCP_VERSION = "1.0.0"
"""The version that DCP gives its metadata format."""
FROZEN = 1 << 24
"""Added to a rank, it numbers that rank's second segment: of what doesn't change from save to save.

A segment's number, its rank or this, tells it from the checkpoint's other segments everywhere.
"""
COLLECTIVE = ""
"""Scope of a checkpoint that all ranks saved together; `r<rank>` where a rank saved alone."""


def new_save_id() -> str:
    """Return an id for one save attempt, which is part of every file name of that attempt."""
    return uuid.uuid4().hex[:SAVE_ID_NBYTES]


def job_file(file: str) -> str:
    """Return the key, in a job's root, of a file that belongs to no checkpoint.

    Hidden, for programs that take all names in the root for checkpoints.
    """
    return f"{OWN}/{file}"


def segment_file(rank: int, save_id: str) -> str:
    """Return the name of a rank's segment.

    `rank`: the rank that saves it, with `FROZEN` added for its second segment.
    """
    second, rank = divmod(rank, FROZEN)
    return f"__{rank}_{second}-{save_id}.distcp"


def rank_of(file: str) -> int:
    """Return the rank that wrote a segment's file; 0 for any other file.

    `FROZEN` is added for a rank's second segment, which has a number of its own by that.
    """
    match = SEGMENT.fullmatch(file)
    return int(match[1]) + int(match[2]) * FROZEN if match else 0


def home_rank(number: int) -> int:
    """Return the rank that wrote a segment."""
    return number % FROZEN


def parity_file(rank: int, key: str, save_id: str) -> str:
    """Return the name of parity that a rank keeps.

    `key`: digest of what it is the parity of; a directory may hold several of one save.
    """
    return f"__parity_{rank}_{key}-{save_id}.xor"


def save_id_of(file: str) -> str:
    """Return the save id of a segment or of parity; "" for any other file."""
    match = SEGMENT.fullmatch(file) or PARITY.fullmatch(file)
    return match[3] if match else ""


def rank_scope(rank: int) -> str:
    """Return the scope of a checkpoint that this rank saved alone."""
    return f"r{rank}"


@cache
def metadata_file(scope: str) -> str:
    """Return `.metadata`, or torch's name for it where a rank saved without collectives."""
    return ".metadata" if scope == COLLECTIVE else f"__{scope[1:]}.metadata"


@cache
def manifest_file(scope: str) -> str:
    """Return the name of the manifest in memory."""
    return f"{OWN}/manifest{scope and '-' + scope}.json"


def own_metadata_file(save_id: str, catalog: str) -> str:
    """Return a name for one attempt's metadata that nothing else replaces."""
    return f"{OWN}/metadata-{save_id}-{catalog}"


def catalog_file(key: str) -> str:
    """Return the name of the catalog with this key."""
    return f"{OWN}/catalog-{key}"


def flushing_file(save_id: str) -> str:
    """Return the name of the file on which the process that flushes this attempt holds a lease."""
    return f"{OWN}/flushing-{save_id}"


@cache
def flush_file(scope: str) -> str:
    """Return the name of the flush record."""
    return f"{OWN}/flush{scope and '-' + scope}.json"


@cache
def replication_file(scope: str) -> str:
    """Return the name of the replication record."""
    return f"{OWN}/replication{scope and '-' + scope}.json"


def checksums_file(file: str) -> str:
    """Return the name of the checksums of a segment in memory; it has the segment's save id."""
    return f"{OWN}/checksums-{file.rpartition('.')[0]}.json"


def rejection_file(save_id: str) -> str:
    """Return the name of the file that marks a checkpoint as rejected, in memory and on storage."""
    return f"{OWN}/rejected-{save_id}.json"


def stripe_file(file: str) -> str:
    """Return the name of the record that says what parity in memory is the parity of."""
    return f"{OWN}/{file[2:].rpartition('.')[0]}.json"


def stored_manifest(save_id: str) -> str:
    """Return the key of the whole checkpoint's manifest on storage."""
    return f"{OWN}/manifest-{save_id}.json"


def stored_node_manifest(save_id: str, node: str) -> str:
    """Return the key of one node's manifest on storage: its segments with their checksums."""
    return f"{OWN}/node-{save_id}-{node}.json"


def stored_ticket(save_id: str) -> str:
    """Return the key that decides once whether an attempt is committed or dropped."""
    return f"{OWN}/ticket-{save_id}.json"


def stored_segment_table(save_id: str, rank: int) -> str:
    """Return the key of one segment's manifest on storage, put by a node that holds a copy."""
    return f"{OWN}/segment-{save_id}-{rank}.json"
