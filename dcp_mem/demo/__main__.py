"""Train, kill a rank in the middle of a save, throw the memory away: and come back bit for bit.

`python -m dcp_mem.demo` exits with 0 only if every recovery happened as told and every loss, and
the final state, came out with the same bits as in a run that nothing disturbed.
"""

import argparse
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType

import torch
from rich.console import Console

from dcp_mem.demo.account import Runs, costs, examine, recoveries
from dcp_mem.demo.launch import Launch, Outcome, RunFailedError, run
from dcp_mem.demo.model import SIZES, state_bytes
from dcp_mem.demo.schedule import KILLED_RANK, KILLED_SAVE, Schedule, checkpoint_id
from dcp_mem.demo.show import detail, heading, show_claims, show_costs, show_recoveries
from dcp_mem.demo.workplace import Workplace, forget, workplace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command line."""

    schedule: Schedule
    ranks: int
    size: str
    path: str | None
    keep_work: bool


class Demo:
    """The three runs, in one workplace."""

    def __init__(self, options: Options, place: Workplace, console: Console) -> None:
        self._options = options
        self._schedule = options.schedule
        self._place = place
        self._console = console

    def play(self) -> Runs:
        """Run all three runs, in order."""
        reference = self._train_undisturbed()
        interrupted = self._train_and_be_killed()
        self._lose_memory()
        return Runs(reference, interrupted, self._train_from_storage())

    def _train_undisturbed(self) -> Outcome:
        heading(self._console, "1  A run that nothing disturbs, without checkpoints")
        return self._run("reference")

    def _train_and_be_killed(self) -> Outcome:
        killed, stop = checkpoint_id(self._schedule.killed), self._schedule.stop_after
        heading(
            self._console,
            f"2  The same with a checkpoint every {self._schedule.save_every} steps; "
            f"rank {KILLED_RANK} is killed (SIGKILL) while it saves {killed}",
        )
        return self._run(
            "interrupted",
            *self._checkpointing(),
            f"--kill-in-save={KILLED_SAVE}",
            f"--stop-after={stop}",
            max_restarts=1,
        )

    def _lose_memory(self) -> None:
        forget(self._place.memory)
        gone = "gone" if not self._place.memory.exists() else "STILL THERE"
        detail(self._console, f"memory thrown away: {self._place.memory} is {gone}")

    def _train_from_storage(self) -> Outcome:
        heading(self._console, "3  A new job, on a node with nothing in memory")
        return self._run("resumed", *self._checkpointing())

    def _checkpointing(self) -> tuple[str, ...]:
        return (
            f"--save-every={self._schedule.save_every}",
            f"--path={self._place.storage}",
            f"--memory-root={self._place.memory}",
        )

    def _run(self, name: str, *arguments: str, max_restarts: int = 0) -> Outcome:
        common = (f"--steps={self._schedule.steps}", f"--size={self._options.size}")
        records = self._place.run_directory(name)
        launch = Launch(self._options.ranks, max_restarts, (*common, *arguments), records)
        return run(launch, lambda line: detail(self._console, line))


def main() -> int:
    """Play the demo and account for it; return the exit code."""
    options = parse_options()
    console = Console()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave)
    begun = time.perf_counter()
    needed = state_bytes(SIZES[options.size])
    with workplace(options.path, needed, options.keep_work) as place:
        introduce(console, options, place)
        try:
            runs = Demo(options, place, console).play()
        except RunFailedError as error:
            console.print(f"[bold red]FAILED[/bold red]: {error}")
            detail(console, error.log_tail)
            return 1
    return account(console, runs, options, time.perf_counter() - begun)


def introduce(console: Console, options: Options, place: Workplace) -> None:
    """Say what is about to happen, and where."""
    heading(console, f"dcp_mem demo: FSDP2 training on {options.ranks} CPU ranks")
    where = "tmpfs" if place.in_tmpfs else "NOT tmpfs: /dev/shm has too little room, so slower"
    detail(console, f"memory   {place.memory} ({where})")
    detail(console, f"storage  {place.storage}")


def account(console: Console, runs: Runs, options: Options, seconds: float) -> int:
    """Show what happened; return 0 if all of it happened as claimed."""
    claims = examine(runs, options.schedule)
    show_costs(console, costs(runs))
    show_recoveries(console, recoveries(runs))
    show_claims(console, claims)
    held = all(claim.holds for claim in claims)
    verdict = "[bold green]ok[/bold green]" if held else "[bold red]FAILED[/bold red]"
    console.print(f"\n{verdict} in {seconds:.0f} s", highlight=False)
    return 0 if held else 1


def leave(signum: int, _frame: FrameType | None) -> None:
    """Leave through the exits, so that everything is cleaned up."""
    raise SystemExit(128 + signum)


def parse_options() -> Options:
    """Parse the command line; exit with a usage message if it doesn't fit."""
    parser = argparse.ArgumentParser(prog="python -m dcp_mem.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--path", help="where to store checkpoints: a directory or a URL")
    parser.add_argument("--keep-work", action="store_true", help="keep journals, logs, checkpoints")
    given = parser.parse_args()
    if torch.__version__ < "2.7":
        parser.error(
            f"the demo shards by FSDP2, which on CPUs takes torch 2.7, and this is "
            f"{torch.__version__}"
        )
    if given.ranks <= KILLED_RANK:
        parser.error(f"--ranks must be at least {KILLED_RANK + 1}: rank {KILLED_RANK} is killed")
    try:
        schedule = Schedule(given.steps, given.save_every)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        schedule=schedule,
        ranks=given.ranks,
        size=given.size,
        path=given.path,
        keep_work=given.keep_work,
    )


if __name__ == "__main__":
    sys.exit(main())
