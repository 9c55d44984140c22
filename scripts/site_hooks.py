"""What mkdocs does beside Markdown: tables and signatures made from the source, and links to files of the repository.

<!-- options: Config -->       becomes the table of that class's fields: name, type, default, and what its docstring says of it
[text](../../examples/x.py)    a file beside docs/ is copied into the site, and the link leads there
::: zeroshard.shard            `**options` becomes the options of `zs.shard`, each with type and default (`OptionsByName`)
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import griffe
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


def options(cls: type) -> dict[str, tuple[str, str]]:
    """Of a class of options: field -> the type that a program may give, and the default, as Python writes them.

    Where a TypedDict lists what the constructor accepts, that is the type; its None, for an argument that is not given, is left out.
    """
    from zeroshard import config

    accepted = config.ConfigFields.__annotations__ if cls is config.Config else {}
    found = {}
    for field in dataclasses.fields(cls):
        kind = getattr(accepted.get(field.name), "__forward_arg__", field.type).replace("'", '"')
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = (kind if default is None else kind.removesuffix(" | None"), repr(default))
    return found


def options_table(cls: type) -> str:
    """Markdown: a row for each entry of a dataclass's docstring; below each name stand its type and default."""
    known, bar = options(cls), {ord("|"): "&#124;", ord("*"): "&#42;", ord("<"): "&lt;"}  # a bar would end the cell
    rows = ["| option | meaning |", "|---|---|"]
    for names, text in entries(inspect.getdoc(cls) or "").items():
        told = [f"<code>{name}</code><br><small>{' = '.join(known[name]).translate(bar)}</small>" for name in names]
        rows.append(f"| {'<br>'.join(told)} | {text.translate(bar)} |")
    return "\n".join(rows)


class OptionsByName(griffe.Extension):
    """What mkdocstrings shows of `**options: Unpack[ShardOptions]`: of `zs.shard` every option, elsewhere `**options` alone."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        from zeroshard.config import Config

        given = [parameter for parameter in func.parameters if str(parameter.annotation) == "Unpack[ShardOptions]"]
        for parameter in given:
            parameter.annotation = None
            if func.path == "zeroshard.api.shard":
                del func.parameters[parameter.name]
                shown = {**options(Config), "preset": ("str | None", "None")}
                for name, (kind, default) in shown.items():
                    func.parameters.add(
                        griffe.Parameter(name, annotation=kind, kind=griffe.ParameterKind.keyword_only, default=default)
                    )


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
