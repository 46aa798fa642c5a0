"""A node's memory: the job's directory on tmpfs, what lies in it, and copies into and out of it.

This room may import format, policy and what lies below them. Read its modules in this order: `root`
(the memory root and its checks), `job` (one job's directory: what completes, what leaves),
`checkpoint` (one complete checkpoint as this node has it), `records`, `recoveries` and `exports`
(what is written down of checkpoints and exports), `recycling` (segments become free slots),
`checksumming` (checksums of complete checkpoints, and values that aren't finite), `stock_metadata`
(`.metadata` for torch's own readers), `catalogs`, `locks` (leases and the job's lock), `slot` (one
file) and `slots` (those of a process), `mapping`, `views` (files as memory), `copying` (payload
bytes), `checked_reads` (the same, held against checksums), `pinning` (CUDA, NUMA nodes), `window`
(memory that ranks share while they load).
"""
