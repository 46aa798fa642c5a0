"""Moving an opened checkpoint's items into the tensors that a load plan names.

What lies in memory is read straight into the destination, all threads at work. What lies on storage is fetched in pieces,
several at once, straight into the destination where it may lie there as it is, and checked on the way; what several
ranks of a node need is fetched once.
"""
