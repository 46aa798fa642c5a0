"""Measure trees of this repository and print them side by side, as a Markdown table.

    python .ci/house.py [--only PATH_PREFIX] [--worst N] [NAME=]PATH_OR_GIT_REVISION ...

    python .ci/house.py before=cfaa781 after=.
    python .ci/house.py --only dcp_mem/save --worst 40 .

A tree is a directory with `dcp_mem` in it, or a git revision. `--worst` lists where to work, with
file and line.
"""

from __future__ import annotations

import argparse
import ast
import io
import math
import re
import statistics
import subprocess
import tarfile
import tempfile
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dcp_mem"
OTHERS = ("tests", "benchmarks", "examples")
TOPS = (PACKAGE, *OTHERS)
WIDTH = 100
MANY_FIELDS = 4
SPACES = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
ENTRY = re.compile(r"([*`\w., ]+?)\s*(?:\([^:]*\))?:(?:\s|$)")
PROPERTIES = {"property", "cached_property"}
PROTOCOL_ERRORS = {"AssertionError", "NotImplementedError"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The imperatives. Where a docstring needs another verb, add it.
VERBS = _words(
    """
    Act Recognise Abandon Abort Accept Access Account Accumulate Acknowledge Acquire Activate Adapt
    Add
    Address Adjust Admit Adopt Advance Agree Align Allocate Allow Annotate Announce Answer
    Append Apply Approximate Archive Arm Arrange Ask Assemble Assert Assign Associate Assume
    Attach Attempt Authenticate Average Avoid Await Back Balance Become Begin Benchmark Bind
    Block Borrow Bound Break Bring Broadcast Buffer Build Bundle Cache Calculate Call Cancel Cap
    Carry Cast Catch Change Charge Check Choose Claim Clamp Classify Clean Clear Clip Clone
    Close Collect Combine Come Commit Compact Compare Compile Complete Compose Compress Compute
    Concatenate Configure Confirm Connect Consider Construct Consume Continue Convert Coordinate
    Copy Correct Count Cover Create Cut Deal Decide Declare Decode Decorate Decrypt Deduce
    Deduplicate Defer Define Delay Delegate Delete Deliver Deregister Derive Describe
    Deserialize Destroy Detach Detect Determine Die Disable Disarm Discard Disconnect Discover
    Discuss Dispatch Display Dispose Distribute Divide Do Download Drain Draw Drive Drop Dump
    Duplicate Elect Embed Emit Empty Enable Encode Encrypt End Enforce Enqueue Ensure Enter
    Enumerate Erase Escape Establish Estimate Evaluate Evict Examine Exchange Exclude Execute
    Exit Expand Expect Expire Explain Expose Express Extend Extract Fail Fall Feed Fetch Fill
    Filter Finalize Find Finish Fire Fit Fix Flag Flatten Flip Flush Fold Follow Forbid Force
    Forget Fork Form Format Forward Free Freeze Fuse Gather Generate Get Give Go Grant Greet
    Group Grow Guard Guess Halt Hand Handle Hang Hash Have Hear Help Hide Hint Hold Identify
    Ignore Implement Import Include Increment Indent Index Indicate Infer Inform Inherit
    Initialize Inject Insert Inspect Install Instantiate Interleave Interpret Interrupt
    Intersect Introduce Invalidate Invert Invoke Issue Iterate Join Judge Jump Keep Kill Know
    Label Launch Lay Lead Learn Lease Leave Lend Let Lift Limit Link List Listen Load Locate
    Lock Log Look Lower Make Manage Map Mark Match Materialize Mean Measure Meet Memoize Mend
    Merge Migrate Mirror Mix Model Modify Monitor Mount Move Multiply Name Narrow Negotiate Nest
    Normalize Note Notice Notify Number Observe Obtain Offer Omit Open Order Organize Overlap
    Override Overwrite Own Pack Pad Pair Parse Part Partition Pass Patch Pause Peek Perform
    Permit Persist Pick Pickle Pin Place Plan Play Point Poll Pop Populate Post Postpone Predict
    Prefault Prefer Prefix Prepare Present Preserve Press Pretend Prevent Print Probe Proceed
    Process Produce Project Promote Propose Protect Prove Provide Prune Publish Pull Punch Purge
    Push Put Query Queue Quote Raise Rank Rate Reach React Read Rebind Rebuild Recall Receive
    Reclaim Recognize Recompute Reconcile Reconnect Reconstruct Record Recover Recurse Recycle
    Redirect Reduce Refer Refill Refresh Refuse Register Reject Relabel Relay Release Reload
    Remember Remind Remove Rename Render Renew Reopen Reorder Repair Repeat Replace Replay
    Replicate Reply Report Represent Request Require Rerun Reserve Reset Reshape Reshard Resize
    Resolve Respect Respond Restart Restore Restrict Resume Retain Rethrow Retire Retrieve Retry
    Return Reuse Reverse Revert Rewind Rewrite Roll Rotate Round Route Run Sample Save Say Scale
    Scan Scatter Schedule Seal Search See Seek Select Send Separate Serialize Serve Set Settle
    Share Shift Ship Show Shrink Shut Sign Signal Simulate Skip Sleep Slice Sort Spare Spawn
    Specify Speed Spell Spend Spill Splice Split Spread Stage Stamp Stand Start Stat State Stay
    Step Stop Store Stream Strip Submit Subscribe Substitute Subtract Suggest Sum Summarize
    Supply Support Suppress Survey Suspend Swap Switch Synchronize Tag Take Talk Tally Tell
    Terminate Test Throw Tie Time Toggle Touch Trace Track Train Transfer Transform Translate
    Transpose Traverse Treat Trigger Trim Truncate Trust Try Tune Turn Unbind Unblock Uncover
    Undo Unfold Unify Uninstall Union Unite Unlink Unlock Unmap Unpack Unpickle Unpin Unregister
    Unwind Unwrap Update Upgrade Upload Use Validate Verify View Visit Vote Wait Wake Walk Warm
    Warn Watch Weigh Widen Withdraw Wrap Write Yield Zero Zip
    """
)
# Verbs that are nouns too where the phrase goes on so ("Name of the job") …
NOUNS = _words(
    """
    Access Account Address Answer Average Back Block Bound Break Buffer Cache Call Cap Change
    Charge Check Claim Copy Count Cover Cut Delay Display Download Draw Drop End Estimate
    Exchange Exit Fill Filter Fit Fix Flag Flush Form Format Group Hand Handle Hash Help Hint
    Hold Index Issue Label Lead Lease Limit Link List Load Lock Log Look Map Mark Match Model
    Move Name Note Number Offer Order Pair Part Pass Patch Pause Place Plan Point Poll Post
    Prefix Probe Process Project Query Queue Rank Rate Reach Read Record Release Repair Reply
    Report Request Reserve Reset Restart Result Resume Retry Return Reverse Roll Rotate Round
    Route Run Sample Save Scale Scan Search Send Set Share Shift Ship Show Signal Slice Sort
    Spread Stage Stamp Start State Step Stop Store Stream Sum Supply Support Survey Switch Tag
    Test Time Touch Trace Track Transfer Try Turn Union Update Upload Use View Visit Vote Wait
    Walk Watch Write Yield Zero
    """
)
NOUN_GOES_ON = _words("0 id ids of that which whose")
TAKE_THAT = _words("Answer Check Claim Estimate Note Record Report Request Show Signal")
# … or adjectives where a plural follows ("Free slots").
ADJECTIVES = _words("Complete Empty Free Open Present")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Python file of a tree, and what its syntax says."""

    path: PurePosixPath
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.removesuffix("\n").split("\n") if self.text else []

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def module(self) -> str:
        """The dotted name, without `__init__`."""
        names = self.path.with_suffix("").parts
        return ".".join(names[:-1] if names[-1] == "__init__" else names)

    @property
    def room(self) -> str:
        """The module or package at the top that has the file; "" for the package's `__init__`."""
        name = self.path.parts[1].removesuffix(".py")
        return "" if name in ("__init__", "__main__") else name

    @cached_property
    def code_lines(self) -> int:
        """Lines that are neither blank nor only a comment or a docstring."""
        rows: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in SPACES:
                rows.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.Expr) and _is_text(node.value):
                rows.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return sum(1 for row in rows if self.lines[row - 1].strip())


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function or method, with the classes and functions around it."""

    source: Source
    node: FunctionNode
    names: tuple[str, ...]
    owner: ast.ClassDef | None
    nested: bool

    @property
    def name(self) -> str:
        return ".".join((self.source.module, *self.names))

    @property
    def where(self) -> str:
        return f"{self.source.path}:{self.node.lineno}"

    @property
    def length(self) -> int:
        """Lines from `def` to the end, without the docstring."""
        first = self.node.body[0]
        is_docstring = isinstance(first, ast.Expr) and _is_text(first.value)
        left_out = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1 - left_out

    @cached_property
    def decorators(self) -> set[str]:
        return {_last_name(decorator) for decorator in self.node.decorator_list}

    @property
    def is_property(self) -> bool:
        return bool(self.decorators & {*PROPERTIES, "setter", "deleter"})

    @property
    def is_public(self) -> bool:
        if self.nested or self.decorators & {"overload", "setter", "deleter"}:
            return False
        names = (*self.source.path.with_suffix("").parts, *self.names)
        return all(not name.startswith("_") or name == "__init__" for name in names)

    @cached_property
    def docstring(self) -> str:
        """The docstring; of a constructor, with the class's behind it."""
        own = ast.get_docstring(self.node) or ""
        if self.owner is not None and self.node.name == "__init__":
            return "\n\n".join(text for text in (own, ast.get_docstring(self.owner) or "") if text)
        return own

    @cached_property
    def parameters(self) -> list[str]:
        given = self.node.args
        positional = [*given.posonlyargs, *given.args]
        if self.owner is not None and "staticmethod" not in self.decorators:
            positional = positional[1:]
        rest = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
        names = [argument.arg for argument in (*positional, *given.kwonlyargs, *rest)]
        return [name for name in names if not name.startswith("_")]

    @cached_property
    def missing(self) -> list[str]:
        """What a docstring with sections leaves out: parameters, errors that the body raises."""
        if not self.docstring:
            return ["docstring"]
        if not re.search(r"^(Args|Raises):$", self.docstring, re.MULTILINE):
            return []  # one sentence, as on what users don't import
        documented = _entries(self.docstring, "Args")
        lacking = [name for name in self.parameters if name not in documented]
        told = _entries(self.docstring, "Raises")
        raised = sorted(_raised(self.node.body, frozenset()) - told)
        missing = [f"Args {', '.join(lacking)}"] if lacking else []
        return [*missing, f"Raises {', '.join(raised)}"] if raised else missing


