"""What differs between releases of megatron-core, and what we use of it that isn't public.

0.16    `common.pt` beside the shards holds the common state; strategies derive from base
        classes.
0.17    No base classes. Megatron hands a third argument, async_strategy, to a strategy's `load`
        and `async_save`: it names whose queue, Megatron's or nvidia-resiliency-ext's, an async
        save goes through. `save` and `load` take `verify_integrity`.
0.18    Megatron's own loads go without collectives.
0.19    The common state is an object among the shards, `common_state`, which is unpickled
        freely; a `common.pt` is still read, and then it counts. `load` takes `process_group`
        and has lost `common_strategy`; load strategies have `stream_ckpt_dequant`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import megatron.core
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from packaging.version import Version

from dcp_mem.common.releases import TESTED
from dcp_mem.errors import ConfigError

RELEASE = Version(megatron.core.__version__).release[:2]
OLDEST, END = (Version(one).release for one in TESTED["megatron-core"])
RANGE = "megatron-core>={},<{}".format(*TESTED["megatron-core"])


@contextmanager
def telling_the_release() -> Iterator[None]:
    """Name the release in an ImportError of the block, if the tests didn't run with it."""
    try:
        yield
    except ImportError as error:
        if OLDEST <= RELEASE < END:
            raise
        raise ImportError(
            f"megatron-core {megatron.core.__version__} lacks what dcp_mem needs ({error}): "
            f'install "{RANGE}"'
        ) from error


with telling_the_release():
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreLoadPlanner,
        TorchDistLoadShardedStrategy,
    )

OURS = "dcp_mem"
"""Our name as an async_strategy."""

COMMON_IS_SHARDED = RELEASE >= (0, 19)
"""Whether this release keeps the common state among the shards."""

MEGATRONS_COMMON: str = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Name of the common state among the shards, as a list with one dict."""


def check_release() -> None:
    """Refuse a megatron-core that can't work. Raises ConfigError."""
    if RELEASE < OLDEST:
        raise ConfigError(
            f"megatron-core {megatron.core.__version__} is too old: dcp_mem works with {RANGE}"
        )


def load_arguments(*args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of `dist_checkpointing.load` by name. Raises TypeError."""
    return inspect.signature(dist_checkpointing.load).bind(*args, **options).arguments


def done_request(async_strategy: str) -> AsyncRequest:
    """Return a request of an async save in which nothing is left to write.

    `async_strategy`: whose queue it goes through: OURS and "mcore" mean Megatron's, "nvrx" that of
    nvidia-resiliency-ext. Without that package it is Megatron's, though `save` asks for "nvrx" by
    default.
    """
    kind = AsyncRequest
    if hasattr(strategies, "get_async_strategy"):  # from 0.17 on
        with suppress(ImportError):
            kind = strategies.get_async_strategy(async_strategy)[1]["AsyncRequest"]
    return kind(None, (), [])


def name_our_strategy() -> None:
    """Have Megatron's `get_async_strategy` know OURS.

    Trainers ask it for the queue of their async saves by the name that they hand to `save`. Ours
    needs none, so it gets Megatron's, without nvidia-resiliency-ext.
    """
    original = getattr(strategies, "get_async_strategy", None)
    if original is None:  # 0.16
        return

    @functools.wraps(original)
    def known(async_strategy: str = "nvrx", *args: Any, **options: Any) -> Any:
        return original("mcore" if async_strategy == OURS else async_strategy, *args, **options)

    strategies.get_async_strategy = known


def load_planner(strategy: TorchDistLoadShardedStrategy, **options: Any) -> MCoreLoadPlanner:
    """Return a planner for a load strategy, which may say that FP8 tensors become others."""
    if hasattr(strategy, "stream_ckpt_dequant"):
        options["stream_ckpt_dequant"] = strategy.stream_ckpt_dequant
    return MCoreLoadPlanner(**options)
