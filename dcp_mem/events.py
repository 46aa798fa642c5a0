"""The package's logger. Libraries don't print: what a person should know goes here, and to `status()`."""

from __future__ import annotations

import logging

log = logging.getLogger("dcp_mem")
log.addHandler(logging.NullHandler())
