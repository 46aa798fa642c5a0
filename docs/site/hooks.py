"""What mkdocs does for this site besides its own: pages from beside docs/, and links as they are.

1. Pages that lie outside docs/ (the README, the benchmarks' results, ...) become pages.
2. One page for each part of the API, and lists of the API, of the decisions and of benchmark runs.
3. Links of the repository, which lead from file to file, lead from page to page; those to files
   that are no page become plain text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import reference  # noqa: E402

BESIDE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CODE_OF_CONDUCT.md": "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "dcp_mem/demo/README.md": "demo.md",
    "examples/README.md": "examples.md",
}
"""Pages of the site by the files that they are."""
INSTEAD = {"docs/api.md": "api/index.md", "docs/adr": "adr/index.md", "examples": "examples.md"}
"""What the site shows in place of these."""
PARTS = {
    "manager": "manager",
    "train_state": "manager",
    "functional": "calls",
    "following": "following",
    "saving": "calls",
    "writer": "calls",
    "reader": "calls",
    "policy": "policies",
    "config": "policies",
    "common": "housekeeping",
    "operations": "housekeeping",
    "flushing": "housekeeping",
    "errors": "errors",
}
"""Rooms by the page of the API that has their names."""
TITLES = {
    "manager": "Manager and training state",
    "calls": "Save, load, writer, reader",
    "following": "Following a run",
    "policies": "Policies",
    "housekeeping": "States and housekeeping",
    "errors": "Errors",
    "deepspeed": "DeepSpeed",
    "huggingface": "Hugging Face Trainer",
    "megatron": "Megatron-LM",
    "torch_checkpointing": "torch_checkpointing",
    "torchft": "torchft",
    "torchtitan": "torchtitan",
}
RANK = {
    "adr/": 0.1,
    "api/": 0.3,
    "benchmarks/results/": 0.01,
    "CHANGELOG": 0.1,
    "export": 2,
    "operating": 2,
    "replication": 2,
    "storage-backends": 2,
}
"""How much the search lifts pages, by how their names begin: guides come first."""

_API = """# API

Every name that users import, from its docstring. How they are used together:
[the manager](../manager.md), [training state](../training-state.md),
[saves behind training](../async.md).
"""
_RUNS = """# Raw runs

Every run of the benchmarks with its tables, spreads and notes, the newest first. What they come to
is in [What checkpoints cost](RESULTS.md).
"""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FILE = re.compile(r"[\w./-]+\.md")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```|^~~~.*?^~~~)", re.DOTALL | re.MULTILINE)


# -- pages -----------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are listed nowhere by hand into the navigation."""
    _section(config.nav, "api/index.md").extend({_title(part): _api(part)} for part in _parts())
    _section(config.nav, "adr/index.md").extend(
        {_number_and_title(path): f"adr/{path.name}"} for path in _decisions()
    )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that docs/ doesn't have, and the pictures that they show."""
    for origin, uri in BESIDE.items():
        files.append(_from_repository(config, origin, uri))
    for path in (ROOT / "benchmarks/RESULTS.md", *_runs(), *(ROOT / "benchmarks").glob("*/*.svg")):
        origin = path.relative_to(ROOT).as_posix()
        files.append(_from_repository(config, origin, origin))
    for uri, text in _made():
        files.append(File.generated(config, uri, content=text))
    return files


def _from_repository(config: MkDocsConfig, origin: str, uri: str) -> File:
    return File.generated(config, uri, abs_src_path=str(ROOT / origin))


def _made() -> Iterator[tuple[str, str]]:
    yield "api/index.md", _api_index()
    for part, sections in _parts().items():
        blocks = [f"# {_title(part)}\n"]
        for section in sections:
            blocks += [f"::: {section.prefix}.{name}\n" for name in section.names]
        yield _api(part), "\n".join(blocks)
    rows = [f"- [{_number_and_title(path)}]({path.name})\n" for path in _decisions()]
    yield "adr/index.md", "# Decisions\n\nWhat was decided, and why.\n\n" + "".join(rows)
    rows = [f"- [{path.stem}](results/{path.name})\n" for path in _runs()]
    yield "benchmarks/runs.md", f"{_RUNS}\n{''.join(rows)}"


