"""Random damage to files of a job's two checkpoints, and the loads that meet it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dcp_mem import NoRecoverableCheckpoint
from tests.support.checkpoints.jobs import Job, Loaded, load_anew, save, wait_until
from tests.support.processes.forks import raised_by

Act = Callable[[bytearray, Random], None]


def _flip(data: bytearray, chance: Random) -> None:
    for _ in range(chance.choice([1, 1, 5])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _zero_a_part(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    length = min(len(data) - start, chance.choice([8, 512, 4096]))
    data[start : start + length] = bytes(length)


def _zero_all(data: bytearray, chance: Random) -> None:
    data[:] = bytes(len(data))


def _garbage(data: bytearray, chance: Random) -> None:
    start = chance.randrange(len(data))
    length = min(len(data) - start, chance.choice([3, 100, 2000]))
    data[start : start + length] = chance.randbytes(length)


def _cut(data: bytearray, chance: Random) -> None:
    del data[chance.randrange(len(data)) :]


def _insert(data: bytearray, chance: Random) -> None:
    data[chance.randrange(len(data)) : 0] = b"\0"


DAMAGES: tuple[Act, ...] = (_flip, _flip, _zero_a_part, _zero_all, _garbage, _cut, _insert)


@dataclass(frozen=True)
class Damage:
    """Files that are damaged at once, and the place that is lost besides, if any."""

    acts: tuple[tuple[Path, Act], ...]
    lost: Path | None

    def __str__(self) -> str:
        acts = ", ".join(
            f"{act.__name__.strip('_')} of {'/'.join(path.parts[-4:])}" for path, act in self.acts
        )
        return acts + (f", {self.lost} lost" if self.lost else "")


def save_two_verified(job: Job) -> None:
    """Save step-1 and step-2, durable and with checksums in memory."""
    with job.writer(agent="thread") as writer:
        for number in (1, 2):
            save(writer, number)
            writer.wait(f"step-{number}", timeout=60)
            wait_until(lambda number=number: _is_verified(job, number), "checksums")  # type: ignore[misc]


def _is_verified(job: Job, number: int) -> bool:
    """Whether a checkpoint in memory has checksums, and shares no file with another one."""
    directory = job.directory / f"step-{number}" / ".dcp_mem"
    catalogs = list(directory.glob("catalog-*"))
    if len(catalogs) != 1 or not any(directory.glob("checksums-*.json")):
        return False  # or a temporary file is on its way to its name
    with suppress(FileNotFoundError):
        return catalogs[0].stat().st_nlink == 1
    return False


def files_of(job: Job) -> list[Path]:
    """All files of checkpoints, in memory and in a directory as storage."""
    roots = (job.directory, Path(str(job.url)))
    return sorted(path for root in roots for path in root.glob("step-*/**/*") if path.is_file())


def chosen_damage(job: Job, files: list[Path], chance: Random, most: int = 1) -> Damage:
    """Choose files and what is done to them, mostly with one place alone left.

    Args:
        job: With a directory as storage.
        files: Of the job, in both places.
        chance: Chooses.
        most: How many files are damaged at most.
    """
    roots = (job.directory, Path(str(job.url)))
    lost = chance.choice([None, *roots, *roots])
    left = [path for path in files if lost is None or lost not in path.parents]
    chosen = chance.sample(left, chance.choice([1, most]))
    return Damage(tuple((path, chance.choice(DAMAGES)) for path in chosen), lost)


def load_damaged(job: Job, damage: Damage, chance: Random) -> tuple[int, str]:
    """Load while files are damaged; they are whole again afterwards.

    Returns:
        The number of the state that was loaded, 0 for none; and what went wrong, "" for nothing.
        `load_anew` compares all of a state.
    """
    url = Path(str(job.url))
    alone = Job(None if damage.lost == url else job.url, job.memory)
    with _aside(job.directory, damage.lost == job.directory), _damaged(damage, chance):
        outcome = load_or_error(alone)
    if isinstance(outcome, Loaded):
        is_silent = outcome.number == 1 and not outcome.report.passed_over
        return outcome.number, "step-1, and the report says nothing" if is_silent else ""
    if len(damage.acts) > 1 and isinstance(outcome, NoRecoverableCheckpoint):
        return 0, ""  # both checkpoints are damaged
    return 0, f"{type(outcome).__name__}: {outcome}"


def load_or_error(job: Job, verify: bool = True) -> Loaded | Exception:
    """Load the newest checkpoint, leaving no record; return the error where that raises."""
    loaded: list[Loaded] = []
    error = raised_by(lambda: loaded.append(load_anew(job, record=False, verify=verify)))
    return error or loaded[0]


@contextmanager
def _aside(directory: Path, is_lost: bool) -> Iterator[None]:
    """Move a directory away for a while."""
    aside = directory.with_name("aside")
    if is_lost:
        directory.rename(aside)
    try:
        yield
    finally:
        if is_lost:
            shutil.rmtree(directory, ignore_errors=True)
            aside.rename(directory)


@contextmanager
def _damaged(damage: Damage, chance: Random) -> Iterator[None]:
    whole = {path: path.read_bytes() for path, _ in damage.acts}
    try:
        for path, act in damage.acts:
            data = bytearray(whole[path])
            if data:
                act(data, chance)
            path.write_bytes(data)
        yield
    finally:
        for path, content in whole.items():
            path.write_bytes(content)
