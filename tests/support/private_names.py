"""Private names of torch in a file of Python: what of torch begins with an underscore, as a module, an attribute or a string."""

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

_PARAM = nn.Parameter(torch.zeros(1))
_SGD = torch.optim.SGD([_PARAM], lr=0.1)
_OBJECTS = (  # whose private attributes are torch's, wherever they are read
    _PARAM, (_PARAM * 1).grad_fn, _PARAM.untyped_storage(), nn.Linear(1, 1), _SGD, torch.optim.lr_scheduler.StepLR(_SGD, 1),
    torch.device("cpu"), torch.Generator(), DataLoader([1]), DTensor, dist.ProcessGroup, dist.Store,
)  # fmt: skip
# what torch tells authors of modules to override: super() calls it by the same name
OVERRIDDEN = {"_load_from_state_dict"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# a DTensor sets those
ATTRIBUTES = {name for each in _OBJECTS for name in dir(each) if private(name)} | {"_local_tensor", "_spec"}


class Use(NamedTuple):
    """line, name: 'torch._C._x', or '_x' of an object. where: the function or class around it, or ''."""

    line: int
    name: str
    where: str


def private_uses(path: Path) -> list[Use]:
    """All of a file, in order."""
    tree = ast.parse(path.read_text())
    bound, uses = _imports(tree)
    _visit(tree, "", frozenset(), bound, uses)
    return sorted(set(uses))


def _imports(tree: ast.Module) -> tuple[dict[str, str], list[Use]]:
    """Which names stand for what of torch; and imports of what is private."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
            names = [alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}" for alias in node.names]
            uses += [Use(node.lineno, n, "") for n in names if n.split(".")[0] == "torch" and any(map(private, n.split(".")))]
    return bound, uses


def _visit(node: ast.AST, where: str, own: frozenset[str], bound: dict[str, str], uses: list[Use]) -> None:
    if isinstance(node, ast.ClassDef):
        own |= _own(node)
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        where = where or node.name
    if isinstance(node, ast.Attribute):
        chain, root = _chain(node)
        of_torch = [bound[chain[0]], *chain[1:]] if chain[0] in bound else None
        if of_torch is not None:
            if any(map(private, ".".join(of_torch).split("."))):
                uses.append(Use(node.lineno, ".".join(of_torch), where))
        else:
            for number, name in enumerate(chain[1:]):
                mine = number == 0 and chain[0] in ("self", "cls") and name in own
                if name in ATTRIBUTES and not mine and name not in OVERRIDDEN:
                    uses.append(Use(node.lineno, name, where))
        if root is not None:
            _visit(root, where, own, bound, uses)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        text = child.value if isinstance(child, ast.Constant) and isinstance(child.value, str) else ""
        if text in ATTRIBUTES or text.startswith("torch._"):
            uses.append(Use(child.lineno, text, where))
        _visit(child, where, own, bound, uses)


def _chain(node: ast.expr) -> tuple[list[str], ast.expr | None]:
    """'a.b.c' as its parts; where it does not begin with a name, '' in its place, and what it begins with."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ([node.id, *parts[::-1]], None) if isinstance(node, ast.Name) else (["", *parts[::-1]], node)


def _own(cls: ast.ClassDef) -> frozenset[str]:
    """Attributes that a class makes itself: its methods, annotated fields, and what it assigns to `self`."""
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(found)


def found(name: str) -> Any:
    """What a name stands for. Raises AttributeError or ImportError where the installed torch has no such thing."""
    if name in ATTRIBUTES:
        return name
    parts = name.split(".")
    if parts[0] != "torch":
        raise AttributeError(name)
    value: Any = torch
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:number]))
        value = getattr(value, part)
    return value


def renamed(monkeypatch: Any, module: Any, name: str, new: str, *more: Any) -> None:
    """Give a function of a module another name, as a later release would: in the module, and in the code of those that call it.

    more: functions of other modules, or methods, that call it.
    """
    function = vars(module)[name]
    monkeypatch.delattr(module, name)
    monkeypatch.setattr(module, new, function, raising=False)
    for caller in (*filter(inspect.isfunction, vars(module).values()), *more):
        code = caller.__code__
        if name in code.co_names:
            monkeypatch.setattr(
                caller, "__code__", code.replace(co_names=tuple(new if each == name else each for each in code.co_names))
            )