def _api_index() -> str:
    text = [_API]
    for part, sections in _parts().items():
        text.append(f"## [{_title(part)}]({posixpath.basename(_api(part))})\n")
        for prefix in dict.fromkeys(section.prefix for section in sections):
            links = ", ".join(
                f"[`{name}`][{prefix}.{name}]"
                for section in sections
                if section.prefix == prefix
                for name in section.names
            )
            text.append(f"From `{prefix}`: {links}\n")
    return "\n".join(text)


def _parts() -> dict[str, list[reference.Section]]:
    parts: dict[str, list[reference.Section]] = {}
    for section in reference.sections():
        room = (section.prefix if "." in section.prefix else section.module).split(".")
        name = room[2] if room[1] == "integrations" else PARTS.get(room[1], room[1])
        parts.setdefault(name, []).append(section)
    return parts


def _api(part: str) -> str:
    return f"api/{part}.md"


def _title(part: str) -> str:
    return TITLES.get(part, part.capitalize())


def _runs() -> list[Path]:
    return sorted((ROOT / "benchmarks" / "results").glob("*.md"), reverse=True)


def _decisions() -> list[Path]:
    return sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))


def _number_and_title(path: Path) -> str:
    title = path.read_text().partition("\n")[0].lstrip("# ").replace("`", "")
    return title if title[:1].isdigit() else f"{int(path.name[:4])}. {title}"


def _section(nav: Any, uri: str) -> list[Any]:
    """The part of the navigation that begins with a page."""
    for item in nav:
        for value in item.values() if isinstance(item, dict) else ():
            if isinstance(value, list):
                if value[0] == uri:
                    return value
                try:
                    return _section(value, uri)
                except LookupError:
                    continue
    raise LookupError(f"mkdocs.yml's nav has no section that begins with {uri}")


# -- links -----------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to pages; links to files that are none become their text."""
    uri = page.file.src_uri
    if page.parent is None:  # Its navigation would have its own name alone.
        page.meta.setdefault("hide", ["navigation"])
    if uri.startswith("benchmarks/"):  # Wide tables.
        page.meta.setdefault("hide", ["toc"])
    for begin, boost in RANK.items():
        if uri.startswith(begin):
            page.meta.setdefault("search", {"boost": boost})
    origin = next((path for path, there in BESIDE.items() if there == uri), None)
    if origin is None:
        origin = uri if uri.startswith("benchmarks/") else f"docs/{uri}"
    pieces = _FENCE.split(markdown)
    for number in range(0, len(pieces), 2):
        pieces[number] = _LINK.sub(lambda found: _link(found, origin, uri, files), pieces[number])
    return "".join(pieces)


def _link(found: re.Match[str], origin: str, uri: str, files: Files) -> str:
    sign, text, target = found.groups()
    name, mark, anchor = target.partition("#")
    if not name or "://" in target or target.startswith("mailto:"):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), name))
    there = page_of(path)
    file = files.get_file_from_path(there)
    if file is None or file.inclusion.is_excluded():
        return text if (ROOT / path).exists() else found[0]  # What is nowhere is mkdocs's to tell.
    if _FILE.fullmatch(text):
        text = _heading(file)
    return f"{sign}[{text}]({posixpath.relpath(there, posixpath.dirname(uri))}{mark}{anchor})"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the column of each cell of a wide table: a narrow screen shows rows as cards."""
    return _TABLE.sub(lambda found: _labelled(found[0]), html)


def _labelled(table: str) -> str:
    columns = [re.sub("<[^>]*>", "", one) for one in re.findall(r"<th[^>]*>(.*?)</th>", table)]
    if len(columns) < 4:
        return table
    cells = iter(columns * table.count("<tr>"))
    head, body = table.split("</thead>")
    body = re.sub("<td", lambda _: f'<td data-column="{next(cells)}"', body)
    return f"{head.replace('<table', '<table data-wide', 1)}</thead>{body}"


def _heading(file: File) -> str:
    """What a page calls itself, for links whose text is the name of a file."""
    heading = re.search(r"^# (.*)$", file.content_string, re.MULTILINE)
    return heading[1] if heading else file.src_uri


def page_of(path: str) -> str:
    """Return where the site has a file of the repository.

    Args:
        path: From the repository's root.
    """
    return BESIDE.get(path) or INSTEAD.get(path) or path.removeprefix("docs/")
