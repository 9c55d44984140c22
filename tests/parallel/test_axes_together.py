"""zs.parallelize over meshes with sp or ep beside tp and pp: losses, parameters and checkpoints are those of one process.

A world of processes goes through all cells of its size; each test looks at what a cell found.
"""

import copy
import functools
import math
import os
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sample import asked
from sequence_kit import adam, batches, model_of
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes

pytestmark = pytest.mark.processes
STEPS, ROWS, TOKENS = 3, 4, 16  # ROWS of a place along dp and ep
NAMES = ("pp", "dp", "ep", "sp", "tp")
optimizer = functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-6)
PADDED = torch.ones(ROWS, TOKENS, dtype=torch.long)
PADDED[1, :6] = PADDED[3, :3] = 0
PACKED = torch.cat([torch.arange(5), torch.arange(9), torch.arange(2)]).repeat(ROWS, 1)


@dataclass(frozen=True)
class Cell:
    """axes: sizes of the mesh. data: what batches have beside ids and labels. options: of zs.parallelize."""

    model: str
    axes: dict = field(hash=False)
    stage: int
    micro: int = 2
    data: dict = field(default_factory=dict, hash=False)
    checkpointed: bool = False
    heads: int = 4  # with 6, ranks along tp have 3, which 2 along sp can not share: they gather keys and values
    prompts: int = 0  # so many first tokens have no labels: with 10, none of the first rank along sp has one
    options: dict = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        mesh = "".join(f"{name}{size}" for name, size in self.axes.items())
        return "-".join(
            [
                self.model,
                mesh,
                f"stage{self.stage}",
                *self.data,
                *[f"heads{self.heads}"] * (self.heads != 4),
                *[f"prompts{self.prompts}"] * bool(self.prompts),
                *(str(each) for each in self.options.values() if not callable(each)),
            ]
        )

    @property
    def layers(self) -> int:
        return 4 if "schedule" in self.options else 2

    @property
    def precision(self) -> str:
        return self.options.get("precision", "fp32")

    @property
    def world(self) -> int:
        return math.prod(self.axes.values())

    @property
    def places(self) -> int:
        return self.axes.get("dp", 1) * self.axes.get("ep", 1)


def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of a program's own: not a number where a rank has no target."""
    return F.cross_entropy(output.float().flatten(0, 1), targets.flatten())


BUBBLE = {"schedule": "InterleavedZeroBubble"}
CELLS = [
    Cell("llama", {"sp": 2, "tp": 2}, 3, data={"position_ids": PACKED}, checkpointed=True),
    Cell("qwen3", {"sp": 2, "tp": 2}, 1, options={"sequence_parallel": True}),
    Cell("gpt2", {"sp": 2, "tp": 2}, 2, prompts=10, options={"loss": mean}),
    Cell("gpt2", {"sp": 2, "tp": 2}, 3, heads=6),
    Cell("llama", {"sp": 2, "tp": 2}, 1, data={"position_ids": PACKED}, heads=6),
    Cell("mixtral", {"sp": 2, "tp": 2}, 0, micro=1),
    Cell("llama", {"pp": 2, "sp": 2}, 1, prompts=5, checkpointed=True),
    Cell("eager", {"pp": 2, "sp": 2}, 2, data={"attention_mask": PADDED}),
    Cell("qwen3", {"pp": 2, "sp": 2}, 3, data={"position_ids": PACKED}),
    Cell("gpt2", {"pp": 2, "sp": 2}, 0, micro=4, options={"schedule": "Interleaved1F1B"}),
    Cell("mixtral", {"pp": 2, "sp": 2}, 3, data={"attention_mask": PADDED}),
    Cell("mixtral", {"pp": 2, "dp": 2}, 1, micro=4, options=BUBBLE),
    Cell("qwen3moe", {"pp": 2, "ep": 2}, 2),
    Cell("mixtral", {"pp": 2, "tp": 2}, 2),
    Cell("mixtral", {"ep": 2, "sp": 2}, 3, data={"attention_mask": PADDED}),
    Cell("llama", {"pp": 2, "dp": 2, "sp": 2}, 2),
    Cell("mixtral", {"pp": 2, "ep": 2, "sp": 2}, 1, options={"precision": "bf16"}),
]
if os.environ.get("ZEROSHARD_SLOW") == "1":
    CELLS += [
        Cell("mixtral", {"pp": 2, "sp": 2}, 1, micro=4, options=BUBBLE),
        Cell("mixtral", {"pp": 2, "ep": 2}, 1, micro=4, options={"schedule": "ZBVZeroBubble"}),
        Cell("mixtral", {"dp": 2, "tp": 2}, 3),
        Cell("mixtral", {"ep": 2, "tp": 2}, 2),
        Cell("gpt2", {"pp": 2, "sp": 2, "tp": 2}, 1),
        Cell("mixtral", {"pp": 2, "ep": 2, "sp": 2}, 1),
    ]


