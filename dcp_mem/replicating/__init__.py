"""Copies, or parity, of complete checkpoints in other nodes' memory.

`transfers.py` says what comes about on which rank, of which parts, sent by whom; `repairs.py` the same after a loss of nodes.
`exchange.py` moves pieces, `sources.py` is where they come from, `making.py` what becomes of them, `work.py` one rank's part in
all that, and `replicator.py` the thread that has it done.
"""
