"""zs.parallelize: tensor, pipeline and data parallelism beside each other, equal to one process.

A world of processes goes through all cells of its size; each test looks at what a cell found. The suite has some cells on four ranks;
ZEROSHARD_SLOW=1 has all of them, and those of pp 2 x dp 2 x tp 2 on eight.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
import traceback
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from helpers import seeding
from sample import asked
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.ledger import PARTIAL
from zeroshard.engine.runtime import runtime_of
from zeroshard.planner.models import GPT, GPTConfig

SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
STEPS, TOKENS, ROWS, SEQ = 6 if SLOW else 3, 64, 4, 8
adam = functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3)  # a small eps would magnify the rounding of tiny gradients


def gpt(tied: bool = True, alibi: bool = False) -> nn.Module:
    options = {"positions": "alibi", "embedding_norm": True, "bias": True} if alibi else {}
    with seeding(0):
        return GPT(GPTConfig(vocab_size=TOKENS, seq_len=16, dim=16, layers=4, heads=4, tied=tied, **options))


def of_transformers(kind: str) -> nn.Module:
    import transformers

    options = {"num_local_experts": 4} if kind == "Mixtral" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        use_cache=False, attn_implementation="eager", tie_word_embeddings=False, **options,
    )  # fmt: skip
    with seeding(0):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


MODELS = {
    "gpt": gpt,
    "bloom": functools.partial(gpt, alibi=True),
    "llama": functools.partial(of_transformers, "Llama"),
    "mixtral": functools.partial(of_transformers, "Mixtral"),
}


@dataclass(frozen=True)
class Cell:
    """pp, dp, tp: sizes of the axes."""

    model: str
    pp: int
    dp: int
    tp: int
    stage: int
    micro: int = 2
    clip: float | None = None
    sequence: bool = False
    bf16: bool = False
    schedule: str | None = None
    disk: bool = False  # states and gradients rest there: each micro-batch reduces, and none is held on the device

    @property
    def name(self) -> str:
        more = [
            f"clip{self.clip}" if self.clip else "",
            "sequence" if self.sequence else "",
            "bf16" if self.bf16 else "",
            self.schedule or "",
            "disk" if self.disk else "",
        ]
        return "-".join(
            filter(None, [self.model, f"pp{self.pp}dp{self.dp}tp{self.tp}", f"stage{self.stage}", f"micro{self.micro}", *more])
        )


FEW = [
    Cell("gpt", 2, 1, 2, 1, clip=0.1),
    Cell("gpt", 2, 2, 1, 1, micro=4, clip=0.1, schedule="Interleaved1F1B"),
    Cell("bloom", 2, 1, 2, 2, sequence=True, bf16=True),
    Cell("llama", 1, 2, 2, 3, clip=0.1, sequence=True),
    Cell("gpt", 1, 2, 2, 2, micro=4, clip=0.1, disk=True),
    Cell("mixtral", 2, 1, 2, 0, micro=4, clip=0.1, schedule="GPipe"),
]


def every(world: int) -> list[Cell]:
    """All sizes of the axes that make this world, stages, models, accumulation, clipping, precisions."""
    found = []
    for pp, dp, tp in itertools.product((1, 2), repeat=3):
        if pp * dp * tp == world:
            for model, stage, (micro, clip), bf16 in itertools.product(
                MODELS, range(3 if pp > 1 else 4), ((2, None), (4, 0.1)), (False, True)
            ):
                found.append(Cell(model, pp, dp, tp, stage, micro, clip, sequence=tp > 1 and stage == 1, bf16=bf16))
    return found


def batch(step: int, place: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + place)
    tokens = torch.randint(0, TOKENS, (ROWS, SEQ + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(output: object, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@functools.cache
def one_process(
    model: str, dp: int, micro: int, clip: float | None, bf16: bool
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, norms, weights); with bf16 by zeroshard on one rank, whose masters step."""
    module = MODELS[model]()
    optimizer = adam(module.parameters())
    if bf16:
        from zeroshard.testing import run_threads

        return run_threads(1, lambda rank: _alone(module, optimizer, dp, micro, clip))[0]

    def take_step() -> float:
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), clip or math.inf).item()
        optimizer.step()
        return norm

    losses, norms = _trained(module, optimizer, dp, micro, take_step)
    return losses, norms, {name: value.clone() for name, value in module.state_dict().items()}


