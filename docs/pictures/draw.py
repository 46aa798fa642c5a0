"""Draw the pictures of docs/: `python docs/pictures/draw.py` writes the SVG files."""

from __future__ import annotations

from html import escape
from pathlib import Path

INK, FAINT, PAPER = "#1f2430", "#6b7280", "#ffffff"
TRAINER, MEMORY, AGENT, STORAGE, LOST = "#dbeafe", "#dcfce7", "#fef3c7", "#ede9fe", "#fee2e2"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>text {{ font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2430 }} \
.b {{ font-weight: 600 }}
.s {{ font-size: 12px; fill: #4b5563 }} \
.m {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px }}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" \
markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 8 4 0 8z" fill="#1f2430"/></marker></defs>
<rect x="1" y="1" width="{right}" height="{bottom}" rx="10" fill="#ffffff" stroke="#d1d5db"/>
"""


class Picture:
    """An SVG of boxes, arrows and words. Its white ground suits light and dark pages alike."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            HEAD.format(
                title=escape(title), width=width, height=height, right=width - 2, bottom=height - 2
            )
        ]

    def words(self, x: float, y: float, text: str, kind: str = "s", anchor: str = "middle") -> None:
        self._parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>\n'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        title: str,
        *lines: str,
        dashed: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}"'
            f' stroke="{FAINT}"{dash}/>\n'
        )
        top = y + (h - 18 * len(lines)) / 2 + 5
        self.words(x + w / 2, top, title, "b")
        for number, line in enumerate(lines, 1):
            self.words(x + w / 2, top + 18 * number, line)

    def area(self, x: float, y: float, w: float, h: float, title: str) -> None:
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8"'
            ' fill="#f9fafb" stroke="#d1d5db"/>\n'
        )
        self.words(x + 12, y + 20, title, "b", "start")

    def arrow(
        self, *points: tuple[float, float], label: str = "", at: tuple[float, float] | None = None
    ) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"'
            ' marker-end="url(#tip)"/>\n'
        )
        if label:
            (x1, y1), (x2, y2) = points[0], points[-1]
            x, y = at or ((x1 + x2) / 2, (y1 + y2) / 2 - 7)
            self.words(x, y, label)

    def text(self) -> str:
        return "".join([*self._parts, "</svg>\n"])


def run() -> Picture:
    picture = Picture("A run, its crash, and its recovery", 940, 316)
    for top, name in ((64, "training"), (142, "node memory"), (226, "storage")):
        picture.words(20, top + 5, name, "b", "start")
    picture.arrow((142, 64), (668, 64))
    for number in range(6):
        x, step = 142 + number * 86, number * 10
        picture.words(x + 34, 40, f"step {step}")
        picture.arrow((x + 34, 64), (x + 34, 120))
        picture.box(x, 122, 68, 36, MEMORY, f"{step}", dashed=number < 4)
        if number in (0, 4):
            picture.arrow((x + 34, 158), (x + 54, 206))
            picture.box(x + 20, 208, 68, 36, STORAGE, f"{step}")
    picture.box(670, 46, 62, 36, LOST, "killed")
    picture.box(780, 46, 140, 36, TRAINER, "goes on at 51")
    picture.arrow((640, 140), (850, 140), (850, 84))
    picture.words(744, 132, "newest whole one")
    picture.arrow(
        (574, 226), (886, 226), (886, 84), label="memory is gone: from here", at=(728, 218)
    )
    picture.words(
        470,
        276,
        "Every tenth step is copied into node memory, for about the time of a memcpy;"
        " the newest two stay there.",
    )
    picture.words(470, 294, "An agent puts some of them on storage, behind the training loop.")
    return picture


