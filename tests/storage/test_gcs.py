"""The route to Google Cloud Storage: what its dialect differs in, on a strict server of it."""

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from dcp_mem import State, StorageRefused
from tests.support.checkpoints.jobs import wait_until
from tests.support.checkpoints.roundtrip import through_fsspec
from tests.support.processes.forks import forked
from tests.support.storage import ways
from tests.support.storage.proxy import CorruptBody, Delay, LoseAnswer
from tests.support.storage.ways import LARGE, NAME, Way, assert_whole, load_state, put_into, serve

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.servers,
    pytest.mark.usefixtures("flush_quickly"),
]


def test_bytes_that_changed_on_their_way_are_refused_by_the_server_and_sent_again(
    gs_way: Way, memory_root: Path, large: Path
) -> None:
    put_into(memory_root, large)
    for step in ("part", "catalog", "commit"):
        gs_way.proxy.fail(gs_way.steps[step], CorruptBody(at=3, in_request=True))
    with ways.writing(gs_way.job(memory_root)) as writer:
        writer.wait(timeout=60)
    assert {step: gs_way.asked(step)[0].status for step in ("part", "catalog", "commit")} == {
        "part": 400,
        "catalog": 400,
        "commit": 400,
    }
    assert_whole(gs_way, memory_root, 1, LARGE)


def test_a_put_whose_answer_was_lost_is_known_by_its_own_bytes(
    gs_way: Way, memory_root: Path, small: Path
) -> None:
    put_into(memory_root, small)
    gs_way.proxy.fail(gs_way.steps["commit"], LoseAnswer())
    with ways.writing(gs_way.job(memory_root), overwrite=False) as writer:
        writer.wait(timeout=60)
        assert ways.status_of(writer).state is State.DURABLE
    assert [one.status for one in gs_way.asked("commit")] == [200, 412]
    assert_whole(gs_way, memory_root, 1)


def test_an_agent_killed_after_a_part_is_followed_by_one_that_sends_only_the_rest(
    gs_way: Way, memory_root: Path, large: Path
) -> None:
    put_into(memory_root, large)
    with pytest.raises(AssertionError, match="SIGKILL"):
        forked(serve, gs_way.job(memory_root), "flush.part:kill:2")
    before = gs_way.stored_parts()
    assert len(before) >= 2
    gs_way.proxy.reset()
    assert forked(serve, gs_way.job(memory_root)) == "durable"
    sent = gs_way.stored_parts()
    assert not before & sent, "parts that were up were sent again"
    assert len(before | sent) == 3
    assert_whole(gs_way, memory_root, 1, LARGE)


def test_torchs_own_reader_loads_by_gcsfs_what_was_flushed(
    gs_way: Way, memory_root: Path, large: Path
) -> None:
    put_into(memory_root, large)
    with ways.writing(gs_way.job(memory_root)) as writer:
        writer.wait(timeout=60)
    root = gs_way.root
    reader = through_fsspec(FsspecReader, f"{root.url}/run/{NAME}", root.storage_options)
    load_state(reader, 1, LARGE, name=None)


def test_a_swap_fails_where_the_object_was_written_anew_meanwhile_with_the_same_bytes(
    gs_way: Way,
) -> None:
    """A generation names what was written; S3's ETag, of the same bytes, would be the same."""
    through, direct = gs_way.root.storage(), gs_way.direct.storage()
    direct.put("owner", b"one")
    gs_way.proxy.fail(lambda request: request.method == "PUT", Delay(2.0))
    with ThreadPoolExecutor(1) as pool:
        swapped = pool.submit(through.swap, "owner", b"one", b"two")
        wait_until(lambda: any(one.method == "PUT" for one in gs_way.proxy.requests))
        direct.put("owner", b"one")
        assert not swapped.result()
    assert direct.get("owner") == b"one"
    assert through.swap("owner", b"one", b"two")


def test_a_token_that_google_refuses_is_named_as_such(gs_way: Way) -> None:
    gs_way.proxy.fail(lambda _: True, gs_way.error(401, "AuthenticationRequired"))
    with pytest.raises(StorageRefused, match=r"AuthenticationRequired.*credentials"):
        gs_way.root.storage().get("key")


_SAVES = """
import json, logging, sys
sys.modules["s3fs"] = None
import dcp_mem, torch
logging.basicConfig()
logging.getLogger("dcp_mem").setLevel(logging.INFO)
url, options, memory = sys.argv[1:]
options = json.loads(options)
with dcp_mem.MemoryStorageWriter(
    url, memory_root=memory, storage_options=options, agent="thread"
) as writer:
    dcp_mem.save({"x": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer)
    writer.wait(timeout=60)
"""


def test_it_needs_no_s3fs(gs_way: Way, memory_root: Path) -> None:
    root = gs_way.direct
    options = json.dumps(root.storage_options)
    script = [sys.executable, "-c", _SAVES, f"{root.url}/run", options, str(memory_root)]
    told = subprocess.run(script, check=True, capture_output=True, text=True).stderr
    assert "step-1 is durable" in told
    assert "goes through fsspec" not in told
    assert "run/step-1/.metadata" in root.names()


@pytest.mark.parametrize("options", [{"session_kwargs": {"trust_env": True}}])
def test_what_only_gcsfs_can_use_goes_through_gcsfs(
    gs_way: Way, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with caplog.at_level(logging.INFO, "dcp_mem"):
        given = {**gs_way.direct.storage_options, **options}
        replace(gs_way.direct, storage_options=given).storage()
    assert "goes through fsspec" in caplog.text