def made(kind: str, layers: int, heads: int) -> torch.nn.Module:
    model = copy.deepcopy(model_of(kind, heads, vocab_size=64, num_hidden_layers=layers))
    if kind in ("mixtral", "qwen3moe"):  # routers that choose experts unevenly, so that their loss is far from its least value
        model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(30 if name.endswith("gate.weight") else 1)
    return model


def data_of(cell: Cell) -> list[dict]:
    """Of each step, the rows of all places along dp and ep."""
    more = {name: value.repeat(cell.places, 1) for name, value in cell.data.items()}
    found = batches(rows=ROWS * cell.places, tokens=TOKENS, steps=STEPS, **more)
    for batch in found if cell.prompts else ():
        batch["labels"][:, : cell.prompts] = -100
        batch["labels"][::2, 10:13] = -100
    return found


def micro_batches(cell: Cell, whole: dict) -> list[list[dict]]:
    """Of each micro-batch, the parts of which one process takes the mean of the losses."""
    places = [{name: value.chunk(cell.places)[place] for name, value in whole.items()} for place in range(cell.places)]
    parts = [
        [{name: value.chunk(cell.micro)[number] for name, value in place.items()} for place in places]
        for number in range(cell.micro)
    ]
    if "ep" in cell.axes or "sp" in cell.axes:  # whose ranks share a router's loss
        parts = [[{name: torch.cat([place[name] for place in part]) for name in part[0]}] for part in parts]
    return parts


def one_process(cell: Cell, folder: Path) -> tuple[list[float], dict, float]:
    """(losses, weights, summed cross-entropy of the last batch); a checkpoint after one step."""
    model = made(cell.model, cell.layers, cell.heads)
    model, stepper = zs.shard(model, adam(model), stage=0, precision=cell.precision)
    losses = []
    for step, whole in enumerate(data_of(cell)):
        total = 0.0
        for parts in micro_batches(cell, whole):
            loss = sum(model(**part, use_cache=False).loss for part in parts) / len(parts) / cell.micro
            loss.backward()
            total += loss.item()
        stepper.step()
        stepper.zero_grad()
        losses.append(total)
        if step == 0:
            zs.save(folder / cell.name / "one", model, stepper)
    with torch.no_grad():
        logits = model(**{name: value for name, value in whole.items() if name != "labels"}, use_cache=False).logits
    score = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), whole["labels"][:, 1:].flatten(), reduction="sum")
    score /= (whole["labels"][:, 1:] != -100).sum() if "loss" in cell.options else 1
    return losses, zs.full_state_dict(model, masters=True), score.item()


