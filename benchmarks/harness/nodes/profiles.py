"""Where the time of a call goes: functions of dcp_mem, and what they wait for in gloo."""

from __future__ import annotations

import cProfile
import pstats
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dcp_mem

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGE = Path(dcp_mem.__file__).parent
_LEAST = 0.02
"""Share of the whole below which a function isn't named."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds within a function, on the calling thread.

    Attributes:
        whole: With the functions that it calls.
        own: Without them.
    """

    function: str
    calls: int
    whole: float
    own: float


def profiled(act: Callable[[], object]) -> list[Spent]:
    """Call `act`, and return the functions that took longest, longest first."""
    profile = cProfile.Profile()
    profile.runcall(act)
    stats = pstats.Stats(profile)
    total = stats.total_tt  # type: ignore[attr-defined]
    found = [
        Spent(_name(file, name), calls, whole, own)
        for (file, _, name), (_, calls, own, whole, _) in stats.stats.items()  # type: ignore[attr-defined]
        if whole >= _LEAST * total and (file.startswith(str(_PACKAGE)) or own >= _LEAST * total)
    ]
    return sorted(found, key=lambda spent: -spent.whole)


def _name(file: str, name: str) -> str:
    path = Path(file)
    return f"{path.relative_to(_PACKAGE)} {name}" if path.is_relative_to(_PACKAGE) else name
