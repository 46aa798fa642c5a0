"""Work that several threads do: results in order, the first error, and nothing left under way."""

import threading
import time

import pytest

from dcp_mem.common import parallel
from dcp_mem.common.parallel import in_daemons


def _left() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "of the test"]


def test_results_come_in_order() -> None:
    assert in_daemons(lambda item: -item, range(100), at_once=4) == [-item for item in range(100)]
    assert in_daemons(lambda item: item, []) == []


def test_the_first_error_is_raised_and_the_rest_left_out() -> None:
    begun = []

    def fail(item: int) -> None:
        begun.append(item)
        time.sleep(0.01)
        raise LookupError(f"item {item}")

    with pytest.raises(LookupError, match=r"item [01]$"):
        in_daemons(fail, range(100), at_once=2, name="of the test")
    assert len(begun) <= 4
    assert not _left()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_no_thread_is_left_where_another_one_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done, started, start = [], list[threading.Thread](), parallel.daemon

    def start_two(*given: object) -> threading.Thread:
        if len(started) == 2:
            raise error
        started.append(start(*given))  # type: ignore[arg-type]
        return started[-1]

    def work(item: int) -> None:
        time.sleep(0.05)
        done.append(item)

    monkeypatch.setattr(parallel, "daemon", start_two)
    with pytest.raises(type(error)):
        in_daemons(work, range(100), at_once=4, name="of the test")
    assert len(done) <= 4
    assert not _left()