def life() -> Picture:
    picture = Picture("Life of a checkpoint", 940, 250)
    states = (
        ("STAGING", "payloads are copied", "into slots", TRAINER),
        ("COMPLETE", "manifest renamed:", "memory can restore it", MEMORY),
        ("REPLICATED", "copies or parity", "lie on other nodes", MEMORY),
        ("DURABLE", ".metadata is put:", "storage can restore it", STORAGE),
    )
    for number, (name, first, second, fill) in enumerate(states):
        x = 20 + number * 232
        picture.box(x, 50, 184, 76, fill, name, first, second)
        if number:
            picture.arrow((x - 48, 88), (x, 88))
    picture.words(244, 40, "dcp.save returns here")
    picture.arrow((244, 46), (244, 70))
    picture.words(20, 148, "a kill here leaves the last", anchor="start")
    picture.words(20, 164, "COMPLETE checkpoint", anchor="start")
    picture.arrow(
        (344, 126), (344, 160), (808, 160), (808, 128), label="without redundancy", at=(576, 154)
    )
    picture.box(252, 190, 184, 44, LOST, "EVICTED", dashed=True)
    picture.words(448, 217, "newer ones stay (keep_memory=)", anchor="start")
    picture.arrow((300, 126), (300, 188))
    picture.box(716, 190, 184, 44, LOST, "DELETED", dashed=True)
    picture.arrow((860, 126), (860, 188), label="keep_storage=", at=(806, 180))
    return picture


def where() -> Picture:
    picture = Picture("Where bytes lie", 940, 330)
    picture.area(16, 16, 330, 240, "node A")
    picture.area(366, 16, 330, 240, "node B")
    for left, first in ((16, 0), (366, 2)):
        for number in range(2):
            picture.box(left + 16 + number * 154, 48, 144, 40, TRAINER, f"rank {first + number}")
            picture.arrow((left + 88 + number * 154, 88), (left + 88 + number * 154, 116))
        picture.box(
            left + 16,
            118,
            298,
            66,
            MEMORY,
            "tmpfs: step-100/",
            f"segments of ranks {first} and {first + 1}, manifest",
            ".slots/: recycled, mapped",
        )
        picture.box(left + 86, 208, 158, 36, AGENT, "agent")
        picture.arrow((left + 165, 184), (left + 165, 206))
    picture.arrow((332, 140), (382, 140))
    picture.arrow((382, 162), (332, 162))
    picture.words(356, 130, "copies")
    picture.box(
        726,
        60,
        198,
        150,
        STORAGE,
        "storage: step-100/",
        "__0_0-….distcp … __3_0",
        ".dcp_mem/ manifests,",
        "catalog",
        ".metadata, last",
    )
    picture.arrow(
        (260, 226),
        (340, 276),
        (825, 276),
        (825, 212),
        label="each node's agent uploads its ranks' segments",
        at=(580, 294),
    )
    picture.arrow((610, 226), (690, 226), (690, 180), (724, 180))
    picture.words(
        470,
        318,
        "A segment is a DCP file, the same bytes in tmpfs and on storage;"
        " torch's own readers load it from either.",
    )
    return picture


def redundancy() -> Picture:
    picture = Picture("Copies and parity", 940, 330)
    picture.area(16, 16, 440, 298, "replicas=1: a copy of each segment elsewhere")
    for number, name in enumerate("ABC"):
        x = 34 + number * 142
        picture.words(x + 60, 66, f"node {name}", "b")
        picture.box(x, 78, 120, 44, MEMORY, name, "its own")
        picture.box(x, 132, 120, 44, AGENT, "CAB"[number], "a copy")
    picture.words(236, 206, "memory: two checkpoints' worth; if B is lost:")
    picture.box(34, 222, 120, 44, MEMORY, "A", "and C's copy")
    picture.box(176, 222, 120, 44, LOST, "B", "lost", dashed=True)
    picture.box(318, 222, 120, 44, MEMORY, "C", "and B's copy")
    picture.words(236, 292, "B's bytes are read from C; C's own copy is on A")
    picture.area(476, 16, 448, 298, "redundancy=parity(2): groups of three nodes")
    pieces = (("A", "A1, A2"), ("B", "B1, B2"), ("C", "C1, C2"))
    sums = ("B1 xor C1", "A1 xor C2", "A2 xor B2")
    for number, (name, halves) in enumerate(pieces):
        x = 494 + number * 144
        picture.words(x + 60, 66, f"node {name}", "b")
        picture.box(x, 78, 124, 44, MEMORY, name, halves)
        picture.box(x, 132, 124, 30, AGENT, sums[number])
    picture.words(700, 206, "memory: one and a half checkpoints' worth; if B is lost:")
    picture.box(494, 222, 196, 44, MEMORY, "B1 = (B1 xor C1) xor C1", "A sends, C sends")
    picture.box(708, 222, 198, 44, MEMORY, "B2 = (A2 xor B2) xor A2", "C sends, A sends")
    picture.words(700, 292, "B's segment is rebuilt, checked, then read")
    return picture


