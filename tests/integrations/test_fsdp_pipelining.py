"""Stages of torch.distributed.pipelining under fully_shard, two data-parallel ranks each: the losses and norms of FSDP2."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import DTensor

from zeroshard import ConfigError, fsdp
from zeroshard.comm.launch import run_processes

# those of one stage a rank, of two, of two whose first and last are on one rank; the last two split backwards
SCHEDULES = ("1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
CASES = [(name, True) for name in SCHEDULES] + [("InterleavedZeroBubble", False)]


class Stage(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, 7), nn.GELU(), nn.Linear(7, dim)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def _train(door, schedule: str, reshards: bool) -> list[tuple[float, float]]:
    """Train three steps; return the loss and the norm of each, of this rank's last stage."""
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, each = mesh["pp"].get_local_rank(), 1 if schedule == "1F1B" else 2
    everything = [Stage() for _ in range(2 * each)]
    mine = [place, 3 - place] if schedule.startswith("ZBV") else list(range(place, 2 * each, 2))
    models = [everything[number] for number in mine]
    for model in models:
        for part in (*model.blocks, model):
            door.fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshards)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    stages = [
        PipelineStage(model, number, 2 * each, torch.device("cpu"), group=mesh["pp"].get_group())
        for model, number in zip(models, mine, strict=True)
    ]
    run = getattr(torch_schedules, f"Schedule{schedule}")(stages if each > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
    draw = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    found = []
    for _ in range(3):
        inputs, target = torch.randn(8, 6, generator=draw), torch.randn(8, 6, generator=draw)
        losses: list[torch.Tensor] = []
        last = 2 * each - 1 in mine
        run.step(*([inputs] if place == 0 else []), **({"target": target, "losses": losses} if last else {}))
        for model, optimizer in zip(models, optimizers, strict=True):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            total = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            optimizer.zero_grad()
        found.append((float(sum(losses)), total))
    return found


def _both(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # FSDP2 loses the gradients of split backwards whose parameters were released
    return {case: (_train(torch_fsdp, case[0], False), _train(fsdp, *case)) for case in CASES} | {"draws": _draw(rank)}


def _draw(rank: int) -> list[torch.Tensor]:
    """Initialise stages of which the second has a layer more, under a mesh that has an axis for them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + mesh["pp"].get_local_rank())))
    fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(shard="dp"))
    torch.manual_seed(rank)
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    return [param.detach().full_tensor() for param in model.parameters()]


@pytest.fixture(scope="module")
def both():
    return run_processes(_both, 4)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {'reshards' if case[1] else 'keeps'}")
def test_losses_and_norms_of_pipelines(both, case):
    for of_rank in both:
        expected, found = of_rank[case]
        for wanted, got in zip(expected, found, strict=True):
            assert got == pytest.approx(wanted, rel=1e-6)
            assert got[1] > 0


@pytest.mark.processes
def test_ranks_of_a_stage_draw_alike(both):
    """Stages draw other numbers of parameters, each from its first rank's generator."""
    for rank, of_rank in enumerate(both):
        torch.manual_seed(rank - rank % 2)
        drawn = [param for _ in range(1 + rank // 2) for param in nn.Linear(4, 4).parameters()]
        assert len(of_rank["draws"]) == len(drawn) and all(map(torch.equal, of_rank["draws"], drawn))


def test_the_inner_state_is_refused():
    model = fsdp.fully_shard(Stage())
    with pytest.raises(ConfigError, match=r"import it before the calls of fully_shard"):
        fsdp.fully_shard.state(model)
