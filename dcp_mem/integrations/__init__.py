"""Adapters to the frameworks that people train with, a module or a package for each.

They import what users import, and everything below; nothing of dcp_mem imports them but the command
line. `nebula` is the API of Azure ML's package; `trackers` sends a manager's figures elsewhere.
"""

from __future__ import annotations

from dcp_mem.common.releases import warn_if_untested

warn_if_untested("torch")
