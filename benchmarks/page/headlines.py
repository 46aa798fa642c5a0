"""Which figures the page shows: by case, part and row of the newest run that has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness.samples import Sample
from benchmarks.harness.tables import AMOUNT, CPU_PER_GB, TIME, Figure, compared

if TYPE_CHECKING:
    from benchmarks.harness.runs import Run
    from benchmarks.harness.tables import Part

FLOOR, DCP_MEM, PEER, BARE = "floor", "dcp_mem", "peer", "bare client"
PICTURES: Mapping[str, str] = {
    "save": "What a save costs training",
    "calls": "What DCP's own calls cost, nested states",
    "restore": "What a restore takes",
    "flush": "What a flush to storage costs",
    "copies": "What copies on other nodes cost",
}
"""Title of each picture, by its file's name."""
LESS_IS_BETTER, MORE_IS_BETTER = "less is better", "more is better"
ASYNC_KEPT = "dcp.save; peer: dcp.async_save, stager kept by the caller"


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure by its row and column.

    Attributes:
        row: What the row says was measured, or the first cell of a line of a table.
        column: "floor", "dcp_mem", "peer", "ratio", or a table's column.
        part: Pattern of the part's title; None: that of the headline.
    """

    row: str
    column: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure to show.

    Attributes:
        kind: `FLOOR`, `DCP_MEM`, `PEER` or `BARE`.
        beside: dcp_mem's figure to compare a peer with, where it isn't the headline's; such a
            peer has a group of bars of its own in the picture.
    """

    kind: str
    label: str
    cell: Cell
    beside: Cell | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A line of the page's table and a group of bars in one of its pictures.

    Attributes:
        what: What is measured; `{0}`, `{1}`, … stand for groups of the part's pattern.
        part: Pattern of the part's title.
        ratio: Where dcp_mem's figure divided by the floor's stands; None: from the medians.
        in_table: Whether it is in the table, too.
    """

    picture: str
    what: str
    case: str
    part: str
    bars: Sequence[Bar]
    ratio: Cell | None = None
    words: tuple[str, str, str] = TIME
    better: str = LESS_IS_BETTER
    in_table: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBar:
    """A bar and its figure."""

    kind: str
    label: str
    figure: Figure
    verdict: str = ""
    in_picture: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A headline with its figures, all of one run."""

    picture: str
    what: str
    bars: Sequence[FoundBar]
    ratio: float | None
    better: str
    in_table: bool
    run: Run

    def only(self, kind: str) -> list[FoundBar]:
        return [bar for bar in self.bars if bar.kind == kind]

    @property
    def best_peer(self) -> FoundBar | None:
        peers = self.only(PEER)
        if not peers:
            return None
        pick = min if self.better == LESS_IS_BETTER else max
        return pick(peers, key=lambda bar: bar.figure.median)


def _beside_floor(row: str, floor: str) -> list[Bar]:
    return [Bar(FLOOR, floor, Cell(row, FLOOR)), Bar(DCP_MEM, "dcp_mem", Cell(row, DCP_MEM))]


def _upload(kind: str, label: str, route: str) -> Bar:
    return Bar(kind, label, Cell(route, CPU_PER_GB))


def _saves(part: str, what: str, row: str, floor: str) -> Headline:
    return Headline(
        picture="save",
        what=what,
        case="core.save",
        part=part,
        bars=[
            *_beside_floor(row, floor),
            Bar(PEER, "dcp.async_save, stager kept", Cell(ASYNC_KEPT, PEER)),
            Bar(PEER, "dcp.async_save", Cell("dcp.save; peer: dcp.async_save", PEER)),
            Bar(PEER, "dcp.save, torch's writer", Cell("dcp.save; peer: FileSystemWriter", PEER)),
        ],
        ratio=Cell(row, "ratio"),
    )


def _first_save(what: str, row: str, floor: str) -> Headline:
    peer = row.partition(";")[0] + "; peer: dcp.async_save's first"
    return Headline(
        picture="save",
        what=what,
        case="core.first",
        part="(1 GiB) as 64 tensors, 1 rank",
        bars=[*_beside_floor(row, floor), Bar(PEER, "dcp.async_save", Cell(peer, PEER))],
        ratio=Cell(row, "ratio"),
    )


