"""What an editor sees: the options of `shard` by name, every public name, and of a name from elsewhere the line to write."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard import deepspeed, public
from zeroshard.config import Config, ConfigFields, ShardOptions
from zeroshard.integrations.deepspeed.surface import SURFACE

SOURCE = Path(zs.__file__).parent
IMPORTS = ("activation", "communication", "partition")  # modules behind deepspeed.checkpointing, .comm and .zero


def test_the_options_are_the_fields_of_config_and_take_what_is_kept():
    kept = {field.name: field.type for field in dataclasses.fields(Config)}
    assert list(ConfigFields.__annotations__) == list(kept)
    assert ShardOptions.__annotations__.keys() - kept.keys() == {"preset"}
    for name, annotation in ConfigFields.__annotations__.items():
        taken = annotation.__forward_arg__
        assert taken.endswith(" | None"), name
        for kind in kept[name].replace("torch.dtype]", "str | torch.dtype]").replace("StateFormat]", "object]").split(" | "):
            assert kind in taken or (kind, "float" in taken) == ("int", True), f"{name}: {kind} is kept, {taken} is taken"


@pytest.mark.parametrize("verb", ["shard", "init", "parallelize", "plan"])
def test_options_have_types(verb):
    last = list(inspect.signature(getattr(zs, verb)).parameters.values())[-1]
    assert (last.kind, last.annotation) == (last.VAR_KEYWORD, "Unpack[ShardOptions]")


def imported_for_types(path: Path) -> set[str]:
    """Names that a module has under `if TYPE_CHECKING`."""
    blocks = [node for node in ast.parse(path.read_text()).body if ast.unparse(getattr(node, "test", node)) == "TYPE_CHECKING"]
    names = {
        alias.asname or alias.name for each in ast.walk(blocks[0]) if isinstance(each, ast.ImportFrom) for alias in each.names
    }
    return names | {each.id for each in ast.walk(blocks[0]) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def test_names_that_come_later_resolve_in_an_editor():
    assert imported_for_types(SOURCE / "public.py") == set(public._LATER)
    assert imported_for_types(SOURCE / "deepspeed" / "__init__.py") - {*IMPORTS} == {
        *SURFACE[""],
        "checkpointing",
        "comm",
        "zero",
    }


def test_the_interface_of_deepspeed_alone_is_listed():
    shown = {name for name in dir(deepspeed) if not name.startswith("__")}
    assert not shown & {"sys", "open_door", "TYPE_CHECKING", "_surface_path"}
    assert shown - set(SURFACE[""]) <= {path.partition(".")[0] for path in SURFACE}


@pytest.mark.parametrize("name", zs._INSTEAD)
def test_a_name_from_elsewhere_says_what_to_write(name):
    with pytest.raises(AttributeError, match=f"'zeroshard' has no attribute '{name}'. Write instead: ") as asked:
        getattr(zs, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from zeroshard import {name}")
    line = str(asked.value).partition("Write instead: ")[2]
    assert str(imported.value).endswith(line) and not hasattr(zs, name) and name not in dir(zs)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if "zs.shard" not in line and "zs.init" not in line:
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()))
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    namespace = {"zs": zs, "model": model, "optimizer": optimizer}
    model.generate = model.forward  # what zs.register_forward names
    exec(line, namespace)
    assert "zs.shard" not in line or zs.report(namespace["model"]).stage == int((re.findall(r"stage=(\d)", line) or ["3"])[0])


def test_a_name_that_is_nowhere():
    with pytest.raises(AttributeError, match="module 'zeroshard' has no attribute 'no_such_name'.$"):
        zs.no_such_name  # noqa: B018


def test_a_name_that_a_program_sets_stays(monkeypatch):
    """Though public names come with the first that is asked for, and later ones when they are."""
    monkeypatch.setattr(zs, "save", len)
    monkeypatch.delitem(vars(zs), "plan", raising=False)
    assert zs.plan is public.plan and zs.save is len
