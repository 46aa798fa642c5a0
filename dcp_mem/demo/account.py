"""The claims and figures that the three runs' journals support. Pure: computed from records."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from dcp_mem.demo.journal import (
    Entry,
    Event,
    Finished,
    Recovered,
    SaveBegun,
    SaveReturned,
    Started,
    StepTaken,
    Stored,
)
from dcp_mem.demo.launch import Outcome
from dcp_mem.demo.schedule import KILLED_RANK, Schedule, checkpoint_id

AnyEvent = TypeVar("AnyEvent", bound=Event)


@dataclass(frozen=True, slots=True)
class Runs:
    """The outcomes of the three runs."""

    reference: Outcome
    interrupted: Outcome
    resumed: Outcome


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the demo says of itself, and whether the records bear it out."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery, as rank 0 saw it.

    `back_seconds` runs from the loss to the end of the first step after it: it includes the
    start of new processes.
    """

    cause: str
    found: Recovered
    back_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The size and speed of the training, and the cost of checkpointing."""

    parameters: int
    state_bytes: int
    step_seconds: float
    first_save_seconds: float
    save_seconds: float
    saves: int
    stage_seconds: float
    flush_seconds: float


def examine(runs: Runs, schedule: Schedule) -> list[Claim]:
    """Examine every claim of the demo; it has succeeded if all of them hold."""
    killed, survivor = checkpoint_id(schedule.killed), checkpoint_id(schedule.survivor)
    stored = checkpoint_id(schedule.stored)
    losses = losses_by_step(runs.reference, attempt=0)
    before = losses_by_step(runs.interrupted, attempt=0)
    after = losses_by_step(runs.interrupted, attempt=1)
    restored = losses_by_step(runs.resumed, attempt=0)
    first, second = schedule.survivor + 1, schedule.stored + 1
    return [
        Claim(
            f"rank {KILLED_RANK} was killed while it saved {killed}",
            ended_in_save(runs.interrupted, killed),
        ),
        Claim(
            f"after the restart, all ranks resumed {survivor} from memory",
            all_recovered(runs.interrupted, 1, survivor, "memory"),
        ),
        Claim(
            f"losses of steps 1-{schedule.killed} before the kill: same bits as uninterrupted",
            before == part(losses, 1, schedule.killed),
        ),
        Claim(
            f"losses of steps {first}-{schedule.stop_after} after the restart: same bits",
            after == part(losses, first, schedule.stop_after),
        ),
        Claim(
            f"after the memory was lost, all ranks resumed {stored} from storage",
            all_recovered(runs.resumed, 0, stored, "storage"),
        ),
        Claim(
            f"losses of steps {second}-{schedule.steps} after that: same bits",
            restored == part(losses, second, schedule.steps),
        ),
        Claim(
            "final parameters and AdamW state of all ranks: same bits (SHA-256)",
            final_digests(runs.resumed) == final_digests(runs.reference),
        ),
    ]


def recoveries(runs: Runs) -> list[Recovery]:
    """List the recoveries that took place, in order."""
    killed_in_save = runs.interrupted.journals[KILLED_RANK]
    killed_at = max(entry.at for entry in killed_in_save if entry.attempt == 0)
    return [
        *_recoveries(runs.interrupted, f"rank {KILLED_RANK} killed in a save", killed_at),
        *_recoveries(runs.resumed, "memory thrown away", runs.resumed.begun),
    ]


def _recoveries(outcome: Outcome, cause: str, lost_at: float) -> Iterator[Recovery]:
    entries = outcome.journals[0]
    for index, entry in enumerate(entries):
        if isinstance(entry.event, Recovered):
            later = (e.at for e in entries[index:] if isinstance(e.event, StepTaken))
            back_at = next(later, entry.at)
            yield Recovery(cause, entry.event, back_seconds=back_at - lost_at)


def costs(runs: Runs) -> Costs:
    """Compute medians of what rank 0 measured."""
    started = of_kind(runs.reference.journals[0], Started)[0]
    steps = [step.seconds for step in of_kind(runs.reference.journals[0], StepTaken)]
    saved = (runs.interrupted.journals[0], runs.resumed.journals[0])
    saves = [save.seconds for journal in saved for save in of_kind(journal, SaveReturned)]
    stored = [found for journal in saved for found in of_kind(journal, Stored)]
    return Costs(
        parameters=started.parameters,
        state_bytes=started.state_bytes,
        step_seconds=median(steps),
        first_save_seconds=saves[0],
        save_seconds=median(saves),
        saves=len(saves),
        stage_seconds=median(found.stage_seconds for found in stored),
        flush_seconds=median(found.flush_seconds for found in stored),
    )


def ended_in_save(outcome: Outcome, killed: str) -> bool:
    """Tell whether the killed rank's first attempt ended without a word in that save."""
    first = of_attempt(outcome.journals[KILLED_RANK], 0)
    return bool(first) and first[-1].event == SaveBegun(killed)


def all_recovered(outcome: Outcome, attempt: int, wanted: str, source: str) -> bool:
    """Tell whether every rank loaded that checkpoint, from that source, in that attempt.

    `source`: where its bytes came from.
    """
    found = [of_kind(of_attempt(journal, attempt), Recovered) for journal in outcome.journals]
    return all([(f.checkpoint_id, f.source) for f in rank] == [(wanted, source)] for rank in found)


def losses_by_step(outcome: Outcome, attempt: int) -> dict[int, str]:
    """Return the bits of the losses that rank 0 recorded in one attempt."""
    steps = of_kind(of_attempt(outcome.journals[0], attempt), StepTaken)
    return {step.step: step.loss for step in steps}


def part(losses: dict[int, str], first: int, last: int) -> dict[int, str]:
    """Return the losses of steps first to last, both included."""
    return {step: loss for step, loss in losses.items() if first <= step <= last}


def final_digests(outcome: Outcome) -> list[str]:
    """Return the digests of the state in which a run ended, by rank."""
    return [of_kind(journal, Finished)[-1].digest for journal in outcome.journals]


def of_attempt(entries: Iterable[Entry], attempt: int) -> list[Entry]:
    """Return the entries of one attempt."""
    return [entry for entry in entries if entry.attempt == attempt]


def of_kind(entries: Iterable[Entry], kind: type[AnyEvent]) -> list[AnyEvent]:
    """Return the events of one kind."""
    return [entry.event for entry in entries if isinstance(entry.event, kind)]
