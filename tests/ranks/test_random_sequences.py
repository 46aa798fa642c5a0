"""Saves, kills, restarts, loads, flushes, evictions and damage in any order, against a model.

DCP_MEM_MACHINE=N has it try N sequences.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dcp_mem.policy.admission import NodeMemory, admit, retire
from dcp_mem.policy.facts import CheckpointFacts
from tests.support.checkpoints.held import manifest_in, segments_in
from tests.support.checkpoints.jobs import committed_in
from tests.support.checkpoints.plans import SAVES
from tests.support.processes import faults
from tests.support.processes.kill_targets import (
    CallFailed,
    Line,
    LineDead,
    Loaded,
    Place,
    full_state,
    slots_in,
    stock_load,
    wait_for,
)

NAMES = ("a", "b", "c", "d")
ROADS = tuple(SAVES)
SAVE_POINTS = [
    point for point in faults.POINTS if point.startswith(("save.", "stage.", "complete."))
]
FLUSH_POINTS = [point for point in faults.POINTS if point.startswith("flush.")]
COMPLETE_FROM = SAVE_POINTS.index("complete.manifest")
RETIRED_FROM = SAVE_POINTS.index("complete.evicted")
COMMITTED_FROM = FLUSH_POINTS.index("flush.committed")
MOST_KEPT = 3
SEQUENCES = int(os.environ.get("DCP_MEM_MACHINE", "20"))


@dataclass(slots=True)
class Copy:
    """A complete checkpoint in one place. Steps only grow, so the step also says which is newer."""

    name: str
    step: int
    persist: bool = False
    durable: bool = False
    damaged: bool = False
    shown: bool = True
    """Whether torch's own readers find it. If a kill came first, the next process's first save
    makes it so."""

    @property
    def pending(self) -> bool:
        return self.persist and not self.durable


@dataclass(slots=True)
class Model:
    """What memory and storage hold, by name, and what follows from that."""

    keep: int
    memory: dict[str, Copy] = field(default_factory=dict)
    storage: dict[str, Copy] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        return any(copy.pending for copy in self.memory.values())

    def agree(self) -> None:
        """Evict what a save evicts before it stages, and finish what an earlier save left."""
        for copy in self.memory.values():
            copy.shown = True
        node = NodeMemory(kept=self._kept(), used=0, spare=0, free=1, limit=None, needed=0)
        self._evict(admit([node], self.keep).evict)

    def complete(self, name: str, step: int, persist: bool) -> None:
        self.memory.pop(name, None)
        self.memory[name] = Copy(name, step, persist)

    def retire(self) -> None:
        self._evict(retire(self._kept(), self.keep))

    def commit(self, name: str) -> None:
        """A flush's commit, which comes once; not yet written down in memory."""
        step = self.memory[name].step
        if name not in self.storage or self.storage[name].step != step:
            self.storage[name] = Copy(name, step)

    def flush(self) -> None:
        for copy in self.memory.values():
            if copy.pending:
                self.commit(copy.name)
                copy.durable = True

    def loadable(self, name: str | None = None) -> Copy | None:
        """What a load takes: the newest copy that isn't damaged, wherever it lies."""
        copies = [*self.memory.values(), *self.storage.values()]
        whole = [copy for copy in copies if not copy.damaged and name in (None, copy.name)]
        return max(whole, key=lambda copy: copy.step, default=None)

    def _kept(self) -> tuple[CheckpointFacts, ...]:
        return tuple(
            CheckpointFacts(key=c.name, created=float(c.step), persist=c.persist, pending=c.pending)
            for c in self.memory.values()
        )

    def _evict(self, names: frozenset[str]) -> None:
        for name in names:
            del self.memory[name]


