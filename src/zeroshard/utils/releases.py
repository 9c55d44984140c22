"""The releases of other projects with which this library is known to work, and the refusal where one lacks a name that is needed.

What is no interface of a project is a private name; a name that the project neither exports nor documents; what is replaced in its
modules. Each project that has such names here has one file for them: `transformers_compat.py`, `lightning_compat.py`,
`bitsandbytes_compat.py`, `torchao_compat.py` beside this one, and `checkpoint/importers/deepspeed.py` for the names in DeepSpeed's
files. Such a file has a table NAMES: name -> the feature that needs it. Where a release lacks a name, that feature is refused, and all
else works (tests/utils). No other file has one of these names (tests/test_architecture.py).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..errors import ConfigError

KNOWN = {
    "transformers": ">=5.20,<5.25",
    "lightning": ">=2.6,<2.7",
    "bitsandbytes": ">=0.50,<0.51",
    "torchao": ">=0.18,<0.19",
}


def lacking(project: str, name: str, feature: str) -> ConfigError:
    """Return the error for a feature that needs a name which the installed release of a project lacks."""
    try:
        installed = f"{project} {version(project)}"
    except PackageNotFoundError:  # it is on the path, and was not installed by pip
        installed = f"the {project} that is imported"
    return ConfigError(
        f"{feature}: {installed} has no {name}, by which this is done. Install a release that is known to work: "
        f"pip install '{project}{KNOWN[project]}'."
    )


def taken(owner: Any, project: str, name: str, feature: str) -> Any:
    """Return an attribute of an object of another project. Raise ConfigError, which names all three, where it is missing."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise lacking(project, name, feature) from None
