"""Uploads, reads and flushes, beside sockets, bare SDKs and other libraries."""
