"""Trackers: the real libraries record each checkpoint, and no failure of theirs stops training."""

import csv
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from dcp_mem import CheckpointManager, ConfigError, every_n_saves
from dcp_mem.integrations.trackers import Event, JsonLines, Story, Tracker
from tests.support import REPOSITORY
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import Job, make_state, wait_until
from tests.support.docs import LOOP
from tests.support.processes.forks import forked_ranks
from tests.support.shell import Shell
from tests.support.storage.servers import free_port

openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")


class _Notes:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def track(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class _Fails:
    """A tracker whose server is gone."""

    def __init__(self) -> None:
        self.calls = 0

    def track(self, event: Event) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise AssertionError("it was to be left alone")


def _manager(
    memory: str | Path, url: str | Path | None, *trackers: Tracker, **options: Any
) -> CheckpointManager:
    return CheckpointManager(url, memory_root=memory, job="job", trackers=trackers, **options)


# -- what they are told ----------------------------------------------------------------------------


def test_saves_flushes_and_restores_are_told_once_with_their_figures(
    memory_root: Path, url: Path
) -> None:
    notes = _Notes()
    with _manager(
        memory_root, url, notes, persist=every_n_saves(2), save_interval_steps=2, keep_memory=1
    ) as manager:
        saved = [manager.save(step, {"w": torch.full((1 << 16,), step)}) for step in range(6)]
    first, second, third = (one for one in saved if one)
    assert [(event.checkpoint, event.step, event.outcome) for event in notes.of("save")] == [
        ("step-0", 0, "complete"),
        ("step-2", 2, "complete"),
        ("step-4", 4, "complete"),
    ]
    assert [(event.seconds, event.nbytes) for event in notes.of("save")] == [
        (one.seconds, one.nbytes) for one in (first, second, third)
    ]
    assert sorted(
        (event.checkpoint, event.step, event.outcome, event.nbytes) for event in notes.of("flush")
    ) == [
        ("step-0", 0, "durable", first.nbytes),
        ("step-4", 4, "durable", third.nbytes),
    ]
    assert all(event.seconds > 0 and event.throughput > 0 for event in notes.of("flush"))
    assert all(event.figures["attempts"] == 1 for event in notes.of("flush"))
    assert notes.closed == 1

    again = _Notes()
    with _manager(memory_root, url, again) as manager:
        manager.restore({"w": torch.zeros(1 << 16)})
        report = manager.report()
    [event] = again.events  # and nothing of the run before
    assert (event.kind, event.outcome, event.checkpoint, event.step) == (
        "restore",
        "restored",
        "step-4",
        4,
    )
    assert (event.seconds, event.nbytes) == (report.seconds, report.nbytes)
    assert event.figures == {"memory_bytes": report.nbytes}
    assert event.nbytes >= 4 << 16


def test_what_was_passed_over_is_told(memory_root: Path, url: Path) -> None:
    with _manager(memory_root, url) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((1000,), float(step))})
            manager.wait(step, progress=False)
    shutil.rmtree(memory_root / "job")
    (segment,) = (url / "step-2").glob("*.distcp")
    flip(segment, 2000)
    notes = _Notes()
    with _manager(memory_root, url, notes) as manager:
        assert manager.restore({"w": torch.zeros(1000)}) == 1
    [event] = notes.events
    assert event.figures.keys() == {"storage_bytes"}
    assert event.detail.startswith("passed over step-2: ")


def test_what_fails_is_told_with_its_reason(memory_root: Path, url: Path) -> None:
    url.write_text("in the way")
    notes = _Notes()
    with _manager(memory_root, url, notes) as manager:
        manager.save(1, {"w": torch.ones(3)})
        assert not manager.save(2, {"w": threading.Lock()})
        wait_until(lambda: any(one.error for one in manager.status()), "the flush fails")
        manager.save(3, {"w": torch.ones(3)})
        wait_until(lambda: notes.of("flush"), "the look after a save")
        url.unlink()
    assert [(event.step, event.outcome, event.is_good) for event in notes.of("save")] == [
        (1, "complete", True),
        (2, "failed", False),
        (3, "complete", True),
    ]
    assert "pickle" in notes.of("save")[1].detail
    failed = next(event for event in notes.of("flush") if not event.is_good)
    assert (failed.checkpoint, failed.outcome) == ("step-1", "failed")
    assert str(url) in failed.detail
    assert {event.checkpoint for event in notes.of("flush") if event.is_good} >= {"step-3"}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_tracker_that_raises_is_left_out_and_the_others_go_on(
    memory_root: Path, url: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    fails, notes = _Fails(), _Notes()
    with _manager(memory_root, url, fails, notes, on_error=on_error) as manager:
        for step in range(3):
            assert manager.save(step, {"w": torch.ones(3)})
    assert fails.calls == 1
    assert len(notes.of("save")) == 3
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "_Fails is told no more: ConnectionError: no route to host"
    ]


