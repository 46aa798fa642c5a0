"""What one rank alone needs, sent while all else goes on: no thread is left, and no peer waits."""

import threading
import time
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from dcp_mem.comm.job_ranks import ranks_of
from dcp_mem.format.checksums import checksum
from dcp_mem.loading.peers import LoadPeers, PeerTransfer
from dcp_mem.policy.sharing import LoadShare, Piece
from tests.support.processes.forks import forked_ranks, raised_by

_SOON = 10.0
_NBYTES = 1000


class _Memory:
    def checked(self, file: str, start: int, stop: int) -> tuple[memoryview, int]:
        time.sleep(1)
        data = memoryview(bytearray(stop - start))
        return data, checksum(data)


class _Pending:
    def place_for(self, file: str, start: int, stop: int) -> memoryview:
        return memoryview(bytearray(stop - start))

    def mark_received(self, file: str, start: int, stop: int) -> None:
        return


def _passes_on_with_few_threads() -> tuple[str, float, int]:
    """Rank 0 can't start its second thread; what is raised, when, and which threads are left."""
    rank, started = dist.get_rank(), list[str]()
    ranks = ranks_of(None, "pass")
    assert ranks.all_reduce(1, int.__add__) == 2
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if thread.name == "dcp_mem-pass":
            started.append(thread.name)
            if rank == 0 and len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    share = LoadShare(
        pieces=[
            Piece(f"of {rank}", (0, _NBYTES), None, (1 - rank,)),
            Piece(f"of {1 - rank}", (0, _NBYTES), 1 - rank),
        ]
    )
    memory: Any = _Memory()
    pending: Any = _Pending()
    unused: Any = None
    peers = LoadPeers(
        ranks=ranks,
        doors={rank: ""},
        nodes=2,
        token="token",
        transport="tcp",
        memory=memory,
        is_held=lambda file: True,
    )

    def pass_on() -> None:
        transfer = PeerTransfer(peers, None, share, unused, pending)
        transfer.run()
        transfer.raise_own()
        transfer.raise_broken()

    began = time.monotonic()
    with patch.object(threading.Thread, "start", start_few):
        error = raised_by(pass_on)
    seconds = time.monotonic() - began
    left = sum(thread.name == "dcp_mem-pass" for thread in threading.enumerate())
    dist.barrier()
    return str(error), seconds, left


def test_a_thread_that_cannot_be_started_leaves_none_at_work_and_no_peer_waiting() -> None:
    env = {"DCP_MEM_TIMEOUT": "25"}
    first, second = forked_ranks(_passes_on_with_few_threads, 2, env=env)
    assert first[0] == "can't start new thread"
    assert "rank 0" in second[0]
    for _, seconds, left in (first, second):
        assert seconds < _SOON
        assert not left
