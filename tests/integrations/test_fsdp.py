"""zeroshard.fsdp beside torch's FSDP2: the same program with either gives equal losses, norms, parameters and optimizer states."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zeroshard as zs
from zeroshard import fsdp
from zeroshard.comm.launch import run_processes
from zeroshard.fsdp.__main__ import parsed
from zeroshard.seam import engine_of
from zeroshard.tensor.sharded_tensor import ShardedParameter

FULL = StateDictOptions(full_state_dict=True)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DOORS = {"torch": torch_fsdp, "zeroshard": fsdp}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, norm, head; sizes that two ranks do not divide."""

    def __init__(self, dim: int = 9, layers: int = 2, words: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale

    def encode(self, words):
        return self.norm(self.embedding(words))


def net(device: str = "cpu") -> Net:
    torch.manual_seed(3)
    with torch.device(device):
        return Net()


def wrapped(door, model=None, blocks=None, **options):
    """The model, after fully_shard on its blocks and on itself."""
    model = model or net()
    for block in model.blocks:
        door.fully_shard(block, **{**options, **(blocks or {})})
    return door.fully_shard(model, **options)


def loss_of(model, rank: int, step: int):
    words = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(17 * step + rank))
    logits = model(words[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def steps(model, optimizer, rank: int, first: int = 0, last: int = 4, accumulate: int = 1) -> list[tuple[float, float]]:
    """Train; return (loss, norm before clipping) of each step."""
    found = []
    for step in range(first, last):
        for micro in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(micro + 1 == accumulate)
            loss = loss_of(model, rank, accumulate * step + micro)
            (loss / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return found


def states(model, optimizer) -> dict:
    """Whole parameters, and whole optimizer states by parameter."""
    got = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
    return {"model": get_model_state_dict(model, options=FULL)} | {
        f"optimizer {name}": {key: value for key, value in state.items() if key != "step"} for name, state in got.items()
    }


def _plain(door, rank):
    model = wrapped(door)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return steps(model, optimizer, rank), states(model, optimizer)


def _policies(door, rank):
    """Blocks in bf16 with an fp32 norm inside, the root's own parameters in fp32."""
    model = net()
    for block in model.blocks:
        door.fully_shard(block.norm, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16))
        door.fully_shard(block, mp_policy=BF16)
    model = door.fully_shard(model, mp_policy=dataclasses.replace(BF16, output_dtype=torch.float32))
    assert all(param.dtype == torch.float32 for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return steps(model, optimizer, rank), states(model, optimizer)


def _accumulated(door, rank):
    model = wrapped(door, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return steps(model, optimizer, rank, accumulate=3), states(model, optimizer)


def _meta(door, rank):
    """Built on the meta device; rank 0 has the values."""
    given = net().state_dict()
    model = wrapped(door, net("meta"))
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given if rank == 0 else {}, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return steps(model, optimizer, rank), states(model, optimizer)


def _assigned(door, rank):
    """Values as DTensors by load_state_dict(assign=True), and an optimizer whose parameters are exchanged, as Accelerate does."""
    given, model = net().state_dict(), net("meta")
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(1))], lr=0.02)
    wrapped(door, model)
    shown = model.state_dict()
    state = {
        name: distribute_tensor(given[name], param.device_mesh, param.placements) for name, param in model.named_parameters()
    }
    state["scale"] = given["scale"]
    assert shown.keys() == state.keys()
    model.load_state_dict(state, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return steps(model, optimizer, rank), states(model, optimizer)


def _gathered(door, rank):
    """Methods that gather; divided gradients; another method as a forward; several modules in one call."""
    model = net()
    for block in model.blocks:
        door.fully_shard(block)
    door.fully_shard([model.norm, model.head], reshard_after_forward=False)
    door.fully_shard(model)
    door.register_fsdp_forward_method(model, "encode")
    door.share_comm_ctx([model, model.blocks[0]])
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.set_modules_to_backward_prefetch([model.blocks[1]])
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.unshard(async_op=True)
    handle.wait()
    whole = model.embedding.weight.shape, model.embedding.weight.detach().clone()
    model.reshard()
    encoded = model.encode(torch.arange(4)).sum()
    encoded.backward()
    found = [(encoded.item(), 0.0), *steps(model, optimizer, rank)]
    return found, states(model, optimizer) | {"unsharded": {"weight": whole[1]}}


def _unsharded(door, rank):
    """State dicts, their loads and conversions after unshard() see sharded fp32 parameters; then training goes on."""
    model = wrapped(door, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = steps(model, optimizer, rank, last=2)

    def unshard():
        for module in model.modules():
            if isinstance(module, torch_fsdp.FSDPModule):
                module.unshard()
        assert all(param.dtype == torch.bfloat16 and not hasattr(param, "full_tensor") for param in model.parameters())

    unshard()
    shown = {name: value * 1 for name, value in model.state_dict().items()}
    unshard()
    part = model.blocks[0].up.state_dict()  # of a module inside a unit
    unshard()
    model.to(torch.float32)
    unshard()
    model.load_state_dict(shown)
    unshard()
    whole = {"whole": get_model_state_dict(model, options=FULL), "part": {name: part[name].full_tensor() for name in part}}
    assert all(value.dtype == torch.float32 for values in (shown, part, *whole.values()) for value in values.values())
    unshard()
    return found + steps(model, optimizer, rank, first=2), whole | states(model, optimizer)


def _given(door, rank):
    """Parameters that are given in bf16 compute in fp32 under a policy; without one they compute, and are stepped, as they are."""
    model = net().bfloat16()
    for block in model.blocks:
        door.fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    door.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return [(loss_of(model, rank, step).item(), 0.0) for step in range(2)], {}


def _frozen(door, rank):
    """A frozen part keeps its precision under a policy; rank 0 alone counts the parameters."""
    model = net()
    model.blocks[0].requires_grad_(False)
    wrapped(door, model, mp_policy=BF16)
    if rank == 0:
        assert sum(param.numel() for param in model.parameters()) == sum(param.numel() for param in net().parameters())
    dist.barrier()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02)
    found = steps(model, optimizer, rank)
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _scaled(door, rank):
    """fp16 with torch's GradScaler."""
    model = wrapped(door, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(3):
        loss = loss_of(model, rank, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _roots(door, rank):
    """Parts that are roots of their own inside a module that is not given to fully_shard, with one optimizer in two groups."""
    model = net()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # a class whose forward is its instance's
    parts = [model.embedding, *model.blocks, model.norm, model.head]
    for part in parts:
        door.fully_shard(part, mp_policy=BF16)
    others = [*model.head.parameters(), model.embedding.weight, *model.norm.parameters()]
    optimizer = torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": others}], lr=0.02)
    found = []
    for step in range(6):
        for part in parts:
            part.set_requires_gradient_sync(step % 2 == 1)
        loss = loss_of(model, rank, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7) if step % 2 else torch.zeros(())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return found, states(model, optimizer)


PROGRAMS = (_unsharded, _roots, _frozen, _given, _scaled, _plain, _policies, _accumulated, _meta, _assigned, _gathered)


def _both(rank, ranks, programs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {program.__name__: {name: program(door, rank) for name, door in DOORS.items()} for program in programs}


@pytest.fixture(scope="module")
def beside():
    return run_processes(_both, 2, PROGRAMS)


def check_equal(ours, theirs) -> None:
    (found, own), (expected, other) = ours, theirs
    for mine, its in zip(found, expected, strict=True):
        assert mine == pytest.approx(its, abs=1e-6, rel=1e-6)
    assert own.keys() == other.keys()
    for kind, values in other.items():
        for name, value in values.items():
            torch.testing.assert_close(own[kind][name], value, atol=1e-6, rtol=1e-5, msg=f"{kind}: {name}")


@pytest.mark.processes
@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_the_numbers_are_those_of_fsdp2(beside, program):
    for results in beside:
        check_equal(results[program]["zeroshard"], results[program]["torch"])


def _hsdp(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def program(door):
        model = wrapped(door, mesh=mesh)
        shown = next(model.parameters())
        assert shown.device_mesh == mesh and shown.placements[1] == Shard(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return steps(model, optimizer, rank), states(model, optimizer)

    return {name: program(door) for name, door in DOORS.items()}


def _seeds(rank, ranks):
    """Ranks with other seeds initialise a model from the meta device; its values agree, and depend on no rank's later draws."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for seeds in ((5, 6), (5, 5)):
        model = wrapped(fsdp, net("meta"))
        torch.manual_seed(seeds[rank])
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model.scale.fill_(1.0)
        found[seeds] = steps(model, optimizer, 0)
    return found


@pytest.mark.processes
def test_ranks_may_have_other_seeds():
    first, second = run_processes(_seeds, 2)
    assert first == second and first[5, 6] == first[5, 5]


def _reseeded(rank, ranks):
    """What sharded and ordinary parameters are drawn as, after a first use with other seeds on each rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(100 + rank)
    model = wrapped(fsdp, net("meta"))
    model.to_empty(device="cpu")
    found = []
    for seed in (7, 7, 100, 101, 200 + rank):
        torch.manual_seed(seed)
        with torch.no_grad():
            model.head.weight.normal_()
            model.norm.weight.uniform_()
        found.append((model.head.weight.full_tensor().detach(), model.norm.weight.full_tensor().detach(), torch.rand(3)))
    return found


def _drawn(seed):
    torch.manual_seed(seed)
    return torch.empty(11, 9).normal_(), torch.empty(9).uniform_(), torch.rand(3)


@pytest.mark.processes
def test_a_seed_set_after_the_first_use_is_that_of_draws():
    """Where ranks have other seeds rank 0's counts, and theirs go on beside it."""
    first, second = run_processes(_reseeded, 2)
    for mine, other, seed in zip(first, second, (7, 7, 100, 101, 200), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, _drawn(seed), strict=True)), seed
        assert all(torch.equal(a, b) for a, b in zip(mine[:2], other[:2], strict=True)), seed
    torch.manual_seed(201)
    assert torch.equal(second[-1][2], torch.rand(3))


@pytest.mark.processes
def test_a_mesh_of_two_axes_is_hsdp():
    for results in run_processes(_hsdp, 4):
        check_equal(results["zeroshard"], results["torch"])


def _checkpoints(rank, ranks, folder, writer):
    """Train and save with one, load and go on with the other: at once (`writer` set), or what an earlier call has saved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, door in DOORS.items():
        model = wrapped(door)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        if writer:
            steps(model, optimizer, 0)
        saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if writer:
            dcp_save(saved, checkpoint_id=f"{folder}/{name}")
            full = get_optimizer_state_dict(model, optimizer, options=FULL)
            if rank == 0:
                torch.save((get_model_state_dict(model, options=FULL), full), f"{folder}/{name}.pt")
            else:
                get_model_state_dict(model, options=FULL)
    if writer:
        return None
    found = {}
    for name, door in DOORS.items():
        for other in DOORS:
            for whole in (False, True):
                model = wrapped(door)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
                if whole:
                    values, given = torch.load(f"{folder}/{other}.pt")
                    set_model_state_dict(model, values, options=FULL)
                    set_optimizer_state_dict(model, optimizer, given, options=FULL)
                else:
                    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
                    dcp_load(state, checkpoint_id=f"{folder}/{other}")
                    set_model_state_dict(model, state["model"])
                    set_optimizer_state_dict(model, optimizer, state["optimizer"])
                found[name, other, whole] = steps(model, optimizer, 0, 4, 6)
    return found


@pytest.mark.processes
def test_checkpoints_go_both_ways_and_to_other_world_sizes(tmp_path):
    run_processes(_checkpoints, 2, str(tmp_path), True)
    for found in run_processes(_checkpoints, 3, str(tmp_path), False):
        expected = found["torch", "torch", False]
        for case, got in found.items():
            for mine, its in zip(got, expected, strict=True):
                assert mine == pytest.approx(its, abs=2e-6, rel=1e-5), case


def _gains(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, options in {
        "plain": {}, "host": {"offload_optimizer": "cpu", "offload_param": "cpu"}, "stage 2": {"stage": 2}, "int8": {"optimizer_states": "int8"},
    }.items():  # fmt: skip
        fsdp.configure(**options)
        model = wrapped(fsdp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        found[name] = steps(model, optimizer, rank)
        assert f"stage {options.get('stage', 3)}" in str(zs.report(model))
    fsdp.configure()
    model = wrapped(fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False))
    found["policy"] = steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), rank)
    assert "on host" in str(zs.report(model))
    return found


@pytest.mark.processes
def test_configure_adds_what_fsdp2_lacks():
    for found in run_processes(_gains, 2):
        assert found["host"] == found["policy"] == found["plain"]
        for name in ("stage 2", "int8"):
            for mine, its in zip(found[name], found["plain"], strict=True):
                assert mine == pytest.approx(its, rel=1e-5), name
    with pytest.raises(zs.ConfigError, match="offload"):
        fsdp.configure(offload_optimizer="cpuu")


# -- one process ---------------------------------------------------------------------------------------------


def test_parameters_stay_the_objects_that_they_were_and_the_class_is_fsdps():
    model = net()
    given = dict(nn.Module.named_parameters(model))
    kept = list(model.parameters())
    wrapped(fsdp, model)
    assert isinstance(model, fsdp.FSDPModule) and isinstance(model.blocks[0], torch_fsdp.FSDPModule)
    assert type(model).__name__ == "FSDPNet" and isinstance(model, Net)
    assert sum(param.numel() for param in model.parameters()) == sum(param.numel() for param in given.values())
    assert type(kept[0]) is fsdp.calls.WaitingParameter and len(model.state_dict()) == 1 + len(kept)
    assert all(param is given[name] and isinstance(param, ShardedParameter) for name, param in model.named_parameters())
    assert kept[0] is model.embedding.weight
    layers = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    assert type(layers[:2]) is nn.Sequential


def test_an_optimizer_from_a_module_around_the_root_is_the_sharded_one():
    outer = nn.ModuleDict({"net": wrapped(fsdp)})
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.02)
    before = outer["net"].head.weight.full_tensor().clone()
    loss_of(outer["net"], 0, 0).backward()
    optimizer.step()
    assert not torch.equal(outer["net"].head.weight.full_tensor(), before)
    assert isinstance(next(outer.parameters()), ShardedParameter)


def test_a_part_that_was_listed_first_becomes_a_part_of_the_model():
    model = net()
    fsdp.fully_shard(model.blocks[0])
    model.blocks[0].state_dict()
    assert isinstance(model.blocks[0].up.weight, ShardedParameter)  # a model of its own, for now
    fsdp.fully_shard(model.blocks[1])
    fsdp.fully_shard(model)
    assert {"blocks.0", "blocks.1"} < {name for name, _ in engine_of(model).modules_of_units()}
    loss_of(model, 0, 0).backward()
    assert model.blocks[0].up.weight.grad is not None


def test_functions_of_zeroshard_see_sharded_parameters_after_unshard(tmp_path):
    model = wrapped(fsdp, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, 0, last=2)
    expected = zs.full_state_dict(model, masters=True)

    def check(values):
        assert values.keys() == expected.keys() and all(torch.equal(values[name], value) for name, value in expected.items())

    model.unshard()
    check(zs.full_state_dict(model, masters=True))
    model.unshard()
    check({name: value for part in zs.stream_full_tensors(model, masters=True) for name, value in part.items()})
    model.unshard()
    zs.save(tmp_path, model, optimizer, step=1)
    steps(model, optimizer, 0, last=2)
    model.unshard()
    zs.load(tmp_path, model, optimizer)
    check(zs.full_state_dict(model, masters=True))
    model.unshard()
    with zs.gathered(model):
        assert torch.equal(model.head.weight, expected["head.weight"].bfloat16())
    model.unshard()
    with zs.gathered(model.head):
        assert torch.equal(model.head.weight, expected["head.weight"].bfloat16())
    handle = model.unshard(async_op=True)
    with zs.gathered(model):
        handle.wait()
    model.unshard()
    zs.close(model)
    check(model.state_dict())


def test_waiting_for_a_gather_that_a_forward_has_used_does_nothing():
    model = wrapped(fsdp)
    handle = model.blocks[0].unshard(async_op=True)
    with torch.no_grad():
        loss_of(model, 0, 0)
    handle.wait()
    assert isinstance(model.blocks[0].up.weight, ShardedParameter)


def test_a_failed_step_is_cleared_by_reset_iter_state():
    model = wrapped(fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.blocks[0].up.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0, 0).backward()
    handle.remove()
    model.reset_iter_state()
    loss_of(model, 0, 0).backward()
    optimizer.step()


def _mistake_twice():
    model = wrapped(fsdp)
    fsdp.fully_shard(model)


def _mistake_container():
    fsdp.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def _mistake_late_root():
    model = net()
    fsdp.fully_shard(model.blocks[0])
    model.blocks[0](torch.ones(1, 9))
    fsdp.fully_shard(model)


def _mistake_list_alone():
    model = net()
    fsdp.fully_shard([model.norm, model.head])
    model.norm(torch.ones(1, 9))


def _mistake_two_models():
    one, other = wrapped(fsdp), wrapped(fsdp)
    loss_of(one, 0, 0)
    torch.optim.AdamW([*one.parameters(), *other.parameters()])


def _mistake_conversion():
    model = wrapped(fsdp)
    model.state_dict()
    model.half()


def _mistake_no_values():
    loss_of(wrapped(fsdp, net("meta")), 0, 0)


def _mistake_write():
    model = wrapped(fsdp)
    model.unshard()
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.reshard()


def _mistake_sync_of_a_part():
    model = wrapped(fsdp)
    model.blocks[0].set_requires_gradient_sync(False)
    loss_of(model, 0, 0)


MISTAKES = {
    _mistake_twice: "fully_shard has already been applied to this FSDPNet: call it once",
    _mistake_container: "containers that do not implement forward: ModuleList. Call it on the items",
    _mistake_late_root: "FSDPBlock, a part of this module, has run a forward as a model of its own: call fully_shard on the whole model",
    _mistake_list_alone: r"fully_shard\(\[FSDPLayerNorm, FSDPLinear\]\): .* Call fully_shard\(model\) before its first use",
    _mistake_two_models: "this AdamW is given parameters of several models, FSDPNet, FSDPNet, .* make an optimizer for each",
    _mistake_conversion: "parameter weight would be converted from torch.float32 on cpu to torch.float16 .* mp_policy",
    _mistake_no_values: r"these parameters are on the meta device: .*'embedding.weight'.* Call model.to_empty",
    _mistake_write: r"head.weight: written in place after unshard\(\), .* Write the sharded parameter, before unshard\(\) or after",
    _mistake_sync_of_a_part: r"set_requires_gradient_sync\(False\) on FSDPBlock alone: .* Call it on the model's root",
    lambda: fsdp.fully_shard(nn.Linear(2, 2), mesh="dp"): "mesh: expected a DeviceMesh of 1 or 2 axes, got str",
    lambda: fsdp.fully_shard(nn.Linear(2, 2), ignored_params=set(nn.Linear(2, 2).parameters())): "ignored_params: .* a module of their own",
    lambda: fsdp.fully_shard("model"): "expected an nn.Module or a list of them, got str",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_all_reduce_hook(print): "does not serve set_all_reduce_hook: use a mesh of two axes",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_custom_all_gather(None): "does not serve set_custom_all_gather: register",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_gradient_divide_factor(0): "expected a number above 0, got 0",
    lambda: fsdp.fully_shard(nn.Linear(2, 2))._get_fsdp_state(): "which has no FSDPState",
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: getattr(mistake, "__name__", "lambda"))
def test_mistakes_name_the_thing_and_a_remedy(mistake):
    with pytest.raises(zs.ZeroshardError, match=MISTAKES[mistake]):
        mistake()


# -- the command ---------------------------------------------------------------------------------------------


def test_options_of_the_command():
    options, report, rest = parsed(["--offload-optimizer", "cpu", "--stage=2", "--report", "train.py", "--lr", "1"])
    assert (options, report, rest) == ({"offload_optimizer": "cpu", "stage": 2}, True, ["train.py", "--lr", "1"])
    with pytest.raises(zs.ConfigError, match="--offload-optimiser: no option of zs.shard. Did you mean 'offload_optimizer'"):
        parsed(["--offload-optimiser", "cpu", "train.py"])


SCRIPT = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed._composable.fsdp import fully_shard as older
assert older is fully_shard
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
fully_shard(model[0]); fully_shard(model)
assert isinstance(model, FSDPModule)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
print(fully_shard.__module__, sys.argv[1:])
"""


def test_a_script_runs_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "zeroshard.fsdp",
        "--offload-optimizer",
        "cpu",
        "--report",
        str(tmp_path / "train.py"),
        "--lr",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "zeroshard.fsdp.sharding ['--lr', '1']" in done.stdout and "on host: gradients" in done.stdout
    done = subprocess.run([*command[:3], "absent.py"], capture_output=True, text=True, check=False)
    assert done.returncode and "no file 'absent.py'" in done.stderr


def test_names_are_those_of_torch():
    public = {"fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx"}
    public |= {"MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"}
    assert public <= set(fsdp.__all__) and public <= set(torch_fsdp.__all__)
    ours = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
    missing = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")} - ours
    assert not missing, missing
