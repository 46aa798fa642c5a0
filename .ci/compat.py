"""What .ci/compat asks of Python, in the environment that it has made.

chosen: the version that pip would install, from its report. pins: constraints for everything but
torch and what came with it. needs, frameworks: what the tests need, apart. missing: packages that
can't be imported. row: the table's row of this torch, from pytest's report. without-torch: what
dcp_mem needs besides torch. importable: the unit tests that can be imported without torch.
integrations: their names. releases: requirements of the oldest or newest releases of one. tests:
its tests. differing: what pip would install for it, from its report. integration-row: its row.
"""

import datetime as dt
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "compatibility.md"
FRAMEWORKS = (
    "accelerate",
    "deepspeed",
    "lightning",
    "megatron-core",
    "mlflow-skinny",
    "tensorboard",
    "torchft",
    "transformers",
)
IMPORTED = {"megatron-core": "megatron.core", "mlflow-skinny": "mlflow"}
INTEGRATIONS = {
    "azure": (("adlfs",), "tests/storage/test_azure.py"),
    "deepspeed": (("deepspeed",), "tests/integrations/test_deepspeed.py"),
    "gs": (("botocore", "gcsfs"), "tests/storage/test_gcs.py"),
    "huggingface": (("accelerate", "transformers"), "tests/integrations/test_huggingface.py"),
    "lightning": (("lightning",), "tests/integrations/test_lightning.py"),
    "megatron": (("megatron-core",), "tests/integrations/test_megatron.py"),
    "mlflow": (("mlflow-skinny",), "tests/integrations/test_trackers.py -k mlflow"),
    "nebula": (
        ("deepspeed", "lightning"),
        " ".join(
            f"tests/integrations/test_nebula{part}.py"
            for part in ("", "_lightning", "_jobs", "_samples")
        ),
    ),
    "s3": (("s3fs",), "tests/storage/test_s3.py"),
    "torch_checkpointing": (
        ("torch_checkpointing",),
        "tests/integrations/test_torch_checkpointing.py",
    ),
    "torchft": (("torchft",), "tests/integrations/test_torchft.py"),
    "torchtitan": (("torchtitan",), "tests/integrations/test_torchtitan.py"),
    "trackers": (
        ("mlflow-skinny", "opentelemetry-api", "prometheus-client", "tensorboard", "wandb"),
        "tests/integrations/test_trackers.py",
    ),
}
BESIDE = {"opentelemetry-api": ("opentelemetry-sdk",), "transformers": ("datasets",)}
"""What the tests need of a release that goes with it."""
MOST_NAMED = 6
FEWEST = 15
"""Fewer files of unit tests that need no torch are a defect."""
NEEDING_MORE = ("dcp_mem.writer", "memory_root", "REPOSITORY")
"""Marks of tests that need conftest.py or torch, or look at the repository's own files."""


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def chosen() -> None:
    """Print the one requirement of pip's report on standard input, with its version."""
    [found] = json.load(sys.stdin)["install"]
    print(f"{found['metadata']['name']}=={found['metadata']['version']}")


def pins() -> None:
    """Print the pins that hold beside this torch, and what it has brought along."""
    freeze = [sys.executable, "-m", "pip", "freeze", "--exclude-editable", "--exclude", "dcp_mem"]
    there = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout.split("\n")
    mark = Path(sys.prefix, "torch.txt")
    if not mark.exists():  # before anything else was installed
        mark.write_text("\n".join(line for line in there if "==" in line) + "\n")
    own = mark.read_text().splitlines()
    names = {_key(line.partition("==")[0]) for line in own}
    pinned = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    others = [
        line for line in pinned if "==" in line and _key(line.partition("==")[0]) not in names
    ]
    print("\n".join([*own, *others]))


def _list(name: str) -> list[str]:
    """The lines of a list in pyproject.toml. (Python 3.10 has no tomllib.)"""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"pyproject.toml has no list {name}"
    return re.findall(r'"([^"]+)"', found[1])


def needs() -> None:
    print("\n".join(line for line in _list("test") if not line.startswith("dcp_mem[")))


def frameworks() -> None:
    print(
        "\n".join(
            name
            for line in _list("test")
            if line.startswith("dcp_mem[")
            for name in line[8:-1].split(",")
        )
    )


def without_torch() -> None:
    print("\n".join(line for line in _list("dependencies") if not line.startswith("torch")))


def importable() -> None:
    """Import all that needs no torch; print the files of unit tests among it.

    What can't be imported for another reason than a missing package fails the run.
    """
    sys.path.insert(0, str(ROOT))
    for path in sorted(ROOT.glob("dcp_mem/**/*.py")):
        if path.name != "__main__.py":
            _is_importable(path)
    found = [
        path
        for path in sorted(ROOT.glob("tests/unit/test_*.py"))
        if not any(mark in path.read_text() for mark in NEEDING_MORE) and _is_importable(path)
    ]
    assert len(found) >= FEWEST, f"only {len(found)} files of tests can be imported without torch"
    print("\n".join(str(path.relative_to(ROOT)) for path in found))


