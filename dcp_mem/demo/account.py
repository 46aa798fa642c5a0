"""What the demo and its script agree about; and what the ranks' journals prove. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from dcp_mem.common.value_class import value_class

RANKS, KILLED_RANK, KILLED_SAVE = 2, 1, 3
SIZES = {
    "default": {"width": 512, "layers": 8, "heads": 8, "context": 64},
    "small": {"width": 256, "layers": 3, "heads": 4, "context": 32},
}


@value_class(kw_only=True)
class Options:
    """The script's options, which come as one argument in JSON."""

    size: str
    steps: int
    journals: str  # the directory in which ranks record what happens
    save_every: int = 0  # 0 for no checkpoints at all
    path: str = ""  # where they are stored: a directory or URL
    memory_root: str = ""
    kill: bool = False  # whether a rank is to be killed while it saves


class Schedule:
    """The steps of the demo; when it kills and stops follows from them."""

    def __init__(self, steps: int, save_every: int) -> None:
        self.steps = steps
        self.save_every = save_every
        self.killed = KILLED_SAVE * save_every  # the save after this step is cut short
        self.survivor = self.killed - save_every  # the newest one in memory after that
        self.stop_after = steps - save_every - save_every // 2  # half way between two saves
        self.stored = self.stop_after - self.stop_after % save_every  # the newest one on storage


@value_class
class Attempt:
    """One start of all ranks by torchrun: the journal that each wrote, until it ended."""

    begun: float  # the Unix time at which torchrun was
    journals: list[list[dict[str, Any]]]

    @classmethod
    def read(cls, journals: Path, number: int, begun: float) -> Attempt:
        """Read an attempt of a run; it is empty if there was none with that number."""
        files = [journals / f"rank-{rank}-attempt-{number}.jsonl" for rank in range(RANKS)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return cls(begun, [list(map(json.loads, own)) for own in lines])

    def of(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        return [one for one in self.journals[rank] if one["event"] == event]

    def losses(self) -> dict[int, str]:
        return {one["step"]: one["loss"] for one in self.of("step")}

    def all_resumed(self, step: int, source: str) -> bool:
        """Return whether every rank has loaded that step's checkpoint from there."""
        wanted = [(f"step-{step}", source)]
        found = [self.of("resumed", rank) for rank in range(RANKS)]
        return all([(one["name"], one["source"]) for one in own] == wanted for own in found)

    def digests(self) -> list[str]:
        return [self.of("finished", rank)[0]["digest"] for rank in range(RANKS)]


class Account:
    """The attempts of the demo's three runs, of which the second was restarted."""

    def __init__(self, plan: Schedule, attempts: list[Attempt]) -> None:
        self.plan = plan
        self.undisturbed, self.killed, self.restarted, self.resumed = attempts

    def claims(self) -> Iterator[tuple[str, bool]]:
        """Yield what the demo says of itself, and whether the records bear it out."""
        plan, losses = self.plan, self.undisturbed.losses()

        def same(attempt: Attempt, first: int, last: int) -> bool:
            return attempt.losses() == {step: losses[step] for step in range(first, last + 1)}

        last = self.killed.journals[KILLED_RANK][-1]
        holds = last["event"] == "saving" and last["name"] == f"step-{plan.killed}"
        yield f"rank {KILLED_RANK} was killed while it saved step-{plan.killed}", holds
        holds = self.restarted.all_resumed(plan.survivor, "memory")
        yield f"after the restart, all ranks resumed step-{plan.survivor} from memory", holds
        holds = same(self.killed, 1, plan.killed)
        yield f"losses of steps 1-{plan.killed} before the kill: same bits as uninterrupted", holds
        first, stop = plan.survivor + 1, plan.stop_after
        holds = same(self.restarted, first, stop)
        yield f"losses of steps {first}-{stop} after the restart: same bits", holds
        holds = self.resumed.all_resumed(plan.stored, "storage")
        yield f"after the memory was lost, all ranks resumed step-{plan.stored} from storage", holds
        holds = same(self.resumed, plan.stored + 1, plan.steps)
        yield f"losses of steps {plan.stored + 1}-{plan.steps} after that: same bits", holds
        holds = self.resumed.digests() == self.undisturbed.digests()
        yield "final parameters and AdamW state of all ranks: same bits (SHA-256)", holds

    def costs(self) -> Iterator[str]:
        """Yield what checkpointing cost the training, as rank 0 measured it."""
        saving = (self.killed, self.restarted, self.resumed)
        steps = [one["seconds"] for one in self.undisturbed.of("step")]
        millions = (
            self.undisturbed.of("finished")[0]["parameters"] / 1e6
        )  # with AdamW's two moments
        waited = [1000 * one["seconds"] for attempt in saving for one in attempt.of("saved")]
        stored = [one for attempt in saving for one in attempt.of("stored")]
        staged = 1000 * median(one["stage"] for one in stored)
        flushed = median(one["flush"] for one in stored)
        saves = f"median of {len(waited)}; the first {waited[0]:.0f} ms"
        yield f"model and optimizer   {millions:.1f} M parameters, {12 * millions:.0f} MB of state"
        yield f"a training step       {median(steps):.2f} s (median)"
        yield f"a save held it up     {median(waited):.0f} ms ({saves})"
        yield f"  dcp_mem's part      {staged:.0f} ms; the rest is get_state_dict and DCP's calls"
        yield f"  flush to storage    {flushed:.2f} s, behind the training"

    def recoveries(self) -> Iterator[str]:
        """Yield where each recovery came from, and the time from the loss to the next step."""
        killed_at = self.killed.journals[KILLED_RANK][-1]["at"]
        yield from _recovery(f"rank {KILLED_RANK} killed in a save", killed_at, self.restarted)
        yield from _recovery("memory thrown away", self.resumed.begun, self.resumed)


def _recovery(cause: str, lost_at: float, attempt: Attempt) -> Iterator[str]:
    for found in attempt.of("resumed"):
        restored = f"{found['name']} from {found['source']} in {found['seconds']:.2f} s"
        again = f"training again after {attempt.of('step')[0]['at'] - lost_at:.1f} s"
        yield f"{cause:<24}  {restored}; {again}"
        yield from (f"{'':<24}  passed over: {reason}" for reason in found["passed_over"])
