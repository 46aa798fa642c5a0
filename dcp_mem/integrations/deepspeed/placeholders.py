"""Placeholders: small files, by whose names DeepSpeed finds what lies in memory."""

from __future__ import annotations

from pathlib import Path

import torch

_TEXT = (
    "This file's content lies in node memory, or on storage, under {tag}: "
    "load it by dcp_mem.integrations.deepspeed.\n"
)
_BEGINNING = _TEXT.partition("{")[0].encode()
_LARGEST_BYTES = 4096
"""No placeholder is larger, neither ours nor that of DeepSpeed's engine for Nebula."""


def place(path: Path) -> None:
    """Put a placeholder at a path; the last part of its directory is the checkpoint's tag."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_TEXT.format(tag=path.parent.name))


def has_content(path: Path) -> bool:
    """Return whether DeepSpeed has saved a file itself: it is there, and is no placeholder."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_LARGEST_BYTES + 1)
    if len(start) > _LARGEST_BYTES:
        return True
    if _BEGINNING.startswith(start[: len(_BEGINNING)]):  # also if its writer was killed
        return False
    # DeepSpeed's engine for Nebula saves an empty text in the place of the states.
    return not isinstance(torch.load(path, map_location="cpu", weights_only=False), str)
