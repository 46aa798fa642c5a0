"""What a load was asked for, which never changes, and its progress and findings so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from dcp_mem.comm import Ranks
from dcp_mem.common.value_class import value_class
from dcp_mem.config import Settings
from dcp_mem.format import names
from dcp_mem.loading.survey import Search, StorageSurvey
from dcp_mem.memory.checkpoint import LocalCheckpoint
from dcp_mem.memory.job import JobMemory
from dcp_mem.policy.election import ElectedCheckpoint, RecoveryPlan
from dcp_mem.policy.order import contradiction
from dcp_mem.storage import Storage

Eligible = Callable[[Sequence[ElectedCheckpoint]], Sequence[ElectedCheckpoint]]


@value_class
class Places:
    """The places in which a load looks for checkpoints."""

    memory: JobMemory | None  # what this node's memory has of the job; None where that is nothing
    storage: Storage | None  # None for jobs that are kept in memory only
    job: str

    def __str__(self) -> str:
        storage = [] if self.storage is None else [self.storage.url]
        return " and ".join([f"memory (job {self.job})", *storage])


@value_class(kw_only=True)
class LoadRequest:
    """The request of a load: the wanted checkpoint, the ranks, and the places to search."""

    settings: Settings
    ranks: Ranks
    # this rank's number as DCP counts it for this call: a rank that saved alone named its files by
    # it
    rank: int
    wanted: str | None  # name of the checkpoint; None for the newest
    places: Places
    # Why this rank can't load at all. The survey raises it, on all ranks.
    refusal: Exception | None
    started: float
    verify: bool  # whether bytes are held against their checksums, where these have been made
    across_nodes: bool  # whether nodes send each other what they have fetched from storage
    leaves_record: bool
    # whether tensors that were pickled whole are unpickled with restrictions
    weights_only: bool = True
    # returns those of the candidates that will do, in their order; None: all do
    eligible: Eligible | None = None
    plans_itself: bool = False  # whether this rank plans without DCP's planner, under `dcp.load`


DamagedSegment = tuple[str, str, int]
"""(node, save id, rank): a segment in that node's memory that can't be used."""


class LoadAttempt:
    """A load's way through its candidates, newest first.

    `storage_survey`: asks storage, and remembers whether it is silent; None: a new one, which asks
    once. `search`: what surveys look for now. `memory`: what this node's memory has of the job. A
    rebuild gives one to a node without. `local`: the checkpoints that the last survey found there.
    `reasons`: why candidates were passed over. `tried`: the candidates so far, in the order in
    which they were tried. `damaged`: those of them that were opened, and turned out to be damaged
    for good. `all_plan_themselves`: whether all ranks plan without DCP's planner.
    """

    def __init__(self, request: LoadRequest, storage_survey: StorageSurvey | None = None) -> None:
        self.request, self.ranks, self.storage = request, request.ranks, request.places.storage
        self.search = Search(request.wanted, names.COLLECTIVE)
        self.memory: JobMemory | None = request.places.memory
        self.local: Sequence[LocalCheckpoint] = ()
        self.storage_survey = storage_survey or StorageSurvey(request.places.storage)
        self.reasons: list[str] = []
        self.tried: list[ElectedCheckpoint] = []
        self.damaged: list[ElectedCheckpoint] = []
        self.all_plan_themselves = False
        self._candidates: tuple[ElectedCheckpoint, ...] = ()
        self._tried = 0
        self._damaged: set[tuple[str, int]] = set()  # (save id, rank), in this node's memory

    @property
    def is_collective(self) -> bool:
        """Whether the candidates are checkpoints that all ranks saved together."""
        return self.search.scope == names.COLLECTIVE

    # -- candidates --------------------------------------------------------------------------------

    def adopt(self, plan: RecoveryPlan) -> None:
        """Try the candidates of this plan, from the newest on."""
        self.reasons = list(dict.fromkeys([*self.reasons, *plan.reasons]))
        self._candidates, self._tried = self._eligible(plan), 0

    def adopt_again(self, plan: RecoveryPlan) -> None:
        """Try the candidates of this plan, without those passed over before the last one."""
        passed_over = {_identity(choice) for choice in self._candidates[: self._tried - 1]}
        left = [choice for choice in self._eligible(plan) if _identity(choice) not in passed_over]
        self._candidates, self._tried = tuple(left), 0

    def _eligible(self, plan: RecoveryPlan) -> tuple[ElectedCheckpoint, ...]:
        eligible = self.request.eligible
        return plan.choices if eligible is None else tuple(eligible(plan.choices))

    def next_candidate(self) -> ElectedCheckpoint | None:
        """Return the next candidate to try; None where there are no more."""
        if self._tried == len(self._candidates):
            return None
        self._tried += 1
        self.tried.append(self._candidates[self._tried - 1])
        return self.tried[-1]

    def contradiction(self) -> str:
        """Return how steps contradict the choice of the last candidate; "" where they don't."""
        last, *older = [one.place for one in self._candidates[self._tried - 1 :]]
        return "" if self.request.wanted is not None else contradiction(last, older)

    def note(self, choice: ElectedCheckpoint, why: str) -> None:
        """Remember what speaks against a candidate, or one of its sources."""
        self.reasons.append(f"{choice.name}: {why}")

    def note_unread(self, choice: ElectedCheckpoint, *, may_pass: bool) -> None:
        """Remember that an opened candidate can't be read, now or for good."""
        others = [one for one in self.damaged if _identity(one) != _identity(choice)]
        self.damaged = others if may_pass else [*others, choice]

    # -- this node's memory ------------------------------------------------------------------------

    def found_local(self, choice: ElectedCheckpoint) -> LocalCheckpoint | None:
        """Return what lies here of a candidate.

        What the survey didn't find is looked for again: another rank of this node may have surveyed
        after it was published, and counts on all of the node's ranks to have it.
        """
        found = self._one_of(self.local, choice)
        if found is None and self.memory is not None:
            found = self._one_of(self.memory.find(choice.name), choice)
        return found

    def _one_of(
        self, checkpoints: Iterable[LocalCheckpoint], choice: ElectedCheckpoint
    ) -> LocalCheckpoint | None:
        for checkpoint in checkpoints:
            manifest = checkpoint.manifest
            # A rank that saved alone has a save id of its own.
            is_save = not self.is_collective or manifest.save_id == choice.save_id
            if checkpoint.name == choice.name and manifest.scope == self.search.scope and is_save:
                return checkpoint
        return None

    def mark_damaged(self, damaged: Iterable[DamagedSegment]) -> None:
        """Leave these segments out of all further surveys, where they are this node's."""
        node = None if self.memory is None else self.memory.node
        self._damaged |= {(save_id, rank) for of, save_id, rank in damaged if of == node}

    def mark_rebuilt(self, save_id: str, ranks: Collection[int]) -> None:
        """Count these segments again: they were rebuilt on this node."""
        self._damaged -= {(save_id, rank) for rank in ranks}

    def is_damaged(self, save_id: str, rank: int) -> bool:
        """Return whether a segment turned out to be damaged in this node's memory."""
        return (save_id, rank) in self._damaged

    def damaged_ranks(self, checkpoint: LocalCheckpoint) -> list[int]:
        """Return the ranks whose segments of a checkpoint turned out to be damaged here."""
        wanted = checkpoint.manifest.save_id
        return [rank for save_id, rank in self._damaged if save_id == wanted]


def _identity(choice: ElectedCheckpoint) -> tuple[str, str]:
    return choice.name, choice.save_id
