"""The ledger of unstable tests, `.ci/unstable.txt`: tests that failed in a run and passed alone.

count: print how many tests failed in the last run of pytest. note: take those that failed before
they were run alone into the ledger, and fail where one of them stands there already.
"""

import datetime as dt
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / ".ci" / "unstable.txt"
CACHE = ROOT / ".pytest_cache"


def _tests(path: Path) -> list[str]:
    return sorted(json.loads(path.read_text())) if path.exists() else []


def known() -> set[str]:
    """Return the ids of the tests in the ledger."""
    lines = LEDGER.read_text().splitlines() if LEDGER.exists() else []
    return {line.partition(" ")[2] for line in lines if line and not line.startswith("#")}


def count() -> int:
    """Print how many tests, or files that can't be collected, failed in the last run."""
    print(len(_tests(CACHE / "v" / "cache" / "lastfailed")))
    return 0


def note() -> int:
    """Enter the tests that passed alone; return 1 where one of them was there before."""
    unstable, before = _tests(CACHE / "unstable"), known()
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    with LEDGER.open("a") as ledger:
        ledger.writelines(f"{today} {test}\n" for test in unstable if test not in before)
    print(
        "UNSTABLE: failed among the others and passed alone; commit .ci/unstable.txt, and mend it"
    )
    for test in unstable:
        print(f"{test}{' (AGAIN: this fails the run)' * (test in before)}")
    return int(not before.isdisjoint(unstable))


if __name__ == "__main__":
    sys.exit({"count": count, "note": note}[sys.argv[1]]())
