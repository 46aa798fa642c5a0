"""Other nodes' memory of a job: surveyed once, and fetched from as needed, without collectives.

Nebula's loads are calls of one rank. So the thread of each rank that reads notices answers for its
node, and bytes come over a channel of their own from a rank whose node has them:

    any rank -> all     notice "survey"; every rank settles "has <rank>" with what its node has
    any rank -> all     notice "describe"; the first rank that can settles the description
    any rank -> all     notice "fetch"; the first rank that can settles its number, then sends
                        the bytes over the channel that the request's token names

A rank that can't answer counts itself; the last one to do so settles that no rank can.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

from dcp_mem.comm import ranks_of
from dcp_mem.comm.collectives import Channel
from dcp_mem.comm.notices import Notices
from dcp_mem.comm.transfer import CHUNK, IncomingChunk, OutgoingChunk, receive, send
from dcp_mem.common.log import log
from dcp_mem.common.parallel import daemon
from dcp_mem.common.values import MEMORY, CheckpointStatus, State
from dcp_mem.config import Settings
from dcp_mem.errors import DcpMemError, SegmentCorrupt
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.sources.base import Description, DescriptionFiles
from dcp_mem.loading.sources.memory import MemorySource
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.runtime.states import job_memory

_TIMEOUT = 60.0
"""Seconds to wait for a rank that hasn't called `init` yet, or is gone."""
_NO_RANK = "nobody"


class Peers:
    """One rank's part in asking other nodes, and in answering for its own."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        purpose = settings.purpose("nebula files")
        self._ranks = ranks_of(None, purpose).dedicated(str(purpose), _TIMEOUT, "DCP_MEM_TIMEOUT")
        self._surveyed: Mapping[str, CheckpointStatus | None] | None = None
        self._guard = threading.Lock()

    # -- asking ------------------------------------------------------------------------------------

    def surveyed(self) -> Mapping[str, CheckpointStatus | None]:
        """Return the checkpoints that nodes had in memory when a rank first asked.

        They are surveyed once; all ranks get the same.

        Returns by save id; None for a checkpoint that the nodes don't have all segments of. Raises
        RankFailed, DcpMemError.
        """
        with self._guard:
            if self._surveyed is None:
                self._surveyed = _checkpoints(json.loads(self._survey()))
            return self._surveyed

    def _survey(self) -> str:
        """Return all ranks' answers as the first rank to ask has gathered them."""
        own = str(self._notices.rank)
        if self._notices.settle("survey", own) != own:
            answers_of_all = self._notices.settled("surveyed", 2 * _TIMEOUT)
            if answers_of_all is None:
                raise DcpMemError("the rank that asks all others what they have in memory is gone")
            return answers_of_all
        self._notices.add(json.dumps({"kind": "survey"}))
        answers = []
        for rank in range(self._notices.size):
            answer = self._notices.settled(f"has {rank}", _TIMEOUT)
            if answer is None:
                log.warning(
                    "rank %d does not say what its node has in memory: it counts as nothing", rank
                )
            answers.append(json.loads(answer or "[]"))
        return self._notices.settle("surveyed", json.dumps(answers))

    def describe(self, checkpoint: CheckpointStatus) -> Description | None:
        """Return what a checkpoint consists of, as another node knows it; None if no node does.

        Raises RankFailed, ManifestInvalid.
        """
        what = f"description of {checkpoint.save_id}"
        answer = self._ask(what, {"kind": "describe", **_identity(checkpoint)})
        if answer is None:
            return None
        manifest, catalog = (base64.b64decode(part) for part in answer)
        return DescriptionFiles(manifest, catalog).description()

    def fetch(
        self, checkpoint: CheckpointStatus, file: str, offset: int, nbytes: int
    ) -> memoryview | None:
        """Return bytes of a segment from another node's memory; None if no node sends them."""
        token, data = uuid.uuid4().hex[:12], memoryview(bytearray(nbytes))
        extent = {"file": file, "offset": offset, "nbytes": nbytes, "receiver": self._ranks.rank}
        request = {"kind": "fetch", **_identity(checkpoint), **extent, "token": token}
        sender = self._ask(f"sender {token}", request)
        if sender is None:
            return None
        try:
            is_right = self._receive(sender, token, data)
        except RuntimeError as error:
            log.warning(
                "%s of %s does not come from rank %d: %s", file, checkpoint.name, sender, error
            )
            return None
        if not is_right:
            where = f"the memory of rank {sender}'s node"
            raise SegmentCorrupt(checkpoint.name, 0, where, f"{file} changed on its way")
        return data

    def _receive(self, sender: int, token: str, data: memoryview) -> bool:
        """Receive bytes; return whether they are right. Raise RuntimeError if they don't come."""
        channel = self._channel(sender, self._ranks.rank, token)
        try:
            receive(channel, _incoming_chunks(data))
            _wait_until_closed(channel)
        except DcpMemError:
            return False
        finally:
            channel.close()
        return True

    def _channel(self, sender: int, receiver: int, token: str) -> Channel:
        return self._ranks.channel(sender, receiver, token, self._settings.transport)

    def _ask(self, what: str, request: Mapping[str, Any]) -> Any:
        """Return the answer of the first rank that has one; None if no rank has."""
        self._notices.add(json.dumps({**request, "what": what}))
        answer = self._notices.settled(what, _TIMEOUT)
        return None if answer is None or answer == _NO_RANK else json.loads(answer)

    # -- answering, in the thread that reads notices -----------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> None:
        """Answer any rank's request in the background; errors are logged, and no answer comes."""
        acts: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "survey": self._answer_survey,
            "describe": self._answer_describe,
            "fetch": self._answer_fetch,
        }
        act = acts[request["kind"]]

        def guarded() -> None:
            try:
                act(request)
            except Exception as error:
                log.warning(
                    "what another rank asked for (%s) is not answered: %s", request["kind"], error
                )

        # In a thread of its own: other notices must not wait for a slow receiver.
        daemon(guarded, "dcp_mem-answer")

    def _answer_survey(self, request: Mapping[str, Any]) -> None:
        memory, found = job_memory(self._settings), []
        for local in memory.checkpoints() if memory is not None else ():
            manifest = local.manifest
            if not manifest.scope and memory is not None:
                files = sorted(_files_of(memory, local))
                facts = [
                    local.name,
                    manifest.save_id,
                    manifest.created,
                    [manifest.generation, manifest.count, manifest.run],
                    manifest.nbytes,
                    len(manifest.segments),
                ]
                found.append([*facts, files])
        self._notices.settle(f"has {self._notices.rank}", json.dumps(found))

    def _answer_describe(self, request: Mapping[str, Any]) -> None:
        with self._source(request) as source:
            if source is None:
                self._pass_on(request)
                return
            stored = source.description_files()
        parts = [base64.b64encode(part).decode() for part in (stored.manifest, stored.catalog)]
        self._notices.settle(request["what"], json.dumps(parts))

    def _answer_fetch(self, request: Mapping[str, Any]) -> None:
        own = json.dumps(self._ranks.rank)
        with self._source(request) as source:
            if source is None or not source.has(request["file"]):
                self._pass_on(request)
            elif self._notices.settle(request["what"], own) == own:
                self._send(source, request)

    def _send(self, source: MemorySource, request: Mapping[str, Any]) -> None:
        start, nbytes = request["offset"], request["nbytes"]
        data, _ = source.checked(request["file"], start, start + nbytes)
        receiver, token = request["receiver"], request["token"]
        channel = self._channel(self._ranks.rank, receiver, token)
        try:
            send(channel, _outgoing_chunks(data))
        finally:
            channel.close()

    def _pass_on(self, request: Mapping[str, Any]) -> None:
        """Leave a request to the other ranks; the last rank to do so settles that no rank can."""
        if self._notices.count(f"passes {request['what']}") == self._notices.size:
            self._notices.settle(request["what"], _NO_RANK)

    @contextmanager
    def _source(self, request: Mapping[str, Any]) -> Iterator[MemorySource | None]:
        """Open the checkpoint of a request in this node's memory; None where it isn't there."""
        memory = job_memory(self._settings)
        for local in memory.find(request["name"]) if memory is not None else ():
            if local.manifest.save_id == request["save_id"] and memory is not None:
                with closing(MemorySource(local, memory.node)) as source:
                    yield source
                return
        yield None


