"""Experts divided over an axis "ep" equal one process on the union of the ranks' batches.

A world of four processes goes through all cells; each test looks at what a cell found. What needs no process group has threads.
"""

import functools
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import seeding
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes

WORLD, STEPS, TOKENS, ROWS, SEQ = 4, 6, 64, 2, 8
adam = functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3)  # a small eps would magnify the rounding of tiny gradients
COMMON = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4},
    "DeepseekV3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 4, "layer_types": ["full_attention"] * 2},
}  # fmt: skip


def make(family, **options):
    import transformers

    with seeding(0):
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **options})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for param in model.parameters():  # routers that choose experts unevenly, biases that are not 0
                param.add_(torch.randn_like(param) * 0.1)
    return model


@dataclass(frozen=True)
class Cell:
    """axes: sizes of dp and ep. made: options of the model. options: of zs.shard."""

    family: str
    axes: tuple[int, int]
    stage: int
    micro: int = 1
    checkpointed: bool = False
    made: dict = field(default_factory=dict, hash=False)
    options: dict = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        more = ["micro"] * (self.micro > 1) + ["checkpointed"] * self.checkpointed + [*self.made, *self.options]
        return "-".join([self.family, "dp{}ep{}".format(*self.axes), f"stage{self.stage}", *more])


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
CELLS = [
    *(Cell("Mixtral", (2, 2), stage, micro=2, made=BALANCED) for stage in range(4)),
    Cell("Mixtral", (2, 2), 3, checkpointed=True, options={"max_grad_norm": 0.1}),
    Cell("Mixtral", (1, 4), 2, options={"offload_optimizer": "cpu", "offload_param": "cpu"} | {"stage": 3}),
    Cell("Qwen3Moe", (1, 4), 1, made=BALANCED),
    Cell("DeepseekV3", (2, 2), 2),
    Cell("GptOss", (1, 4), 3, made=BALANCED),
    Cell("GptOss", (2, 2), 0, checkpointed=True),
]


def micro_batches(step, micro):
    """The union of all ranks' micro-batches: of each, the rows of rank 0 come first."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, TOKENS, (micro, WORLD * ROWS, SEQ), generator=generator)


@functools.cache
def one_process(family, micro, clip, made):
    """(losses, norms, weights) of one process on the union of the batches."""
    model = make(family, **dict(made))
    optimizer, losses, norms = adam(model.parameters()), [], []
    for step in range(STEPS):
        total = 0.0
        for tokens in micro_batches(step, micro):
            loss = model(tokens, labels=tokens).loss / micro
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def sharded(mesh, family, made=None, model=None, **options):
    model = make(family, **(made or {})) if model is None else model
    if mesh is not None and "ep" in mesh.mesh_dim_names:
        zs.divide_experts(model, mesh["ep"])
    return zs.shard(model, adam(model.parameters()), mesh=mesh, **options)


def train(model, optimizer, rank, cell, steps=range(STEPS)):
    losses, norms = [], []
    for step in steps:
        total = torch.zeros(())
        for number, tokens in enumerate(micro_batches(step, cell.micro)):
            mine = tokens.chunk(WORLD)[rank]
            with zs.accumulate(model) if number + 1 < cell.micro else functools.partial(torch.enable_grad)():
                loss = model(mine, labels=mine).loss / cell.micro
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
        norms.append(optimizer.last_step.grad_norm)
    return losses, norms


def run_cell(cell, mesh, rank):
    model, optimizer = sharded(mesh, cell.family, cell.made, **{"stage": cell.stage} | cell.options)
    if cell.checkpointed:
        zs.checkpoint_activations(model)
    losses, norms = train(model, optimizer, rank, cell)
    expected = one_process(cell.family, cell.micro, cell.options.get("max_grad_norm"), tuple(cell.made.items()))
    assert losses == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    for name, value in zs.full_state_dict(model).items():
        assert torch.allclose(value, expected[2][name], rtol=0, atol=1e-5), name
    zs.close(model)


def whole(model):
    """Everything that training goes on with."""
    states = {f"{n}.{k}": torch.as_tensor(v) for n, e in zs.full_optimizer_state(model).items() for k, v in e.items()}
    return {**zs.full_state_dict(model, masters=True), **states}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def checkpoints(rank, meshes, folder, stage, options):
    """What dp 2 x ep 2 saves loads at dp 1 x ep 4 and at dp 4, and the reverse; exports have the model's own names."""
    cell, meshes = Cell("Mixtral", (2, 2), stage), {**meshes, None: None}
    model, optimizer = sharded(meshes[2, 2], "Mixtral", stage=stage, **options)
    train(model, optimizer, rank, cell, range(2))
    zs.save(folder / "ep2", model, optimizer)
    saved = whole(model)
    zs.save_safetensors(model, folder / "ep2.safetensors", dtype=torch.float32)
    streamed = {k: v for part in zs.stream_full_tensors(model, max_nbytes=5000, masters=True) for k, v in part.items()}
    same(streamed, zs.full_state_dict(model, masters=True))
    further, _ = train(model, optimizer, rank, cell, [2])
    for where, mesh in meshes.items():
        other = make("Mixtral")
        with torch.no_grad():
            other.lm_head.weight.zero_()
        model, optimizer = sharded(mesh, "Mixtral", model=other, stage=stage, **options)
        zs.load(folder / "ep2", model, optimizer)
        same(whole(model), saved)
        zs.save(folder / f"again{where}", model, optimizer)
        assert train(model, optimizer, rank, cell, [2])[0] == pytest.approx(further, rel=1e-3 if options else 1e-6)
        model, optimizer = sharded(meshes[2, 2], "Mixtral", stage=stage, **options)
        zs.load(folder / f"again{where}", model, optimizer)
        same(whole(model), saved)
        with torch.device("meta"):
            bare = make("Mixtral") if stage == 3 else None
        if bare is not None:
            if mesh is not None:
                zs.divide_experts(bare, mesh["ep"])
            bare, _ = zs.shard(bare, None, mesh=mesh, stage=3, weights=folder / "ep2.safetensors")
            for name, value in zs.full_state_dict(bare).items():
                assert torch.equal(value, saved[name]), name


def _on_ranks(rank, ranks, cells, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")) for shape in ((2, 2), (1, 4))}
    found = {}
    bodies = {cell.name: functools.partial(run_cell, cell, meshes[cell.axes], rank) for cell in cells}
    bodies["checkpoints 1"] = functools.partial(checkpoints, rank, meshes, folder / "1", 1, {})
    bodies["checkpoints 3"] = functools.partial(checkpoints, rank, meshes, folder / "3", 3, {"precision": "bf16"})
    for name, body in bodies.items():
        try:
            found[name] = body()
        except Exception:
            found[name] = traceback.format_exc()
            break  # ranks may stand in different places now
    return found


@functools.cache
def results():
    import transformers  # noqa: F401  # before the ranks are forked

    with tempfile.TemporaryDirectory() as folder:
        return run_processes(_on_ranks, WORLD, CELLS, Path(folder), timeout_s=300)


def check(name):
    for found in results():
        assert name in found, f"another cell failed before: {list(found)[-1]}"
        assert found[name] is None, found[name]


@pytest.mark.processes
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_equal_to_one_process(cell):
    check(cell.name)


@pytest.mark.processes
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_are_of_the_whole_model(stage):
    check(f"checkpoints {stage}")
