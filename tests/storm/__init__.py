"""Storms: many rounds of kills, damages, faults and losses, outside the gate, seeded.

    python -m tests.storm kills --rounds 1000

Read `storm.py` (what a storm is, and how it runs), then a kind: `damages.py`, `flushes.py`,
`writers.py`, `kills.py` (with `lives.py`), `nodes.py`.
"""
