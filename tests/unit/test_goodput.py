"""A job's effective training time ratio, from spans that a reader can add up."""

from dcp_mem.operations.goodput import goodput, lost_seconds


def test_saves_and_resumes_are_lost_time() -> None:
    assert lost_seconds([(10.0, 11.0), (20.0, 21.0)], [(20.0, 50.0)]) == 31.0


def test_spans_that_overlap_count_once() -> None:
    assert lost_seconds([(25.0, 30.0)], [(20.0, 50.0), (20.0, 70.0)]) == 50.0


def test_goodput_is_what_was_not_lost() -> None:
    assert goodput(25.0, 100.0) == 0.75
    assert goodput(0.0, 0.0) == 0.0
    assert goodput(7.0, 5.0) == 0.0
