"""The flush: from node memory to storage.

This room may import memory, storage and what lies below them. Read its modules in this order:
`agent` (the process), `loop` (its rounds over all jobs, also in a thread of the trainer),
`registration` (what a job asks for), `flusher` (one job's attempts, and what comes of them),
`queue` (what awaits its flush, and when), `commit` (the order that makes a checkpoint durable),
`parts` (what each node puts, for itself and for lost nodes), `upload` (the bytes), `reuse`
(what isn't sent again), `exporter` (starts the process that exports), `orphans` (what attempts
leave behind), `metering` (counts, limits, and what is written down), `retention` (what leaves
storage), `ownership` (which run may commit and delete).
"""
