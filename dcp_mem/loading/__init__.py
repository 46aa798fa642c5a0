"""The recovery path: a load from its survey of memory and storage to its record.

`reader.py` calls `open_newest` and `load_opened`; from there the path reads top to bottom:

    request       what was asked for, and where to look; frozen
    load_attempt  what a load has learned on its way; the only state that changes
    survey        1. what this node's memory has, and what storage has
    elect         2. which checkpoints all ranks can load, newest first
    candidates    3. open the newest one, fall through to older ones (rebuilt from parity)
    open             open a checkpoint on all ranks or on none
    plan          4. which items a rank reads
    load          5. read; another copy or an older checkpoint where bytes are damaged
    read             each segment from the nearest source: fetch, pending, payloads
    shared_fetch     what several ranks need, read once; peers, neighbours: given to the others
    report        6. what came from where
    record        7. a line in `recoveries.jsonl`
    redundancy    8. lost copies and parity, made again; repair: what it shares with a rebuild

Sources of bytes are in `sources/`. This room may import `runtime` and what lies below it; it knows
nothing of saving.
"""
