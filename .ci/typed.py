"""Has type checkers look at a user's files: `python .ci/typed.py`, with mypy and basedpyright.

They find nothing in tests/typed/right.py, and in tests/typed/wrong.py the marked lines alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIGHT, WRONG = ("tests/typed/right.py", "tests/typed/wrong.py")
MARK = re.compile(r"  # wrong: (.*)$")

Report = tuple[str, int, str]
"""File, line and text."""


def mypy() -> Iterator[Report]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
    ]
    done = subprocess.run(
        [*command, RIGHT, WRONG], cwd=ROOT, check=False, capture_output=True, text=True
    )
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"(\S+):(\d+): error: (.*)", line)
        if found is not None:
            yield found[1], int(found[2]), found[3]
    if done.returncode > 1:
        raise SystemExit(done.stdout + done.stderr)


def basedpyright() -> Iterator[Report]:
    config = {
        "include": [str(ROOT / RIGHT), str(ROOT / WRONG)],
        "extraPaths": [str(ROOT)],
        "pythonVersion": "3.10",
        "typeCheckingMode": "strict",
    }
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "pyrightconfig.json"
        project.write_text(json.dumps(config))
        command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(project)]
        command += ["--pythonpath", sys.executable]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(done.stdout + done.stderr)
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        file = Path(one["file"]).relative_to(ROOT).as_posix()
        yield file, one["range"]["start"]["line"] + 1, one["message"]


def differences(reports: list[Report]) -> Iterator[str]:
    """Yield what was reported and isn't marked, and what is marked and wasn't reported so."""
    lines = enumerate((ROOT / WRONG).read_text().splitlines(), 1)
    marks = {number: found[1] for number, line in lines if (found := MARK.search(line))}
    for file, number, text in reports:
        if file != WRONG or number not in marks:
            yield f"{file}:{number} is right: {text}"
    for number, mark in marks.items():
        texts = [text for file, at, text in reports if (file, at) == (WRONG, number)]
        if not any(part in text for text in texts for part in mark.split("|")):
            yield f"{WRONG}:{number} is wrong, which is to be said with {mark}: {texts}"


def main() -> None:
    failed = False
    for checker in (mypy, basedpyright):
        reports = list(checker())
        found = list(differences(reports))
        print(f"{checker.__name__}: {len(reports)} reports; not as marked: {len(found)}")
        print("".join(f"{one}\n" for one in found), end="")
        failed = failed or bool(found)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
