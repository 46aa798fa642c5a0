"""How fast dcp_mem is, beside the floor and beside torch's own writers, in one run.

    python -m benchmarks.core [--quick] [--repeats N] [--only NAME] [--output FILE]

Each measurement runs in fresh processes, so that a first save is a first save and memory figures
are a trainer's own. What is compared is run in turn, in one process, with the same threads: floor,
ours, floor, ours, …; a ratio is the median of the ratios of neighbours, so that a machine that is
busy for a while slows both sides of it.

    core        the command; benchmarks.storage and benchmarks.replication are commands of their own
    scaling     a paper model of large jobs
    command     what the commands share
    cases       save, first, planning, steady, restore, slowdown, memory: what is measured, against which target
    ours        dcp_mem, with its methods timed
    torch_own   torch's writers and readers
    floors      the bare copies that nothing can beat
    states      the states that are saved
    simulated   the plans of many ranks
    others      the other ranks of a large job
    processes   fresh processes, one or more ranks
    scratch     tmpfs and disk to work in, emptied whatever happens
    procfs      memory of a process, agents
    report      rows, verdicts, markdown
    clock       seconds, and which part of them is whose
    samples     repeated timings
    settings    what the command line chose
"""
