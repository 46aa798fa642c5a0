"""The sources of a checkpoint's bytes: this node's memory, other nodes' memory, and storage.

    base      what every source can do, and what a checkpoint consists of; other nodes' memory, and
              storage that another rank reads
    memory    this node's memory
    stored    storage

Sources know nothing of the load that uses them; commands and the agent use them, too.
"""
