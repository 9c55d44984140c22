"""zeroshard.fsdp beside torch's FSDP2: the same program with either gives equal losses, norms, parameters and optimizer states."""

import contextlib
import copy
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from safetensors.torch import load_file
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, async_save
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

import zeroshard as zs
from zeroshard import fsdp
from zeroshard.comm.launch import run_processes
from zeroshard.fsdp.__main__ import parsed
from zeroshard.fsdp.calls import _with_axes_of
from zeroshard.seam import engine_of
from zeroshard.tensor.sharded_tensor import ShardedParameter
from zeroshard.utils.torch_compat import FakeStore

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
        if type(norm) is not torch.Tensor:  # at stage 0 gradients are ordinary tensors, and so is their norm
            assert type(norm.full_tensor()) is type(norm.to_local()) is torch.Tensor
            param = next(model.parameters())
            assert norm.device_mesh == param.device_mesh and norm.placements == (Replicate(),) * norm.device_mesh.ndim
            norm = norm.full_tensor()
        found.append((loss.item(), float(norm)))
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


def _written(door, rank):
    """A bf16 policy, and parameters that are written at rest: from the meta device, in place, by .data, by loads, between steps."""
    given, model = net().state_dict(), net("meta")
    wrapped(door, model, mp_policy=BF16)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given if rank == 0 else {}, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = steps(model, optimizer, rank, 0, 2)
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1 + 2**-12)  # less than bf16 resolves
        model.norm.bias.fill_(0.125)
    model.blocks[1].down.bias.data.mul_(3)
    torch.nn.init.constant_(model.blocks[1].norm.weight, 0.5)
    found += [(loss_of(model, rank, 2).item(), 0.0)]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(value.dtype == torch.float32 for value in kept.values())
    found += steps(model, optimizer, rank, 2, 4)
    trained = states(model, optimizer)
    model.load_state_dict(kept)
    model.unshard()
    whole = model.head.weight.detach().clone()
    assert whole.dtype == torch.bfloat16 and whole.shape == (11, 9)
    model.reshard()
    assert all(param.dtype == torch.float32 for param in model.parameters())
    loaded = {"loaded": get_model_state_dict(model, options=FULL), "unsharded": {"head": whole}}
    return [*found, (loss_of(model, rank, 2).item(), 0.0)], trained | loaded


def _ignored(door, rank):
    """Parameters that the program keeps, in a block and in the root: it sums their gradients over ranks, and steps them."""
    model = net()
    kept = [model.blocks[0].up.bias, model.norm.weight]
    wrapped(door, model, ignored_params=set(kept))
    assert kept[0] is model.blocks[0].up.bias and all(type(param) is nn.Parameter for param in kept)
    ids = set(map(id, kept))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if id(param) not in ids], lr=0.02)
    own, found = torch.optim.SGD(kept, lr=0.1), []
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        for param in kept:
            assert type(param.grad) is torch.Tensor
            dist.all_reduce(param.grad)
            param.grad /= 2
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
        found.append((loss.item(), 0.0))
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _beside_replicas(door, rank):
    """The blocks are sharded, and torch's `replicate` averages the gradients of the others."""
    model, found = net(), []
    for block in model.blocks:
        door.fully_shard(block)
    ids = {id(param) for param in model.blocks.parameters()}
    replicate(model)
    optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=0.02)
    own = torch.optim.SGD([param for param in model.parameters() if id(param) not in ids], lr=0.1)
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
        found.append((loss.item(), 0.0))
    return found, {"model": {name: getattr(p, "full_tensor", p.detach)() for name, p in model.named_parameters()}}


def divided(model) -> list[torch.optim.Optimizer]:
    """AdamW for matrices, SGD for the rest."""
    matrices, rest = ([param for param in model.parameters() if (param.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.AdamW(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def _two_optimizers(door, rank):
    """Both after most backwards, clipped together; in every third step the first alone, and the other's gradients add up."""
    model = wrapped(door, mp_policy=BF16)
    optimizers, found = divided(model), []
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    for step in range(6):
        loss = loss_of(model, rank, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        for optimizer, scheduler in list(zip(optimizers, schedulers, strict=True))[: 1 if step % 3 == 1 else 2]:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        found.append((loss.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)))
    return found, states(model, optimizers)


def _two_optimizers_scaled(door, rank):
    """fp16 with torch's GradScaler; the gradient of a bias, and so the step of one optimizer, overflows once."""
    model = wrapped(door, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    optimizers, scaler, found = divided(model), torch.amp.GradScaler("cpu", init_scale=64.0), []
    for step in range(4):
        loss = loss_of(model, rank, step)
        scaler.scale(loss).backward()
        if step == 2:
            model.blocks[0].up.bias.grad.mul_(float("inf"))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.append((loss.item(), scaler.get_scale()))
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _beside_the_model(door, rank):
    """A temperature that is no parameter of the model, and a layer that is trained from the third step on."""
    model = wrapped(door)
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.AdamW([*model.blocks.parameters(), temperature], lr=0.02)
    model.head.requires_grad_(False)
    found = []
    for step in range(5):
        if step == 2:
            model.head.requires_grad_(True)
            optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.05})
        loss = loss_of(model, rank, step) * temperature
        loss.backward()
        dist.all_reduce(temperature.grad)
        temperature.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        found.append((loss.item(), temperature.item()))
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _by_dtensors(door, rank):
    """Optimizer states are gathered where they are DTensors, and come back by distribute_tensor, as pytorch/examples has it."""
    model = wrapped(door)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found, values = steps(model, optimizer, rank, 0, 2), get_model_state_dict(model, options=FULL)
    kept = {
        number: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }
    assert all(type(value) is torch.Tensor for state in kept.values() for value in state.values())
    model = wrapped(door)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, rank, 2, 3)
    given = optimizer.state_dict()
    for number, state in given["state"].items():
        for key, value in state.items():
            whole = kept[number][key]
            cut = isinstance(value, DTensor)
            state[key] = distribute_tensor(whole, value.device_mesh, value.placements) if cut else whole
    optimizer.load_state_dict(given)
    set_model_state_dict(model, values, options=FULL)
    return found + steps(model, optimizer, rank, 2, 4), states(model, optimizer)


def _of_the_head_alone(door, rank):
    """No optimizer has the blocks, so that their gradients add up, and enter the norm; one that is made later steps their sum."""
    model, found = wrapped(door), []
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm.full_tensor())))
    torch.optim.SGD(model.blocks.parameters(), lr=0.1).step()
    return found, {"model": get_model_state_dict(model, options=FULL)}


def _states_from_the_start(door, rank):
    """Adagrad makes its states in its constructor: of the parameters' shape."""
    model = wrapped(door)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    return steps(model, optimizer, rank), states(model, optimizer)


