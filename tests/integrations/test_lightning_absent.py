"""Where Lightning is not installed its integration says so in one line, and nothing else of the library asks for it."""

import importlib
import sys

import pytest


class _Absent:
    """A finder for which Lightning is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])


def test_without_lightning_the_import_names_the_remedy(monkeypatch):
    before = dict(sys.modules)
    ours = ("lightning", "pytorch_lightning", "lightning_fabric", "zeroshard.integrations.lightning")
    for name in [name for name in before if name.startswith(ours)]:
        del sys.modules[name]
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])
    try:
        with pytest.raises(ModuleNotFoundError, match="pip install 'lightning") as told:
            importlib.import_module("zeroshard.integrations.lightning")
        assert told.value.name == "lightning"
    finally:
        for name in [name for name in sys.modules if name.startswith(ours)]:
            del sys.modules[name]
        sys.modules.update(before)
