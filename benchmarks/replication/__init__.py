"""What copies in other nodes' memory cost, and what a lost node's return takes, beside plain gloo, in one run.

    python -m benchmarks.replication [--quick] [--repeats N] [--only NAME] [--huge HOW] [--output FILE]

Nodes are Linux namespaces on this machine (`tests/cluster.py`): each with a network, processes and a tmpfs of its own. They
share its cores, and what goes over their cables costs CPU alone. Peers that aren't installed say so;
`pip install lm-resiliency nvidia-resiliency-ext` brings them.

    __main__    the command
    cases       blocking, throughput, recovery, memory, deciding: what is measured, against which target
    nodes       nodes to measure on
    wire        what plain gloo does with the same bytes
    peers       other libraries that keep copies on peers
    profiles    where the time of a call goes
"""
