"""The command: run cases, print what they found, record it, draw the page."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import page
from benchmarks.cases import CASES, GROUPS, chosen
from benchmarks.harness import runs, tables
from benchmarks.harness.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cases import Case
    from benchmarks.harness.tables import Section

EVERYTHING = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        1 if a case could not be measured, 2 if recording was refused, else 0. Missed targets
        don't count.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.page:
        page.draw()
        return 0
    if options.list or not options.cases:
        print(_listed())
        return 0
    try:
        cases = chosen([name for name in options.cases if name != EVERYTHING])
    except KeyError as error:
        parser.error(f"there is no case {error}; --list names them all")
    if options.record and (changes := runs.uncommitted()):
        print("Nothing is measured: figures have to name a commit, but these files differ from it:")
        print("\n".join(changes))
        return 2
    return _run(cases, options)


def _run(cases: Sequence[Case], options: argparse.Namespace) -> int:
    runs.leave_on_sigterm()
    run = _begun(cases, options)
    print(run.head)
    sections: list[Section] = []
    for case in cases:
        section = replace(case.run(_settings(case, options)), case=case.name)
        print(section.markdown, flush=True)
        sections.append(section)
        run = replace(run, sections=sections)
        if options.record:  # after each case, so that a late failure loses nothing
            run.write()
    print(tables.summary(sections))
    return int(tables.failures(sections))


def _begun(cases: Sequence[Case], options: argparse.Namespace) -> runs.Run:
    groups = list(dict.fromkeys(case.group for case in cases))
    repeats = {case.group: _settings(case, options).repeats for case in cases}
    today = datetime.now(timezone.utc).date()
    return runs.Run(
        name=f"{today}-{options.record}",
        title=f"Results: {', '.join(groups)}, {today}",
        facts=runs.facts(
            shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
            _settings(cases[0], options),
            ", ".join(f"{count} ({group})" for group, count in repeats.items()),
        ),
        how_to_read="\n\n".join(GROUPS[group].how_to_read for group in groups),
    )


def _settings(case: Case, options: argparse.Namespace) -> Settings:
    group = GROUPS[case.group]
    return Settings(
        quick=options.quick,
        repeats=options.repeats or (group.quick_repeats if options.quick else group.repeats),
        tmpfs=options.tmpfs,
        disk=options.disk,
        huge=options.huge,
    )


def _listed() -> str:
    width = max(len(case.name) for case in CASES)
    return "\n".join(f"{case.name:{width}}  {case.says}" for case in CASES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what dcp_mem costs, beside bare copies and other libraries.",
        epilog=f"cases:\n{_listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"a case, a group ({', '.join(GROUPS)}) or all"
    )
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, smaller states")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed runs per process")
    parser.add_argument(
        "--record",
        metavar="TOPIC",
        help="write benchmarks/results/<date>-TOPIC.json and .md; refused with uncommitted changes",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="draw RESULTS.md, its pictures and the details from the recorded runs",
    )
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a tmpfs to work in")
    parser.add_argument(
        "--disk", type=Path, default=Path(tempfile.gettempdir()), help="a disk to flush to"
    )
    parser.add_argument(
        "--huge",
        choices=("never", "within_size", "always"),
        default="never",
        help="huge pages of the tmpfs of simulated nodes",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
