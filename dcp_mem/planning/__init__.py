"""Collective planning: what each rank would save, as columns; who saves what; and the metadata that follows from it.

`local.py` describes one rank's state dict, and recognises it again. `merge.py` settles all ranks' descriptions: it is a
pure function of columns. `describe.py` makes DCP's `Metadata` of the result.
"""
