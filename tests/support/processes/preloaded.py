"""Imports for the server that forks processes for tests: done once instead of in every fork."""

import gc

from tests.support.storage import shared_models

shared_models.read_beforehand()
gc.collect()
gc.freeze()  # or each fork's first collection would copy the pages of all that was imported