def _optimizers_anew(door, rank):
    """A phase of each optimizer, in the name of the one before, which is garbage in a circle with its scheduler."""
    model, found = wrapped(door), []
    for phase, make in enumerate((torch.optim.AdamW, torch.optim.SGD, torch.optim.AdamW)):
        optimizer = make(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        found += steps(model, optimizer, rank, 2 * phase, 2 * phase + 2)
        scheduler.step()
    return found, states(model, optimizer)


def _loaded_after_a_write(door, rank):
    """A write in a forward stays where ranks keep wholes: then the model is refused until all parameters are loaded."""
    model = wrapped(door)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    first = steps(model, optimizer, rank, last=2)
    values, folder = get_model_state_dict(model, options=FULL), [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp_save({"model": model.state_dict()}, checkpoint_id=folder[0])

    def write(module, *_):
        module.weight.add_(1.0)

    for load in (
        lambda: set_model_state_dict(model, values, options=FULL),
        lambda: dcp_load({"model": model.state_dict()}, checkpoint_id=folder[0]),
    ):
        dist.barrier()  # a rank may write to memory of all
        handle = model.head.register_forward_hook(write)
        with torch.no_grad(), contextlib.suppress(zs.ShardedWriteError):
            loss_of(model, rank, 0)
        handle.remove()
        model.reshard()
        load()
        loss_of(model, rank, 0).backward()
        optimizer.zero_grad()
    return first + steps(model, optimizer, rank, 2), states(model, optimizer)


def _assigned_parameters(door, rank):
    """Parameters assigned before the first forward: before any use, after a read, and after to_empty() of another model."""
    results = []
    for device in ("cpu", "meta"):
        model, new = wrapped(door, net(device)), torch.arange(99.0).view(11, 9) / 99

        def assign(module, name, value):
            param = getattr(module, name)
            setattr(module, name, nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements)))

        if device == "meta":
            model.to_empty(device="cpu")
            model.scale.fill_(1.0)
            for module in list(model.modules()):
                for name, param in list(module.named_parameters(recurse=False)):
                    assign(module, name, torch.full(param.shape, 0.1))
        assign(model.head, "weight", new)
        model.blocks[1].up.weight.full_tensor()  # a first use
        assign(model.blocks[0].up, "bias", new.flatten()[:28])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        results += steps(model, optimizer, rank)
    return results, states(model, optimizer)


class Headless(Net):
    """The head is called by the loss."""

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _chunked(door, rank, count=lambda model: 0):
    """A loss in chunks, as torchtitan has it: the head is gathered once, and its gradient reduced once; count: called after each step."""
    torch.manual_seed(3)
    model = Headless()
    head = door.fully_shard(model.head)
    wrapped(door, model)
    optimizer, found, counts = torch.optim.AdamW(model.parameters(), lr=0.02), [], []
    for step in range(3):
        words = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(17 * step + rank))
        hidden, total = model(words[:, :-1]), 0.0
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(3, dim=1)]
        for number, (chunk, wanted) in enumerate(zip(chunks, words[:, 1:].chunk(3, dim=1), strict=True)):
            head.set_requires_gradient_sync(number == 2, recurse=False)
            loss = nn.functional.cross_entropy(head(chunk).flatten(0, 1), wanted.flatten()) / 3
            loss.backward()
            total += loss.item()
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.reshard()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks], dim=1))
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7))
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
        counts.append(count(model))
    return (found, states(model, optimizer)) if not counts[0] else counts


def _part_unsynced(door, rank):
    """A block holds its gradients back in each first micro-batch."""
    model = wrapped(door)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for step in range(3):
        for micro in range(2):
            model.blocks[0].set_requires_gradient_sync(micro == 1)
            (loss_of(model, rank, 2 * step + micro) / 2).backward()
            grads = [model.blocks[0].up.weight.grad, model.blocks[1].up.weight.grad]
            assert [grad is None for grad in grads] == [micro == 0, False]
        found.append((0.0, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7))))
        optimizer.step()
        optimizer.zero_grad()
    return found, states(model, optimizer)


