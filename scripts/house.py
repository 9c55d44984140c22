"""Measure the shape of the code: rooms, imports, interfaces, functions, comments, types. One zs.shard is run, to follow its model.

python scripts/house.py            a table; what is beyond its goal is marked
python scripts/house.py --json     the same numbers for a script
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import statistics
import sys
import tokenize
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"

GOALS = {  # name -> (at least or at most, bound)
    "folders of src/zeroshard": ("at most", 15),
    "loose files of src/zeroshard": ("at most", 6),
    "lines of src/zeroshard and benchmarks": ("at most", 62_700),
    "Any in 1,000 lines": ("at most", 10),
    "methods of Comm": ("at most", 20),
    "methods of Control": ("at most", 20),
    "fields of Runtime that change": ("at most", 12),
    "attributes of Runtime that other folders use": ("at most", 25),
    "files that the model enters in zs.shard": ("at most", 20),
    "fields of Unit that change": ("at most", 10),
    "comment lines, %": ("at least", 3),
}


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Return each file of the package and of the benchmarks, parsed once."""
    paths = [path for folder in (PACKAGE, ROOT / "benchmarks") for path in sorted(folder.rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def comment_lines(path: Path) -> int:
    """Lines that bear a comment, but for those that speak to a tool (noqa, type, fmt)."""
    with tokenize.open(path) as file:
        comments = [token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT]
    return sum(not text.startswith(("# noqa", "# type:", "# fmt:", "#!")) for text in comments)


def class_of(name: str) -> tuple[Path, ast.ClassDef]:
    """The class of that name and its file."""
    return next(
        (path, node) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    )


def changing_fields(name: str, holder: str) -> set[str]:
    """Fields that are assigned after `__init__`: in the class, or as `<holder>.field = ...` anywhere."""
    _, cls = class_of(name)
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    places = [(node, {"self", holder}) for node in methods] + [(tree, {holder}) for _, tree in trees()]
    found = set()
    for place, names in places:
        for node in ast.walk(place):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                value = node.value
                owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None
                if owner in names:
                    found.add(node.attr)
    return found


def used_elsewhere(name: str, holder: str) -> set[str]:
    """Attributes read as `<holder>.attribute` in other folders of the package than the class's own."""
    home, _ = class_of(name)
    found = set()
    for path, tree in trees():
        for node in ast.walk(tree) if path.parent != home.parent and PACKAGE in path.parents else ():
            if isinstance(node, ast.Attribute):
                value = node.value
                owner = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None
                if owner == holder:
                    found.add(node.attr)
    return found


def path_of_model() -> list[tuple[Path, Path]]:
    """Follow the model through one zs.shard at stage 3: return (caller, called) for calls from file to file that pass it on."""
    import torch

    import zeroshard as zs

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    optimizer = torch.optim.AdamW(model.parameters())
    found = []

    def of_package(frame: FrameType | None) -> Path | None:
        """The file of the package that a frame runs, or the nearest of its callers."""
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        return frame and Path(frame.f_code.co_filename)

    def follow(frame: FrameType, event: str, _: object) -> None:
        code, count = frame.f_code, frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        if event == "call" and any(frame.f_locals.get(name) is model for name in code.co_varnames[:count]):
            here, before = Path(code.co_filename), of_package(frame.f_back)
            if PACKAGE in here.parents and before not in (None, here):
                found.append((before, here))

    sys.setprofile(follow)
    try:
        zs.shard(model, optimizer, stage=3)
    finally:
        sys.setprofile(None)
        zs.close(model)
    return found


def measure() -> dict[str, float]:
    """All numbers, in the order in which they are shown."""
    lines = comments = anys = 0
    functions = []
    for path, tree in trees():
        lines += len(path.read_text().splitlines())
        comments += comment_lines(path)
        anys += sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
        functions += [
            n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
    return {
        "folders of src/zeroshard": sum(path.is_dir() and any(path.rglob("*.py")) for path in PACKAGE.iterdir()),
        "loose files of src/zeroshard": len(list(PACKAGE.glob("*.py"))),
        "files": len(trees()),
        "lines of src/zeroshard and benchmarks": lines,
        "functions in 1,000 lines": round(len(functions) / lines * 1000, 1),
        "median lines of a function": statistics.median(functions),
        "comment lines, %": round(comments / lines * 100, 1),
        "Any in 1,000 lines": round(anys / lines * 1000, 1),
        **{
            f"methods of {name}": sum(isinstance(node, ast.FunctionDef) for node in class_of(name)[1].body)
            for name in ("Comm", "Control")
        },
        "fields of Runtime that change": len(changing_fields("Runtime", "runtime")),
        "attributes of Runtime that other folders use": len(used_elsewhere("Runtime", "runtime")),
        "fields of Unit that change": len(changing_fields("Unit", "unit")),
        "files that the model enters in zs.shard": len({path for call in path_of_model() for path in call}),
    }


def main() -> None:
    """Print the numbers beside their goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    found = measure()
    if parser.parse_args().json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        sense, bound = GOALS.get(name, ("", 0))
        met = not sense or (value <= bound if sense == "at most" else value >= bound)
        print(f"{name:46} {value:>10,}  {f'{sense} {bound:,}' if sense else '':18}{'' if met else 'beyond'}")


if __name__ == "__main__":
    main()
