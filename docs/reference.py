"""Write docs/api.md from the docstrings: `python docs/reference.py`.

The page has what dcp_mem's `__init__` exports, and the integrations. Nothing is imported, so no
framework has to be installed. (griffe2md made 22,000 lines of it, inner modules included; pdoc and
Sphinx make HTML.)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
PACKAGES = ("integrations",)
HEAD = """# API reference

Made from the docstrings by `python docs/reference.py`; a test fails when it is stale.
Methods that DCP calls, and not you, are left out. How things are used together:
[manager.md](manager.md), [training-state.md](training-state.md), [storage.md](storage.md),
[async.md](async.md), [replication.md](replication.md).
"""

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
_ENTRY = re.compile(r"    ([\w\\*`.,][\w\\*`., ]*): (.*)")
_WIDTH = 100
_CODE = re.compile(r"(`[^`]*`)")
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True, slots=True)
class Section:
    """What users import of a module: its names, below a prefix."""

    module: str
    names: list[str]
    prefix: str


def page() -> str:
    return "\n".join([HEAD, *(text for section in sections() for text in _rendered(section))])


def sections() -> Iterator[Section]:
    """Yield all that users import, module by module, in the order of the page."""
    yield from _exported("dcp_mem")
    for package in PACKAGES:
        yield from _package(ROOT / "dcp_mem" / package)


def _exported(package: str) -> Iterator[Section]:
    """What a package's `__init__` lists, by the modules that it is from."""
    init = _parsed(_path(package))
    here = dict.fromkeys(_definitions(init), package)
    exported = here | {name: module for module, names in _imports(init) for name in names}
    by_module: dict[str, list[str]] = {}
    for name in _listed(init):
        if name in exported and name in _definitions(_parsed(_path(exported[name]))):
            by_module.setdefault(exported[name], []).append(name)
    for module, names in sorted(by_module.items(), key=lambda entry: _rank(entry[0])):
        yield Section(module, names, package)


def _package(directory: Path) -> Iterator[Section]:
    """Yield what a package lists; if it lists nothing, its modules and packages.

    Modules beside what is listed are for those who need their extra.
    """
    listed = {directory / "__init__.py"}
    if _listed(_parsed(directory / "__init__.py")):
        package = ".".join(directory.relative_to(ROOT).parts)
        yield from _exported(package)
        listed |= {_path(module) for module, _ in _imports(_parsed(directory / "__init__.py"))}
        if directory.name != "trackers":
            return
    for path in sorted(directory.iterdir()):
        if (path / "__init__.py").exists():
            yield from _package(path)
        elif path.suffix == ".py" and path not in listed and not path.name.startswith("_"):
            tree = _parsed(path)
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names = [
                name
                for name, node in _definitions(tree).items()
                if not name.startswith("_") and _doc(node)
            ]
            if names:
                yield Section(module, names, module)


def _rendered(section: Section) -> Iterator[str]:
    tree = _parsed(_path(section.module))
    found = _definitions(tree)
    yield f"## {section.module}\n"
    yield f"{_prose(ast.get_docstring(tree) or '', {})}\n"
    for name in section.names:
        node = found[name]
        yield f"### {section.prefix}.{name}\n"
        node = _with_bases(node, found)
        yield f"```\n{_signature(node, name)}\n```\n"
        yield f"{_prose(_doc(node), _types(node))}\n"
        if isinstance(node, ast.ClassDef):
            yield from _members(node)


def _with_bases(node: Definition, found: dict[str, Definition]) -> Definition:
    """Options with those of their bases in the same module: their fields, and what these mean."""
    if not isinstance(node, ast.ClassDef) or not node.name.endswith("Options"):
        return node
    own = _doc(node).partition("\n\nAttributes:\n")
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    described = own[2]
    for base in reversed(node.bases):
        if ast.unparse(base) in found:
            inherited = _with_bases(found[ast.unparse(base)], found)
            assert isinstance(inherited, ast.ClassDef)
            fields = [one for one in inherited.body if isinstance(one, ast.AnnAssign)] + fields
            described = f"{_doc(inherited).partition('Attributes:')[2].strip(chr(10))}\n{described}"
    doc = ast.Expr(ast.Constant(f"{own[0]}\n\nAttributes:\n{described}"))
    return ast.ClassDef(node.name, node.bases, [], [doc, *fields], [])


