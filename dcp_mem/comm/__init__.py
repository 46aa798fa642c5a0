"""Communication between the ranks of a save or load, over connections of dcp_mem's own.

It knows nothing of checkpoints: it imports `common`, `errors` and torch. Read its modules in this
order:

    collectives   what a set of ranks can do together: `Ranks`, `Channel`, and `SingleRank`
    agreement     collective attempts, whose errors reach all ranks
    relay         the tree along which the ranks' values travel, and the collectives over it
    addresses     where other ranks reach this one
    greetings     how a connection begins: proofs that both ends are of one job
    link          a connection of two ranks, and messages over it, for votes and for many bytes
    peers         links to those ranks that this rank votes with
    job_ranks     `Ranks` over these links; `ranks_of` finds or makes them
    transports    a channel of two ranks for many bytes, by whatever moves them
    control_line  small frames over a link, for what is plugged in
    transfer      checked transfer of many bytes over a channel
    notices       messages to all ranks at any time, through the store
    timed_store   calls to the store that end in time
    waits         for whom a call waits, and ranks that wait under different roots
    bridge        what is known of the insides of `dcp.save`, `dcp.async_save` and `dcp.load`
"""

from dcp_mem.comm.collectives import Ranks, SingleRank
from dcp_mem.comm.job_ranks import (
    has_groups,
    held_store,
    is_first_of_node,
    known_ranks,
    rank_in,
    ranks_of,
    refuse_missing_group,
    run_token,
    world_size,
)

__all__ = [
    "Ranks",
    "SingleRank",
    "has_groups",
    "held_store",
    "is_first_of_node",
    "known_ranks",
    "rank_in",
    "ranks_of",
    "refuse_missing_group",
    "run_token",
    "world_size",
]
