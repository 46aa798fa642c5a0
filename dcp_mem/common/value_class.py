"""The package's values: dataclasses that are compiled when the first of their values is made.

Compiling one takes 0.3 ms; most of those that a save imports it never makes (ADRs 82 and 93).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        return lambda function: function


@dataclass_transform(frozen_default=True)
def value_class(
    cls: Any = None,
    *,
    kw_only: bool = False,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = True,
) -> Any:
    """Make a dataclass. Type checkers see that nobody changes its fields; where `frozen` is said,
    Python does so as well.
    """
    if cls is None:
        return lambda cls: value_class(cls, kw_only=kw_only, eq=eq, frozen=frozen, slots=slots)
    given = {name: value for name, value in vars(cls).items() if name not in _OF_THE_CLASS_ALONE}
    given["__qualname__"] = cls.__qualname__
    names = [name for name, kind in cls.__annotations__.items() if not kind.startswith(_NO_FIELD)]
    namespace = {name: value for name, value in given.items() if name not in names}
    if slots:
        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
        namespace["__slots__"] = tuple(name for name in names if name not in inherited)
    if frozen:
        namespace |= _FROZEN
    if cls.__repr__ is object.__repr__:
        namespace["__repr__"] = _repr

    def compile_late() -> None:
        # Of another class each time: `dataclass` changes it, and two threads may come at once.
        made: Any = type(cls)(cls.__name__, cls.__bases__, {**given, "__doc__": cls.__name__})
        made = dataclass(made, kw_only=kw_only, repr=False, eq=False, frozen=frozen)
        compared = _comparing([one.name for one in fields(made) if one.compare]) if eq else {}
        for name, value in {**compared, **{name: vars(made)[name] for name in _COMPILED}}.items():
            setattr(late, name, value)

    for name in ("__init__", "__dataclass_fields__", *(("__eq__", "__hash__") if eq else ())):
        namespace[name] = _Late(name, compile_late)
    late = type(cls)(cls.__name__, cls.__bases__, namespace)
    return late


_NO_FIELD = ("KW_ONLY", "ClassVar")
_OF_THE_CLASS_ALONE = ("__dict__", "__weakref__")
_COMPILED = ("__init__", "__dataclass_fields__", "__dataclass_params__", "__match_args__")


class _Late:
    """An attribute of a class that isn't compiled yet."""

    def __init__(self, name: str, compile_late: Callable[[], None]) -> None:
        self._name, self._compile_late = name, compile_late

    def __get__(self, value: object, owner: type) -> Any:
        self._compile_late()
        return getattr(owner if value is None else value, self._name)


def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse(self: object, name: str, *_: object) -> None:
    raise FrozenInstanceError(f"{type(self).__qualname__} is frozen: {name!r} can't be changed")


def _set_state(self: object, state: Any) -> None:
    for name, value in (state[1] if isinstance(state, tuple) else state).items():
        object.__setattr__(self, name, value)


_FROZEN = {"__setattr__": _refuse, "__delattr__": _refuse, "__setstate__": _set_state}


def _comparing(names: list[str]) -> dict[str, Any]:
    """Return `__eq__` and `__hash__` by these fields; a load calls them a hundred times."""

    def one_or_none(value: Any) -> tuple[Any, ...]:
        return tuple([getattr(value, name) for name in names])

    compared = attrgetter(*names) if len(names) > 1 else one_or_none

    def equal(self: Any, other: object) -> bool:
        return compared(self) == compared(other) if type(other) is type(self) else NotImplemented

    def hashed(self: Any) -> int:
        return hash(compared(self))

    return {"__eq__": equal, "__hash__": hashed}
