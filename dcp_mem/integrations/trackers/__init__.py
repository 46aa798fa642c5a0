"""Trackers of a manager's figures: for files, tracking tools, traces, or your own."""

from dcp_mem.integrations.trackers.jsonlines import JsonLines
from dcp_mem.manager.tracker import Event, Publisher, Story, Tracker

__all__ = ["Event", "JsonLines", "Publisher", "Story", "Tracker"]
