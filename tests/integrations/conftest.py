"""Each test runs in a directory of its own: frameworks leave files where they run."""

from pathlib import Path

import pytest

from tests.support.processes.forks import preload

preload("tests.support.frameworks.preloaded")


@pytest.fixture(autouse=True)
def _own_directory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    directory = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(directory)
    return directory
