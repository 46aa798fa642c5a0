"""Train, kill a rank in the middle of a save, throw the memory away: and come back bit for bit.

`python -m dcp_mem.demo` exits with 0 only if every recovery happened as told and every loss, and
the final state, came out with the same bits as in a run that nothing disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from dcp_mem.demo.account import KILLED_RANK, RANKS, SIZES, Account, Attempt, Options, Schedule

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  not a temporary file: it is node memory
# Bytes of four states: two kept, one being staged, one that a kill left behind.
ROOM = {"default": 1_300_000_000, "small": 130_000_000}

console = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    """Play the demo and account for it; return the exit code."""
    given, begun = parse_options(), time.perf_counter()
    for signum in (signal.SIGINT, signal.SIGTERM):  # leave through the exits, which clean up
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    heading(f"dcp_mem demo: FSDP2 training on {RANKS} CPU ranks")
    detail("three trainings, of which one is killed: two to four minutes on two idle cores")
    with TemporaryDirectory(prefix="dcp_mem-demo-", ignore_cleanup_errors=True) as work:
        memory = memory_root(Path(work), ROOM[given.size])
        try:
            account = play(given, Path(work), memory)
        finally:
            forget(memory)
    claims = dict(account.claims())
    heading("What it cost")
    detail(*account.costs())
    heading("What came back (training again: new processes included)")
    detail(*account.recoveries())
    heading("What the records show")
    detail(*(f"{'yes' if holds else 'NO '}  {claim}" for claim, holds in claims.items()))
    heading(f"{'ok' if all(claims.values()) else 'FAILED'} in {time.perf_counter() - begun:.0f} s")
    return 0 if all(claims.values()) else 1


def play(given: argparse.Namespace, work: Path, memory: Path) -> Account:
    """Train three times: undisturbed, killed in a save, and on a node that has lost its memory."""
    plan = Schedule(given.steps, given.save_every)
    storage = f"{given.path.rstrip('/')}/{work.name}" if given.path else str(work / "storage")
    detail(f"storage  {storage}")

    heading("1 of 3  A run that nothing disturbs, without checkpoints")
    options = Options(size=given.size, steps=plan.steps, journals=str(work / "1"))
    attempts = run(options)
    detail("next: the same again, with checkpoints and a kill")

    heading(
        f"2 of 3  The same with a checkpoint every {plan.save_every} steps; "
        f"rank {KILLED_RANK} is killed (SIGKILL) while it saves step-{plan.killed}"
    )
    options = replace(options, save_every=plan.save_every, path=storage, memory_root=str(memory))
    detail("once it is killed, torchrun starts both ranks again")
    killed = replace(options, steps=plan.stop_after, journals=str(work / "2"), kill=True)
    attempts += run(killed, max_restarts=1)
    forget(memory)
    detail(f"memory thrown away: {memory} is {'STILL THERE' if memory.exists() else 'gone'}")
    detail("next: a new job that has only storage to resume from")

    heading("3 of 3  A new job, on a node with nothing in memory")
    attempts += run(replace(options, journals=str(work / "3")))
    return Account(plan, attempts)


def run(options: Options, max_restarts: int = 0) -> list[Attempt]:
    """Run the training script under torchrun, show what it prints, and read its journals."""
    journals, begun = Path(options.journals), time.time()
    detail(f"torchrun starts {RANKS} ranks; each imports torch, which may take half a minute …")
    journals.mkdir()
    log = journals / "torchrun.log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"),
        *(f"--nproc-per-node={RANKS}", f"--max-restarts={max_restarts}"),
        *("-m", "dcp_mem.demo.train", json.dumps(asdict(options))),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // RANKS)),
        "GLOO_SOCKET_IFNAME": "lo",  # a fresh machine may not resolve its own name
        # Without it, restarted workers find the addresses that gloo published before the
        # restart in the store that torchrun keeps for them, and fail to connect (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with log.open("w") as errors:
        torchrun = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    with torchrun:
        try:
            for line in torchrun.stdout or ():
                detail(line.rstrip())
        except BaseException:
            torchrun.terminate()  # it doesn't outlive the demo
            raise
    if torchrun.returncode != 0:
        heading(f"FAILED: torchrun exited with {torchrun.returncode}; the end of its log:")
        detail(*log.read_text(errors="replace").splitlines()[-40:])
        sys.exit(1)
    detail(f"done in {time.time() - begun:.0f} s")
    return [Attempt.read(journals, number, begun) for number in range(max_restarts + 1)]


def memory_root(work: Path, needed_bytes: int) -> Path:
    """Make a memory root, in tmpfs if it has the room: containers often have 64 MiB of it."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed_bytes
    memory = SHARED_MEMORY / work.name if fits else work / "memory"
    memory.mkdir(mode=0o700)
    where = "tmpfs" if fits else "NOT tmpfs: /dev/shm has too little room, so slower"
    detail(f"memory   {memory} ({where})")
    return memory


def forget(memory: Path) -> None:
    """Remove a memory root and everything in it, as the loss of the node would."""
    if memory.exists():
        # Out of the way first: whoever still works in it can't put new files where old ones go.
        shutil.rmtree(memory.rename(memory.with_name(f"{memory.name}.gone")))


def heading(text: str) -> None:
    console.print(f"\n{text}", style="bold")


def detail(*lines: str) -> None:
    for line in lines:
        console.print(f"  {line}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dcp_mem.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--size", choices=SIZES, default="default")
    parser.add_argument("--path", help="where to store checkpoints: a directory or a URL")
    given = parser.parse_args()
    torch = version("torch")
    if tuple(map(int, torch.split(".")[:2])) < (2, 7):
        parser.error(f"FSDP2 on CPUs takes torch 2.7, and this is {torch}")
    if given.save_every < 1 or given.steps < 5 * given.save_every:
        parser.error(f"--steps {given.steps} is less than 5 x --save-every {given.save_every}")
    return given


if __name__ == "__main__":
    sys.exit(main())
