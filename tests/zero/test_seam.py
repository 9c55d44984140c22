"""What the seam tells of a sharded model: its ranks, the loss scale, the parameters that no rank has used.

Stages and parts of a model, which need process groups, are asked for in integrations/test_deepspeed_axes.py.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import Stack, run_threads, seeded

import zeroshard as zs
from zeroshard import seam
from zeroshard.seam import engine_behind, engine_of


class Choice(nn.Module):
    """Two layers, of which a forward uses one; the second one is frozen or trained."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[1].requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        return self.layers[use](x)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", [None, {"dp": 1, "sp": 2}], ids=["dp", "sp"])
def test_ranks_of_a_model_that_no_axis_divides(stage, mesh):
    """Ranks along sp have other tokens, and the whole model: they are among those that average."""

    def run(rank):
        net = seeded(Stack)
        model, optimizer = zs.shard(net, torch.optim.AdamW(net.parameters()), stage=stage, mesh=mesh)
        engine = engine_of(model)
        assert engine.model is model and engine_behind(optimizer).model is model
        assert (engine.ranks.rank, engine.ranks.world_size, engine.world.rank, engine.world.world_size) == (rank, 2, rank, 2)
        return engine.topology.stages, engine.topology.mesh

    assert run_threads(2, run) == [([[0, 1]], None)] * 2


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.replicated,
        lambda engine: engine.publish(),
        lambda engine: engine.rehearse_step(),
        lambda engine: engine.states.restoring({}),
        lambda engine: engine.states.replace_all(stepped=True),
        lambda engine: engine.after_step(print),
    ],
    ids=["replicated", "publish", "rehearse_step", "restoring", "replace_all", "after_step"],
)
def test_what_needs_an_optimizer_says_so(use):
    model, _ = zs.shard(nn.Linear(4, 4), None, stage=2)
    with pytest.raises(zs.ZeroshardError, match="this model has no optimizer: expected one of its parameters, got none"):
        use(engine_of(model))


def test_the_loss_scale():
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        model, _ = zs.shard(seeded(Stack), None, stage=0, precision=precision, initial_loss_scale=8.0)
        engine = engine_of(model)
        progress = engine.progress
        found[precision] = progress.loss_scale, progress.scaler and progress.scaler.scale
        if progress.scaler is not None:
            progress.scaler.update(overflow=True)
            assert progress.loss_scale == 4.0, "the scaler is the model's own, and no copy"
    assert found == {"fp32": (1.0, None), "bf16": (1.0, None), "fp16": (8.0, 8.0)}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_parameters_that_no_rank_has_used(stage, frozen, held):
    """One that a single rank has used counts as used on all; frozen ones are not told; local sums are reduced first."""

    def run(rank, uses):
        net = seeded(Choice, frozen)
        model, _ = zs.shard(
            net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), stage=stage, units="leaf"
        )
        with zs.accumulate(model) if held else torch.enable_grad():
            model(torch.ones(2, 4), uses[rank]).sum().backward()
        return engine_of(model).unused_parameters()

    second = ["layers.1.weight", "layers.1.bias"]
    assert run_threads(2, run, [0, 0]) == [[] if frozen else second] * 2
    if not frozen:
        assert run_threads(2, run, [0, 1]) == [[], []]


def test_the_page_names_each_word_of_the_seam_and_each_method_of_an_engine_once():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "extend.md").read_text()
    words, _, methods = page.partition("| words | what they are |")[2].partition("| methods and properties of `Engine` |")
    for table, names in ((words, seam.__all__), (methods, [name for name in vars(seam.Engine) if not name.startswith("_")])):
        told = [word for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)]
        assert sorted(told) == sorted(names)


def test_what_has_no_engine():
    plain = nn.Linear(2, 2)
    with pytest.raises(zs.ZeroshardError, match="not sharded"):
        engine_of(plain)
    with pytest.raises(AttributeError, match="core"):
        engine_behind(torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        engine_of("model")


def test_an_optimizer_in_the_place_of_the_model_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = [
        lambda: zs.save(tmp_path, optimizer, model), lambda: zs.load(tmp_path, optimizer), lambda: zs.ema(optimizer),
        lambda: zs.save_safetensors(optimizer, tmp_path / "x.safetensors"), lambda: zs.join(optimizer).__enter__(),
        lambda: zs.stop_together(optimizer, []), lambda: zs.forecast(optimizer, lambda: None), lambda: zs.report(optimizer),
        lambda: zs.full_state_dict(optimizer), lambda: zs.accumulate(optimizer).__enter__(),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module that was given to zs\.shard\(\), got "):
            call()
