"""The demo: a real FSDP2 training that is killed, robbed of its memory, and comes back bit for bit.

Run it with `python -m dcp_mem.demo`; `train.py` is the part that a user would write.
"""
