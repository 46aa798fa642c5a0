"""What a job was promised over its lives, and whether a life has found it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.storm.lives import Life, Notes

_CRASH_LOOP = 3
_REJECTED_FOR_IT = "the job has resumed from it"
_REJECTED_AS_STALE = "frozen tensors had changed unnoticed"


@dataclass
class Promises:
    """The newest saves that may not be lost, by number; 0 for none.

    Attributes:
        complete: The newest that was told to be complete.
        durable: The newest that was told to be durable, which outlives the node's memory.
        begun: The newest that any rank has begun: nothing newer can be found.
        names: The names of all saves.
        poisoned: Saves with NaN, which may be rejected at any time.
        resumed: What each life has restored; None where it was killed before it said so.
    """

    complete: int = 0
    durable: int = 0
    begun: int = 0
    names: dict[int, str] = field(default_factory=dict)
    poisoned: set[int] = field(default_factory=set)
    resumed: list[int | None] = field(default_factory=list)

    def take_in(self, life: Life, ranks: int) -> Counter[str]:
        """Judge what a life has restored, then take in what it was told; count both."""
        notes = [Notes(life.progress, rank) for rank in range(ranks)]
        counted = self._judge_restored([one.get("restored") for one in notes])
        if life.poisoned:
            self.poisoned.add(life.poisoned)
        for one in notes:
            self._take_in_saves(life, one)
        if life.closes and life.job.url is not None:
            closed = [one.get("closed") or 0 for one in notes]
            self.durable = max(self.durable, min(closed))
        self.complete = max(self.complete, self.durable)
        last = max(((one.get("begun") or {}).get("number", 0) for one in notes), default=0)
        counted["saves"] += life.index_of(last)
        return counted

    def _take_in_saves(self, life: Life, notes: Notes) -> None:
        begun, restored = notes.get("begun"), notes.get("restored")
        if begun is not None:
            self.begun = max(self.begun, begun["number"])
            for index in range(1, life.index_of(begun["number"]) + 1):
                step = life.step_of(index, restored["step"])
                self.names[life.save_number(index)] = f"step-{step}"
        self.complete = max(self.complete, notes.get("done") or 0)
        self.durable = max(self.durable, notes.get("durable") or 0)

    def lose_memory(self) -> None:
        """The node is lost, with all that was in memory alone."""
        self.complete = self.durable

    def numbers_of(self, name: str) -> set[int]:
        """The saves under a name."""
        return {number for number, one in self.names.items() if one == name}

    def _judge_restored(self, restored: Sequence[Mapping[str, Any] | None]) -> Counter[str]:
        found = [one for one in restored if one is not None]
        if not found:
            self.resumed.append(None)
            return Counter({"lives that ended before they had restored": 1})
        numbers = {one["number"] for one in found}
        assert len(numbers) == 1, f"ranks restored different saves: {found}"
        (number,) = numbers
        self.resumed.append(number)
        assert number <= self.begun, f"{number} was restored, {self.begun} was begun last"
        counted = Counter({"loads": 1, f"loads from {found[0]['source'] or 'nothing'}": 1})
        if found[0]["passed_over"]:
            counted["loads that passed something over"] = 1
        if number < self.complete:
            counted[self._judge_older(number, found[0])] = 1
        elif number not in self.poisoned:
            self.complete = number
        return counted

    def _judge_older(self, number: int, restored: Mapping[str, Any]) -> str:
        """Let an older save pass only where the newest one was rejected; return why it was.

        That is for a crash loop, or since a tensor that is declared frozen changed. Behind an
        asynchronous save nobody can tell whether it changed before the copy or after it. Of such
        saves the older ones may have left memory since: they share the bytes of the newest, are
        rejected with it, and leave first.
        """
        since_then = {one for at, one in self.names.items() if at >= self.complete}
        if any(
            _REJECTED_AS_STALE in one and any(f"{newer} " in one for newer in since_then)
            for one in restored["passed_over"]
        ):
            why = "loads past what may be stale"
        else:
            why = "loads that left a crash loop"
            name = self.names.get(self.complete, "")
            passed_over = [one for one in restored["passed_over"] if name in one]
            assert any(_REJECTED_FOR_IT in one for one in passed_over), (
                f"{number} was restored, {self.complete} ({name}) was complete: {restored}"
            )
            since = self.resumed.index(self.complete)
            assert len(self.resumed) - since > _CRASH_LOOP, f"no crash loop: {self.resumed}"
        self.complete, self.durable = number, min(self.durable, number)
        return why


def newest_done(progress: str | Path, ranks: int) -> int:
    """The newest save of a life that any rank was told to be complete."""
    return max((Notes(progress, rank).get("done") or 0) for rank in range(ranks))
