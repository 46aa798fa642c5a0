"""Copies under the next forward and backward passes.

Parameters and optimizer state don't change before the optimizer's next step. So they may be copied
behind the training loop, and a hook on the optimizer's step waits for the copies. Whatever else a
state dict holds (buffers, random numbers, counters, temporaries) may change at any time, and is
copied at once.

Some set-ups break that rule, such as an optimizer that runs within the backward pass. They are
known by their marks, and everything is copied at once then. `validate=True` finds whoever else
breaks the rule: the checkpoint is discarded then, and never completed.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_mem.common import faults
from dcp_mem.common.parallel import OVERLAPPING, KeptThreads, is_copying_thread
from dcp_mem.errors import ConfigError, DcpMemError
from dcp_mem.memory.copying import (
    Chosen,
    Columns,
    Move,
    addresses_of,
    copy_many,
    copy_many_here,
    moves_of,
    sizes_of,
)
from dcp_mem.memory.device_copies import DeviceCopies
from dcp_mem.saving.values import Planned

_BATCH, _AWAITED_BATCH = 16 << 20, 1 << 30
"""Bytes that are copied at a time; once somebody waits, more: each time wakes other threads."""
_SAMPLES = 256
_pending: set[LaterCopies] = set()
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_guard = threading.RLock()  # a collection within it may give copies back
_copiers = KeptThreads(16, OVERLAPPING, is_awaited=True)


class Overlap:
    """The optimizers whose next steps a save waits with, instead of its caller.

    Args:
        *optimizers: All those that change what is saved.
        validate: Hold each copy against a fingerprint taken when `async_save` was called, and
            discard the checkpoint where it differs. It finds code that changes parameters or
            optimizer state outside of these optimizers' steps. On devices it looks at torch's
            counters of writes in place of the bytes.

    Raises:
        ConfigError: There is no optimizer, or something else.
    """

    def __init__(self, *optimizers: Any, validate: bool = False) -> None:
        strange = [one for one in optimizers if not isinstance(one, Optimizer)]
        if strange or not optimizers:
            raise ConfigError(
                f"overlap={strange[0] if strange else None!r}: give the optimizers whose step is "
                f"to wait for the copies"
            )
        self.optimizers: tuple[Optimizer, ...] = optimizers
        self.validate = validate


def overlap_of(value: Overlap | Optimizer | Iterable[Optimizer]) -> Overlap:
    """Return what a caller means by `overlap=`.

    Raises ConfigError.
    """
    if isinstance(value, Overlap):
        return value
    if isinstance(value, (list, tuple)):
        return Overlap(*value)
    return Overlap(value)


def wait_for_copies(optimizer: Optimizer | None = None) -> None:
    """Wait for the copies of what an optimizer is about to change; for all copies without one."""
    with _guard:
        pending = list(_pending)
    for copies in pending:
        if optimizer is None or optimizer in copies.optimizers:
            copies.wait()


class LaterCopies:
    """The copies of one save that are made behind the training loop, and by devices.

    `overlap`: what is copied behind the loop; None where devices alone copy behind it. `planned`:
    what is saved; kept only where what is copied is to be validated. `warn`: called with the reason
    where everything has to be copied at once.
    """

    def __init__(
        self, overlap: Overlap | None, planned: Planned, warn: Callable[[str], None]
    ) -> None:
        self.optimizers = () if overlap is None else overlap.optimizers
        self._validates, self._warn = overlap is not None and overlap.validate, warn
        self._planned = planned if self._validates else None
        self._left = _Copies()
        self._checks: list[_Check] = []
        self._read: list[torch.UntypedStorage] = []
        self._at_once, self._in_time = DeviceCopies(), DeviceCopies()
        self._written: list[tuple[torch.Tensor, int]] = []
        self._guard = threading.RLock()  # a collection within it may give these copies back
        self._is_awaited = self._is_cancelled = self._is_copying = False
        self._copied = threading.Event()
        self._copied.set()
        self._copier: threading.Thread | None = None
        self._error: BaseException | None = None
        self._then: Callable[[], None] | None = None

    def take(self, destination: Columns, source: Columns, nbytes: Columns) -> Chosen:
        """Take over the copies of parameters and optimizer state; return which are the others."""
        numbers = self._may_wait.find(source, nbytes)
        is_later = numbers >= 0
        if is_later.any():
            tensors = self._may_wait.at(numbers[is_later])
            # Not the tensors: their memory may be another one soon (`parameter.data = …`).
            self._read += map(torch.Tensor.untyped_storage, tensors)
            later = destination[is_later], source[is_later], nbytes[is_later]
            if self._validates:
                self._checks += map(_Check, moves_of(*later), tensors)
            self._left.add(*later)
        return ~is_later

    def take_from_devices(self, targets: Columns, sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies from devices; of what may change at any time first.

        The caller never waits. The devices make the former before whatever they are told from now
        on, and the latter before the optimizers' next steps.
        """
        is_later = self._may_wait.find(addresses_of(sources), sizes_of(sources)) >= 0
        may_wait = list(compress(sources, is_later.tolist()))
        self._at_once.begin(targets[~is_later], list(compress(sources, (~is_later).tolist())))
        self._in_time.begin(targets[is_later], may_wait)
        self._at_once.hold_devices()
        if self._validates:
            self._written = [(one, one._version) for one in may_wait]

    @cached_property
    def _may_wait(self) -> _Tensors:
        """Parameters and optimizer state; none where they may change at any time."""
        tensors = _tensors(self.optimizers)
        why_not = _why_not(self.optimizers, tensors)
        if why_not:
            self._warn(f"overlap= has no effect: {why_not}")
        return _Tensors([] if why_not else tensors)

    def begin(self) -> None:
        """Begin with the copies; from here on the optimizers' next steps wait for them."""
        if not self._left and not self._in_time.are_under_way:
            return
        for optimizer in self.optimizers:
            _hook(optimizer)
        with _guard:
            _pending.add(self)
        if self._left:
            self._copied.clear()
            _copiers.submit(self._work)  # may raise, or be interrupted, once the work is queued

    def wait(self) -> None:
        """Return once what is copied may change. What has gone wrong is raised by `finish`."""
        self._join()
        self._validate_devices()
        self._in_time.hold_devices()
        with _guard:
            _pending.discard(self)

    def finish(self) -> None:
        """Return once all copies have been made.

        Raises DcpMemError.
        """
        self._end()
        if self._error is not None:
            raise self._error

    def cancel(self, then: Callable[[], None]) -> None:
        """Make no further copy, and call `then` once none is being made.

        This waits for that, unless a collection of garbage calls it in the very thread that makes
        the copies: then that thread calls `then`, which gives back what is copied to.
        """
        self._is_cancelled = True
        with self._guard:
            if self._is_copying and is_copying_thread():
                self._then = then
                return
            if not self._is_copying:  # and it never will be
                self._copied.set()
        try:
            self._end(is_awaited=False)
        finally:
            then()

    def _end(self, *, is_awaited: bool = True) -> None:
        """Wait for all copies, and let go of what was copied."""
        try:
            self._join(is_awaited=is_awaited)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        try:
            self._at_once.finish()
        finally:
            self._in_time.finish()
        self._validate_devices()
        with _guard:
            _pending.discard(self)
        self._read.clear()
        self._planned = None
        self.__dict__.pop("_may_wait", None)

    def _join(self, *, is_awaited: bool = True) -> None:
        # Whoever cancels isn't served by more threads: a collection of garbage may call, with locks
        # held that other threads need to begin.
        self._is_awaited = self._is_awaited or is_awaited
        if self._copier is threading.current_thread():
            return  # its last copy has been made, and a collection runs behind that
        interrupt: BaseException | None = None
        while not self._copied.is_set():  # what is still written to may not be left
            interrupt = _waited(self._copied) or interrupt
        if interrupt is not None:
            raise interrupt

    def _work(self) -> None:
        with self._guard:
            if self._is_cancelled:
                return
            self._is_copying = True
        self._copier = threading.current_thread()
        try:
            faults.point("overlap.begun")
            while self._left and not self._is_cancelled:
                # Somebody who waits is served by all threads, the training loop isn't disturbed.
                if self._is_awaited and not self._is_cancelled:
                    copy_many(*self._left.take(_AWAITED_BATCH))
                else:
                    copy_many_here(*self._left.take(_BATCH))
            faults.point("overlap.copied")
            self._validate()
        except BaseException as error:
            self._error = error
        finally:
            self._checks.clear()
            with self._guard:
                self._is_copying, then = False, self._then
            try:
                if then is not None:
                    self._give_back(then)
            finally:
                self._copied.set()

    def _give_back(self, then: Callable[[], None]) -> None:
        try:
            self._let_go()
        finally:
            then()

    def _validate(self) -> None:
        planned = self._planned
        if self._is_cancelled or planned is None or planned.sources is None:
            return
        changed = [check for check in self._checks if not check.holds()]
        if changed:
            item = planned.tensors[planned.sources.addresses.index(changed[0].source)]
            raise _changed(planned.items.index(item).fqn, len(changed))

    def _validate_devices(self) -> None:
        """Look once, before the optimizers' steps, at how often tensors on devices were written to.

        Their bytes are there only once the device has copied them; nobody waits for that.
        """
        with self._guard:
            changed = [one for one, version in self._written if one._version != version]
            self._written = []
            if changed and not self._is_cancelled and self._error is None:
                what = f"a tensor of shape {list(changed[0].shape)} on {changed[0].device}"
                self._error = _changed(what, len(changed))


