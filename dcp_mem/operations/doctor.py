"""Check what training will need of this machine and of the storage."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from dcp_mem.comm.addresses import listening_socket
from dcp_mem.common.mounts import mount_of
from dcp_mem.common.releases import installed, untested
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import State
from dcp_mem.errors import CheckpointExists, DcpMemError, gib
from dcp_mem.flushing import agent_handle
from dcp_mem.memory.root import open_root
from dcp_mem.operations.inventory import list_jobs
from dcp_mem.storage import Storage
from dcp_mem.storage.posix_mounts import native_url
from dcp_mem.storage.retry import RetryPolicy
from dcp_mem.storage.routes import open_storage

_RETRIES = RetryPolicy(
    tries=2,
    first_pause_seconds=0.5,
    longest_pause_seconds=1.0,
    longest_asked_seconds=5.0,
    deadline_seconds=15.0,
)
_LEAST_TMPFS_NBYTES = 1 << 30
_LEAST_OPEN_FILES = 4096
_MOST_SECONDS_APART = 30.0
_SLOW_LOOKUP_SECONDS = 0.2
_UNLIMITED = 1 << 60
"""Bytes from which on a limit is none."""
_LOG_TAIL_NBYTES = 64 << 10
_CGROUP = "/sys/fs/cgroup"
_PROBE_OF_S3 = ".dcp_mem/conditions"
_LOCK_OF_DIRECTORIES = ".dcp_mem/lock"


class Severity(str, Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@value_class
class Check:
    name: str
    verdict: Severity
    found: str
    advice: str = ""  # what to do; "" if nothing


def judged(name: str, found: str, advice: str = "", worst: Severity = Severity.WARN) -> Check:
    """Return a check that is OK where there is nothing to advise."""
    return Check(name, worst if advice else Severity.OK, found, advice)


def examine(
    memory_root: str, url: str | None, storage_options: Mapping[str, Any]
) -> Iterator[Check]:
    """Check this machine, and the storage if there is a URL; yield each check as it is made. No
    check raises. On storage, a small object is written under a name of its own, read, and deleted.
    """
    yield from _versions()
    yield from _memory(memory_root)
    yield from _limits()
    yield from _names()
    yield from _agent(memory_root)
    if url is not None:
        yield from _storage(url, storage_options)


# -- software --------------------------------------------------------------------------------------


def _versions() -> Iterator[Check]:
    yield judged("python", f"{platform.python_version()} on Linux {platform.release()}")
    if (torch := installed("torch")) is None:
        yield judged("torch", "not installed", "pip install torch", Severity.FAIL)
    else:
        yield judged("torch", torch, untested("torch"))
    packages = {name: installed(name) for name in ("fsspec", "s3fs", "adlfs", "gcsfs")}
    known = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    yield judged("storage packages", known or "none")


# -- memory ----------------------------------------------------------------------------------------


def _memory(root: str) -> Iterator[Check]:
    existing = root
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    if existing == root:
        try:
            open_root(root)
        except DcpMemError as error:
            yield judged("memory root", root, str(error), Severity.FAIL)
            return
    elif existing != os.path.dirname(root) or not os.access(existing, os.W_OK):
        advice = "make its parent directory, or set DCP_MEM_ROOT"
        yield judged("memory root", f"{root} can't be made", advice, Severity.FAIL)
        return
    kind = mount_of(existing).kind
    if kind in ("tmpfs", "ramfs", "hugetlbfs"):
        made = "" if existing == root else ", made by the first save"
        yield judged("memory root", f"{root} on {kind}{made}")
    else:
        advice = "saves are as slow as that: set DCP_MEM_ROOT to a tmpfs"
        yield judged("memory root", f"{root} lies on {kind}", advice)
    yield _room(existing)
    yield _huge_pages(existing)
    yield _container(existing)


def _room(path: str) -> Check:
    facts = os.statvfs(path)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    advice = (
        "keep + 1 checkpoints must fit: mount a larger tmpfs (Docker: --shm-size), or run "
        "dcp-mem gc"
    )
    is_enough = size >= _LEAST_TMPFS_NBYTES and free >= size // 10
    return judged("room in memory", f"{gib(free)} of {gib(size)} free", "" if is_enough else advice)


def _huge_pages(path: str) -> Check:
    release = tuple(
        int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdecimal()
    )
    of_mount = next((option for option in mount_of(path).options if option.startswith("huge=")), "")
    setting = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = setting.partition("[")[2].partition("]")[0]
    found = ", ".join(
        filter(
            None, (of_mount, chosen and f"shmem_enabled={chosen}", f"Linux {platform.release()}")
        )
    )
    advice = ""
    if not setting or chosen == "deny":
        advice = "the kernel makes none in tmpfs: first saves take several times longer"
    elif release < (6, 1) and of_mount not in ("huge=always", "huge=within_size"):
        advice = (
            "mount a tmpfs with huge=within_size (README): first saves get several times faster"
        )
    return judged("huge pages", found, advice)


def _container(path: str) -> Check:
    limit, used = _memory_limit()
    facts = os.statvfs(path)
    size = facts.f_blocks * facts.f_frsize
    if limit >= _UNLIMITED:
        return judged("container's memory", "no limit")
    advice = (
        f"what lies in tmpfs counts, and may grow to {gib(size)}: leave the trainers room by "
        f"memory_limit="
    )
    found = f"{gib(used)} of {gib(limit)} used"
    return judged("container's memory", found, advice if size > limit else "")


def _memory_limit() -> tuple[int, int]:
    """Return the tightest limit of this process's cgroups (_UNLIMITED: none), and what is used of
    it.
    """
    limit, used = _UNLIMITED, 0
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, files = (_CGROUP, ("memory.max", "memory.current"))
        if controllers:
            top, files = f"{_CGROUP}/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        path = group.rstrip("/")
        while True:  # a group can't use more than the groups that it is part of
            here = _number(f"{top}{path}/{files[0]}")
            if here < limit:
                limit, used = here, _number(f"{top}{path}/{files[1]}") % _UNLIMITED
            if not path:
                break
            path = path.rpartition("/")[0]
    return limit, used


def _number(path: str) -> int:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else _UNLIMITED


def _read(path: str) -> str:
    """Return the text of a file of the kernel's; "" where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except OSError:
        return ""