def run_cell(cell: Cell, folder: Path, rank: int) -> tuple:
    """(losses, weights, score). After its first step it goes on from the checkpoint of one process."""
    axes = {name: cell.axes[name] for name in NAMES if name in cell.axes}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    place = 0
    for name in ("dp", "ep"):
        place = place * axes.get(name, 1) + (mesh[name].get_local_rank() if name in axes else 0)
    run = zs.parallelize(
        made(cell.model, cell.layers, cell.heads),
        mesh,
        optimizer=optimizer,
        micro_batches=cell.micro,
        stage=cell.stage,
        **cell.options,
    )
    one_stage = len(run.models) == 1
    if cell.checkpointed:
        zs.checkpoint_activations(run.model, blocks=("LlamaDecoderLayer",))
    losses = []
    for step, whole in enumerate(data_of(cell)):
        own = {name: value.chunk(cell.places)[place] for name, value in whole.items()}
        labels = own.pop("labels")
        targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        tokens = own.pop("input_ids")
        everyone = of_all_ranks(run.step(tokens, targets, **own))
        losses.append(everyone.mean().item())
        if step == 0 and one_stage:
            zs.load(folder / cell.name / "one", run.model, run.optimizer)
    if one_stage:
        zs.save(folder / cell.name / "mesh", run.model, run.optimizer)
    assert len(everyone.unique()) == cell.places, "the loss is the same along pp, sp and tp"
    score = of_all_ranks(run.evaluate(tokens, targets, **own)).mean().item() * cell.places
    if "sp" in axes:
        assert "sp: " in run.report()
    weights = {name: value for part in run.models for name, value in zs.full_state_dict(part, masters=True).items()}
    run.close()
    return losses, weights, score


def of_all_ranks(value: torch.Tensor) -> torch.Tensor:
    found = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return torch.stack(found).double()


def _on_ranks(rank: int, ranks: int, cells: list[Cell], folder: Path) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict = {}
    for cell in cells:
        try:
            found[cell.name] = run_cell(cell, folder, rank)
        except Exception:
            found[cell.name] = traceback.format_exc()
            break  # ranks may stand in different places now
    if ranks == 4 and len(found) == len(cells):
        found["refused"] = refused(rank)
    return found


def refused(rank: int) -> str:
    """A batch that can not be cut, and one that differs along sp; the run goes on."""
    run = zs.parallelize(made("llama", 2, 4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp")), micro_batches=2)
    odd, same = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(zs.ConfigError, match=r"targets \(2, 15\): expected whole sequences .* that the 2 ranks along sp divide"):
        run.backward(odd, odd)
    with pytest.raises(zs.ConfigError, match="sp: ranks along it have different inputs"):
        run.backward(same + rank % 2, same)
    with pytest.raises(zs.ConfigError, match=r"attention_mask: expected shape \(2, 16\) \(batch, tokens\), got \(3, 16\)"):
        run.backward(same, same, attention_mask=torch.ones(3, 16, dtype=torch.long))
    run.backward(same, same)
    run.close()
    return "refused"


@pytest.fixture(scope="module")
def results(request):
    """world -> (folder, what one process has, what each rank has) of all cells of that world that run."""
    asked_for = asked(request, "cell")

    @functools.cache
    def of_world(world: int) -> tuple[Path, dict, list]:
        folder = Path(tempfile.mkdtemp(prefix="axes-"))
        cells = [cell for cell in asked_for if cell.world == world]
        expected = {cell.name: one_process(cell, folder) for cell in cells}
        return folder, expected, run_processes(_on_ranks, world, cells, folder, timeout_s=400)

    return of_world


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equal_to_one_process(results, cell):
    folder, expected, everyone = results(cell.world)
    losses, weights, score = expected[cell.name]
    union: dict = {}
    near, apart = (1e-6, 1e-5) if cell.precision == "fp32" else (2e-2, 6e-3)
    for found in everyone:
        assert cell.name in found, f"another cell failed before: {list(found)[-1]}"
        assert isinstance(found[cell.name], tuple), found[cell.name]
        assert found[cell.name][0] == pytest.approx(losses, rel=near)
        assert found[cell.name][2] == pytest.approx(score, rel=near)
        union |= found[cell.name][1]
    for name, value in weights.items():
        torch.testing.assert_close(union[name], value, rtol=0, atol=apart, msg=lambda text, name=name: f"{name}: {text}")
    if (folder / cell.name / "mesh").exists():
        model = made(cell.model, cell.layers, cell.heads)
        model, stepper = zs.shard(model, adam(model), stage=1, precision=cell.precision)
        zs.load(folder / cell.name / "mesh", model, stepper)
        for name, value in zs.full_state_dict(model, masters=True).items():
            assert torch.equal(value, union[name]), name


def test_batches_that_can_not_be_cut_are_refused_on_every_rank(results):
    _, _, everyone = results(4)
    assert [found["refused"] for found in everyone] == ["refused"] * 4