def test_training_waits_for_no_tracker(memory_root: Path) -> None:
    hung, may_go_on = threading.Event(), threading.Event()

    class Hangs(_Notes):
        def track(self, event: Event) -> None:
            hung.set()
            may_go_on.wait(60)
            super().track(event)

    tracker = Hangs()
    with _manager(memory_root, None, tracker) as manager:
        for step in range(3):
            assert manager.save(step, {"w": torch.ones(3)})
        assert hung.wait(60)
        assert tracker.events == []
        may_go_on.set()
    assert len(tracker.of("save")) == 3


def _live(memory: str, metrics: str) -> None:
    """Two ranks, each a node of its own."""
    root = Path(memory, f"node{dist.get_rank()}")
    with _manager(root, None, JsonLines(f"{metrics}-{dist.get_rank()}"), replicas=1) as manager:
        manager.save(1, make_state(1))
        manager.wait(1, "replicated", 60, progress=False)
        manager.save(2, make_state(2))
        manager.restore(make_state(0))


def test_rank_0_tells_for_all_ranks_also_of_copies(memory_root: Path, tmp_path: Path) -> None:
    forked_ranks(_live, 2, str(memory_root), str(tmp_path / "metrics"))
    assert not (tmp_path / "metrics-1").exists()
    events = [json.loads(line) for line in (tmp_path / "metrics-0").read_text().splitlines()]
    saves = [one for one in events if one["kind"] == "save"]
    assert [(one["checkpoint"], one["outcome"]) for one in saves] == [
        ("step-1", "complete"),
        ("step-2", "complete"),
    ]
    copies = {one["checkpoint"]: one for one in events if one["kind"] == "copies"}
    assert copies["step-1"]["outcome"] == "replicated"
    assert copies["step-1"]["bytes"] == saves[0]["bytes"]
    assert copies["step-1"]["figures"] == {"on_nodes": 1, "parity_over": 0}
    [restore] = [one for one in events if one["kind"] == "restore"]
    assert restore["checkpoint"] == "step-2"
    assert restore["figures"]["memory_bytes"] > 2400


def test_the_loop_in_the_docs_runs(
    memory_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs" / "trackers.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_MEM_ROOT", str(memory_root))
    exec(
        LOOP + text.replace("abfs://ckpts/run-42", str(tmp_path / "run-42")),
        {"__name__": "__main__"},
    )
    lines = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "save"] == [0, 10, 20]
    assert "dcp_mem_last_save_step" in (tmp_path / "dcp_mem.prom").read_text()
    assert list((tmp_path / "runs" / "42").iterdir())


# -- what holds it ---------------------------------------------------------------------------------


def _run(memory_root: Path, url: Path, *trackers: Tracker) -> _Notes:
    """Three saves with their flushes, one save that fails, and a restore; what was told of it."""
    notes = _Notes()
    with _manager(memory_root, url, notes, *trackers) as manager:
        for step in (10, 20, 30):
            manager.save(step, {"w": torch.full((1 << 16,), step)})
            manager.wait(step, progress=False)
        manager.save(40, {"w": threading.Lock()})
        manager.restore({"w": torch.zeros(1 << 16)})
    assert [event.step for event in notes.of("flush")] == [10, 20, 30]
    return notes


