"""All state of a training loop, as one entry of a state dict.

- `state`: `TrainState`, and random number generators.
- `optimizers`: optimizers' state by the names of parameters, and that of fresh ones.
- `values`: values of any shape, with their tensors apart.
"""

from dcp_mem.train_state.state import TrainState, rng_state, set_rng_state

__all__ = ["TrainState", "rng_state", "set_rng_state"]
