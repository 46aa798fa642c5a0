"""Take saves through: open the job's memory, connect the ranks, stage, complete."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_mem.comm import SingleRank, known_ranks, refuse_missing_group, run_token
from dcp_mem.comm.agreement import Attempted, attempt, leaving_on_error
from dcp_mem.comm.bridge import SWITCH, torch_plans
from dcp_mem.comm.bridge.calls import (
    DcpCall,
    StagingCall,
    dcp_call,
    direct_call,
    is_called_by_dcp,
    over_when_left,
    variable_of_call,
)
from dcp_mem.common import faults
from dcp_mem.common.gc_pause import collector_paused
from dcp_mem.common.log import log
from dcp_mem.common.values import SaveInfo
from dcp_mem.config import Purpose, Settings, checkpoint_name, exchange_timeout, run_identity
from dcp_mem.errors import ConfigError, DcpMemError, plain_error
from dcp_mem.flushing.agent_handle import AgentHandle
from dcp_mem.flushing.registration import registration_of
from dcp_mem.format import names
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.locks import RunIdentity, job_is_live, new_token
from dcp_mem.planning.tensor_choice import TensorRule
from dcp_mem.runtime.last_saves import loaded, note_loaded
from dcp_mem.runtime.session import Session, enter_session, open_session, session_for
from dcp_mem.saving.ahead import (
    AheadCopy,
    StagedState,
    copied,
    copy_ahead,
    not_refused,
    refused_state,
    staged_in,
    stands_for_another,
)
from dcp_mem.saving.calls import DcpSave, ThreadCalls, called, opened_together
from dcp_mem.saving.dcp_takeover import (
    DcpTakeover,
    ReturnedMetadata,
    note_torch_plans,
    saves_to_lowest_rank,
    why_not_own_plan,
)
from dcp_mem.saving.overlap import Overlap
from dcp_mem.saving.own_plans import OwnPlanItems, own_plans_of
from dcp_mem.saving.pipeline import FindCommonPlan, Plan, carry_out, save
from dcp_mem.saving.streams import NothingNew, Streams
from dcp_mem.saving.values import Completed, NoCommonPlan, Planned, SaveContext
from dcp_mem.storage.destination import lives_in_one_process, trial_of

_sent: tuple[int, Future[Any]] | None = None
"""By process, the last save that DCP has sent to its other one. All of them share one pipe, and who
waits there for an answer may read another save's: so there is one at a time."""


