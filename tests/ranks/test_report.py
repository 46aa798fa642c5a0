"""`dcp-mem report`: the page shows the history, whatever it holds, needs no network, is small."""

import json
import os
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from dcp_mem import CheckpointManager, every_n_saves
from dcp_mem.cli.main import main
from dcp_mem.common.values import HISTORIES, RECOVERIES
from dcp_mem.format.history import HistoryRow, to_csv
from dcp_mem.format.recoveries import RecoveryRecord, to_lines
from dcp_mem.operations.charts import LEFT, RIGHT, Times, marks, series
from dcp_mem.operations.history import Fate, History, fate_of, read_history, totals
from dcp_mem.operations.report import duration, moment, render_page, size, troubles_of
from dcp_mem.options import settings
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.jobs import Job, load_anew, save, save_in_two_places, wait_until
from tests.support.processes.forks import forked, killed_ranks

HOSTILE = (
    '</title><script src="https://evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)> '
    "\"' & {{7*7}} \x00\x1b[2J\u202e"
)


def _report(job: Job, target: Path, *arguments: str) -> Result:
    root = [job.url] if job.url else []
    places = ["--memory-root", job.memory, "--job", job.name or "", "-o", str(target)]
    return CliRunner().invoke(main, ["report", *root, *places, *arguments])


def _parsed(text: str) -> ET.Element:
    """Parse the page as XML: what isn't escaped, or is forbidden in a page, fails here."""
    return ET.fromstring(text)


def _texts(root: ET.Element) -> list[str]:
    return [text.strip() for text in root.itertext() if text.strip()]


def _tables(root: ET.Element) -> dict[str, list[list[str]]]:
    """The rows of each table, by the title above it."""
    found, title = {}, ""
    for element in root.iter():
        if element.tag == "h2":
            title = element.text or ""
        if element.tag == "table":
            found[title] = [
                ["".join(cell.itertext()) for cell in row] for row in element.iter("tr")
            ][1:]
    return found


def _tiles(root: ET.Element) -> dict[str, tuple[str, str]]:
    tiles = [
        _texts(element)
        for element in root.iter("li")
        if (element.get("class") or "").startswith("tile")
    ]
    return {name: (value, more) for name, value, more in tiles}


def _refers_elsewhere(root: ET.Element) -> list[str]:
    """What a browser would fetch, or run."""
    names = {"src", "href", "srcset", "data", "action", "poster", "style"}
    found = [
        f"{one.tag} {key}"
        for one in root.iter()
        for key in one.attrib
        if key.rpartition("}")[2] in names
    ]
    found += [
        one.tag
        for one in root.iter()
        if one.tag in ("script", "link", "iframe", "object", "embed", "img", "base")
    ]
    found += [key for one in root.iter() for key in one.attrib if key.startswith("on")]
    styles = "".join(one.text or "" for one in root.iter("style"))
    return found + re.findall(r"url\(|@import|expression", styles)


# -- of a real job ---------------------------------------------------------------------------------


def _train(root: str, memory: str, dies_at: int | None) -> None:
    state: dict[str, Any] = {"w": torch.zeros(1 << 18)}
    with CheckpointManager(
        root, memory_root=memory, job="job", persist=every_n_saves(2)
    ) as manager:
        last = manager.restore(state)
        for step in range(0 if last is None else last + 1, 8):
            if step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            state["w"] += 1
            if manager.save(step, state).persist:
                manager.wait(step, progress=False)