def test_json_lines_have_all_that_is_told(memory_root: Path, url: Path, tmp_path: Path) -> None:
    notes = _run(memory_root, url, JsonLines(tmp_path / "metrics.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(notes.events) == 8
    for line, event in zip(lines, notes.events, strict=True):
        assert (line["kind"], line["outcome"], line["job"]) == (event.kind, event.outcome, "job")
        assert (line["checkpoint"], line["step"]) == (event.checkpoint, event.step)
        assert (line["seconds"], line["bytes"], line["time"]) == (
            event.seconds,
            event.nbytes,
            event.time,
        )
        assert (line["figures"], line["detail"]) == (event.figures, event.detail)
        assert line["bytes_per_second"] == event.throughput


def test_openmetrics_is_what_prometheus_reads(memory_root: Path, url: Path, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from dcp_mem.integrations.trackers.openmetrics import OpenMetrics

    path = tmp_path / "dcp_mem.prom"
    notes = _run(memory_root, url, OpenMetrics(path))
    text = path.read_text()
    shell = Shell(Job(str(url), str(memory_root)))
    told = shell.json("report", "-o", str(tmp_path / "x.html"))["totals"]
    assert told["lost_seconds"] > 0
    assert 0 <= told["goodput"] < 1
    assert [entry.name for entry in tmp_path.glob("dcp_mem*")] == ["dcp_mem.prom"]
    for parse in (openmetrics.text_string_to_metric_families, text_string_to_metric_families):
        found = {
            (sample.name, sample.labels.get("outcome")): (sample.value, sample.timestamp)
            for family in parse(text)
            for sample in family.samples
        }
        assert {sample.labels["job"] for family in parse(text) for sample in family.samples} == {
            "job"
        }
        # node_exporter takes no timestamps.
        assert not [timestamp for _, timestamp in found.values() if timestamp]
        values = {key: value for key, (value, _) in found.items()}
        assert values["dcp_mem_saves_total", "complete"] == 3
        assert values["dcp_mem_saves_total", "failed"] == 1
        assert values["dcp_mem_flushes_total", "durable"] == 3
        assert values["dcp_mem_restores_total", "restored"] == 1
        assert values["dcp_mem_flush_bytes_total", None] == sum(
            event.nbytes for event in notes.of("flush")
        )
        assert values["dcp_mem_save_seconds_total", None] == pytest.approx(
            sum(event.seconds for event in notes.of("save"))
        )
        last = notes.of("flush")[-1]
        assert values["dcp_mem_last_flush_step", None] == 30
        assert values["dcp_mem_last_flush_seconds", None] == pytest.approx(last.seconds)
        assert values["dcp_mem_last_flush_bytes_per_second", None] == pytest.approx(last.throughput)
        assert values["dcp_mem_last_flush_timestamp_seconds", None] == pytest.approx(last.time)
        assert values["dcp_mem_last_save_step", None] == 30  # the one of 40 failed
        assert values["dcp_mem_goodput", None] == pytest.approx(told["goodput"])
        assert values["dcp_mem_lost_seconds", None] == pytest.approx(told["lost_seconds"])


def test_a_job_may_have_any_name_in_openmetrics(tmp_path: Path) -> None:
    from dcp_mem.integrations.trackers.openmetrics import OpenMetrics

    name = 'a"b\\c\nd{}'
    OpenMetrics(tmp_path / "x.prom").track(
        Event(
            kind="save",
            outcome="complete",
            time=1.0,
            job=name,
            checkpoint="step-1",
            step=1,
            seconds=0.5,
            nbytes=3,
        )
    )
    text = (tmp_path / "x.prom").read_text()
    families = list(openmetrics.text_string_to_metric_families(text))
    assert {sample.labels["job"] for family in families for sample in family.samples} == {name}


def test_tensorboard_shows_figures_by_step_and_troubles_as_text(
    memory_root: Path, url: Path, tmp_path: Path
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from dcp_mem.integrations.trackers.tensorboard import TensorBoard

    notes = _run(memory_root, url, TensorBoard(tmp_path / "runs"))
    found = accumulators.EventAccumulator(str(tmp_path / "runs"))
    found.Reload()
    scalars = {
        tag: [(one.step, one.value) for one in found.Scalars(f"checkpoint/{tag}")]
        for tag in ("save_seconds", "flush_bytes_per_second", "save_ok", "restore_bytes")
    }
    assert scalars["save_seconds"] == [
        (event.step, pytest.approx(event.seconds)) for event in notes.of("save")[:3]
    ]
    assert scalars["flush_bytes_per_second"] == [
        (event.step, pytest.approx(event.throughput)) for event in notes.of("flush")
    ]
    assert scalars["save_ok"] == [(10, 1), (20, 1), (30, 1), (40, 0)]
    assert scalars["restore_bytes"] == [(30, notes.of("restore")[0].nbytes)]
    [trouble] = found.Tensors("checkpoint/trouble/text_summary")
    assert "save of step-40: failed; TypeError" in trouble.tensor_proto.string_val[0].decode()


def test_a_writer_of_ones_own_gets_the_figures_and_stays_open(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    from dcp_mem.integrations.trackers.tensorboard import TensorBoard

    writer = SummaryWriter(str(tmp_path))
    tracker = TensorBoard(writer=writer, prefix="ckpt")
    tracker.track(
        Event(
            kind="save",
            outcome="complete",
            time=1.0,
            job="job",
            checkpoint="step-1",
            step=1,
            seconds=0.5,
            nbytes=3,
        )
    )
    tracker.close()
    writer.add_scalar("loss", 0.25, 2)
    writer.close()
    found = accumulators.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("ckpt/save_seconds")] == [(1, 0.5)]
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(2, 0.25)]
    with pytest.raises(ConfigError, match="log_dir, or a writer"):
        TensorBoard()


@pytest.fixture
def mlflow_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where MLflow keeps its runs, in files."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with _tracked(mlflow, (tmp_path / "mlruns").as_uri()) as uri:
        yield uri


@contextmanager
def _tracked(mlflow: Any, uri: str) -> Iterator[str]:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    yield uri
    mlflow.set_tracking_uri(before)


def test_mlflow_has_figures_by_step_in_the_active_run(
    memory_root: Path, url: Path, mlflow_runs: str
) -> None:
    import mlflow

    from dcp_mem.integrations.trackers.mlflow import MLflow

    with mlflow.start_run() as run:
        notes = _run(memory_root, url, MLflow())
        assert mlflow.active_run() is not None
    client = mlflow.MlflowClient(mlflow_runs)
    history = {
        key: [
            (one.step, one.value)
            for one in client.get_metric_history(run.info.run_id, f"checkpoint/{key}")
        ]
        for key in ("save_seconds", "save_ok", "flush_bytes", "restore_memory_bytes")
    }
    assert history["save_seconds"] == [
        (event.step, event.seconds) for event in notes.of("save")[:3]
    ]
    assert history["save_ok"] == [(10, 1), (20, 1), (30, 1), (40, 0)]
    assert history["flush_bytes"] == [(event.step, event.nbytes) for event in notes.of("flush")]
    assert history["restore_memory_bytes"] == [(30, notes.of("restore")[0].nbytes)]
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["checkpoint.last_flush"] == "step-30: durable"
    assert tags["checkpoint.last_save"].startswith("step-40: failed; TypeError")


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A server of MLflow's own; it takes what `mlflow` installs beyond mlflow-skinny."""
    for package in ("mlflow", "alembic", "flask", "huey", "uvicorn", "skops"):
        pytest.importorskip(package)
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"{tmp_path}/runs"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    url = f"http://127.0.0.1:{port}"
    with open(tmp_path / "server.log", "wb") as log:
        environ = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}  # a database takes a minute
        server = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_until(lambda: _answers(f"{url}/health"), "MLflow's server", timeout=240)
        with _tracked(pytest.importorskip("mlflow"), url) as uri:
            yield uri
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore:The ``noload`` loader")
@pytest.mark.parametrize("where", ["mlflow_runs", "mlflow_server"])
def test_mlflow_shows_report_histories_table_and_figure(
    memory_root: Path, url: Path, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    uri = request.getfixturevalue(where)
    client = pytest.importorskip("mlflow").MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("of dcp_mem")).info.run_id

    from dcp_mem.integrations.trackers.mlflow import MLflow

    def train(steps: Sequence[int]) -> None:
        tracker = MLflow(run_id, tracking_uri=uri)
        with _manager(memory_root, url, tracker) as manager:
            manager.restore({"w": torch.zeros(1000)})
            for step in steps:
                manager.save(step, {"w": torch.full((1000,), float(step))})
                manager.wait(step, progress=False)

    train([0, 1])
    train([2])  # a restart that goes on in the same run
    shown = {one.path for one in client.list_artifacts(run_id, "checkpoint")}
    names = {"report.html", "checkpointHistories.csv", "recoveries.jsonl", "totals.json"}
    names |= {"checkpoints.json", *(["checkpoints.png"] if find_spec("matplotlib") else [])}
    assert shown == {f"checkpoint/{name}" for name in names}

    def text(name: str) -> str:
        return Path(client.download_artifacts(run_id, f"checkpoint/{name}", tmp_path)).read_text()

    steps = ["step-0", "step-1", "step-2"]
    assert all(step in text("report.html") for step in steps)
    rows = list(csv.DictReader(io.StringIO(text("checkpointHistories.csv"))))
    assert [(row["name"], row["outcome"]) for row in rows] == [(one, "durable") for one in steps]
    assert json.loads(text("recoveries.jsonl"))["name"] == "step-1"
    totals = json.loads(text("totals.json"))
    assert (totals["saves"], totals["durable"], totals["recoveries"]) == (3, 3, 1)
    if find_spec("pandas"):
        table = client.load_table(
            client.get_run(run_id).info.experiment_id,
            "checkpoint/checkpoints.json",
            run_ids=[run_id],
        )
        assert list(table["checkpoint"]) == steps
        assert list(table["outcome"]) == ["durable"] * 3
    assert len(client.get_metric_history(run_id, "checkpoint/save_seconds")) == 3


def test_what_cannot_be_published_costs_no_figures(
    memory_root: Path, url: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(_Notes):
        def publish(self, story: Story) -> None:
            assert story.checkpoints[-1]["checkpoint"] == "step-1"
            raise OSError("no room for artifacts")

    notes = Full()
    with _manager(memory_root, url, notes) as manager:
        manager.save(1, {"w": torch.ones(3)})
        wait_until(lambda: "no more reports" in caplog.text)
        manager.save(2, {"w": torch.ones(3)})
    assert [one.step for one in notes.of("save")] == [1, 2]
    assert caplog.text.count("no room for artifacts") == notes.closed == 1


def test_mlflow_takes_a_run_by_its_id_and_says_so_where_there_is_none(
    memory_root: Path, mlflow_runs: str, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    from dcp_mem.integrations.trackers.mlflow import MLflow

    client = mlflow.MlflowClient(mlflow_runs)
    run_id = client.create_run(client.create_experiment("of dcp_mem")).info.run_id
    with _manager(memory_root, None, MLflow(run_id), MLflow()) as manager:
        manager.save(1, {"w": torch.ones(3)})
        manager.save(2, {"w": torch.ones(3)})
    assert [one.step for one in client.get_metric_history(run_id, "checkpoint/save_seconds")] == [
        1,
        2,
    ]
    [told] = [record.message for record in caplog.records if "told no more" in record.message]
    assert "give run_id=" in told


# -- Weights & Biases ------------------------------------------------------------------------------


@pytest.fixture
def offline_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where W&B keeps what it would send."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    wandb.teardown()  # its service process, which remembers the environment


def _records(directory: Path) -> Iterator[Any]:
    """What an offline run has written: records in the blocks of LevelDB's log format."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its service has written all of it then
    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    data, block, position, whole = path.read_bytes(), 32768, 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # the rest of a block is padding
            position += block - position % block
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        position += 7 + length
        whole += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            record = vars(wandb_internal_pb2)["Record"]()  # made as it is imported
            record.ParseFromString(whole)
            yield record
            whole = b""


def _rows(directory: Path) -> list[dict[str, Any]]:
    """The rows of an offline run, with W&B's own step."""
    rows = []
    for record in _records(directory):
        if record.HasField("history"):
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({**items, "_step": record.history.step.num})
    return rows


def _column(rows: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """The values of these keys, from the rows that have them all, in their order."""
    return [tuple(row[key] for key in keys) for row in rows if set(keys) <= row.keys()]


def test_wandb_has_figures_by_their_own_steps(
    memory_root: Path, url: Path, offline_runs: Path
) -> None:
    import wandb

    from dcp_mem.integrations.trackers.wandb import WandB

    with wandb.init(project="dcp_mem", settings=wandb.Settings(console="off")) as run:
        notes = _run(memory_root, url, WandB(run))
        assert "step-30: durable" in run.summary["checkpoint/last_flush"]
        assert "step-40: failed; TypeError" in run.summary["checkpoint/last_save"]
    rows = _rows(offline_runs)
    saves = notes.of("save")
    assert _column(rows, "checkpoint/save_step", "checkpoint/save_seconds") == [
        (event.step, pytest.approx(event.seconds)) for event in saves[:3]
    ]
    assert _column(rows, "checkpoint/save_step", "checkpoint/save_ok") == [
        *((10, 1), (20, 1), (30, 1), (40, 0))
    ]
    assert _column(rows, "checkpoint/flush_step", "checkpoint/flush_bytes") == [
        (event.step, event.nbytes) for event in notes.of("flush")
    ]
    [restored] = _column(rows, "checkpoint/restore_step", "checkpoint/restore_memory_bytes")
    assert restored == (30, notes.of("restore")[0].nbytes)
    axes = {
        record.metric.glob_name: record.metric.step_metric
        for record in _records(offline_runs)
        if record.HasField("metric") and record.metric.glob_name
    }
    assert axes["checkpoint/flush_*"] == "checkpoint/flush_step"


class _RowsBetween:
    """A run in which the loop sometimes begins a row as the tracker is about to add to one."""

    def __init__(self, run: Any) -> None:
        self._run, self._calls = run, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        if self._calls % 3 == 0:
            self._run.log({"loss": 0.5}, step=self._run.step + 1)
        self._calls += 1
        self._run.log(row, commit=commit)


def test_wandb_loses_no_figure_where_the_loop_begins_a_row_at_the_same_moment(
    offline_runs: Path,
) -> None:
    import wandb

    from dcp_mem.integrations.trackers.wandb import WandB

    with wandb.init(project="dcp_mem", settings=wandb.Settings(console="off")) as run:
        tracker = WandB(cast(Any, _RowsBetween(run)))
        for step in range(4):
            tracker.track(
                Event(
                    kind="save",
                    outcome="complete",
                    time=0.0,
                    job="job",
                    checkpoint=f"step-{step}",
                    step=step,
                )
            )
        tracker.close()
    rows = _rows(offline_runs)
    assert _column(rows, "checkpoint/save_step") == [(step,) for step in range(4)]


def test_wandb_leaves_the_steps_of_the_training_loop_alone(
    memory_root: Path, offline_runs: Path
) -> None:
    import wandb

    from dcp_mem.integrations.trackers.wandb import WandB

    with (
        wandb.init(project="dcp_mem", settings=wandb.Settings(console="off")) as run,
        _manager(memory_root, None, WandB(), save_interval_steps=1) as manager,
    ):
        for step in range(12):
            manager.save(step, {"w": torch.ones(3)})
            if step % 3 == 0:  # the loop logs by its own numbers, of which there are fewer
                run.log({"loss": step / 8}, step=step // 3)
    rows = _rows(offline_runs)
    assert _column(rows, "_step", "loss") == [(step // 3, step / 8) for step in (0, 3, 6, 9)]
    assert _column(rows, "checkpoint/save_step") == [(step,) for step in range(12)]


def test_wandb_says_so_where_there_is_no_run(
    memory_root: Path, offline_runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dcp_mem.integrations.trackers.wandb import WandB

    with _manager(memory_root, None, WandB()) as manager:
        assert manager.save(1, {"w": torch.ones(3)})
    [told] = [record.message for record in caplog.records if "told no more" in record.message]
    assert "make it after wandb.init" in told


# -- OpenTelemetry ---------------------------------------------------------------------------------


def test_opentelemetry_has_a_trace_of_each_checkpoint(memory_root: Path, url: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import StatusCode

    from dcp_mem.integrations.trackers.opentelemetry import OpenTelemetry

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    notes = _run(memory_root, url, OpenTelemetry(provider))
    spans: Sequence[Any] = exporter.get_finished_spans()
    assert [(span.name, span.attributes["dcp_mem.checkpoint"]) for span in spans] == [
        (f"dcp_mem.{event.kind}", event.checkpoint) for event in notes.events
    ]
    for span, event in zip(spans, notes.events, strict=True):
        assert span.end_time / 1e9 == pytest.approx(event.time, abs=1e-5)
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(event.seconds, abs=1e-6)
        facts = {name.removeprefix("dcp_mem."): value for name, value in span.attributes.items()}
        assert (facts["job"], facts["outcome"]) == ("job", event.outcome)
        assert (facts["bytes"], facts["step"]) == (event.nbytes, event.step)
        assert facts.items() >= dict(event.figures).items()
        assert span.status.is_ok is event.is_good
    saves = {
        span.attributes["dcp_mem.checkpoint"]: span for span in spans if span.name == "dcp_mem.save"
    }
    [failed] = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert failed is saves["step-40"]
    assert failed.status.description.startswith("TypeError")
    for span in spans:
        if span.name == "dcp_mem.flush":
            save = saves[span.attributes["dcp_mem.checkpoint"]]
            assert span.parent.span_id == save.context.span_id
            assert span.context.trace_id == save.context.trace_id
        else:
            assert span.parent is None
    assert len({span.context.trace_id for span in spans}) == len(saves) + 1


def test_opentelemetry_goes_to_the_providers_of_the_application(
    memory_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the SDK the API makes spans that go nowhere, and nothing fails."""
    pytest.importorskip("opentelemetry.trace")
    from dcp_mem.integrations.trackers.opentelemetry import OpenTelemetry

    notes = _Notes()
    with _manager(memory_root, None, OpenTelemetry(), notes) as manager:
        assert manager.save(1, {"w": torch.ones(3)})
    assert len(notes.events) == 1


# -- Grafana ---------------------------------------------------------------------------------------

_DASHBOARD = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())


def _queries(part: Any) -> Iterator[str]:
    """Every expression of a dashboard, wherever it stands."""
    if isinstance(part, dict):
        yield from (part[key] for key in ("expr", "query") if isinstance(part.get(key), str))
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from _queries(one)


def _exported(path: Path) -> dict[str, set[str]]:
    """Every metric that OpenMetrics can write, with its labels."""
    from dcp_mem.integrations.trackers.openmetrics import OpenMetrics

    tracker = OpenMetrics(path)
    figures = {
        "flush": ("attempts", "retries"),
        "copies": ("on_nodes", "parity_over"),
        "restore": ("memory_bytes", "peers_bytes", "storage_bytes"),
    }
    outcomes = {"save": "complete", "flush": "durable", "copies": "replicated"}
    for kind in ("save", "flush", "copies", "restore"):
        tracker.track(
            Event(
                kind=kind,
                outcome=outcomes.get(kind, "restored"),
                time=1.0,
                job="job",
                checkpoint="step-1",
                step=1,
                seconds=0.5,
                nbytes=3,
                figures=dict.fromkeys(figures.get(kind, ()), 1.0),
            )
        )
    tracker.publish(
        Story(
            job="job", page="", files={}, checkpoints=[], totals={"goodput": 1, "lost_seconds": 0}
        )
    )
    found: dict[str, set[str]] = {}
    for family in openmetrics.text_string_to_metric_families(path.read_text()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_grafana_dashboard_asks_for_nothing_that_openmetrics_doesnt_have(
    tmp_path: Path,
) -> None:
    exported = _exported(tmp_path / "x.prom")
    asked = set()
    for query in _queries(_DASHBOARD):
        for name, braces in re.findall(r"(dcp_mem_\w+)(?:\{([^}]*)\})?", query):
            assert name in exported, query
            assert set(re.findall(r"(\w+)=", braces)) <= exported[name], query
            asked.add(name)
    for kind, plural in {"save": "saves", "flush": "flushes", "restore": "restores"}.items():
        assert {f"dcp_mem_{plural}_total", f"dcp_mem_last_{kind}_seconds"} <= asked
    shown = {panel["id"] for panel in _DASHBOARD["panels"]}
    assert len(shown) == len(_DASHBOARD["panels"])


def test_the_figures_of_the_dashboard_test_are_those_of_real_events(
    memory_root: Path, url: Path, tmp_path: Path
) -> None:
    from dcp_mem.integrations.trackers.openmetrics import OpenMetrics

    path = tmp_path / "real.prom"
    _run(memory_root, url, OpenMetrics(path))
    real = {
        sample.name
        for family in openmetrics.text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert real <= _exported(tmp_path / "x.prom").keys()
    assert {"dcp_mem_last_flush_retries", "dcp_mem_last_restore_memory_bytes"} <= real
