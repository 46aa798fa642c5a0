"""Build sdist and wheel, check them, and use the wheel in fresh environments: see .ci/package.

1. `python -m build` in a copy of the files that git knows: the sdist, and the wheel from it.
2. `twine check --strict`, `check-wheel-contents`, and what must and mustn't be in the two.
3. For the package alone and for each extra: a virtual environment with the wheel installed, and
   links to exactly what the wheel's metadata asks for. There `.ci/packaged.py` uses it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900
"""Against hanging: where other work fills both cores, the demo alone takes 300."""
AT_ONCE = 2
EXTRAS = (
    "azure",
    "deepspeed",
    "gs",
    "huggingface",
    "lightning",
    "megatron",
    "mlflow",
    "nixl",
    "openmetrics",
    "opentelemetry",
    "s3",
    "tensorboard",
    "torch-checkpointing",
    "torchft",
    "torchtitan",
    "wandb",
)
"""Those for users; `bench`, `lint`, `release` and `test` are developers'."""
NOT_INSTALLED = {
    "nixl": "the gate installs NIXL without what it asks of CUDA",
    "torchtitan": "the gate installs torchtitan without what it asks for",
}
IN_THE_WHEEL = {
    "dcp_mem/__init__.py",
    "dcp_mem/demo/as_you_like_it.txt",
    "dcp_mem/operations/report.html",
    "dcp_mem/py.typed",
}
IN_THE_SDIST = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} | IN_THE_WHEEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=EXTRAS, choices=EXTRAS, metavar="EXTRA")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dcp_mem-package-") as made:
        sdist, wheel = _built(Path(made))
        if told.keep:
            told.keep.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                (told.keep / path.name).write_bytes(path.read_bytes())
        _check(sdist, wheel)
        _owners()  # Once, before the threads ask.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            uses = {
                extra: pool.submit(_use, wheel, Path(made) / "beside", extra)
                for extra in ("", *told.only)
            }
        used = [_alone_if_failed(use, wheel, Path(made), extra) for extra, use in uses.items()]
    print(f"used from the wheel: {', '.join(filter(None, used))}")


# -- build and look --------------------------------------------------------------------------------


