"""The segment layouts of recent plans.

The same plan gets the same layout, so that its slots need no new frames.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence

from dcp_mem.common.value_class import value_class
from dcp_mem.format.frames import QUANTISED, Spec, Specs, frame_pieces, frames_key, lay_out
from dcp_mem.format.layout import Layout
from dcp_mem.memory import pinning
from dcp_mem.memory.slot import Slot

_LAYOUTS_KEPT = 16


@value_class(eq=False, kw_only=True)
class PlanLayout:
    """The layout of one rank's plan."""

    expected: Specs  # dtypes and shapes as the plan has them
    # dtypes and shapes as the tensors really have them; None for a tensor without a plain dense
    # payload, which is pickled behind the layout
    dense: Sequence[Spec | None]
    layout: Layout
    described: Layout  # the layout as the catalog has it, for readers that go by the plan
    # Names the bytes around the payloads (heads and tails of `torch.save`). Other shapes or dtypes
    # may well lie at the same offsets.
    frames: str
    is_plain: bool  # whether `dense` and `expected` agree for every tensor


class Layouts:
    """The layouts of the last few plans; any thread may ask for one."""

    def __init__(self) -> None:
        self._layouts: OrderedDict[int, PlanLayout] = OrderedDict()
        self._guard = threading.Lock()  # not held while plans are compared, or laid out

    def of(self, expected: Specs) -> PlanLayout:
        """Return the layout of a plan with these dtypes and shapes: a known one, or a new one."""
        for known in reversed(self._known()):
            if known.expected == expected:
                with self._guard:
                    if id(known) in self._layouts:  # another thread may just have replaced it
                        self._layouts.move_to_end(id(known))
                return known
        return self.learn(
            expected, [spec if spec[0] not in QUANTISED else None for spec in expected]
        )

    def learn(self, expected: Specs, dense: Sequence[Spec | None]) -> PlanLayout:
        """Lay a plan out by what its tensors turned out to be, and keep that for this plan.

        `expected`: dtypes and shapes as the plan has them. `dense`: as the tensors have them; None
        for one without a plain dense payload.
        """
        specs = [spec for spec in dense if spec is not None]
        layout = lay_out(specs)
        is_as_planned = [
            spec == plan for spec, plan in zip(dense, expected, strict=True) if spec is not None
        ]
        replaced = [id(known) for known in self._known() if known.expected == expected]
        learnt = PlanLayout(
            expected=expected,
            dense=dense,
            layout=layout,
            described=layout.with_payloads_where(is_as_planned),
            frames=frames_key(specs),
            is_plain=list(expected) == dense,
        )
        with self._guard:
            for key in replaced:
                self._layouts.pop(key, None)
            self._layouts[id(learnt)] = learnt
            while len(self._layouts) > _LAYOUTS_KEPT:
                self._layouts.popitem(last=False)
        return learnt

    def _known(self) -> list[PlanLayout]:
        with self._guard:
            return list(self._layouts.values())


def put_frames(slot: Slot, plan_layout: PlanLayout) -> None:
    """Write the bytes around the payloads into a mapped slot, unless they are there already."""
    if slot.frames != plan_layout.frames:
        slot.frames = ""  # a slot that is only half done must not pass for one that is
        specs = [spec for spec in plan_layout.dense if spec is not None]
        address = slot.address
        for offset, piece in frame_pieces(plan_layout.layout, specs):
            ctypes.memmove(address + offset, piece, len(piece))
        slot.frames = plan_layout.frames
    pinning.pin(slot)
