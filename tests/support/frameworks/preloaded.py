"""Imports of frameworks for the server that forks processes: each fork would take seconds for them.

What a torch goes without, or what fails while it is imported, is left to the tests that need it.
"""

import contextlib
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _module in (
        "accelerate",
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "lightning.pytorch",
        "peft",
        "torchao.optim",
    ):
        with contextlib.suppress(Exception):
            importlib.import_module(_module)
