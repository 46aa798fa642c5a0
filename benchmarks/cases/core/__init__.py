"""A job on one node: saves, plans, restores, memory."""
