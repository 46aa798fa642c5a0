"""A node's memory: the job's directory on tmpfs, catalogs and slots in it, and the copies into and out of them."""
