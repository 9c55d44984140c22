"""What mkdocs does beside Markdown (`hooks:` of mkdocs.yml): tables made from docstrings, and links to files of the repository.

<!-- options: Config -->       becomes the table of that class's fields: name, default, and what its docstring says of it
[text](../../examples/x.py)    a file beside docs/ is copied into the site, and the link leads there
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
COPIED = ("examples",)  # folders of the repository to which pages link
_ENTRY = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)")


def entries(docstring: str) -> dict[tuple[str, ...], str]:
    """Of a docstring with lines `name, name: text`, and indented lines that go on: names -> text."""
    found: dict[tuple[str, ...], list[str]] = {}
    names: tuple[str, ...] = ()
    for line in docstring.splitlines():
        if start := _ENTRY.match(line):
            names = tuple(start[1].split(", "))
            found[names] = [start[2]]
        elif names and line.startswith(" "):
            found[names].append(line.strip())
        elif not line.startswith(" "):
            names = ()
    return {names: " ".join(lines) for names, lines in found.items()}


def options_table(cls: type) -> str:
    """Markdown: a row for each entry of a dataclass's docstring, with the defaults of its fields."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for names, text in entries(inspect.getdoc(cls) or "").items():
        shown = [_shown(defaults[name]) for name in names]
        escaped = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(dict.fromkeys(shown))} | {escaped} |")
    return "\n".join(rows)


def _shown(default: Any) -> str:
    return "`{}`" if default is dataclasses.MISSING else f"`{default!r}`"


def on_files(files: Files, config: Any) -> Files:
    """The programs to which pages link are files of the site."""
    for path in sorted(path for folder in COPIED for path in (ROOT / folder).glob("*.*")):
        files.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Tables in the place of their marks; links that leave docs/ for a copied folder stay inside the site."""
    import zeroshard

    markdown = re.sub(r"<!-- options: (\w+) -->", lambda mark: options_table(getattr(zeroshard, mark[1])), markdown)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(rf"\]\({re.escape(up)}\.\./({'|'.join(COPIED)})/", rf"]({up}\1/", markdown)