def _limits() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = min(hard, 65536) if hard > 0 else 65536
    advice = f"raise it (ulimit -n {enough}): a load opens every segment that lies on the node"
    is_low = 0 <= soft < _LEAST_OPEN_FILES
    found = f"up to {soft}" if soft >= 0 else "no limit"
    yield judged("open files", found, advice if is_low else "")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield judged("locked memory", "no limit" if soft < 0 else f"up to {gib(soft)}")


def _names() -> Iterator[Check]:
    """Check how long torch is held up by each connection to a job's store. It looks up the name of
    the other end's address, on both ends; the store's host serves nobody else meanwhile.
    """
    with listening_socket() as listener:
        own = str(listener.getsockname()[0])
    seconds = []
    for address in (own, "127.0.0.1"):
        # As sockets have it that take IPv4 and IPv6, which torch's do.
        seen = address if ":" in address else f"::ffff:{address}"
        started = time.monotonic()
        with contextlib.suppress(OSError):
            socket.getnameinfo((seen, 0, 0, 0), 0)
        seconds.append(time.monotonic() - started)
    slowest = max(seconds)
    found = f"{1000 * slowest:.0f} ms to look up this machine's address"
    advice = (
        "torch does so for each connection to the job's store, so that large jobs start slowly or "
        "not at all: have the name server answer for the nodes' addresses, list them in "
        "/etc/hosts, or start the job with RES_OPTIONS='timeout:1 attempts:1'"
    )
    yield judged("names", found, "" if slowest < _SLOW_LOOKUP_SECONDS else advice)


# -- agent -----------------------------------------------------------------------------------------


def _agent(root: str) -> Iterator[Check]:
    try:
        jobs = list_jobs(root)
    except DcpMemError:
        return  # `_memory` has reported it
    ended = (State.DURABLE, State.SKIPPED)
    waiting = sum(one.persist and one.state not in ended for job in jobs for one in job.checkpoints)
    counts = f"jobs in memory: {len(jobs)}, live: {sum(job.is_live for job in jobs)}"
    if agent_handle.is_alive(root):
        yield judged("agent", f"runs; {counts}")
    elif waiting:
        found = f"doesn't run, and checkpoints await their flush: {waiting}"
        advice = "dcp-mem flush ROOT brings them there; so does the job's next start"
        yield judged("agent", found, advice)
    else:
        yield judged("agent", f"not needed; {counts}")
    path = agent_handle.log_path(root)
    trouble = [line for line in _tail(path) if " ERROR " in line or " WARNING " in line]
    if trouble:
        yield judged("agent's log", trouble[-1].strip(), f"the last of {len(trouble)} in {path}")


