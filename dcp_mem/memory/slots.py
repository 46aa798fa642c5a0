"""Slots: tmpfs files that are recycled, so that pages stay faulted in and mappings valid.

First touch of tmpfs pages costs several times the copy, and so does a new mapping over pages that
exist. A slot is claimed from the free ones, staged into, and becomes a segment by rename; retention
renames it back. The process that has mapped it recognises it by its inode, and goes on using the
mapping.

A segment that stays as it is may get further names, as a segment of later checkpoints. It becomes
free with its last name, and nobody claims a slot that has another one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from weakref import WeakSet

from dcp_mem.common import files
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.memory.locks import in_turn, is_leased, share, try_lease
from dcp_mem.memory.recycling import retire
from dcp_mem.memory.slot import Slot
from dcp_mem.policy.slots import FreeSlot, SlotNeed, capacity_for, preferred

_SUFFIX = ".slot"


class SlotPool:
    """The slots of one process in one job's directory.

    Any thread may call anything at any time, but for `close`, which comes when nothing is claimed.
    A slot belongs to the thread that has claimed it, until that shares or abandons it: nobody else
    writes to it, unmaps or closes it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._open: dict[int, Slot] = {}
        self._guard = threading.RLock()  # not held while pages are populated, which takes long
        _all_pools.add(self)

    def claim(self, nbytes: int, frames: str, mapped: int | None = None) -> Slot:
        """Return a slot that is this caller's alone: a free one where there is one, else a new one.

        Preferred is a slot that holds these frames already, then one that is mapped, then the one
        of nearest size.

        `mapped`: at least so many are mapped, with every page present; None: all.
        """
        slot = self.take(nbytes, frames)
        try:
            slot.shrink(nbytes)
            slot.map(nbytes if mapped is None else mapped, nbytes)
            slot.reserve(nbytes)
        except BaseException:
            self.abandon(slot)
            raise
        return slot

    def take(self, nbytes: int, frames: str) -> Slot:
        """Return the slot that `claim` would take, without making room in it."""
        with self._guard, in_turn(self._directory):
            return self._claim_free(nbytes, frames) or self._create()

    def free(self) -> list[FreeSlot]:
        """Return the free slots that could be claimed here, the largest first."""
        with self._guard, in_turn(self._directory):
            return sorted(self._free(), key=lambda one: one.present, reverse=True)

    def keep_only(self, needs: Sequence[SlotNeed]) -> None:
        """Keep the free slots that claims in this order will take; give back all other memory.

        The slots that stay are cut to what the claims need. Slots that no process holds count.
        """
        with self._guard, in_turn(self._directory):
            for one in self._free():
                if not one.is_held:
                    self._adopt(one.name, is_claimed=False)
            left = [one for one in self._free() if one.is_held]
            for need in needs:
                kept = next((one for one in preferred(need, left) if self._is_alone(one)), None)
                if kept is not None:
                    left.remove(kept)
                    slot = self._open[kept.inode]
                    slot.see_truncation()
                    slot.cut(need.nbytes if slot.is_populated else 0)
                    self.share(slot)
            for one in filter(self._is_alone, left):
                self._delete(self._open[one.inode], one.name)

    def free_count(self) -> int:
        """Return how many free slots this process could claim, by their leases alone."""
        with self._guard, in_turn(self._directory):
            return len(self._free())

    def seal(self, slot: Slot, path: str) -> None:
        """Give a slot its name as a segment: it isn't written again until it is claimed again."""
        os.rename(slot.path, path)
        slot.path = path

    def link(self, slot: Slot, claims: int, path: str) -> bool:
        """Give a sealed slot one more name, as a segment of another checkpoint.

        Returns False where its bytes aren't those any more, or are gone.
        """
        with self._guard:  # meanwhile no thread here claims it, and its lease keeps others out
            if slot.busy or not self.has_bytes(slot, claims):
                return False
            try:
                files.link_open(slot.descriptor, path)
            except FileNotFoundError:
                if self.has_bytes(slot, claims):
                    raise  # there is no such directory
                return False
            slot.path = path
            if free := self._name_of(slot.inode):
                files.remove(os.path.join(self._directory, free))
            return True

    def unlink(self, slot: Slot) -> None:
        """Take back a sealed slot's newest name; with its last one it becomes free."""
        with self._guard:
            if files.lies_at(slot.path, slot.inode):
                retire(slot.path, self._directory)

    def hold(self, slot: Slot, claims: int) -> Callable[[], None] | None:
        """Keep a sealed slot from being claimed in this process.

        Returns what ends that; None where the slot's bytes aren't those any more, or are gone.
        """
        with self._guard:
            if not self.has_bytes(slot, claims):
                return None
            hold = object()
            slot.holds.add(hold)

        def end() -> None:
            with self._guard:
                slot.holds.discard(hold)

        return end

    def has_bytes(self, slot: Slot, claims: int) -> bool:
        """Return whether a sealed slot still has the bytes that it had."""
        with self._guard:
            is_known = slot.claims == claims and self._open.get(slot.inode) is slot
            return is_known and os.fstat(slot.descriptor).st_nlink > 0

    def share(self, slot: Slot) -> None:
        """Let readers and the agent in; no other process claims the slot meanwhile."""
        with self._guard:
            slot.busy = False
            if slot.descriptor >= 0 and not share(slot.descriptor):
                self._forget(slot)

    def abandon(self, slot: Slot) -> None:
        """Make a free slot of one whose staging has failed, wherever it lies by now."""
        is_free = os.path.dirname(slot.path) == self._directory
        if not is_free and files.lies_at(slot.path, slot.inode):
            with contextlib.suppress(FileNotFoundError):  # evicted just now: it is a slot already
                free = self._new_path()
                os.rename(slot.path, free)
                slot.path = free
        self.share(slot)

    def take_back(self, is_listed: Callable[[str], bool]) -> None:
        """Make free slots of this process's segments that no complete checkpoint lists."""
        with self._guard:
            for slot in list(self._open.values()):
                directory = os.path.dirname(slot.path)
                is_sealed = _is_idle(slot) and directory != self._directory
                if not is_sealed or not files.lies_at(slot.path, slot.inode):
                    continue
                if is_listed(slot.path):
                    continue
                # In turn: another rank may be about to publish, and looks for it in a turn, too.
                with contextlib.suppress(FileNotFoundError), in_turn(directory):
                    if not is_listed(slot.path):
                        self.unlink(slot)

    def prefault(
        self,
        count: int,
        nbytes: int,
        prepare: Callable[[Slot], None],
        wanted: Callable[[], bool],
        has_room: Callable[[int], bool] = lambda nbytes: True,
    ) -> None:
        """Make free slots, ready to be copied into, until there are `count`.

        Ends silently where memory is full.

        `has_room`: tells whether so many bytes more may be taken. No other process is asked, or
        sets memory aside, meanwhile.
        """
        while wanted() and self.free_count() < count:
            with self._guard, in_turn(self._directory):
                if not has_room(capacity_for(nbytes)):
                    return
                slot = self._create()
                slot.set_aside(nbytes, nbytes)
            try:
                slot.map(nbytes, nbytes, wanted)
                if slot.mapping is not None:
                    prepare(slot)
            except BaseException as error:
                files.remove(slot.path)
                self._forget(slot)
                if isinstance(error, MemoryBudgetExceeded):
                    return
                raise
            self.share(slot)

    def drop_larger(self, nbytes: int) -> None:
        """Give the memory of this process's large free slots back to the system."""
        with self._guard, in_turn(self._directory):
            for one in self._free():
                if one.present > nbytes and self._is_alone(one):
                    self._delete(self._open[one.inode], one.name)

    def settle(self) -> None:
        """Keep files and mappings for later use; nothing may be claimed, nor relied on, any more.

        What a save that broke off has left claimed is given up.
        """
        with self._guard:
            for slot in list(self._open.values()):
                slot.holds.clear()
                if slot.busy:
                    self._forget(slot)

    def close(self, *, keep_free: bool = False) -> None:
        """Unmap everything; delete this process's free slots unless they are to be kept."""
        with self._guard, contextlib.ExitStack() as ends:  # of each one, whatever another raises
            for slot in list(self._open.values()):
                ends.callback(self._end, slot, keep_free=keep_free)

    def _end(self, slot: Slot, *, keep_free: bool) -> None:
        try:
            name = self._name_of(slot.inode)
            if name and not keep_free and try_lease(slot.descriptor, exclusive=True):
                self._delete(slot, name)
        finally:
            self._forget(slot)

    def leave_to_parent(self) -> None:
        """In a forked child: give up its part in the leases, which would outlive the parent."""
        for slot in list(self._open.values()):  # a thread of the parent's may have had the guard
            slot.leave_to_parent()

    def _claim_free(self, nbytes: int, frames: str) -> Slot | None:
        for one in preferred(SlotNeed(nbytes, frames), self._free()):
            slot = self._open.get(one.inode) or self._adopt(one.name)
            if slot is None:
                continue
            path = os.path.join(self._directory, one.name)
            # A lease that can't be converted is lost: another process may write to the slot. A
            # process that has ended since the slot was listed may have made a segment of it.
            if not try_lease(slot.descriptor, exclusive=True) or not files.lies_at(
                path, slot.inode
            ):
                self._forget(slot)
                continue
            if os.fstat(slot.descriptor).st_nlink > 1:  # it has become a segment's once more
                files.remove(path)
                self.share(slot)
                continue
            slot.path, slot.busy = path, True
            slot.claims += 1
            slot.see_truncation()
            return slot
        return None

    def _is_alone(self, one: FreeSlot) -> bool:
        """Take the exclusive lease of a slot that this process has open, if nobody else has one."""
        slot = self._open.get(one.inode)
        return slot is not None and self._is_taken(slot)

    def _is_taken(self, slot: Slot) -> bool:
        """Take a slot's exclusive lease; where somebody else has one, stay with the shared one."""
        if try_lease(slot.descriptor, exclusive=True):
            return True
        self.share(slot)  # a lease that can't be converted is lost
        return False

    def _is_claimable(self, slot: Slot) -> bool:
        """Tell whether a claim could take a slot of this process's: nobody else reads it any more.

        Who reads a segment while its checkpoint leaves memory holds a lease on the slot.
        """
        if not _is_idle(slot) or not self._is_taken(slot):
            return False
        self.share(slot)
        return self._open.get(slot.inode) is slot

    def _adopt(self, name: str, *, is_claimed: bool = True) -> Slot | None:
        path = os.path.join(self._directory, name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if not try_lease(descriptor, exclusive=True):
            os.close(descriptor)
            return None
        facts = os.fstat(descriptor)
        slot = self._open[facts.st_ino] = Slot(
            path=path,
            descriptor=descriptor,
            capacity=facts.st_size,
            inode=facts.st_ino,
            busy=is_claimed,
        )
        return slot

    def _new_path(self) -> str:
        return os.path.join(self._directory, uuid.uuid4().hex[:12] + _SUFFIX)

    def _create(self) -> Slot:
        path = self._new_path()
        # Until it is leased, its name isn't that of a free slot.
        descriptor = files.create(path + ".new", flags=os.O_EXCL)
        try_lease(descriptor, exclusive=True)
        os.rename(path + ".new", path)
        inode = os.fstat(descriptor).st_ino
        slot = Slot(path=path, descriptor=descriptor, capacity=0, inode=inode)
        self._open[slot.inode] = slot
        return slot

    def _free(self) -> list[FreeSlot]:
        """Return the free slots that this process could claim.

        These are its own, and those that no process holds.
        """
        self._drop_deleted()
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not entry.name.endswith(_SUFFIX):
                    continue
                if facts.st_nlink > 1:  # it is a segment, too
                    continue
                own = self._open.get(facts.st_ino)
                if self._is_claimable(own) if own is not None else _is_unleased(entry.path):
                    found.append(
                        FreeSlot(
                            name=entry.name,
                            inode=facts.st_ino,
                            capacity=facts.st_size,
                            present=min(facts.st_size, facts.st_blocks * 512),
                            is_held=own is not None,
                            frames="" if own is None else own.frames,
                        )
                    )
        return found

    def _drop_deleted(self) -> None:
        for slot in list(self._open.values()):
            # A busy one is still written to, by another thread.
            if _is_idle(slot) and os.fstat(slot.descriptor).st_nlink == 0:
                self._forget(slot)

    def _name_of(self, inode: int) -> str:
        """Return a slot's name among the free ones; "" for none or no directory."""
        try:
            listing = os.scandir(self._directory)
        except FileNotFoundError:
            return ""
        with listing as entries:
            return next((entry.name for entry in entries if entry.inode() == inode), "")

    def _delete(self, slot: Slot, name: str) -> None:
        """Delete a free slot that is this caller's alone, unless it is a segment as well."""
        files.remove(os.path.join(self._directory, name))
        slot.give_back()
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        with self._guard:
            self._open.pop(slot.inode, None)
            slot.close()


def _is_idle(slot: Slot) -> bool:
    return not slot.busy and not slot.holds


def _is_unleased(path: str) -> bool:
    try:
        return not is_leased(path)
    except FileNotFoundError:
        return False


_all_pools = WeakSet[SlotPool]()


def _leave_to_parent() -> None:
    for pool in list(_all_pools):
        pool.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
