"""zs.parallelize with a loss of the user's own and inputs that are not tokens: steps and evaluations equal one process.

A world of two processes goes through all cells, as a pipeline and as data-parallel ranks; each test looks at what a cell found.
"""

from __future__ import annotations

import functools
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.planner.models import GPT, GPTConfig

STEPS, ROWS, MICRO = 3, 8, 2
adam = functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3)


class Regression(nn.Module):
    """Numbers -> numbers, with statistics that a forward writes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Pictures(nn.Module):
    """Pictures -> numbers: what comes before the blocks changes all dimensions but the first, and is asked for its dtype."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.register_buffer("positions", torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, x):
        x = self.patches(x.to(self.patches[0].weight.dtype)).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def language() -> nn.Module:
    return GPT(GPTConfig(vocab_size=16, seq_len=6, dim=8, layers=4, heads=2))


MODELS = {"regression": Regression, "pictures": Pictures, "language": language}
CELLS = [
    *(("regression", "pp", stage) for stage in range(4)),
    *(("pictures", axis, stage) for axis in ("pp", "dp") for stage in range(4)),
    *(("language", axis, 1) for axis in ("pp", "dp")),
]


def batch(kind: str, step: int, place: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(10 * step + place)
    if kind == "language":
        tokens = torch.randint(0, 16, (ROWS, 7), generator=made)
        return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.rand(ROWS, 6, generator=made) < 0.2, -100)
    shape = (ROWS, 5) if kind == "regression" else (ROWS, 3, 8, 8)
    return torch.randn(shape, generator=made), torch.randn(ROWS, 3, generator=made)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@functools.cache
def one_process(kind: str, places: int) -> tuple[list[list[float]], list[float]]:
    """(loss of each place in each step, what each place's next batch scores): of what parallelize is to return."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer, losses = adam(model.parameters()), []
    loss = cross_entropy if kind == "language" else F.mse_loss
    for step in range(STEPS):
        row = []
        for place in range(places):
            parts = [x.chunk(MICRO) for x in batch(kind, step, place)]
            values = [loss(model(x), y) / MICRO for x, y in zip(*parts, strict=True)]
            sum(values).div(places).backward()
            row.append(sum(values).item())
        losses.append(row)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    scores = []
    with torch.no_grad():
        for place in range(places):
            x, y = batch(kind, STEPS, place)
            scored = cross_entropy(model(x), y, "sum") if kind == "language" else F.mse_loss(model(x), y)
            scores.append(scored.item())
    return losses, scores


def run_cell(mesh, kind: str, axis: str, stage: int) -> tuple[list[float], float]:
    place = mesh["dp"].get_local_rank()
    options = {} if kind == "language" else {"loss": F.mse_loss, "example": torch.zeros_like(batch(kind, 0, 0)[0][:2])}
    run = zs.parallelize(seeded(MODELS[kind]), mesh, optimizer=adam, micro_batches=MICRO, stage=stage, **options)
    losses = [run.step(*batch(kind, step, place)).item() for step in range(STEPS)]
    for part in run.models:
        part.eval()
    score = run.evaluate(*batch(kind, STEPS, place)).item()
    run.close()
    return losses, score


def _all(rank: int, ranks: int) -> tuple[int, dict]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = {"pp": (2, 1), "dp": (1, 2)}
    meshes = {axis: init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")) for axis, shape in meshes.items()}
    found: dict = {}
    for kind, axis, stage in CELLS:
        try:
            found[kind, axis, stage] = run_cell(meshes[axis], kind, axis, stage)
        except Exception:
            found[kind, axis, stage] = traceback.format_exc()
            break
    return rank, found


@functools.cache
def results() -> list:
    return run_processes(_all, 2, check=False)


@pytest.mark.processes
@pytest.mark.parametrize("kind, axis, stage", CELLS)
def test_steps_and_evaluations_use_the_loss_that_was_given(kind, axis, stage):
    losses, scores = one_process(kind, 2 if axis == "dp" else 1)
    for result in results():
        assert result.value is not None, result.error
        rank, found = result.value
        found = found.get((kind, axis, stage), "another cell failed before")
        assert not isinstance(found, str), found
        place = rank if axis == "dp" else 0
        assert found[0] == pytest.approx([row[place] for row in losses], rel=1e-5)
        assert found[1] == pytest.approx(scores[place], rel=1e-5)
