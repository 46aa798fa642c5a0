"""`Settings`, names and paths, and what environment variables say; `options.py` has the options."""

from __future__ import annotations

import hashlib
import importlib.util
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from dcp_mem.common.azure_urls import abfs_url
from dcp_mem.common.value_class import value_class
from dcp_mem.common.values import HISTORIES, RECOVERIES, RESUMES
from dcp_mem.errors import ConfigError, kind_of
from dcp_mem.policy.persistence import Persist
from dcp_mem.policy.redundancy import Redundancy
from dcp_mem.policy.retention import KeepLast, Retention

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

OnFull = Literal["wait", "skip", "raise"]
OnSlowStorage = Literal["newest", "all"]
OnReplication = Literal["wait", "skip", "cancel"]
OnNonfinite = Literal["ignore", "warn", "reject"]
AgentKind = Literal["process", "thread"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_TRANSPORTS = "dcp_mem.transports"
"""The group of entry points that connect two ranks; ours need no installed metadata."""
_OUR_TRANSPORTS = {
    "auto": "dcp_mem.nixl:connect_by_cards",
    "nixl": "dcp_mem.nixl:connect",
    "tcp": "dcp_mem.comm.transports:TcpChannel",
}
_EXTRAS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure"}
"""What `pip install 'dcp_mem[…]'` takes for URLs of a protocol."""
_CREDENTIALS_IN_URL = r"(?i)^[^/@]*:[^/@]*@|[?&](sig|token|[\w-]*signature)="
_PROTOCOL = r"[a-z][a-z0-9+.-]*"
_NAME = r"[A-Za-z0-9_=+,@%~$][A-Za-z0-9_.=+,@%~$:-]*"


@value_class(frozen=True)
class Parity:
    """Redundancy by parity over groups of k + 1 nodes; `dcp_mem.parity` makes it."""

    k: int


def parity(k: int) -> Parity:
    """Keep parity in place of copies: of each k + 1 nodes, any one may be lost.

    Parity takes 1/k of the memory that copies take.

    Args:
        k: At least 2; parity over one other node is a copy (`replicas=1`).

    Raises:
        ConfigError: k is no such number.
    """
    if type(k) is not int or k < 2:
        raise ConfigError(
            f"parity({k!r}): give a whole number of nodes from 2 up; parity over one other is "
            "replicas=1"
        )
    return Parity(k)


@value_class(kw_only=True)
class ExportOrder:
    """An export as the agent sees it."""

    to: str
    every: Persist
    of_complete: bool  # whether those are as well that stay in memory
    # what its process is given, pickled once; it may hold secrets
    request: bytes = field(repr=False)


class Purpose(NamedTuple):
    """Kind of call, job and root; ranks meet where all three are equal."""

    verb: str
    job: str = ""
    root: str = ""  # of the job on storage; "" for none

    def __str__(self) -> str:
        return f"{self.verb} {self.job} {self.root}".rstrip()


@value_class(kw_only=True)
class Settings:
    """The user's settings, checked and with defaults filled in."""

    url: str | None  # the job's root on storage; None keeps checkpoints in memory only
    memory_root: str
    job: str
    persist: Persist
    keep_memory: Retention = field(default_factory=lambda: KeepLast(2))
    keep_storage: Retention | None = None  # which checkpoints stay on storage; None for all
    memory_limit: int | None = None  # bytes that the job may occupy on a node; None for no limit
    on_full: OnFull = "wait"  # what a save does that finds no room
    # whether storage gets all checkpoints that are meant for it
    on_slow_storage: OnSlowStorage = "newest"
    # for fsspec; they may hold secrets, so they stay out of repr
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    overwrite: bool = True  # whether a save may replace a checkpoint of the same name
    agent: AgentKind = "process"
    upload_limit: int | None = None  # bytes per second that a node sends; None for no limit
    redundancy: Redundancy = field(default_factory=Redundancy)
    failure_domain: str = ""  # what fails together with this node; "" for the node alone
    # what a save does while an older checkpoint's copies are under way
    on_replication: OnReplication = "wait"
    replication_timeout: float = 120.0
    # what to do about a checkpoint with values that aren't finite, once it is complete
    on_nonfinite: OnNonfinite = "ignore"
    reuse_stored: bool = True  # whether what storage has already isn't sent again
    transport: str = "tcp"  # what moves bytes between nodes
    # what is made of checkpoints for other programs, behind training
    export: ExportOrder | None = None
    # mode of files in a directory on storage; None: as the umask has it
    storage_mode: int | None = None
    # whether the history of checkpoints lies in the root as well, where Nebula has it
    shows_history: bool = False
    # whether a save makes the checkpoint's directory at once, as torch does
    makes_directories: bool = False

    @property
    def in_common(self) -> tuple[str, ...]:
        """Texts of what must be the same on all ranks, beside job and root."""
        copies, k = self.redundancy.copies, self.redundancy.parity
        keep = self.keep_memory
        return (
            f"keep_memory={keep.count if isinstance(keep, KeepLast) else keep}",
            f"redundancy=parity({k})" if k else f"replicas={copies}",
            f"on_full={self.on_full!r}",
            f"on_slow_storage={self.on_slow_storage!r}",
            f"on_replication={self.on_replication!r}",
            f"transport={self.transport!r}",
            f"overwrite={self.overwrite}",
        )

    def purpose(self, verb: str) -> Purpose:
        """Return what connections for a kind of call are for."""
        return Purpose(verb, self.job, self.url or "")

    @property
    def keep(self) -> int:
        """The largest number of checkpoints that stay in memory."""
        return self.keep_memory.most or 1

    @property
    def persists_all(self) -> bool:
        """Whether a checkpoint that is meant for storage stays in memory until it is there."""
        return self.on_slow_storage == "all"


def transport_point(name: str) -> EntryPoint:
    """Return what loads a transport: one of ours, else one that another package offers.

    Raises ConfigError.
    """
    from importlib.metadata import EntryPoint, entry_points  # 20 ms: the agent needs none

    if name in _OUR_TRANSPORTS:
        return EntryPoint(name, _OUR_TRANSPORTS[name], _TRANSPORTS)
    others = {point.name: point for point in entry_points(group=_TRANSPORTS)}
    if name in others:
        return others[name]
    *first, last = map(repr, sorted({*_OUR_TRANSPORTS, *others}))
    raise ConfigError(
        f"transport={name!r} (or DCP_MEM_TRANSPORT): choose {', '.join(first)} or {last}"
    )


def exchange_timeout() -> float:
    """Return the seconds that a rank waits for the others: $DCP_MEM_TIMEOUT, else 600.

    Raises ConfigError.
    """
    return seconds_from("DCP_MEM_TIMEOUT", 600.0)


def wait_warning() -> float:
    """Return the seconds after which a rank says for whom it waits: $DCP_MEM_WAIT_WARNING, else 30.

    Raises ConfigError.
    """
    return seconds_from("DCP_MEM_WAIT_WARNING", 30.0)


def seconds_from(variable: str, default: float) -> float:
    """Return the seconds that an environment variable gives. Raises ConfigError."""
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{variable}={text!r}: give a number of seconds above 0")
    return seconds


def parse_bytes(size: int | str, argument: str) -> int:
    """Return the bytes of a number, or of a text such as "64GiB" or "1.5 GB".

    Raises ConfigError.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    nbytes = int(float(match[1]) * _UNITS.get(match[2].lower(), 0)) if match is not None else 0
    if not nbytes:
        raise ConfigError(f"{argument}={size!r}: give bytes, or a text such as '64GiB' or '500MB'")
    return nbytes


def memory_root_path(memory_root: str | os.PathLike[str] | None) -> str:
    """Return the memory root: the argument, else $DCP_MEM_ROOT, else /dev/shm/dcp_mem-<uid>.

    `memory_root`: an absolute or relative path; None takes the environment's or the default. Raises
    ConfigError.
    """
    root = (
        _text("memory_root", memory_root)
        if memory_root is not None
        else os.environ.get("DCP_MEM_ROOT", "")
    )
    private = f"/dev/shm/dcp_mem-{os.getuid()}"  # noqa: S108
    return os.path.abspath(os.path.expanduser(root or private))


def root_url(path: str | os.PathLike[str] | None) -> str | None:
    """Return the job's root: a path made absolute, or a URL whose protocol can be used here.

    `path`: a directory or an fsspec URL; None for a job without storage, and returned as it is.
    Raises ConfigError.
    """
    if path is None:
        return None
    text = _text("path", path)
    if not text.strip():
        raise ConfigError(
            f"path={path!r}: give a directory, an fsspec URL such as 'abfs://container/run', or "
            "None"
        )
    protocol, separator, rest = text.partition("://")
    if not separator:
        _refuse_one_slash(text)
        return os.path.abspath(os.path.expanduser(text))
    if protocol in ("file", "local"):
        return os.path.abspath(os.path.expanduser(rest))
    if re.search(_CREDENTIALS_IN_URL, rest):
        raise ConfigError(
            f"path={protocol}://… holds a password or a signature, which would end up in logs and "
            "file names: give it as "
            f"storage_options= or in the environment"
        )
    text = abfs_url(text)
    protocol, _, rest = text.partition("://")
    if not rest.strip("/"):
        raise ConfigError(
            f"path={text!r}: a bucket, container or directory is missing after {protocol}://"
        )
    _check_protocol(protocol, text)
    return text.rstrip("/")


def _text(argument: str, value: Any) -> str:
    """Return the text of a string or path; raise ConfigError for anything else."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ConfigError(f"{argument}={value!r}: give a text or a path, not {kind_of(value)}")
    return text


def _refuse_one_slash(text: str) -> None:
    """Raise ConfigError for a URL that has lost a slash, as in Path("s3://bucket/run")."""
    protocol, colon, rest = text.partition(":")
    if not colon or not rest.startswith("/") or not re.fullmatch(_PROTOCOL, protocol):
        return
    from fsspec.registry import known_implementations, registry

    if protocol in known_implementations or protocol in registry:
        rest = rest.lstrip("/")
        if protocol in ("file", "local"):
            raise ConfigError(f"path={text!r}: give /{rest}")
        raise ConfigError(
            f"path={text!r}: did you mean {protocol}://{rest}? (a Path keeps one slash only: give "
            "a text)"
        )


def _check_protocol(protocol: str, text: str) -> None:
    """Raise ConfigError unless fsspec can use this protocol here."""
    from fsspec.registry import get_filesystem_class, known_implementations, registry

    outermost = protocol.split("::")[-1]
    if outermost in registry:
        return
    known = known_implementations.get(outermost)
    if known is None:
        raise ConfigError(
            f"path={text!r}: fsspec knows no protocol {outermost!r} (is it a typing error?)"
        )
    package = str(known["class"]).split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"path={text!r}: {outermost}:// needs the Python package {package!r}: "
            f"{installing(outermost, package)}"
        )
    if package == "fsspec":  # its own file systems are cheap to import, and may need packages
        try:
            get_filesystem_class(outermost)
        except ImportError as error:
            raise ConfigError(
                f"path={text!r}: {outermost}:// can't be used here: {error}"
            ) from None