class Saver:
    """The saves of one writer, whoever drives them: DCP, `dcp_mem.save`, or streams.

    `process_group`: the ranks that save together; None for those of each call. `frozen`: tells
    which tensors are declared frozen; None where none are. `calls`: what each thread is in the
    middle of. `saves_elsewhere`: whether another process saves, in a session of its own.
    `stages_alone`: whether this rank has staged a state that it saves alone: what it saves alone
    may be private copies from then on. `is_driven_otherwise`: whether DCP has saved in a way in
    which a staged state can't be taken up: what is staged are plain copies from then on.
    """

    def __init__(
        self,
        settings: Settings,
        process_group: dist.ProcessGroup | None,
        frozen: TensorRule | None = None,
    ) -> None:
        self.settings = settings
        self.process_group = process_group
        self.calls = ThreadCalls()
        self.saves_elsewhere = self.stages_alone = self.is_driven_otherwise = False
        self.is_closed = False
        self.frozen = frozen
        if frozen is not None and settings.redundancy.parity:
            why_not = "parity is made of all bytes of a checkpoint, and anew each time"
            log.warning("frozen= has no effect: %s", why_not)
            self.frozen = None
        self._token = new_token()
        self._run = ""
        self._next_info = SaveInfo()
        self._infos_to_send = deque[SaveInfo]()  # of copies that go to another process, in order
        self._agent = AgentHandle(settings.memory_root)
        self._trial = trial_of(settings.url) if not settings.persist.is_never else None
        self._home = os.getpid()

    # -- DCP drives the save -----------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Begin a save under this name. A name that can't be used is refused by what follows."""
        calls = self.calls
        calls.reset()
        try:
            calls.name = (
                None if checkpoint_id is None else checkpoint_name(self.settings.url, checkpoint_id)
            )
        except ConfigError as error:
            # Raised later, where DCP hands it to all ranks; from here it doesn't.
            calls.refused = error

    def begin_driven(self, takeover: DcpTakeover | None, uses_collectives: bool) -> DcpSave:
        """Begin a save that DCP drives: open the job's memory, connect the ranks, settle the plan.

        `takeover`: where dcp_mem may plan the save; None where DCP's planner has to.
        """
        # Rank 0 may save alone; so may a rank whose call says so, before torch changes that.
        if os.environ.get("RANK", "0") != "0" and variable_of_call(_is_alone) is None:
            refuse_missing_group()
        staged = takeover.staged if takeover is not None else None
        info = self.take_info() if staged is None else staged.info
        if takeover is None:
            self._refuse_staged()
        opened = attempt(lambda: self._entered(staged))
        call = called(opened, lambda: dcp_call(self.process_group, self.purpose))
        ranks, scope = call.ranks, names.COLLECTIVE
        if not uses_collectives:
            ranks, scope = SingleRank(), names.rank_scope(call.rank)
            note_torch_plans(opened.value, self.calls.checked_name(), "use_collectives=False")
        is_asked = takeover is None  # all of them have a session then, or DCP tells the others
        context = self._context(
            opened.value if is_asked else opened_together(ranks, opened, self.settings),
            DcpCall(ranks, call.rank),
            self.calls.checked_name(),
            info,
            scope=scope,
            has_copies=staged is not None or (self.stages_alone and not uses_collectives),
        )
        why_not, self.calls.why_not = self.calls.why_not, ""
        if takeover is not None:
            takeover.enter(ranks)
            if why_not:
                takeover.leave_to_torch()
            else:
                with leaving_on_error(ranks), collector_paused():
                    context.session.heap.settle()
                    takeover.settle(context)
        elif torch_plans():
            note_torch_plans(context.session, context.name, f"{SWITCH} is set")
        elif uses_collectives and is_called_by_dcp():
            why_not = "this torch drives its writers in another way"
            note_torch_plans(context.session, context.name, why_not)
        return DcpSave(context, takeover)

    def _refuse_staged(self) -> None:
        """Raise DcpMemError where DCP saves a staged state, and won't let this writer take it up.

        Torch's planner would save what stands for it. And the state has a turn, which no other save
        may wait behind.
        """
        staged = staged_in(not_refused(variable_of_call(stands_for_another) or {}))
        if staged is None:
            return
        self.is_driven_otherwise = True
        staged.give_back()
        raise DcpMemError(
            f"{self.calls.checked_name()} isn't saved: this torch drives its writers in a way that "
            f"dcp_mem doesn't know, so what was staged can't be taken up. The next "
            f"dcp.async_save of this process copies as torch does; with the process executor, "
            f"pass async_stager=torch.distributed.checkpoint.staging.DefaultStager()"
        )

    def go_on(self, context: SaveContext) -> None:
        """Have the save's turn once more, should it have ended while DCP planned.

        Raises DcpMemError where the writer was closed meanwhile.
        """
        calls, session = self.calls, open_session(self.settings)
        if not calls.is_unseen or calls.turn is None or not calls.turn.is_over:
            return
        if session is context.session:
            session, calls.turn = enter_session(self.settings, self._identity())
            calls.turn.wait()
        if session is not context.session:
            raise DcpMemError(
                f"{context.name} isn't saved: the writer was closed while DCP planned, which took "
                f"more than {exchange_timeout():.0f} s: raise DCP_MEM_TIMEOUT"
            )

    def save(
        self, context: SaveContext, plan: Plan, find_common_plan: FindCommonPlan | None = None
    ) -> Completed | None:
        """Take one save through its stages; see `saving/pipeline.py`."""
        completed = save(context, plan, find_common_plan)
        if completed is not None:
            self._note(completed)
        return completed

    def carry_out(self, context: SaveContext, takeover: DcpTakeover) -> None:
        """Save what all ranks have settled on in DCP's planning step, unless it is skipped."""
        if takeover.settled is None:
            return
        assert takeover.metadata is not None
        settled, takeover.settled = takeover.settled, None  # it refers to the caller's tensors
        try:
            completed = carry_out(context, settled)
        except BaseException:
            takeover.give_up()
            raise
        self._note(completed)
        takeover.metadata.settle(context.session, completed.manifest, completed.agreed.info)

    # -- dcp_mem.save drives it --------------------------------------------------------------------

    def save_collectively(
        self,
        make_state: Callable[[], Mapping[str, Any]],
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
        *,
        to_lowest_rank: bool = False,
    ) -> Metadata:
        """Save by a plan of dcp_mem's own; see `dcp_mem.save`.

        `process_group`: the ranks; None for the writer's. Raises NoCommonPlan.
        """
        with self.in_turn():
            context = self._begin(checkpoint_id, process_group, no_dist)
            session = context.session
            with leaving_on_error(context.ranks):
                items = OwnPlanItems(
                    own_plans_of(session), attempt(make_state), to_lowest_rank=to_lowest_rank
                )
                try:
                    with collector_paused():
                        completed = self.save(context, items.plan, items.find_common_plan)
                except NoCommonPlan as reason:
                    # Of the save that DCP drives now. The ranks needn't find out once more.
                    self._next_info, self.calls.why_not = context.info, str(reason.why_not) or "?"
                    note_torch_plans(session, context.name, reason.why_not)
                    raise
                if completed is None:
                    return Metadata({})
                faults.point("save.finished")
                return ReturnedMetadata().settle(session, completed.manifest, completed.agreed.info)

    @contextmanager
    def left_to_torch(self) -> Iterator[None]:
        """Let DCP drive the save that `save_collectively` has just left to torch's planner.

        What is known of that save is forgotten afterwards, also where DCP fails before it calls the
        writer: the next save must ask the other ranks again.
        """
        try:
            yield
        finally:
            if self.calls.why_not:
                self.calls.why_not, self._next_info = "", SaveInfo()

    # -- of streams --------------------------------------------------------------------------------

    def new_streams(self) -> Streams:
        """Return room for streams that become a checkpoint by `save_streams`."""
        return Streams(self.open_session().slots)

    def save_streams(
        self,
        make_streams: Callable[[], Streams],
        checkpoint_id: str | os.PathLike[str],
        *,
        has_new: bool,
        no_dist: bool = False,
    ) -> Manifest | None:
        """Make a checkpoint of what the ranks have written into their streams.

        Call it on all ranks; a rank that has written nothing takes part with empty streams.
        Whatever happens, the streams are used up.

        Returns None where the save was skipped. Raises NothingNew.
        """
        with self.in_turn():
            try:
                context = self._begin(checkpoint_id, None, no_dist)
                is_needed = context.ranks.all_reduce(has_new, operator.or_)
            except BaseException:
                unused = attempt(make_streams)
                if unused.error is None:
                    unused.value.close()
                raise
            if not is_needed:
                self._next_info = context.info
                raise NothingNew(context.name)
            streams = attempt(make_streams)

            def plan(context: SaveContext) -> Planned:
                return streams.value.planned(context)

            try:
                with leaving_on_error(context.ranks):
                    completed = self.save(context, plan)
                    if completed is None:
                        return None
                    faults.point("save.finished")
                    return completed.manifest
            finally:
                if streams.error is None:
                    streams.value.close()

    # -- staged first ------------------------------------------------------------------------------

    def stage(self, call: StagingCall | None, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict for the save that DCP makes of it in the background.

        Returns a state dict that stands for the copy, or for what went wrong; a plain copy where
        torch plans the save, or another process makes it.
        """
        if call is not None and call.is_in_process:
            return self._copied_to_send(state_dict)
        if call is None or not call.uses_collectives or self.is_driven_otherwise:
            self.stages_alone = True
            return self._copied_aside(state_dict)
        info = self.take_info()
        entered = attempt(lambda: enter_session(self.settings, self._identity()))
        turn = entered.value[1] if entered.error is None else None
        try:
            content: Attempted[AheadCopy | dict[str, Any]] = attempt(
                lambda: self._copied(call, entered.value[0], info, state_dict)
            )
        except BaseException:  # an interrupt: its traceback would keep the turn
            if turn is not None:
                turn.end()
            raise
        return StagedState(info, content, turn).as_state_dict()

    def _copied_to_send(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a state dict for a save in another process, once the save before has its answer."""
        if _sent is not None and _sent[0] == os.getpid():
            wait([_sent[1]])
        if self.frozen is not None and not self.saves_elsewhere:
            log.warning("frozen= has no effect: another process makes the save")
        self.saves_elsewhere = True
        self._infos_to_send.append(self.take_info())
        made = attempt(lambda: self._copied_aside(state, is_shared=True))
        return made.value if made.error is None else refused_state(plain_error(made.error))

    def submitted(self, call: StagingCall | None, saving: Future[Any]) -> None:
        """Take note of the save that DCP has begun of what `stage` has returned."""
        global _sent
        staged = staged_in(variable_of_call(stands_for_another) or {})
        if call is not None and call.is_in_process:
            _sent = os.getpid(), saving
        elif staged is not None:
            staged.end_with(saving)

    @contextmanager
    def overlapping(self, overlap: Overlap | None) -> Iterator[None]:
        """Have this thread's calls of `stage` leave copies to the background.

        `overlap`: which of them; None for none.
        """
        self.calls.overlap = overlap
        try:
            yield
        finally:
            self.calls.overlap = None

    def _copied(
        self, call: StagingCall, session: Session, info: SaveInfo, state: dict[str, Any]
    ) -> AheadCopy | dict[str, Any]:
        """Copy a state dict into a slot, or elsewhere where there is no plan of it, or no slot."""
        not_refused(state)
        group = call.process_group if call.process_group is not None else self.process_group
        ranks = SingleRank() if call.is_alone else known_ranks(group, self.purpose)
        if ranks is not None and not why_not_own_plan(call.planner):
            context = self._context(session, DcpCall(ranks, ranks.rank), "", info)
            plans, to_lowest_rank = own_plans_of(session), saves_to_lowest_rank(call.planner)
            with collector_paused():
                planned = plans.recognised(context, state, to_lowest_rank=to_lowest_rank)
                ahead = planned and copy_ahead(context, planned, self.calls.overlap)
            if ahead:
                return ahead
        return self._copied_aside(state)

    def _copied_aside(self, state: dict[str, Any], *, is_shared: bool = False) -> dict[str, Any]:
        """Return a private copy of a state dict, or one in shared memory."""
        not_refused(state)
        if self.calls.overlap is not None:
            log.info("overlap= has no effect on a save that isn't copied straight into a slot")
        return copied(state, is_shared=is_shared)

    # -- what is said of a save --------------------------------------------------------------------

    def annotate(self, info: SaveInfo) -> None:
        """Say of the next save what has been checked already."""
        self._next_info = info

    def take_info(self) -> SaveInfo:
        """Return what was said of the save that begins now."""
        if self.is_closed:
            self.is_closed = False
            log.warning(
                "job %s: a save after close(): call close() again at the end", self.settings.job
            )
        info, self._next_info, self.calls.last = self._next_info, SaveInfo(), None
        return info

    @property
    def last_save(self) -> tuple[Manifest, SaveInfo] | None:
        """The last save's manifest and save info; None if that save was skipped or failed."""
        return self.calls.last

    def _note(self, completed: Completed) -> None:
        self.calls.last = completed.manifest, completed.agreed.info

    # -- the job, the ranks, the agent -------------------------------------------------------------

    def _begin(
        self,
        checkpoint_id: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        no_dist: bool,
    ) -> SaveContext:
        """Begin a save that DCP doesn't drive: open the job's memory, and connect the ranks."""
        if not no_dist:
            refuse_missing_group()
        info = self.take_info()  # it is of this save, also where that fails at once
        self.reset(checkpoint_id)
        group = process_group if process_group is not None else self.process_group
        opened = attempt(self._open)
        call = called(opened, lambda: direct_call(group, no_dist, self.purpose))
        session = opened_together(call.ranks, opened, self.settings)
        return self._context(session, call, self.calls.checked_name(), info)

    def _context(
        self, session: Session, call: DcpCall, name: str, info: SaveInfo, **more: Any
    ) -> SaveContext:
        return SaveContext(
            **{"scope": names.COLLECTIVE, **more},
            settings=self.settings,
            session=session,
            ranks=call.ranks,
            rank=call.rank,
            name=name,
            info=info,
            frozen=self.frozen,
        )

    def _open(self) -> Session:
        self.calls.checked_name()
        self._name_unwritable()
        session = self.open_session()
        session.heap.settle()
        return session

    def _entered(self, staged: StagedState | None) -> Session:
        """Return the session for a save that DCP drives, once the save's turn in it has come.

        It is waited for before all else: what follows talks to the other ranks, even where it
        fails.
        """
        calls, session = self.calls, None
        turn = staged.turn if staged is not None else None
        if turn is None:
            calls.checked_name()
            self._refuse_to_flush_elsewhere()
            session, turn = enter_session(self.settings, self._identity())
        try:
            over = over_when_left()
            calls.is_unseen = over is None
            turn.follow(over)
            turn.wait()
            # Not opened before its turn: another thread's close of the session waits for that.
            session = session or self.open_session()
        except BaseException:
            turn.end()  # the save fails; its error may keep the ticket for long
            raise
        calls.turn = turn  # kept: it ends with the call, failed or not
        calls.checked_name()
        self._name_unwritable()
        return session

    def _refuse_to_flush_elsewhere(self) -> None:
        """Raise ConfigError where a flush in this process wouldn't reach the writer's storage."""
        url = self.settings.url
        if url is not None and os.getpid() != self._home and lives_in_one_process(url):
            raise ConfigError(
                f"path={url!r} lives in the process that made the writer, and this save runs in "
                "another one: let async_save use a thread (AsyncCheckpointerType.THREAD)"
            )

    def _name_unwritable(self) -> None:
        """Say, at the first save, where the root takes no files. What is saved stays in memory."""
        trial, self._trial = self._trial, None
        if trial is not None and (why_not := trial.refusal()):
            text = "path=%r takes no checkpoints, so they stay in this node's memory: %s"
            log.error(text, self.settings.url, why_not)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Run in a turn of this process's saves of the job.

        Without one, where the job's memory can't be opened: that is raised where all ranks see it.
        """
        entered = attempt(lambda: enter_session(self.settings, self._identity()))
        if entered.error is not None:
            yield
            return
        with entered.value[1]:
            yield

    def open_session(self) -> Session:
        return session_for(self.settings, self._identity())

    def _identity(self) -> RunIdentity:
        return RunIdentity(self._run or run_identity() or run_token(), self._token)

    @property
    def purpose(self) -> Purpose:
        """The purpose of the ranks' connections: all saves of one job share them."""
        return self.settings.purpose("save")

    def wake_agent(self, now: bool = False) -> str:
        """Have the agent look at what is pending; now=True tries at once again what failed."""
        session = open_session(self.settings)
        if session is not None:
            return session.wake_agent(self.settings, now=now, is_waiting=True)
        if self.settings.agent == "process" and self.settings.url is not None:
            # The saves are made elsewhere: async_save's process executor.
            return self._agent.wake(registration_of(self.settings, now=now), is_waiting=True)
        if not job_is_live(os.path.join(self.settings.memory_root, self.settings.job)):
            # The process that saved is gone, and its flush thread with it.
            return self.open_session().wake_agent(self.settings, now=now)
        return ""

    def __getstate__(self) -> dict[str, Any]:
        # For async_save's process executor: the copy opens a session of its own, and finds its
        # group by itself. But it belongs to this run, which its own environment and store would
        # give another name.
        # What was said of the next save goes along, unless a copy has been made to be sent: then
        # what was said of that. DCP pickles the writer in the background, so by now something may
        # have been said of a later save.
        info = self._infos_to_send.popleft() if self._infos_to_send else self.take_info()
        return {
            **self.__dict__,
            "calls": None,
            "process_group": None,
            "_trial": None,
            "frozen": None,  # what is staged has been copied in the caller's process
            "_next_info": info,
            "_infos_to_send": deque(),
            "_run": self._identity().run,
            "_loaded": loaded(self.settings),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = state.pop("_loaded")
        self.__dict__.update(state, calls=ThreadCalls())
        note_loaded(self.settings, found)


def _is_alone(value: Any) -> bool:
    """Tell whether these are the arguments of a call of DCP with no_dist=True."""
    return type(value) is dict and "storage_writer" in value and value.get("no_dist") is True
