"""What the cases share. Modules here import dcp_mem and each other, never a case.

settings      what the command line chose
samples       repeated timings
clock         seconds, and which part of them belongs to the storage's methods
tables        figures, rows and tables, as markdown and JSON
runs          a run and its files
processes     fresh processes, one or more ranks
scratch       tmpfs and disk to work in, emptied whatever happens
procfs        memory of a process, flush agents
states        the states that are saved
nested        the same, nested as trainers do, with an optimizer
training      a small transformer, and loops that save at every step
sharded_training  a small transformer, sharded by FSDP2
restarted     a training that is killed and goes on, run by torchrun
floors        bare copies: the least that a save or a restore can cost
repeated      dcp_mem's saves and loads, timed
calls         the calls that save, ours and others', behind one interface
torch_peers   torch's writers and readers
null_writer   `dcp.save` through a writer that does nothing
rank_plans    the plans of many ranks
played_ranks  the other ranks of a large job, played in one process
nodes/        several nodes on this machine, and libraries that copy between nodes
storage/      servers, routes to them, and what a route costs
"""