def _alone(module, optimizer, dp, micro, clip):
    module, optimizer = zs.shard(module, optimizer, stage=0, precision="bf16", max_grad_norm=clip)

    def take_step() -> float:
        optimizer.step()
        return optimizer.last_step.grad_norm

    return *_trained(module, optimizer, dp, micro, take_step), zs.full_state_dict(module, masters=True)


def _trained(module, optimizer, dp, micro, take_step) -> tuple[list[float], list[float]]:
    """The losses and norms of all steps. take_step() -> norm before clipping."""
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for place in range(dp):
            for x, y in zip(*(part.chunk(micro) for part in batch(step, place)), strict=True):
                loss = loss_of(module(x), y) / micro / dp
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(take_step())
        optimizer.zero_grad()
    return losses, norms


def run_cell(cell: Cell, mesh) -> None:
    losses, norms, weights = one_process(cell.model, cell.dp, cell.micro, cell.clip, cell.bf16)
    options: dict[str, object] = {"schedule": cell.schedule} if cell.schedule else {}
    if cell.disk:
        options |= {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_path": tempfile.mkdtemp(prefix="states-")}
    run = zs.parallelize(
        MODELS[cell.model](), mesh, optimizer=adam, micro_batches=cell.micro, stage=cell.stage, max_grad_norm=cell.clip,
        sequence_parallel=cell.sequence, precision="bf16" if cell.bf16 else "fp32", **options,
    )  # fmt: skip
    mine, found = [], []
    for step in range(STEPS):
        loss = run.step(*batch(step, mesh["dp"].get_local_rank())).clone()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        mine.append(loss.item() / cell.dp)
        found.append(run.optimizer.last_step.grad_norm)
    near = {"rel": 3e-2, "abs": 2e-2} if cell.bf16 else {"rel": 1e-5, "abs": 1e-5}
    assert mine == pytest.approx(losses, **near)
    if len(run.models) == 1:
        assert found == pytest.approx(norms, **near if cell.bf16 else {"rel": 1e-4})
    for part in run.models:
        for name, value in zs.full_state_dict(part, masters=True).items():
            if name in weights:
                apart = (value - weights[name]).abs().max().item()
                assert apart < (3e-2 if cell.bf16 else 2e-5), (name, apart)
    scored = run.evaluate(*batch(STEPS, 0))
    assert scored.item() > 0 and math.isfinite(scored.item())
    text = run.report()
    assert all((f"{axis}: " in text) == (size > 1) for axis, size in (("tp", cell.tp),)), text
    if cell.disk:
        assert PARTIAL not in runtime_of(run.model).tiers.ledger.peak
    run.close()


def _world(rank: int, ranks: int, cells: list[Cell]) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, str] = {}
    meshes: dict[tuple, object] = {}
    for cell in cells:
        shape = (cell.pp, cell.dp, cell.tp)
        if shape not in meshes:
            meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        try:
            run_cell(cell, meshes[shape])
            found[cell.name] = ""
        except Exception:
            found[cell.name] = traceback.format_exc()
            break  # ranks may stand in different places now
    return found


CELLS = [*every(2), *every(4), *every(8)] if SLOW else FEW


def world_of(cell: Cell) -> int:
    return cell.pp * cell.dp * cell.tp


@pytest.fixture(scope="module")
def results(request):
    """world -> what each of its ranks found, of all cells of that world that run."""
    cells = asked(request, "cell")

    @functools.cache
    def of_world(world: int) -> list:
        return run_processes(_world, world, [cell for cell in cells if world_of(cell) == world], check=False)

    return of_world


@pytest.mark.processes
@pytest.mark.limit(3000 if SLOW else 240)  # the first runs all cells
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equal_to_one_process(results, cell):
    for result in results(world_of(cell)):
        assert result.value is not None, result.error
        assert cell.name in result.value, f"another cell failed before: {list(result.value)[-1]}"
        assert not result.value[cell.name], result.value[cell.name]
