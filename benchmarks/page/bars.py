"""Pictures of horizontal bars, as SVG on white, which reads well in light and dark pages."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from benchmarks.page.headlines import BARE, DCP_MEM, FLOOR, PEER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.page.headlines import Found

WIDTH = 860
LEFT, RIGHT = 250, 110
"""Room for labels, and for figures behind the longest bar."""
BAR, STEP = 18, 25
MARGIN = 24
COLOURS = {FLOOR: "#9ca3af", DCP_MEM: "#2563eb", PEER: "#f59e0b", BARE: "#d1d5db"}
LEGEND = {
    FLOOR: "floor: the least that it can cost",
    DCP_MEM: "dcp_mem",
    BARE: "bare client",
    PEER: "peer",
}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>text {{ font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2430 }}
.t {{ font-size: 16px; font-weight: 600 }} .b {{ font-weight: 600 }}
.s {{ font-size: 12px; fill: #4b5563 }}</style>
<rect x="1" y="1" width="{right}" height="{bottom}" rx="10" fill="#ffffff" stroke="#d1d5db"/>
"""


def picture(title: str, groups: Sequence[Found]) -> str:
    """Return an SVG: for each group a heading and its bars, on a scale of the group's own."""
    parts: list[str] = [_text(MARGIN, 34, title, "t")]
    kinds = [kind for kind in LEGEND if any(group.only(kind) for group in groups)]
    x = MARGIN
    for kind in kinds:
        parts += [_rect(x, 49, 12, 12, COLOURS[kind]), _text(x + 18, 60, LEGEND[kind], "s")]
        x += 44 + 6 * len(LEGEND[kind])
    y = 78
    for group in groups:
        bars = [bar for bar in group.bars if bar.in_picture]
        y += 22
        parts.append(
            f'<text x="{MARGIN}" y="{y}"><tspan class="b">{escape(group.what)}</tspan>'
            f'<tspan class="s" dx="8">{group.better}</tspan></text>\n'
        )
        y += 10
        longest = max(bar.figure.median for bar in bars)
        for bar in bars:
            width = max(2.0, bar.figure.median / longest * (WIDTH - LEFT - RIGHT - MARGIN))
            parts += [
                _text(LEFT - 10, y + 14, bar.label, "s", "end"),
                _rect(LEFT, y, round(width, 1), BAR, COLOURS[bar.kind]),
                _text(round(LEFT + width + 8, 1), y + 14, bar.figure.short),
            ]
            y += STEP
    note = "Each group of bars has a scale of its own. Medians, on two cores, without a GPU."
    y += 22
    parts.append(_text(MARGIN, y, note, "s"))
    height = y + 18
    head = HEAD.format(
        width=WIDTH, height=height, right=WIDTH - 2, bottom=height - 2, title=escape(title)
    )
    return "".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}"{name}{at}>{escape(text)}</text>\n'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}"/>\n'
