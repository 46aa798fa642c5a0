"""dcp_mem below the frameworks that people train with: a module for each."""
