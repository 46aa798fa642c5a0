"""docs/torch-private.md has every private part of torch that the package uses, and no others."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import REPOSITORY

_PACKAGE = REPOSITORY / "dcp_mem"
_PAGE = (REPOSITORY / "docs" / "torch-private.md").read_text()


def test_private_names_are_listed_and_each_is_used_in_one_module() -> None:
    used = {use for path in _modules() for use in _names(path)}
    assert used == set(_listed_names())


def test_private_attributes_of_torchs_objects_are_listed() -> None:
    used = {name for path in _modules() for name in _attributes(path)}
    assert used - _own_names() - _OTHERS <= _listed_attributes()
    assert _listed_attributes() <= used


def test_a_stray_import_is_found(tmp_path: Path) -> None:
    stray = tmp_path / "stray.py"
    stray.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch._utils import a\n"
        "from torch.nn import _b\ntorch._c.d()\ndist.x._e()\n"
    )
    assert {name for name, _ in _names(stray)} == {
        "_utils.a",
        "nn._b",
        "_c",
        "distributed.x._e",
    }


_AS_TORCH_2_6 = """
import sys
from torch.distributed.checkpoint import planner
vars(planner).pop("BytesIOWriteData", None)
from dcp_mem import MemoryStorageReader, MemoryStorageWriter
"""


def test_dcp_mem_is_imported_without_what_torch_2_6_lacks() -> None:
    subprocess.run([sys.executable, "-c", _AS_TORCH_2_6], check=True, timeout=100)


def _modules() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py"))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names(path: Path) -> Iterator[tuple[str, str]]:
    """Private names of torch, without `torch.`, and the module that has them."""
    where = path.relative_to(_PACKAGE if path.is_relative_to(_PACKAGE) else path.parent).as_posix()
    bound = {}
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    used = {name for name in bound.values() if _is_torchs(name)}
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            first, _, rest = dotted.partition(".")
            whole = f"{bound.get(first, first)}.{rest}"
            if first in bound and _is_torchs(whole):
                used.add(whole)
    # Of `torch._c.d` and `torch._c`, the first private part that is called or imported counts.
    kept = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    shortened = {_up_to_private(name, imported=name in bound.values()) for name in kept}
    yield from ((name.removeprefix("torch."), where) for name in shortened)


def _up_to_private(name: str, *, imported: bool) -> str:
    if imported or name.startswith("torch._C."):
        return name
    parts = name.split(".")
    last = max(number for number, part in enumerate(parts) if _is_private(part))
    return ".".join(parts[: last + 1])


def _is_torchs(name: str) -> bool:
    return name.startswith("torch.") and any(map(_is_private, name.split(".")))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of such an expression; "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def _attributes(path: Path) -> Iterator[str]:
    """Private attributes of what is no module, and those of `attrgetter` and `getattr`."""
    if "integrations" in path.parts:
        return  # Those are other packages'.
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            first = _dotted(node).partition(".")[0]
            if first != "sys" and (node.attr, first) not in _MODULES_NAMES:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getter", "getattr")):
            yield from (
                one.value
                for one in node.args
                if isinstance(one, ast.Constant)
                and isinstance(one.value, str)
                and _is_private(one.value)
            )


_OTHERS = {
    "_exit",
    "_fp",
    "_location",
    "_raw_stream",
    "_register_atexit",
    "_use_client_cert",
}
"""Of urllib3, botocore, gcsfs and Python."""
_MODULES_NAMES = {
    ("_C", "torch"),
    ("_cuda_hasPrimaryContext", "torch"),
    ("_get_default_store", "dist"),
    ("_MEM_FORMAT_ENCODING", "dcp_metadata"),
    ("_make_wrapper_subclass", "torch"),
    ("_save_state_dict", "state_dict_saver"),
    ("_storage_setup", "state_dict_loader"),
    ("_storage_setup", "state_dict_saver"),
}
"""Names of the first table, as they are written."""


@cache
def _own_names() -> set[str]:
    """What the package itself defines or assigns."""
    names = set()
    for path in _modules():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                names |= {one.id for one in targets if isinstance(one, ast.Name)}
    return names


def _rows(title: str) -> Iterator[list[str]]:
    part = _PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    for line in part.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def _listed_names() -> Iterator[tuple[str, str]]:
    for names, module, *_ in _rows("Names"):
        for name in re.findall(r"`([^`]+)`", names):
            yield name, module.strip("`")


def _listed_attributes() -> set[str]:
    return {
        name
        for names, *_ in _rows("Attributes of torch's objects")
        for name in re.findall(r"`([^`]+)`", names)
    }


_MAY_LACK = {"_C._cuda_hasPrimaryContext"}
"""What builds for the CPU don't have."""


@pytest.mark.parametrize("name", sorted({name for name, _ in _listed_names()} - _MAY_LACK))
def test_this_torch_has_it(name: str) -> None:
    module = "torch"
    found: Any = torch
    for part in name.split("."):
        module = f"{module}.{part}"
        with suppress(ImportError):
            importlib.import_module(module)
        found = getattr(found, part)
