"""Servers, routes of bytes to and from them, and what a route costs.

Every route runs in a fresh process, over the same bytes in tmpfs. The sink drops what it gets, so
that what is measured is the client.

    source    the bytes that are moved
    targets   where they are moved to
    sink      a server that drops bodies and serves zeros
    dialects  as much S3 and Azure Blob as the sink has to speak
    servers   real servers: Azurite, moto, radosgw (with ceph)
    clients   clients of the bare SDKs
    contents  what lies on a target
    routes/   the ways to move bytes: raw sockets, SDKs, dcp_mem, peers
    cost      CPU, memory and throughput of one route
    routing   routes side by side
    counting  a proxy that counts bytes
"""
