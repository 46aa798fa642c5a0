"""Nodes made of Linux namespaces, and torchrun jobs on them."""