def installing(protocol: str, package: str) -> str:
    """Return the command that installs what URLs of a protocol need: our extra, else a package."""
    extra = _EXTRAS.get(protocol)
    return f"pip install 'dcp_mem[{extra}]'" if extra else f"pip install {package}"


def job_name(job: str | None, url: str | None) -> str:
    """Return the name of the job's memory directory.

    It is the argument, else made from the URL, else from the launcher's run id.

    `job`: the job's name as given; None makes one from the URL or the launcher's run id. `url`: the
    job's root as `root_url` returns it; None for a job without storage. Raises ConfigError.
    """
    if job is not None:
        if not re.fullmatch(_NAME, _text("job", job)) or len(job) > 128:
            raise ConfigError(
                f"job={job!r}: use up to 128 letters, digits and _.-=+,@%~$: (no slash, no dot in "
                "front)"
            )
        return job
    if url is not None:
        readable = (
            re.sub(r"[^A-Za-z0-9_.-]+", "-", url.rstrip("/").rsplit("/", 1)[-1]).strip(".-")[:48]
            or "job"
        )
        return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    _, run = _launchers_run()
    if run:
        return "run-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", run)[:96]
    raise ConfigError(
        "memory-only checkpoints (path=None) need a name that a restart finds again: give "
        "job='my-run'"
    )


