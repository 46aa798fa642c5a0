"""Azure's `Put Block From URL`, which is off unless asked for: on our own server, and on Azurite.

The server answers as Azure's documentation says. Azurite doesn't know the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import dcp_mem
from dcp_mem import StorageUnavailable
from tests.support.checkpoints.jobs import Job, agents, save
from tests.support.storage.conformance import LARGE, StorageConformance, stored_source
from tests.support.storage.fake_azure import CONTAINER, Endpoint, HierarchicalAccount, answering
from tests.support.storage.servers import BlobServer, StorageRoot

_DATA = bytes(range(256)) * (LARGE // 256) + bytes(LARGE % 256)
_VARIABLE = "DCP_MEM_AZURE_COPY_BLOCKS"


@pytest.fixture
def account() -> HierarchicalAccount:
    return HierarchicalAccount()


@pytest.fixture
def endpoint(account: HierarchicalAccount) -> Iterator[Endpoint]:
    with answering(account) as found:
        yield found


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_VARIABLE, "1")


@pytest.fixture
def root(endpoint: Endpoint) -> StorageRoot:
    return StorageRoot(f"abfs://{CONTAINER}/job", endpoint.storage_options)


@pytest.fixture
def storage(root: StorageRoot) -> Any:
    return root.storage()


def _piece(number: int, nbytes: int) -> bytes:
    return _DATA[number * nbytes : (number + 1) * nbytes]


def _begun(storage: Any) -> Any:
    return stored_source(storage, "step-1/segment", _DATA)


class TestCopyingBlocks(StorageConformance):
    @pytest.fixture
    def opened(self, root: StorageRoot) -> Callable[[], Any]:
        return root.storage


def test_it_is_off_unless_asked_for(
    root: StorageRoot, account: HierarchicalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_VARIABLE)
    storage = root.storage()
    with closing(storage.upload("step-2/segment", LARGE, _begun(storage))) as going:
        assert going.copies.value == "whole"
        assert not going.copy_part(0, crc32(_piece(0, going.part_nbytes)))
    assert not account.copied_nbytes


def test_a_killed_upload_goes_on_with_blocks_that_were_copied(
    storage: Any, account: HierarchicalAccount
) -> None:
    source = _begun(storage)
    with closing(storage.upload("step-2/segment", LARGE, source)) as killed:
        assert killed.copy_part(0, crc32(_piece(0, killed.part_nbytes)))
    copied = account.copied_nbytes
    with closing(storage.upload("step-2/segment", LARGE, source)) as going:
        part = going.part_nbytes
        assert going.copy_part(0, crc32(_piece(0, part)))
        assert account.copied_nbytes == copied
        assert not going.put_part(0, memoryview(_piece(0, part)), crc32(_piece(0, part)))
        for number in (1, 2):
            assert going.copy_part(number, crc32(_piece(number, part)))
        going.finish()
    assert storage.get("step-2/segment") == _DATA


def test_blocks_of_another_length_are_found_before_the_commit_and_sent(
    storage: Any, account: HierarchicalAccount
) -> None:
    source, account.copies_fewer = _begun(storage), 1
    with closing(storage.upload("step-2/segment", LARGE, source)) as going:
        for number in range(3):
            assert going.copy_part(number, crc32(_piece(number, going.part_nbytes)))
        with pytest.raises(StorageUnavailable, match="3 blocks were copied to other lengths"):
            going.finish()
    assert storage.ls("step-2") == []
    with closing(storage.upload("step-2/segment", LARGE, source)) as going:
        assert going.copies.value != "parts"  # it isn't asked again
        for number in range(3):
            piece = _piece(number, going.part_nbytes)
            assert going.put_part(number, memoryview(piece), crc32(piece))
        going.finish()
    assert storage.get("step-2/segment") == _DATA


def _state(salt: int) -> dict[str, torch.Tensor]:
    """Return what never changes, of more than a part, and what always does."""
    base = torch.arange(9 << 20, dtype=torch.int32)
    return {"base": base, "more": torch.full((1 << 20,), salt, dtype=torch.int32)}


def test_an_agent_of_several_jobs_sends_the_parts_that_changed_where_the_job_asks_for_it(
    root: StorageRoot,
    account: HierarchicalAccount,
    memory_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv(_VARIABLE)
        other = Job(str(tmp_path), str(memory_root), name="other").writer()
        save(other, 1)
        other.wait(timeout=60)
    (agent,) = agents(memory_root)
    with root.job(memory_root).writer(frozen="base") as writer:
        for step in (1, 2):
            state = _state(step)
            dcp_mem.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
            writer.wait(f"step-{step}", timeout=60)
        newest = writer.status()[0]
        assert agents(memory_root) == [agent]
    other.close()
    assert newest.transfer.reused_nbytes > 36 << 20
    assert account.copied_nbytes == newest.transfer.reused_nbytes
    assert newest.transfer.sent_nbytes < 6 << 20


@pytest.mark.servers
def test_azurite_does_not_know_it_and_is_sent_everything(azurite: BlobServer) -> None:
    with azurite.fresh_root() as root:
        storage = root.storage()
        with closing(storage.upload("step-2/segment", LARGE, _begun(storage))) as going:
            assert going.copies.value == "parts"
            assert not going.copy_part(0, crc32(_piece(0, going.part_nbytes)))
            for number in range(3):
                piece = _piece(number, going.part_nbytes)
                assert going.put_part(number, memoryview(piece), crc32(piece))
            going.finish()
        assert storage.get("step-2/segment") == _DATA
