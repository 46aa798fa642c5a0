"""What the demo and the script that it runs agree about; it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

RANKS, KILLED_RANK, KILLED_SAVE = 2, 1, 3
SIZES = {
    "default": {"width": 512, "layers": 8, "heads": 8, "context": 64},
    "small": {"width": 256, "layers": 3, "heads": 4, "context": 32},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The script's options, which come as one argument in JSON."""

    size: str
    steps: int
    journals: str  # the directory in which ranks record what happens
    save_every: int = 0  # 0 for no checkpoints at all
    path: str = ""  # where they are stored: a directory or URL
    memory_root: str = ""
    kill: bool = False  # whether a rank is to be killed while it saves
