"""Measure the shape of the code: what one must own to change the engine, and what others know of it. One zs.shard is run.

python scripts/house.py            a table: each number, the bound that it may not exceed today, its goal
python scripts/house.py --json     the same numbers for a script
python scripts/house.py --arrows   each import that goes up: from ring 0 or 1 to a ring further out, or to another room of ring 1

A number may only fall: tests/test_architecture.py compares it with its bound in BOUNDS, which is lowered with it. (For "comment
lines, %" the bound is a floor.) Lines are rounded up to hundreds.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
import tokenize
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "zeroshard"

ENGINE = {"engine": "engine.unit", "engine and optimizer": "engine.optimizer", "zs.shard": "api"}  # entries to closures
SATELLITES = (
    "comm", "optim", "planner", "checkpoint", "parallel", "activations", "data", "integrations.deepspeed", "integrations.lightning",
    "fsdp", "cli", "benchmarks",
)  # fmt: skip
# the rings, from the inside: what they all stand on, the engine, services. What is in none is a satellite
GROUND, RING_0 = ("errors", "utils", "config", "tensor"), ("engine",)
RING_1 = ("policies", "tiers", "guard", "axes", "packing", "values", "state", "formats", "diagnostics", "reports")
# the names by which the code knows objects of the engine; a field that is read of one in a satellite is a place. What is read of
# a mapping or a string is none: groups of an optimizer are dictionaries. "topology" is not among them: the seam shows a model's
# Topology as a documented object to be read (`Engine.topology`); `runtime.topology` is a place, by "runtime"
OBJECTS = frozenset(
    "_zeroshard runtime core unit group tiers home masters gate schedule attendance values gradients reductions".split()
)


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


def name_of(path: Path) -> str:
    """Return the module's name inside of zeroshard: "engine.unit", "benchmarks.race"; a package has its folder's."""
    parts = path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"


@functools.cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Return the file and the parsed text of each module, by name."""
    return {name_of(path): (path, tree) for path, tree in trees()}


def imported(module: str, *, for_types: bool = True, late: bool = True) -> set[tuple[str, str]]:
    """Return (module, name) for all that a module imports of this package; the name is "" for a whole module.

    for_types: under `if TYPE_CHECKING` as well. late: in functions as well.
    """
    path, tree = modules()[module]
    inside = PACKAGE in path.parents
    package = list(path.relative_to(PACKAGE).parent.parts) if inside else []
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not late and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            skipped |= set(ast.walk(node))
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and ((inside and node.level) or (node.module or "").split(".")[0] == "zeroshard"):
            given = node.module.split(".") if node.module else []
            base = package[: len(package) - node.level + 1] + given if node.level else given[1:]
            for (
                alias
            ) in node.names:  # `from .comm import world` is the module comm.world, `from .config import Config` a name of config
                whole = ".".join([*base, alias.name])
                found.add((whole, "") if whole in modules() else (".".join(base) or "__init__", alias.name))
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {(".".join(name[1:]) or "__init__", "") for name in names if name[0] == "zeroshard"}
    return {pair for pair in found if pair[0] != module}


def closure(module: str) -> set[str]:
    """Return the modules that hold what a module uses: its own, and those whose names these import, types and late imports apart.

    A name that a package shows is in the module from which the package has it.
    """
    found, todo = set(), [module]
    while todo:
        if (name := todo.pop()) not in found and name in modules():
            found.add(name)
            todo += [holder(other, each) for other, each in imported(name, for_types=False, late=False)]
    return found


def holder(module: str, name: str) -> str:
    """Return the module from which a package has a name that it shows; the module itself if it is no package."""
    if not name or module not in modules() or not shown_by(module):
        return module
    return next((other for other, each in imported(module) if each == name), module)


def within(module: str, room: str) -> bool:
    """Return whether a module is a room or in it."""
    return module == room or module.startswith(room + ".")