def _sums_unseen(door, rank):
    """Clipped and stepped while sums are held back, too: there are no gradients yet, and the sums stay."""
    model = wrapped(door)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for step in range(6):
        model.set_requires_gradient_sync(step % 3 == 2)
        loss_of(model, rank, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append(
            (float(sum(p.grad is not None for p in model.parameters())), float(getattr(norm, "full_tensor", lambda: norm)()))
        )
        if step % 3 == 2:
            optimizer.zero_grad()
        else:
            model.head.weight.grad = None
    return found, states(model, optimizer)


def _averages(door, rank):
    """Averages that have run no forward yet, in the forms in which programs write them."""
    model, teachers = wrapped(door), [wrapped(door) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for step in range(3):
        found += steps(model, optimizer, rank, step, step + 1)
        params = list(model.parameters())
        one, two, three, four = (list(teacher.parameters()) for teacher in teachers)
        with torch.no_grad():
            for average, param in zip(one, params, strict=True):
                average.mul_(0.7).add_(param, alpha=0.3)
            for average, param in zip(two, params, strict=True):
                average.data.lerp_(param.data, 0.3)
            torch._foreach_mul_(three, 0.7)
            torch._foreach_add_(three, params, alpha=0.3)
            for average, param in zip(four, params, strict=True):
                average.data.copy_(param)
    found += [(loss_of(teacher, rank, 3).item(), 0.0) for teacher in teachers]
    return found, {str(k): get_model_state_dict(teacher, options=FULL) for k, teacher in enumerate(teachers)}


PROGRAMS = (
    _of_the_head_alone, _by_dtensors, _unsharded, _roots, _ignored, _beside_replicas, _frozen, _given, _scaled, _plain, _policies,
    _accumulated, _meta, _assigned, _gathered, _written, _two_optimizers, _two_optimizers_scaled, _beside_the_model, _states_from_the_start,
    _optimizers_anew, _sums_unseen, _averages, _loaded_after_a_write, _assigned_parameters, _chunked,
    _part_unsynced,
)  # fmt: skip


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


STAGES = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "offloaded": {"stage": 2, "offload_optimizer": "cpu"},
    "small ones whole": {"param_persistence_threshold": 40},
}
LOWERED = (
    _policies,
    _frozen,
    _scaled,
    _written,
    _assigned,
    _roots,
    _states_from_the_start,
    _optimizers_anew,
    _sums_unseen,
    _averages,
    _loaded_after_a_write,
    _chunked,
    _part_unsynced,
)


def _at_stages(rank, ranks, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for stage, options in {"stage 3": {}, **STAGES}.items():
        fsdp.configure(**options)
        for program in LOWERED if options else ():
            found[stage, program.__name__] = program(fsdp, rank)
        model = wrapped(fsdp, mp_policy=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        if not options:
            steps(model, optimizer, rank)
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if not options:
            dcp_save(state, checkpoint_id=folder)
        dcp_load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found[stage, "loaded"] = steps(model, optimizer, rank, 4, 6), states(model, optimizer)
        with torch.no_grad():
            model.norm.bias.fill_(7.0)
        before = loss_of(model, rank, 6).item()
        dcp_load({"model": {"norm.bias": model.state_dict()["norm.bias"]}}, checkpoint_id=folder)  # one rank alone has elements
        found[stage, "loaded"][0].append((before, loss_of(model, rank, 6).item()))
    return found


@pytest.fixture(scope="module")
def at_stages(tmp_path_factory):
    return run_processes(_at_stages, 2, str(tmp_path_factory.mktemp("stages")), timeout_s=180)


@pytest.mark.processes
@pytest.mark.parametrize("program", ["loaded", *(program.__name__ for program in LOWERED)])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_show_their_masters_at_every_stage(beside, at_stages, stage, program):
    for expected, found in zip(beside, at_stages, strict=True):
        if program == "loaded":
            check_equal(found[stage, program], found["stage 3", program])
            continue
        check_equal(found[stage, program], expected[program]["torch"])
        if stage in ("stage 1", "stage 2"):  # cut as at stage 3: the same bits
            assert found[stage, program][0] == expected[program]["zeroshard"][0]


def _kept(rank, ranks):
    """Number of gathers of a forward and backward, a step, a write at rest, the next forward, and the one after; and bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fsdp.configure(stage=2)
    model = wrapped(fsdp, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def write():
        with torch.no_grad():
            model.head.weight.mul_(2)

    counts = []
    for act in (
        lambda: loss_of(model, rank, 0).backward(), optimizer.step, write, lambda: loss_of(model, rank, 0), lambda: loss_of(model, rank, 1)
    ):  # fmt: skip
        act()
        traffic = engine_of(model).snapshot().traffic
        counts.append(traffic["gather"].count if "gather" in traffic else 0)
    assert isinstance(model.head.weight, ShardedParameter) and model.head.weight.dtype == torch.float32
    report = zs.report(model)
    return counts, len(engine_of(model).snapshot().groups), report.formula["parameters"], report.at_rest["parameters"]


@pytest.mark.processes
def test_wholes_that_ranks_keep_are_gathered_after_writes_alone():
    numel = sum(param.numel() for param in net().parameters())
    for counts, groups, formula, held in run_processes(_kept, 2):
        assert counts == [0, groups, groups, groups + 1, groups + 1]
        assert formula == 2 * numel <= held


def _counted(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fsdp.configure(map_shared=False)

    def count(model):
        traffic = engine_of(model).snapshot().traffic
        return traffic["gather"].count, traffic["reduce"].count, engine_of(model).snapshot().notes

    return _chunked(fsdp, rank, count)


@pytest.mark.processes
def test_a_loss_in_chunks_gathers_and_reduces_its_head_once():
    for counts in run_processes(_counted, 2):
        (gathers, reductions, notes), *more = counts
        assert reductions == 4 and gathers <= 8 and not notes  # two blocks, the rest, the head
        assert [(each[0], each[1]) for each in more] == [(gathers * 2, 8), (gathers * 3, 12)]


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
    for seeds, stage in (((5, 6), 3), ((5, 5), 3), ((5, 6), 1)):
        fsdp.configure(stage=stage)
        model = wrapped(fsdp, net("meta"))
        torch.manual_seed(seeds[rank])
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model.scale.fill_(1.0)
        found[seeds, stage] = steps(model, optimizer, 0)
    return found


@pytest.mark.processes
def test_ranks_may_have_other_seeds():
    first, second = run_processes(_seeds, 2)
    assert first == second and first[(5, 6), 3] == first[(5, 5), 3] == first[(5, 6), 1]


def test_ranks_that_are_threads_of_torch_draw_parameters_alike():
    """They share a generator of their process, from which they draw in any order."""
    _install_threaded_pg()
    store, failed = dist.HashStore(), []

    def run(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=2, store=store)
            model = wrapped(fsdp, net("meta"))
            model.to_empty(device="cpu")
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            model.scale.fill_(1.0)
            steps(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0, 1)  # ranks compare what they have written
        except BaseException as error:
            failed.append(error)
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    assert not failed, failed


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


def _cut_by_tensor_parallelism(rank, ranks, sizes, names, dims, folder):
    """A model of DTensors. dims: of a mesh of all axes, over which parameters and activations lie then; None: the mesh is given by parts.

    The optimizer is made before the model's first use. What torch.distributed.checkpoint has saved is loaded.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    along_data, whole = [Shard(0)] * (len(sizes) - 1), [Replicate()] * (len(sizes) - 1)  # the last axis is tp

    def program(door):
        torch.manual_seed(3)
        model, found = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False)), []
        if dims is None:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            options = {"mesh": mesh["dp"]}
        else:
            options = {"mesh": mesh, "dp_mesh_dims": torch_fsdp.DataParallelMeshDims(**dims)}
            for layer, dim in ((model[0], 0), (model[2], 1)):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [*whole, Shard(dim)]))
        for layer in (model[0], model[2], model):
            door.fully_shard(layer, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(3):
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * step + rank // 2))
            if dims is None:
                out = model(rows)
            else:
                batch = DTensor.from_local(rows, mesh, [*along_data, Replicate()])
                out = model(batch).redistribute(placements=[*along_data, Replicate()]).to_local()
            loss = out.pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), 0.0))
        state, name = get_model_state_dict(model), next(name for name in DOORS if DOORS[name] is door)
        dcp_save(state, checkpoint_id=f"{folder}/{name}")
        for other in ("torch", name):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            dcp_load(state, checkpoint_id=f"{folder}/{other}")
            set_model_state_dict(model, state)
        return found, {"model": get_model_state_dict(model, options=FULL)}

    return {name: program(door) for name, door in DOORS.items()}


