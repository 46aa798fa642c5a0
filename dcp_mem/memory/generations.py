"""`.generations.json`: the generations that runs with checkpoints here have got on storage.

What a run has saved in memory is ordered by them, whatever its saves agreed on (ADR 23).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace

from dcp_mem.common import files
from dcp_mem.errors import MemoryBudgetExceeded
from dcp_mem.format.manifest import Manifest
from dcp_mem.memory.locks import in_turn

_FILE = ".generations.json"
_MOST_RUNS = 32
_unwritten: dict[str, dict[str, int]] = {}
"""By directory of a job, the generations for which its file system had no room."""


class Generations:
    """The generations of a job's runs on this node; any thread may call anything at any time."""

    def __init__(self, directory: str) -> None:
        self._directory, self._path = directory, os.path.join(directory, _FILE)
        self._read: tuple[tuple[int, ...], dict[str, int]] = (), {}

    def known(self) -> Mapping[str, int]:
        """Return the generations by run."""
        try:
            version = files.version(os.stat(self._path))
            if self._read[0] != version:
                self._read = version, _generations(files.read_bytes(self._path))
        except FileNotFoundError:
            self._read = (), {}
        unwritten = _unwritten.get(self._directory)
        return {**self._read[1], **unwritten} if unwritten else self._read[1]

    def note(self, generations: Mapping[str, int]) -> None:
        """Write down the generations that runs have got on storage; their saves have them, too.

        All that belong together are written at once: else the order here would change meanwhile.
        Where there is no room, this process alone knows them, until there is.

        `generations`: by token of the run; at least what its saves have. Raises OSError.
        """
        with in_turn(self._directory):
            known = {**self.known(), **generations}
            kept = dict(sorted(known.items(), key=lambda one: one[1])[-_MOST_RUNS:])
            try:
                files.write_atomically(self._path, json.dumps(kept).encode())
                _unwritten.pop(self._directory, None)
            except MemoryBudgetExceeded:
                _unwritten[self._directory] = kept

    def raised(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the generation that its run has got on storage since."""
        return raised(manifest, self.known())


def raised(manifest: Manifest, generations: Mapping[str, int]) -> Manifest:
    """Return a manifest with its run's generation, where that is greater than its save had."""
    generation = generations.get(manifest.run, 0)
    if generation <= manifest.generation:
        return manifest
    return replace(manifest, generation=generation)


def _generations(data: bytes) -> dict[str, int]:
    """Parse the file; a damaged one is as good as none."""
    try:
        return {str(run): int(generation) for run, generation in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError):
        return {}
