"""The command line `dcp-mem`: what a job has in memory and on storage, looked at and taken care of without a training script."""
