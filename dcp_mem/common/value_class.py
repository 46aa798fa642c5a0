"""The package's values: dataclasses that share their methods, and compile `__init__` when the first
value is made (ADRs 82 and 93).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        return lambda function: function


T = TypeVar("T")


@overload
@dataclass_transform(frozen_default=True)
def value_class(cls: type[T]) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True)
def value_class(
    *, kw_only: bool = False, eq: bool = True, frozen: bool = False, slots: bool = True
) -> Callable[[type[T]], type[T]]: ...


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
        return partial(_made, kw_only=kw_only, eq=eq, frozen=frozen, slots=slots)
    return _made(cls, kw_only=kw_only, eq=eq, frozen=frozen, slots=slots)


def _made(cls: Any, *, kw_only: bool, eq: bool, frozen: bool, slots: bool) -> Any:
    given = {name: value for name, value in vars(cls).items() if name not in _OF_THE_CLASS_ALONE}
    given["__qualname__"] = cls.__qualname__
    own, all_fields = _declared(cls, kw_only=kw_only)
    namespace = {name: value for name, value in given.items() if name not in own}
    namespace["__declared__"] = all_fields
    namespace["__match_args__"] = tuple(name for name, one in all_fields.items() if not one[2])
    if slots:
        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
        namespace["__slots__"] = tuple(name for name in own if name not in inherited)
    if frozen:
        namespace |= _FROZEN
    if eq:
        namespace |= _comparing([name for name, one in all_fields.items() if _is_compared(one[1])])
    if cls.__repr__ is object.__repr__:
        namespace["__repr__"] = _repr
    namespace.setdefault("__init__", _Late(lambda: _init(cls, all_fields, frozen=frozen)))

    def of_dataclass(name: str) -> Any:
        # Of another class each time: `dataclass` changes it, and two threads may come at once.
        made: Any = type(cls)(cls.__name__, cls.__bases__, {**given, "__doc__": cls.__name__})
        made = dataclass(made, kw_only=kw_only, init=False, repr=False, eq=False, frozen=frozen)
        return vars(made)[name]

    for name in ("__dataclass_fields__", "__dataclass_params__"):
        namespace[name] = _Late(partial(of_dataclass, name))
    return type(cls)(cls.__name__, cls.__bases__, namespace)


_OF_THE_CLASS_ALONE = ("__dict__", "__weakref__")
_Declared = dict[str, tuple[str, Any, bool]]


def _declared(cls: Any, *, kw_only: bool) -> tuple[list[str], _Declared]:
    """Return the fields of a class's own; and all, with type, default, and whether they are given
    by name only.
    """
    own, found = list[str](), _Declared()
    for base in reversed(cls.__mro__[1:]):
        found |= vars(base).get("__declared__", {})
    for name, kind in cls.__annotations__.items():
        if kind == "KW_ONLY":
            kw_only = True
        elif not kind.startswith("ClassVar"):
            own.append(name)
            found[name] = kind, vars(cls).get(name, MISSING), kw_only
    return own, found


def _is_compared(default: Any) -> bool:
    return not isinstance(default, Field) or default.compare


def _init(cls: Any, declared: _Declared, *, frozen: bool) -> Any:
    """Compile what `dataclass` would, in a third of its time."""
    scope: dict[str, Any] = {"_set": object.__setattr__, "_unset": MISSING}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    lines = []
    for name, (_, default, by_name) in declared.items():
        value, shown = name, name
        factory: Any = MISSING
        if isinstance(default, Field):
            factory, default = default.default_factory, default.default
        if factory is not MISSING:
            scope[f"_make_{name}"], shown = factory, f"{name}=_unset"
            value = f"_make_{name}() if {name} is _unset else {name}"
        elif default is not MISSING:
            scope[f"_default_{name}"], shown = default, f"{name}=_default_{name}"
        parameters[by_name].append(shown)
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    by_position, by_name_only = parameters[False], parameters[True]
    head = ", ".join([*by_position, *(["*", *by_name_only] if by_name_only else [])])
    source = f"def __init__({head}):\n " + "\n ".join(lines or ["pass"])
    exec(source, scope)  # noqa: S102 - as `dataclass` does
    init = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {name: one[0] for name, one in declared.items()} | {"return": None}
    return init


class _Late:
    """An attribute of a class that is made when it is first asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._name = make, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner: Any = owner
        self._name = name

    def __get__(self, value: object, owner: type) -> Any:
        setattr(self._owner, self._name, self._make())
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
