"""What other nodes' memory has of a job: found out once, and fetched as it is needed, without a call of all ranks.

Nebula's loads are calls of one rank. So the threads that listen for notices answer for their nodes, and bytes go over a line of
their own from a rank whose node has them.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.events import log
from dcp_mem.format.checksums import checksum
from dcp_mem.memory.job import Held, JobMemory
from dcp_mem.operating.inventory import MEMORY, Checkpoint, job_memory
from dcp_mem.ranks import ranks_of
from dcp_mem.ranks.notices import Notices
from dcp_mem.sources.base import Description, StoredDescription, description_of
from dcp_mem.sources.memory import MemorySource
from dcp_mem.values import State

_CHUNK = 16 << 20
_PATIENCE = 60.0
"""Seconds that a rank is waited for that has not called `init` yet, or is gone."""
_NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Prior:
    """A checkpoint that some node had in memory when the ranks met. is_whole: the nodes have all of it together."""

    checkpoint: Checkpoint
    is_whole: bool


class Peers:
    """One rank's part in asking and answering."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        purpose = f"nebula files {settings.job}"
        self._ranks = ranks_of(None, purpose).apart(purpose, _PATIENCE, "DCP_MEM_TIMEOUT")
        self._prior: Mapping[str, Prior] | None = None
        self._guard = threading.Lock()

    # -- asking --------------------------------------------------------------------------------------------------------

    def prior(self) -> Mapping[str, Prior]:
        """By save id, what the nodes had in memory when a rank first asked; the same on all ranks. Raises RankFailed."""
        with self._guard:
            if self._prior is None:
                self._prior = _joined(json.loads(self._survey()))
            return self._prior

    def _survey(self) -> str:
        mine = str(self._notices.rank)
        if self._notices.settle("survey", mine) != mine:
            found = self._notices.settled("surveyed", 2 * _PATIENCE)
            if found is None:
                raise DcpMemError("the rank that asks all others what they have in memory is gone")
            return found
        self._notices.add(json.dumps({"kind": "survey"}))
        answers = []
        for rank in range(self._notices.size):
            answer = self._notices.settled(f"has {rank}", _PATIENCE)
            if answer is None:
                log.warning("rank %d does not say what its node has in memory: it counts as nothing", rank)
            answers.append(json.loads(answer or "[]"))
        return self._notices.settle("surveyed", json.dumps(answers))

    def describe(self, checkpoint: Checkpoint) -> Description | None:
        """What a checkpoint consists of, as another node knows it; None where none does. Raises RankFailed, ManifestInvalid."""
        what = f"description of {checkpoint.save_id}"
        told = self._asked(what, {"kind": "describe", "name": checkpoint.name, "save_id": checkpoint.save_id})
        if told is None:
            return None
        manifest, catalog = (base64.b64decode(part) for part in told)
        return description_of(StoredDescription(manifest, catalog))

    def fetch(self, checkpoint: Checkpoint, file: str, offset: int, nbytes: int) -> memoryview | None:
        """Bytes of a segment from another node's memory; None where none has it. Raises RankFailed, SegmentCorrupt."""
        ranks, token = self._ranks, uuid.uuid4().hex[:12]
        extent = {"file": file, "offset": offset, "nbytes": nbytes, "receiver": ranks.rank}
        request = {"kind": "fetch", "name": checkpoint.name, "save_id": checkpoint.save_id, **extent}
        sender = self._asked(f"sender {token}", {**request, "token": token})
        if sender is None:
            return None
        line = ranks.line(sender, ranks.rank, once=token)
        sums, data = bytearray(4), memoryview(bytearray(nbytes))
        try:
            line.receive(sums).wait()
            for start in range(0, nbytes, _CHUNK):
                line.receive(data[start : start + _CHUNK]).wait()
        except RuntimeError as error:
            log.warning("%s of %s does not come from rank %d: %s", file, checkpoint.name, sender, error)
            return None
        if checksum(data) != int.from_bytes(sums, "little"):
            raise SegmentCorrupt(
                checkpoint.name, 0, f"the memory of rank {sender}'s node", f"{file} changed on its way"
            )
        return data

    def _asked(self, what: str, request: Mapping[str, Any]) -> Any:
        """What the first rank answers that has an answer; None where none has."""
        self._notices.add(json.dumps({**request, "what": what}))
        answer = self._notices.settled(what, _PATIENCE)
        return None if answer is None or answer == _NOBODY else json.loads(answer)

    # -- answering, in the thread that listens -----------------------------------------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> None:
        """Answer what any rank has asked, this one too. What goes wrong is logged: the asker goes on without."""
        acts: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "survey": self._say_what_is_here,
            "describe": self._describe,
            "fetch": self._send,
        }
        act = acts[request["kind"]]

        def guarded() -> None:
            try:
                act(request)
            except Exception as error:
                log.warning("what another rank asked for (%s) is not answered: %s", request["kind"], error)

        # In a thread of its own: whatever is due meanwhile must not wait for a slow receiver.
        threading.Thread(target=guarded, name="dcp_mem-answer", daemon=True).start()

    def _say_what_is_here(self, request: Mapping[str, Any]) -> None:
        memory, found = job_memory(self._settings), []
        for held in memory.held() if memory is not None else ():
            manifest = held.manifest
            if not manifest.scope and memory is not None:
                files = sorted(_files_of(memory, held))
                facts = [held.name, manifest.save_id, manifest.created, manifest.nbytes, len(manifest.segments)]
                found.append([*facts, files])
        self._notices.settle(f"has {self._notices.rank}", json.dumps(found))

    def _describe(self, request: Mapping[str, Any]) -> None:
        found = self._source(request)
        if found is None:
            self._pass(request)
            return
        with found as source:
            told = source.tell()
        parts = [base64.b64encode(part).decode() for part in (told.manifest, told.catalog)]
        self._notices.settle(request["what"], json.dumps(parts))

    def _send(self, request: Mapping[str, Any]) -> None:
        found = self._source(request)
        if found is None:
            self._pass(request)
            return
        with found as source:
            if not source.has(request["file"]):
                self._pass(request)
                return
            ranks = self._ranks
            if self._notices.settle(request["what"], json.dumps(ranks.rank)) != json.dumps(ranks.rank):
                return
            offset, nbytes = request["offset"], request["nbytes"]
            data, crc = source.checked(request["file"], offset, offset + nbytes)
            line = ranks.line(ranks.rank, request["receiver"], once=request["token"])
            line.send(bytearray(crc.to_bytes(4, "little"))).wait()
            for start in range(0, nbytes, _CHUNK):
                line.send(data[start : min(start + _CHUNK, nbytes)]).wait()

    def _pass(self, request: Mapping[str, Any]) -> None:
        """Say that this rank can't; the last one says so for all."""
        if self._notices.count(f"passes {request['what']}") == self._notices.size:
            self._notices.settle(request["what"], _NOBODY)

    def _source(self, request: Mapping[str, Any]) -> closing[MemorySource] | None:
        memory = job_memory(self._settings)
        for held in memory.find(request["name"]) if memory is not None else ():
            if held.manifest.save_id == request["save_id"] and memory is not None:
                return closing(MemorySource(held, memory.node))
        return None


def _files_of(memory: JobMemory, held: Held) -> list[str]:
    """The segments of a checkpoint that lie here whole."""
    with closing(MemorySource(held, memory.node)) as source:
        return [segment.file for segment in held.manifest.segments if source.has(segment.file)]


def _joined(answers: list[list[list[Any]]]) -> dict[str, Prior]:
    files: dict[str, set[str]] = {}
    known: dict[str, list[Any]] = {}
    for of_rank in answers:
        for name, save_id, created, nbytes, count, here in of_rank:
            known[save_id] = [name, created, nbytes, count]
            files.setdefault(save_id, set()).update(here)
    return {
        save_id: Prior(
            Checkpoint(name, save_id, created, nbytes, State.COMPLETE, (MEMORY,), world_size=count),
            len(files[save_id]) == count,
        )
        for save_id, (name, created, nbytes, count) in known.items()
    }
