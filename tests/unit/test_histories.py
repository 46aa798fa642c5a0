"""`checkpointHistories.csv`: spreadsheets and we read it back; damage costs damaged rows only."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_mem import ManifestInvalid, Transfer
from dcp_mem.format.history import COLUMNS, HistoryRow, from_csv, row_of, to_csv, with_row
from dcp_mem.format.manifest import FlushRecord
from tests.support.checkpoints.manifests import make_manifest, of_four_ranks

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
MOMENTS = st.integers(1, 4_000_000_000).map(float) | st.just(1795205846.676303)
SECONDS = st.floats(0, 1e9)
LINES = st.builds(
    HistoryRow,
    name=TEXTS.filter(bool)
    | st.sampled_from(["=1+1", "+x", "'=x", "''@", "-", "\tx", 'a,"b"\r\n', "'", "x'"]),
    save_id=st.text("0123456789abcdef", min_size=8, max_size=8),
    created=MOMENTS,
    world_size=st.integers(0, 5000),
    nodes=st.integers(0, 5000),
    nbytes=st.integers(0, 1 << 60),
    stage_seconds=SECONDS,
    outcome=st.sampled_from(["durable", "failed", "refused", "superseded", "evicted"]),
    durable=st.just(0.0) | MOMENTS,
    flush_seconds=SECONDS,
    throughput_mib_s=SECONDS,
    parts=st.integers(0, 9000),
    retries=st.integers(0, 9000),
    attempts=st.integers(0, 99),
    error=TEXTS,
    step=st.none() | st.integers(0, 1 << 60),
    metrics=st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3),
)


def _line(number: int, **fields: Any) -> HistoryRow:
    return replace(
        HistoryRow(
            name=f"step-{number}", save_id=f"{number:08x}", created=number + 1.0, outcome="durable"
        ),
        **fields,
    )


@given(st.lists(LINES, max_size=5))
def test_a_history_survives_being_written_down(lines: list[HistoryRow]) -> None:
    assert from_csv(to_csv(lines)) == lines


@given(LINES)
def test_no_cell_is_a_formula_to_a_spreadsheet(line: HistoryRow) -> None:
    _, row = csv.reader(io.StringIO(to_csv([line]).decode(), newline=""))
    assert not [cell for cell in row if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_a_history_reads_like_this() -> None:
    line = HistoryRow(
        name="a,b",
        save_id="0011aabb",
        created=1795205846.5,
        world_size=16,
        nodes=2,
        nbytes=3 << 20,
        stage_seconds=0.25,
        outcome="failed",
        error='no "room"\nat all',
        attempts=2,
        step=100,
        metrics={"loss": 0.5},
        generation=3,
        count=7,
        run="0a1b2c3d",
    )
    head, row, rest = to_csv([line]).decode().split("\r\n")
    assert head == (
        "name,save_id,created,world_size,nodes,bytes,stage_seconds,outcome,durable,flush_seconds,throughput_mib_s,parts,"
        "retries,attempts,sent_bytes,reused_bytes,generation,count,run,error,step,metrics"
    )
    assert row == (
        '"a,b",0011aabb,2026-11-20T20:17:26.500000+00:00,16,2,3145728,0.25,failed,,'
        '0.0,0.0,0,0,2,0,0,3,7,0a1b2c3d,"no ""room""\nat all",100,"{""loss"":0.5}"'
    )
    assert rest == ""


def test_a_line_tells_what_the_flush_recorded() -> None:
    manifest = make_manifest(
        of_four_ranks(lambda rank: 1 << 20), created=12.0, world_size=4, stage_seconds=0.5
    )
    transfer = Transfer(
        sent_nbytes=8 << 20, reused_nbytes=9, parts=7, retries=3, segments_seconds=4.0
    )
    record = FlushRecord(
        save_id="aa", outcome="durable", attempts=2, durable=20.0, seconds=6.0, transfer=transfer
    )
    expected = HistoryRow(
        name="step-1",
        save_id="aa",
        created=12.0,
        world_size=4,
        nodes=2,
        nbytes=4 << 20,
        stage_seconds=0.5,
        outcome="durable",
        durable=20.0,
        flush_seconds=6.0,
        throughput_mib_s=2.0,
        parts=7,
        retries=3,
        attempts=2,
        sent_nbytes=8 << 20,
        reused_nbytes=9,
    )
    assert row_of(manifest, record) == expected
    assert row_of(manifest, FlushRecord(save_id="aa")).outcome == "evicted"


def test_a_line_replaces_the_one_of_the_same_save_and_no_other() -> None:
    failed, durable = _line(1, outcome="failed", error="the disk,\nit is full"), _line(1)
    data = with_row(with_row(to_csv([_line(0), failed]), _line(2, name="step-1"), 10), durable, 10)
    assert from_csv(data) == [_line(0), _line(2, name="step-1"), durable]
    assert with_row(data, durable, 10) == data


def test_saves_that_never_began_have_a_line_each() -> None:
    skipped = _line(1, save_id="", outcome="skipped")
    assert from_csv(with_row(with_row(to_csv([]), skipped, 10), skipped, 10)) == [
        skipped,
        skipped,
    ]


def test_only_the_last_lines_are_kept() -> None:
    data = to_csv([])
    for number in range(300):
        data = with_row(data, _line(number), 100)
        assert len(from_csv(data)) <= 110
    assert from_csv(data)[-100:] == [_line(number) for number in range(200, 300)]


@pytest.mark.parametrize(
    ("damaged", "left"),
    [
        pytest.param(lambda data: data[:-20], 4, id="cut off"),
        pytest.param(lambda data: data.replace(b"step-2,", b'"step-2,'), 2, id="an open quote"),
        pytest.param(
            lambda data: data.replace(b"1970-01-01T00:00:02", b"yesterday"), 4, id="no time"
        ),
        pytest.param(lambda data: data.replace(b"step-2", b"\xff\xfe\0"), 5, id="no text"),
        pytest.param(lambda data: data.replace(b"step-2,", b"\r\n\r\n,,\r\n"), 4, id="torn apart"),
    ],
)
def test_what_can_be_read_of_a_damaged_history_is_kept_and_the_next_line_too(
    damaged: Callable[[bytes], bytes], left: int
) -> None:
    data = damaged(to_csv([_line(number) for number in range(5)]))
    found = from_csv(data)
    assert len(found) == left
    assert from_csv(with_row(data, _line(9), 100)) == [*found, _line(9)]


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"a,b,c\r\n1,2,3\r\n", b'"' + b"x" * 200_000])
def test_what_is_no_history_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        from_csv(data)
    with pytest.raises(ManifestInvalid):
        with_row(data, _line(1), 10)


def test_columns_of_later_versions_and_missing_ones_are_no_damage() -> None:
    data = (
        b"mood,name,save_id,outcome,created\r\n"
        b"good,step-1,00000001,durable,1970-01-01T00:00:02+00:00\r\n"
    )
    assert from_csv(data) == [_line(1)]
    assert from_csv(with_row(data, _line(2), 10)) == [_line(1), _line(2)]
    assert set(COLUMNS) >= {"name", "save_id", "outcome", "created"}