def knows(satellite: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]], int]:
    """Return what a satellite knows of the inside: names of the engine, names inside of services, and the number of places.

    A place reads a field of an engine's object. What a package itself shows (its `__init__`) is no inside.
    """
    names: set[tuple[str, str]] = set()
    places = 0
    for module in (each for each in modules() if within(each, satellite)):
        names |= imported(module)
        places += sum(
            isinstance(node, ast.Attribute)
            and owner_of(node) in OBJECTS
            and not hasattr(dict, node.attr)
            and not hasattr(str, node.attr)
            for node in ast.walk(modules()[module][1])
        )
    services = {(other, name) for other, name in names if ring_of(other) == 1 and not shown_by(other)}
    return {(other, name) for other, name in names if ring_of(other) == 0 and not shown_by(other)}, services, places


def shown_by(module: str) -> bool:
    """Return whether a module is a package, whose names others may import."""
    return modules()[module][0].name == "__init__.py"


def ring_of(module: str) -> int:
    """Return the number of a module's ring: -1 for the ground, 0 the engine, 1 a service, 2 a satellite."""
    room = module.split(".")[0]
    return next((ring for ring, rooms in ((-1, GROUND), (0, RING_0), (1, RING_1)) if room in rooms), 2)


def arrows() -> list[tuple[int, int, str, str, str]]:
    """Return (ring, other ring, module, other module, name) for each import, types and late ones too, that goes up or inside of another
    service: what its package shows is no inside.
    """
    found = []
    for module in modules():
        ring = ring_of(module)
        for other, name in imported(module):
            to = ring_of(other)
            if to > ring or (to == ring == 1 and module.split(".")[0] != other.split(".")[0] and not shown_by(other)):
                found.append((ring, to, module, other, name))
    return sorted(found)


def owner_of(node: ast.Attribute) -> str | None:
    """Return the name of what an attribute is read from: "b" for b.c and for a.b.c."""
    value = node.value
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else None


