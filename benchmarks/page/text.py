"""The page: one table, pictures, and where each figure comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness.runs import UNCOMMITTED
from benchmarks.harness.tables import Table, markdown_table
from benchmarks.page.headlines import DCP_MEM, FLOOR, PICTURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.runs import Run
    from benchmarks.page.headlines import Found, FoundBar

COLUMNS = ("", "what", "dcp_mem", "floor", "× floor", "best peer", "dcp_mem beside it", "run")
OPENING = """\
# What checkpoints cost

dcp_mem's figures beside the **floor**, the least that the same work can cost (a bare copy of the
same bytes, raw sockets, plain gloo), and beside the best **peer**, another library that does the
same work. All of a line were measured in one run, on one machine with two cores and no GPU;
figures are medians, and less is better except for speeds.
"""
CLOSING = """\
`prepare()` makes the memory of the first saves ready in the background. "Stager kept": the caller
keeps torch's stager, and with it the buffers, from save to save.

"1.0" in the column "× floor" means: no slower than the floor. Peers are compared with dcp_mem as it
was measured in turn with them. Bare clients (obstore, botocore) only move bytes: they take no
checksums and know nothing of checkpoints, so they count neither as floor nor as peer. obstore,
written in Rust, takes less CPU than the floor, which is Python's sockets.

Large machines and real networks were not measured, and no run on GPUs is recorded here.
"""
RUNS = """\
Every run has its tables, spreads, targets (met and missed) and notes in a file of its own, with the
figures beside it as JSON. Commands are written as they were called at that commit."""
AGAIN = """\
## Measure again

    pip install -e '.[bench,test]'
    python -m benchmarks --list                              # the cases
    python -m benchmarks core.save --quick                   # prints its tables
    python -m benchmarks core --quick --record core          # writes results/<date>-core.*
    python -m benchmarks --page                              # draws this page

`--record` needs a tree without uncommitted changes, because figures have to name a commit. The
page takes each line from the newest recorded run that has it. Namespaces and a mounted tmpfs need
root.
"""


def page(found: Sequence[Found], runs: Sequence[Run]) -> str:
    """Return the page in markdown."""
    in_table = [one for one in found if one.in_table]
    firsts = {id(one) for one in _firsts(in_table)}
    table = Table(COLUMNS, [_line(one, is_first=id(one) in firsts) for one in in_table])
    drawn = {one.picture for one in found}
    pictures = [
        f"![{title}](pictures/{name}.svg)" for name, title in PICTURES.items() if name in drawn
    ]
    lines = [
        OPENING,
        *markdown_table(table),
        "",
        CLOSING,
        *(f"{picture}\n" for picture in pictures),
        "## Runs",
        "",
        RUNS,
        "",
        *markdown_table(_runs(found, runs)),
        "",
        *_warnings(found),
        AGAIN,
    ]
    return "\n".join(lines)


def _firsts(found: Sequence[Found]) -> list[Found]:
    """The first line of each question."""
    return [
        one
        for one, before in zip(found, [None, *found], strict=False)
        if before is None or before.picture != one.picture
    ]


def _line(found: Found, *, is_first: bool) -> tuple[str, ...]:
    measured, peer = found.only(DCP_MEM)[0], found.best_peer
    ratio = "" if found.ratio is None else f"{found.ratio:.1f}"
    return (
        f"**{PICTURES[found.picture]}**" if is_first else "",
        found.what,
        measured.figure.short,
        ", ".join(_named(bar) for bar in found.only(FLOOR)),
        ratio,
        "none measured" if peer is None else _named(peer),
        "" if peer is None else _marked(peer.verdict),
        _link(found.run),
    )


def _named(bar: FoundBar) -> str:
    return f"{bar.figure.short} ({bar.label})"


def _marked(verdict: str) -> str:
    return f"**{verdict}**" if verdict.endswith(("slower", "more")) else verdict


def _link(run: Run) -> str:
    return f"[{run.name}](results/{run.name}.md)"


def _warnings(found: Sequence[Found]) -> list[str]:
    """Say which runs on this page can't be repeated exactly."""
    names = dict.fromkeys(_link(one.run) for one in found if not one.run.is_clean)
    return [
        f"{name} was measured {UNCOMMITTED}: no commit has exactly what it measured.\n"
        for name in names
    ]


def _runs(found: Sequence[Found], runs: Sequence[Run]) -> Table:
    lines = [
        (
            _link(run),
            run.facts["when"],
            run.facts["commit"],
            ", ".join(section.case for section in run.sections),
            str(sum(one.run is run for one in found)),
        )
        for run in runs
    ]
    return Table(("run", "when", "commit", "cases", "groups of bars above"), lines)
