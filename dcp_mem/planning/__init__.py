"""Collective planning, in columns.

The room imports `format` and what lies below it; it exchanges nothing between ranks, and reads and
writes no files.

Read it in this order. Of a save:

- `plan_columns`: one rank's plan: names once, everything else as numbers.
- `flatten`: a rank's state dict taken apart into leaves.
- `plain_tensors`, `sharded_tensors`: how tensors of each kind become items of the plan.
- `shard_marks`: attributes by which a tensor is of another kind than its class.
- `torch_rules`: specimens of a new state dict, held against torch's own planner.
- `own_keys`: what a model's `state_dict` gives and its `load_state_dict` doesn't take.
- `state_structure`: a state dict, described once and recognised from then on.
- `joint_plan`: the plans of some ranks joined, with what they have in common held once.
- `contradictions`: what is refused of the ranks' plans.
- `global_plan`: all ranks' plans merged: which rank writes what.
- `plan_catalog`: the catalog of what the ranks have written.

Of a load:

- `load_planner`: DCP's planner.
- `reads`: what a rank reads.
- `find_reads`: what a rank has to read, found in a catalog.
- `whole_checkpoint`: a load of everything, without a state dict to load into.
"""