def _tail(path: str) -> list[str]:
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LOG_TAIL_NBYTES))
            return stream.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


# -- storage ---------------------------------------------------------------------------------------


def _storage(url: str, storage_options: Mapping[str, Any]) -> Iterator[Check]:
    directory = f".dcp_mem-doctor-{uuid.uuid4().hex[:8]}"
    root, key, data = url.rstrip("/"), f"{directory}/probe", os.urandom(1024)
    try:
        storage = open_storage(url, storage_options, _RETRIES)
    except DcpMemError as error:
        yield judged("storage", url, str(error), Severity.FAIL)
        return
    if os.path.isabs(root):
        yield _mount(root)
    steps: dict[str, Callable[[], Check | None]] = {
        "storage: list": lambda: judged(
            "storage: list", f"{sum(one.is_directory for one in storage.ls(''))} names"
        ),
        "storage: put": lambda: storage.put(key, data),
        "storage: get": lambda: _is_same(storage, key, data),
        "storage: commit": lambda: _commits(storage, key),
        "storage: conditions": lambda: _has_conditions(
            storage, open_storage(f"{root}/{directory}", storage_options, _RETRIES), directory
        ),
        "storage: clock": lambda: _clock(storage, directory),
        "storage: delete": lambda: _is_deleted(storage, directory, key),
    }
    for name, step in steps.items():
        started = time.monotonic()
        try:
            found = step()
        except DcpMemError as error:
            yield judged(name, "failed", str(error), Severity.FAIL)
            break
        yield found or judged(name, f"{1000 * (time.monotonic() - started):.0f} ms")
    with contextlib.suppress(DcpMemError):
        storage.delete(key)


def _mount(root: str) -> Check:
    mount, native = mount_of(root), native_url(root)
    advice = (
        ""
        if not mount.program
        else (
            "a mount by FUSE: it may have locks on this host alone, and caches of its own. "
            f"{native or 'The URL of the store itself'} takes less, if it is an object store"
        )
    )
    return judged("storage mount", f"{mount.kind} at {mount.directory}", advice)


def _is_same(storage: Storage, key: str, data: bytes) -> Check | None:
    if storage.get(key) == data:
        return None
    return judged("storage: get", "other bytes than were put", "don't trust it", Severity.FAIL)


def _commits(storage: Storage, key: str) -> Check | None:
    """Check what the commit rests on: that a conditional put doesn't replace what is there."""
    try:
        storage.put(key, b"", create=True)
    except CheckpointExists:
        return None
    found = "a conditional put replaced what was there"
    advice = "overwrite=False isn't safe on this storage"
    return judged("storage: commit", found, advice, Severity.FAIL)


def _has_conditions(storage: Storage, probed: Storage, directory: str) -> Check | None:
    """Check that of two runs at the root, the older one is kept from replacing and deleting. The
    directory is probed as a root of its own: what the check leaves there is deleted.
    """
    try:
        probed.put("old", b"old")
        if not probed.has_conditions():
            found = "none: it can't put or delete on condition that nothing has changed"
            advice = (
                "let one run at a time use this root: two at once can replace each other's "
                "checkpoints of one name, and a run deletes nothing that another run has put"
            )
            return judged("storage: conditions", found, advice)
        if probed.swap("old", b"other", b"new") or not probed.swap("old", b"old", b"new"):
            found = "a put with a condition was made against it, or not made although it held"
            advice = "don't let two runs use this root: they could destroy each other's checkpoints"
            return judged("storage: conditions", found, advice, Severity.FAIL)
        return None
    finally:
        for left in ("old", _PROBE_OF_S3, _LOCK_OF_DIRECTORIES):
            storage.delete(f"{directory}/{left}")


def _clock(storage: Storage, directory: str) -> Check | None:
    put = next((entry.modified for entry in storage.ls(directory) if entry.modified), 0.0)
    apart = time.time() - put
    if not put:
        return judged("storage: clock", "storage doesn't tell")
    is_near = abs(apart) < _MOST_SECONDS_APART
    advice = "set this machine's clock (NTP): signed requests fail once it is far off"
    return judged("storage: clock", f"{abs(apart):.0f} s apart", "" if is_near else advice)


def _is_deleted(storage: Storage, directory: str, key: str) -> Check | None:
    storage.delete(key)
    if not storage.ls(directory):
        return None
    advice = "allow deleting: retention and dcp-mem rm need it"
    return judged("storage: delete", f"{key} is still there", advice, Severity.FAIL)
