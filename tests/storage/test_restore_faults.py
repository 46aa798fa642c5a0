"""A load meets faults of storage: it returns what was saved, or all ranks name the fault."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcp_mem import RankFailed, SegmentCorrupt, StorageUnavailable
from dcp_mem.policy import pieces, sharing
from tests.support.checkpoints.jobs import Job
from tests.support.processes.forks import forked, forked_ranks, raised_by
from tests.support.storage import ways
from tests.support.storage.http_wire import Request
from tests.support.storage.patience import asking_as
from tests.support.storage.proxy import CorruptBody, Delay, Fault, Hang, LoseAnswer, Reset, Truncate
from tests.support.storage.ways import Way, load_state, save_unflushed, without_memory

pytestmark = [pytest.mark.timeout(60), pytest.mark.servers]

NBYTES = 3 << 20
ALWAYS = 1_000_000

ONCE: dict[str, Callable[[Way], Fault]] = {
    "503": lambda way: way.error(503, "SlowDown" if way.is_s3 else "ServerBusy", retry_after="1"),
    "reset": lambda way: Reset(),
    "delay": lambda way: Delay(0.2),
    "hang": lambda way: Hang(),
    "lost answer": lambda way: LoseAnswer(),
    "truncated": lambda way: Truncate(50),
}
READS = ["listing", "look", "read manifest", "read catalog", "read node manifest", "read range"]


@pytest.fixture(scope="module", params=["s3", "abfs"])
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Way]:
    """The way to a durable checkpoint, whose memory is lost."""
    directory = tmp_path_factory.mktemp("lost")
    directory.chmod(0o700)
    forked(save_unflushed, str(directory), 1, NBYTES)
    is_s3 = request.param == "s3"
    server = request.getfixturevalue("moto" if is_s3 else "azurite")
    with (ways.s3_way if is_s3 else ways.azure_way)(server) as way:
        with way.job(directory, way.direct).writer(agent="thread") as writer:
            writer.wait(timeout=30)
        yield way


@pytest.fixture
def way(stored: Way) -> Iterator[Way]:
    stored.proxy.reset()
    yield stored
    stored.proxy.reset()


def load_quickly(job: Job) -> None:
    """Load in several pieces, and have faults get over soon."""
    with pytest.MonkeyPatch.context() as patch, asking_as(ways.QUICK):
        for module in (pieces, sharing):
            patch.setattr(module, "PIECE", 1 << 20)
        load_state(without_memory(job), 1, NBYTES)


def outcome(job: Job) -> Exception | None:
    """What a load raises."""
    return raised_by(lambda: load_quickly(job))


@pytest.mark.parametrize(
    ("step", "fault"),
    [pytest.param(step, fault, id=f"{fault}-{step}") for step in READS for fault in ONCE],
)
def test_a_fault_that_passes_is_got_over(
    way: Way, memory_root: Path, step: str, fault: str
) -> None:
    way.proxy.fail(way.steps[step], ONCE[fault](way))
    load_quickly(way.job(memory_root, way.impatient if fault == "hang" else way.root))
    assert [one.fault is not None for one in way.asked(step)].count(True) == 1


@pytest.mark.parametrize(
    "step", ["read manifest", "read catalog", "read node manifest", "read range"]
)
@pytest.mark.parametrize("at", [0, 100, 300])
def test_bytes_that_change_on_their_way_are_noticed_and_read_once_more(
    way: Way, memory_root: Path, caplog: pytest.LogCaptureFixture, step: str, at: int
) -> None:
    way.proxy.fail(way.steps[step], CorruptBody(at))
    load_quickly(way.job(memory_root))
    (told,) = [
        record.getMessage()
        for record in caplog.records
        if "it may have changed on its way" in record.message
    ]
    assert f"{way.root.url}/run" in told
    changed = next(one for one in way.asked(step) if one.fault is not None)
    assert sum(one.target == changed.target for one in way.asked(step)) >= 2


def test_every_piece_may_change_on_its_way_once(way: Way, memory_root: Path) -> None:
    load_quickly(way.job(memory_root))
    count = len(way.asked("read range"))
    assert count >= 3
    way.proxy.reset()
    seen = set[str]()

    def is_first(request: Request) -> bool:
        """Return whether these bytes are asked for first; repeats come between first reads."""
        if not way.steps["read range"](request) or request.wanted in seen:
            return False
        seen.add(request.wanted)
        return True

    way.proxy.fail(is_first, CorruptBody(500), times=count)
    load_quickly(way.job(memory_root))
    assert len(seen) == count
    assert len(way.asked("read range")) == 2 * count


def test_two_ranks_get_over_faults_together(way: Way, memory_root: Path) -> None:
    for after, fault in enumerate(
        [CorruptBody(7), Reset(), Truncate(1000), LoseAnswer(), Delay(0.2), ONCE["503"](way)]
    ):
        way.proxy.fail(way.steps["read range"], fault, after=min(after, 1))
    assert forked_ranks(outcome, 2, way.job(memory_root)) == [None, None]
    assert all(
        any(one.fault == fault for one in way.asked("read range"))
        for fault in (CorruptBody(7), Reset())
    )


STAYING: dict[str, tuple[Fault, str]] = {
    "reset": (Reset(), r"is unavailable: .*(?i:connection).*\(\d+ requests in a row have failed"),
    "truncated": (Truncate(50), r"is unavailable: .*\(\d+ requests in a row have failed"),
    "corrupt": (
        CorruptBody(1000),
        r"segment of rank 0 in .*: CRC32C [0-9a-f]{8} where [0-9a-f]{8} was saved, in bytes ",
    ),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", STAYING)
def test_while_a_fault_stays_every_rank_says_what_and_where(
    way: Way, memory_root: Path, fault: str, ranks: int
) -> None:
    made, words = STAYING[fault]
    way.proxy.fail(way.steps["read range"], made, times=ALWAYS)
    for error in forked_ranks(outcome, ranks, way.job(memory_root)):
        assert isinstance(error, (StorageUnavailable, SegmentCorrupt, RankFailed)), error
        assert f"{way.root.url}/run" in str(error)
        assert re.search(words, str(error)), error


@pytest.mark.parametrize(
    "step", ["listing", "look", "read manifest", "read catalog", "read node manifest"]
)
def test_while_nothing_describes_the_checkpoint_every_rank_says_why(
    way: Way, memory_root: Path, step: str
) -> None:
    way.proxy.fail(way.steps[step], way.error(500, "InternalError"), times=ALWAYS)
    for error in forked_ranks(outcome, 2, way.job(memory_root)):
        assert error is not None
        assert f"storage {way.root.url}/run is unavailable" in str(error)
        assert "InternalError" in str(error)
