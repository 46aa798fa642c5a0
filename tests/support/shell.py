"""`dcp-mem` for one job, or in a process of its own.

Shell(job).json("show", "step-1")["tensors"]
subprocess.run([*COMMAND, "ls", url])
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from click.testing import Result

from tests.support.checkpoints.jobs import Job
from tests.support.command import command

COMMAND = (sys.executable, "-m", "dcp_mem.cli.main")
"""The command, for a process of its own."""


@dataclass(frozen=True)
class Shell:
    """Runs the command for one job."""

    job: Job

    def run(self, name: str, *arguments: str, stdin: str | None = None) -> Result:
        root = [self.job.url] if self.job.url else []
        return command(name, *root, *arguments, *self.places(), stdin=stdin)

    def json(self, name: str, *arguments: str, code: int = 0) -> Any:
        """What the command answers to programs."""
        result = self.run(name, *arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def listed(self, code: int = 0) -> list[dict[str, Any]]:
        """The job's checkpoints, as `ls` has them."""
        found: list[dict[str, Any]] = self.json("ls", code=code)["checkpoints"]
        return found

    def places(self) -> list[str]:
        options = options_for("--storage-option", self.job.storage_options)
        return ["--memory-root", self.job.memory, "--job", self.job.name or "", *options]


def options_for(name: str, values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    ]