def _restores(part: str, what: str) -> Headline:
    row = "dcp_mem.load; floor: as many copies, preadv or mapped anew"
    return Headline(
        picture="restore",
        what=what,
        case="core.restore",
        part=part,
        bars=[
            *_beside_floor(row, "bare copies"),
            Bar(PEER, "torch's reader", Cell("dcp_mem.load; peer: FileSystemReader", PEER)),
        ],
        ratio=Cell(row, "ratio"),
    )


def _lost(link: str, what: str, *, in_table: bool) -> Headline:
    row = "dcp_mem.load, the first of fresh processes; floor: the bytes moved"
    return Headline(
        picture="restore",
        what=what,
        case="replication.recovery",
        part=rf"([\d.]+ \w+) as .*, one of them replaced by an empty one{link}",
        bars=_beside_floor(row, "the bytes sent and copied"),
        ratio=Cell(row, "ratio"),
        in_table=in_table,
    )


def _throughput(link: str, what: str, *, in_table: bool) -> Headline:
    row = "bytes per second, from the start to the record; floor: plain gloo"
    return Headline(
        picture="copies",
        what=what,
        case="replication.throughput",
        part=rf"([\d.]+ \w+) from each of 2 nodes to the other, both at once{link}",
        bars=_beside_floor(row, "plain gloo"),
        better=MORE_IS_BETTER,
        in_table=in_table,
    )


_COPIED, _PER_PEER = r"([\d.]+ \w+) on each of 2 nodes", "dcp_mem.save with replicas=1; peer: {}"


def _copied_beside(peer: str) -> Bar:
    row, part = _PER_PEER.format(peer), rf"{_COPIED}, beside {peer}"
    return Bar(PEER, peer, Cell(row, PEER, part), Cell(row, DCP_MEM, part))


def _beside_copier(peer: str) -> Headline:
    row = _PER_PEER.format(peer)
    return Headline(
        picture="copies",
        what=f"The same, measured in turn with {peer}",
        case="replication.blocking",
        part=rf"{_COPIED}, beside {peer}",
        bars=[Bar(DCP_MEM, "dcp_mem", Cell(row, DCP_MEM)), Bar(PEER, peer, Cell(row, PEER))],
        in_table=False,
    )


def _held(call: str, part: str, what: str, peers: Mapping[str, str]) -> Headline:
    row = f"{call}; floor: a copy"
    return Headline(
        picture="calls",
        what=what,
        case="core.calls",
        part=f"saves, {part}",
        bars=[
            *_beside_floor(row, "a bare copy"),
            *(Bar(PEER, label, Cell(peer, PEER)) for label, peer in peers.items()),
        ],
        ratio=Cell(row, "ratio"),
    )


def _save_calls(part: str, what: str) -> list[Headline]:
    """The lines of one state: synchronous, asynchronous, overlapped."""
    stager = "dcp.async_save; peer: dcp.async_save, torch's stager"
    meta = "; peer: torch_checkpointing"
    synchronous = {"torch's writer": "dcp.save; peer: dcp.save, FileSystemWriter"}
    asynchronous = {"torch's stager": stager, "torch's stager kept": f"{stager} kept"}
    beside_meta = {"torch_checkpointing": f"overlapped{meta}"}
    at_once = {"torch_checkpointing": f"overlapped, and a step at once{meta}"}
    return [
        _held("dcp.save", part, f"dcp.save of {what}", synchronous),
        _held("dcp.async_save", part, f"dcp.async_save of {what}", asynchronous),
        _held(
            "overlapped, the call", part, f"dcp_mem.async_save, overlapped, of {what}", beside_meta
        ),
        _held(
            "overlapped, and a step at once",
            part,
            f"The same, and a step at once, of {what}",
            at_once,
        ),
    ]


