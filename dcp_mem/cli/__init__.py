"""The command line `dcp-mem`: inspect a job's checkpoints and take care of them.

May import: every other room but `demo` (commands don't import each other). In the order in which to
read:

- `main`: finds the command, and turns errors into one line and an exit code.
- `options`: what all commands take.
- `screen`: how they print.
- `ls`, `show`, `verify`, `watch`, `report`, `doctor`: look.
- `flush`, `export`, `rm`, `gc`: act.
"""
