"""What all commands get: the job, its storage, and the screen."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from dcp_mem.cli.screen import Screen
from dcp_mem.common.log import log
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import CheckpointStatus
from dcp_mem.config import Settings
from dcp_mem.errors import CheckpointNotFound
from dcp_mem.operations.inventory import (
    find_one,
    list_checkpoints,
    refuse_checkpoint_as_root,
    refuse_memory_as_root,
)
from dcp_mem.options import settings
from dcp_mem.storage import Storage
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import storage_of

INTERACTIVE_RETRIES = RetryPolicy(tries=4, longest_pause_seconds=4.0, deadline_seconds=30.0)
"""The retries of commands: few and short, because a person is waiting for the answer."""


@value_class(kw_only=True)
class CommonOptions:
    screen: Screen
    root: str | None  # the job's URL or directory; None where there is none
    memory_root: str | None
    job: str | None  # as given; None for the name that is made from the root
    # for the storage; not in repr, because they may hold secrets
    storage_options: dict[str, Any] = field(repr=False)

    def find(self, checkpoint_id: str) -> tuple[Settings, CheckpointStatus, Storage | None]:
        """Return the job, its checkpoint of a step, name or save id, and the job's storage."""
        chosen = self.settings()
        try:
            found = find_one(chosen, checkpoint_id, retry_policy=INTERACTIVE_RETRIES)
        except CheckpointNotFound as error:
            if not error.available:
                refuse_checkpoint_as_root(chosen, INTERACTIVE_RETRIES)
            raise
        return chosen, found, storage_of(chosen, INTERACTIVE_RETRIES)

    def find_all(self) -> tuple[Settings, list[CheckpointStatus]]:
        """Return the job and its checkpoints; raise ConfigError where ROOT is no job's root."""
        chosen = self.settings()
        found = list_checkpoints(chosen, retry_policy=INTERACTIVE_RETRIES)
        refuse_memory_as_root(chosen)
        if not found:
            refuse_checkpoint_as_root(chosen, INTERACTIVE_RETRIES)
        return chosen, found

    def settings(self) -> Settings:
        return settings(
            self.root,
            memory_root=self.memory_root,
            job=self.job,
            storage_options=self.storage_options,
        )


def run(name: str, *, is_json: bool, no_color: bool, debug: bool, **given: Any) -> Any:
    """Run a command with the common options in one value, and its own options as they are."""
    places = {one: given.pop(one) for one in ("root", "memory_root", "job", "storage_options")}
    common = CommonOptions(screen=Screen(is_json=is_json, no_color=no_color), **places)
    with _logging(debug):
        return importlib.import_module(f"dcp_mem.cli.{name}").run(common, **given)


@contextmanager
def _logging(is_all: bool) -> Iterator[None]:
    """Log errors only, or everything: the warnings of the layers below are for training loops."""
    before = log.level
    if is_all:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.DEBUG if is_all else logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
