"""Saves, kills, restarts, loads, flushes, evictions and damage in any order, against a model of what can be loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from dcp_mem import faults
from dcp_mem.policy.admission import Kept, NodeMemory, admit, retire
from tests.kill_targets import CallFailed, Line, LineDead, Loaded, Place, full_state, slots_in, stock_load, stock_steps

NAMES = ("a", "b", "c", "d")
SAVE_POINTS = [point for point in faults.POINTS if not point.startswith("flush.")]
FLUSH_POINTS = [point for point in faults.POINTS if point.startswith("flush.")]
COMPLETE_FROM = SAVE_POINTS.index("complete.manifest")
RETIRED_FROM = SAVE_POINTS.index("complete.evicted")
COMMITTED_FROM = FLUSH_POINTS.index("flush.committed")
MOST_KEPT = 3


@dataclass(slots=True)
class Copy:
    """A complete checkpoint in one place. Steps only grow, so the step also says which is newer."""

    name: str
    step: int
    persist: bool = False
    durable: bool = False
    damaged: bool = False

    @property
    def pending(self) -> bool:
        return self.persist and not self.durable


@dataclass(slots=True)
class Model:
    """What memory and storage hold, by name, and what follows from that."""

    keep: int
    memory: dict[str, Copy] = field(default_factory=dict)
    storage: dict[str, Copy] = field(default_factory=dict)

    def agree(self) -> None:
        """What a save evicts before it stages anything."""
        node = NodeMemory(self._kept(), used=0, spare=0, free=1, limit=None, needed=0)
        self._evict(admit([node], self.keep).evict)

    def complete(self, name: str, step: int, persist: bool) -> None:
        self.memory.pop(name, None)
        self.memory[name] = Copy(name, step, persist)

    def retire(self) -> None:
        self._evict(retire(self._kept(), self.keep))

    def commit(self, name: str) -> None:
        """A flush's commit; not yet written down in memory."""
        self.storage[name] = Copy(name, self.memory[name].step)

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

    def _kept(self) -> tuple[Kept, ...]:
        return tuple(Kept(c.name, float(c.step), 0, c.persist, c.pending, busy=False) for c in self.memory.values())

    def _evict(self, names: frozenset[str]) -> None:
        for name in names:
            del self.memory[name]


