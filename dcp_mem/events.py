"""The package's logger. Libraries don't print: what a person should know goes here, and to `status()`.

It has no handler of its own on purpose: warnings of a job that configures no logging reach stderr by Python's last resort.
"""

from __future__ import annotations

import logging

log = logging.getLogger("dcp_mem")
