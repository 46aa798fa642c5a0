"""The command line `dcp-mem`: inspect a job's checkpoints and take care of them.

May import: every other room but `demo` (commands don't import each other). In the order in which to
read:

- `main`: turns errors into one line and an exit code.
- `commands`: a table of the commands: their help, and what each takes.
- `parsing`: parses that, and refuses what can't be, before a command's module is imported.
- `options`: what all commands get.
- `screen`: how they print.
- `ls`, `show`, `verify`, `watch`, `report`, `doctor`: look.
- `flush`, `export`, `rm`, `gc`: act.
"""
