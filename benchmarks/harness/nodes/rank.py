"""A rank on a node: `python -m benchmarks.harness.nodes.rank DIRECTORY`, as `jobs` starts it."""

from __future__ import annotations

import pickle
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.harness.processes import Rank

JOB = "job"
ANSWER = "answer-{}"
"""Files in the job's directory: what to do, and what each rank returned."""


def main(directory: Path) -> int:
    """Join the other ranks, call the job's function, and leave what it returns."""
    warnings.simplefilter("ignore")
    measure, spec, patience = pickle.loads((directory / JOB).read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    dist.barrier()
    torch.ones(1 << 22).clone()  # the pool of threads is up before anything is timed
    rank = Rank(dist.get_rank(), dist.get_world_size(), torch.get_num_threads())
    try:
        answer = measure(rank, spec)
    except Exception:
        traceback.print_exc()
        return 1
    (directory / ANSWER.format(rank.rank)).write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
