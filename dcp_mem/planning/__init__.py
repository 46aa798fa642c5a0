"""Collective planning, in columns.

Of a save: `flatten.py` takes a rank's state dict apart, `local.py` describes it and recognises it again, `merge.py` settles
who writes what of all ranks' descriptions, `describe.py` makes the catalog of what they have written.
Of a load: `load.py` is DCP's planner, `join.py` finds what a rank needs in a catalog, `overlap.py` which chunks share elements.
"""
