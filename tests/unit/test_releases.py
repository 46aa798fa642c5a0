"""A release that dcp_mem hasn't been run with is named in the log, once; others aren't."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcp_mem
from dcp_mem.common.releases import TESTED, warn_if_untested
from tests.support import REPOSITORY

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
COMPATIBILITY = (REPOSITORY / "docs" / "compatibility.md").read_text()
INTEGRATIONS = {
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
    "huggingface": ["transformers"],
    "lightning": ["lightning"],
    "megatron": ["megatron-core"],
    "nebula.lightning": ["lightning", "pytorch-lightning"],
    "torch_checkpointing": ["torch_checkpointing"],
    "torchft": ["torchft"],
    "torchtitan": ["torchtitan"],
    "trackers.mlflow": ["mlflow-skinny"],
    "trackers.openmetrics": ["prometheus-client"],
    "trackers.opentelemetry": ["opentelemetry-api"],
    "trackers.tensorboard": ["tensorboard"],
    "trackers.wandb": ["wandb"],
}
IMPORTED = {
    "megatron-core": "megatron",
    "mlflow-skinny": "mlflow",
    "opentelemetry-api": "opentelemetry",
}
# An integration looks at its package before it imports it.
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    print(f"<{name}>", file=sys.stderr)
    try:
        importlib.import_module(f"dcp_mem.integrations.{name}")
    except ImportError as error:
        print(error, file=sys.stderr)
"""


def _installed(site: Path, name: str, version: str) -> None:
    """Put a distribution's metadata where Python finds it first."""
    place = site / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _cannot_be_imported(site: Path, name: str) -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("raise ImportError('moved away')\n")


@pytest.mark.parametrize(
    ("name", "version", "is_named"),
    [
        ("torchtitan", "9.1.0", True),
        ("torchtitan", "0.2.2", True),
        ("torchtitan", "unknown", True),
        ("torchtitan", "0.4.0a0+git", True),
        ("adlfs", "2027.1.0.dev3", True),
        ("torchtitan", "0.3.0", False),
        ("torchtitan", "0.3.99.dev20261120+cpu", False),
        ("torchtitan", "0.3.0rc1", False),
        ("adlfs", "2026.12.1", False),
    ],
)
def test_a_release_outside_the_range_and_no_other_is_named_once_with_the_range(
    name: str,
    version: str,
    is_named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _installed(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    warn_if_untested(name)
    warn_if_untested(name)
    first, end = TESTED[name]
    assert len(caplog.records) == is_named
    for said in (record.getMessage() for record in caplog.records):
        assert f"{name} {version}: " in said
        assert f'pip install "{name}>={first},<{end}"' in said


@pytest.mark.parametrize(
    ("version", "warns"), [("2.99.0+cpu", True), ("2.5.1", True), ("2.14.0a0+git", False)]
)
def test_the_torch_that_runs_counts_whatever_is_installed(
    version: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for name in ("MemoryStorageWriter", "MemoryStorageReader"):
        getattr(dcp_mem, name)
    assert len(caplog.records) == warns
    assert f"torch {version}: " in caplog.text or not warns


def test_each_integration_names_an_untested_release_also_where_its_import_fails(
    tmp_path: Path,
) -> None:
    for name in {name for names in INTEGRATIONS.values() for name in names}:
        _installed(tmp_path, name, "99.0")
        _cannot_be_imported(tmp_path, IMPORTED.get(name, name.replace("-", "_")))
    told = [sys.executable, "-W", "error", "-c", IMPORT_EACH, *INTEGRATIONS]
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(told, check=True, env=environment, capture_output=True, text=True)
    said = [line for line in ended.stderr.splitlines() if "hasn't been tested with" in line]
    once = {name for names in INTEGRATIONS.values() for name in names}
    assert sorted(line.split()[5] for line in said) == sorted(once)


def test_the_ranges_are_those_of_the_extras() -> None:
    extras = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\nbench = ")[0]
    named = dict(re.findall(r'"([\w-]+)(.*?)"', extras))
    ours = {name: f">={first},<{end}" for name, (first, end) in TESTED.items()}
    assert ours["pytorch-lightning"] == ours["lightning"]
    assert named == {
        name: ours[name] for name in ours if name not in ("pytorch-lightning", "torch")
    }
    assert f'"torch>={TESTED["torch"][0]}",' in PROJECT


def test_each_package_of_an_extra_is_tried_in_its_oldest_and_newest_release() -> None:
    tried = runpy.run_path(str(REPOSITORY / ".ci" / "compat.py"))["INTEGRATIONS"].values()
    packages = {package for packages, _ in tried for package in packages}
    assert packages == set(TESTED) - {"nixl", "pytorch-lightning", "torch"}
    files = [word for _, tests in tried for word in tests.split() if word.endswith(".py")]
    assert all((REPOSITORY / file).exists() for file in files)


def test_the_newest_torch_of_the_range_is_one_that_was_run() -> None:
    rows = re.findall(r"^\| (\d+)\.(\d+)\.\d\S* \| 3", COMPATIBILITY, re.MULTILINE)
    run = [(int(major), int(minor)) for major, minor in rows]
    first, end = TESTED["torch"]
    assert f"{min(run)[0]}.{min(run)[1]}" == first
    assert f"{max(run)[0]}.{max(run)[1] + 1}" == end
