"""A pipeline of which a rank trains nothing, with an optimizer made by a lambda; and one whose lambda raises on a rank.

A world of two processes goes through all cells; each test looks at what a cell found.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import traceback
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.parallel.parallelize import _optimizer

STEPS, ROWS, MICRO = 3, 8, 4
FROZEN = {
    "first": ("first", "blocks.0", "blocks.1"),
    "last": ("blocks.2", "blocks.3", "last"),
    "middle": ("blocks.1", "blocks.2"),
}
CELLS = [
    *(("first", stage, schedule) for stage in range(4) for schedule in ("1F1B", "GPipe")),
    *(("last", stage, "1F1B") for stage in range(4)),
    ("middle", 1, "Interleaved1F1B"), ("first", 2, "Interleaved1F1B"), ("last", 1, "InterleavedZeroBubble"),
]  # fmt: skip


class Net(nn.Module):
    """Numbers -> numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def model(frozen: str) -> nn.Module:
    net = seeded(Net)
    for name in FROZEN[frozen]:
        net.get_submodule(name).requires_grad_(False)
    return net


def trained(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=0.01, eps=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, generator=made), torch.randn(ROWS, 3, generator=made)


@functools.cache
def one_process(frozen: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, rates, parameters); the norm is clipped, the rate is scheduled."""
    net = model(frozen)
    optimizer = trained(net.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS + 1)
    losses, rates = [], []
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates, {name: value.detach() for name, value in net.named_parameters()}


def run_cell(mesh, frozen: str, stage: int, schedule: str) -> tuple[list[float], list[float], dict[str, Tensor], list[str]]:
    options = {"stage": stage, "max_grad_norm": 0.1, "loss": F.mse_loss, "example": torch.zeros(2, 5), "schedule": schedule}
    run = zs.parallelize(model(frozen), mesh, optimizer=trained, micro_batches=MICRO, **options)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.02, STEPS + 1) for each in run.optimizers]
    losses, rates = [], []
    for step in range(STEPS):
        losses.append(run.step(*batch(step)).item())
        for each in schedulers:
            each.step()
        rates.append(run.optimizer.param_groups[0]["lr"])
    values = {name: value for part in run.models for name, value in zs.full_state_dict(part).items()}
    classes = [type(each).__mro__[1].__name__ for each in run.optimizers]
    run.close()
    return losses, rates, values, classes


def run_by_hand(mesh, given: bool) -> list[float] | str:
    """Stages sharded one by one; given: the frozen one has an optimizer, of its frozen parameters."""
    own = zs.stages_of(mesh["pp"].get_local_rank(), 2, 1)
    (stage,) = zs.cut_stages(model("first"), 2, own, example=torch.zeros(2, 5))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01, eps=1e-3) if given or own == [1] else None
    stage, optimizer = zs.shard(stage, optimizer, mesh=mesh, stage=1, max_grad_norm=0.1)
    try:
        pipeline = zs.Pipeline(stage, mesh["pp"], micro_batches=MICRO, loss=F.mse_loss)
    except zs.ConfigError as error:
        return str(error)
    scheduler, losses = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, STEPS + 1), []
    for step in range(STEPS):
        x, y = batch(step)
        losses.append(pipeline.step(x, target=y).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def fails_on_a_rank(mesh, rank: int) -> str:
    """What each rank hears where one rank's optimizer can not be made."""

    def make(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([] if rank == mesh.get_rank() else params)

    with pytest.raises(zs.ConfigError) as caught:
        zs.parallelize(model("middle"), mesh, optimizer=make, micro_batches=MICRO, loss=F.mse_loss, example=torch.zeros(2, 5))
    return str(caught.value)


def resumed(mesh) -> bool:
    """A checkpoint of a pipeline with a frozen stage comes back."""
    make = functools.partial(zs.parallelize, optimizer=trained, micro_batches=MICRO, loss=F.mse_loss, example=torch.zeros(2, 5))
    run = make(model("first"), mesh)
    run.step(*batch(0))
    told = [tempfile.mkdtemp()]
    dist.broadcast_object_list(told)
    zs.save(told[0], run.model, run.optimizer)
    wanted = [run.step(*batch(step)).item() for step in (1, 2)]
    again = make(model("first"), mesh)
    zs.load(told[0], again.model, again.optimizer)
    found = [again.step(*batch(step)).item() for step in (1, 2)]
    dist.barrier()
    if mesh.get_rank() == 0:
        shutil.rmtree(told[0])
    return found == wanted


def _all(rank: int, ranks: int) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    found: dict = {
        "without": run_by_hand(mesh, False), "with": run_by_hand(mesh, True), "raises": [fails_on_a_rank(mesh, r) for r in range(2)],
        "data parallel": fails_on_a_rank(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), 1), "resumed": resumed(mesh),
    }  # fmt: skip
    for cell in CELLS:
        try:
            found[cell] = run_cell(mesh, *cell)
        except Exception:
            found[cell] = traceback.format_exc()
            break
    return found


@functools.cache
def results() -> list:
    return run_processes(_all, 2, check=False)


@pytest.mark.processes
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_that_trains_nothing_takes_part(cell):
    losses, rates, wanted = one_process(cell[0])
    seen = {}
    for result in results():
        assert result.value is not None, result.error
        found = result.value.get(cell, "another cell failed before")
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(rates, rel=1e-6)
        seen |= found[2]
    assert set(seen) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.processes
def test_stages_that_are_sharded_one_by_one():
    """A rank without an optimizer would not come to the step of the others: refused, and what the refusal says trains."""
    losses = one_process("first")[0]
    for result in results():
        assert result.value is not None, result.error
        sentence = (
            r"stages of rank 0 .* without an optimizer, others with one.*also where all is frozen: AdamW\(stage.parameters\(\)\)"
        )
        assert re.search(sentence, result.value["without"])
        assert result.value["with"] == pytest.approx(losses, rel=1e-5)


@pytest.mark.processes
def test_an_optimizer_that_can_not_be_made_is_named_on_every_rank():
    for result in results():
        assert result.value is not None, result.error
        for rank, text in enumerate(result.value["raises"]):
            assert f"on rank {rank} (1 of 2 ranks) the function raised ValueError: optimizer got an empty parameter list" in text
        assert "on rank 1 (1 of 2 ranks) the function raised ValueError" in result.value["data parallel"]


@pytest.mark.processes
def test_a_checkpoint_with_a_frozen_stage_comes_back():
    for result in results():
        assert result.value is not None, result.error
        assert result.value["resumed"]


def test_the_stand_in_goes_where_the_function_puts_it():
    """By dimensions, in groups with options of their own, and states that are made at once are not kept."""
    module = nn.Linear(3, 2).requires_grad_(False)
    groups = lambda params: [  # noqa: E731
        {"params": [], "lr": 0.5}, {"params": [param for param in params if param.ndim > 1], "lr": 0.25},
    ]  # fmt: skip
    made = _optimizer(lambda params: torch.optim.Adagrad(groups(list(params))), module)
    assert [len(group["params"]) for group in made.param_groups] == [0, 2] and made.param_groups[1]["lr"] == 0.25
    assert (
        all(given is own for given, own in zip(made.param_groups[1]["params"], module.parameters(), strict=True))
        and not made.state
    )