def recovery() -> Picture:
    picture = Picture("Which checkpoint is loaded, and from where", 940, 330)
    picture.box(
        20,
        30,
        196,
        70,
        TRAINER,
        "survey",
        "each rank: what its node has;",
        "rank 0: what storage has",
    )
    picture.arrow((216, 65), (262, 65))
    picture.box(
        264, 30, 196, 70, TRAINER, "elect", "newest first: is there", "a source for every segment?"
    )
    picture.arrow((460, 65), (506, 65), label="yes", at=(483, 58))
    picture.box(
        508, 30, 196, 70, TRAINER, "adopt", "one plan for all ranks,", "before any byte moves"
    )
    picture.arrow((704, 65), (750, 65))
    picture.box(752, 30, 168, 70, TRAINER, "load", "the same checkpoint", "on every rank")
    picture.arrow((362, 100), (362, 128))
    picture.words(
        372, 120, "no: the next older one; report().passed_over has the reason", anchor="start"
    )
    picture.box(264, 130, 196, 44, LOST, "none is left", "NoRecoverableCheckpoint")
    picture.words(470, 210, "each segment from the nearest place that has it", "b")
    places = (
        ("own memory", "straight into the tensors", MEMORY),
        ("other nodes' memory", "the bytes that are needed", MEMORY),
        ("rebuilt from parity", "then memory like any other", AGENT),
        ("storage", "once for each node", STORAGE),
    )
    for number, (title, line, fill) in enumerate(places):
        x = 20 + number * 230
        picture.box(x, 226, 200, 56, fill, title, line)
        if number:
            picture.arrow((x - 30, 254), (x, 254))
    picture.words(
        470, 310, "A segment that turns out damaged is left out, and all ranks survey again."
    )
    return picture


def commit() -> Picture:
    picture = Picture("How a checkpoint becomes durable", 940, 300)
    steps = (
        ("1 segments", "every node's agent,", "names of this attempt"),
        ("2 node manifest", "files, sizes, checksums,", "once its segments are up"),
        ("3 wait", "until every node's", "manifest is there"),
        ("4 catalog, manifest", "what the checkpoint", "consists of"),
        ("5 .metadata", "one atomic put:", "THE COMMIT"),
    )
    for number, (title, first, second) in enumerate(steps):
        x = 20 + number * 184
        fill = STORAGE if number == 4 else AGENT
        picture.box(x, 46, 164, 76, fill, title, first, second)
        if number:
            picture.arrow((x - 20, 84), (x, 84))
    picture.words(204, 34, "each node")
    picture.words(664, 34, "one node")
    picture.arrow(
        (20, 160),
        (754, 160),
        label="killed here: readers see no checkpoint; the next agent continues",
        at=(388, 180),
    )
    picture.arrow((756, 160), (920, 160), label="a checkpoint", at=(838, 180))
    picture.box(
        20,
        206,
        430,
        70,
        PAPER,
        "no answer to the put?",
        "the agent reads .metadata back:",
        "if its own save id is there, the commit was made",
    )
    picture.box(
        488,
        206,
        432,
        70,
        PAPER,
        "a node is lost before 2?",
        "with copies: their holders put its segments and manifest,",
        "and commit if the lost node was the committer",
    )
    return picture


PICTURES = {
    "run": run,
    "life": life,
    "where": where,
    "redundancy": redundancy,
    "recovery": recovery,
    "commit": commit,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw().text())
