"""`dcp-mem` before it begins: help and usage errors at once, without torch; what its names mean."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.checkpoints.jobs import Job, save
from tests.support.command import command

_COMMANDS = [
    *("ls", "show", "verify", "reject", "rm", "gc"),
    *("watch", "report", "flush", "doctor", "export", "follow"),
]
_SLOW = {"torch", "numpy", "fsspec", "rich", "jinja2"}


def _process(
    *arguments: str, module: str = "dcp_mem.cli.main", without: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a module in an interpreter of its own; `without` has what can't be imported there."""
    path = os.pathsep.join(str(one) for one in (without, REPOSITORY) if one is not None)
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


def _imported(done: "subprocess.CompletedProcess[str]") -> set[str]:
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))


def _said(done: "subprocess.CompletedProcess[str]") -> str:
    lines = done.stderr.splitlines()
    return "\n".join(line for line in lines if not line.startswith("import time:"))


def _without(directory: Path, *packages: str) -> Path:
    for package in packages:
        (directory / f"{package}.py").write_text(f"raise ImportError('no {package} here')")
    return directory


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_comes_before_anything_slow_is_imported(name: str) -> None:
    done = _process(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"{name} [OPTIONS]" in done.stdout
    assert "Examples:" in done.stdout
    assert "dcp_mem.cli.commands" in _imported(done)
    assert not _imported(done) & _SLOW


def test_the_list_of_commands_needs_nothing_slow() -> None:
    done = _process()
    assert [line.split()[0] for line in done.stdout.splitlines() if re.match("  [a-z]+  ", line)][
        -len(_COMMANDS) :
    ] == _COMMANDS
    assert not _imported(done) & _SLOW


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("lss run", "No such command 'lss' (did you mean 'ls'?)"),
        ("./run", "a command comes before ROOT: dcp-mem ls ./run"),
        ("ls run --jsn", "--json"),
        ("show run", "Missing argument 'ID'"),
        ("report", "say which job: give its ROOT"),
        ("flush -", "say which job: give its ROOT"),
        ("report run -o - --json", "give -o FILE"),
        ("flush run --newest 1", "--newest needs --all"),
        ("reject run 40", "give either --why TEXT or --undo"),
        ("doctor --transport tcp", "--transport goes with --peers"),
        ("doctor --peers --transport carrier-pigeon", "choose"),
        ("export run 40 x --prefix a", "--prefix is for --format safetensors"),
        ("export run 40 x --target-option a", "give KEY=VALUE"),
        ("export run 40 x --target-option a=1 --format torch", "--target-option is for"),
        ("follow run --exec {foo}", "{foo} stands for nothing here: {path}, {name} and {step}"),
        ("follow run --exec {pth}", "did you mean 'path'?"),
        ("follow run --exec nosuchprogram", "there is no such command"),
    ],
)
def test_usage_errors_come_before_anything_slow_is_imported(arguments: str, said: str) -> None:
    done = _process(*arguments.split())
    assert done.returncode == 2
    assert said in _said(done) + done.stdout
    assert "Traceback" not in _said(done)
    assert not _imported(done) & _SLOW


def test_the_demo_is_asked_for_help_without_torch() -> None:
    done = _process("--help", module="dcp_mem.demo")
    assert done.returncode == 0
    assert "--save-every" in done.stdout
    assert not _imported(done) & (_SLOW - {"rich"})


@pytest.fixture
def saved(job: Job) -> Job:
    """A job with step-10, step-20 and, of step 20, too, "best" on storage."""
    with job.writer(agent="thread") as writer:
        for number, name in ((10, "step-10"), (20, "step-20"), (20, "best"), (30, "last")):
            writer.annotate_next_save(step=number)
            save(writer, number, name)
            writer.wait(name, timeout=60)
    return job


def _places(job: Job) -> list[str]:
    return ["--memory-root", job.memory, "--job", job.name or ""]


@pytest.mark.parametrize("arguments", [["ls"], ["report", "-o"]])
def test_listing_and_reporting_need_no_torch(
    saved: Job, arguments: list[str], tmp_path: Path
) -> None:
    directory = tmp_path / "without"
    directory.mkdir()
    name, *options = arguments
    options = [*options, str(tmp_path / "r.html")] if options else []
    without = _without(directory, "torch")
    done = _process(name, saved.url or "", *options, *_places(saved), without=without)
    assert done.returncode == 0, _said(done)
    assert "step-20" in (Path(options[-1]).read_text() if options else done.stdout)


