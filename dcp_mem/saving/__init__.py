"""The save, read from top to bottom: one pipeline, which takes a plan and where it lies.

Imports runtime, replicating and what lies below them; nothing of the load. To be read in this
order: `values.py` (what the stages hand to each other), `pipeline.py` (the stages in their order,
and what goes on behind training), then the stages: `agree.py` (`room.py`), `stage.py`,
`complete.py`, `retention.py`. A plan comes from `own_plans.py`, `ahead.py`, `dcp_plan.py` or
`streams.py`, and is a `Planned` from there on; frozen items have a segment of their own
(`runtime/frozen.py`). `prepare.py` makes slots ready ahead of the first save.

Saves come in by `saver.py`, those that DCP drives by `calls.py` and `dcp_takeover.py` too.
`ahead.py` and `overlap.py` copy ahead of asynchronous saves.

Nothing is decided by one rank alone, and no rank fails alone: what goes wrong on one rank travels
with the next exchange, so that all ranks raise together and none is left waiting.
"""
