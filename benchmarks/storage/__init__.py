"""What moving checkpoints to and from storage costs, beside raw sockets, bare SDKs and other libraries, in one run.

    python -m benchmarks.storage [--quick] [--repeats N] [--only NAME] [--output FILE]

Every route runs in a fresh process, over the same bytes in tmpfs, against a server of our own that
drops what it gets: what is measured is the client. Peers that aren't installed say so; `pip install
-e '.[bench,test]'` brings them all.

    __main__    the command
    cases       uploads, reads, servers, replicated, trainer: what is measured, against which target
    routes      the ways to move bytes: raw sockets, SDKs, ours, peers
    cost        CPU, memory and throughput of one route
    table       routes side by side, and the verdicts on ours
    clients     of the bare SDKs
    contents    what lies on a target
    source      the bytes that are moved
    targets     where they are moved to
    sink        the server that drops bodies and serves zeros
    dialects    just enough S3 and Azure Blob for it
    counting    a proxy that counts bytes
"""