def checkpoint_name(url: str | None, checkpoint_id: str | os.PathLike[str]) -> str:
    """Return the checkpoint's name under the root.

    A name is a name, wherever the process runs: only what is absolute is looked for under the root.

    `checkpoint_id`: a name, or a full path or URL directly under the root. Raises ConfigError.
    """
    text = _text("checkpoint_id", checkpoint_id)
    name = text.removeprefix("file://") if text.startswith("file:///") else text
    if "://" in name:
        name = _as_abfs(name)
    if os.path.isabs(name):
        name = os.path.abspath(name)
    if url is not None:
        name = name.removeprefix(url + "/")
    name = name.rstrip("/")
    if not is_checkpoint_name(name):
        raise ConfigError(
            f"checkpoint_id={text!r} is no name under {url or 'the job'}: give a plain name such "
            "as 'step-100', or a full "
            f"path or URL directly under the root"
        )
    return name


def _as_abfs(text: str) -> str:
    try:
        return abfs_url(text)
    except ConfigError:
        return text


def is_checkpoint_name(text: str) -> bool:
    """Return whether a checkpoint may have this name."""
    return (
        re.fullmatch(_NAME, text) is not None
        and len(text) <= 200
        and text not in (HISTORIES, RECOVERIES, RESUMES)
    )


