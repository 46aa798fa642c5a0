"""Decisions as pure functions from values to values: no torch, no I/O, no clock."""
