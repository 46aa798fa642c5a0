"""Run a program with `serve`: `python -m dcp_mem.run [--root ROOT] train.py [argument …]`.

The program runs as `python train.py` would run it, or with `-m` as `python -m package.module`. Its
saves and loads below the root go through dcp_mem. Without `--root`, DCP_MEM_SERVE names the root.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from dcp_mem.serving import serve

_PREFIX = "python -m dcp_mem.run"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the roots, then run the program in this process."""
    parser = argparse.ArgumentParser(
        prog=_PREFIX, description="Run a program whose DCP saves and loads go through dcp_mem."
    )
    parser.add_argument(
        "--root",
        action="append",
        help="directory or URL that the checkpoints lie in; repeat it for several (default: "
        "DCP_MEM_SERVE)",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the program is a module")
    parser.add_argument("program", help="path of a script, or with -m name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    given = parser.parse_args(arguments)
    roots = given.root or [os.environ.get("DCP_MEM_SERVE", "")]
    if not all(roots):
        parser.error("give --root or set DCP_MEM_SERVE: which root is to be served?")
    for root in roots:
        serve(root)
    if given.is_module:
        code, path, spec = _module(parser, given.program)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(given.program)))
        code, path, spec = _script(parser, given.program), given.program, None
    sys.argv[:] = [path, *given.arguments]
    # In its own module, which stays __main__ to the end: threads may outlive the last line.
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __spec__=spec, __builtins__=__builtins__)
    module.__package__ = spec.parent if spec is not None else None
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102


def _script(parser: argparse.ArgumentParser, path: str) -> CodeType:
    try:
        with io.open_code(os.path.abspath(path)) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        parser.error(f"can't open {path}: {error.strerror}")


def _module(parser: argparse.ArgumentParser, name: str) -> tuple[CodeType, str, ModuleSpec]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        parser.error(str(error))
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or not isinstance(code, CodeType):
        parser.error(f"there is no module {name} to run")
    return code, spec.origin or name, spec


if __name__ == "__main__":
    main()
