"""Named points in the save, flush and load paths at which tests can kill, stop or fail a process.

Points are armed through the environment. With
`DCP_MEM_FAULTS="stage.copied:kill:3,flush.committed:raise:1"`, the third pass of `stage.copied`
kills the process with SIGKILL, and the first of `flush.committed` raises. Unarmed, a point costs
one test of a global.
"""

from __future__ import annotations

import os
import signal
import threading

POINTS = (
    "save.agreed",  # every rank knows save id and decision; nothing has been written
    "stage.claimed",  # this rank has a slot
    "stage.copying",  # half of the payload bytes are copied
    "frozen.copied",  # frozen tensors are copied into a slot of their own
    "devices.enqueued",  # devices have been told to copy, and nobody has waited for them
    "stage.copied",  # all payload bytes are copied, but for what is left for later
    "frozen.sealed",  # the segment of frozen tensors has its name
    "overlap.begun",  # copies go on behind the training loop
    "overlap.copied",  # they have all been made
    "stage.sealed",  # the slot has the segment's name
    "complete.receipts",  # every rank knows that every rank has sealed
    "complete.catalog",  # this node has the catalog, but no manifest yet
    "complete.manifest",  # this node's manifest is in place: COMPLETE
    "complete.evicted",  # retention was applied
    "save.finished",  # torch's own finish has run on the coordinator
    "frozen.shared",  # this node has a copy of frozen items already, which gets another name
    "frozen.compared",  # all frozen bytes were held against their segment
    "checksums.made",  # of one segment; they don't lie beside it yet
    "replicate.started",
    "replicate.chunk",  # one chunk is on its way
    "replicate.reused",  # this node has copied bytes of an earlier copy instead of receiving them
    "replicate.received",  # this node has a copy, and has verified it
    "replicate.sealed",  # the copy has its name, and its checksums lie beside it
    "replicate.recorded",  # this node has recorded REPLICATED
    "flush.started",
    "claim.taken",  # the run has a generation on storage, and memory doesn't know it yet
    "reuse.part",  # storage has copied one part of a segment from an earlier checkpoint
    "reuse.whole",  # storage has copied a segment from an earlier checkpoint
    "flush.part",  # one part of a segment is on storage
    "flush.parts",  # all parts of a segment are on storage, and it isn't finished
    "flush.segment",  # one segment is on storage
    "flush.segments",  # all segments of this node are on storage
    "flush.node_manifest",
    "flush.manifest",
    "flush.commit",  # just before the put of .metadata
    "flush.committed",  # just after it, before that is recorded in memory
    "flush.recorded",
    "export.shard",  # one shard of an export is whole
    "export.shards",  # all are, and there is no index
    "export.shown",  # the export is there, and the agent doesn't know it
    "ranks.exchange",  # this rank is about to exchange something with the others
    "recover.surveyed",  # every rank knows what every node holds
    "recover.told",  # nodes that hold nothing of the checkpoint have its catalog
    "load.batch",  # bytes for several ranks, or of another node, are there
    "mend.begun",  # every node knows the checkpoint whose segments or copies are to be rebuilt
    "mend.done",  # lost segments have been rebuilt from parity
    "torchft.staged",  # a state for replicas that heal lies in memory
    "torchft.pulling",  # a replica that heals knows what it is about to read
)


class FaultInjected(RuntimeError):
    """The error that an armed `raise` raises."""


def _parse(text: str) -> dict[str, tuple[str, int]]:
    armed = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, action, count = entry.split(":")
        if name not in POINTS:
            raise ValueError(f"DCP_MEM_FAULTS names {name!r}; the points are {', '.join(POINTS)}")
        armed[name] = (action, int(count))
    return armed


_armed = _parse(os.environ.get("DCP_MEM_FAULTS", ""))


def arm(text: str) -> None:
    """Arm this process as DCP_MEM_FAULTS does; an empty text disarms it."""
    global _armed
    _armed = _parse(text)


def is_armed(name: str) -> bool:
    """Return whether something is still to happen at this point."""
    return _armed.get(name, ("", 0))[1] > 0


def point(name: str) -> None:
    """Do what was armed for this point; nothing otherwise."""
    if _armed:
        _pass(name)


def _pass(name: str) -> None:
    action, left = _armed.get(name, ("", 0))
    if not action or left == 0:
        return
    _armed[name] = (action, left - 1)
    if left > 1:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # To this thread: else it might go on until the main thread has stopped.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == "raise":
        raise FaultInjected(f"fault injected at {name}")
    else:
        raise ValueError(f"DCP_MEM_FAULTS: {action!r} is none of kill, stop, raise")
