"""The command line of storms; `python -m tests.storm --help`."""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

from tests.storm.damages import Damages
from tests.storm.flushes import Flushes
from tests.storm.kills import Kills
from tests.storm.nodes import Nodes
from tests.storm.storm import Storm, run
from tests.storm.writers import Writers
from tests.support.environment import hermetic_environment
from tests.support.processes.forks import preload
from tests.support.seeds import SEED

KINDS: dict[str, type[Storm]] = {
    "kills": Kills,
    "damages": Damages,
    "flushes": Flushes,
    "writers": Writers,
    "nodes": Nodes,
}


def main(arguments: list[str] | None = None) -> int:
    """Run a storm; return 1 if a round failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--start", type=int, default=0, help="number of the first round")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end about then")
    parser.add_argument("--loud", action="store_true", help="shows what all processes say")
    parser.add_argument("--keep", type=Path, help="copies what failed rounds leave, to look at")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is")
    preload("tests.storm.lives")
    with hermetic_environment():
        storm = KINDS[given.kind](Counter(), given.keep)
        failures = run(
            storm,
            given.kind,
            seed=given.seed,
            start=given.start,
            rounds=given.rounds,
            seconds=60 * given.minutes,
            is_loud=given.loud,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