def _load_call(part: str, what: str) -> Headline:
    row = "dcp.load; floor: preadv"
    return Headline(
        picture="calls",
        what=f"dcp.load of {what}",
        case="core.calls",
        part=f"loads, {part}",
        bars=[
            *_beside_floor(row, "preadv"),
            Bar(PEER, "torch's reader", Cell("dcp.load; peer: FileSystemReader", PEER)),
        ],
        ratio=Cell(row, "ratio"),
    )


def _saving_step(call: str) -> Headline:
    row = f"a step that saves with {call}; floor: no save"
    return Headline(
        picture="calls",
        what=f"Training step that saves with {call}",
        case="core.training",
        part=".*",
        bars=_beside_floor(row, "no save"),
        ratio=Cell(row, "ratio"),
    )


_FEW = r"([\d.]+ \w+) as 64 tensors, 1 rank"
_MOST = r"([\d.]+ \w+) as 20,000 tensors, 2 ranks"
_FIRST = "save 1; floor: first touch"
_PREPARED = "save 1 after prepare(); floor: warm copy"
_WITH_COPY = "dcp_mem.save with replicas=1; floor: without"
_STEP = "a step beside a flush; floor: alone"
_LOOP = "share of its speed that the loop keeps; floor: idle; peer: dcp.async_save"
HEADLINES: Sequence[Headline] = (
    _saves(
        "(2 GiB) as 64 tensors, 1 rank",
        "Save {0}, 64 tensors, 1 process",
        "dcp_mem.save; floor: a copy",
        "a bare copy",
    ),
    _saves(
        "(1 GiB) as 20,000 tensors, 2 ranks",
        "Save {0}, 20,000 tensors, 2 processes",
        "dcp_mem.save; floor: as many copies",
        "as many bare copies",
    ),
    _first_save("First save of a process, {0}", _FIRST, "a copy into new memory"),
    _first_save("The same after prepare()", _PREPARED, "a copy into touched memory"),
    *_save_calls(_FEW, "{0}, 64 tensors, 1 process"),
    *_save_calls(_MOST, "{0}, 20,000 DTensors, 2 processes"),
    _load_call(_FEW, "{0}, 64 tensors, 1 process"),
    _load_call(_MOST, "{0}, 20,000 DTensors, 2 processes"),
    *(_saving_step(call) for call in ("dcp.save", "dcp.async_save", "overlapped")),
    _restores("(2 GiB) as 64 tensors, 1 rank", "Restore {0}, 64 tensors, 1 process"),
    _restores("(1 GiB) as 20,000 tensors, 2 ranks", "Restore {0}, 20,000 tensors, 2 processes"),
    _lost(
        r", over links of (\d+) Gb/s",
        "Restore {0} on 2 nodes, one of them lost, links of {1} Gb/s",
        in_table=True,
    ),
    _lost("", "The same, the network as fast as 2 cores can carry it", in_table=False),
    Headline(
        picture="flush",
        what="CPU to upload {0} to S3",
        case="storage.uploads",
        part=r"s3, 4 objects, ([\d.]+ \w+) in all",
        bars=[
            _upload(FLOOR, "raw sockets", "raw sockets (floor)"),
            _upload(DCP_MEM, "dcp_mem, with checksums", "dcp_mem"),
            _upload(BARE, "obstore alone", "obstore put"),
            _upload(BARE, "botocore alone", "raw SDK, from memoryviews"),
            _upload(PEER, "dcp.save, s3torchconnector", "dcp.save, s3torchconnector"),
            _upload(PEER, "dcp.save, torch's FsspecWriter", "dcp.save, torch's FsspecWriter"),
        ],
        words=AMOUNT,
    ),
    Headline(
        picture="flush",
        what="Training step beside a flush of {0}",
        case="storage.trainer",
        part=r"([\d.]+ \w+) as \d+ tensors, s3",
        bars=_beside_floor(_STEP, "no flush"),
        ratio=Cell(_STEP, "ratio"),
    ),
    Headline(
        picture="flush",
        what="Speed of a loop of small operations beside a flush of 20,000 tensors",
        case="core.slowdown",
        part="small tensor operations",
        bars=[*_beside_floor(_LOOP, "no flush"), Bar(PEER, "dcp.async_save", Cell(_LOOP, PEER))],
        ratio=Cell(_LOOP, "ratio"),
        better=MORE_IS_BETTER,
    ),
    Headline(
        picture="copies",
        what="Save {0} on each of 2 nodes, with a copy on the other",
        case="replication.blocking",
        part=_COPIED,
        bars=[
            Bar(FLOOR, "dcp_mem without copies", Cell(_WITH_COPY, FLOOR)),
            Bar(DCP_MEM, "dcp_mem", Cell(_WITH_COPY, DCP_MEM)),
            _copied_beside("lm-resiliency"),
            _copied_beside("NVRx"),
        ],
        ratio=Cell(_WITH_COPY, "ratio"),
    ),
    _beside_copier("lm-resiliency"),
    _beside_copier("NVRx"),
    _throughput(
        r", over links of (\d+) Gb/s",
        "Copy {0} from each of 2 nodes to the other, links of {1} Gb/s",
        in_table=True,
    ),
    _throughput("", "The same, the network as fast as 2 cores can carry it", in_table=False),
)


