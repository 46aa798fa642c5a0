"""The ranks of one save or load talk to each other here, over a gloo group of dcp_mem's own.

`base.py` says what they can do, `tree.py` who passes on to whom, `passing.py` what goes along the tree, `gloo.py` how.
"""

from dcp_mem.ranks.base import Alone, Ranks
from dcp_mem.ranks.gloo import ranks_of, run_token, world_size

__all__ = ["Alone", "Ranks", "ranks_of", "run_token", "world_size"]