def _is_importable(path: Path) -> bool:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dcp_mem", "tests"):
            raise
        return False
    return True


def missing() -> None:
    print(" ".join(name for name in FRAMEWORKS if not _is_usable(IMPORTED.get(name, name))))


def _is_usable(module: str) -> bool:
    """An old torch may make a framework fail in any way while it is imported."""
    program = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return subprocess.run(program, check=False, capture_output=True).returncode == 0


def row(report: str, told: str) -> None:
    """Put this torch's row in the place of the one that was there for the same tests."""
    tests_run = f"`{told}`" if told else "the gate's"
    torch = importlib.metadata.version("torch")
    _put((torch, platform.python_version(), _versions(), tests_run), report, (torch, tests_run))


def _put(own: Sequence[str], report: str, replaced: Sequence[str]) -> None:
    """Put a row into the table with as many columns; rows with all these cells go."""
    cells = (*own, *_outcome(report))
    line = f"| {' | '.join(cells)} |"
    lines = TABLE.read_text().splitlines()
    start = lines.index(f"|{' --- |' * len(cells)}") + 1
    stop = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    others = [one for one in lines[start:stop] if not set(replaced) <= set(_cells(one))]
    lines[start:stop] = sorted([*others, line], key=_order)
    TABLE.write_text("\n".join(lines) + "\n")


def _outcome(report: str) -> tuple[str, ...]:
    """What passed, failed and was skipped, and when, of which commit."""
    suite = ET.parse(report).getroot()  # noqa: S314 (pytest wrote it, just now)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for one in suite.iter("testsuite"):
        counts = {name: count + int(one.get(name, 0)) for name, count in counts.items()}
    bad = counts["failures"] + counts["errors"]
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if _has_failed(case)
    ]
    return (
        str(counts["tests"] - bad - counts["skipped"]),
        f"{bad}: {', '.join(failed[:MOST_NAMED])}{', …' if len(failed) > MOST_NAMED else ''}"
        if bad
        else "0",
        str(counts["skipped"]),
        f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {_commit()}",
    )


def integrations() -> None:
    print("\n".join(INTEGRATIONS))


def tests(name: str) -> None:
    print("\n".join(INTEGRATIONS[name][1].split()))


def releases(name: str, which: str) -> None:
    """Print requirements of the oldest releases that are tested, or of the newest."""
    sys.path.insert(0, str(ROOT))
    from dcp_mem.common.releases import TESTED

    for package in INTEGRATIONS[name][0]:
        first, end = TESTED[package]
        asked = f"=={first}.*" if which == "oldest" else f">={first},<{end}"
        print("\n".join((f"{package}{asked}", *BESIDE.get(package, ()))))


def differing() -> None:
    """Print what pip's report on standard input would install."""
    for found in json.load(sys.stdin)["install"]:
        print(f"{found['metadata']['name']}=={found['metadata']['version']}")


def integration_row(report: str, name: str, told: str) -> None:
    """Put the row of an integration's release in the place of the one that was there."""
    versions = (f"{one} {importlib.metadata.version(one)}" for one in INTEGRATIONS[name][0])
    own = (
        name,
        ", ".join(versions),
        platform.python_version(),
        importlib.metadata.version("torch"),
        f"`{told}`" if told else "all but the slow ones",
    )
    _put(own, report, own)


def _commit() -> str:
    """The commit that was tested, and whether anything but the table differs from it."""
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{TABLE.relative_to(ROOT)}"
    )
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    command = ["/usr/bin/env", "git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _has_failed(case: ET.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def _order(line: str) -> tuple[str, list[int]]:
    """By the first cell: a name, or a version."""
    first, second = _cells(line)[:2]
    return first if first[0].isalpha() else "", [
        int(part) for part in re.findall(r"\d+", second if first[0].isalpha() else first)[:3]
    ]


def _versions() -> str:
    there = {_key(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    return ", ".join(_account(name, there.get(name, "")) for name in FRAMEWORKS)


def _account(name: str, version: str) -> str:
    if not version:
        return f"no {name}"
    fails = name in os.environ.get("DCP_MEM_WITHOUT", "").split()
    return f"{name} {version}{' (fails)' if fails else ''}"


COMMANDS: dict[str, Callable[..., None]] = {
    "chosen": chosen,
    "pins": pins,
    "needs": needs,
    "frameworks": frameworks,
    "without-torch": without_torch,
    "importable": importable,
    "integrations": integrations,
    "releases": releases,
    "tests": tests,
    "differing": differing,
    "integration-row": integration_row,
    "missing": missing,
    "row": row,
}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    COMMANDS[command](*arguments)