@dataclass(frozen=True, kw_only=True)
class Record:
    """A dataclass or NamedTuple."""

    fields: int
    keyword_only: bool
    where: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of the repository.

    Attributes:
        selected: Says which files are measured. Names are resolved in all files.
    """

    name: str
    sources: Sequence[Source]
    selected: Callable[[PurePosixPath], bool] = field(repr=False)

    def part(self, top: str) -> list[Source]:
        """The files under a top-level folder that are measured."""
        return [source for source in self.under(top) if self.selected(source.path)]

    def under(self, top: str) -> list[Source]:
        return [source for source in self.sources if source.path.parts[0] == top]

    @cached_property
    def package(self) -> list[Source]:
        return self.part(PACKAGE)

    @cached_property
    def functions(self) -> list[Function]:
        return [function for source in self.package for function in _functions(source)]

    @cached_property
    def public(self) -> list[Function]:
        return [function for function in self.functions if function.is_public]

    @cached_property
    def classes(self) -> dict[str, list[tuple[ast.ClassDef, Source]]]:
        """Every class of the package, by its bare name."""
        found: dict[str, list[tuple[ast.ClassDef, Source]]] = {}
        for source in self.under(PACKAGE):
            for node in ast.walk(source.syntax):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append((node, source))
        return found

    def missing(self, function: Function) -> list[str]:
        """As `Function.missing`; an override without a docstring has its base's."""
        if function.docstring or function.owner is None:
            return function.missing
        base = self._overridden(function.owner, function.node.name, set())
        return function.missing if base is None else base.missing

    def _overridden(self, owner: ast.ClassDef, name: str, seen: set[str]) -> Function | None:
        for base in map(_last_name, owner.bases):
            if base in seen:
                continue
            seen.add(base)
            for node, source in self.classes.get(base, ()):
                for method in _methods(node, source):
                    if method.node.name == name and method.docstring:
                        return method
                found = self._overridden(node, name, seen)
                if found is not None:
                    return found
        return None

    @cached_property
    def incomplete(self) -> list[tuple[Function, list[str]]]:
        every = [(function, self.missing(function)) for function in self.public]
        return [(function, lacking) for function, lacking in every if lacking]

    @cached_property
    def sentences(self) -> list[Function]:
        """Functions whose docstring's first word is to be an imperative."""
        documented = (function for function in self.functions if ast.get_docstring(function.node))
        return [function for function in documented if not function.is_property]

    @cached_property
    def not_imperative(self) -> list[Function]:
        return [function for function in self.sentences if not _imperative(_first_line(function))]

    def wide(self, *tops: str) -> list[tuple[str, int]]:
        """Place and width of each line that is too long."""
        return [
            (f"{source.path}:{row}", len(line))
            for top in tops
            for source in self.part(top)
            for row, line in enumerate(source.lines, 1)
            if len(line) > WIDTH
        ]

    @cached_property
    def rooms(self) -> dict[str, bool]:
        """The modules and packages at the top: True for a package."""
        inside = [source for source in self.under(PACKAGE) if source.room]
        return {source.room: len(source.path.parts) > 2 for source in inside}

    @cached_property
    def exports(self) -> dict[str, str]:
        """The room that each name of the package's `__init__` comes from."""
        found: dict[str, str] = {}
        facade = [source for source in self.under(PACKAGE) if source.module == PACKAGE]
        for node in (node for source in facade for node in ast.walk(source.syntax)):
            if isinstance(node, ast.ImportFrom) and node.module and "." in node.module:
                package, room = node.module.split(".")[:2]
                names = [alias.asname or alias.name for alias in node.names]
                found.update((name, room) for name in names if package == PACKAGE)
        return found

    @cached_property
    def crossings(self) -> list[tuple[str, str, bool]]:
        """Of each import statement: its room, the room it imports from, whether it is measured.

        A statement that reaches into several rooms comes several times.
        """
        found = []
        for source in self.under(PACKAGE):
            measured = self.selected(source.path)
            for node in _runtime_imports(source.syntax) if source.room else ():
                reached = {self._room(name) for name in _targets(node, source)}
                found += [(source.room, room, measured) for room in reached - {source.room, ""}]
        return found

    def _room(self, dotted: str) -> str:
        names = dotted.split(".")
        if names[0] != PACKAGE or len(names) == 1:
            return ""
        return names[1] if names[1] in self.rooms else self.exports.get(names[1], "")

    @cached_property
    def arrows(self) -> set[tuple[str, str]]:
        return {(room, other) for room, other, measured in self.crossings if measured}

    @cached_property
    def mutual(self) -> list[tuple[str, str]]:
        """Pairs of rooms that import each other."""
        every = {(room, other) for room, other, _ in self.crossings}
        pairs = [(min(arrow), max(arrow)) for arrow in self.arrows if arrow[::-1] in every]
        return sorted(set(pairs))

    @cached_property
    def circular(self) -> list[str]:
        """Rooms that reach themselves over any number of imports."""
        onward: dict[str, set[str]] = {}
        for room, other, _ in self.crossings:
            onward.setdefault(room, set()).add(other)
        measured = sorted({room for room, _ in self.arrows})
        return [room for room in measured if room in _reached(onward, room)]

    @cached_property
    def records(self) -> list[Record]:
        """Dataclasses and NamedTuples with many fields, inherited ones included."""
        every = [pair for pairs in self.classes.values() for pair in pairs]
        measured = [(node, source) for node, source in every if self.selected(source.path)]
        records = [
            Record(
                fields=len(self._fields(node, set())),
                keyword_only=_is_keyword_only(node),
                where=f"{source.path}:{node.lineno}",
                name=node.name,
            )
            for node, source in measured
            if _is_record(node)
        ]
        return [record for record in records if record.fields > MANY_FIELDS]

    def _fields(self, node: ast.ClassDef, seen: set[str]) -> list[str]:
        inherited = []
        for base in map(_last_name, node.bases):
            if base not in seen:
                seen.add(base)
                for parent, _ in self.classes.get(base, ()):
                    inherited += self._fields(parent, seen) if _is_record(parent) else []
        own = [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not re.search(r"\b(ClassVar|KW_ONLY)\b", ast.unparse(item.annotation))
            and "init=False" not in (ast.unparse(item.value) if item.value is not None else "")
        ]
        return [*(name for name in inherited if name not in own), *own]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _last_name(node: ast.AST) -> str:
    """Return the bare name of what a decorator, base class or call refers to."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _functions(source: Source) -> list[Function]:
    """Return a file's functions and methods, those inside of functions too."""
    found: list[Function] = []

    def walk(node: ast.AST, names: tuple[str, ...], owner: ast.ClassDef | None, deep: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                within = (*names, child.name)
                found.append(
                    Function(source=source, node=child, names=within, owner=owner, nested=deep),
                )
                walk(child, within, None, True)
            elif isinstance(child, ast.ClassDef):
                walk(child, (*names, child.name), child, deep)
            else:
                walk(child, names, owner, deep)

    walk(source.syntax, (), None, False)
    return found


def _methods(owner: ast.ClassDef, source: Source) -> list[Function]:
    nodes = [node for node in owner.body if isinstance(node, FunctionNode)]
    return [
        Function(
            source=source,
            node=node,
            names=(owner.name, node.name),
            owner=owner,
            nested=False,
        )
        for node in nodes
    ]


def _raised(body: Iterable[ast.AST], caught: frozenset[str]) -> set[str]:
    """Return the classes that these statements raise themselves and don't catch again."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, FunctionNode | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise):
            found |= _raised_class(node) - caught
        if isinstance(node, ast.Try):
            handled = {_last_name(kind) for handler in node.handlers for kind in _kinds(handler)}
            found |= _raised(node.body, caught | handled)
            found |= _raised([*node.handlers, *node.orelse, *node.finalbody], caught)
        else:
            found |= _raised(ast.iter_child_nodes(node), caught)
    return found


def _kinds(handler: ast.ExceptHandler) -> list[ast.expr]:
    if handler.type is None:
        return []
    return handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]


def _raised_class(node: ast.Raise) -> set[str]:
    """Return X of `raise X(...)`, `raise module.X(...)` and `raise X.make(...)`."""
    if not isinstance(node.exc, ast.Call):
        return set()
    names = ast.unparse(node.exc.func).split(".")
    classes = [name for name in names if re.fullmatch(r"[A-Z]\w*", name)]
    return set(classes[-1:]) - PROTOCOL_ERRORS


def _entries(docstring: str, section: str) -> set[str]:
    """Return the names that a section of a docstring explains.

    An entry is `name: …`, `name (type): …` or `name, other: …`.
    """
    found: set[str] = set()
    indented = rf"^{section}:\n((?:[ \t]+\S.*\n|[ \t]*\n)*)"
    for block in re.findall(indented, docstring + "\n", re.MULTILINE):
        lines = textwrap.dedent(block).splitlines()
        entries = [ENTRY.match(line) for line in lines]
        for names in (entry[1] for entry in entries if entry):
            found.update(name.strip("*` ").rsplit(".", 1)[-1] for name in names.split(","))
    return found


def _first_line(function: Function) -> str:
    return (ast.get_docstring(function.node) or "").split("\n", 1)[0].strip()


def _imperative(line: str) -> bool:
    words = [word.strip(".,;:") for word in line.split()]
    first, second = words[0], words[1] if len(words) > 1 else ""
    if first in NOUNS and second in NOUN_GOES_ON and not (first in TAKE_THAT and second == "that"):
        return False
    if first in ADJECTIVES and re.fullmatch(r"[a-z]+s", second) and second not in ("its", "this"):
        return False
    return first in VERBS


def _runtime_imports(module: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements, but for those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _runtime_imports(other)
        else:
            yield from _runtime_imports(node)


def _targets(node: ast.Import | ast.ImportFrom, source: Source) -> list[str]:
    """Return the dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parents = source.path.parent.parts
    above = parents[: len(parents) - node.level + 1] if node.level else ()
    origin = ".".join((*above, node.module) if node.module else above)
    return [f"{origin}.{alias.name}" for alias in node.names]


def _reached(onward: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = list(onward.get(start, ()))
    while ahead:
        room = ahead.pop()
        if room not in found:
            found.add(room)
            ahead += onward.get(room, ())
    return found


def _is_record(node: ast.ClassDef) -> bool:
    bases = {_last_name(base) for base in node.bases}
    decorators = {_last_name(decorator) for decorator in node.decorator_list}
    return "NamedTuple" in bases or "dataclass" in decorators


def _is_keyword_only(node: ast.ClassDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    annotated = [item.annotation for item in node.body if isinstance(item, ast.AnnAssign)]
    marked = any("KW_ONLY" in ast.unparse(annotation) for annotation in annotated)
    return "kw_only=True" in decorators or marked


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "-"


def _spread(sizes: Sequence[tuple[int, str]]) -> str:
    """Format the median, 90th percentile and longest of sizes with names."""
    if not sizes:
        return "-"
    ordered = sorted(sizes)
    numbers = [size for size, _ in ordered]
    longest, name = ordered[-1]
    nearest = numbers[math.ceil(0.9 * len(numbers)) - 1]
    short = name.removeprefix(f"{PACKAGE}.")
    return f"{statistics.median(numbers):g} / {nearest} / {longest} (`{short}`)"


def rows(tree: Tree) -> dict[str, str]:
    """Return the table's rows: what is measured, and what came out."""
    return {**_sizes(tree), **_prose(tree), **_imports(tree), **_values(tree)}


def _sizes(tree: Tree) -> dict[str, str]:
    tops = {source.room for source in tree.package if source.room}
    folders = sum(tree.rooms[room] for room in tops)
    total = {top: sum(len(source.lines) for source in tree.part(top)) for top in TOPS}
    code = sum(source.code_lines for source in tree.package)
    modules = [(len(source.lines), source.module) for source in tree.package if source.lines]
    functions = [(function.length, function.name) for function in tree.functions]
    directly = f"{len(tops) - folders} + {folders} = {len(tops)}"
    return {
        f"modules + packages directly under {PACKAGE}": directly,
        f"lines of Python in {PACKAGE}": f"{total[PACKAGE]:,}",
        "… without blank lines, comments, docstrings": f"{code:,}",
        **{f"lines of Python in {top}": f"{total[top]:,}" for top in OTHERS},
        "module length: median / 90th percentile / longest": _spread(modules),
        "function length: median / 90th percentile / longest": _spread(functions),
    }


def _prose(tree: Tree) -> dict[str, str]:
    public = len(tree.public)
    lacking = sum(tree.missing(function) == ["docstring"] for function in tree.public)
    complete = public - len(tree.incomplete)
    sentences = len(tree.sentences)
    imperative = sentences - len(tree.not_imperative)
    return {
        "public functions and methods": f"{public:,}",
        "… with a docstring": _share(public - lacking, public),
        "… with all Args and Raises": _share(complete, public),
        "docstrings whose first word is an imperative": _share(imperative, sentences),
        f"lines over {WIDTH} columns in {PACKAGE}": f"{len(tree.wide(PACKAGE)):,}",
        f"lines over {WIDTH} columns in {', '.join(OTHERS)}": f"{len(tree.wide(*OTHERS)):,}",
    }


def _imports(tree: Tree) -> dict[str, str]:
    crossing = sum(measured for _, _, measured in tree.crossings)
    mutual = [f"{one} ↔ {other}" for one, other in tree.mutual]
    return {
        "import arrows between rooms": f"{len(tree.arrows)}",
        "imports that cross rooms (a statement counts once per room)": f"{crossing:,}",
        "pairs of rooms that import each other": _named(mutual),
        "rooms in an import cycle of any length": _named(tree.circular),
    }


def _values(tree: Tree) -> dict[str, str]:
    keyword_only = sum(record.keyword_only for record in tree.records)
    return {
        f"dataclasses, NamedTuples with more than {MANY_FIELDS} fields": f"{len(tree.records)}",
        "… keyword-only": _share(keyword_only, len(tree.records)),
    }


def _named(found: Sequence[str]) -> str:
    shown = ", ".join(found[:6]) + (", …" if len(found) > 6 else "")
    return f"{len(found)} ({shown})" if found else "0"


def worst(tree: Tree, most: int) -> Iterator[str]:
    """Yield the lines of the lists of what to work on, the worst first."""

    def section(title: str, lines: Sequence[str]) -> Iterator[str]:
        yield f"\n## {tree.name}: {title} ({min(most, len(lines))} of {len(lines)})\n"
        yield from (f"- {line}" for line in lines[:most])

    long = sorted(tree.functions, key=lambda function: -function.length)
    lines = [f"{each.where} {each.name}: {each.length} lines" for each in long]
    yield from section("longest functions", lines)
    gaps = sorted(tree.incomplete, key=lambda pair: -sum(text.count(",") + 1 for text in pair[1]))
    lines = [f"{each.where} {each.name}: no {'; no '.join(lacking)}" for each, lacking in gaps]
    yield from section("incomplete docstrings", lines)
    lines = [f"{each.where} {_first_line(each)}" for each in tree.not_imperative]
    yield from section("first lines that don't begin with an imperative", lines)
    words = Counter(_first_line(each).split()[0].strip(".,;:") for each in tree.not_imperative)
    common = ", ".join(f"{word} {count}" for word, count in words.most_common(most))
    yield f"\nTheir first words: {common}"
    wide = sorted(tree.wide(*TOPS), key=lambda line: -line[1])
    lines = [f"{where} {width} columns" for where, width in wide]
    yield from section(f"lines over {WIDTH} columns", lines)
    positional = [record for record in tree.records if not record.keyword_only]
    positional.sort(key=lambda record: -record.fields)
    lines = [f"{each.where} {each.name}: {each.fields} fields" for each in positional]
    yield from section(f"more than {MANY_FIELDS} fields, not keyword-only", lines)


def _read(name: str, root: Path, only: Sequence[str]) -> Tree:
    def within(path: str, prefix: str) -> bool:
        return path in (prefix, f"{prefix}.py") or path.startswith(f"{prefix}/")

    def selected(path: PurePosixPath) -> bool:
        return not only or any(within(str(path), prefix) for prefix in only)

    sources = [
        Source(
            path=PurePosixPath(path.relative_to(root).as_posix()),
            text=path.read_text(encoding="utf-8"),
        )
        for top in TOPS
        for path in sorted((root / top).rglob("*.py"))
    ]
    return Tree(name=name, sources=sources, selected=selected)


def _unpack(revision: str, into: Path) -> None:
    """Write the files of a git revision into a directory."""
    command = ["git", "-C", str(ROOT), "archive", revision]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(into, filter="data")


def _open(argument: str, only: Sequence[str], temporary: ExitStack) -> Tree:
    name, _, given = argument.rpartition("=")
    root = Path(given)
    if not (root / PACKAGE).is_dir():
        root = Path(temporary.enter_context(tempfile.TemporaryDirectory()))
        _unpack(given, root)
    return _read(name or given, root, only)


def main() -> None:
    """Print the table, and the lists of the worst where they are asked for."""
    parser = argparse.ArgumentParser(description="Measure trees of this repository, side by side.")
    parser.add_argument("trees", nargs="+", metavar="[NAME=]PATH_OR_GIT_REVISION")
    parser.add_argument(
        "--worst",
        type=int,
        default=0,
        metavar="N",
        help="list the N worst of each, with file and line",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATH_PREFIX",
        help="such as dcp_mem/save; repeatable",
    )
    arguments = parser.parse_args()
    only = [prefix.strip("/") for prefix in arguments.only]
    with ExitStack() as temporary:
        trees = [_open(argument, only, temporary) for argument in arguments.trees]
    columns = [rows(tree) for tree in trees]
    print("| " + " | ".join(["", *(tree.name for tree in trees)]) + " |")
    print("| " + " | ".join("---" for _ in range(len(trees) + 1)) + " |")
    for label in columns[0]:
        print("| " + " | ".join([label, *(column[label] for column in columns)]) + " |")
    if arguments.worst:
        for tree in trees:
            print("\n".join(worst(tree, arguments.worst)))


if __name__ == "__main__":
    main()