def _identity(checkpoint: CheckpointStatus) -> dict[str, str]:
    return {"name": checkpoint.name, "save_id": checkpoint.save_id}


def _outgoing_chunks(data: memoryview) -> Iterator[OutgoingChunk]:
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        yield OutgoingChunk(chunk, partial(checksum, chunk))


def _incoming_chunks(data: memoryview) -> Iterator[IncomingChunk]:
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        yield IncomingChunk(chunk, partial(checksum, chunk), lambda: None)


def _wait_until_closed(channel: Channel) -> None:
    """Wait until the sender has closed the channel: by then it has read the last answer."""
    with suppress(RuntimeError):
        channel.receive(bytearray(1)).wait()


def _files_of(memory: JobMemory, local: LocalCheckpoint) -> list[str]:
    """Return the segments of a checkpoint that this node has, whole."""
    with closing(MemorySource(local, memory.node)) as source:
        return [segment.file for segment in local.manifest.segments if source.has(segment.file)]


def _checkpoints(answers: list[list[list[Any]]]) -> dict[str, CheckpointStatus | None]:
    """Join the nodes' answers to a survey."""
    files: dict[str, set[str]] = {}
    known: dict[str, CheckpointStatus] = {}
    for of_rank in answers:
        for name, save_id, created, (generation, saves, run), nbytes, count, node_files in of_rank:
            known[save_id] = CheckpointStatus(
                name=name,
                save_id=save_id,
                created=created,
                nbytes=nbytes,
                state=State.COMPLETE,
                in_memory=False,
                persist=True,
                places=(MEMORY,),
                world_size=count,
                generation=generation,
                count=saves,
                run=run,
            )
            files.setdefault(save_id, set()).update(node_files)
    return {
        save_id: checkpoint if len(files[save_id]) == checkpoint.world_size else None
        for save_id, checkpoint in known.items()
    }
