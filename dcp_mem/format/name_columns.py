"""Flattened names and their paths as columns.

The names are stored one after the other, with how each is cut into the parts of its path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeVar, overload

import numpy as np

from dcp_mem.format.column_file import Ints, Packed

Path = tuple[str | int, ...]
_T = TypeVar("_T")
_NO_PATH, _OTHER_PATH = -1, -2
"""In place of a number of parts: the name has no path, or one that doesn't make up the name.

Such a path is stored as JSON.
"""


class Deferred(Sequence[_T]):
    """A sequence that is made when an element is first needed; `make` must not fail."""

    def __init__(self, length: int, make: Callable[[], Sequence[_T]]) -> None:
        self._length, self._make = length, make
        self._made: Sequence[_T] | None = None

    def _whole(self) -> Sequence[_T]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_T]:
        return iter(self._whole())

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        return self._whole()[index]


def pack_texts(names: Sequence[str], paths: Sequence[Path | None] | None) -> Packed:
    """Return columns and blobs of the names and, where there are any, of the paths.

    The columns are:
    - ends: Where each name ends, in characters.
    - parts: The number of parts of each name's path. In the name they are joined by dots.
    - cuts: The characters of each part, negative where the part is an integer.

    `paths`: the path of each name, None where it has none; or None for no paths at all.
    """
    columns = {"ends": np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))}
    blobs = {"names": "".join(names).encode("utf-8", "surrogatepass")}
    if paths is not None:
        counts: list[int] = []
        parts: list[str | int] = []
        others = []
        for name, path in zip(names, paths, strict=True):
            if path is None:
                counts.append(_NO_PATH)
            elif ".".join(map(str, path)) == name:
                counts.append(len(path))
                parts += path
            else:
                counts.append(_OTHER_PATH)
                others.append(path)
        cuts = np.fromiter(map(len, map(str, parts)), np.int64, len(parts))
        is_integer = np.fromiter((type(part) is int for part in parts), np.bool_, len(parts))
        columns |= {"parts": np.array(counts, np.int64), "cuts": np.where(is_integer, -cuts, cuts)}
        # Not in ASCII: two escaped surrogates beside each other would be read as one character.
        blobs["other_paths"] = json.dumps(others, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    return Packed({}, columns, blobs)


def unpack_texts(packed: Packed) -> tuple[Sequence[str], Sequence[Path | None] | None]:
    """Read what `pack_texts` returned.

    Returns the names, and the paths, which are made when they are first needed. Raises KeyError,
    ValueError.
    """
    text = packed.blobs["names"].decode("utf-8", "surrogatepass")
    ends = packed.columns["ends"]
    lengths = np.diff(ends, prepend=0)
    if ends.ndim != 1 or (lengths < 0).any() or (len(ends) and ends[-1]) != len(text):
        raise ValueError("names end where there are none")
    names = [text[start:end] for start, end in pairwise([0, *ends.tolist()])]
    if "parts" not in packed.columns:
        return names, None
    parts, cuts = packed.columns["parts"], packed.columns["cuts"]
    others = _other_paths(packed.blobs)
    counts = np.maximum(parts, 0)
    if parts.shape != ends.shape or cuts.ndim != 1 or not _within(cuts, -len(text), len(text)):
        raise ValueError("paths don't fit names")
    if not _within(parts, _OTHER_PATH, len(cuts)) or counts.sum() != len(cuts):
        raise ValueError("paths don't fit names")
    if np.count_nonzero(parts == _OTHER_PATH) != len(others):
        raise ValueError("paths that are written out are too many or too few")
    starts = _starts_of_parts(ends - lengths, lengths, parts, np.abs(cuts))
    integers = np.flatnonzero(cuts < 0).tolist()
    numbers = {
        one: int(text[start : start - cuts[one]])
        for one, start in zip(integers, starts[integers], strict=True)
    }
    return names, Deferred(
        len(names), lambda: _cut(text, starts, np.abs(cuts), parts, numbers, others)
    )


def _within(column: Ints, least: int, most: int) -> bool:
    return bool(((least <= column) & (column <= most)).all())


def _starts_of_parts(firsts: Ints, lengths: Ints, parts: Ints, cuts: Ints) -> Ints:
    """Return where each part begins; raise ValueError where parts don't add up to their name."""
    counts = np.maximum(parts, 0)
    # Each part is followed by a dot, except for the last one of a name.
    before = np.concatenate([[0], np.cumsum(cuts + 1)])
    bounds = np.concatenate([[0], np.cumsum(counts)])
    expected = before[bounds[1:]] - before[bounds[:-1]] - (counts > 0)
    if (expected != lengths)[parts >= 0].any():
        raise ValueError("a path is longer or shorter than its name")
    starts: Ints = before[:-1] + np.repeat(firsts - before[bounds[:-1]], counts)
    return starts


def _cut(
    text: str,
    starts: Ints,
    cuts: Ints,
    parts: Ints,
    numbers: Mapping[int, int],
    others: Sequence[Path],
) -> list[Path | None]:
    found: list[str | int] = [
        text[start:stop]
        for start, stop in zip(starts.tolist(), (starts + cuts).tolist(), strict=True)
    ]
    for index, number in numbers.items():
        found[index] = number
    paths: list[Path | None] = []
    position, written_out = 0, iter(others)
    for count in parts.tolist():
        if count >= 0:
            paths.append(tuple(found[position : position + count]))
            position += count
        else:
            paths.append(None if count == _NO_PATH else next(written_out))
    return paths


def _other_paths(blobs: Mapping[str, bytes]) -> list[Path]:
    found: Any = json.loads(blobs["other_paths"].decode("utf-8", "surrogatepass"))
    paths = [tuple(path) for path in found]
    if not {str, int}.issuperset(map(type, chain.from_iterable(paths))):
        raise ValueError("a path of something else than text and numbers")
    return paths