class Checkpoints(RuleBasedStateMachine):
    """A job of one rank that flushes from a thread; its process is killed and started again."""

    root: Path
    directory: Path
    count = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).count += 1
        job = f"job{self.count}"
        self.place = Place(str(self.root), str(self.directory / job), job, keep=2, agent="thread")
        self.model = Model(self.place.keep)
        self.step = 0
        self.stack = ExitStack()
        self.line: Line | None = None
        self.has_session = False
        """Whether the process has saved or waited for a flush: only then does close retire."""

    def teardown(self) -> None:
        try:
            self.look()
        finally:
            self.stack.close()
            with suppress(FileNotFoundError):
                shutil.rmtree(self.memory)

    @property
    def memory(self) -> Path:
        return self.root / self.place.job

    def trainer(self) -> Line:
        """The job's process, started now if there is none."""
        if self.line is None:
            self.line = self.stack.enter_context(Line(self.place))
        return self.line

    def ended(self) -> None:
        self.line, self.has_session = None, False
        self.stack.close()

    # -- saving ------------------------------------------------------------------------------------

    @initialize(name=st.sampled_from(NAMES), road=st.sampled_from(ROADS))
    def first_save(self, name: str, road: str) -> None:
        self.save(name, road)

    @rule(name=st.sampled_from(NAMES), road=st.sampled_from(ROADS))
    def save(self, name: str, road: str) -> None:
        self._save(name, road, persist=False)
        if self.model.pending:  # what a killed flush has left: the flush thread is at it by now
            self.flush()

    @rule(name=st.sampled_from(NAMES), road=st.sampled_from(ROADS))
    def save_and_flush(self, name: str, road: str) -> None:
        self._save(name, road, persist=True)
        self.flush()

    def _save(self, name: str, road: str, *, persist: bool) -> None:
        self.step += 1
        self.trainer().call("save", self.step, name, persist, road)
        self.has_session = True
        self.model.agree()
        self.model.complete(name, self.step, persist)
        self.model.retire()

    @rule(
        name=st.sampled_from(NAMES),
        road=st.sampled_from(ROADS),
        persist=st.booleans(),
        point=st.sampled_from(SAVE_POINTS),
    )
    def kill_in_save(self, name: str, road: str, persist: bool, point: str) -> None:
        if SAVE_POINTS.index(point) >= COMPLETE_FROM:
            # or else a flush thread might be there, and come this far or that with what is complete
            self.kill()
            persist = persist and SAVE_POINTS.index(point) < RETIRED_FROM
        self.step += 1
        self.trainer().call("arm", f"{point}:kill:1")
        with pytest.raises(LineDead):
            self.trainer().call("save", self.step, name, persist, road)
        self.ended()
        self.model.agree()
        if SAVE_POINTS.index(point) >= COMPLETE_FROM:
            self.model.complete(name, self.step, persist)
            self.model.memory[name].shown = False
        if SAVE_POINTS.index(point) >= RETIRED_FROM:
            self.model.retire()
        self._look_what_is_shown()

    @rule(name=st.sampled_from(NAMES), point=st.sampled_from(FLUSH_POINTS))
    def kill_in_flush(self, name: str, point: str) -> None:
        self.flush()  # one alone is pending then, and comes to the point,
        self.kill()  # and the flush thread isn't there before the save wakes it
        self.step += 1
        self.trainer().call("arm", f"{point}:kill:1")
        with suppress(LineDead):
            self.trainer().call("save", self.step, name, True)
        line = self.trainer()
        with suppress(LineDead):  # or it hears that all is durable, just before it dies
            line.call("flush")
        wait_for(lambda: not line.process.is_running(0), "the trainer to die")
        self.ended()
        self.model.agree()
        self.model.complete(name, self.step, persist=True)
        self.model.memory[name].shown = False
        self.model.retire()
        if FLUSH_POINTS.index(point) >= COMMITTED_FROM:
            self.model.commit(name)
        self.model.memory[name].durable = point == "flush.recorded"
        self._look_what_is_shown()

    @rule()
    def flush(self) -> None:
        self.trainer().call("flush")
        self.has_session = self.has_session or self.model.pending
        self.model.flush()

    # -- coming and going --------------------------------------------------------------------------

    @rule()
    def kill(self) -> None:
        if self.line is not None:
            self.line.kill()
            self.ended()
            self._look_what_is_shown()

    @rule(keep=st.integers(1, MOST_KEPT))
    def close_and_go_on(self, keep: int) -> None:
        """Close, which applies retention, and go on with another number of checkpoints to keep."""
        self.flush()
        self.trainer().call("close")
        if self.has_session:
            self.model.retire()
        self.place = replace(self.place, keep=keep)
        self.model.keep = keep
        self.trainer().call("reopen", self.place)
        self.has_session = False

    @rule()
    def lose_memory(self) -> None:
        self.kill()
        with suppress(FileNotFoundError):
            shutil.rmtree(self.memory)
        self.model.memory.clear()

    # -- damage ------------------------------------------------------------------------------------

    @precondition(lambda self: any(not copy.pending for copy in self.model.memory.values()))
    @rule(data=st.data())
    def truncate_segment_in_memory(self, data: st.DataObject) -> None:
        copies = [copy for copy in self.model.memory.values() if not copy.pending]
        copy = data.draw(st.sampled_from(copies))
        self.kill()  # its mapping is no place for a short file
        (segment,) = segments_in(self.memory / copy.name)
        os.truncate(segment, data.draw(st.integers(0, 100_000)))
        copy.damaged = True

    @precondition(lambda self: self.model.storage)
    @rule(data=st.data())
    def corrupt_byte_on_storage(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from(list(self.model.storage.values())))
        path = self._stored_segment(copy)
        payload = full_state(copy.step)["sharded3"].numpy().tobytes()
        with path.open("r+b") as stream:
            content = stream.read()
            if not copy.damaged:
                start = content.index(payload)
                offset = start + data.draw(st.integers(0, len(payload) - 1))
                stream.seek(offset)
                stream.write(bytes([content[offset] ^ 0x40]))
        copy.damaged = True

    def _stored_segment(self, copy: Copy) -> Path:
        """Return the committed segment; attempts killed earlier may have left others."""
        note = full_state(copy.step)["note"].encode()
        assert self.place.path is not None
        paths = (Path(self.place.path) / copy.name).glob("*.distcp")
        return next(path for path in paths if note in path.read_bytes())

    # -- loading -----------------------------------------------------------------------------------

    @rule(name=st.sampled_from([None, *NAMES]))
    def load(self, name: str | None) -> None:
        expected = self.model.loadable(name)
        if expected is None:
            with pytest.raises(
                CallFailed, match=r"CheckpointNotFound|NoRecoverableCheckpoint|SegmentCorrupt"
            ):
                self.trainer().call("load", name)
            return
        found = self.trainer().call("load", name)
        assert isinstance(found, Loaded)
        assert (found.name, found.step) == (expected.name, expected.step)

    @rule()
    def look(self) -> None:
        """What torch's own reader makes of both places."""
        assert self.place.path is not None
        copies = self.model.memory.values()
        shown = {copy.name: copy.step for copy in copies if copy.shown and not copy.damaged}
        wait_for(
            lambda: all(map(self._is_shown, (copy for copy in copies if copy.shown))),
            "what was saved to be shown",
        )
        assert {name: stock_load(self.memory / name) for name in shown} == shown
        assert committed_in(self.memory) <= {copy.name for copy in copies}
        stored = {copy.name: copy.step for copy in self.model.storage.values() if not copy.damaged}
        assert {name: stock_load(Path(self.place.path) / name) for name in stored} == stored
        assert committed_in(Path(self.place.path)) == self.model.storage.keys()

    def _look_what_is_shown(self) -> None:
        """After a kill: what the process had come to.

        The next one shows the rest with its first save.
        """
        for copy in self.model.memory.values():
            copy.shown = copy.shown and self._is_shown(copy)

    def _is_shown(self, copy: Copy) -> bool:
        metadata = self.memory / copy.name / ".metadata"
        save_id = manifest_in(metadata.parent)["save_id"]
        return metadata.exists() and save_id.encode() in metadata.read_bytes()

    @invariant()
    def memory_is_bounded(self) -> None:
        assert slots_in(self.place) <= MOST_KEPT + 1


@pytest.fixture
def machine(memory_root: Path, tmp_path: Path) -> type[Checkpoints]:
    return type("Bound", (Checkpoints,), {"root": memory_root, "directory": tmp_path})


@pytest.mark.random
@pytest.mark.timeout(max(310, 60 + 5 * SEQUENCES))
def test_any_sequence_of_events_leaves_what_the_model_says(machine: type[Checkpoints]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=SEQUENCES,
            stateful_step_count=20,
            deadline=None,
            # Not shrunk: each step takes too long for the hundreds that shrinking tries.
            phases=(
                Phase.explicit,
                Phase.reuse,
                Phase.generate,
            ),
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
