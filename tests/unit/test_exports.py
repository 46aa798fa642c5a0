"""Which checkpoints are exported, in what order, and how often that is tried."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from dcp_mem import ConfigError, ExportState, HuggingFaceExport, Persist, every_n_steps
from dcp_mem.config import ExportOrder
from dcp_mem.export import export_of, order_of, renaming_of
from dcp_mem.flushing.exports import JobExports
from dcp_mem.format.exports import ExportRecord, ExportRecords
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.exports import read_exports, write_exports
from tests.support.checkpoints.manifests import make_manifest
from tests.support.frameworks.exports import shouted


@pytest.fixture
def exports(tmp_path: Path) -> JobExports:
    (tmp_path / "job").mkdir()
    return JobExports(str(tmp_path), "job")


def order(every: int | Persist = 1) -> ExportOrder:
    return order_of(HuggingFaceExport("out", every=every))


def saved(count: int, step: int | None = None, generation: int = 1) -> Manifest:
    """The count-th save of a run."""
    return make_manifest(
        name=f"step-{count}",
        save_id=f"{generation}{count:07}",
        created=1000.0 * generation + count,
        step=step,
        generation=generation,
        count=count,
    )


def chosen(exports: JobExports, tmp_path: Path) -> list[str]:
    """What is to be exported, as a successor finds it."""
    records = read_exports(str(tmp_path / "job")).records
    assert len(exports.due_times()) == sum(one.is_open for one in records)
    return [one.name for one in records if one.is_open]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7]),
        (3, [1, 4, 7]),
        (every_n_steps(25), [1, 4, 7]),  # steps 10, 40, 70
        (every_n_steps(1), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_first_and_each_nth_checkpoint_are_chosen(
    exports: JobExports, tmp_path: Path, every: int | Persist, expected: list[int]
) -> None:
    for count in range(1, 8):
        for _ in range(2):  # an agent that was killed looks once more
            exports.look_at(order(every), saved(count, step=10 * count))
    assert chosen(exports, tmp_path) == [f"step-{count}" for count in expected]


def test_a_successor_goes_on_counting(exports: JobExports, tmp_path: Path) -> None:
    exports.look_at(order(3), saved(1))
    exports.look_at(order(3), saved(2))
    successor = JobExports(str(tmp_path), "job")
    for count in (2, 3, 4):
        successor.look_at(order(3), saved(count))
    assert chosen(successor, tmp_path) == ["step-1", "step-4"]


def test_what_becomes_durable_behind_a_newer_one_is_not_chosen(
    exports: JobExports, tmp_path: Path
) -> None:
    for count in (2, 1, 3):
        exports.look_at(order(), saved(count))
    exports.look_at(order(), saved(1, generation=2))  # of a run that began after all of them
    assert chosen(exports, tmp_path) == ["step-2", "step-3", "step-1"]
    due = exports.next_due()
    assert due is not None
    assert due.save_id == "20000001", "the newest comes first"


def test_steps_that_nobody_told_are_named_in_the_record(
    exports: JobExports, tmp_path: Path
) -> None:
    exports.look_at(order(every_n_steps(5)), saved(1))
    (record,) = read_exports(str(tmp_path / "job")).records
    assert record.state is ExportState.SKIPPED
    assert "annotate_next_save(step=...)" in record.error
    assert exports.next_due() is None


def test_a_failing_export_lets_others_pass_and_is_given_up(
    exports: JobExports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_mem.flushing.exports._FIRST_PAUSE", 0.0)
    for count in (1, 2):
        exports.look_at(order(), saved(count))
    tried = []
    while (record := exports.next_due()) is not None:
        tried.append(record.name)
        exports.begin(record)
        assert chosen(exports, tmp_path), "one that runs is begun again by a successor"
        exports.end(replace(record, state=ExportState.FAILED, error="no"))
    assert tried == ["step-2", "step-1"] * 8
    states = {one.state for one in read_exports(str(tmp_path / "job")).records}
    assert states == {ExportState.GIVEN_UP}


@pytest.mark.parametrize("size", [0, 1, 60, -1])
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, size: int) -> None:
    records = ExportRecords().looked_at("1", ExportRecord(name="n", save_id="1"))
    write_exports(str(tmp_path), records)
    assert read_exports(str(tmp_path)) == records
    (file,) = tmp_path.glob(".exports.json")
    file.write_bytes(file.read_bytes()[:size])
    assert read_exports(str(tmp_path)) == ExportRecords()


def test_a_file_stays_short() -> None:
    records = ExportRecords()
    for count in range(1000):
        record = ExportRecord(name="n", save_id=str(count), error="x" * 10_000)
        records = records.looked_at(str(count), record)
    data = records.to_json()
    assert len(data) < 1 << 20
    assert ExportRecords.from_json(data).records[-1].save_id == "999"


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
    assert renaming_of(found)("a") == "A"
    assert renaming_of(HuggingFaceExport("out", names={"a": "b"}))("a") == "b"


def test_a_table_that_is_too_large_for_the_agent_is_refused() -> None:
    bits = random.Random(0).getrandbits
    names: dict[str, str | None] = {f"{bits(256):x}": "same" for _ in range(300_000)}
    with pytest.raises(ConfigError, match="give a function instead"):
        order_of(HuggingFaceExport("out", names=names))
