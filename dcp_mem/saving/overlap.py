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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
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
    addresses_of,
    copy_many,
    copy_many_here,
    moves_of,
    sizes_of,
)
from dcp_mem.memory.device_copies import DeviceCopies, Enqueued
from dcp_mem.saving.values import Planned

_BATCH, _AWAITED_BATCHES = 16 << 20, 64
"""Bytes that are copied at a time; once somebody waits, so many times that: it wakes threads."""
_SAMPLES = 256
_pending: set[StagingCopies] = set()
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


class StagingCopies:
    """The copies of one save into its slot that somebody else than the caller makes.

    Devices copy what lies on them. A thread copies what may wait for the optimizers' next steps.
    `finish` waits for all of them: a save in the call does at once, an asynchronous one later.

    `planned`: what is saved; kept only where what is copied is to be validated. `warn`: called with
    the reason where what might wait has to be copied at once. `are_left`: whether the caller goes
    on with the training loop meanwhile.
    """

    def __init__(
        self,
        overlap: Overlap | None = None,
        planned: Planned | None = None,
        warn: Callable[[str], None] = print,
        *,
        are_left: bool = False,
    ) -> None:
        self.are_left = are_left
        self.optimizers = () if overlap is None else overlap.optimizers
        self._validates, self._warn = overlap is not None and overlap.validate, warn
        self._planned = planned if self._validates else None
        self._copies = DeviceCopies()
        self._in_time: list[Enqueued] = []  # those that the optimizers' next steps wait for
        self._left: list[Columns] = []
        self._host: _HostCopies | None = None
        self._watched: list[tuple[torch.Tensor, int, int]] = []  # with version and address
        self._samples: list[tuple[int, int, int, int]] = []  # a move, and its source's fingerprint
        self._error: DcpMemError | None = None

    def take(self, targets: Columns, sources: Columns, nbytes: Columns) -> Chosen:
        """Take over the copies of parameters and optimizer state; return which are the others."""
        if not self.optimizers:
            return np.ones(len(targets), bool)
        numbers = _found(self._may_wait, sources, nbytes)
        is_later = numbers >= 0
        if is_later.any():
            tensors = [self._may_wait[number] for number in numbers[is_later].tolist()]
            self._left.append(np.stack([targets, sources, nbytes])[:, is_later])
            # Not the tensors: their memory may be another one soon (`parameter.data = …`).
            self._copies.read += map(torch.Tensor.untyped_storage, tensors)
            if self._validates:
                self._watch(tensors, sources[is_later].tolist())
                for target, source, size in moves_of(*self._left[-1]):
                    self._samples.append((target, source, size, _fingerprint(source, size)))
        return ~is_later

    def take_from_devices(self, targets: Columns, sources: Sequence[torch.Tensor]) -> None:
        """Enqueue copies from devices; of what may change at any time first.

        The caller never waits. The devices make the former before whatever they are told from now
        on, and the latter before the optimizers' next steps.
        """
        is_later = _found(self._may_wait, addresses_of(sources), sizes_of(sources)) >= 0
        may_wait = list(compress(sources, is_later.tolist()))
        at_once = list(compress(sources, (~is_later).tolist()))
        begun = self._copies.begin(targets[~is_later], at_once)
        self._in_time += self._copies.begin(targets[is_later], may_wait)
        if self.are_left:
            for enqueued in begun:
                enqueued.hold_device()
        if self._validates:
            self._watch(may_wait, [one.data_ptr() for one in may_wait])

    def pass_over(self, tensor: torch.Tensor) -> None:
        """Note a tensor in CPU memory that its caller copies at once, as its kind needs."""
        if self.optimizers and tensor.dim():
            self._warn(
                "overlap= has no effect on tensors in CPU memory: not all of what is saved is "
                "dense, contiguous memory"
            )

    @cached_property
    def _may_wait(self) -> Sequence[torch.Tensor]:
        """Parameters and optimizer state; none where they may change at any time."""
        tensors = _tensors(self.optimizers)
        why_not = _why_not(self.optimizers, tensors)
        if why_not:
            self._warn(f"overlap= has no effect: {why_not}")
        return [] if why_not else tensors

    def begin(self) -> None:
        """Begin with the copies; from here on the optimizers' next steps wait for them."""
        if self._left:
            self._host = _HostCopies(np.concatenate(self._left, axis=1), self._validate)
            self._copies.enqueued.append(self._host)
            self._in_time.append(self._host)
        if self._in_time:
            for optimizer in self.optimizers:
                _hook(optimizer)
            with _guard:
                _pending.add(self)
        if self._host is not None:
            self._host.begin()

    def wait(self) -> None:
        """Return once what is copied may change. What has gone wrong is raised by `finish`."""
        for enqueued in self._in_time:
            enqueued.hold_device()
        self._validate_versions()
        with _guard:
            _pending.discard(self)

    def finish(self) -> None:
        """Return once all copies have been made, and let go of what was copied.

        Raises DcpMemError.
        """
        try:
            self._copies.finish()
        finally:
            self._validate_versions()
            with _guard:
                _pending.discard(self)
            self._planned = None
            self.__dict__.pop("_may_wait", None)
        if self._error is not None:
            raise self._error

    def cancel(self, then: Callable[[], None]) -> None:
        """Make no further copy, and call `then` once none is being made.

        This waits for that, unless a collection of garbage calls it in a thread that copies: then
        the thread that makes these copies calls `then`, which gives back what is copied to.
        """
        host = self._host
        if host is not None and not host.cancel() and is_copying_thread():
            host.made.add_done_callback(lambda _: self._end(then))
        else:
            self._end(then)

    def _end(self, then: Callable[[], None]) -> None:
        try:
            with suppress(DcpMemError):
                self.finish()
        finally:
            then()

    # -- validate=True -----------------------------------------------------------------------------

    def _watch(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        found = zip(tensors, addresses, strict=True)
        self._watched += [(one, one._version, address) for one, address in found]

    def _validate(self) -> None:
        """Hold the host's copies against the fingerprints from before they were made."""
        changed = [
            source
            for target, source, nbytes, sample in self._samples
            if _fingerprint(target, nbytes) != sample
        ]
        if changed:
            raise self._changed(changed[0], len(changed), "a tensor")

    def _validate_versions(self) -> None:
        """Look once, before the optimizers' steps, at how often tensors were written to.

        Of those on devices that is all: their bytes are there only once the device has copied them,
        and nobody waits for that.
        """
        with _guard:
            changed = [one for one in self._watched if one[0]._version != one[1]]
            self._watched = []
            if changed and self._error is None:
                tensor, _, address = changed[0]
                what = f"a tensor of shape {list(tensor.shape)} on {tensor.device}"
                self._error = self._changed(address, len(changed), what)

    def _changed(self, address: int, count: int, what: str) -> DcpMemError:
        planned = self._planned
        sources = None if planned is None else planned.sources
        if planned is not None and sources is not None and address in sources.addresses:
            what = planned.items.index(planned.tensors[sources.addresses.index(address)]).fqn
        return DcpMemError(
            f"{what} and {count - 1} other tensors changed between the save and the optimizer's "
            f"step, so the copy isn't the state that was to be saved: name every optimizer in "
            f"overlap=, or save without overlap="
        )


class _HostCopies:
    """Copies in CPU memory that a thread makes behind its caller, as a device makes its own.

    So they are `Enqueued`, too. What "holds the device" holds the caller here.
    """

    def __init__(self, columns: Columns, validate: Callable[[], None]) -> None:
        self._left, self._validate = _batches(columns), validate
        self._is_awaited = self._is_cancelled = False
        self.made = Future[None]()

    def begin(self) -> None:
        _copiers.submit(self._work)  # may raise, or be interrupted, once the work is queued

    def wait(self) -> None:
        # Whoever cancels isn't served by more threads: a collection of garbage may call, with locks
        # held that other threads need to begin.
        self._is_awaited = not self._is_cancelled
        with suppress(CancelledError):
            if (error := self.made.exception()) is not None and not self._is_cancelled:
                raise error

    def hold_device(self) -> None:
        self._is_awaited = True
        with suppress(CancelledError):
            self.made.exception()

    def cancel(self) -> bool:
        """Make no further copy; return whether none is being made."""
        self._is_cancelled = True
        return self.made.cancel() or self.made.done()

    def _work(self) -> None:
        if not self.made.set_running_or_notify_cancel():
            return
        try:
            faults.point("overlap.begun")
            while self._left and not self._is_cancelled:
                # Somebody who waits is served by all threads, the training loop isn't disturbed.
                if self._is_awaited and not self._is_cancelled:
                    count = min(len(self._left), _AWAITED_BATCHES)
                    batches = [self._left.popleft() for _ in range(count)]
                    copy_many(*np.concatenate(batches, axis=1))
                else:
                    copy_many_here(*self._left.popleft())
            faults.point("overlap.copied")
            if not self._is_cancelled:
                self._validate()
        except Exception as error:
            self.made.set_exception(error)
        except BaseException as error:  # who waits would take it for an interrupt of the wait
            self.made.set_exception(DcpMemError(f"copies were interrupted: {error!r}"))
        else:
            self.made.set_result(None)


def _batches(columns: Columns) -> deque[Columns]:
    """Return copies, none of which is empty, in batches of `_BATCH` bytes and at most once more."""
    nbytes = columns[2]
    counts = -(-nbytes // _BATCH)
    starts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * _BATCH
    pieces = np.repeat(columns, counts, axis=1) + np.stack([starts, starts, -starts])
    pieces[2] = np.minimum(pieces[2], _BATCH)
    batch = (np.cumsum(pieces[2]) - pieces[2]) // _BATCH
    return deque(np.split(pieces, np.flatnonzero(np.diff(batch)) + 1, axis=1))


def _fingerprint(address: int, nbytes: int) -> int:
    """Return a checksum of a few hundred bytes, spread over so many from an address on."""
    data = np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
    return zlib.crc32(data[:: max(1, nbytes // _SAMPLES)].tobytes())


def _found(tensors: Sequence[torch.Tensor], address: Columns, nbytes: Columns) -> Columns:
    """Return for each piece of memory the number of a tensor that begins there and has it all.

    Returns -1 where no tensor does, and for empty pieces.
    """
    if not tensors:
        return np.full(len(address), -1)
    starts, sizes = addresses_of(tensors), sizes_of(tensors)
    order = np.lexsort((sizes, starts))  # of those that begin alike, the largest last
    number = order[np.searchsorted(starts[order], address, side="right") - 1]
    is_found = (starts[number] == address) & (nbytes > 0) & (nbytes <= sizes[number])
    return np.where(is_found, number, -1)


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
