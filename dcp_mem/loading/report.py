"""The report of a load: bytes by source, added up over all ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_mem.loading.load_attempt import LoadAttempt
from dcp_mem.loading.open import OpenCheckpoint
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.loading.sources.remote import PEERS

_STORAGE = "storage"
_KINDS = (MemorySource.label, PEERS, _STORAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The report of a load, for all ranks together."""

    checkpoint_id: str
    save_id: str  # of the save; "" for a checkpoint that torch's own writer made
    # "memory" (of the rank's own node), "peers" (other nodes' memory), "storage", or several of
    # them with "and"
    source: str
    passed_over: tuple[str, ...]
    seconds: float
    step: int | None = None  # training step of the checkpoint; None where the writer wasn't told
    # Bytes that ranks took, by "memory", "peers" and "storage". What several ranks need counts for
    # each.
    sources: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    # names of the checkpoint's entries below a loaded one that no rank has loaded
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that ranks took, all together."""
        return sum(self.sources.values())


def report_of(
    load: LoadAttempt, opened: OpenCheckpoint, used: Counter[str], left_out: Sequence[str]
) -> RecoveryReport:
    """Return the report of a load that has just ended.

    `opened`: the checkpoint that was read; it may be closed by now. `used`: bytes that all ranks
    took, by the label of the source.
    """
    sources = _by_kind(used)
    choice = opened.choice
    return RecoveryReport(
        checkpoint_id=choice.name,
        save_id=choice.save_id,
        source=" and ".join(sources) or (MemorySource.label if choice.memory else _STORAGE),
        passed_over=tuple(load.reasons),
        seconds=time.monotonic() - load.request.started,
        step=opened.description.step,
        sources=sources,
        metrics=opened.description.metrics,
        left_out=tuple(left_out),
    )


def _by_kind(used: Counter[str]) -> dict[str, int]:
    """Return bytes by kind; a label other than memory's and peers' is a storage's."""
    added: Counter[str] = Counter()
    for label, nbytes in used.items():
        added[label if label in _KINDS else _STORAGE] += nbytes
    return {kind: added[kind] for kind in _KINDS if kind in added}
