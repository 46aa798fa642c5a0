"""What is measured of storage, one module each: its `run` gives a section of the report."""
