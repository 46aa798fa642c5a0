"""Several nodes on this machine, and other libraries that keep copies on other nodes.

Nodes are Linux namespaces, each with a network, processes and a tmpfs of its own. They share the
machine's cores, and what goes over their cables costs CPU alone.

    cluster       the nodes: made, lost, throttled
    jobs          a function run on a rank of each node
    rank          what a rank's process does
    wire          what plain gloo does with the same bytes
    profiles      where the time of a call goes
    memory_peers  lm-resiliency and NVRx; `pip install lm-resiliency nvidia-resiliency-ext`
"""
