"""What dcp_mem costs, beside the floor and beside other libraries, measured in one run.

    python -m benchmarks CASE… [--quick] [--repeats N] [--record TOPIC]
    python -m benchmarks --list
    python -m benchmarks --page

Each measurement runs in fresh processes, so that a first save is a first save, and memory figures
are a trainer's own. What is compared runs in turn, in one process, with the same threads: floor,
dcp_mem, floor, dcp_mem, …; a ratio is the median of the ratios of neighbours, so that a machine
that is busy for a while slows both sides of it.

The benchmarks import dcp_mem, and no tests. Read them in this order:

    __main__     the command
    cases/       what is measured, against which target: one module per question
    harness/     what cases share: clock, floors, processes, states, tables, runs
    page/        RESULTS.md and its pictures, drawn from recorded runs
    results/     recorded runs: figures as JSON, details as markdown
    RESULTS.md   the page; pictures/ has its pictures
"""