MESHES = [
    ((2, 2), ("dp", "tp"), None),
    ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    ((2, 1, 2), ("outer", "inner", "tp"), {"shard": "inner", "replicate": "outer"}),
    ((1, 2, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
]


@pytest.mark.processes
@pytest.mark.skipif(fsdp.DataParallelMeshDims is None, reason="torch has DataParallelMeshDims since 2.13")
@pytest.mark.parametrize(("sizes", "names", "dims"), MESHES)
def test_tensor_parallelism_beside_the_door(sizes, names, dims, tmp_path):
    for results in run_processes(_cut_by_tensor_parallelism, 4, sizes, names, dims, str(tmp_path), timeout_s=240):
        check_equal(results["zeroshard"], results["torch"])


def test_flattened_and_unflattened_axes_are_joined_as_they_are():
    """FSDP2 shards over the axis that it is given: of replicas and shards flattened, over all of these."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())

    def made(names, *given):
        found = _with_axes_of(given)
        assert found.mesh_dim_names == names
        return found.mesh.tolist()

    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    flat = root["replicate", "shard"]._flatten("dp")
    assert made(("dp", "tp"), flat, root["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made(("replicate", "shard", "tp"), root["replicate", "shard"], root["tp"]) == root.mesh.tolist()
    assert made(("shard", "tp"), root["shard"], root["tp"]) == [[0, 1], [2, 3]]
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))._unflatten(0, (2, 2, 2), ("dp", "cp", "tp"))
    assert made(("dp", "tp"), world["dp"], world["tp"]) == [[0, 1], [4, 5]]
    with pytest.raises(zs.ConfigError, match=r"axes \('all',\) given to fully_shard overlap .* such as mesh\['dp'\]"):
        _with_axes_of([root["shard", "tp"]._flatten("all"), root["tp"]])


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


def _checkpoints_of_two(rank, ranks, folder, saves):
    """A list of optimizers saved by torch.distributed.checkpoint, and loaded by another number of ranks; then by zs.save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for name in ("dcp", "zs"):
        model = wrapped(fsdp)
        optimizers = divided(model)
        if saves:
            _all_steps(model, optimizers, range(3))
        if name == "zs":
            (zs.save if saves else zs.load)(f"{folder}/zs", model, optimizers)
        else:
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizers)}
            (dcp_save if saves else dcp_load)(state, checkpoint_id=f"{folder}/dcp")
            if not saves:
                set_model_state_dict(model, state["model"])
                set_optimizer_state_dict(model, optimizers, state["optimizer"])
        found.append(_all_steps(model, optimizers, range(3, 5)))
        zs.close(model)
    return found


def _all_steps(model, optimizers, numbers):
    losses = []
    for number in numbers:
        loss = loss_of(model, 0, number)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_checkpoints_of_two_optimizers(tmp_path):
    saved = run_processes(_checkpoints_of_two, 2, str(tmp_path), True)
    for found in run_processes(_checkpoints_of_two, 3, str(tmp_path), False):
        for mine, its in zip(found, saved[0], strict=True):
            assert mine == pytest.approx(its, abs=1e-6, rel=1e-6)


@pytest.mark.processes
def test_checkpoints_go_both_ways_and_to_other_world_sizes(tmp_path):
    run_processes(_checkpoints, 2, str(tmp_path), True)
    for found in run_processes(_checkpoints, 3, str(tmp_path), False):
        expected = found["torch", "torch", False]
        for case, got in found.items():
            for mine, its in zip(got, expected, strict=True):
                assert mine == pytest.approx(its, abs=2e-6, rel=1e-5), case


class Cut(nn.Module):
    """Layers that tensor parallelism cuts by rows and by columns, one unevenly, and a norm that it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(12, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 7)

    def forward(self, words):
        return self.head(self.down(torch.tanh(self.up(self.norm(self.words(words))))))


def _cut(door, sizes, device="cpu"):
    """The model over a mesh of (dp,) or (dp, tp)."""
    mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)]), Cut().to(device)
    if len(sizes) > 1:
        styles = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
        plan = {"words": styles[1], "up": ColwiseParallel(), "down": RowwiseParallel(), "head": styles[0]}
        parallelize_module(model, mesh["tp"], plan)
    for layer in (model.norm, model.up, model.down, model.head, model):
        door.fully_shard(layer, mesh=mesh["dp"])
    return model


def _losses(model, optimizer, sizes, numbers):
    """Train; return the losses of all data-parallel ranks. Of each batch a rank has its part."""
    place, size, found = dist.get_rank() * sizes[0] // dist.get_world_size(), 4 // sizes[0], []
    for number in numbers:
        words = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(number))[place * size :][:size]
        loss = model(words).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total.item() / dist.get_world_size())
    return found


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
WRITES = [(name, sizes, kind) for name in DOORS for sizes in ((2, 2), (4,)) for kind in OPTIMIZERS]


def _cut_checkpoints(rank, ranks, folder, writes, loads):
    """Train and save, each of `writes`; then load, each of `loads`: (what was written, name of a door, sizes). Return losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for given in [*((each, each[0], each[1]) for each in writes), *loads]:
        (name, sizes, kind), reader, mine = given
        torch.manual_seed(3 if given[0] in writes else rank)
        model = _cut(DOORS[reader], mine)
        optimizer, path = OPTIMIZERS[kind](model.parameters()), f"{folder}/{name} {sizes} {kind}"
        if given not in loads:
            _losses(model, optimizer, mine, range(3))
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if given not in loads:
            dcp_save(state, checkpoint_id=path)
        else:
            dcp_load(state, checkpoint_id=path)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found[given] = _losses(model, optimizer, mine, range(3, 6))
    return found


@pytest.mark.processes
@pytest.mark.limit(240)
def test_checkpoints_of_what_tensor_parallelism_cuts(tmp_path):
    """Both ways between FSDP2 and the door, and between meshes of (dp, tp): 2 x 2, 4 x 1, 1 x 4; then by two ranks without tp."""
    loads = [(each, name, (2, 2)) for each in WRITES for name in DOORS if each[0] != name]
    loads += [(("torch", (2, 2), "AdamW"), "zeroshard", (1, 4)), (("zeroshard", (2, 2), "SGD"), "torch", (4,))]
    found = run_processes(_cut_checkpoints, 4, str(tmp_path), WRITES, loads, timeout_s=240)[0]
    fewer = [(each, name, (2,)) for each in WRITES if each[1] == (2, 2) for name in DOORS if "zeroshard" in (each[0], name)]
    found |= run_processes(_cut_checkpoints, 2, str(tmp_path), [], fewer, timeout_s=240)[0]
    for given, losses in found.items():
        expected = found[("torch", (2, 2), given[0][2]), "torch", (2, 2)]
        assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6), given


