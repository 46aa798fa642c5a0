"""docs/tutorial.md, as somebody follows it: its commands in turn, and what they print."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.processes.launch import TETHER

_BLOCK = re.compile(r"```(bash|python|text)\n(.*?)```", re.DOTALL)
_INSTALL = "pip install "
_SECONDS = 120
_AGENT_SECONDS = 300
"""For the agent, which leaves the processor to everybody else."""
_CHANGING = re.compile(r"\d+ (?:s|min)|loss.\d+\.\d+|[\d.]+ [KM]iB")
"""Ages, losses and sizes differ from machine to machine."""


@pytest.mark.variant
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorials_commands_print_what_it_shows(memory_root: Path, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "tutorial.md").read_text()
    blocks: list[tuple[str, str]] = _BLOCK.findall(page)
    assert any(kind == "bash" and text.startswith(_INSTALL) for kind, text in blocks)
    (script,) = (text for kind, text in blocks if kind == "python")
    (tmp_path / "train.py").write_text(script)

    command, printed, losses = "", "", []
    for kind, text in blocks:
        if kind == "bash" and not text.startswith(_INSTALL):
            command = text.replace("/dev/shm", str(memory_root))
            printed = _run(command, memory_root, tmp_path)
            losses += re.findall(r"step 99, loss ([\d.]+)", printed)
        elif kind == "text":
            deadline = time.monotonic() + _AGENT_SECONDS
            while command.startswith("dcp-mem ls") and not _shows(printed, text):
                assert time.monotonic() < deadline, printed + _of_agent(memory_root)
                printed = _run(command, memory_root, tmp_path)
            assert _shows(printed, text)
    assert "whole" in printed
    assert len(losses) == 2
    assert len(set(losses)) == 1

    undisturbed = script.replace("step == 57 and", "False and")
    (tmp_path / "train.py").write_text(undisturbed)
    assert f"loss {losses[0]}" in _run('python train.py "$PWD/other"', memory_root, tmp_path)


def _run(command: str, memory_root: Path, directory: Path) -> str:
    """Return what a command prints. The crash's exit code is the tutorial's to expect."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"DCP_MEM_ROOT": str(memory_root), "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*TETHER, "/bin/bash", "-c", command],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    print(command, done.stdout, done.stderr, sep="\n")
    assert done.returncode in ((0, 137, -9) if "crash" in done.stdout else (0,))
    assert "Warning" not in done.stderr
    return done.stdout


def _of_agent(memory_root: Path) -> str:
    return (
        "`ls` never shows what the page does; the agent's log:\n"
        + (memory_root / ".agent" / "agent.log").read_text()
    )


def _shows(printed: str, text: str) -> bool:
    """Return whether a command printed the page's text, or what the page says instead of it."""
    superseded = "1 save was superseded by a newer one before the flush"
    if superseded in printed:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("step-0 "))
        printed = printed.replace(superseded, "")
    return _lines(text) == _lines(printed)


def _lines(text: str) -> list[list[str]]:
    """The words of each line, without what changes."""
    return [_CHANGING.sub("…", line).split() for line in text.splitlines() if line]
