"""Ranks that load together: what several of them need of storage is fetched once, and what a node has in memory is passed on.

Rank 0 learns what everybody needs and shares the work out. What one rank alone needs of storage it fetches for itself. The
rest comes, batch by batch, into a window of tmpfs on each node, one half being filled while the ranks take from the other:
from storage, with `across_nodes` from one node's window into the others', and from the memory of a node that has it. What only
one rank of a node needs of others' memory is sent to that rank by itself (`passing.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcp_mem import faults
from dcp_mem.errors import DcpMemError, MemoryUnavailable, RankFailed
from dcp_mem.events import log
from dcp_mem.format import names
from dcp_mem.format.checksums import checksum
from dcp_mem.memory.root import node_id
from dcp_mem.memory.views import view_of
from dcp_mem.memory.window import Window, make_window, remove_window, room_for_window, window_path
from dcp_mem.policy.pieces import merged, with_large_apart
from dcp_mem.policy.sharing import Need, NoRoom, Part, Shared, share_out
from dcp_mem.ranks import Ranks
from dcp_mem.reading.arrivals import Arrivals
from dcp_mem.reading.fetch import Fetcher, fetch_all, in_parallel
from dcp_mem.reading.passing import passing
from dcp_mem.sources.memory import MemorySource

_Checked = tuple[memoryview, int]
"""Bytes that are to be sent, and their CRC32C."""
_CRC = 4
WINDOW = 256 << 20
"""Bytes of a half of a node's window, at most."""


@dataclass(frozen=True, slots=True)
class Company:
    """Who loads together. across_nodes: nodes pass on to each other what they have fetched.

    memory: what this rank's node has of the checkpoint, for others. holders: of each segment, the ranks whose nodes have it.
    """

    ranks: Ranks
    memory_root: str
    across_nodes: bool = False
    memory: MemorySource | None = None
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def holding(self, file: str) -> Sequence[int]:
        return self.holders.get(names.rank_of(file), ())


def fetch_together(
    prepare: Callable[[], tuple[Fetcher, Arrivals]], company: Company, alongside: Callable[[], None] = lambda: None
) -> None:
    """Fetch everything that is awaited, with the other ranks, who all call this.

    prepare: says what that is; it may raise. alongside: what this rank does by itself meanwhile. Raises what went wrong on this
    rank. Where it went wrong on another, this one returns too, with some items missing: who calls this hears from all ranks
    afterwards.
    """
    if company.ranks.size == 1:
        fetcher, arrivals = prepare()
        alongside()
        fetch_all(fetcher, arrivals, arrivals.extents())
        return
    failures, prepared = _Failures(company.ranks), list[tuple[Fetcher, Arrivals]]()
    with failures.collected():
        prepared.append(prepare())
    with ThreadPoolExecutor(1, thread_name_prefix="dcp_mem-alongside") as aside:
        doing = aside.submit(alongside)
        agreed = _agreed(prepared[0] if prepared else None, company, failures)
        if agreed is not None and prepared:
            _take_part(*prepared[0], company, *agreed, failures)
        with failures.collected():
            doing.result()
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
            shared = _shared_out(everybodys, prepared[0].edges, company) if needs else []
            parts = [(part, token) for part in shared] or parts
    return company.ranks.scatter(parts)


def _shared_out(needs: Sequence[Need], edges: Callable[[str], Sequence[int] | None], company: Company) -> list[Part]:
    try:
        return share_out(needs, edges, across_nodes=company.across_nodes, holders=company.holding)
    except NoRoom as error:
        raise MemoryUnavailable(
            company.memory_root, f"node {error.node} has no room for {error.nbytes} bytes on their way from other nodes"
        ) from None


def _take_part(
    fetcher: Fetcher, arrivals: Arrivals, company: Company, part: Part, token: str, failures: _Failures
) -> None:
    with passing(company.ranks, token, part, company.memory, arrivals) as passed:
        with failures.collected():
            fetch_all(fetcher, arrivals, part.alone)
        if part.batches:
            with _window(part, company.memory_root, token, failures) as window:
                if not failures.anywhere():
                    _Batches(fetcher, arrivals, company, part, window, failures).run()
    with failures.collected():
        passed.raise_own()
    if part.is_passing and not failures.anywhere():
        with failures.collected():  # a line that broke because its other end had failed is that end's affair
            passed.raise_broken()


