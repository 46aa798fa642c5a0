"""All state of a training loop, as one entry of a state dict.

- `state`: `TrainState`.
- `optimizers`: optimizers' state by the names of parameters, and that of fresh ones.
- `values`: values of any shape, with their tensors apart.
- `generators`: random number generators.
"""

from dcp_mem.train_state.generators import rng_state, set_rng_state
from dcp_mem.train_state.state import TrainState
from dcp_mem.train_state.values import has_tensors

__all__ = ["TrainState", "has_tensors", "rng_state", "set_rng_state"]