class Checkpoints(RuleBasedStateMachine):
    """One job of one rank, in a process that is killed and started again, with its flushes in a thread of it."""

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

    def teardown(self) -> None:
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
        self.line = None
        self.stack.close()

    # -- saving ---------------------------------------------------------------------------------------------------

    @initialize(name=st.sampled_from(NAMES))
    def first_save(self, name: str) -> None:
        self.save(name)

    @rule(name=st.sampled_from(NAMES))
    def save(self, name: str) -> None:
        self.step += 1
        self.trainer().call("save", self.step, name, False)
        self._saved(name, persist=False)

    @rule(name=st.sampled_from(NAMES))
    def save_and_flush(self, name: str) -> None:
        self.step += 1
        self.trainer().call("save", self.step, name, True)
        self.trainer().call("flush")
        self._saved(name, persist=True)
        self.model.flush()

    @rule(name=st.sampled_from(NAMES), persist=st.booleans(), point=st.sampled_from(SAVE_POINTS))
    def kill_in_save(self, name: str, persist: bool, point: str) -> None:
        if persist and SAVE_POINTS.index(point) >= RETIRED_FROM:
            persist = False  # its flush would be under way, and might come this far or that
        self.step += 1
        self.trainer().call("arm", f"{point}:kill:1")
        with pytest.raises(LineDead):
            self.trainer().call("save", self.step, name, persist)
        self.ended()
        self.model.agree()
        if SAVE_POINTS.index(point) >= COMPLETE_FROM:
            self.model.complete(name, self.step, persist)
        if SAVE_POINTS.index(point) >= RETIRED_FROM:
            self.model.retire()

    @rule(name=st.sampled_from(NAMES), point=st.sampled_from(FLUSH_POINTS))
    def kill_in_flush(self, name: str, point: str) -> None:
        if any(copy.pending for copy in self.model.memory.values()):
            self.flush()  # which of several comes to the point first is nobody's promise
        self.step += 1
        self.trainer().call("save", self.step, name, False)
        self._saved(name, persist=False)
        self.step += 1
        self.trainer().call("arm", f"{point}:kill:1")
        with suppress(LineDead):
            self.trainer().call("save", self.step, name, True)
        with pytest.raises(LineDead):
            self.trainer().call("flush")
        self.ended()
        self._saved(name, persist=True)
        if FLUSH_POINTS.index(point) >= COMMITTED_FROM:
            self.model.commit(name)
        self.model.memory[name].durable = point == "flush.recorded"

    def _saved(self, name: str, *, persist: bool) -> None:
        self.model.agree()
        self.model.complete(name, self.step, persist)
        self.model.retire()

    @rule()
    def flush(self) -> None:
        self.trainer().call("flush")
        self.model.flush()

    # -- coming and going -----------------------------------------------------------------------------------------

    @rule()
    def kill(self) -> None:
        if self.line is not None:
            self.line.kill()
            self.ended()

    @rule(keep=st.integers(1, MOST_KEPT))
    def close_and_keep(self, keep: int) -> None:
        """Close, which applies retention, and go on with another number of checkpoints to keep."""
        line = self.trainer()
        self.place = replace(self.place, keep=keep)
        line.call("reopen", self.place)
        line.call("flush")
        self.model.flush()
        saved_here = self.step in self._steps_of_this_process
        line.call("close")
        self.model.keep = keep
        if saved_here:
            self.model.retire()

    _steps_of_this_process: frozenset[int] = frozenset()

    @rule()
    def lose_memory(self) -> None:
        self.kill()
        shutil.rmtree(self.memory)
        self.model.memory.clear()

    # -- damage -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(not copy.pending for copy in self.model.memory.values()))
    @rule(data=st.data())
    def truncate_segment_in_memory(self, data: st.DataObject) -> None:
        copies = [copy for copy in self.model.memory.values() if not copy.pending]
        copy = data.draw(st.sampled_from(copies))
        (segment,) = (self.memory / copy.name).glob("*.distcp")
        self.kill()  # its mapping is no place for a short file
        with segment.open("r+b") as stream:
            stream.truncate(data.draw(st.integers(0, 100_000)))
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
        """The committed segment; attempts that were killed before their commit may have left others."""
        note = full_state(copy.step)["note"].encode()
        assert self.place.path is not None
        paths = (Path(self.place.path) / copy.name).glob("*.distcp")
        return next(path for path in paths if note in path.read_bytes())

    # -- loading ----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from([None, *NAMES]))
    def load(self, name: str | None) -> None:
        expected = self.model.loadable(name)
        if expected is None:
            with pytest.raises(CallFailed, match="CheckpointNotFound|NoRecoverableCheckpoint|SegmentCorrupt"):
                self.trainer().call("load", name)
            return
        found = self.trainer().call("load", name)
        assert isinstance(found, Loaded)
        assert (found.name, found.step) == (expected.name, expected.step)

    @invariant()
    def memory_is_what_stock_torch_reads(self) -> None:
        whole = {copy.name: copy.step for copy in self.model.memory.values() if not copy.damaged}
        shown = {path.parent.name for path in self.memory.glob("*/.metadata")}
        assert whole.keys() <= shown <= self.model.memory.keys()
        assert {name: stock_load(self.memory / name) for name in whole} == whole

    @invariant()
    def storage_is_what_stock_torch_reads(self) -> None:
        assert self.place.path is not None
        if not any(copy.damaged for copy in self.model.storage.values()):
            assert stock_steps(self.place.path) == {copy.name: copy.step for copy in self.model.storage.values()}

    @invariant()
    def memory_is_bounded(self) -> None:
        assert slots_in(self.place) <= MOST_KEPT + 1


@pytest.fixture
def machine(memory_root: Path, tmp_path: Path) -> Iterator[type[Checkpoints]]:
    yield type("Bound", (Checkpoints,), {"root": memory_root, "directory": tmp_path})


@pytest.mark.timeout(300)
def test_any_sequence_of_events_leaves_what_the_model_says(machine: type[Checkpoints]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
