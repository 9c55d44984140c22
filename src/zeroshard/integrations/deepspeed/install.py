"""Make `import deepspeed` find zeroshard, in this process and in its children.

Frameworks look up the package and its metadata with importlib, some of them while they are imported. Entries in sys.modules would
not answer these look-ups, so `install` puts a real folder with a dist-info (site/) first on sys.path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ...errors import ConfigError

SITE = Path(__file__).parent / "site"
_DECIDE_AT_IMPORT = ("accelerate", "transformers", "lightning", "pytorch_lightning", "lightning_fabric", "peft", "trl")


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


def child_environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """Return the PYTHONPATH with which `import deepspeed` finds zeroshard in a child process.

    Workers of torchrun and of `accelerate launch` inherit it.
    """
    given = (os.environ if base is None else base).get("PYTHONPATH", "")
    others = [path for path in given.split(os.pathsep) if path and path != str(SITE)]
    source = str(Path(__file__).parents[3])  # zeroshard's own folder, in case it is not installed
    if source not in others and not source.endswith("-packages"):
        others.append(source)
    return {"PYTHONPATH": os.pathsep.join([str(SITE), *others])}
