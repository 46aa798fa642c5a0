"""The seed of random tests: the same in every run, unless `.ci/explore` chooses another."""

import os
from random import Random

VARIABLE = "DCP_MEM_SEED"
FIXED = 20261122

SEED = int(os.environ.get(VARIABLE, FIXED))
"""Read before the tests' environment is cleared of DCP_MEM_ variables."""

IS_EXPLORING = VARIABLE in os.environ


def seeded() -> Random:
    """Return a random generator for one test; print how to replay it, for when the test fails."""
    print(f"replay with {VARIABLE}={SEED}")
    return Random(SEED)
