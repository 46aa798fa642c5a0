"""Ranks that load from storage together: what several of them need is fetched once, and passed on.

Rank 0 learns what everybody needs and shares the fetching out. What one rank alone needs it fetches for itself. The rest
comes, batch by batch, into a window of tmpfs on each node, one half being filled while the ranks take from the other;
with `across_nodes`, from one node's window into the others'.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from dcp_mem.errors import DcpMemError
from dcp_mem.events import log
from dcp_mem.memory.copying import copy
from dcp_mem.memory.root import node_id
from dcp_mem.memory.window import Window, make_window, remove_window, room_for_window, window_path
from dcp_mem.policy.pieces import merged
from dcp_mem.policy.sharing import Need, Part, Shared, share_out
from dcp_mem.ranks import Ranks
from dcp_mem.reading.arrivals import Arrivals, view_of
from dcp_mem.reading.fetch import Fetcher, fetch_all, in_parallel

WINDOW = 256 << 20
"""Bytes of a half of a node's window, at most."""


@dataclass(frozen=True, slots=True)
class Company:
    """Who loads together. across_nodes: nodes pass on to each other what they have fetched."""

    ranks: Ranks
    memory_root: str
    across_nodes: bool = False


def fetch_together(prepare: Callable[[], tuple[Fetcher, Arrivals]], company: Company) -> None:
    """Fetch everything that is awaited, with the other ranks, who all call this.

    prepare: says what that is; it may raise. Raises what went wrong on this rank. Where it went wrong on another, this one
    returns too, with some items missing: who calls this hears from all ranks afterwards.
    """
    if company.ranks.size == 1:
        fetcher, arrivals = prepare()
        fetch_all(fetcher, arrivals, arrivals.extents())
        return
    failures, prepared = _Failures(company.ranks), list[tuple[Fetcher, Arrivals]]()
    with failures.collected():
        prepared.append(prepare())
    agreed = _agreed(prepared[0] if prepared else None, company, failures)
    if agreed is not None and prepared:
        _take_part(*prepared[0], company, *agreed, failures)
    failures.raise_own()


def _agreed(
    prepared: tuple[Fetcher, Arrivals] | None, company: Company, failures: _Failures
) -> tuple[Part, str] | None:
    """This rank's part, and the window's name; None where a rank can't take part."""
    needs = company.ranks.gather(_need(company, prepared[1]) if prepared is not None else None)
    parts: list[tuple[Part, str] | None] = [None] * company.ranks.size
    if prepared is not None and None not in needs:
        with failures.collected():
            everybodys = [need for need in needs if need is not None]
            token = uuid.uuid4().hex
            shared = share_out(everybodys, prepared[0].edges, across_nodes=company.across_nodes) if needs else []
            parts = [(part, token) for part in shared] or parts
    return company.ranks.scatter(parts)


def _take_part(
    fetcher: Fetcher, arrivals: Arrivals, company: Company, part: Part, token: str, failures: _Failures
) -> None:
    with failures.collected():
        fetch_all(fetcher, arrivals, part.alone)
    if not part.batches:
        return
    with _window(part, company.memory_root, token, failures) as window:
        if not failures.anywhere():
            _Batches(fetcher, arrivals, company.ranks, part, window, failures).run()


def _need(company: Company, arrivals: Arrivals) -> Need:
    extents = {file: merged(of_file) for file, of_file in arrivals.extents().items()}
    try:
        room = room_for_window(company.memory_root)
        return Need(node_id(company.memory_root), extents, min(WINDOW, room // 2))
    except (DcpMemError, OSError) as error:
        log.info("loading without the neighbours: %s", error)
        return Need(f"rank {company.ranks.rank}", extents, 0)


class _Failures:
    """What goes wrong on this rank is kept until the others have been told."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own: Exception | None = None

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the others wait for this rank: they hear of it in `anywhere`
            self._own = self._own or error

    def anywhere(self) -> bool:
        """Whether any rank has failed so far; all ranks ask together."""
        return self._ranks.all_reduce(self._own is not None, lambda one, other: one or other)

    def raise_own(self) -> None:
        if self._own is not None:
            raise self._own


@contextmanager
def _window(part: Part, root: str, token: str, failures: _Failures) -> Iterator[Window | None]:
    """The node's window; None where it needs none, or a rank has failed."""
    window: Window | None = None
    try:
        with failures.collected():
            if part.makes_window:
                make_window(root, token, 2 * part.window_nbytes)
        if not failures.anywhere() and part.window_nbytes:
            with failures.collected():
                window = Window(window_path(root, token), 2 * part.window_nbytes)
        failures.anywhere()  # by now everybody has opened it
    finally:
        if part.makes_window:
            remove_window(root, token)
    try:
        yield window
    finally:
        if window is not None:
            window.close()


class _Batches:
    """The batches of one load, on one rank."""

    def __init__(
        self,
        fetcher: Fetcher,
        arrivals: Arrivals,
        ranks: Ranks,
        part: Part,
        window: Window | None,
        failures: _Failures,
    ) -> None:
        self._fetcher, self._arrivals, self._ranks = fetcher, arrivals, ranks
        self._part, self._window, self._failures = part, window, failures

    def run(self) -> None:
        """Pass all batches, taking what this rank awaits, until one fails anywhere."""
        with ThreadPoolExecutor(1, thread_name_prefix="dcp_mem-batch") as ahead:
            fetching: Future[None] = ahead.submit(self._fetch, 0)
            for number in range(len(self._part.batches)):
                with self._failures.collected():
                    fetching.result()
                if self._failures.anywhere():
                    return
                if self._part.passes_on:
                    self._pass_on(number)
                    if self._failures.anywhere():
                        return
                if number + 1 < len(self._part.batches):  # into the other half, which nobody takes from any more
                    fetching = ahead.submit(self._fetch, number + 1)
                with self._failures.collected():
                    self._take(number)

    def _fetch(self, number: int) -> None:
        mine = [one for one in self._part.batches[number] if one.by == self._ranks.rank and one.origin is None]
        for _ in in_parallel(lambda one: self._fetcher.fetch(one.file, one.start, [self._view(number, one)]), mine):
            pass

    def _pass_on(self, number: int) -> None:
        """Send what this rank has fetched to other nodes, and receive what it is to bring from there."""
        mine = [one for one in self._part.batches[number] if one.by == self._ranks.rank]
        self._ranks.swap(
            [(rank, self._view(number, one)) for one in mine for rank in one.to],
            [(one.origin, self._view(number, one)) for one in mine if one.origin is not None],
        )
        with self._failures.collected():
            for one in mine:
                if one.origin is not None:
                    self._fetcher.check(one.file, one.start, [self._view(number, one)])

    def _take(self, number: int) -> None:
        for one in self._part.batches[number]:
            here = self._arrivals.within(one.file, one.start, one.stop)
            copy([move for arrival in here for move in arrival.moves(one.start, one.stop, self._address(number, one))])
            for arrival in here:
                if arrival.note(one.start, one.stop):
                    arrival.hand_on()

    def _address(self, number: int, one: Shared) -> int:
        assert self._window is not None
        return self._window.address + number % 2 * self._part.window_nbytes + one.place

    def _view(self, number: int, one: Shared) -> memoryview:
        return view_of(self._address(number, one), one.stop - one.start)
