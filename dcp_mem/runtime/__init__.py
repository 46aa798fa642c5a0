"""The state that a process keeps between saves, and the states of its checkpoints.

Imports flushing, replicating and what lies below them. To be read in this order: `session.py` (what
there is, and its end), `turns.py` (whose save is next), then its parts `layouts.py`,
`frozen.py`, `prefaulting.py`, `topology.py`, `last_saves.py` and `agent_link.py`;
`states.py` waits for what becomes of a checkpoint.
"""
