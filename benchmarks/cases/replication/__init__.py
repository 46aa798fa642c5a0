"""Copies on other nodes: saves, throughput, recovery, memory, decisions."""
