"""The manager with which a training loop saves, restores, lists and deletes checkpoints.

Read `checkpoint_manager.py` first. `options.py` has its options, `saved.py` what its `save`
returns; `pace.py` says when to save, `behind.py` what has failed behind training, `removal.py`
deletes and rejects on all ranks. `preemption.py` handles the signals that end a job,
`crash_loop.py` counts resumes that soon end in a crash, `replica_check.py` compares what several
ranks hold, `tracker.py` is the interface of trackers, and `feed.py` tells them. The room
may import everything but integrations and the command line.
"""

from dcp_mem.manager.checkpoint_manager import CheckpointManager
from dcp_mem.manager.saved import Saved, name_of, step_of

__all__ = ["CheckpointManager", "Saved", "name_of", "step_of"]
