"""What the agent is told of an export, and how often an export is tried."""

import random
from pathlib import Path

import pytest

from dcp_mem import ConfigError, ExportState, HuggingFaceExport
from dcp_mem.export import export_of, order_of
from dcp_mem.memory.exports import ExportRecord, ExportRecords, read_exports, write_exports
from tests.support.frameworks.exports import shouted


def test_a_failing_export_lets_others_pass_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_mem.memory.exports._FIRST_PAUSE", 0.0)
    records, tried = ExportRecords(), []
    for count in (1, 2):
        record = ExportRecord(name=f"step-{count}", save_id=str(count), count=count)
        records = records.looked_at(record, is_chosen=True)
    while (due := records.next_due()) is not None:
        tried.append(due.name)
        records = records.updated(due.failed("no"))
    assert tried == ["step-2", "step-1"] * 8
    assert {one.state for one in records.records} == {ExportState.GIVEN_UP}


@pytest.mark.parametrize("size", [0, 1, 60, -1])
def test_a_damaged_file_is_as_good_as_none_and_one_stays_short(tmp_path: Path, size: int) -> None:
    records = ExportRecords()
    for count in range(1000):
        record = ExportRecord(name="n", save_id=str(count))
        records = records.looked_at(record, is_chosen=True).updated(record.failed("x" * 10_000))
    write_exports(str(tmp_path), records)
    assert read_exports(str(tmp_path)) == records
    (file,) = tmp_path.glob(".exports.json")
    assert file.stat().st_size < 1 << 20
    file.write_bytes(file.read_bytes()[:size])
    assert read_exports(str(tmp_path)) == ExportRecords()


def test_an_order_carries_the_export_without_showing_its_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    export = HuggingFaceExport(
        "out", names=shouted, dtype="torch.float16", files=[tmp_path], storage_options={"key": "k1"}
    )
    packed = order_of(export)
    assert "k1" not in repr(packed) + repr(export)
    found = export_of(packed.request)
    assert found == export
    assert found.files == (str(tmp_path / "config.json"),)
    assert found.names is shouted


def test_a_table_that_is_too_large_for_the_agent_is_refused() -> None:
    bits = random.Random(0).getrandbits
    names: dict[str, str | None] = {f"{bits(256):x}": "same" for _ in range(300_000)}
    with pytest.raises(ConfigError, match="give a function instead"):
        order_of(HuggingFaceExport("out", names=names))
