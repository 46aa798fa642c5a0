"""States and jobs that tests save and load, and what they compare."""
