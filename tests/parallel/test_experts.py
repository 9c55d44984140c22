"""Experts divided over an axis "ep" equal one process on the union of the ranks' batches.

A world of four processes goes through all cells; each test looks at what a cell found.
"""

import copy
import functools
import pickle
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_kit import TOKENS, make, net
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of

WORLD, STEPS, ROWS, SEQ = 4, 6, 2, 8
adam = functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3)  # a small eps would magnify the rounding of tiny gradients


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


ROUTES = [  # stage, axes, experts in a list
    (0, (2, 2), False), (3, (2, 2), False), (3, (1, 4), False), (1, (2, 2), True), (3, (1, 4), True),
]  # fmt: skip


def routes(rank, mesh, stage, listed):
    """Experts without tokens, ranks without tokens, all tokens to one expert, one token; bytes and memory."""
    tables = {
        "one expert": [[[3], [3]]] * WORLD,
        "one token": [[[5]], [[0]], [[5]], [[2]]],
        "two idle ranks": [[[0, 1], [1, 0]]] * WORLD,
        "even": [[[0, 2], [4, 6]], [[1, 3], [5, 7]]] * 2,
    }
    for name, table in tables.items():
        generator = torch.Generator().manual_seed(0)
        inputs = [(torch.randn(len(rows), 4, generator=generator), torch.tensor(rows)) for rows in table]
        one, model = net(listed=listed), zs.divide_experts(net(listed=listed), mesh["ep"], experts=["experts"])
        one(*map(torch.cat, zip(*inputs, strict=True))).backward()
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh, stage=stage)
        model(*inputs[rank]).backward()
        for key, gradient in zs.full_gradients(model).items():
            assert torch.allclose(gradient, dict(one.named_parameters())[key].grad, atol=1e-6), (name, key)
        # rows travel to other ranks and back, and so do their gradients; what a rank sends back has come to it
        mine, place = mesh["ep"].mesh.tolist(), mesh["ep"].get_local_rank()
        rows = [[sum(e // (8 // len(mine)) == to for row in table[r] for e in row) for to in range(len(mine))] for r in mine]
        away = sum(rows[place]) + sum(row[place] for row in rows) - 2 * rows[place][place]
        ledger = runtime_of(model).tiers.ledger
        assert ledger.traffic["all-to-all along ep"].nbytes == 2 * away * 4 * 4, name  # 4 elements of 4 bytes
        busiest = [sum(row[to] for row in rows) for to in range(len(mine))]
        assert zs.expert_imbalance(model)["experts"] == max(busiest) * len(mine) / sum(busiest)
        held = sum(group.values.nbytes for group in runtime_of(model).groups if group.topology.cut)
        numel = sum(param.numel() for param in one.experts.parameters())
        assert listed or held == 4 * numel / mesh["ep"].size() / (
            mesh["dp"].size() if stage == 3 else 1
        )  # of a list with padding
        if listed and name == "even":
            list_is_saved_by_its_names(model, one)
        with pytest.raises(zs.ConfigError, match="zs.join: .*use zs.stop_together"), zs.join(model):
            pass
        zs.close(model)


def list_is_saved_by_its_names(model, one):
    with tempfile.TemporaryDirectory() as own:
        told = [own]
        dist.broadcast_object_list(told)
        folder = told[0]
        zs.save(folder, model)
        zs.save_safetensors(model, f"{folder}/model.safetensors")
        kept = {name: value.clone() for name, value in zs.full_state_dict(model).items()}
        assert kept.keys() == one.state_dict().keys()
        assert all(torch.equal(kept[name], value) for name, value in one.state_dict().items())
        stored = load_file(f"{folder}/model.safetensors")
        assert stored.keys() == kept.keys() and all(torch.equal(stored[name], value) for name, value in kept.items())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        zs.load(folder, model)
        assert all(torch.equal(kept[name], value) for name, value in zs.full_state_dict(model).items())
        dist.barrier()


def strange(rank, mesh):
    model, _ = zs.shard(zs.divide_experts(net(2), mesh["ep"], experts=["experts"]), None, mesh=mesh)
    with pytest.raises(IndexError, match="experts experts: a token chose expert 2, and there are 2"):
        model(torch.zeros(1, 4), torch.tensor([[2]]))


def capacity(rank, mesh):
    """Of 4 choices each, an expert takes ceil(0.5 * 4 tokens * 1 choice / 2 experts) = 1, the first of the batch."""
    model = zs.divide_experts(net(2), mesh["ep"], experts=["experts"], capacity_factor=0.5)
    model, _ = zs.shard(model, None, mesh=mesh)
    x, wanted = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)), torch.tensor([[0], [1], [0], [1]])
    kept, own = torch.tensor([[0.5], [0.5], [0], [0]]), net(2)
    assert torch.allclose(model(x, wanted), own.experts(own.mix(x), wanted, kept).square().sum(dim=-1).mean(), atol=1e-6)


def beside(rank, axes):
    """zs.parallelize with ep beside tp or pp."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    run = zs.parallelize(make("Mixtral"), mesh, optimizer=adam, stage=1, micro_batches=2, max_grad_norm=0.1)
    losses, expected = [], one_process("Mixtral", 1, 0.1, ())
    for step in range(STEPS):
        tokens = micro_batches(step, 1)[0].chunk(2)[mesh["ep"].get_local_rank()]
        loss = run.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).detach().clone()
        dist.all_reduce(loss, group=mesh["ep"].get_group())
        losses.append(loss.item() / 2)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    for name, value in zs.full_state_dict(run.model).items():
        assert torch.allclose(value, expected[2][name], rtol=0, atol=1e-5), name
    assert "ep: " in run.report() and "experts: the busiest rank computed 1." in run.report()
    run.close()


def caught(rank, mesh):
    """The last body: a rank that catches an error of its forward, and begins anew, does not meet the others' next layer."""
    model, _ = sharded(mesh, "Mixtral", stage=0)
    tokens = micro_batches(0, 1)[0].chunk(WORLD)[rank]

    def fail(*_):
        raise ValueError("the program's")

    with torch.no_grad():
        if rank == 0:
            handle = model.model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="the program's"):
                model(tokens)
            handle.remove()
        with pytest.raises((zs.CollectiveMismatch, zs.PeerFailed)) as found:
            model(tokens)
    return str(found.value)