def _need(company: Company, arrivals: Arrivals) -> Need:
    extents = {
        file: with_large_apart(of_file) if company.holding(file) else merged(of_file)
        for file, of_file in arrivals.extents().items()
    }
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
        company: Company,
        part: Part,
        window: Window | None,
        failures: _Failures,
    ) -> None:
        self._fetcher, self._arrivals = fetcher, arrivals
        self._ranks, self._memory = company.ranks, company.memory
        self._part, self._window, self._failures = part, window, failures

    def run(self) -> None:
        """Pass all batches, taking what this rank awaits, until one fails anywhere.

        While a batch is on its way between nodes, what is to be sent of the next one is checked, and what came with the one
        before is taken. A half of a window is filled again only when all ranks have taken what was in it: before a rank
        says how a batch went, it has taken the one before.
        """
        count = len(self._part.batches)
        with ThreadPoolExecutor(3, thread_name_prefix="dcp_mem-batch") as aside:
            fetching, checking = aside.submit(self._fetch, 0), aside.submit(self._held, 0)
            taking: Future[None] | None = None
            for number in range(count):
                held: Mapping[Shared, _Checked] = {}
                with self._failures.collected():
                    fetching.result()
                    held = checking.result()
                if not self._part.passes_on:
                    self._wait_for(taking)
                if self._failures.anywhere():
                    return
                if number + 1 < count:
                    checking = aside.submit(self._held, number + 1)
                if self._part.passes_on:
                    self._pass_on(number, held)
                    self._wait_for(taking)
                    if self._failures.anywhere():
                        return
                faults.point("load.batch")
                if number + 1 < count:
                    fetching = aside.submit(self._fetch, number + 1)
                taking = aside.submit(self._take, number)
            self._wait_for(taking)

    def _wait_for(self, taking: Future[None] | None) -> None:
        with self._failures.collected():
            if taking is not None:
                taking.result()

    def _mine(self, number: int) -> list[Shared]:
        return [one for one in self._part.batches[number] if one.by == self._ranks.rank]

    def _fetch(self, number: int) -> None:
        work = [one for one in self._mine(number) if one.origin is None and one.comes_in]
        for _ in in_parallel(lambda one: self._fetcher.fetch(one.file, one.start, [self._view(number, one)]), work):
            pass

    def _held(self, number: int) -> Mapping[Shared, _Checked]:
        """What this rank sends of its node's memory, held against the checksums there, where there are any."""
        work = [one for one in self._mine(number) if not one.comes_in]
        return dict(in_parallel(self._checked, work))

    def _checked(self, one: Shared) -> tuple[Shared, _Checked]:
        assert self._memory is not None
        return one, self._memory.checked(one.file, one.start, one.stop)

    def _summed(self, number: int, one: Shared) -> _Checked:
        view = self._view(number, one)
        return view, checksum(view)

    def _pass_on(self, number: int, held: Mapping[Shared, _Checked]) -> None:
        """Send what this rank has fetched, or has in memory, to other nodes, and receive what it is to bring from there.

        A checksum follows each piece: what lies in memory has no other that all could go by.
        """
        mine = self._mine(number)
        outgoing = [(one, *(held.get(one) or self._summed(number, one))) for one in mine if one.to]
        incoming = [(one, self._view(number, one), bytearray(_CRC)) for one in mine if one.origin is not None]
        sent = [
            (rank, data)
            for one, view, crc in outgoing
            for rank in one.to
            for data in (view, memoryview(bytearray(crc.to_bytes(_CRC, "little"))))
        ]
        received = [(one.origin, data) for one, view, crc in incoming for data in (view, memoryview(crc))]
        self._ranks.swap(sent, [(rank, data) for rank, data in received if rank is not None])
        with self._failures.collected():
            for _ in in_parallel(self._check_arrived, incoming):
                pass

    def _check_arrived(self, arrived: tuple[Shared, memoryview, bytearray]) -> None:
        one, view, crc = arrived
        if checksum(view) != int.from_bytes(crc, "little"):
            raise RankFailed(f"sending {one.file}", [(one.origin or 0, "its bytes changed on their way between nodes")])
        if not one.is_held:
            self._fetcher.check(one.file, one.start, [view])

    def _take(self, number: int) -> None:
        for one in self._part.batches[number]:
            if one.comes_in:
                self._arrivals.take(one.file, one.start, one.stop, self._address(number, one))

    def _address(self, number: int, one: Shared) -> int:
        assert self._window is not None
        return self._window.address + number % 2 * self._part.window_nbytes + one.place

    def _view(self, number: int, one: Shared) -> memoryview:
        return view_of(self._address(number, one), one.stop - one.start)
