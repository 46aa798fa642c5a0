"""The stages of a save, in order: plan, agree, stage, complete. Each takes the previous one's result.

Nothing is decided by one rank alone, and no rank fails alone: what goes wrong locally travels with the next exchange,
so that all ranks raise together and none is left waiting.
"""
