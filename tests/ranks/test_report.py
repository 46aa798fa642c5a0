"""`dcp-mem report`: the page shows the history, whatever it holds, needs no network, is small."""

import json
import os
import re
import shutil
import signal
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from dcp_mem import CheckpointManager, every_n_saves
from tests.support.checkpoints.damage import flip
from tests.support.checkpoints.histories import EPOCH, load_of, past, write_past
from tests.support.checkpoints.jobs import (
    Job,
    load_anew,
    save,
    save_in_two_places,
    save_unflushed,
    wait_until,
)
from tests.support.processes.forks import forked, killed_ranks
from tests.support.shell import Shell

HISTORY = "checkpointHistories.csv"
HOSTILE = (
    '</title><script src="https://evil.example/x.js">alert(1)</script><img src=x onerror=alert(1)> '
    "\"' & {{7*7}} \x00\x1b[2J\u202e"
)
FATES = {
    "durable": "durable",
    "evicted": "memory only",
    "superseded": "superseded",
    "skipped": "skipped",
    "failed": "failed",
}
"""What the page says of an outcome in the history."""
LEFT, RIGHT = 132.0, 938.0


def _report(job: Job, target: Path, *arguments: str) -> Result:
    return Shell(job).run("report", "-o", str(target), *arguments)


def _page(job: Job) -> str:
    """The page of what lies in the job's root."""
    result = _report(job, Path("-"))
    assert result.exit_code == 0, result.output
    return result.stdout


def _root(job: Job) -> ET.Element:
    return _parsed(_page(job))


