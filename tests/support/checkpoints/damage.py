"""Kinds of damage to a file."""

from pathlib import Path

from dcp_mem.format.manifest import ItemTable, NodeManifest

_NODES = ".dcp_mem/node-*.json"


def flip(path: Path, position: int | None = None) -> None:
    """Flip a bit, in the middle unless told where."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut a file in half. A slot, longer than its segment, keeps a part of the segment only."""
    path.write_bytes(path.read_bytes()[: min(path.stat().st_size // 2, 1000)])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def stored_tables(directory: Path) -> dict[str, ItemTable]:
    """Return where the items of each segment of a checkpoint on storage lie, by its file."""
    manifests = [NodeManifest.from_json(one.read_bytes()) for one in directory.glob(_NODES)]
    return {file: table for one in manifests for file, table in one.tables.items()}