def hundreds(lines: int) -> int:
    """Return a number of lines, rounded up to hundreds."""
    return -(-lines // 100) * 100


def changing_fields(name: str, holder: str) -> set[str]:
    """Fields that are assigned after `__init__`: in the class, or as `<holder>.field = ...` anywhere."""
    _, cls = class_of(name)
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    places = [(node, {"self", holder}) for node in methods] + [(tree, {holder}) for _, tree in trees()]
    found = set()
    for place, names in places:
        for node in ast.walk(place):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and owner_of(node) in names:
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
    """Return all numbers, in the order in which they are shown."""
    lines = {name: len(path.read_text().splitlines()) for name, (path, _) in modules().items()}
    everything = sum(lines.values())
    comments = sum(comment_lines(path) for path, _ in trees())
    anys = sum(isinstance(node, ast.Name) and node.id == "Any" for _, tree in trees() for node in ast.walk(tree))
    found: dict[str, float] = {
        "lines of src/zeroshard and benchmarks": hundreds(everything),
        "lines of ring 0 (engine/)": hundreds(sum(count for name, count in lines.items() if ring_of(name) == 0)),
        "lines of ring 1": hundreds(sum(count for name, count in lines.items() if ring_of(name) == 1)),
        "imports that leave ring 0": sum(ring == 0 for ring, *_ in arrows()),
        "imports from ring 1 to ring 2": sum(ring == 1 < to for ring, to, *_ in arrows()),
        "imports between rooms of ring 1": sum(ring == 1 == to for ring, to, *_ in arrows()),
        "places of the engine that ask about imagined ranks": sum(
            isinstance(node, ast.Attribute) and node.attr == "imagined"
            for name, (_, tree) in modules().items()
            if ring_of(name) == 0
            for node in ast.walk(tree)
        ),
    }
    for what, entry in ENGINE.items():
        own = closure(entry)
        found |= {
            f"files to own for {what} ({entry})": len(own),
            f"lines of these, {entry}": hundreds(sum(lines[n] for n in own)),
        }
    for satellite in SATELLITES:
        engine, services, places = knows(satellite)
        found |= {
            f"names of the engine that {satellite} imports": len(engine),
            f"names inside of services that {satellite} imports": len(services),
            f"places of {satellite} inside the engine": places,
        }
    return found | {
        "files that the model enters in zs.shard": len({path for call in path_of_model() for path in call}),
        "fields of Runtime that change": len(changing_fields("Runtime", "runtime")),
        "fields of Unit that change": len(changing_fields("Unit", "unit")),
        "Any in 1,000 lines": round(anys / everything * 1000, 1),
        COMMENTS: round(comments / everything * 100, 1),
    }


COMMENTS = "comment lines, %"
GOALS = {
    "lines of src/zeroshard and benchmarks": 62_700,
    "lines of ring 0 (engine/)": 8_500,
    "lines of ring 1": 12_000,
    **dict.fromkeys(("imports that leave ring 0", "imports from ring 1 to ring 2", "imports between rooms of ring 1"), 0),
    "places of the engine that ask about imagined ranks": 0,
    "lines of these, engine.optimizer": 8_500,
    **{f"names of the engine that {satellite} imports": 0 for satellite in SATELLITES},
    **{f"names inside of services that {satellite} imports": 0 for satellite in SATELLITES},
    **{f"places of {satellite} inside the engine": 0 for satellite in SATELLITES},
    "Any in 1,000 lines": 10,
    COMMENTS: 9.5,
}
BOUNDS: dict[str, float] = {
    "lines of src/zeroshard and benchmarks": 70_900,
    "lines of ring 0 (engine/)": 8_500,
    "lines of ring 1": 12_700,
    "imports that leave ring 0": 0,
    "imports from ring 1 to ring 2": 0,
    "imports between rooms of ring 1": 0,
    "places of the engine that ask about imagined ranks": 0,
    "files to own for engine (engine.unit)": 47,
    "lines of these, engine.unit": 8_300,
    "files to own for engine and optimizer (engine.optimizer)": 67,
    "lines of these, engine.optimizer": 12_300,
    "files to own for zs.shard (api)": 180,
    "lines of these, api": 33_900,
    "names of the engine that comm imports": 0,
    "names inside of services that comm imports": 0,
    "places of comm inside the engine": 0,
    "names of the engine that optim imports": 0,
    "names inside of services that optim imports": 0,
    "places of optim inside the engine": 0,
    "names of the engine that planner imports": 0,
    "names inside of services that planner imports": 0,
    "places of planner inside the engine": 0,
    "names of the engine that checkpoint imports": 0,
    "names inside of services that checkpoint imports": 0,
    "places of checkpoint inside the engine": 0,
    "names of the engine that parallel imports": 0,
    "names inside of services that parallel imports": 0,
    "places of parallel inside the engine": 0,
    "names of the engine that activations imports": 0,
    "names inside of services that activations imports": 0,
    "places of activations inside the engine": 0,
    "names of the engine that data imports": 0,
    "names inside of services that data imports": 0,
    "places of data inside the engine": 0,
    "names of the engine that integrations.deepspeed imports": 0,
    "names inside of services that integrations.deepspeed imports": 0,
    "places of integrations.deepspeed inside the engine": 0,
    "names of the engine that integrations.lightning imports": 0,
    "names inside of services that integrations.lightning imports": 0,
    "places of integrations.lightning inside the engine": 0,
    "names of the engine that fsdp imports": 0,
    "names inside of services that fsdp imports": 0,
    "places of fsdp inside the engine": 0,
    "names of the engine that cli imports": 0,
    "names inside of services that cli imports": 0,
    "places of cli inside the engine": 0,
    "names of the engine that benchmarks imports": 1,
    "names inside of services that benchmarks imports": 3,
    "places of benchmarks inside the engine": 0,
    "files that the model enters in zs.shard": 15,
    "fields of Runtime that change": 9,
    "fields of Unit that change": 10,
    "Any in 1,000 lines": 12.1,
    COMMENTS: 4.2,
}


def beyond(name: str, value: float, bound: float) -> bool:
    """Return whether a number is worse than a bound."""
    return value < bound if name == COMMENTS else value > bound


def main() -> None:
    """Print the numbers beside their bounds and goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--arrows", action="store_true", help="print the imports that go up")
    if (options := parser.parse_args()).arrows:
        print(*(f"{module} -> {other}: {name}" for _, _, module, other, name in arrows()), sep="\n")
        return
    found = measure()
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'':58} {'today':>8} {'bound':>8} {'goal':>8}")
    for name, value in found.items():
        goal = f"{GOALS[name]:,}" if name in GOALS else ""
        print(f"{name:58} {value:>8,} {BOUNDS[name]:>8,} {goal:>8}{'  beyond its bound' * beyond(name, value, BOUNDS[name])}")


if __name__ == "__main__":
    main()
