"""Tests on several nodes, made of Linux namespaces, that are killed, unplugged and replaced."""
