"""The shape of the source: imports go one way, every file says what it is for.

LAYERS are the rings of docs/design.md, from the inside: a module imports from rows above its own (or, within a room, from its
siblings). A new module needs a place here; a forbidden import needs a better home for what it imports.
"""

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import foreign_names
import private_names
import pytest

import zeroshard
from scripts import house

ROOT = Path(zeroshard.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))

LAYERS = (
    ("errors", "utils"),
    ("tensor",),  # of which a rank holds a slice: what a program sees of a parameter at rest
    ("config",),
    ("engine",),  # ring 0
    house.RING_1,  # services
    ("comm", "testing"),  # ranks of one host, ranks as threads
    ("assembly.registering",),
    ("seam",),  # what all that follows uses of the engine
    ("optim",),  # optimizers
    ("activations",),  # checkpointing, partitioning, offload, tiling
    ("checkpoint", "data", "assembly", "assembly.auto_stage"),
    ("assembly.lr_schedulers",),  # this and what follows put rings and satellites together
    ("assembly.sharded_optimizer",),
    ("assembly.late_optimizer",),
    ("api",),
    ("parallel",),
    ("public", "__init__", "io"),  # the names of zeroshard, which __init__.py shows
    ("planner",),  # the runtime on imagined ranks, the simulator, the search, remedies
    ("integrations", "fsdp"),
    ("deepspeed",),  # zeroshard.deepspeed, which shows integrations/deepspeed
    ("integrations.deepspeed.site", "cli", "__main__"),
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """'comm.base' for engine/comm/base.py; a package is named like the folder, the root package '__init__'."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or "__init__"


MODULES = {module_name(path): path for path in FILES}


def layer_of(module: str) -> int:
    """Index in LAYERS of the longest entry that is the module or a package around it."""
    found = [
        (len(entry), number)
        for number, row in enumerate(LAYERS)
        for entry in row
        if module == entry or module.startswith(entry + ".")
    ]
    assert found, f"{module} has no place in LAYERS (tests/test_architecture.py)"
    return max(found)[1]


def row_entry(module: str) -> str:
    entries = [e for row in LAYERS for e in row if module == e or module.startswith(e + ".")]
    return max(entries, key=len)


def imports_of(module: str, for_types: bool = True) -> set[str]:
    """Modules of this package that a module imports, wherever in the file. for_types: under `if TYPE_CHECKING` as well."""
    return {other for other, _ in house.imported(module, for_types=for_types)}


SLOW_TO_IMPORT = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "transformers",
    "matplotlib",
)
# imported on first use only, and with parallel.pipeline, whose torch.distributed.pipelining imports torch.distributed.tensor
WITH_PIPELINES = ("parallel.parallelize", "parallel.tensor_parallel", "parallel.traffic")


def test_what_takes_seconds_to_import_is_imported_where_it_is_used():
    """`import zeroshard` takes half a second more than `import torch`; with one of these, two."""
    found = []
    for module in MODULES:
        if module.startswith(("cli", "fsdp")) or module in WITH_PIPELINES:  # programs of FSDP2 have imported it
            continue
        for node in parsed(MODULES[module]).body:
            given = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names = [f"{node.module}.{name}" for name in given] if isinstance(node, ast.ImportFrom) else given
            found += [f"{module} imports {name} when it is imported itself" for name in names if name.startswith(SLOW_TO_IMPORT)]
    assert not found, "\n".join(found)


def test_importing_the_package_imports_no_compiler():
    """Nor what torch's own modules bring in when one of their functions is called, as the decorator torch.compiler.disable does."""
    code = "import sys, zeroshard; zeroshard.shard; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "zeroshard.api" in found and not {"torch._dynamo", *SLOW_TO_IMPORT} & set(found)


def test_imports_go_one_way():
    """Those of rings 0 and 1 that still go up are counted instead: `scripts/house.py --arrows` lists them, their numbers may only fall."""
    found, counted = [], {(module, other) for _, _, module, other, _ in house.arrows()}
    for module in MODULES:
        others = imports_of(
            module, for_types=module not in ("public", "__init__")
        )  # the front door shows editors what is above it
        for other in sorted(others & MODULES.keys()):
            if other == "__init__" and layer_of(module) < layer_of("__init__"):
                found.append(f"{module} imports from the package's front door")
            elif (module, other) not in counted and row_entry(module) != row_entry(other) and layer_of(other) > layer_of(module):
                found.append(f"{module} (row {layer_of(module)}) imports {other} (row {layer_of(other)}): imports only go down")
    assert not found, "\n".join(found)


# tensor parallelism, pipelines and the command line are about axes of these names; "tp" is also a section of DeepSpeed's files
KNOWS_AXES = ("utils.axes", "parallel", "cli", "integrations.deepspeed.config_keys")


def test_names_of_model_axes_are_in_one_table():
    """Elsewhere rules read the columns of utils/axes.py, and names are its constants."""
    found = [
        f"{module}, line {node.lineno}: {node.value!r}"
        for module in MODULES
        if not any(f"{module}.".startswith(f"{each}.") for each in KNOWS_AXES)
        for node in ast.walk(parsed(MODULES[module]))
        if isinstance(node, ast.Constant) and node.value in ("tp", "pp", "ep")
    ]
    assert not found, "\n".join(found)


def test_codecs_are_arithmetic_alone():
    """A codec knows no rank and sends nothing: of the engine it takes the length of a chunk (engine/comm/sums.py)."""
    codecs = [name for name in MODULES if name.startswith("packing.codecs")]
    assert codecs
    for module in codecs:
        for other in imports_of(module):
            allowed = (
                other.split(".")[0] in ("errors", "utils") or other == "engine.comm.sums" or other.startswith("packing.codecs")
            )
            assert allowed, f"{module} imports {other}"


def test_modules_do_not_import_in_circles():
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"circular import: {' -> '.join([*above[above.index(module) :], module])}"
        if module not in done:
            for other in sorted(imports_of(module, for_types=False) & MODULES.keys()):
                package = MODULES[other].name == "__init__.py"
                if not (package and (module.startswith(other + ".") or other == "__init__")):  # a package's own doorway
                    visit(other, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_every_file_opens_with_what_it_is_for():
    found = [str(path) for path in [*FILES, *TESTS] if len(ast.get_docstring(parsed(path)) or "") <= 15]
    assert not found, f"{found}: open each with a docstring that says what the file is for"


FRAGMENTS = set("What Of Whether How Where As Those Which So When That If Who Why".split())


def test_docstrings_stand_by_themselves():
    """A function's begins with a verb ("Return ..."), a class's or a module's with what it is ("A ...", "The ...")."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.parent.name}/{path.name}: {getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"
        for path in [*FILES, *sorted((Path(__file__).parents[1] / "benchmarks").rglob("*.py"))]
        for node in ast.walk(parsed(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and text.split()[0].rstrip(",") in FRAGMENTS
    ]
    assert not found, "begin each with a verb, or with what it is:\n" + "\n".join(found)


def test_the_model_goes_down_only_through_the_rooms_of_zs_shard():
    """zs.shard is a recipe: each of its lines gives the model to one room, and no room gives it to one above."""
    calls = [(module_name(caller), module_name(called)) for caller, called in house.path_of_model()]
    up = {(caller, called) for caller, called in calls if layer_of(called) > layer_of(caller)}
    assert calls and not up - {(module, other) for _, _, module, other, _ in house.arrows()}


def test_no_number_of_the_house_rises():
    """What one must own to change the engine, and what others know of it: lower a bound in scripts/house.py as its number falls."""
    found = house.measure()
    assert found.keys() == house.BOUNDS.keys() and all(
        found[name] for name in found if not name.startswith(("import", "names", "places"))
    )
    worse = {
        name: f"{value}, bound {house.BOUNDS[name]}"
        for name, value in found.items()
        if house.beyond(name, value, house.BOUNDS[name])
    }
    assert not worse, f"{worse}: find what it pays for, or a home outside of the engine"
    shares = {house.COMMENTS, "Any in 1,000 lines"}  # which move with every line
    fallen = {name: value for name, value in found.items() if value != house.BOUNDS[name] and name not in shares}
    assert not fallen, f"lower these bounds in scripts/house.py: {fallen}"


def test_a_closure_follows_what_is_imported_at_once():
    """Not types, and not what a function imports when it is called."""
    assert house.closure("errors") == {"errors"}
    assert "planner.plan" not in house.closure("api") and {"engine.unit", "engine.comm.base", "config"} <= house.closure("api")
    assert house.closure("engine.unit") < house.closure("engine.optimizer") < house.closure("api")
    engine, services, places = house.knows("integrations.lightning")
    assert not engine and not services and not places and all(house.knows("benchmarks")[:2])


def test_no_file_of_tests_needs_another():
    """Each can be run alone: what several share is in tests/support."""
    for path in TESTS:
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [
            name
            for node in nodes
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        ]
        for name in names:
            assert not name.startswith("test_"), f"{path} imports {name}: move what both use to tests/support"


def test_nothing_that_git_should_ignore_is_committed():
    """A committed .venv, a link to one machine's environment, was once taken by every clean clone for its own."""
    checkout = Path(__file__).parent.parent
    command = ["git", "-c", "safe.directory=*", "-C", str(checkout), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    if shutil.which("git") is None or not (checkout / ".git").exists():
        pytest.skip("this is no checkout of git")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git can not read this checkout: {done.stderr}")
    assert not done.stdout, f"remove with git rm --cached: {done.stdout}"


def test_private_names_of_torch_are_in_one_file():
    """So that what a release takes away is mended there, and tests/utils/test_torch_compat.py names it."""
    found = [
        f"{module}, line {use.line}: {use.name}"
        for module in MODULES.keys() - {"utils.torch_compat"}
        for use in private_names.private_uses(MODULES[module])
    ]
    assert not found, "\n".join([*sorted(found), "give each a name in utils/torch_compat.py"])


def test_private_names_of_torch_are_found_in_any_guise(tmp_path):
    path = tmp_path / "guises.py"
    path.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch import nn\nfrom torch._subclasses import fake_tensor\n"
        "class Own(nn.Module):\n    def __init__(self):\n        self._version = 1\n"
        "    def read(self):\n        return self._version, self._modules\n"
        "dist.distributed_c10d._world\nf(x).y._version.z\ngetattr(p, '_backward_hooks')\nown._mine\n'torch._dynamo'\n"
    )
    found = [(use.line, use.name) for use in private_names.private_uses(path)]
    assert found == [
        (4, "torch._subclasses.fake_tensor"), (9, "_modules"), (10, "torch.distributed.distributed_c10d._world"), (11, "_version"),
        (12, "_backward_hooks"),
    ]  # fmt: skip


@functools.cache
def foreign_attributes() -> dict[str, set[str]]:
    return foreign_names.attributes()


def test_names_of_other_projects_that_are_no_interface_are_in_one_file_each():
    """So that what a release takes away is mended there, or refused by name (utils/releases.py, tests/utils)."""
    theirs = {module for module in MODULES if module.startswith(foreign_names.INTERFACE)}
    found = [
        f"{module}, line {use.line}: {use.name} ({use.project})"
        for module, path in MODULES.items()
        for use in foreign_names.foreign_uses(path, foreign_attributes())
        if foreign_names.FILES.get(use.project) != module
        and not (module in theirs and (use.project == "deepspeed's files" or use.name.startswith("transformers.models.")))
    ]
    assert not found, "\n".join([*found, f"give each a name in the project's file: {foreign_names.FILES}"])


def test_names_of_other_projects_are_found_in_any_guise(tmp_path):
    path = tmp_path / "guises.py"
    path.write_text(
        "import transformers\nfrom transformers import LlamaConfig\nfrom transformers.integrations.moe import ExpertsInterface\n"
        "import importlib, sys\nsys.modules.get('transformers.masking_utils')\nimportlib.import_module('lightning.pytorch.plugins')\n"
        "class Own:\n    def __init__(self):\n        self._tp_plan = 1\n    def read(self):\n        return self._tp_plan\n"
        "model.config._attn_implementation\ngetattr(model, '_init_weights')\nexperts.has_gate\nstrategy._launcher\n"
        "vars(file)['load_balancing_loss_func']\nsaved['param_shapes']\n'a text about transformers.masking_utils'\nmodel._own\n"
    )
    found = [(use.line, use.name) for use in foreign_names.foreign_uses(path, foreign_attributes())]
    assert found == [
        (3, "transformers.integrations.moe"), (5, "transformers.masking_utils"), (12, "_attn_implementation"), (13, "_init_weights"),
        (14, "has_gate"), (15, "_launcher"), (16, "load_balancing_loss_func"), (17, "param_shapes"),
    ]  # fmt: skip