def _waited(copied: threading.Event) -> BaseException | None:
    """Wait for copies; return what interrupts that. What goes wrong with them is in `_error`."""
    try:
        copied.wait()
    except BaseException as interrupt:
        return interrupt
    return None


def _changed(first: str, count: int) -> DcpMemError:
    return DcpMemError(
        f"{first} and {count - 1} other tensors changed between the save and the optimizer's step, "
        f"so the copy isn't the state that was to be saved: name every optimizer in overlap=, or "
        f"save without overlap="
    )


class _Check:
    """A tensor's fingerprint from before it was copied."""

    def __init__(self, move: Move, tensor: torch.Tensor) -> None:
        self._destination, self.source, self._nbytes = move
        self._tensor, self._version = tensor, tensor._version
        self._samples = _fingerprint(self.source, self._nbytes)

    def holds(self) -> bool:
        """Tell whether the copy is of the tensor as it was, as far as that can be told cheaply."""
        is_same = _fingerprint(self._destination, self._nbytes) == self._samples
        return is_same and self._tensor._version == self._version


def _fingerprint(address: int, nbytes: int) -> int:
    """Return a checksum of a few hundred bytes, spread over so many from an address on."""
    data = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
    return zlib.crc32(data[:: max(1, nbytes // _SAMPLES)].tobytes())


class _Copies:
    """Copies that are left to make, in pieces of at most a batch."""

    def __init__(self) -> None:
        self._columns = np.empty((3, 0), np.int64)
        self._ends = self._columns[2]
        self._first = 0

    def __bool__(self) -> bool:
        return self._first < len(self._ends)

    def add(self, destination: Columns, source: Columns, nbytes: Columns) -> None:
        """Add copies, none of which is empty; before any is taken."""
        counts = -(-nbytes // _BATCH)
        starts = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts *= _BATCH
        columns = np.repeat(np.stack([destination, source, nbytes]), counts, axis=1)
        columns += np.stack([starts, starts, -starts])
        columns[2] = np.minimum(columns[2], _BATCH)
        self._columns = np.concatenate([self._columns, columns], axis=1)
        self._ends = np.cumsum(self._columns[2])

    def take(self, most: int) -> Columns:
        """Take so many bytes of copies, or a little more; return their columns."""
        first = self._first
        begin = 0 if first == 0 else self._ends[first - 1]
        self._first = int(np.searchsorted(self._ends, begin + most)) + 1
        return self._columns[:, first : self._first]


class _Tensors:
    """Tensors, by the addresses of their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        addresses, nbytes = addresses_of(tensors), sizes_of(tensors)
        self._order = np.lexsort((nbytes, addresses))  # of those that begin alike, the largest last
        self._addresses, self._nbytes = addresses[self._order], nbytes[self._order]
        self._tensors = tensors

    def find(self, address: Columns, nbytes: Columns) -> Columns:
        """Return a number for each piece of memory: of a tensor that begins there and has it all.

        Returns -1 where no tensor does, and for empty pieces.
        """
        place = np.searchsorted(self._addresses, address, side="right") - 1
        if not len(self._tensors):
            return place
        is_found = (self._addresses[place] == address) & (nbytes <= self._nbytes[place])
        return np.where(is_found & (nbytes > 0), place, -1)

    def at(self, numbers: Columns) -> list[torch.Tensor]:
        """Return tensors by their numbers."""
        return [self._tensors[one] for one in self._order[numbers].tolist()]


def _parameters(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _tensors(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return this rank's parts of all parameters, and of the optimizers' state of them."""
    tensors = _parameters(optimizers)
    for optimizer in optimizers:
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        values = chain.from_iterable(map(dict.values, states))
        tensors += [value for value in values if isinstance(value, torch.Tensor)]
    return [one._local_tensor if type(one) is DTensor else one for one in tensors]


def _why_not(optimizers: Sequence[Optimizer], tensors: Sequence[torch.Tensor]) -> str:
    """Return why parameters may change before the optimizers' steps; "" where they don't."""
    unhooked = next((one for one in optimizers if not _takes_hooks(one)), None)
    if unhooked is not None:
        kind = type(unhooked).__name__
        return f"the step of {kind} calls no hooks; if it wraps an optimizer, give that one"
    parameters = _parameters(optimizers)
    if any(getattr(one, "_in_backward_optimizers", None) for one in parameters):
        return "an optimizer runs in the backward pass"
    if any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters):
        return "hooks on gradients may run an optimizer in the backward pass"
    if torch.cuda.is_initialized() and any(one.is_cpu and one.dim() for one in tensors):
        return "parameters or optimizer state are offloaded to the CPU"
    return ""


def _takes_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step calls hooks: a wrapper of another one's may not."""
    has_hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) is not None
    return has_hooks and getattr(type(optimizer).step, "hooked", False)


def _hook(optimizer: Optimizer) -> None:
    """Have an optimizer's steps wait for the copies of what they change."""
    with _guard:
        if optimizer not in _hooked:
            optimizer.register_step_pre_hook(lambda stepping, *_: wait_for_copies(stepping))
            _hooked.add(optimizer)


def _forget_parent() -> None:
    """Wait for no copies of the parent's: it makes them, of memory that this process shares."""
    global _guard
    _guard = threading.RLock()
    _pending.clear()


os.register_at_fork(after_in_child=_forget_parent)
