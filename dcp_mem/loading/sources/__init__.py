"""Where a checkpoint's bytes come from: this node's memory, other nodes' memory, or storage.

    base      what every source can do, and what a checkpoint consists of
    memory    this node's memory
    stored    storage
    remote    other nodes' memory, and storage that another rank reads

Sources know nothing of the load that uses them; commands and the agent use them, too.
"""