def _members(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if (
            isinstance(member, ast.FunctionDef)
            and not member.name.startswith("_")
            and ast.get_docstring(member)
        ):
            kind = "" if "property" not in _decorators(member) else "property "
            yield f"**{kind}`{_call(member, member.name)}`**\n"
            yield f"{_prose(_doc(member), _types(member))}\n"


def _signature(node: Definition, name: str) -> str:
    if isinstance(node, ast.FunctionDef):
        return _wrapped(_call(node, name))
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {name}({bases})" if bases else f"class {name}"
    init = _init(node)
    if init is not None and "Error" not in bases:
        return f"{head}\n{_wrapped(_call(init, name))}"
    fields = [
        ast.unparse(one) + getattr(one, "comment", "")
        for one in node.body
        if isinstance(one, (ast.AnnAssign, ast.Assign))
        and not ast.unparse(one).startswith("_")
        and ast.unparse(getattr(one, "target", one)) not in _described(_doc(node))
    ]
    return "\n    ".join([head + (":" if fields else ""), *fields])


def _init(node: ast.ClassDef) -> ast.FunctionDef | None:
    inits = (one for one in node.body if isinstance(one, ast.FunctionDef))
    return next((one for one in inits if one.name == "__init__"), None)


def _call(node: ast.FunctionDef, name: str) -> str:
    """Return how a function is called: without the types of arguments that its text describes."""
    told = _doc(node)
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    positional = arguments.args.posonlyargs or arguments.args.args
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    if "property" in _decorators(node):
        return f"{name}: {ast.unparse(node.returns)}" if node.returns else name
    if "Args:" in told or name != node.name:
        for one in ast.walk(arguments.args):
            if isinstance(one, ast.arg):
                one.annotation = None
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and name == node.name else ""
    return f"{name}({ast.unparse(arguments.args)}){returns}"


def _described(doc: str) -> set[str]:
    """Return the attributes that a docstring tells of."""
    told = doc.partition("Attributes:\n")[2].split("\n")
    return {found[1] for line in told if (found := _ENTRY.fullmatch(line))}


def _types(node: Definition) -> dict[str, str]:
    """Return the types of arguments and fields, by name."""
    of = _init(node) if isinstance(node, ast.ClassDef) else node
    arguments = [one for one in ast.walk(of.args) if isinstance(one, ast.arg)] if of else []
    types = {one.arg: ast.unparse(one.annotation) for one in arguments if one.annotation}
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if isinstance(node, ast.ClassDef):
        types |= {ast.unparse(one.target): ast.unparse(one.annotation) for one in fields}
    return types


def _wrapped(call: str) -> str:
    if len(call) <= _WIDTH:
        return call
    head, rest = call.split("(", 1)
    rows = [f"{head}("]
    for part in map(str.strip, _split(rest)):
        if len(rows) == 1 or len(rows[-1]) + len(part) + 2 > _WIDTH:
            rows.append("   ")
        rows[-1] += f" {part},"
    return "\n".join(rows).removesuffix(",")


def _split(arguments: str) -> Iterator[str]:
    """The arguments one by one: commas in brackets and texts don't part them."""
    depth, start = 0, 0
    for number, character in enumerate(arguments):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield arguments[start:number]
            start = number + 1
    if arguments:
        yield arguments[start:]


def _prose(text: str, types: Mapping[str, str]) -> str:
    """Turn a docstring into Markdown: its arguments and errors become items of one list."""
    parts: list[str] = []
    section = ""
    for line in _escaped(text).split("\n"):
        header, entry = _SECTION.fullmatch(line), _ENTRY.fullmatch(line)
        if header:
            section = header[1]
            if section in ("Returns", "Yields"):
                parts += [f"*{section}*:"]
            elif len(parts) > 1 and parts[-2].startswith(("- ", "  ")):
                parts.pop()  # one list
        elif section in ("Returns", "Yields") and line.startswith("    "):
            joint = " " if parts[-1].startswith("*") else "\n"
            parts[-1] += f"{joint}{line.strip()}"
        elif section and entry:
            parts.append(_item(section, entry[1].replace(chr(92), ""), entry[2], types))
        elif section and line.startswith("    "):
            parts.append(f"  {line.strip()}")
        else:
            section = section if not line else ""
            parts.append(line)
    return "\n".join(parts)


def _item(section: str, name: str, text: str, types: Mapping[str, str]) -> str:
    if section == "Raises":
        return f"- raises `{name}`: {text}"
    kind = types.get(name.lstrip("*"), "")
    return f"- `{name}`{kind and f' (`{kind}`)'}: {text}"


def _escaped(text: str) -> str:
    """Escape what Markdown would take for markup, outside of code."""
    pieces = _CODE.split(text)
    pieces[::2] = [one.replace("<", "&lt;").replace("*", "\\*") for one in pieces[::2]]
    return "".join(pieces)


def _doc(node: Definition) -> str:
    return ast.get_docstring(node) or next(
        (
            ast.get_docstring(one) or ""
            for one in getattr(node, "body", ())
            if getattr(one, "name", "") == "__init__"
        ),
        "",
    )


def _decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(one) for one in node.decorator_list]


def _definitions(tree: ast.Module) -> dict[str, Definition]:
    return {
        node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }


def _imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dcp_mem"):
            yield node.module or "", [alias.name for alias in node.names]


def _listed(tree: ast.Module) -> list[str]:
    lists = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [str(name) for name in ast.literal_eval(lists[0].value)] if lists else []


def _rank(module: str) -> tuple[int, str]:
    first = (
        "manager",
        "functional",
        "saving",
        "writer",
        "reader",
        "options",
        "train_state",
        "policy",
        "config",
        "common",
        "operations",
        "flushing",
        "errors",
    )
    part = ([*module.split("."), ""])[1]
    return first.index(part) if part in first else len(first), module


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parsed(path: Path) -> ast.Module:
    """Parse a module; fields keep the comments at the ends of their lines."""
    text = path.read_text()
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.end_lineno:
            _, mark, comment = lines[node.end_lineno - 1].partition("  # ")
            vars(node)["comment"] = mark + comment
    return tree


if __name__ == "__main__":
    PAGE.write_text(page())
