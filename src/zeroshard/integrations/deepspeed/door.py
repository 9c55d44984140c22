"""The way in which `import deepspeed` finds zeroshard, in this process and its children, and the modules that it finds.

The modules are made from the table in surface.py: `deepspeed.x.y` and `zeroshard.deepspeed.x.y` are one module object. The object
for a name is imported when the name is first used, so that `import deepspeed` is quick. The error for a name that does not exist
has the name to use instead.

Frameworks look up the package and its metadata with importlib, some of them while they are imported. Entries in sys.modules would
not answer these look-ups, so `install` puts a real folder with a dist-info (site/) first on sys.path.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import ConfigError, missing_name
from . import VERSION
from .surface import INSTEAD, SURFACE

ROOT = "zeroshard.deepspeed"
ALIAS = "deepspeed"
_HERE = __package__
SITE = Path(__file__).parent / "site"
_DECIDE_AT_IMPORT = ("accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric", "peft", "trl")
UNKNOWN = None  # the commit and branch that deepspeed was built from
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))


class SurfaceModule(ModuleType):
    """One module of the interface. Programs can assign its attributes, as those of any module."""

    def __getattr__(self, name: str) -> Any:
        path = self.__dict__.get("_surface_path")
        if path is None or (name.startswith("__") and name not in SURFACE[path]):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        inner = f"{path}.{name}" if path else name
        if name in SURFACE[path]:
            value = _resolve(SURFACE[path][name])
        elif inner in _PATHS:
            value = importlib.import_module(f"{ROOT}.{inner}")
        else:
            value = None
            if "__getattr__" in SURFACE[path]:  # deepspeed.comm passes on names of torch.distributed
                with contextlib.suppress(AttributeError):
                    value = _resolve(SURFACE[path]["__getattr__"])(name)
            if value is None:
                raise missing_name(_text(inner), sys._getframe(1))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        path = self.__dict__["_surface_path"]
        prefix = f"{path}." if path else ""
        inside = {each.removeprefix(prefix).partition(".")[0] for each in _PATHS if each.startswith(prefix) and each != path}
        return sorted({*super().__dir__(), *SURFACE[path], *inside} - {"_surface_path"})


def _resolve(where: str) -> Any:
    """Import 'module:attribute' of this package; 'module:' is the module itself."""
    module, _, attribute = where.partition(":")
    found = importlib.import_module(module if module.startswith(("zeroshard", "torch")) else f"{_HERE}.{module}")
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part)
    return found


def _text(path: str) -> str:
    """Return the error message for a name that does not exist."""
    parts = path.split(".")
    keys = (path, parts[-1], *(".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)))
    remedy = next((INSTEAD[key] for key in keys if key in INSTEAD), None)
    return f"zeroshard.deepspeed has no {path}. {remedy or 'See docs/how-to/tools.md for what it has.'}"


# the table's modules, and the packages that contain them
_PATHS = {".".join(path.split(".")[: count + 1]) for path in SURFACE if path for count in range(path.count(".") + 1)}
for _path in _PATHS:
    SURFACE.setdefault(_path, {})
_modules: dict[str, SurfaceModule] = {}


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        path = _path_of(spec.name)
        assert path is not None
        if path not in _modules:
            module = SurfaceModule(f"{ROOT}.{path}")
            module._surface_path = path  # type: ignore[attr-defined]
            module.__path__ = []
            _modules[path] = module
        return _modules[path]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `SurfaceModule.__getattr__` imports names at their first use."""


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        found = _path_of(fullname)
        if found in _PATHS:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        if found in (None, "__main__"):
            return None
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":  # raise for imports; importlib.util.find_spec gets None
            error = ModuleNotFoundError(_text(found))
            error.name = fullname  # lets `from package import name` try the attribute
            raise error
        return None


def _path_of(fullname: str) -> str | None:
    """Return a module's path below `zeroshard.deepspeed`, or below `deepspeed` if that is zeroshard's; else None."""
    for root in (ROOT, ALIAS):
        if fullname.startswith(f"{root}.") and isinstance(sys.modules.get(root), SurfaceModule):
            return fullname.removeprefix(f"{root}.")
    return None


def open_door(module: ModuleType) -> None:
    """Turn the ordinary module `zeroshard.deepspeed` into the root of the interface."""
    module.__class__ = SurfaceModule
    module._surface_path = ""  # type: ignore[attr-defined]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


# -- import deepspeed ------------------------------------------------------------------------------------------------


def install() -> None:
    """Make `import deepspeed` import `zeroshard.deepspeed` from now on. Call it before other imports; a second call does nothing.

    Raises ConfigError if accelerate, transformers or lightning were imported before, since they decide at import whether
    DeepSpeed is installed, or if the real deepspeed was.
    """
    present = sys.modules.get("deepspeed")
    if present is not None and present is sys.modules.get("zeroshard.deepspeed"):
        return
    if present is not None:
        where = getattr(present, "__file__", "?")
        raise ConfigError(f"zeroshard.deepspeed.install(): deepspeed was imported before, from {where}: call install() first.")
    early = [name for name in _DECIDE_AT_IMPORT if name in sys.modules]
    if early and not _is_first(sys.path):
        raise ConfigError(
            f"zeroshard.deepspeed.install(): {', '.join(early)} was imported before, and decides while it is imported whether DeepSpeed "
            "is there: call install() first, or start the script with python -m zeroshard.deepspeed script.py."
        )
    if not _is_first(sys.path):
        sys.path.insert(0, str(SITE))
    os.environ.update(child_environment())


def _is_first(paths: list[str]) -> bool:
    """Return whether the site folder comes before any other deepspeed on the path."""
    for path in paths:
        if path == str(SITE):
            return True
        if os.path.isfile(os.path.join(path or ".", "deepspeed", "__init__.py")):
            return False
    return False


def child_environment() -> dict[str, str]:
    """Return the PYTHONPATH with which `import deepspeed` finds zeroshard in a child process.

    Workers of torchrun and of `accelerate launch` inherit it.
    """
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    source = str(Path(__file__).parents[3])  # zeroshard's own folder, in case it is not installed
    if source not in others and not source.endswith("-packages"):
        others.append(source)
    return {"PYTHONPATH": os.pathsep.join([str(SITE), *others])}
