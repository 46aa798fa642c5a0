"""Fresh processes for tests: forks, ranks of a group, processes killed at fault points."""
