"""Retention in this node's memory: apply the policy, and evict checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcp_mem.common.log import log
from dcp_mem.common.values import Outcome
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.memory.links import drop_dead_links
from dcp_mem.memory.locks import in_turn, is_in_use
from dcp_mem.policy.admission import retire
from dcp_mem.policy.facts import CheckpointFacts
from dcp_mem.policy.retention import KeepLast, Retention

_LEAST_RECORDS = 256 << 10


def apply_retention(
    memory: JobMemory,
    scope: str,
    policy: Retention,
    *,
    gets_copies: bool,
    persists_all: bool,
    made: str = "",
) -> None:
    """Evict what the policy doesn't keep, except what is being read or flushed, or still needed.

    `scope`: "" or the rank whose own checkpoints these are. `gets_copies`: whether checkpoints are
    replicated. The newest one that is then stays until a newer one is. `persists_all`: whether a
    checkpoint that is meant for storage stays until it is there. `made`: save id of the checkpoint
    that older ones leave for; "" for none. It stays where it has just been rejected, too, until the
    next one is made.
    """
    drop_dead_links(memory.links)
    # Several ranks of a node may close at once. What one of them takes out must not look to another
    # as if it were in use: a newer checkpoint would leave in its place.
    with in_turn(memory.slots):
        checkpoints = memory.checkpoints()
        kept = kept_checkpoints(
            checkpoints,
            scope,
            policy,
            gets_copies=gets_copies,
            persists_all=persists_all,
            in_detail=False,
        )
        why = "superseded by a newer checkpoint"
        kept = tuple(one for one in kept if not (one.rejected and one.key == made))
        while leaving := retire(kept, policy.most or 1):
            in_use = evict(memory, checkpoints, leaving, why)
            if not in_use:
                return
            # It stays, and another one may have to leave in its place.
            kept = tuple(
                replace(one, busy=one.busy or one.key in in_use)
                for one in kept
                if one.key not in leaving or one.key in in_use
            )


def records_nbytes(checkpoints: Sequence[LocalCheckpoint]) -> int:
    """Return what the files beside the segments of one more checkpoint will take, at least.

    They are about those of the newest; of a first one nothing is known yet.

    `checkpoints`: all that lie in memory on this node, newest first.
    """
    newest = [one.records_nbytes() for one in checkpoints[:1]]
    return max([_LEAST_RECORDS, *newest])


def kept_checkpoints(
    checkpoints: Sequence[LocalCheckpoint],
    scope: str,
    policy: Retention,
    *,
    gets_copies: bool,
    persists_all: bool,
    in_detail: bool = True,
) -> tuple[CheckpointFacts, ...]:
    """Return the checkpoints in memory as policies see them.

    `checkpoints`: all that lie in memory on this node, newest first. `scope`: "" or the rank whose
    own checkpoints these are. `persists_all`: whether a checkpoint that is meant for storage stays
    until it is there. One that storage refuses may leave all the same: else a save would wait for
    ever. `in_detail`: whether to fill in `nbytes` and `shared`, and to see what is in use, which
    takes a look at each file.
    """
    checkpoints = [one for one in checkpoints if one.manifest.scope == scope]
    chosen = _chosen(policy, checkpoints)
    kept = []
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        try:
            busy = in_detail and is_in_use(checkpoint.manifest_path)
        except FileNotFoundError:  # it leaves memory: what it takes needn't be taken from others
            continue
        nbytes, shared = checkpoint.slot_bytes() if in_detail else (0, ())
        kept.append(
            CheckpointFacts(
                key=manifest.save_id,
                created=manifest.created,
                number=manifest.number,
                nbytes=nbytes,
                shared=shared,
                persist=manifest.persist,
                pending=checkpoint.pending,
                busy=busy
                or (
                    persists_all
                    and checkpoint.pending
                    and checkpoint.flush.outcome != Outcome.REFUSED
                ),
                replicated=gets_copies and checkpoint.replication.outcome == Outcome.REPLICATED,
                rejected=bool(checkpoint.rejected),
                chosen=manifest.save_id in chosen,
            )
        )
    return tuple(kept)


def _chosen(policy: Retention, checkpoints: Sequence[LocalCheckpoint]) -> frozenset[str]:
    """Return the save ids that the policy keeps; all of them, where only their number counts.

    What was rejected isn't kept.
    """
    manifests = [checkpoint.manifest for checkpoint in checkpoints if not checkpoint.rejected]
    if isinstance(policy, KeepLast):
        return frozenset(manifest.save_id for manifest in manifests)
    return policy.chosen(
        [
            CheckpointFacts(
                key=one.save_id,
                created=one.created,
                number=one.number,
                step=one.step,
                metrics=one.metrics,
            )
            for one in manifests
        ]
    )


def evict(
    memory: JobMemory,
    checkpoints: Iterable[LocalCheckpoint],
    save_ids: frozenset[str],
    why: str,
) -> frozenset[str]:
    """Take checkpoints out of memory; return the save ids of those that are in use, and stay."""
    in_use = set[str]()
    for checkpoint in checkpoints:
        save_id = checkpoint.manifest.save_id
        try:
            if save_id not in save_ids or memory.evict(checkpoint, why, Outcome.SUPERSEDED):
                continue
            if is_in_use(checkpoint.manifest_path):
                in_use.add(save_id)
        except FileNotFoundError:  # another one takes it out
            continue
        except OSError as error:  # the other ranks go on to the next exchange; so must this one
            log.warning("%s could not be evicted: %s", checkpoint.name, error)
    return frozenset(in_use)
