"""What public functions need of a model before they begin: the table VERBS, and that each function reads it."""

from pathlib import Path

import pytest
import torch

import zeroshard as zs
from zeroshard.engine.rest import PARTS
from zeroshard.engine.runtime import runtime_of
from zeroshard.engine.verbs import VERBS
from zeroshard.seam import engine_of
from zeroshard.testing import run_threads

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def made(**options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, **options)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, zs.ema(model, 0.9)


def callers(model, optimizer, average, tmp_path):
    """Each verb of the table -> a call of it."""

    def swapped():
        with average.swapped():
            pass

    def gathered():
        with zs.gathered(model):
            pass

    return {
        "model.forward": lambda: model(torch.ones(3, 4)),
        "optimizer.step": optimizer.step,
        "zs.full_state_dict": lambda: zs.full_state_dict(model),
        "zs.stream_full_tensors": lambda: list(zs.stream_full_tensors(model)),
        "zs.save_safetensors": lambda: zs.save_safetensors(model, tmp_path / "model.safetensors"),
        "zs.full_gradients": lambda: zs.full_gradients(model),
        "zs.full_optimizer_state": lambda: zs.full_optimizer_state(model),
        "zs.full_optimizer_state_dict": lambda: zs.full_optimizer_state_dict(model),
        "zs.gathered": gathered,
        "zs.save": lambda: zs.save(tmp_path / "saved", model, optimizer, step=1, overwrite=True),
        "zs.load": lambda: zs.load(tmp_path / "saved", model, optimizer),
        "zs.offload_states": lambda: zs.offload_states(model),
        "zs.reload_states": lambda: zs.reload_states(model),
        "zs.ema": lambda: zs.ema(model, 0.5),
        "AveragedModel.swapped": swapped,
        "AveragedModel.full_state_dict": average.full_state_dict,
        "AveragedModel.load_state_dict": lambda: average.load_state_dict(average.full_state_dict()),
        "zs.close": lambda: zs.close(model),
    }


def test_the_page_shows_the_table():
    lines = [
        line for line in PAGE.read_text().splitlines() if line.startswith(("| `zs.", "| `Averaged", "| `model.", "| `optimizer."))
    ]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.count("|") == 7]
    told = {name: cells for name, *cells in rows}
    yes = lambda flag: "yes" if flag else ""  # noqa: E731
    expected = {
        name: [yes(verb.usable), yes(verb.every_rank), yes(verb.disk), "all" if verb.at_home == PARTS else ", ".join(verb.at_home), yes(verb.between_steps)]
        for name, verb in VERBS.items()
    }  # fmt: skip
    assert told == expected


def test_every_verb_is_asked_for_when_it_is_called(tmp_path):
    """After zs.close each function raises under its own name, so it has read its own row; before it, all of them work."""
    model, optimizer, average = made()
    calls = callers(model, optimizer, average, tmp_path)
    assert calls.keys() == VERBS.keys()
    calls["zs.save"]()
    runtime = runtime_of(model)
    for name, call in ((name, call) for name, call in calls.items() if name != "zs.close"):  # which may be called twice
        expected = "AveragedModel.full_state_dict" if name == "AveragedModel.load_state_dict" else name
        runtime.closed = True
        with pytest.raises(zs.ModelClosed, match=rf"^{expected}\(\) after zs.close"):
            call()
        runtime.closed = False
    for name, call in calls.items():  # zs.close comes last: all work
        if name != "zs.close":
            call()
            zs.reload_states(model)
    calls["zs.close"]()


def test_a_model_of_two_states_is_neither_used_nor_shown(tmp_path):
    model, optimizer, average = made()
    calls = callers(model, optimizer, average, tmp_path)
    calls["zs.save"]()
    for name, verb in VERBS.items():  # zs.close comes last
        runtime_of(model).gate.unusable = zs.CheckpointError("half of it was loaded")
        if verb.usable:
            with pytest.raises(zs.CheckpointError, match="half of it was loaded"):
                calls[name]()
        else:
            calls[name]()
        if name == "zs.offload_states":
            zs.reload_states(model)


def test_what_is_away_is_named(tmp_path):
    model, optimizer, average = made()
    calls = callers(model, optimizer, average, tmp_path)
    calls["zs.save"]()
    zs.offload_states(model)
    for name, verb in VERBS.items():
        if verb.at_home and not name.startswith("zs.ema"):
            with pytest.raises(zs.StatesAway, match="zs.reload_states"):
                calls[name]()
    zs.reload_states(model)
    calls["zs.close"]()


def test_weights_that_are_away_are_not_begun_to_be_saved(tmp_path):
    """Each rank raises before the first exchange: one that raised in the midst of them would leave the others waiting."""

    def rank_main(rank):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 16))
        zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        zs.offload_states(model)
        exchanges = []
        engine_of(model).world.exchange = lambda message, label: exchanges.append(label)
        for _ in range(5):
            with pytest.raises(zs.StatesAway, match="zs.reload_states"):
                zs.save_safetensors(model, tmp_path / "model.safetensors")
        del engine_of(model).world.exchange
        zs.reload_states(model)
        zs.save_safetensors(model, tmp_path / "model.safetensors")
        return exchanges

    assert run_threads(2, rank_main) == [[], []]


def test_while_units_are_in_use_states_are_not_at_rest(tmp_path):
    model, optimizer, average = made()
    calls = callers(model, optimizer, average, tmp_path)
    found = []
    with zs.gathered(model):
        for name in (name for name, verb in VERBS.items() if verb.between_steps):
            asked = name.replace("load_state_dict", "full_state_dict")  # which the caller asks first for averages to load
            with pytest.raises(zs.ZeroshardError, match=f"{asked}: called inside a forward"):
                calls[name]()
            found.append(name)
    assert len(found) == 6
    calls["zs.close"]()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_two_units_of_a_forward_states_are_not_at_rest(stage, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, units=["Linear"])
    refused = []

    def inside(*_):
        for verb in (lambda: zs.save(tmp_path, model, optimizer, step=1), lambda: zs.offload_states(model)):
            with pytest.raises(zs.ZeroshardError, match="called inside a forward"):
                verb()
            refused.append(verb)

    handle = model[1].register_forward_pre_hook(inside)
    model(torch.ones(3, 4)).sum().backward()
    handle.remove()
    assert len(refused) == 2
    optimizer.step()
    zs.save(tmp_path, model, optimizer, step=1)
    zs.close(model)
