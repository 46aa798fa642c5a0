"""What .ci/compat asks of Python, in the environment that it has made.

chosen: the version that pip would install, from its report. pins: constraints for everything but
torch and what came with it. needs, frameworks: what the tests need, apart. missing: packages that
can't be imported. row: the table's row of this torch, from pytest's report.
"""

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
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
MOST_NAMED = 6
COLUMNS = (
    "torch",
    "Python",
    "frameworks",
    "tests run",
    "passed",
    "failed",
    "skipped",
    "when, commit",
)


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


def _extra(name: str) -> list[str]:
    """The lines of an extra in pyproject.toml. (Python 3.10 has no tomllib.)"""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"pyproject.toml has no extra {name}"
    return re.findall(r'"([^"]+)"', found[1])


def needs() -> None:
    print("\n".join(line for line in _extra("test") if not line.startswith("dcp_mem[")))


def frameworks() -> None:
    print(
        "\n".join(
            name
            for line in _extra("test")
            if line.startswith("dcp_mem[")
            for name in line[8:-1].split(",")
        )
    )


def missing() -> None:
    print(" ".join(name for name in FRAMEWORKS if not _is_usable(IMPORTED.get(name, name))))


def _is_usable(module: str) -> bool:
    """An old torch may make a framework fail in any way while it is imported."""
    program = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return subprocess.run(program, check=False, capture_output=True).returncode == 0


def row(report: str, told: str) -> None:
    """Put this torch's row in the place of the one that was there for the same tests."""
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
    cells = (
        importlib.metadata.version("torch"),
        platform.python_version(),
        _versions(),
        f"`{told}`" if told else "the gate's",
        str(counts["tests"] - bad - counts["skipped"]),
        f"{bad}: {', '.join(failed[:MOST_NAMED])}{', …' if len(failed) > MOST_NAMED else ''}"
        if bad
        else "0",
        str(counts["skipped"]),
        f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {_commit()}",
    )
    lines = TABLE.read_text().splitlines()
    start = lines.index(f"|{' --- |' * len(COLUMNS)}") + 1
    stop = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    others = [line for line in lines[start:stop] if _run_by(line) != (cells[0], cells[3])]
    lines[start:stop] = sorted([*others, f"| {' | '.join(cells)} |"], key=_version)
    TABLE.write_text("\n".join(lines) + "\n")


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


def _run_by(line: str) -> tuple[str, str]:
    """Return the torch and the tests of a row."""
    cells = [cell.strip() for cell in line.split("|")]
    return cells[1], cells[4]


def _version(line: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", line.split("|")[1])[:3]]


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
    "missing": missing,
    "row": row,
}

if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    COMMANDS[command](*arguments)