def _launchers_run() -> tuple[str, str]:
    """Return the variable that has the launcher's id of this run, and the id; "" for none."""
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        run = os.environ.get(variable, "")
        if run and run != "none":
            return variable, run
    return "", ""


def run_identity() -> str:
    """Return a text that all processes of one run have in common, and no other run's have.

    "" where the launcher sets none of the variables that it is made from.
    """
    variable, run = _launchers_run()
    if run:
        return f"{variable}={run}"
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"MASTER={address}:{port}" if address and port else ""


def checked_state(state: object) -> dict[str, Any]:
    """Return a state dict to save or load into.

    Raises ConfigError.
    """
    if isinstance(state, Mapping):
        return state  # type: ignore[return-value]
    raise ConfigError(
        f'state: give a dict such as {{"app": TrainState(model, optimizer)}}, not {kind_of(state)}'
    )


def checked_step(step: object) -> int | None:
    """Return the number of a training step, or None.

    `step`: an integer from 0 up, of any integer type; None stands for no step. Raises ConfigError.
    """
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        if isinstance(step, Mapping):
            raise ConfigError(
                "step is a dict: give the number of the training step, then the state"
            )
        raise ConfigError(f"step={step!r}: give the number of the training step, 0 or more")
    return number


@runtime_checkable
class _HasItem(Protocol):
    """A tensor or array of one element: `float` of a tensor that requires grad warns."""

    def item(self) -> Any:
        """Return the element."""


def checked_metrics(metrics: object) -> dict[str, float]:
    """Return figures by name, as plain numbers.

    `metrics`: names with anything that `float` takes; None stands for no metrics. Raises
    ConfigError.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics={metrics!r}: give figures by name, such as {{'loss': 0.3}}")
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"metrics: {name!r} is no name; give texts")
        try:
            figure = float(value.item() if isinstance(value, _HasItem) else value)
        except (TypeError, ValueError, RuntimeError):  # the last: of a tensor with several elements
            raise ConfigError(f"metrics: {name!r} is {value!r}, which is no number") from None
        found[str.__str__(name)] = figure  # of an enumeration's member, its text
    return found
