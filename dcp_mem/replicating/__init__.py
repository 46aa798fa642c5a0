"""Copies of complete checkpoints in other nodes' memory.

`transfers.py` says which rank sends what to whom, `exchange.py` moves a segment, `replicator.py` is the thread that has it done.
"""
