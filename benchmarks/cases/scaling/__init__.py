"""A paper model of large jobs."""
