"""Tests of storage: servers, proxies that make faults, conformance, flushes, NFS."""
