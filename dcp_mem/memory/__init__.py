"""A node's memory: the job's directory on tmpfs, what lies in it, and copies into and out of it.

This room may import format, policy and what lies below them. Read its modules in this order: `root`
(the memory root and its checks), `job` (one job's directory: what completes, what leaves),
`checkpoint` (one complete checkpoint as this node has it), `generations` (the order of runs),
`records` and `exports` (what is written down of checkpoints, loads and exports), `recycling`
(segments become free slots), `checksumming` (checksums of complete checkpoints, and values that
aren't finite), `catalogs` (and `.metadata` for torch's own readers), `links` (what followers hold),
`locks` (leases and the job's lock), `slot` (one file, and its mapping) and `slots` (those of a
process), `views` (files as memory), `copying` (payload bytes), `checked_reads` (the same, held
against checksums), `device_copies` with `cuda_batches` and `pinning` (CUDA, NUMA nodes).
"""
