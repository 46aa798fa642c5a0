"""Tests with several processes on one node: ranks, agents, commands, and processes killed."""
