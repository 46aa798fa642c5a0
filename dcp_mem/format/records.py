"""Records as files of JSON: what their dataclasses say is written, and checked when it is read.

A `Record` is a dataclass with a file of its own. Its fields are texts, numbers, truth values and
bytes, other dataclasses, enums, and tuples and mappings of those; a class of columns, which has a
form of its own, says it in `to_fields`. The file has a head with the form, its version and a
checksum of the rest.

This isn't `common.sendable`, though both go by dataclasses: what ranks send names its own classes,
and is read by whoever trusts the sender. A file names its fields, for people and other tools, and
whoever reads it knows which record it must be.
"""

from __future__ import annotations

import base64
import json
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from dcp_mem.errors import ManifestInvalid

VERSION = 3
DAMAGE = (LookupError, TypeError, ValueError, AttributeError, OverflowError, zlib.error)
"""Errors of reading fields that show a file to be damaged."""
_BODY = ', "body": '
R = TypeVar("R", bound="Record")
T = TypeVar("T")
_Reader = Callable[[Any], Any]


class Record:
    """A dataclass with a file of its own."""

    __slots__ = ()
    form: ClassVar[str]

    def to_json(self) -> bytes:
        """Return the record as a file."""
        body = json.dumps(self, default=facts_of, separators=(",", ":"), sort_keys=True)
        crc = zlib.crc32(body.encode())
        head = {"format": f"dcp_mem/{self.form}", "version": VERSION, "crc": crc}
        return (json.dumps(head)[:-1] + f"{_BODY}{body}}}").encode()

    @classmethod
    def from_json(cls: type[R], data: bytes) -> R:
        """Read what `to_json` returned.

        Raises ManifestInvalid.
        """
        facts = _body(cls.form, data)
        try:
            record = made(cls, cls._unpacked(facts, len(data)))
            record._refuse_odd_fields()
        except DAMAGE as error:
            raise ManifestInvalid(
                f"a record of dcp_mem's ({cls.form}) is damaged: {error}"
            ) from None
        return record

    @classmethod
    def _unpacked(cls, facts: dict[str, Any], file_nbytes: int) -> dict[str, Any]:
        """Return the fields with those made that have a form of their own."""
        return facts

    def _refuse_odd_fields(self) -> None:
        """Raise ValueError where a field holds what no such record has."""


def facts_of(value: Any) -> Any:
    """Return what JSON says of a value that it doesn't know."""
    if hasattr(value, "to_fields"):
        return value.to_fields()
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} can't be written down")


def made(kind: type[T], facts: Any) -> T:
    """Make a value of what `facts_of` said of it; what is made already stays.

    Raises TypeError, ValueError, OverflowError.
    """
    if isinstance(facts, kind):
        return facts
    if not isinstance(facts, dict):
        raise TypeError(f"of type {type(facts).__name__}, not fields by name")
    readers, needed = _readers(kind)  # type: ignore[arg-type]
    if facts.keys() - readers.keys() or needed - facts.keys():
        odd = sorted(facts.keys() - readers.keys())[:1] or sorted(needed - facts.keys())
        raise ValueError(f"it lacks or misnames a field ({odd[0]:.40})")
    return kind(**{name: _field(name, readers[name], fact) for name, fact in facts.items()})


def _field(name: str, read: _Reader, fact: Any) -> Any:
    try:
        return read(fact)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


@cache
def _readers(kind: type) -> tuple[dict[str, _Reader], set[str]]:
    """Return how each field of a dataclass is read, and which must be there."""
    hints = get_type_hints(kind)
    needed = {
        one.name
        for one in fields(kind)
        if one.default is MISSING and one.default_factory is MISSING
    }
    return {one.name: _reader(hints[one.name]) for one in fields(kind)}, needed


def _reader(hint: Any) -> _Reader:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (str, bool, int):
        return partial(_exactly, (hint,))
    if hint is float:
        return _number
    if hint is bytes:
        return partial(base64.b64decode, validate=True)
    if origin in (Union, types.UnionType):  # of one kind, or None
        some = _reader(inner[0])
        return lambda fact: None if fact is None else some(fact)
    if origin is tuple:
        return partial(_sequence, _reader(inner[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return partial(_mapping, _reader(inner[1]))
    return hint if issubclass(hint, Enum) else partial(made, hint)


def _exactly(kinds: tuple[type, ...], fact: Any) -> Any:
    if type(fact) not in kinds:
        raise TypeError(f"of type {type(fact).__name__}, not {kinds[0].__name__}")
    return fact


def _number(fact: Any) -> float:
    float(_exactly((float, int), fact))  # an integer may be too large for one
    return fact  # type: ignore[no-any-return]


def _sequence(read: _Reader, facts: Any) -> tuple[Any, ...]:
    return tuple(map(read, _exactly((list,), facts)))


def _mapping(read: _Reader, facts: Any) -> dict[str, Any]:
    return {name: read(fact) for name, fact in _exactly((dict,), facts).items()}


def _body(form: str, data: bytes) -> dict[str, Any]:
    what = f"a record of dcp_mem's ({form})"
    head, _, body = data.partition(_BODY.encode())
    try:
        document = json.loads(head + b"}")
        version, found, crc = document["version"], document["format"], document["crc"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestInvalid(f"no record of dcp_mem's ({form}): {error}") from None
    if found != f"dcp_mem/{form}" or version != VERSION:
        raise ManifestInvalid(
            f"{found} version {version} is not {form} version {VERSION}: use the dcp_mem that "
            "wrote it, or torch's own readers"
        )
    if body[-1:] != b"}" or zlib.crc32(body[:-1]) != crc:
        raise ManifestInvalid(f"{what} is damaged (checksum)")
    try:
        facts = json.loads(body[:-1])
    except (ValueError, RecursionError) as error:
        raise ManifestInvalid(f"{what} is damaged: {error}") from None
    if not isinstance(facts, dict):
        raise ManifestInvalid(f"{what} is damaged: it holds a {type(facts).__name__}")
    return facts


def moment_text(moment: float) -> str:
    """Return a time in seconds since the epoch as ISO 8601 has it; "" for 0.0."""
    if not moment:
        return ""
    return datetime.fromtimestamp(moment, timezone.utc).isoformat(timespec="microseconds")


def moment_of(text: str) -> float:
    """Read what `moment_text` returned.

    Raises TypeError, ValueError, OverflowError.
    """
    if text == "":
        return 0.0
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError("a time without its zone")
    return found.timestamp()