def test_a_step_names_its_checkpoint_for_every_command(saved: Job, tmp_path: Path) -> None:
    root, places = saved.url or "", _places(saved)
    for arguments in (
        ["show", root, "20"],
        ["verify", root, "020"],
        ["export", root, "20", str(tmp_path / "copy")],
        ["reject", root, "20", "--why", "NaN"],
        ["rm", root, "20", "--yes", "--force"],
    ):
        done = command(*arguments, *places, "--json")
        assert done.exit_code == 0, done.output
        assert "step-20" in done.stdout
        assert "best" not in done.stdout
    listed = command("ls", root, *places, "--json")
    names = [one["name"] for one in json.loads(listed.stdout)["checkpoints"]]
    assert names == ["last", "best", "step-10"]
    assert json.loads(command("show", root, "30", *places, "--json").stdout)["name"] == "last"


def test_a_step_of_two_checkpoints_is_no_name_and_of_none_is_not_found(job: Job) -> None:
    with job.writer(agent="thread") as writer:
        for name in ("best", "last"):
            writer.annotate_next_save(step=7)
            save(writer, 7, name)
            writer.wait(name, timeout=60)
    done = command("rm", job.url or "", "7", *_places(job), "--yes", "--force")
    assert done.exit_code == 2
    assert "7 is the step of best, last" in done.stderr
    assert command("show", job.url or "", "8", *_places(job)).exit_code == 1
    assert command("ls", job.url or "", *_places(job)).stdout.count("durable") == 2


def test_the_directory_of_a_checkpoint_says_whose_it_is(saved: Job) -> None:
    directory = f"{saved.url}/step-10"
    for arguments in (["ls", directory], ["verify", directory], ["show", directory, "10"]):
        done = command(*arguments, "--memory-root", saved.memory)
        assert done.exit_code == 2
        assert "is the checkpoint step-10 of job run-" in done.stderr
        assert f"give the job's root, {saved.url}" in done.stderr


def test_a_directory_of_memory_says_how_to_list_it(saved: Job) -> None:
    for directory in (saved.directory, saved.directory / "step-10"):
        done = command("ls", str(directory))
        assert done.exit_code == 2
        advice = f"--memory-root {saved.memory} --job job"
        assert advice in done.stderr
    assert command("ls", *advice.split()).exit_code == 0


def test_the_home_directory_is_put_in_place_of_its_sign(
    saved: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = Path(saved.memory).parent
    monkeypatch.setenv("HOME", str(home))
    memory = f"--memory-root=~/{Path(saved.memory).name}"
    assert "last" in command("ls", memory, "--job=job").stdout
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "last" in command("ls", "~/run", "--job=other").stdout
    assert command("report", "~/run", "-o", "~/page.html").exit_code == 0
    assert (tmp_path / "page.html").exists()
    done = command("export", "~/run", "10", "~/model.pt", "--format", "torch")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model.pt").exists()


def test_names_in_two_braces_and_variables_of_a_shell_are_passed_on(saved: Job) -> None:
    script = """sh -c 'echo "$1" ${HOME} {{foo}} >&2' sh {name}"""
    done = _process(*("follow", saved.url or "", *_places(saved), "--times", "1", "--exec", script))
    assert done.returncode == 0, _said(done)
    assert f"last {os.environ['HOME']} {{foo}}" in _said(done)


@pytest.mark.parametrize(
    ("url", "packages", "extra"),
    [
        ("s3://bucket/run", ["s3fs", "botocore", "aiobotocore"], "s3"),
        ("abfs://c@account.dfs.core.windows.net/run", ["adlfs", "azure"], "azure"),
    ],
)
def test_a_backend_that_is_missing_says_what_to_install(
    url: str, packages: list[str], extra: str, tmp_path: Path, memory_root: Path
) -> None:
    places = ["--memory-root", str(memory_root)]
    done = _process("ls", url, *places, without=_without(tmp_path, *packages))
    assert done.returncode in (2, 3)
    assert f"pip install 'dcp_mem[{extra}]'" in _said(done)
