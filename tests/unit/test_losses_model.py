"""Thousands of patterns of loss, in the pure parts: placement, parity, election, rebuild, reads.

A checkpoint is a few bytes for each rank. Nodes are lost and replaced, and the ranks come back on
what is left; what plans say is carried out on these bytes. A checkpoint can be loaded if and only
if its bytes can be had from what lies somewhere.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcp_mem.common.values import Segment
from dcp_mem.format import names
from dcp_mem.format.segments import Segments
from dcp_mem.policy.election import ElectedCheckpoint, FoundCheckpoint, elect
from dcp_mem.policy.order import Place, SaveNumber
from dcp_mem.policy.parity import Stripe
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.replicating.plan import FilePlan, file_plans
from dcp_mem.replicating.repair_plan import all_parity, lost_segments, missing_copies
from tests.support.sharing import Need, shared_out
from tests.support.variants import examples

Bytes = npt.NDArray[np.uint8]
_SAVE = "0123abcd"


@dataclass
class Node:
    """What a node's memory has, by file.

    stripes: what its parity is of. knows: the checkpoint has its manifest here.
    """

    name: str
    domain: str
    files: dict[str, Bytes] = field(default_factory=dict)
    stripes: dict[str, Stripe] = field(default_factory=dict)
    knows: bool = False


class Losses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.nodes: list[Node] = []
        self.segments = Segments.of(_SAVE, [])
        self.saved: list[Bytes] = []
        self.redundancy = Redundancy()
        self.may_be_lost = 0  # nodes

    def add_node(self, domain: str) -> Node:
        node = Node(f"node{next(self.numbers)}", domain)
        self.nodes.append(node)
        return node

    @initialize(
        per_node=st.lists(st.integers(1, 3), min_size=2, max_size=6),
        domains=st.lists(st.integers(0, 2), min_size=6, max_size=6),
        sizes=st.lists(st.integers(0, 40), min_size=18, max_size=18),
        redundancy=st.builds(Redundancy, copies=st.integers(0, 3))
        | st.builds(Redundancy, parity=st.integers(2, 5)),
    )
    def save(
        self, per_node: list[int], domains: list[int], sizes: list[int], redundancy: Redundancy
    ) -> None:
        ranks = [
            self.add_node(f"rack{domain}")
            for count, domain in zip(per_node, domains, strict=False)
            for _ in [0]
        ]
        placed = [node for node, count in zip(ranks, per_node, strict=True) for _ in range(count)]
        random = np.random.default_rng(sum(sizes))
        self.saved = [
            random.integers(0, 256, size, np.uint8) for size, _ in zip(sizes, placed, strict=False)
        ]
        self.segments = Segments.of(
            _SAVE,
            [
                Segment(
                    rank=rank,
                    node=node.name,
                    file=names.segment_file(rank, _SAVE),
                    nbytes=len(data),
                )
                for rank, (node, data) in enumerate(zip(placed, self.saved, strict=True))
            ],
        )
        for rank, node in enumerate(placed):
            node.files[names.segment_file(rank, _SAVE)], node.knows = self.saved[rank], True
        self.redundancy = redundancy.on(len(self.nodes))
        self.may_be_lost = _promised(self.redundancy)
        nodes, domain_of = _of_ranks(placed)
        made = set[FilePlan]()
        for rank in range(len(placed)):
            made |= set(
                file_plans(
                    rank,
                    nodes,
                    domain_of,
                    tuple(self.segments.nbytes),
                    self.redundancy,
                    self.segments,
                )
            )
        self.make(placed, list(made))

    def make(self, placed: Sequence[Node], makings: Sequence[FilePlan]) -> None:
        """Carry out what is planned; each sender has what it is to send."""
        for making in makings:
            data = np.zeros(making.nbytes, np.uint8)
            for part in making.parts:
                length = part.stop - part.start
                data[part.place : part.place + length] ^= placed[part.sender].files[part.file][
                    part.start : part.stop
                ]
            receiver = placed[making.receiver]
            assert making.file not in receiver.files
            receiver.files[making.file] = data
            if making.stripe is not None:
                receiver.stripes[making.file] = making.stripe

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.nodes.remove(data.draw(st.sampled_from(self.nodes), "node"))
        self.may_be_lost -= 1

    @precondition(lambda self: len(self.nodes) < 8)
    @rule(domain=st.integers(0, 2))
    def replace(self, domain: int) -> None:
        self.add_node(f"rack{domain}")

    @rule(per_node=st.lists(st.integers(1, 2), min_size=8, max_size=8), data=st.data())
    def restart(self, per_node: list[int], data: st.DataObject) -> None:
        """Ranks come back on what is left, load, and have redundancy made again."""
        order = data.draw(st.permutations(self.nodes), "order")
        placed = [node for node, count in zip(order, per_node, strict=False) for _ in range(count)]
        choice = self.elected(placed)
        assert (choice is not None) == self.can_be_had(self.nodes)
        if choice is None:
            return
        back = lost_segments([node.name for node in placed], self.segments, choice)
        assert {names.rank_of(making.file) for making in back} == choice.lost.keys()
        self.make(placed, back)
        for node in placed:
            node.knows = True
        choice = self.elected(placed)
        assert choice is not None
        assert not choice.lost
        self.load(placed, choice, data)
        self.make_redundant(placed, choice)

    def elected(self, placed: Sequence[Node]) -> ElectedCheckpoint | None:
        """What rank 0 takes, by what all ranks find."""
        plan = elect([self.found(node) for node in placed], [])
        return plan.choices[0] if plan.choices else None

    def found(self, node: Node) -> list[FoundCheckpoint]:
        if not node.knows:
            return []
        here = frozenset(
            names.rank_of(file) for file in node.files if names.SEGMENT.fullmatch(file)
        )
        ranks = {share.rank for one in node.stripes.values() for share in one.shares}
        sizes = {
            rank: nbytes
            for rank, nbytes in enumerate(self.segments.nbytes)
            if rank in ranks or not nbytes
        }
        return [
            FoundCheckpoint(
                name="step-1",
                save_id=_SAVE,
                place=Place(number=SaveNumber(1, 1)),
                count=len(self.segments),
                segments=here,
                stripes=tuple(node.stripes.items()),
                sizes=sizes,
                redundancy=self.redundancy,
            )
        ]

    def can_be_had(self, nodes: Sequence[Node]) -> bool:
        """Return whether each byte of each segment is held, or follows from a byte of parity."""
        files = {file for node in nodes for file in node.files}
        stripes = [stripe for node in nodes for stripe in node.stripes.values()]
        missing = [rank for rank, one in enumerate(self.segments) if one.file not in files]
        if not any(node.knows for node in nodes):
            return False
        there = set(range(len(self.segments))) - set(missing)
        return all(
            self.segments.nbytes[rank] == len(_determined(rank, stripes, there)) for rank in missing
        )

    def load(self, placed: Sequence[Node], choice: ElectedCheckpoint, data: st.DataObject) -> None:
        """Load some bytes on each rank; bytes that its node lacks come in once, from a holder."""
        holders = choice.holders
        wanted = data.draw(
            st.lists(
                st.tuples(st.integers(0, 40), st.integers(0, 40)),
                min_size=len(placed),
                max_size=len(placed),
            ),
            "needs",
        )
        needs = []
        for node, (low, high) in zip(placed, wanted, strict=True):
            extents = {
                segment.file: [(min(low, high), min(max(low, high), segment.nbytes))]
                for segment in self.segments
                if segment.file not in node.files
                and min(low, high) < min(max(low, high), segment.nbytes)
            }
            needs.append(Need(node.name, extents))
        everybody = range(len(placed))
        parts = shared_out(
            needs,
            lambda file: (
                tuple(everybody) if holders is None else holders.get(names.rank_of(file), ())
            ),
        )
        for rank, part in enumerate(parts):
            assert not part.alone  # nothing comes from storage
            arrived = {
                (one.file, byte)
                for one in part.pieces
                if one.origin is not None
                for byte in range(one.start, one.stop)
            }
            missing = {
                (file, byte)
                for file, extents in needs[rank].extents.items()
                for start, stop in extents
                for byte in range(start, stop)
            }
            assert missing <= arrived
            for one in part.pieces:
                assert one.origin is not None or one.file in placed[rank].files

    def make_redundant(self, placed: Sequence[Node], choice: ElectedCheckpoint) -> None:
        nodes, domains = _of_ranks(placed)
        everybody = {rank: tuple(range(len(placed))) for rank in range(len(self.segments))}
        holders = everybody if choice.holders is None else choice.holders
        redundancy = self.redundancy.on(len(set(nodes)))
        if redundancy.parity:
            planned = all_parity(nodes, domains, self.segments, holders, redundancy.parity)
            makings = [one for one in planned if one.file not in placed[one.receiver].files]
            self.make(placed, makings)
            for node in self.nodes:
                keep = {one.file for one in planned if placed[one.receiver] is node}
                for file in node.stripes.keys() - keep:
                    del node.stripes[file], node.files[file]
        else:
            self.make(
                placed, missing_copies(nodes, domains, self.segments, holders, redundancy.copies)
            )
        self.redundancy, self.may_be_lost = redundancy or self.redundancy, _promised(redundancy)

    @invariant()
    def all_that_has_a_name_is_right(self) -> None:
        for node in self.nodes:
            for file, data in node.files.items():
                if names.SEGMENT.fullmatch(file):
                    assert np.array_equal(data, self.saved[names.rank_of(file)])

    @invariant()
    def what_redundancy_promises_holds(self) -> None:
        """As many nodes may be lost, together or in turn, as there are copies; with parity one."""
        if self.may_be_lost >= 0:
            assert self.elected(self.nodes) is not None
        for node in self.nodes if self.may_be_lost > 0 else ():
            assert self.elected([other for other in self.nodes if other is not node]) is not None


def _of_ranks(placed: Sequence[Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(node.name for node in placed), tuple(node.domain for node in placed)


def _promised(redundancy: Redundancy) -> int:
    """How many nodes may be lost."""
    return 1 if redundancy.parity else redundancy.copies


def _determined(rank: int, stripes: Sequence[Stripe], there: set[int]) -> set[int]:
    """The bytes of a segment that are the only unknown of a byte of parity."""
    found = set()
    for stripe in stripes:
        for place in range(stripe.nbytes):
            of_byte: Mapping[int, int] = {
                share.rank: share.start + place - share.place
                for share in stripe.shares
                if share.place <= place < share.place + share.stop - share.start
            }
            if rank in of_byte and all(other in there for other in of_byte if other != rank):
                found.add(of_byte[rank])
    return found


TestLosses = Losses.TestCase
TestLosses.settings = settings(max_examples=examples(300), stateful_step_count=12, deadline=None)
