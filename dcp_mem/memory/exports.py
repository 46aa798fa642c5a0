"""The records of a job's exports, in its directory in a node's memory."""

from __future__ import annotations

import os

from dcp_mem.common import files
from dcp_mem.errors import ManifestInvalid
from dcp_mem.format.exports import ExportRecords

_FILE = ".exports.json"


def read_exports(directory: str) -> ExportRecords:
    """Return what is recorded of a job's exports on this node; a damaged file counts as none."""
    try:
        return ExportRecords.from_json(files.read_bytes(os.path.join(directory, _FILE)))
    except (FileNotFoundError, ManifestInvalid):
        return ExportRecords()


def write_exports(directory: str, records: ExportRecords) -> None:
    """Replace what is recorded of a job's exports. Only the node's agent does that.

    Raises MemoryBudgetExceeded, FileNotFoundError.
    """
    files.write_atomically(os.path.join(directory, _FILE), records.to_json())
