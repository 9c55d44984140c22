"""The documents can be read in a terminal, and keep up with the code: the files, functions and pages that they name exist."""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import zeroshard

SOURCE, ROOT = Path(zeroshard.__file__).parent, Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PLACE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")  # `engine/unit.py:Unit.unshard`, below src/zeroshard
PATH = re.compile(r"(?<![\w/.])((?:tests|docs|src/zeroshard|scripts)/[\w/.-]*\w)")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
PUBLIC = re.compile(r"\bzs\.(\w+)")
MAX_COLUMNS, MAX_LINES = 120, 5
COMMENT = re.compile(r"<!--.*?-->", re.S)
ITEM = re.compile(r"\s*([-*]|\d+\.)\s")  # of a list: a paragraph of its own


def paragraphs(text: str) -> list[list[str]]:
    """Lines of prose that belong together; no tables, headings, code or comments."""
    text = COMMENT.sub("", text)
    found: list[list[str]] = [[]]
    in_code = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        if fence or in_code or not line.strip() or line.lstrip().startswith(("|", "#", ":::")):
            found.append([])
            continue
        if ITEM.match(line):
            found.append([])
        found[-1].append(line)
    return [lines for lines in found if lines]


def faults_in(faults_of: Callable[[Path, str], Iterator[str]], but: tuple[str, ...] = ()) -> str:
    """What is wrong in documents: a line for each fault, with the document's name."""
    paths = [path for path in DOCS if path.name not in but]
    return "\n".join(f"{path.relative_to(ROOT)}: {fault}" for path in paths for fault in faults_of(path, path.read_text()))


def test_lines_and_paragraphs_are_short():
    def faults(path: Path, text: str) -> Iterator[str]:
        for line in text.splitlines():
            if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|"):
                yield f"wider than {MAX_COLUMNS} columns: {line}"
        for lines in paragraphs(text):
            if len(lines) > MAX_LINES:
                yield f"a paragraph of more than {MAX_LINES} lines: {lines[0]}"

    assert not faults_in(faults)


def test_an_entry_of_the_log_has_ten_lines_at_most():
    log = next(path for path in DOCS if path.name == "log.md").read_text()
    for entry in re.split(r"^(?=\*\*\d{4}-\d\d-\d\d\.|#)", log, flags=re.M):
        lines = [line for line in entry.splitlines() if line.strip() and not line.startswith(("|", "#"))]
        assert len(lines) <= 10, entry


@functools.cache
def names_of(path: Path) -> set[str]:
    """Functions, classes and constants of a file, methods as `Class.method`."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(before + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, before + node.name + ".")
            elif isinstance(node, ast.Assign):
                found.update(before + target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(before + node.target.id)

    visit(ast.parse(path.read_text()).body, "")
    return found


def test_files_and_functions_that_are_named_exist():
    def faults(path: Path, text: str) -> Iterator[str]:
        for file, name in PLACE.findall(text):
            place = SOURCE / file if (SOURCE / file).exists() else ROOT / file
            if not place.exists():
                yield f"names `{file}`: there is no such file below src/zeroshard"
            elif name and name not in names_of(place):
                yield f"names `{file}:{name}`: {file} has no {name}"

    assert not faults_in(faults)


def test_paths_and_links_lead_somewhere():
    def faults(path: Path, text: str) -> Iterator[str]:
        yield from (f"names {each}, which does not exist" for each in PATH.findall(text) if not (ROOT / each).exists())
        yield from (f"links to {each}, which does not exist" for each in LINK.findall(text) if not (path.parent / each).exists())

    assert not faults_in(faults)


def test_public_names_of_pages_exist():
    def faults(path: Path, text: str) -> Iterator[str]:
        names = sorted(set(PUBLIC.findall(text)))
        yield from (f"names zs.{name}, which zeroshard does not have" for name in names if not hasattr(zeroshard, name))

    assert not faults_in(faults, but=("log.md",))


def test_the_tour_has_ten_stops():
    stops = re.findall(r"^\*\*(\d+)\. ", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert stops == [str(number) for number in range(1, 11)]


def test_documents_say_one_time_for_all_tests():
    pages = [*DOCS, ROOT / "CONTRIBUTING.md"]
    told = [(path.name, found) for path in pages if path.name != "log.md"
            for found in re.findall(r"(?:\./test`?|runs the tests)[^.]{0,60}?(\d+) minutes\s+on two cores", path.read_text())]  # fmt: skip
    assert len(told) >= 4 and len({minutes for _, minutes in told}) == 1, told


def test_traffic_is_counted_in_bytes_of_the_parameters():
    """In M, as docs/learn/zero.md says; no page counts numbers of some width beside it."""
    for path in DOCS:
        found = re.findall(r"\d Psi\b|\bPsi numbers|numbers of \d bytes", path.read_text()) if path.name != "log.md" else []
        assert not found, f"{path.name}: {found}"