def copies(rank, mesh):
    """A closed model can be copied, and the copy sends tokens, too; in another process it has no ranks to send to."""
    model, _ = sharded(mesh, "Mixtral", stage=3)
    tokens = micro_batches(0, 1)[0].chunk(WORLD)[rank]
    zs.close(model)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(tokens).logits, model(tokens).logits)
        with pytest.raises(zs.ConfigError, match="is called before zs.shard"):
            pickle.loads(pickle.dumps(model))(tokens)


def interrupted(rank, mesh):
    """Torch runs no forward hooks after KeyboardInterrupt; the router's loss of another model is then its own again."""
    tokens = micro_batches(0, 1)[0].chunk(WORLD)[rank]
    one, (model, _) = make("Mixtral", **BALANCED), sharded(mesh, "Mixtral", BALANCED, stage=1)
    with torch.no_grad():
        expected = one(tokens, labels=tokens).aux_loss

    def interrupt(*_):
        raise KeyboardInterrupt

    model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens, labels=tokens)
    with torch.no_grad():
        assert torch.equal(one(tokens, labels=tokens).aux_loss, expected)


def adapted(rank, mesh):
    """LoRA of other modules than the experts; these are frozen, and send tokens as before."""
    peft = pytest.importorskip("peft")
    one, model = (
        peft.get_peft_model(make("Mixtral"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        for _ in range(2)
    )
    model.load_state_dict(one.state_dict())
    zs.divide_experts(model, mesh["ep"])
    model, _ = zs.shard(model, None, mesh=mesh, stage=3)
    tokens = micro_batches(0, 1)[0]
    mine = tokens.chunk(WORLD)[rank]
    one(tokens, labels=tokens).loss.backward()
    model(mine, labels=mine).loss.backward()
    for name, gradient in zs.full_gradients(model).items():
        assert torch.allclose(gradient, one.get_parameter(name).grad, atol=1e-6), name
    zs.close(model)


def muon(model):
    hidden = {True: [], False: []}
    for name, param in model.named_parameters():
        hidden["experts" in name or "q_proj" in name].append(param)
    return zs.Muon([{"params": params, "use_muon": which} for which, params in hidden.items()], lr=1e-2)


def features(rank, mesh, stage):
    """Norms and clipping of torch, writes inside zs.gathered, a step of Muon on each expert's matrices by itself."""
    one, model = make("Mixtral"), zs.divide_experts(make("Mixtral"), mesh["ep"])
    single = muon(one)
    model, optimizer = zs.shard(model, muon(model), mesh=mesh, stage=stage)
    with zs.gathered(model, write=True), torch.no_grad():
        for param in (*model.parameters(), *one.parameters()):
            param.mul_(0.5)
    tokens = micro_batches(0, 1)[0]
    mine = tokens.chunk(WORLD)[rank]
    one(tokens, labels=tokens).loss.backward()
    model(mine, labels=mine).loss.backward()
    for param, other in zip(model.parameters(), one.parameters(), strict=True):
        assert stage == 1 or param.grad.norm().item() == pytest.approx(other.grad.norm().item(), rel=1e-4, abs=1e-6)
    clipped = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1).item() for each in (model, one)]
    assert clipped[0] == pytest.approx(clipped[1], rel=1e-5)
    optimizer.step()
    single.step()
    for name, value in zs.full_state_dict(model).items():  # Newton-Schulz runs in bf16
        assert torch.allclose(value, one.state_dict()[name], rtol=0, atol=2e-4), name
    zs.close(model)
    assert model(mine, labels=mine).loss.item() == pytest.approx(one(mine, labels=mine).loss.item(), rel=1e-4)