def _built(made: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel, which is made from the sdist."""
    source, dist = made / "source", made / "dist"
    listed = subprocess.run(
        ["/usr/bin/env", "git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    with _step("python -m build"):
        _run([sys.executable, "-m", "build", "--outdir", str(dist), str(source)], cwd=made)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def _check(sdist: Path, wheel: Path) -> None:
    with _step("twine check --strict, check-wheel-contents"):
        _run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
        _run([sys.executable, "-m", "check_wheel_contents", "--toplevel", "dcp_mem", str(wheel)])
    with tarfile.open(sdist) as opened:
        in_sdist = {name.partition("/")[2] for name in opened.getnames()}
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    for there, wanted in ((in_sdist, IN_THE_SDIST), (in_wheel, IN_THE_WHEEL)):
        if wanted - there:
            sys.exit(f"error: missing from the package: {', '.join(sorted(wanted - there))}")
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dcp_mem").rglob("*.py")}
    if own - in_wheel:
        sys.exit(f"error: modules that the wheel lacks: {', '.join(sorted(own - in_wheel))}")
    if not any(name.endswith("licenses/LICENSE") for name in in_wheel):
        sys.exit("error: the wheel has no licence")


# -- use -------------------------------------------------------------------------------------------


def _use(wheel: Path, made: Path, extra: str = "") -> str:
    """Use the package, with what an extra asks for and nothing else, away from the checkout.

    Returns the name with the extra; "" where that was left out.
    """
    name = f"dcp_mem[{extra}]" if extra else "dcp_mem"
    with _step(f"{name} in a fresh environment") as say, ExitStack() as stack:
        environment = made / (extra or "alone")
        site = _fresh(environment, wheel)
        missing = _link(site, extra)
        if missing:
            if extra not in NOT_INSTALLED:
                sys.exit(f"error: {name} asks for what isn't installed: {', '.join(missing)}")
            say(f"left out: {NOT_INSTALLED[extra]}")
            return ""
        away = environment / "away"
        away.mkdir()
        memory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="dcp_mem-package-", dir="/dev/shm")
        )
        root, options = stack.enter_context(_storage(extra, away))
        example = ROOT / "examples"
        for path in example.glob("*.py"):
            (away / path.name).write_bytes(path.read_bytes())
        (away / "packaged.py").write_bytes((ROOT / ".ci" / "packaged.py").read_bytes())
        command = [str(environment / "bin" / "python"), "-P", "packaged.py"]
        if sys.version_info < (3, 11):  # No -P yet.
            command.remove("-P")
        told = {"extra": extra, "root": root, "storage_options": dict(options)}
        _run([*command, json.dumps(told)], cwd=away, DCP_MEM_ROOT=memory)
        return name


def _alone_if_failed(use: Future[str], wheel: Path, made: Path, extra: str) -> str:
    """Return what a use returned; one that failed beside the others is tried once more, alone."""
    try:
        return use.result()
    except (Exception, SystemExit) as error:
        print(f"UNSTABLE, if it passes alone: {extra or 'the package'}: {error}", flush=True)
        return _use(wheel, made / "again", extra)


def _fresh(environment: Path, wheel: Path) -> Path:
    """Make an environment with the wheel and nothing else; return its site-packages."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    _run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)])
    (site,) = environment.glob("lib/python*/site-packages")
    return site


def _link(site: Path, extra: str) -> list[str]:
    """Link to what the wheel asks for, with all that this asks for; return what isn't there."""
    (own,) = (one for one in distributions(path=[str(site)]) if one.name == "dcp_mem")
    wanted, missing = _closure(own, extra)
    owners = _owners()
    for path in {_link_at(file, owners, wanted) for name in wanted for file in _files(name)}:
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(_source() / path)
    return missing


def _closure(own: Distribution, extra: str) -> tuple[set[str], list[str]]:
    """What a package asks for, and what that asks for; and what isn't installed of it."""
    found: set[str] = set()
    missing: list[str] = []
    done: set[tuple[str, str]] = set()
    todo = [(own, {"", extra})]
    while todo:
        asking, extras = todo.pop()
        for line in asking.requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker and not any(marker.evaluate({"extra": one}) for one in extras):
                continue
            name = canonicalize_name(needed.name)
            there = _installed().get(name)
            if name == "dcp-mem":
                todo.append((own, set(needed.extras)))
            elif there is None or not needed.specifier.contains(there.version, prereleases=True):
                missing.append(line)
            else:
                found.add(name)
                new = {one for one in {"", *needed.extras} if (name, one) not in done}
                done |= {(name, one) for one in new}
                if new:
                    todo.append((there, new))
    return found, missing


@cache
def _source() -> Path:
    import packaging

    return Path(packaging.__file__).parents[1]


@cache
def _installed() -> Mapping[str, Distribution]:
    return {
        canonicalize_name(one.name): one
        for one in distributions(path=[str(_source())])
        if isinstance(one, PathDistribution)
    }


def _files(name: str) -> Iterator[tuple[str, ...]]:
    """The files of a distribution that lie in site-packages."""
    for file in _installed()[name].files or ():
        if ".." not in file.parts and file.suffix != ".pth" and "__pycache__" not in file.parts:
            yield file.parts


@cache
def _owners() -> Mapping[tuple[str, ...], set[str]]:
    """Which distributions have files under each path of site-packages."""
    owners: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in _installed():
        for parts in _files(name):
            for length in range(1, len(parts) + 1):
                owners[parts[:length]].add(name)
    return owners


def _link_at(
    parts: tuple[str, ...], owners: Mapping[tuple[str, ...], set[str]], wanted: Iterable[str]
) -> Path:
    """The highest directory above a file in which nothing lies that isn't wanted."""
    for length in range(1, len(parts)):
        if owners[parts[:length]] <= set(wanted):
            return Path(*parts[:length])
    return Path(*parts)


@contextmanager
def _storage(extra: str, away: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Where checkpoints go: for an extra of a store, on a server of that kind."""
    if extra not in ("azure", "gs", "s3"):
        yield str(away / "run"), {}
        return
    sys.path.insert(0, str(ROOT))
    from tests.support.storage.servers import running_azurite, running_google, running_moto

    with ExitStack() as stack:
        running = {"azure": running_azurite, "gs": running_google, "s3": running_moto}[extra]
        place = stack.enter_context(stack.enter_context(running()).fresh_root())  # type: ignore[attr-defined]
        yield place.url, place.storage_options


@contextmanager
def _step(name: str) -> Iterator[object]:
    start, notes = time.monotonic(), list[str]()
    yield notes.append
    told = notes[0] if notes else "passed"
    print(f"{name}: {told} ({time.monotonic() - start:.0f} s)", flush=True)


def _run(command: list[str], cwd: Path | None = None, **more: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nerror: {' '.join(command)} exited with {done.returncode}")


if __name__ == "__main__":
    main()
