"""How values are made: what has many fields is made by their names."""

from __future__ import annotations

import ast
import copy
import pickle
import threading
from collections.abc import Iterator
from dataclasses import KW_ONLY, FrozenInstanceError, asdict, field, replace
from functools import cached_property
from pathlib import Path

import pytest

import dcp_mem
from dcp_mem.common.value_class import value_class

PACKAGE = Path(dcp_mem.__file__).parent

MOST_BY_POSITION = 4

EXCEPTIONS = {
    "Ballot": "every save exchanges it: a tuple is pickled by position, and fits into one letter",
}


def _name(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return ast.unparse(called).rpartition(".")[2]


def _fields_by_position(owner: ast.ClassDef) -> int:
    """Return how many fields a constructor takes by position; 0 where the class isn't a value."""
    options = [
        {option.arg: ast.unparse(option.value) for option in getattr(decorator, "keywords", [])}
        for decorator in owner.decorator_list
        if _name(decorator) in ("dataclass", "value_class")
    ]
    if not options and not any(_name(base) == "NamedTuple" for base in owner.bases):
        return 0
    if any(given.get("kw_only") == "True" for given in options):
        return 0
    fields = [item for item in owner.body if isinstance(item, ast.AnnAssign)]
    annotated = [ast.unparse(item.annotation) for item in fields]
    given = annotated[: annotated.index("KW_ONLY")] if "KW_ONLY" in annotated else annotated
    return sum(not annotation.startswith("ClassVar") for annotation in given)


def _made_by_position(source: str) -> Iterator[str]:
    """Yield the values of a module of which more than four fields can be given by position."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and _fields_by_position(node) > MOST_BY_POSITION:
            yield node.name
        # Fields that these name in a list or a text are given by position.
        if isinstance(node, ast.Call) and _name(node) in ("namedtuple", "NamedTuple"):
            yield ast.unparse(node)


def test_values_with_more_than_four_fields_are_made_by_name() -> None:
    found = [
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in _made_by_position(path.read_text(encoding="utf-8"))
    ]
    assert [one for one in found if one[1] not in EXCEPTIONS] == []
    assert {name for _, name in found} >= set(EXCEPTIONS), "an exception is needed no more"


def test_values_that_can_be_made_by_position_are_found() -> None:
    fields = "\n    ".join(f"field_{number}: int" for number in range(5))
    heads = {
        "@dataclass\nclass A:": ["A"],
        "@dataclasses.dataclass(frozen=True)\nclass A:": ["A"],
        "class A(NamedTuple):": ["A"],
        "@dataclass(kw_only=True)\nclass A:": [],
        "@dataclass\nclass A:\n    _: KW_ONLY": [],
        "class A:": [],
    }
    for head, expected in heads.items():
        assert list(_made_by_position(f"{head}\n    {fields}")) == expected, head
    assert list(_made_by_position("A = namedtuple('A', 'a b c d e')")) != []


@value_class(frozen=True)
class Frozen:
    """Its docstring stays."""

    x: int
    ys: list[int] = field(default_factory=list, compare=False)
    _: KW_ONLY
    z: int = 3


@value_class(frozen=True, slots=False)
class WithCache:
    x: int

    @cached_property
    def double(self) -> int:
        return 2 * self.x


@value_class(kw_only=True)
class Base:
    x: int
    y: int = 2


@value_class(kw_only=True)
class Derived(Base):
    z: int = 1
    _: KW_ONLY


def _use_values() -> None:
    one = Frozen(1, z=4)
    assert one == Frozen(1, [5], z=4) != Frozen(1)
    assert hash(one) == hash(Frozen(1, z=4))
    assert repr(one) == "Frozen(x=1, ys=[], z=4)"
    assert one == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == replace(one)
    assert asdict(Derived(x=5)) == {"x": 5, "y": 2, "z": 1}
    cached = WithCache(4)
    assert cached.double == pickle.loads(pickle.dumps(cached)).double == 8


def test_values_compiled_by_several_threads_at_once_are_whole() -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            _use_values()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert Frozen.__doc__ == "Its docstring stays."


def test_frozen_values_refuse_changes() -> None:
    one = Frozen(1)
    with pytest.raises(FrozenInstanceError):
        one.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del one.x
    assert not hasattr(one, "__dict__")