def _on_ranks(rank, ranks, cells, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")) for shape in ((2, 2), (1, 4))}
    found = {}
    bodies = {cell.name: functools.partial(run_cell, cell, meshes[cell.axes], rank) for cell in cells}
    bodies["checkpoints 1"] = functools.partial(checkpoints, rank, meshes, folder / "1", 1, {})
    bodies["checkpoints 3"] = functools.partial(checkpoints, rank, meshes, folder / "3", 3, {"precision": "bf16"})
    for stage, shape, listed in ROUTES:
        bodies[f"routes {stage} {shape} {listed}"] = functools.partial(routes, rank, meshes[shape], stage, listed)
    for stage in (1, 3):
        bodies[f"features {stage}"] = functools.partial(features, rank, meshes[2, 2], stage)
    bodies["strange"] = functools.partial(strange, rank, meshes[2, 2])
    bodies["capacity"] = functools.partial(capacity, rank, meshes[2, 2])
    bodies["interrupted"] = functools.partial(interrupted, rank, meshes[2, 2])
    bodies["adapted"] = functools.partial(adapted, rank, meshes[2, 2])
    bodies["copies"] = functools.partial(copies, rank, meshes[2, 2])
    for axes in ({"ep": 2, "dp": 1, "tp": 2}, {"pp": 2, "dp": 1, "ep": 2}):
        bodies[f"beside {axes}"] = functools.partial(beside, rank, axes)
    bodies["caught"] = functools.partial(caught, rank, meshes[1, 4])
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
        return run_processes(_on_ranks, WORLD, CELLS, Path(folder))


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


@pytest.mark.processes
@pytest.mark.parametrize("stage, shape, listed", ROUTES)
def test_any_route_has_the_gradients_of_one_process(stage, shape, listed):
    check(f"routes {stage} {shape} {listed}")


@pytest.mark.processes
@pytest.mark.parametrize("stage", [1, 3])
def test_norms_writes_and_muon(stage):
    check(f"features {stage}")


@pytest.mark.processes
def test_an_expert_that_does_not_exist_is_named():
    check("strange")


@pytest.mark.processes
def test_choices_beyond_the_capacity_get_zeros():
    check("capacity")


@pytest.mark.processes
def test_a_rank_that_caught_an_error_does_not_meet_another_layer():
    assert "rank 0: experts model.layers.0.mlp.experts: tokens of each; rank 1: experts model.layers.1" in results()[0]["caught"]


@pytest.mark.processes
def test_after_an_interrupted_forward_other_models_have_their_own_router_loss():
    check("interrupted")


@pytest.mark.processes
def test_adapters_beside_divided_experts():
    check("adapted")


@pytest.mark.processes
def test_closed_models_are_copied():
    check("copies")


@pytest.mark.processes
@pytest.mark.parametrize("axes", [{"ep": 2, "dp": 1, "tp": 2}, {"pp": 2, "dp": 1, "ep": 2}], ids=str)
def test_beside_other_axes(axes):
    check(f"beside {axes}")