def find(headline: Headline, runs: Sequence[Run]) -> Found | None:
    """Return a headline's figures of the newest run that has all of them; None if none has.

    A run at a clean commit counts before one with uncommitted changes.
    """
    for run in sorted(runs, key=lambda run: (run.is_clean, run.facts["when"]), reverse=True):
        parts = [
            part
            for section in run.sections
            if section.case == headline.case
            for part in section.parts
        ]
        found = _in_parts(headline, parts, run)
        if found is not None:
            return found
    return None


def _in_parts(headline: Headline, parts: Sequence[Part], run: Run) -> Found | None:
    matches = [match for part in parts if (match := re.fullmatch(headline.part, part.title))]
    if not matches:
        return None

    def figure(cell: Cell) -> Figure | None:
        return _figure(parts, cell.part or headline.part, cell)

    figures = [(bar, figure(bar.cell)) for bar in headline.bars]
    measured = next(value for bar, value in figures if bar.kind == DCP_MEM)
    floor = next((value for bar, value in figures if bar.kind == FLOOR), None)
    if measured is None or any(value is None for bar, value in figures if bar.kind != PEER):
        return None
    ratio = None if headline.ratio is None else figure(headline.ratio)
    from_medians = None if floor is None else measured.median / floor.median
    bars = []
    for bar, value in figures:
        if value is None:  # a peer that wasn't installed
            continue
        beside = figure(bar.beside) if bar.beside is not None else measured
        verdict = "" if bar.kind != PEER or beside is None else _verdict(headline, beside, value)
        bars.append(
            FoundBar(
                kind=bar.kind,
                label=bar.label,
                figure=value,
                verdict=verdict,
                in_picture=bar.beside is None,
            )
        )
    return Found(
        picture=headline.picture,
        what=headline.what.format(*matches[0].groups()),
        bars=bars,
        ratio=from_medians if ratio is None else ratio.median,
        better=headline.better,
        in_table=headline.in_table,
        run=run,
    )


def _verdict(headline: Headline, measured: Figure, peer: Figure) -> str:
    if headline.better == LESS_IS_BETTER:
        return compared(measured.median, peer.median, headline.words)
    better, worse, equal = headline.words
    return compared(measured.median, peer.median, (worse, better, equal))


def _figure(parts: Sequence[Part], pattern: str, cell: Cell) -> Figure | None:
    for part in parts:
        if not re.fullmatch(pattern, part.title):
            continue
        for row in part.rows:
            if row.what == cell.row and cell.column in ("floor", "dcp_mem", "ratio", "peer"):
                value = getattr(row, cell.column)
                if isinstance(value, Figure):
                    return value
        for table in part.tables:
            for line in table.lines:
                if line[0] == cell.row and cell.column in table.columns:
                    value = line[table.columns.index(cell.column)]
                    if isinstance(value, Figure):
                        return Figure.of(Sample((value.median,)), cell.column)
    return None
