"""The recovery path: a load from its survey of memory and storage to its record.

`reader.py` calls `open_newest` and `load_opened`; from there the path reads top to bottom:

    load_attempt  what was asked for, and what a load has learned on its way
    survey        1. what this node's memory has, and what storage has
    find          2. which checkpoints all ranks can load; the newest that can be opened, rebuilt
                     from parity where need be (repair)
    open             open a checkpoint on all ranks or on none
    plan          3. which items a rank reads
    load          4. read; another copy or an older checkpoint where bytes are damaged
    read             each segment from the nearest source: fetch, pending
    shared_fetch     what several ranks need, read once; peers: given to the others
    finish        5. the report, its line in `recoveries.jsonl`, and lost copies made again

Sources of bytes are in `sources/`. This room may import `runtime` and what lies below it; it knows
nothing of saving.
"""
