"""Tests with one process and no server; a few fork their example, to leave nothing behind."""
