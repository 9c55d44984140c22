"""What pages show runs: Python of *Start* and *How to*, with the output beside it, and each command line of every page.

<!-- setup              Python that runs before the blocks of a page: names that the reader has already
<!-- not run: REASON    before a block of Python: it compiles, and needs what tests do not have
```text after ```python shows what the block prints, `$ zeroshard ...` in a ```console block what the command prints;
`...` stands for any text.
"""

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from zeroshard.cli import main

DOCS = Path(__file__).parents[1] / "docs"
RUN = sorted(path for folder in ("start", "how-to") for path in (DOCS / folder).glob("*.md"))
PAGES = [path for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))] if path.name != "log.md"]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.S)
INLINE = re.compile(r"`(zeroshard [a-z]+ [^`\n]*--[^`\n]*)`")
COMMAND = re.compile(r"^(?:\$ )?(zeroshard [a-z].*?)(?:\s+#.*)?$")
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n\s*$")


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS.parent))


def same(shown: str, printed: str) -> bool:
    """Equal but for how lines are broken and columns are filled; `...` stands for any text."""
    parts = [re.escape(" ".join(part.split())) for part in shown.split("...")]
    return re.fullmatch(r"\s*.*?\s*".join(parts), " ".join(printed.split()), re.S) is not None


@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_python_of_a_page_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, names = path.read_text(), {"__name__": "page"}
    for setup in SETUP.findall(text):
        exec(compile(setup, f"{name_of(path)}, setup", "exec"), names)
    printed = None
    for block in FENCE.finditer(SETUP.sub("", text)):
        code = re.sub(rf"^{block['indent']}", "", block["text"], flags=re.M)
        if block["kind"] == "text" and printed is not None:
            assert same(code, printed), f"{name_of(path)} shows\n{code}and the block before it printed\n{printed}"
        printed = None
        if block["kind"] == "python":
            compiled = compile(code, f"{name_of(path)}: {code[:60]!r}", "exec")
            if NOT_RUN.search(block.string[: block.start()]):
                continue
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compiled, names)
            printed = output.getvalue()


@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_a_command_of_a_page_prints_what_it_shows(path, tmp_path, monkeypatch, capsys):
    text = path.read_text()
    monkeypatch.chdir(tmp_path)
    for block in FENCE.finditer(text):
        command, _, shown = block["text"].partition("\n")
        if block["kind"] == "console":
            assert command.startswith("$ zeroshard "), f"{name_of(path)}: a console block begins with a command, got {command!r}"
            main(shlex.split(command)[2:])
            printed = capsys.readouterr().out
            assert same(shown, printed), f"{name_of(path)} shows\n{shown}and {command!r} printed\n{printed}"


class Parsed(BaseException):
    """A command line was understood; nothing is to run."""


def commands_of(text: str) -> list[str]:
    """Command lines of `zeroshard` in blocks and in text, without `[...]` for what may be left out."""
    found = INLINE.findall(text)
    for block in FENCE.finditer(text):
        if block["kind"] in ("", "bash", "console"):
            lines = block["text"].replace("\\\n", " ").splitlines()
            found += [match[1] for line in lines if (match := COMMAND.match(line.strip()))]
    return [command for command in found if not any(each in command for each in ("...", "COMMAND", "->"))]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_command_lines_are_those_of_the_command(path, monkeypatch, capsys):
    understood = argparse.ArgumentParser.parse_known_args

    def parse(self, *args, **kwargs):
        understood(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    for command in commands_of(path.read_text()):
        if {"--help", "-h", "--version"} & set(shlex.split(command)):
            continue
        try:
            main(shlex.split(command.replace("[", "").replace("]", ""))[1:])
        except Parsed:
            continue
        said = capsys.readouterr().err
        if "arguments are required" in said and f"`{command}`" in path.read_text():  # a command that is only mentioned
            continue
        raise AssertionError(f"{name_of(path)}: {command}: {said or 'the command read no options'}")
