"""The package's metadata says what its pages say, and the site's links lead to its pages."""

import re
import runpy
import shutil
import subprocess
import sys

import pytest
import yaml

import dcp_mem
from tests.support import REPOSITORY

PROJECT = (REPOSITORY / "pyproject.toml").read_text()
VERSIONS = (REPOSITORY / "docs" / "versions.md").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert {dcp_mem.__version__, citation["version"], newest[1]} == {_one("version")}


def test_the_licence_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert _one("license") == citation["license"] == "BSD-3-Clause"
    assert (REPOSITORY / "LICENSE").read_text().startswith("BSD 3-Clause License")


def test_ranges_of_python_and_torch_are_those_that_the_pages_name() -> None:
    python = _one("requires-python").removeprefix(">=")
    (torch,) = (need[7:] for need in _all("dependencies") if need.startswith("torch>="))
    assert f"| Python | {python} and newer |" in VERSIONS
    assert f"| torch | {torch} and newer |" in VERSIONS
    named = [one.rpartition(" ")[2] for one in _all("classifiers") if ":: 3." in one]
    assert named[0] == python
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in named


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the site's packages are the gate's")
def test_links_of_the_repository_lead_from_page_to_page() -> None:
    pytest.importorskip("mkdocs")
    page_of = runpy.run_path(str(REPOSITORY / "docs" / "site" / "hooks.py"))["page_of"]
    assert page_of("docs/manager.md") == "manager.md"
    assert page_of("docs/api.md") == "api/index.md"
    assert page_of("README.md") == "overview.md"
    assert page_of("benchmarks/RESULTS.md") == "benchmarks/RESULTS.md"


def test_stable_names_are_in_the_reference() -> None:
    reference = (REPOSITORY / "docs" / "api.md").read_text()
    assert [name for name in dcp_mem.__all__ if f"### dcp_mem.{name}\n" not in reference] == []


def test_the_gate_uses_the_wheel_with_each_of_the_users_extras() -> None:
    package = runpy.run_path(str(REPOSITORY / ".ci" / "package.py"))
    extras = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    named = set(re.findall(r"^([\w-]+) = \[", extras, re.MULTILINE))
    assert set(package["EXTRAS"]) == named - {"bench", "docs", "lint", "release", "test"}
    assert set(package["NOT_INSTALLED"]) == {"nixl", "torchtitan"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make isn't installed")
@pytest.mark.parametrize("target", ["demo", "test", "check", "newest", "docs", "package", "bench"])
def test_make_has_the_usual_commands(target: str) -> None:
    told = ["/usr/bin/env", "make", "--dry-run", "--always-make", target]
    done = subprocess.run(told, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for script in re.findall(r"\.ci/\w+", done.stdout):
        assert (REPOSITORY / script).exists()


def _one(name: str) -> str:
    """A text of pyproject.toml. (Python 3.10 has no tomllib.)"""
    found = re.search(rf'^{name} = "(.*)"$', PROJECT, re.MULTILINE)
    assert found is not None
    return found[1]


def _all(name: str) -> list[str]:
    found = re.search(rf"^{name} = \[(.*?)\]$", PROJECT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]+)"', found[1])
