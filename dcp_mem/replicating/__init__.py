"""Copies, or parity, of complete checkpoints in other nodes' memory.

The room sits beside `flushing`, and imports `comm`, `memory` and what is below them. Read its
modules in this order:

    plan          which files are assembled on which rank, from which parts, sent by which ranks
    repair_plan   the same after a loss of nodes
    task          one rank's part in the plans of a checkpoint
    worker        carries out a task, and agrees with all ranks on how it went
    earlier       copies and parity that begin as those of an earlier checkpoint
    send          the files that a rank sends from, and their checksums
    receive       the files that a rank assembles from what it receives
    replicator    the background thread that runs tasks
"""