def _cut_parameters(rank, ranks, folder):
    """What programs ask of parameters that tensor parallelism cuts, and of their states, at stages 3 and 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, wholes = dist.new_group(backend="gloo"), {}
    along_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    shapes = [param.shape for param in Cut().parameters()]
    torch.manual_seed(5)  # of rank 0
    drawn = [nn.init.trunc_normal_(torch.empty(shape), std=shape[0]) for shape in shapes]
    for stage in (3, 0):
        fsdp.configure(stage=stage)
        model = _cut(fsdp, (2, 2), "meta")
        model.to_empty(device="cpu")
        torch.manual_seed(5 + rank)
        for param, value in zip(model.parameters(), drawn, strict=True):
            nn.init.trunc_normal_(param.data, std=param.shape[0])
            if param.device_mesh.ndim == 2:  # the norm's are not over tp
                assert param.device_mesh.mesh_dim_names == ("dp", "tp") and len(param.placements) == 2
            assert torch.equal(param.full_tensor(), value) and param.numel() == value.numel()
        assert model.down.weight.placements == (Shard(0), Shard(1)) and model.down.bias.placements == (Shard(0), Replicate())
        optimizer, weight = torch.optim.AdamW(model.parameters(), lr=0.02), model.up.weight
        _losses(model, optimizer, (2, 2), range(2))
        wholes[stage] = expected = states(model, optimizer)
        model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        grad = zs.gradient_of(weight).full()
        assert grad.shape == weight.shape == (8, 6) and torch.equal(weight.grad.full_tensor(), grad)
        weight.grad = 2 * grad
        assert torch.equal(weight.grad.full_tensor(), 2 * grad)
        for shape in ((6, 8), (4, 6), (3,)):
            with pytest.raises(zs.ModelChanged, match=r"expected the parameter's, \(8, 6\)"):
                weight.grad = torch.zeros(shape)
        for part in (zs.value_of(weight), zs.gradient_of(weight), zs.state_of(weight, "exp_avg")):
            before = part.full()
            part.set_local(2 * part.local())
            assert torch.equal(part.full(), 2 * before), part.what
        optimizer.zero_grad()
        optimizer.state[weight]["seen"] = torch.ones(1)  # for the parameter, not for its elements
        assert zs.state_of(weight, "seen").full().tolist() == [1.0]
        del optimizer.state[weight]["seen"]
        with pytest.raises(zs.ConfigError, match=r"expected a tensor of the parameter's shape \(8, 6\), got \(6, 8\)"):
            optimizer.state[weight]["exp_avg"] = grad.view(6, 8)
        zs.state_of(weight, "exp_avg").set_full(grad)
        optimizer.state[weight]["exp_avg_sq"] = grad.square()
        assert torch.equal(zs.state_of(weight, "exp_avg").full(), grad)
        assert torch.equal(optimizer.state[weight]["exp_avg_sq"].full_tensor(), grad.square())
        with torch.no_grad():
            weight.copy_(grad).mul_(2).add_(torch.ones(6))
            assert torch.equal(weight.full_tensor(), 2 * grad + 1)
            cut, other = (distribute_tensor(each, along_tp, [Shard(0)]) for each in (grad, torch.ones(8)))
            with mock.patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered")):
                weight.add_(cut).sub_(cut)
                with pytest.raises(zs.ShardedAccessError, match=r"broadcasts to \(8, 6\), got \(8,\)"):
                    weight.add_(other)
            assert all(param.norm().device_mesh == param.device_mesh for param in model.parameters())
            assert torch.equal(weight[3], 2 * grad[3] + 1) and weight.view(-1).shape == (48,) and weight.isfinite().all()
            zs.value_of(weight).set_full(grad)
            assert torch.equal(zs.value_of(weight).full(), grad)
        for options in (FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
            given = [dict(expected["model"]), get_optimizer_state_dict(model, optimizer, options=FULL)]
            for name, state in given[1]["state"].items():
                state.update(expected[f"optimizer {name}"])
            if rank and options is not FULL:
                given = [{}, {}]
            set_model_state_dict(model, given[0], options=options)
            set_optimizer_state_dict(model, optimizer, given[1], options=options)
            check_equal(([], states(model, optimizer)), ([], expected))
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        saving = async_save(state, checkpoint_id=f"{folder}/{stage}", process_group=group)
        writer = HuggingFaceStorageWriter(f"{folder}/hf{stage}", save_distributed=True, enable_consolidation=True)
        dcp_save(state["model"], storage_writer=writer)
        _losses(model, optimizer, (2, 2), range(2))
        saving.result()
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp_load(state, checkpoint_id=f"{folder}/{stage}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        check_equal(([], states(model, optimizer)), ([], expected))
        dist.barrier()
        files = [load_file(path) for path in sorted(Path(f"{folder}/hf{stage}").glob("*.safetensors"))]
        assert {name for file in files for name in file} == expected["model"].keys()
        for name, value in ((name, value) for file in files for name, value in file.items()):
            assert torch.equal(value, expected["model"][name]), name
        model.load_state_dict(_cut(torch_fsdp, (2, 2)).state_dict())  # of DTensors
        zs.close(model)
        assert isinstance(model.up.weight, DTensor)
    return wholes


@pytest.mark.processes
@pytest.mark.limit(120)
def test_parameters_that_tensor_parallelism_cuts_show_the_whole(tmp_path):
    for found in run_processes(_cut_parameters, 4, str(tmp_path), timeout_s=120):
        check_equal(([], found[0]), ([], found[3]))


def _cut_otherwise(rank, ranks):
    """Two weights of one shape and equal ranges, of which ranks along tp have rows of one and columns of the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for stage in (3, 0):
        fsdp.configure(stage=stage)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
        for layer in (*model, model):
            fsdp.fully_shard(layer, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        rows, columns, others = model.parameters()
        before = [param.full_tensor() for param in (rows, columns)]
        moved = copy.deepcopy(optimizer.state_dict())
        moved["state"][0], moved["state"][1] = moved["state"][1], moved["state"][0]
        uses = [
            lambda: rows * columns,
            lambda: rows.detach().copy_(columns.detach()),
            lambda: torch._foreach_mul_([rows.detach()], [columns.detach()]),
        ]
        if stage == 3:  # at stage 0 gradients and states are DTensors, which torch cuts anew
            uses += [
                lambda: setattr(rows, "grad", columns.grad),
                lambda: optimizer.load_state_dict(moved),
                lambda: optimizer.state[rows].__setitem__("exp_avg", optimizer.state[columns]["exp_avg"]),
            ]
        for use in uses:
            with pytest.raises(zs.ShardedAccessError, match=r"\(4, 4\) and .* \(4, 4\) are cut differently"):
                use()
        assert torch.equal((rows * others).full_tensor(), before[0] * others.full_tensor())
        assert all(torch.equal(param.full_tensor(), value) for param, value in zip((rows, columns), before, strict=True))
        zs.close(model)


@pytest.mark.processes
def test_weights_that_tensor_parallelism_cuts_otherwise_are_not_taken_for_alike():
    run_processes(_cut_otherwise, 2, timeout_s=120)


def _parts_apart(rank, ranks, options):
    """What FSDP2 and the door do with the gradients of a unit that is held back alone, and with unshard() before the first forward."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    fsdp.configure(**options)
    found = {}
    for name, door in DOORS.items():
        model = wrapped(door)
        model.unshard()
        model.blocks[0].unshard()
        numbers = found[name] = [loss_of(model, rank, 0).item()]
        for resumes_after_backward in (True, False):
            model, part = (made := wrapped(door)), made.blocks[0]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            part.set_requires_gradient_sync(False)
            for batch in range(2):
                loss_of(model, rank, batch).backward()
                if resumes_after_backward:
                    optimizer.step()
                    optimizer.zero_grad()
            part.set_requires_gradient_sync(True)
            if resumes_after_backward:
                loss_of(model, rank, 2).backward()
            else:
                assert part.up.weight.grad is None
            numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())
            optimizer.step()
            numbers.append(sum(param.full_tensor().square().sum().item() for param in model.parameters()))
        # torchtitan's loss in chunks with micro-batches: held back over gradients that are reduced already
        model, part = (made := wrapped(door)), made.blocks[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for to_none in (True, False):
            for batch in range(3):
                part.set_requires_gradient_sync(batch != 1)
                loss_of(model, rank, batch).backward()
                if batch == 1:
                    numbers.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())
                    numbers.append(part.up.weight.grad.full_tensor().norm().item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            numbers.append(sum(param.full_tensor().square().sum().item() for param in model.parameters()))
        if door is fsdp:
            finalized, usual = wrapped(door), wrapped(door)
            finalized.set_manual_backward_finalization(True)
            finalized.finalize_backward()  # before the first forward it does nothing
            for batch in range(2):  # as torch 2.15 has it: held back, and reduced by a call of its own
                finalized.set_requires_gradient_sync(False)
                loss_of(finalized, rank, batch).backward()
                finalized.finalize_backward()
                assert all(param.grad is None for param in finalized.parameters())
                usual.set_requires_gradient_sync(batch == 1)
                loss_of(usual, rank, batch).backward()
            finalized.set_requires_gradient_sync(True)
            finalized.finalize_backward(async_op=True).wait()
            for one, other in zip(finalized.parameters(), usual.parameters(), strict=True):
                assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
            part.set_requires_gradient_sync(False)
            loss_of(model, rank, 3).backward()
            optimizer.zero_grad()
            assert part.up.weight.grad is None
            part.set_requires_gradient_sync(True)
            model.finalize_backward()
            assert part.up.weight.grad.full_tensor().any() and model.head.weight.grad is None
            finalized.set_keep_unsharded_storage(False)
            with pytest.raises(zs.ConfigError, match=r"does not serve set_keep_unsharded_storage.*configure\(stage=2\)"):
                finalized.set_keep_unsharded_storage(True)
            places = set()
            hook = part.register_forward_hook(lambda module, *_: places.add(module.up.weight.data_ptr()))
            for batch in range(2):  # the remedy of that error
                loss_of(model, rank, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            hook.remove()
            assert len(places) == 1 or options != {"stage": 2}
    return found


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"map_shared": False}, {"stage": 2}, {"stage": 1}], ids=str)
def test_a_unit_that_is_held_back_alone_waits_for_its_own_reduction(options):
    found = run_processes(_parts_apart, 2, options, timeout_s=120)[0]
    assert found["zeroshard"] == pytest.approx(found["torch"], rel=1e-6)


class Fused(nn.Linear):
    """A matrix that state dicts show as two, of other rows each, as torchtitan's fused attention does."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 4 * 3, bias=False)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._merge)

    @staticmethod
    def _split(module, state, prefix, metadata):
        whole = state.pop(f"{prefix}weight")
        whole = whole.redistribute(placements=[Replicate()]) if isinstance(whole, DTensor) else whole
        rows = whole.reshape(2, 2, 3, module.in_features)
        state[f"{prefix}q"] = rows[:, :1].reshape(-1, module.in_features).contiguous()
        state[f"{prefix}k"] = rows[:, 1].reshape(-1, module.in_features).contiguous()

    @staticmethod
    def _merge(module, state, prefix, *args):
        parts = [state.pop(f"{prefix}{name}") for name in "qk"]
        if isinstance(parts[0], DTensor):
            parts = [part.redistribute(placements=[Replicate()]) for part in parts]
        rows = [part.reshape(2, 1, 3, module.in_features) for part in parts]
        state[f"{prefix}weight"] = torch.cat(rows, dim=1).reshape(-1, module.in_features)


def _fused(rank, ranks, folder):
    """State dicts whose entries hooks cut and join, and what programs ask of a parameter at rest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, door in DOORS.items():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 7), Fused(7))
        door.fully_shard(model[1])
        door.fully_shard(model)
        state = model.state_dict()
        dcp_save({"model": state}, checkpoint_id=f"{folder}/{name}")
        weight = model[0].weight
        penalty = torch.linalg.norm(weight, dim=1).sum() + weight.norm()
        penalty.backward()
        with torch.no_grad():
            asked = [weight[:, 2], weight.t().sum(0), torch.linalg.norm(weight, dim=0), weight.grad]
            asked = [each.full_tensor() if hasattr(each, "full_tensor") else each + 0 for each in asked]
            kept = {key: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for key, value in state.items()}
            for param in model.parameters():
                param.zero_()
        state = model.state_dict()
        dcp_load({"model": state}, checkpoint_id=f"{folder}/{name}")
        model.load_state_dict(state)
        again = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in model.state_dict().items()
        }
        found[name] = kept, again, asked
        if name == "zeroshard":
            storage = weight.detach().untyped_storage()
            assert storage.data_ptr() == model.state_dict()["0.weight"].untyped_storage().data_ptr()
            with pytest.raises(zs.ShardedAccessError, match="this rank holds a slice"):
                storage.nbytes()
            view = weight.detach()[:, 2]
            assert type(copy.deepcopy(view)) is torch.Tensor
            with pytest.raises(
                zs.ShardedWriteError, match=r"would write to a copy of 0.weight.*zs.gathered\(module, write=True\)"
            ):
                view.fill_(1.0)
            with pytest.raises(zs.ShardedWriteError, match="would write to a copy"):
                weight.detach()[:, 2] = 1.0
            assert type(view.contiguous()) is torch.Tensor
    return found


@pytest.mark.processes
def test_state_dicts_may_be_cut_and_joined_by_hooks(tmp_path):
    for found in run_processes(_fused, 2, str(tmp_path)):
        for name in DOORS:
            kept, again, _ = found[name]
            assert kept.keys() == again.keys() == {"0.weight", "0.bias", "1.q", "1.k"}
            for key, value in kept.items():
                assert torch.equal(value, again[key]) and torch.equal(value, found["torch"][0][key]), key
        for mine, its in zip(found["zeroshard"][2], found["torch"][2], strict=True):
            torch.testing.assert_close(mine, its)


def _stagers():
    plain = dict.fromkeys(("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"), False)
    return {
        "default": (AsyncCheckpointerType.THREAD, lambda: None),
        "blocking": (AsyncCheckpointerType.THREAD, BlockingAsyncStager),
        "in a thread": (
            AsyncCheckpointerType.THREAD,
            lambda: DefaultStager(StagingOptions(**{**plain, "use_async_staging": True})),
        ),
        "in a process": (
            AsyncCheckpointerType.PROCESS,
            lambda: DefaultStager(StagingOptions(**{**plain, "use_shared_memory": True})),
        ),
    }


def _async_saves(rank, ranks, folder, stagers):
    """Save while training goes on; load what was saved. Its values are those of the call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, found = dist.new_group(backend="gloo"), {}
    for name in stagers:
        kind, stager = _stagers()[name]
        for policy in ({}, {"mp_policy": BF16}):
            model = wrapped(fsdp, **policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            steps(model, optimizer, rank, 0, 2)
            expected, path = states(model, optimizer), f"{folder}/{name} {len(policy)}"
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            saving = async_save(
                state, checkpoint_id=path, process_group=group, async_checkpointer_type=kind, async_stager=stager()
            )
            steps(model, optimizer, rank, 2, 4)
            getattr(saving, "upload_completion", saving).result()
            assert not torch.equal(get_model_state_dict(model, options=FULL)["head.weight"], expected["model"]["head.weight"])
            model = wrapped(fsdp, **policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp_load(state, checkpoint_id=path)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            found[path] = expected, states(model, optimizer)
    return found


def check_saves(found, number) -> None:
    assert len(found) == 2 * number
    for path, (expected, loaded) in found.items():
        assert expected.keys() == loaded.keys()
        for kind, values in expected.items():
            for name, value in values.items():
                assert torch.equal(loaded[kind][name], value), (path, kind, name)


@pytest.mark.processes
def test_async_saves_have_the_values_of_the_call(tmp_path):
    stagers = [name for name in _stagers() if name != "in a process"]
    for found in run_processes(_async_saves, 2, str(tmp_path), stagers):
        check_saves(found, len(stagers))


PROCESS = """
import os, sys
if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    from test_fsdp import _async_saves, check_saves
    check_saves(_async_saves(int(os.environ["RANK"]), 2, sys.argv[1], ["in a process"]), 1)
    print("equal", flush=True)
"""


@pytest.mark.processes
def test_async_saves_of_a_process(tmp_path):  # torch starts it by the file that is run
    (tmp_path / "save.py").write_text(PROCESS)
    own = os.path.dirname(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "save.py")]
    command += [str(tmp_path), own, os.path.join(own, "../support")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stderr


def _safetensors(rank, ranks, folder):
    """A folder of torch's safetensors, which have one box of a tensor for each rank; read by the other door."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, door in DOORS.items():
        model = wrapped(door)
        steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), 0, 0, 1)
        writer = HuggingFaceStorageWriter(f"{folder}/{name}", save_distributed=True, enable_consolidation=True)
        dcp_save(get_model_state_dict(model), storage_writer=writer)
        found[name] = get_model_state_dict(model, options=FULL), dict(wrapped(door).state_dict())
    for name, other in (("torch", "zeroshard"), ("zeroshard", "torch")):
        model = wrapped(DOORS[other])
        state = get_model_state_dict(model)
        dcp_load(state, storage_reader=HuggingFaceStorageReader(f"{folder}/{name}"))
        set_model_state_dict(model, state)
        found[name] = found[name][0], get_model_state_dict(model, options=FULL)
    state = get_model_state_dict(wrapped(fsdp))
    writer = HuggingFaceStorageWriter(f"{folder}/async", save_distributed=True)
    with pytest.raises(zs.CheckpointError, match="dcp.async_save.*to safetensors.*full_state_dict=True"):
        async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo")).result()
    return found


@pytest.mark.processes
def test_safetensors_of_torch_go_both_ways(tmp_path):
    for rank, found in enumerate(run_processes(_safetensors, 2, str(tmp_path))):
        for name, (expected, loaded) in found.items():
            whole = load_file(tmp_path / name / "model-00001-of-00001.safetensors")
            assert expected.keys() == loaded.keys() == whole.keys()
            for key, value in expected.items():
                assert torch.equal(value, loaded[key]) and torch.equal(value, whole[key]), (rank, name, key)


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


def test_conversions_before_the_first_use_may_exchange_parameters():
    model = wrapped(fsdp)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(param.to_local().dtype == torch.float64 for param in model.parameters())


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


def test_optimizers_of_parts_that_a_later_one_joins():
    """The first knows only one of two roots; the second has parameters of both, which become one model."""
    one, other = wrapped(fsdp), wrapped(fsdp)
    first = torch.optim.SGD(one.blocks.parameters(), lr=0.1)
    rest = [param for name, param in one.named_parameters() if not name.startswith("blocks.")]
    second = torch.optim.SGD([*rest, *other.parameters()], lr=0.1)
    before = one.blocks[0].up.weight.full_tensor(), other.head.weight.full_tensor()
    (loss_of(one, 0, 0) + loss_of(other, 0, 0)).backward()
    for optimizer in (second, first):  # neither drops the other's gradients
        optimizer.step()
        optimizer.zero_grad()
    assert first.last_step.grad_norm > 0
    for param, value in zip((one.blocks[0].up.weight, other.head.weight), before, strict=True):
        assert param.grad is None and not torch.equal(param.full_tensor(), value)


def test_copies_of_state_dicts_are_gone_back_to():
    model = wrapped(fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, 0, 0, 2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert list(kept[1]["state"]) == list(range(len(list(model.parameters()))))
    found = steps(model, optimizer, 0, 2, 4)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    assert steps(model, optimizer, 0, 2, 4) == found
    with pytest.raises(zs.ShardedAccessError, match="can not be deep-copied"):
        copy.deepcopy(model.head.weight)


def test_a_forward_inside_of_gathered_computes_as_any():
    model = wrapped(fsdp, mp_policy=BF16)
    expected = loss_of(model, 0, 0).item()
    with zs.gathered(model), torch.no_grad():
        assert loss_of(model, 0, 0).item() == expected
    with pytest.raises(zs.ModelChanged, match="was converted from torch.float32"):
        model.embedding.weight.data = model.embedding.weight.data.half()


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


def test_parameters_that_the_program_keeps_are_saved_and_loaded_and_follow_conversions(tmp_path):
    def kept_apart(device="cpu"):
        model = net(device)
        wrapped(fsdp, model, ignored_params={model.norm.weight, model.blocks[1].down.weight})
        return model

    model = kept_apart()
    loss_of(model, 0, 0).backward()
    names = {name for unit in engine_of(model).slices("value") for name in unit.names}
    assert {"norm.weight", "blocks.1.down.weight"}.isdisjoint(names) and model.norm.weight.grad is not None
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    zs.save(tmp_path / "checkpoint", model)
    zs.save_safetensors(model, tmp_path / "model.safetensors")
    for path in ("checkpoint", "model.safetensors"):
        other = kept_apart("meta")
        other.to_empty(device="cpu")
        assert type(other.norm.weight) is nn.Parameter and not other.norm.weight.is_meta
        zs.load(tmp_path / path, other)
        assert torch.equal(other.norm.weight, model.norm.weight)
        assert all(
            torch.equal(a, b) for a, b in zip(*(zs.full_state_dict(each).values() for each in (model, other)), strict=True)
        )
    given = zs.full_state_dict(model)
    other = kept_apart("meta")
    other.load_state_dict(given, assign=True)
    assert torch.equal(other.norm.weight, given["norm.weight"]) and loss_of(other, 0, 0) == loss_of(model, 0, 0)
    assert other.norm.weight.not_sharded is True
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"size mismatch for norm.weight: .* torch.Size\(\[5, 5\]\)"):
            other.load_state_dict({**given, "norm.weight": torch.ones(5, 5)}, assign=assign)
    alone = nn.Linear(2, 2)
    fsdp.fully_shard(alone, ignored_params=(param for param in alone.parameters()))
    alone(torch.ones(1, 2)).sum().backward()
    assert alone.half().weight.grad is not None and alone.weight.dtype == torch.float16


def test_conversions_that_exchange_parameters_keep_those_of_the_program_whole():
    model = net()
    wrapped(fsdp, model, ignored_params={model.norm.weight})
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    loss_of(model, 0, 0).backward()
    assert type(model.norm.weight) is nn.Parameter and isinstance(model.norm.bias, ShardedParameter)


def test_state_dicts_without_sharded_tensors_are_staged_by_torch():
    given = nn.Linear(2, 2).state_dict()
    options = dict.fromkeys(("use_async_staging", "use_pinned_memory", "use_shared_memory", "use_non_blocking_copy"), False)
    staged = DefaultStager(StagingOptions(**options)).stage(given)
    assert type(staged) is type(given) and all(torch.equal(staged[name], value) for name, value in given.items())


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


def _mistake_late_tie():
    model = wrapped(fsdp, Net(words=9))
    torch.optim.AdamW(model.parameters())
    model.head.weight = model.embedding.weight
    model(torch.zeros(1, 4, dtype=torch.long))


def _mistake_late_replacement():
    model = wrapped(fsdp)
    loss_of(model, 0, 0)
    model.head.weight = nn.Parameter(torch.ones(11, 9))
    loss_of(model, 0, 0)


def _mistake_late_module():
    model = wrapped(fsdp)
    model.state_dict()
    model.head = nn.Linear(9, 11)
    loss_of(model, 0, 0)


def _mistake_unfrozen():
    model = net()
    model.blocks[0].requires_grad_(False)
    loss_of(wrapped(fsdp, model), 0, 0)
    model.blocks[0].requires_grad_(True)
    loss_of(model, 0, 0)


def _named_dims(**dims):
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int), mesh_dim_names=("dp", "cp"), _init_backend=False, _rank=0)
    fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(**dims))


MISTAKES = {
    _mistake_twice: "fully_shard has already been applied to this FSDPNet. .* the root at last",
    _mistake_container: "containers that do not implement forward: ModuleList. Call it on the items",
    _mistake_late_root: "FSDPBlock, a part of this module, has run a forward as a model of its own: call fully_shard on the whole model",
    _mistake_list_alone: r"fully_shard\(\[FSDPLayerNorm, FSDPLinear\]\): .* Call fully_shard\(model\) before its first use",
    _mistake_two_models: "this AdamW is given parameters of several models, FSDPNet, FSDPNet, .* make an optimizer for each",
    _mistake_conversion: "parameter weight would be converted from torch.float32 on cpu to torch.float16 .* mp_policy",
    _mistake_no_values: r"still on meta device: .*'embedding.weight'.* Call model.to_empty",
    _mistake_write: r"head.weight: written in place after unshard\(\), .* Write the sharded parameter, before unshard\(\) or after",
    _mistake_late_tie: r"Linear.weight was tied to embedding.weight after the model's first use .* Tie them before it",
    _mistake_late_replacement: r"head.weight was replaced after the model's first use \(a forward, .*: do that before it",
    _mistake_late_module: r"parameter head.weight was replaced, added or removed after the model's first use",
    _mistake_unfrozen: r"blocks.0.up.weight .* frozen at the model's first use: .* freeze it afterwards, at any time: make the optimizer, or call model.state_dict",
    lambda: fsdp.fully_shard(nn.Linear(2, 2), mesh="dp"): "mesh: fully_shard expects a 1D or 2D DeviceMesh but got str",
    lambda: fsdp.fully_shard("model"): "expected an nn.Module or a list of them, got str",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_all_reduce_hook(print): "does not serve set_all_reduce_hook: use a mesh of two axes",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_custom_all_gather(None): "does not serve set_custom_all_gather: register",
    lambda: fsdp.fully_shard(nn.Linear(2, 2)).set_gradient_divide_factor(0): "expected a number above 0, got 0",
    lambda: fsdp.fully_shard(nn.Linear(2, 2))._get_fsdp_state(): "which has no FSDPState",
}  # fmt: skip

if fsdp.DataParallelMeshDims is not None:
    MISTAKES |= {
        lambda: _named_dims(shard="fsdp"): "dp_mesh_dims: Mesh dim name 'fsdp' not found in mesh.mesh_dim_names .'dp', 'cp'",
        lambda: _named_dims(replicate="dp"): r"dp_mesh_dims: replicate=\('dp',\) without shard",
        lambda: _named_dims(shard="dp"): r"the other axes of the mesh cut parameters, and are named of .* got \['cp'\]",
    }


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: getattr(mistake, "__name__", "lambda"))
def test_mistakes_name_the_thing_and_a_remedy(mistake):
    with pytest.raises(zs.ZeroshardError, match=MISTAKES[mistake]):
        mistake()


# -- the command ---------------------------------------------------------------------------------------------


def test_options_of_the_command():
    assert parsed(["--stage", "2", "--help"])[2] == ["--help"]
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
