"""RESULTS.md and its pictures, drawn from recorded runs without measuring anything.

    headlines  which figures the page shows, and of which run
    bars       pictures of horizontal bars, as SVG
    text       the page

`draw()` also writes the details of each run again. Drawing twice gives the same files.
"""

from __future__ import annotations

from benchmarks.harness import runs
from benchmarks.page import bars, headlines, text

PICTURES = runs.BENCHMARKS / "pictures"
PAGE = runs.BENCHMARKS / "RESULTS.md"


def draw() -> None:
    """Write the page, its pictures and the details of all recorded runs."""
    recorded = runs.recorded()
    for run in recorded:
        run.write_markdown()
    found = [headlines.find(headline, recorded) for headline in headlines.HEADLINES]
    PICTURES.mkdir(exist_ok=True)
    for name, title in headlines.PICTURES.items():
        groups = [one for one in found if one is not None and one.picture == name]
        if groups:
            (PICTURES / f"{name}.svg").write_text(bars.picture(title, groups))
    PAGE.write_text(text.page([one for one in found if one is not None], recorded))