def _totals(job: Job, target: Path) -> dict[str, Any]:
    result = _report(job, target, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["totals"]
    return found


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

    sums = answer["totals"]
    assert [sums[name] for name in ("saves", "durable", "memory_only", "recoveries")] == [
        *(8, 5, 3, 1)
    ]
    [loaded] = answer["recoveries"]
    assert (loaded["name"], loaded["step"]) == ("step-4", 4)
    tables = _tables(root)
    [recovery] = tables["Recoveries"]
    assert recovery[1:3] == ["step-4", "4"]
    [(source, nbytes)] = loaded["sources"].items()
    assert recovery[4] == f"{source} {nbytes / (1 << 20):.1f} MiB"
    rows = {row[1]: row for row in tables["Checkpoints"]}
    assert len(rows) == len(tables["Checkpoints"])
    assert {name: row[3] for name, row in rows.items()} == {
        f"step-{step}": "durable" if step in (0, 2, 4, 6, 7) else "memory only" for step in range(8)
    }
    assert all(row[4] == "1.0 MiB" and row[5] for row in rows.values())
    assert {name for name, row in rows.items() if row[6]} == {
        f"step-{step}" for step in (0, 2, 4, 6, 7)
    }
    tiles = _tiles(root)
    assert tiles["Saves"] == ("8", "5 durable, 3 in memory only")
    assert tiles["Recoveries"][0] == "1"
    assert tiles["To storage"] == ("5.0 MiB", "5 flushes")
    assert tiles["Saving overhead"][0] == f"{sums['blocked_share']:.2%}"
    assert tiles["Goodput"][0] == f"{sums['goodput']:.1%}"
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
    failed = past(9, "failed", created=1795205846.0, error="no route to <storage>", attempts=3)
    write_past(Path(job.url or ""), [failed])
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


def test_a_checkpoint_whose_flush_waits_or_fails(job: Job) -> None:
    Path(job.url or "").write_text("in the way")
    manager = CheckpointManager(job.url, memory_root=job.memory, job=job.name)
    manager.save(1, {"n": 1})
    wait_until(lambda: manager.status()[0].error, "the flush fails")
    tables = _tables(_root(Job(None, job.memory)))
    Path(job.url or "").unlink()
    manager.close(progress=False)
    assert [row[3] for row in tables["Checkpoints"]] == ["failed"]
    assert str(job.url) in tables["What went wrong"][0][4]
    assert [row[3] for row in _tables(_root(job))["Checkpoints"]] == ["durable"]


def test_a_checkpoint_that_awaits_its_flush_is_on_its_way(job: Job) -> None:
    forked(save_unflushed, job)
    root = _root(job)
    assert [row[3] for row in _tables(root)["Checkpoints"]] == ["on its way"]
    assert "What went wrong" not in _tables(root)


# -- of any history --------------------------------------------------------------------------------


def test_nothing_is_a_page_too(job: Job, tmp_path: Path) -> None:
    result = _report(job, tmp_path / "x.html")
    assert result.exit_code == 1
    assert "nothing is known of checkpoints in" in result.stderr
    root = _parsed((tmp_path / "x.html").read_text())
    assert any("Nothing is known" in text for text in _texts(root))
    assert not list(root.iter("svg"))
    assert json.loads(_report(job, tmp_path / "x.html", "--json").stdout)["totals"]["goodput"] == 0


@pytest.mark.parametrize("outcome", list(FATES))
def test_one_checkpoint_is_enough(job: Job, outcome: str) -> None:
    write_past(Path(job.url or ""), [past(1, outcome)])
    tables = _tables(_root(job))
    assert [row[1:4] for row in tables["Checkpoints"]] == [["step-1", "", FATES[outcome]]]
    assert ("What went wrong" in tables) == (outcome in ("skipped", "failed"))


def test_superseded_checkpoints_are_counted_as_a_fact(job: Job, tmp_path: Path) -> None:
    rows = [past(n, "superseded", error="superseded by a newer checkpoint") for n in range(7)]
    write_past(Path(job.url or ""), [*rows, past(8)])
    root = _root(job)
    assert _tiles(root)["Saves"] == ("8", "1 durable, 7 superseded by newer ones")
    assert _tiles(root)["Failed"][0] == "0"
    assert "What went wrong" not in _tables(root)
    sums = _totals(job, tmp_path / "x.html")
    assert (sums["superseded"], sums["skipped"]) == (7, 0)


def test_goodput_is_the_time_without_saves_and_without_what_was_done_twice(
    job: Job, tmp_path: Path
) -> None:
    """What overlaps counts once: the save at 20 s is within what the loads made again."""
    rows = [
        past(number, "evicted", created=EPOCH + at, stage_seconds=1.0)
        for number, at in enumerate((0.0, 10.0, 20.0))
    ]
    loads = [load_of("step-1", EPOCH + at, save_id=f"{1:08x}") for at in (50.0, 70.0)]
    write_past(Path(job.url or ""), rows, [*loads, load_of("nothing", EPOCH + 100.0)])
    sums = _totals(job, tmp_path / "x.html")
    assert sums["lost_seconds"] == pytest.approx(1.0 + 60.0 + 2.0)
    assert sums["goodput"] == pytest.approx(0.37)


def test_metrics_of_the_training_loop_are_drawn_and_listed(job: Job) -> None:
    rows = [past(n, step=10 * n, metrics={"loss": 1 / n, "odd": float("nan")}) for n in (1, 2)]
    write_past(Path(job.url or ""), rows)
    root = _root(job)
    assert [(row[2], row[-1]) for row in _tables(root)["Checkpoints"]] == [
        ("20", "loss=0.5, odd=nan"),
        ("10", "loss=1, odd=nan"),
    ]
    drawn = [one.get("aria-label") or "" for one in root.iter("g")]
    assert "loss: 2 values, from 0.5 to 1" in drawn
    assert not [text for text in drawn if text.startswith("odd")]


def test_cells_of_tables_say_on_a_phone_what_they_are(job: Job) -> None:
    write_past(Path(job.url or ""), [past(1, "failed", error="no route")])
    text = _page(job)
    cells = list(_parsed(text).iter("td"))
    assert cells
    assert all(cell.get("data-label") for cell in cells)
    # A cell's label and a state's colour would be drawn in the same place, one over the other.
    assert not [cell for cell in cells if "state" in (cell.get("class") or "")]
    assert [one.text for one in _parsed(text).iter("span") if one.get("class") == "state is-failed"]
    assert "@media screen and (max-width: 640px)" in text


def test_hostile_texts_stay_texts(memory_root: Path, tmp_path: Path) -> None:
    url = tmp_path / "<img src=x onerror=alert(1)>\x1b[2J"
    recovery = load_of(HOSTILE, EPOCH, sources={HOSTILE: 5}, passed_over=(f"{HOSTILE}: {HOSTILE}",))
    write_past(url, [past(1, "failed", name=HOSTILE, error=HOSTILE)], [recovery])
    root = _root(Job(str(url), str(memory_root)))
    assert _refers_elsewhere(root) == []
    assert "<img src=x onerror=alert(1)>\N{REPLACEMENT CHARACTER}[2J" in "".join(_texts(root))
    shown = re.sub(r"[\x00\x1b\u202e]", "\N{REPLACEMENT CHARACTER}", HOSTILE)
    tables = _tables(root)
    assert tables["Checkpoints"][0][1] == tables["Recoveries"][0][1] == shown
    assert shown in tables["Recoveries"][0][4]
    assert shown in tables["What went wrong"][0][4]
    assert "49" not in "".join(tables["Checkpoints"][0][1])


def test_5000_checkpoints_make_a_small_page(job: Job) -> None:
    rows = [past(number) for number in range(5000)]
    rows[2500] = past(2500, "failed", error="no route to host")
    rows[2600] = past(2600, "skipped", error="step-2600 is late")
    rows[2700] = past(2700, "skipped", error="step-2700 is late")
    loads = [load_of(f"step-{n}", EPOCH + 3000.0 * n, step=n) for n in range(400)]
    write_past(Path(job.url or ""), rows, loads)
    text = _page(job)
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
    rows = [
        past(1),
        past(2, name="a", nbytes=10**400),
        past(3, name="b", stage_seconds=float("nan")),
        past(4, name="c", flush_seconds=float("inf")),
        past(5, name="d", created=2e11),
        past(6, name="e", nbytes=-1),
    ]
    write_past(Path(job.url or ""), rows, [load_of("a", 2e11)])
    tables = _tables(_root(job))
    assert [row[1] for row in tables["Checkpoints"]] == ["step-1"]
    assert "Recoveries" not in tables


def test_a_history_that_is_none_is_said_and_the_rest_told(job: Job, tmp_path: Path) -> None:
    save_in_two_places(job)
    Path(job.url or "", ".dcp_mem", HISTORY).write_text("gibberish")
    result = _report(job, tmp_path / "x.html")
    assert result.exit_code == 0
    assert f"{HISTORY} in {job.url} can't be read" in result.stderr
    assert len(_tables(_parsed((tmp_path / "x.html").read_text()))["Checkpoints"]) == 3


# -- the command -----------------------------------------------------------------------------------


def test_the_page_can_go_to_standard_output(job: Job) -> None:
    save_in_two_places(job)
    assert _root(job).tag == "html"
    assert _report(job, Path("-"), "--json").exit_code == 2


def test_a_file_that_cannot_be_written_is_said_in_a_sentence(job: Job, tmp_path: Path) -> None:
    result = _report(job, tmp_path / "none" / "x.html")
    assert result.exit_code == 2
    assert "x.html can't be written: No such file or directory" in result.stderr


# -- what is drawn ---------------------------------------------------------------------------------


def _across(root: ET.Element) -> list[float]:
    """Where the ticks of the axis of time are."""
    lines = [one for one in root.iter("line") if one.get("class") == "grid"]
    return [float(one.get("x1") or 0) for one in lines if one.get("x1") == one.get("x2")]


@pytest.mark.parametrize("span", [0.0, 0.3, 59.0, 3600.0, 86_400.0 * 3, 86_400.0 * 400, 3e9])
def test_the_axis_of_time_has_a_few_ticks_within_it(job: Job, span: float) -> None:
    rows = [past(1, "evicted", created=EPOCH), past(2, "evicted", created=EPOCH + span)]
    write_past(Path(job.url or ""), rows)
    ticks = _across(_root(job))
    assert len(ticks) <= 9
    assert span < 2 or len(ticks) >= 2
    assert all(LEFT <= at <= RIGHT for at in ticks)


@pytest.mark.parametrize("count", [1, 150, 151, 4000])
def test_what_is_drawn_of_a_series_stays_small_and_on_the_chart(job: Job, count: int) -> None:
    rows = [
        past(number, "evicted", created=EPOCH + number, nbytes=0, stage_seconds=1.0 + number % 97)
        for number in range(count)
    ]
    write_past(Path(job.url or ""), rows)
    root = _root(job)
    [chart] = [one for one in root.iter("g") if "Blocking" in (one.get("aria-label") or "")]
    assert len(list(chart.iter("circle"))) == (count if count <= 150 else 0)
    paths = _drawn(list(chart.iter("path")))
    assert len(paths) < 20_000
    numbers = [float(number) for number in re.findall(r"[ML][0-9.]+ (-?[0-9.]+)", paths)]
    assert all(0 <= number <= 100 for number in numbers)
    assert len(list(chart.iter("line"))) <= 6


def _drawn(paths: Sequence[ET.Element]) -> str:
    return "".join(one.get("d") or "" for one in paths)


def test_lanes_of_many_events_cover_what_they_cover(job: Job) -> None:
    """Half of the time, up to a load that lies as far behind."""
    rows = [past(n, "evicted", created=EPOCH + n, nbytes=0, stage_seconds=0.0) for n in range(500)]
    write_past(Path(job.url or ""), rows, [load_of("x", EPOCH + 999.0)])
    [lane] = [one for one in _root(job).iter("path") if one.get("class") == "memory-only"]
    covered = sum(map(float, re.findall(r"h([0-9.]+)v", lane.get("d") or "")))
    assert covered == pytest.approx((RIGHT - LEFT) / 2, rel=0.04)
