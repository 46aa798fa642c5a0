"""Helpers that every room may use. The room imports nothing of dcp_mem but `errors`.

- `values`: plain values that the stages hand to each other.
- `log`: the logger.
- `faults`: named points at which tests can kill, stop or fail a process.
- `files`: small file operations.
- `parallel`: threads that are kept, and bounded parallel work.
- `gc_pause`: the cycle collector kept out of the way, and free memory returned.
- `sharded_tensor`: torch's class, or one that nothing is an instance of.
- `progress_bar`: a progress bar for people at a terminal.
"""
