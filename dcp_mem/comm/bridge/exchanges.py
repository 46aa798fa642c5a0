"""DCP's exchanges between the steps of a call: left out where they would tell the ranks nothing.

A `dcp.save` has four exchanges of objects, a `dcp.load` three. They keep the ranks together, and
take errors to all of them. Where dcp_mem plans, its own votes do both, so each step ends like this:

    it has worked                            all ranks know by a vote; nothing is exchanged
    it has failed, and all ranks know        DCP exchanges the errors, which are raised on all ranks
    it has failed, and others may not know   this rank raises alone; it has left the others, or its
                                             connection to them has broken
    the ranks are in different calls         each rank raises alone

In the last two cases an exchange would wait for ranks that aren't coming. The other ranks raise
what their next vote tells them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_mem.comm.agreement import is_of_one_call, was_voted_on
from dcp_mem.comm.bridge.errors import failures_by_rank, is_wrapped

DistWrapper = _DistWrapper
"""DCP's helper for one call, which exchanges objects between the ranks."""


class DcpExchanges:
    """The exchanges of one call of DCP, on this rank."""

    def __init__(self, wrapper: DistWrapper) -> None:
        """Take charge of a call's exchanges; leave them as they are for now.

        `wrapper`: what DCP exchanges objects with; it belongs to this call alone.
        """
        self._wrapper = wrapper

    def only_errors(self) -> None:
        """Have DCP exchange nothing but errors that all ranks know of.

        All ranks call this, and every step votes on how it ended.
        """
        if self._wrapper.use_dist:
            self._wrapper.__class__ = _OnlyErrors

    def everything(self) -> None:
        """Have DCP exchange what it would without dcp_mem. All ranks call this."""
        if self._wrapper.use_dist:
            _restore_coordinator(self._wrapper)
            self._wrapper.__class__ = DistWrapper


class _OnlyErrors(DistWrapper):
    """Exchanges errors that all ranks know of. Otherwise each rank acts as the coordinator."""

    _is_exchanging = False

    def gather_object(self, object: Any) -> list[Any] | None:  # noqa: A002
        """Return what each rank has gathered, as far as this rank knows, or exchange errors."""
        if self._exchanges(object):
            return super().gather_object(object)
        return self._known_results(object)

    def all_gather_object(self, object: Any) -> list[Any]:  # noqa: A002
        """Return what each rank has gathered, as far as this rank knows, or exchange errors."""
        if self._exchanges(object):
            return super().all_gather_object(object)
        return self._known_results(object)

    def _exchanges(self, object: Any) -> bool:  # noqa: A002
        """Return whether this is an error that all ranks exchange."""
        has_failed = is_wrapped(object)
        self._is_exchanging = has_failed and was_voted_on(object[0]) and is_of_one_call(object[0])
        if self._is_exchanging:
            _restore_coordinator(self)
        return self._is_exchanging

    def _known_results(self, object: Any) -> list[Any]:  # noqa: A002
        self.is_coordinator = True
        if not is_wrapped(object):
            return [object] * self.get_world_size()
        error, known = object[0], {self.rank: object}
        if isinstance(error, Exception):
            known = failures_by_rank(error, self.rank)
        return [known.get(rank) for rank in range(self.get_world_size())]

    def scatter_object(self, object_list: Any) -> Any:
        """Return this rank's part of what was made of the gathered objects."""
        if self._is_exchanging:
            return super().scatter_object(object_list)
        return object_list[self.rank]

    def broadcast_object(self, object: Any) -> Any:  # noqa: A002
        """Return what was made of the gathered objects."""
        return super().broadcast_object(object) if self._is_exchanging else object


def _restore_coordinator(wrapper: DistWrapper) -> None:
    wrapper.is_coordinator = wrapper.rank == wrapper.coordinator_rank
