"""Operations on checkpoints from a terminal: list, inspect, verify, flush, export, remove.

No process group and no training script is needed. May import all rooms below `manager`. In the
order in which to read:

- `inventory`: which checkpoints and jobs there are.
- `contents`: what a checkpoint consists of, and which byte items a load refuses.
- `verify`: whether each of its bytes is as it was saved.
- `history`, `charts`, `report`: what became of a job's checkpoints, as a page.
- `flush`, `export`, `safetensors_file`, `streams`: bring a checkpoint to storage or elsewhere, or
  read one stream of it.
- `housekeeping`: remove checkpoints, jobs and orphans; mark checkpoints as not to be resumed from.
- `doctor`: whether machine and storage are fit for training.
"""