@pytest.mark.slow
def test_the_page_of_a_job_that_was_killed_says_what_its_history_says(
    job: Job, tmp_path: Path
) -> None:
    assert job.url is not None
    killed_ranks(_train, None, job.url, job.memory, 5)
    shutil.rmtree(job.directory / "step-4")
    forked(_train, job.url, job.memory, None)
    result = _report(job, tmp_path / "x.html", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    root = _parsed((tmp_path / "x.html").read_text())
    assert _refers_elsewhere(root) == []

    found = read_history(settings(job.url, memory_root=job.memory, job=job.name))
    sums = totals(found)
    assert [one.name for one in found.recoveries] == ["step-4"]
    assert {one.name: fate_of(one) for one in found.checkpoints} == {
        f"step-{step}": Fate.DURABLE if step in (0, 2, 4, 6, 7) else Fate.MEMORY_ONLY
        for step in range(8)
    }
    assert (sums.saves, sums.durable, sums.memory_only, sums.recoveries) == (8, 5, 3, 1)
    assert (answer["totals"]["saves"], answer["totals"]["durable"]) == (8, 5)
    assert answer["recoveries"][0]["sources"] == found.recoveries[0].sources

    tables = _tables(root)
    [recovery] = tables["Recoveries"]
    assert recovery[:3] == [moment(found.recoveries[0].time), "step-4", "4"]
    assert recovery[3] == duration(found.recoveries[0].seconds)
    [(source, nbytes)] = found.recoveries[0].sources.items()
    assert recovery[4] == f"{source} {size(nbytes)}"
    rows = {row[1]: row for row in tables["Checkpoints"]}
    assert len(rows) == len(tables["Checkpoints"]) == 8
    for one in found.checkpoints:
        row = rows[one.name]
        assert row[0] == moment(one.created)
        assert row[3:7] == [
            fate_of(one).value,
            size(one.nbytes),
            duration(one.stage_seconds),
            duration(one.flush_seconds),
        ]
    tiles = _tiles(root)
    assert tiles["Saves"] == ("8", "5 durable, 3 in memory only")
    assert tiles["Recoveries"][0] == "1"
    assert tiles["To storage"] == (size(sums.flushed_nbytes), "5 flushes")
    assert tiles["Blocked per save"][0] == duration(sums.blocked_median)
    assert tiles["Saving overhead"][0] == f"{sums.blocked_share:.2%}"
    kinds = [
        (mark.get("class"), (mark.findtext("title") or "-").split()[0])
        for mark in root.iter("rect")
    ]
    # There are marks for saves and for flushes.
    assert sum(kind == "durable" and name.startswith("step-") for kind, name in kinds) == 8 + 5 - 3
    assert ("recovery", "step-4") in kinds


def test_what_was_passed_over_and_what_failed_is_on_the_page(job: Job, tmp_path: Path) -> None:
    save_in_two_places(job)
    shutil.rmtree(job.directory)
    (segment,) = Path(job.url or "", "step-2").glob("__0_0-*.distcp")
    flip(segment, 900)
    load_anew(job)
    line = HistoryRow(
        name="step-9",
        save_id="0badcafe",
        created=1795205846.0,
        outcome="failed",
        error="no route to <storage>",
        attempts=3,
    )
    with Path(job.url or "", ".dcp_mem", HISTORIES).open("ab") as stream:
        stream.write(to_csv([line]).split(b"\r\n", 1)[1])
    assert _report(job, tmp_path / "x.html").exit_code == 0
    root = _parsed((tmp_path / "x.html").read_text())
    troubles = {row[3]: row[2:] for row in _tables(root)["What went wrong"]}
    assert troubles["step-9"] == ["failed", "step-9", "no route to <storage>"]
    assert troubles["step-2"][0] == "passed over"
    assert "CRC32C" in troubles["step-2"][2]
    assert _tiles(root)["Failed"][0] == "1"
    assert "only what became durable is known" in _texts(root)[-1]


def test_a_job_in_memory_only(memory_root: Path, tmp_path: Path) -> None:
    job = Job(None, str(memory_root))
    with job.writer(keep_memory=1) as writer:
        for number in (1, 2):
            save(writer, number)
    load_anew(job)
    result = _report(job, tmp_path / "x.html")
    assert result.exit_code == 0
    assert "2 saves, 0 durable, 1 recovery, 0 failed" in " ".join(result.stdout.split())
    root = _parsed((tmp_path / "x.html").read_text())
    assert [row[1:4:2] for row in _tables(root)["Checkpoints"]] == [
        ["step-2", "memory only"],
        ["step-1", "memory only"],
    ]


def test_a_checkpoint_whose_flush_waits_or_fails(job: Job, tmp_path: Path) -> None:
    Path(job.url or "").write_text("in the way")
    manager = CheckpointManager(job.url, memory_root=job.memory, job=job.name)
    manager.save(1, {"n": 1})
    wait_until(lambda: manager.status()[0].error, "the flush fails")
    found = read_history(settings(None, memory_root=job.memory, job=job.name))
    Path(job.url or "").unlink()
    manager.close(progress=False)
    [one] = found.checkpoints
    assert (fate_of(one), one.save_id in found.in_memory) == (Fate.FAILED, True)
    assert str(job.url) in troubles_of(found)[0].text
    found = read_history(settings(job.url, memory_root=job.memory, job=job.name))
    [one] = found.checkpoints
    assert (fate_of(one), one.save_id in found.in_memory) == (Fate.DURABLE, True)


# -- of any history --------------------------------------------------------------------------------


def _past(number: int, fate: Fate = Fate.DURABLE, **fields: Any) -> HistoryRow:
    outcome = {
        Fate.DURABLE: "durable",
        Fate.MEMORY_ONLY: "evicted",
        Fate.SKIPPED: "skipped",
        Fate.SUPERSEDED: "superseded",
        Fate.WAITING: "",
    }.get(fate, "failed")
    facts: dict[str, Any] = {"nbytes": 1 << 30, "stage_seconds": 0.5, "outcome": outcome}
    if fate is Fate.DURABLE:
        facts |= {"durable": 1e9 + 300 * number + 20, "flush_seconds": 8.0}
    row = HistoryRow(name=f"step-{number}", save_id=f"{number:08x}", created=1e9 + 300 * number)
    return replace(row, **facts | fields)


def _history(
    checkpoints: Sequence[HistoryRow], recoveries: Sequence[RecoveryRecord] = ()
) -> History:
    return History(
        job="job",
        url="s3://bucket/run",
        checkpoints=tuple(checkpoints),
        recoveries=tuple(recoveries),
    )


def test_nothing_is_a_page_too(job: Job, tmp_path: Path) -> None:
    result = _report(job, tmp_path / "x.html")
    assert result.exit_code == 1
    assert "nothing is known of checkpoints in" in result.stderr
    root = _parsed((tmp_path / "x.html").read_text())
    assert any("Nothing is known" in text for text in _texts(root))
    assert not list(root.iter("svg"))
    assert totals(_history([])).blocked_share == 0.0


@pytest.mark.parametrize("fate", list(Fate), ids=lambda fate: fate.value)
def test_one_checkpoint_is_enough(fate: Fate) -> None:
    root = _parsed(render_page(_history([_past(1, fate)])))
    assert [row[1:4] for row in _tables(root)["Checkpoints"]] == [["step-1", "", fate.value]]
    assert ("What went wrong" in _tables(root)) == (fate in (Fate.SKIPPED, Fate.FAILED))


def test_superseded_checkpoints_are_counted_as_a_fact() -> None:
    past = [_past(n, Fate.SUPERSEDED, error="superseded by a newer checkpoint") for n in range(7)]
    found = _history([*past, _past(8)])
    root = _parsed(render_page(found))
    assert _tiles(root)["Saves"] == ("8", "1 durable, 7 superseded by newer ones")
    assert _tiles(root)["Failed"][0] == "0"
    assert "What went wrong" not in _tables(root)
    assert (totals(found).superseded, totals(found).skipped) == (7, 0)


def test_metrics_of_the_training_loop_are_drawn_and_listed() -> None:
    past = [_past(n, step=10 * n, metrics={"loss": 1 / n, "odd": float("nan")}) for n in (1, 2)]
    root = _parsed(render_page(_history(past)))
    assert [(row[2], row[-1]) for row in _tables(root)["Checkpoints"]] == [
        ("20", "loss=0.5, odd=nan"),
        ("10", "loss=1, odd=nan"),
    ]
    drawn = [one.get("aria-label") or "" for one in root.iter("g")]
    assert "loss: 2 values, from 0.5 to 1" in drawn
    assert not [text for text in drawn if text.startswith("odd")]


def test_cells_of_tables_say_on_a_phone_what_they_are() -> None:
    text = render_page(_history([_past(1, Fate.FAILED, error="no route")]))
    cells = list(_parsed(text).iter("td"))
    assert cells
    assert all(cell.get("data-label") for cell in cells)
    # A cell's label and a state's colour would be drawn in the same place, one over the other.
    assert not [cell for cell in cells if "state" in (cell.get("class") or "")]
    assert [one.text for one in _parsed(text).iter("span") if one.get("class") == "state is-failed"]
    assert "@media screen and (max-width: 640px)" in text


def test_hostile_texts_stay_texts(job: Job, tmp_path: Path) -> None:
    recovery = RecoveryRecord(
        token="token",
        time=1e9,
        name=HOSTILE,
        save_id="",
        step=1,
        seconds=1.0,
        sources={HOSTILE: 5},
        passed_over=(f"{HOSTILE}: {HOSTILE}",),
    )
    found = History(
        job=HOSTILE,
        url=HOSTILE,
        checkpoints=(_past(1, Fate.FAILED, name=HOSTILE, error=HOSTILE),),
        recoveries=(recovery,),
        troubles=(HOSTILE,),
    )
    text = render_page(found)
    root = _parsed(text)
    assert _refers_elsewhere(root) == []
    shown = re.sub(r"[\x00\x1b\u202e]", "\N{REPLACEMENT CHARACTER}", HOSTILE)
    assert root.findtext(".//h1") == shown
    tables = _tables(root)
    assert tables["Checkpoints"][0][1] == tables["Recoveries"][0][1] == shown
    assert shown in tables["Recoveries"][0][4]
    assert shown in tables["What went wrong"][0][4]
    assert "49" not in "".join(tables["Checkpoints"][0][1])


def test_5000_checkpoints_make_a_small_page() -> None:
    checkpoints = [_past(number) for number in range(5000)]
    checkpoints[2500] = _past(2500, Fate.FAILED, error="no route to host")
    checkpoints[2600] = _past(2600, Fate.SKIPPED, error="step-2600 is late")
    checkpoints[2700] = _past(2700, Fate.SKIPPED, error="step-2700 is late")
    recoveries = [
        RecoveryRecord(
            token=f"{n}",
            time=1e9 + 3000.0 * n,
            name=f"step-{n}",
            save_id="",
            step=n,
            seconds=2.0,
            sources={"memory": 5},
        )
        for n in range(400)
    ]
    text = render_page(_history(checkpoints, recoveries))
    assert len(text) < 150_000
    root = _parsed(text)
    assert sum(1 for _ in root.iter()) < 3000
    assert _tiles(root)["Saves"] == ("5,000", "4,997 durable, 2 skipped")
    assert [row[1:] for row in _tables(root)["What went wrong"]] == [
        ["2", "skipped", "step-2700", "step-2700 is late"],
        ["1", "failed", "step-2500", "no route to host"],
    ]
    assert "The last 60 of 5,000." in _texts(root)
    [failed] = [path for path in root.iter("path") if path.get("class") == "failed"]
    # One failure among a column's ten is still high enough to be seen.
    assert float(re.findall(r"v([0-9.]+)", failed.get("d") or "")[0]) > 0.2
    assert [path for path in root.iter("path") if path.get("class") == "band"]


def test_figures_that_no_checkpoint_has_are_left_out(job: Job) -> None:
    good = _past(1)
    lines = [
        good,
        HistoryRow(name="a", save_id="00000001", created=1e9, nbytes=10**400, outcome="durable"),
        HistoryRow(
            name="b", save_id="00000002", created=1e9, stage_seconds=float("nan"), outcome="durable"
        ),
        HistoryRow(
            name="c", save_id="00000003", created=1e9, flush_seconds=float("inf"), outcome="durable"
        ),
        HistoryRow(name="d", save_id="00000004", created=2e11, outcome="durable"),
        HistoryRow(name="e", save_id="00000005", created=1e9, nbytes=-1, outcome="durable"),
    ]
    root = Path(job.url or "", ".dcp_mem")
    root.mkdir(parents=True)
    (root / HISTORIES).write_bytes(to_csv(lines))
    (root / RECOVERIES).write_bytes(
        to_lines(
            [RecoveryRecord(token="token", time=2e11, name="a", save_id="", step=None, seconds=1.0)]
        )
    )
    found = read_history(settings(job.url, memory_root=job.memory, job=job.name))
    assert list(found.checkpoints) == [good]
    assert found.recoveries == ()


def test_a_history_that_is_none_is_said_and_the_rest_told(job: Job, tmp_path: Path) -> None:
    save_in_two_places(job)
    Path(job.url or "", ".dcp_mem", HISTORIES).write_text("gibberish")
    result = _report(job, tmp_path / "x.html")
    assert result.exit_code == 0
    assert f"{HISTORIES} in {job.url} can't be read" in result.stderr
    assert len(_tables(_parsed((tmp_path / "x.html").read_text()))["Checkpoints"]) == 3


# -- the command -----------------------------------------------------------------------------------


def test_the_page_can_go_to_standard_output(job: Job) -> None:
    save_in_two_places(job)
    result = _report(job, Path("-"))
    assert result.exit_code == 0
    assert _parsed(result.stdout).tag == "html"
    assert _report(job, Path("-"), "--json").exit_code == 2


def test_a_file_that_cannot_be_written_is_said_in_a_sentence(job: Job, tmp_path: Path) -> None:
    result = _report(job, tmp_path / "none" / "x.html")
    assert result.exit_code == 2
    assert "x.html can't be written: No such file or directory" in result.stderr


# -- what is drawn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0.0, 0.3, 59.0, 3600.0, 86_400.0 * 3, 86_400.0 * 400, 3e9])
def test_the_axis_of_time_has_a_few_ticks_within_it(span: float) -> None:
    ticks = Times.around([1e9, 1e9 + span]).ticks()
    assert len(ticks) <= 9
    assert span < 2 or len(ticks) >= 2
    assert all(LEFT <= tick.at <= RIGHT for tick in ticks)


@pytest.mark.parametrize("count", [1, 150, 151, 20_000])
def test_what_is_drawn_of_a_series_stays_small_and_on_the_chart(count: int) -> None:
    values = [(1e9 + number, float(number % 97)) for number in range(count)]
    times = Times.around(moment for moment, _ in values)
    drawn = series(times, values, 100.0, str)
    assert bool(drawn.dots) == (count <= 150)
    assert len(drawn.line) + len(drawn.band) < 20_000
    numbers = [
        float(number) for number in re.findall(r"[ML][0-9.]+ (-?[0-9.]+)", drawn.line + drawn.band)
    ]
    assert all(0 <= number <= 100 for number in numbers)
    assert len(drawn.ticks) <= 6


def test_lanes_of_many_events_cover_what_they_cover() -> None:
    times = Times(0.0, 1000.0)
    found, paths = marks(
        times, [(float(second), float(second), "durable", "") for second in range(500)], 2.0
    )
    assert found == []
    covered = sum(map(float, re.findall(r"h([0-9.]+)v", paths["durable"])))
    assert covered == pytest.approx((RIGHT - LEFT) / 2, abs=4)
