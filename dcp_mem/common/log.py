"""The package's logger. Libraries don't print: what people should know goes here and to `status()`.

The logger has no handler on purpose: in a job that configures no logging, Python's handler of last
resort prints warnings to stderr.
"""

from __future__ import annotations

import logging

log = logging.getLogger("dcp_mem")
_said: set[str] = set()


def log_once(text: str, level: int = logging.INFO) -> None:
    """Log a text once in this process.

    Args:
        text: What people should know, but not at each step.
        level: Of the `logging` module.
    """
    if text not in _said and log.isEnabledFor(level):
        _said.add(text)
        log.log(level, "%s", text)
