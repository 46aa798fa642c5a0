"""Decisions as pure functions from values to values: no torch, no I/O, no clock.

May import: `common` and `errors`. In the order in which to read:

- `order`: which of two checkpoints is newer.
- `facts`: what the policies of memory and storage know of a checkpoint.
- `persistence`: which saves go to storage.
- `retention`: which checkpoints stay.
- `admission`: what leaves memory for a new checkpoint, and whether there is room for it.
- `slots`: which free slots it takes, and by how much they grow.
- `frequency`: how often to save.
- `redundancy`, `placement`, `parity`: which nodes get copies or parity of which segments.
- `election`, `following`: which checkpoint a load takes, and a follower.
- `pieces`, `sharing`: which rank reads which bytes of it, and sends them to which ranks.
"""
