"""What the bytes mean: frames and layouts of segments, catalogs, manifests, DCP metadata, checksums, names.

`catalog.py` is what a checkpoint consists of: written down by `packed.py` and `texts.py`, made from and into DCP's objects
by `described.py`, and emitted as DCP's `.metadata` by `pickled.py` (with `opcodes.py`, `shapes.py` and `places.py`).
"""
