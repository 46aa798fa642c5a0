"""`HuggingFaceExport`: Hugging Face directories that are made of checkpoints behind training."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from dcp_mem.common.files import umask
from dcp_mem.common.value_class import value_class
from dcp_mem.config import ExportOrder, parse_bytes, root_url
from dcp_mem.errors import ConfigError
from dcp_mem.policy.persistence import Persist, every_n_saves

INDEX = "model.safetensors.index.json"
"""Name of the file that makes a directory an export; it is written last."""
DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that tensors can be converted to, and from."""
_MOST_BYTES = 8 << 20
_WEIGHTS = r".*\.(safetensors|bin|ckpt|gguf|h5|msgpack|onnx|ot|pt|pth|tflite)(\.index\.json)?"

Rename = Callable[[str], str | None]
"""Returns the name of a tensor in the export; None leaves the tensor out."""


@value_class(kw_only=True, frozen=True)
class HuggingFaceExport:
    """Turns checkpoints into directories that Hugging Face's `from_pretrained` loads.

    Give it to `MemoryStorageWriter` or `CheckpointManager` as `export=`. A process beside the
    agent makes the directories, one at a time, behind training and whenever no flush is due:
    `<to>/<checkpoint id>/`, with `model-0000X-of-0000Y.safetensors`, `model.safetensors.index.json`
    and the files that you hand in. It takes about as much memory as a shard.

    A directory appears whole: on file systems under its name once all of it is written, on object
    stores its index is put last. What fails is tried again, logged, and told by `status()`; it
    never fails a save or a flush.

    Args:
        to: A path or URL, not the job's own root. In tmpfs it takes memory beside the job's.
        part: Only tensors below this entry of the state dict, whose names lose it: "model" makes
            "layers.0.weight" of "model.layers.0.weight". "" takes all tensors.
        names: Other names, by a table or an importable function of the name; None leaves a tensor
            out. Names that a table lacks stay as they are.
        dtype: A floating-point dtype, or its name, for all tensors of such a dtype; None leaves
            them as they are.
        shard_bytes: Bytes (or "5GB") of tensors in a file at most; a larger tensor has a file of
            its own.
        files: Paths of files to put beside the weights, such as config.json; a directory stands
            for its files, without weights. They are read as each export is made, on the node that
            makes it.
        every: Which checkpoints are exported: each n-th one, or every_n_steps(n),
            every_seconds(s). The first one is in any case.
        of: "durable": checkpoints that storage has; "complete": also those that `persist=` leaves
            in memory, as long as they stay there on one node.
        keep: Exports that stay under `to`; older ones of this job are deleted once a new one is
            whole. None keeps all.
        storage_options: For `to`, passed to fsspec; None takes the job's where both URLs have the
            same protocol.

    Raises:
        ConfigError: An argument can't work.
    """

    to: str
    part: str
    names: Mapping[str, str | None] | Rename | None
    dtype: str | None
    shard_nbytes: int
    files: tuple[str, ...]
    every: Persist
    of: str
    keep: int | None
    storage_options: Mapping[str, Any] | None = field(repr=False)
    umask: int = field(repr=False)

    def __init__(
        self,
        to: str | os.PathLike[str],
        *,
        part: str = "model",
        names: Mapping[str, str | None] | Rename | None = None,
        dtype: object = None,
        shard_bytes: int | str = "5GB",
        files: Sequence[str | os.PathLike[str]] = (),
        every: int | Persist = 1,
        of: str = "durable",
        keep: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        url = root_url(to)
        if url is None:
            raise ConfigError("to=None: give a directory or URL for the exports")
        if of not in ("durable", "complete"):
            raise ConfigError(f"of={of!r}: choose 'durable' or 'complete'")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: give a number of exports, at least 1, or None")
        if not isinstance(part, str):
            raise ConfigError(f"part={part!r}: give the name of an entry, such as 'model', or ''")
        for name, value in {
            "to": url,
            "part": part.rstrip("."),
            "names": _renaming(names),
            "dtype": _dtype(dtype),
            "shard_nbytes": parse_bytes(shard_bytes, "shard_bytes"),
            "files": _files(files),
            "every": _policy(every),
            "of": of,
            "keep": keep,
            "storage_options": None if storage_options is None else dict(storage_options),
            "umask": umask(),
        }.items():
            object.__setattr__(self, name, value)


def order_of(export: HuggingFaceExport) -> ExportOrder:
    """Return what the agent must know of an export. Raises ConfigError."""
    try:
        packed = pickle.dumps(export)
    except Exception as error:
        raise ConfigError(
            f"export= can't be sent to the agent ({type(error).__name__}: {error}): give plain "
            f"values as storage_options"
        ) from None
    # Its process has to find the module of a function in `names`.
    request = zlib.compress(pickle.dumps((list(map(os.path.abspath, sys.path)), packed)))
    if len(request) > _MOST_BYTES:
        raise ConfigError("names= is too large a table: give a function instead")
    return ExportOrder(
        to=export.to, every=export.every, of_complete=export.of == "complete", request=request
    )


def export_of(request: bytes) -> HuggingFaceExport:
    """Return what an order's request holds, of a process of this user's."""
    paths, packed = pickle.loads(zlib.decompress(request))
    sys.path += [path for path in paths if path not in sys.path]
    found = pickle.loads(packed)
    assert isinstance(found, HuggingFaceExport)
    return found


def _policy(every: int | Persist) -> Persist:
    if isinstance(every, Persist) and not every.is_never:
        return every
    if type(every) is int and every >= 1:
        return every_n_saves(every)
    raise ConfigError(
        f"every={every!r}: give a number of checkpoints, at least 1, every_n_steps(n) or "
        f"every_seconds(s)"
    )


def _renaming(
    names: Mapping[str, str | None] | Rename | None,
) -> dict[str, str | None] | Rename | None:
    if names is None:
        return None
    if isinstance(names, Mapping):
        entries: Iterable[tuple[object, object]] = names.items()
        for name, new in entries:
            if not isinstance(name, str) or not (new is None or (isinstance(new, str) and new)):
                raise ConfigError(
                    f"names: {name!r} is to become {new!r}; give texts, or None to leave it out"
                )
        return dict(names)
    if not callable(names):
        raise ConfigError(
            f"names={names!r}: give a table of names, or an importable function of a name"
        )
    try:
        pickle.dumps(names)
    except Exception:
        where = "a lambda, or within a function"
    else:
        where = "" if inspect.isfunction(names) else "no plain function"
    if getattr(names, "__module__", None) == "__main__":
        where = "in the script that runs"
    if where:
        raise ConfigError(
            f"names={names!r} is {where}, so the process that exports can't import it: put a plain "
            f"function into a module, or give a table"
        )
    return names


def _dtype(dtype: object) -> str | None:
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}, or None")
    return text


def _files(files: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the paths of all files, without weights; raise ConfigError for what can't be read."""
    if isinstance(files, (str, os.PathLike)):
        files = (files,)
    found = [path for one in files for path in _files_at(os.path.abspath(os.fspath(one)))]
    names = [os.path.basename(path) for path in found]
    for path, name in zip(found, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"files: {name} is there twice")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"files: {path} isn't there, or can't be read")
    return tuple(found)


def _files_at(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        if re.fullmatch(_WEIGHTS, os.path.basename(path)):
            raise ConfigError(f"files: {path} is a file of weights, which the export makes itself")
        yield path
        return
    with os.scandir(path) as entries:
        names = sorted(one.name for one in entries if one.is_file())
    yield from (os.path.join(path, name) for name in names if not re.fullmatch(_WEIGHTS, name))
