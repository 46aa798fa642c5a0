"""The package's logger. Libraries don't print: what people should know goes here and to `status()`.

The logger has no handler on purpose: in a job that configures no logging, Python's handler of last
resort prints warnings to stderr.
"""

from __future__ import annotations

import logging

log = logging.getLogger("dcp_mem")
