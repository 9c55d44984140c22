"""Freezing for a phase: `requires_grad` switched after zs.shard is followed by the next backward, as on one process.

What was frozen at zs.shard can not be trained, and ranks must freeze the same: a sentence, and nothing has changed.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from recording_streams import RecordingStreams
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import Stack, adamw, normal_batches, run_threads, same, seeded, sgd

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine.comm.process_group import DistComm

MODES = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "units": "model"}, {"stage": 3, "map_shared": True},
    {"stage": 3, "map_shared": False}, {"stage": 3, "map_shared": False, "overlap": False},
    {"stage": 3, "map_shared": False, "units": "leaf"}, {"stage": 3, "offload_optimizer": "cpu"},
]  # fmt: skip
every_mode = pytest.mark.parametrize("mode", MODES, ids=str)


def freeze(model, *names, on=False):
    for name, param in model.named_parameters():
        if name.startswith(names):
            param.requires_grad_(on)


def nothing(model):
    pass


def a_bias(model):
    model.blocks[1].up.bias.requires_grad = False


def a_block(model):
    model.blocks[1].requires_grad_(False)


def all_but_the_last(model):
    freeze(model, "first", "blocks")


def the_first_and_a_weight(model):
    freeze(model, "first", "blocks.2.down.weight")


def all_again(model):
    model.requires_grad_(True)


# by step: what is done before it
PHASES = {
    "a parameter, then again": [nothing, a_bias, nothing, all_again, nothing],
    "from the first step on": [a_block, nothing, all_again],
    "phases": [all_but_the_last, nothing, the_first_and_a_weight, all_again, a_block, all_again],
}


class Run:
    """A training loop on one rank's model, or on one process for all ranks."""

    def __init__(self, phases, micro=1, local=False, ragged=False, between=False, keep=False, reentrant=None):
        """between: switch between forward and backward, in place of before. keep: zero_grad(set_to_none=False)."""
        self.phases, self.micro, self.local, self.ragged, self.between, self.keep = phases, micro, local, ragged, between, keep
        self.reentrant = reentrant
        self.batches = normal_batches(len(phases) * micro, 2, 3, 7)

    def _loss(self, model, step, micro, rank):
        if self.ragged and rank == 1 and step % 2:
            return model.last(model.first(self.batches[step * self.micro + micro][rank][0])).square().mean()
        (x,) = self.batches[step * self.micro + micro][rank]
        if self.reentrant is None:
            return model(x).square().mean()
        x = model.first(x.clone().requires_grad_(self.reentrant))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return model.last(x).square().mean()

    def backward(self, model, step, micro, rank):
        change = self.phases[step] if micro == 0 else nothing
        if not self.between:
            change(model)
        loss = self._loss(model, step, micro, rank)
        if self.between:
            change(model)
        if loss.requires_grad:
            loss.backward()

    def sharded(self, rank, model, optimizer):
        """Gradients by step."""
        found = []
        for step in range(len(self.phases)):
            for micro in range(self.micro):
                held = self.local and micro < self.micro - 1
                with zs.accumulate(model) if held else contextlib.nullcontext():
                    self.backward(model, step, micro, rank)
            found.append(zs.full_gradients(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.keep)
        return found

    def reference(self, base, make):
        """(gradients by step, state): replicas whose gradients are averaged in rank order."""
        models = [copy.deepcopy(base) for _ in range(2)]
        optimizers = [make(model.parameters()) for model in models]
        found = []
        for step in range(len(self.phases)):
            mean = self._gradients(models, step)
            for model, optimizer in zip(models, optimizers, strict=True):
                for name, param in model.named_parameters():
                    param.grad = None if mean[name] is None else mean[name].clone()
                optimizer.step()
                optimizer.zero_grad(set_to_none=not self.keep)
            found.append(mean)
        return found, models[0].state_dict()

    def _gradients(self, models, step):
        kept = {name: param.grad for name, param in models[0].named_parameters()}  # zeros, or None
        total = dict(kept)
        for micro in range(self.micro):
            parts = []
            for rank, model in enumerate(models):
                for param in model.parameters() if not (self.local and micro) else ():
                    param.grad = None
                self.backward(model, step, micro, rank)
                parts.append({name: param.grad for name, param in model.named_parameters()})
            if self.local and micro < self.micro - 1:
                continue
            for name in total:
                given = [part[name] for part in parts if part[name] is not None]
                if given:
                    mean = sum(given[1:], given[0]) * 0.5
                    total[name] = mean if total[name] is None else total[name] + mean
        return total


def compare(base, run, mode, make=adamw, tolerance=0.0):
    expected, state = run.reference(base, make)

    def rank_run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, make(model.parameters()), **mode)
        found = run.sharded(rank, model, optimizer)
        final = zs.full_state_dict(model, masters=True)
        required = [param.requires_grad for param in model.parameters()]
        zs.close(model)
        assert [param.requires_grad for param in model.parameters()] == required
        return found, final

    for found, final in run_threads(2, rank_run):
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, grad in theirs.items():
                assert (mine[name] is None) == (grad is None), f"step {step}: {name}: {mine[name]} / {grad}"
                if grad is not None:
                    same(mine[name], grad, f"step {step}: {name}", tolerance)
        for name, value in state.items():
            same(final[name], value, name, tolerance)


@every_mode
@pytest.mark.parametrize("phases", PHASES.values(), ids=list(PHASES))
def test_phases_equal_one_process(mode, phases):
    compare(seeded(Stack), Run(phases), mode)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_phases_in_bf16(stage):
    compare(seeded(Stack), Run(PHASES["phases"]), {"stage": stage, "precision": "bf16"}, sgd, 0.03)


@every_mode
@pytest.mark.parametrize("options", [
    {"micro": 2}, {"micro": 3, "local": True}, {"ragged": True}, {"between": True}, {"keep": True}, {"between": True, "micro": 2},
    {"reentrant": False}, {"reentrant": True},
], ids=str)  # fmt: skip
def test_phases_in_other_loops(mode, options):
    """Accumulated, ragged over ranks, switched between forward and backward, with zeros for gradients, recomputed."""
    make = sgd if options.get("keep") else adamw
    compare(seeded(Stack), Run(PHASES["phases"], **options), mode, make)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("held", [False, True])
def test_switched_while_there_are_gradients(stage, held):
    """What was added before stays, and is stepped, as on one process; what comes afterwards goes by the switch."""
    base, batches = seeded(Stack), normal_batches(2, 2, 3, 7)

    def run(rank):
        model, plain = copy.deepcopy(base), copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, map_shared=False)
        with zs.accumulate(model) if held else contextlib.nullcontext():
            model(batches[0][0][0]).square().mean().backward()
        a_block(model)
        model(batches[1][0][0]).square().mean().backward()
        theirs = sgd(plain.parameters())
        plain(batches[0][0][0]).square().mean().backward()
        a_block(plain)
        plain(batches[1][0][0]).square().mean().backward()
        for name, grad in zs.full_gradients(model).items():
            same(grad, plain.get_parameter(name).grad, name, 1e-6)
        optimizer.step()
        theirs.step()
        for name, value in zs.full_state_dict(model).items():
            same(value, plain.get_parameter(name), name, 1e-6)

    run_threads(2, run)


# -- adapters ----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear map with two low-rank adapters of which one is active, as PEFT's: inactive ones do not require gradients."""

    def __init__(self, base):
        super().__init__()
        self.base, self.disabled, self.active = base.requires_grad_(False), False, "one"
        self.lora_a = nn.ModuleDict({name: nn.Linear(base.in_features, 2, bias=False) for name in ("one", "two")})
        self.lora_b = nn.ModuleDict({name: nn.Linear(2, base.out_features, bias=False) for name in ("one", "two")})

    def forward(self, x):
        out = self.base(x)
        return out if self.disabled else out + self.lora_b[self.active](self.lora_a[self.active](x))

    def enable(self, yes):
        self.disabled = not yes
        for layers in (self.lora_a, self.lora_b):
            for name, layer in layers.items():
                layer.requires_grad_(yes and name == self.active)


@contextlib.contextmanager
def disabled(model):
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    for layer in layers:
        layer.enable(False)
    yield
    for layer in layers:
        layer.enable(True)


def adapted():
    model = Stack()
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
        block.norm.requires_grad_(False)
    model.first.requires_grad_(False)
    return model.last.requires_grad_(False) and model


def switch_to(model, name):
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = name
            module.enable(True)


@every_mode
def test_adapters_are_disabled_and_switched(mode):
    """A reference model's output in each step (DPO), and a phase for each adapter."""
    base, batches = seeded(adapted), normal_batches(4, 1, 3, 7)

    def loop(model, optimizer):
        for step, ((x,),) in enumerate(batches):
            if step == 2:
                switch_to(model, "two")
            with disabled(model):
                with torch.no_grad():
                    before = model(x)
                frozen = model(x.clone().requires_grad_())
            loss = (model(x) - before).square().mean() + (model(x) - frozen).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = copy.deepcopy(base)
    loop(plain, sgd(plain.parameters()))
    expected = plain.state_dict()

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd(model.parameters()), **mode)
        loop(model, optimizer)
        return zs.full_state_dict(model, masters=True)

    for state in run_threads(2, run):
        for name, value in expected.items():
            same(state[name], value, name, 1e-6)


@every_mode
def test_a_frozen_adapter_is_switched_on_while_gradients_are_off(mode):
    """The adapter of a teacher, before a forward or between it and its backward; one process is the reference."""
    base, batches = seeded(adapted), normal_batches(4, 2, 3, 7)
    for name, param in base.named_parameters():
        if ".two." in name:
            param.requires_grad_(False)

    def teacher(model, x, calls):
        switch_to(model, "two")
        with calls():
            said = model.blocks[0](model.first(x)) if calls is torch.inference_mode else model(x)
        switch_to(model, "one")
        return said.clone()

    def losses(model, step, rank):
        (x,) = batches[step][rank]
        calls = torch.inference_mode if step == 3 else torch.no_grad
        if step % 2:
            wanted = teacher(model, x, calls)
            return (model(x).sum() - wanted.sum()).square()
        out = model(x)
        return (out - teacher(model, x, calls)).square().mean()

    plain = copy.deepcopy(base)
    stepper = sgd(p for p in plain.parameters() if p.requires_grad)
    for step in range(len(batches)):
        for rank in range(2):
            (losses(plain, step, rank) / 2).backward()
        stepper.step()
        stepper.zero_grad()

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd(p for p in model.parameters() if p.requires_grad), **mode)
        for step in range(len(batches)):
            losses(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        switch_to(model, "two")
        with pytest.raises(zs.ModelChanged, match="lora_a.two.weight was switched on, but it was frozen at zs.shard"):
            model(batches[0][rank][0])
        return zs.full_state_dict(model, masters=True)

    for state in run_threads(2, run):
        for name, value in plain.state_dict().items():
            same(state[name], value, name, 1e-6)


@every_mode
def test_switched_inside_gathered(mode):
    def run(rank):
        model, _ = zs.shard(seeded(Stack), None, **mode)
        with zs.gathered(model):
            a_block(model)
        assert not any(param.requires_grad for param in model.blocks[1].parameters())
        model(torch.ones(2, 7)).sum().backward()
        grads = zs.full_gradients(model)
        assert [name for name, grad in grads.items() if grad is None] == [n for n in grads if n.startswith("blocks.1.")]
        with zs.gathered(model):
            assert not model.blocks[1].up.weight.requires_grad

    run_threads(2, run)


# -- what can not be ---------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("when", ["before the forward", "before the backward"])
def test_what_was_frozen_at_shard_can_not_be_unfrozen(mode, when):
    base = seeded(Stack)
    base.blocks[1].up.weight.requires_grad_(False)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(p for p in model.parameters() if p.requires_grad), **mode)
        message = r"requires_grad of parameter blocks\.1\.up\.weight was switched on, but it was frozen at zs.shard\(\).*zs.close\(model\)"
        loss = model(torch.ones(2, 7)).sum()
        model.blocks[1].up.weight.requires_grad_(True)
        model.last.bias.requires_grad_(False)
        for use in (loss.backward if when == "before the backward" else lambda: None, lambda: model(torch.ones(2, 7))):
            with pytest.raises(zs.ModelChanged, match=message):
                use() or model(torch.ones(2, 7))
        model.blocks[1].up.weight.requires_grad_(False)
        model(torch.ones(2, 7)).sum().backward()
        grads = zs.full_gradients(model)
        assert grads["last.bias"] is None and grads["last.weight"] is not None

    run_threads(2, run)


@every_mode
@pytest.mark.parametrize("held", [False, True])
def test_ranks_that_freeze_other_parameters_are_told(mode, held):
    base = seeded(Stack)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
        before = zs.full_state_dict(model)
        if rank == 1:
            a_bias(model)
        with pytest.raises(zs.ModelChanged, match=r"blocks\.1\.up\.bias is frozen \(requires_grad=False\) on ranks \[1\] alone"):
            with zs.accumulate(model) if held else contextlib.nullcontext():
                model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
        a_bias(model)
        assert all(grad is None for grad in zs.full_gradients(model).values())
        optimizer.zero_grad()
        for name, value in zs.full_state_dict(model).items():
            same(value, before[name], name, 0.0)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        return zs.full_gradients(model)

    for grads in run_threads(2, run):
        assert [name for name, grad in grads.items() if grad is None] == ["blocks.1.up.bias"]


# -- torch.distributed, in the order of collectives too ----------------------------------------------------------


def _train(rank, world_size):
    """(order, stage) -> gradients by step and the final state; and the error where ranks differ."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for ordered in (False, True):
        for stage in (1, 3):
            comm = DistComm(
                None,
                torch.device("cpu"),
                30.0,
                ordered=ordered,
                streams=RecordingStreams() if ordered else None,
                desk=JudgingDesk(),
            )
            model = seeded(Stack)
            model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, comm=comm)
            grads = Run(PHASES["phases"]).sharded(rank, model, optimizer)
            found[ordered, stage] = grads, zs.full_state_dict(model)
            if rank == 1:
                a_block(model)
            try:
                model(torch.ones(2, 7)).sum().backward()
            except zs.ModelChanged as error:
                found[ordered, stage] += (str(error),)
            a_block(model)
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            zs.close(model)
    return found


@pytest.mark.processes
def test_phases_over_torch_distributed():
    expected, state = Run(PHASES["phases"]).reference(seeded(Stack), adamw)
    for found in run_processes(_train, 2):
        for key, (grads, final, error) in found.items():
            assert "is frozen (requires_grad=False) on ranks [1] alone" in error
            for step, (mine, theirs) in enumerate(zip(grads, expected, strict=True)):
                for name, grad in theirs.items():
                    assert (mine[name] is None) == (grad is None), f"{key}, step {step}: {name}"
                    if grad is not None:
                        same(mine[name], grad, f"{key}, step {step}: {name}", 0.0)
            for name, value in state.items():
                same(final[name], value, f"{key}: {name}", 0.0)


def test_units_do_not_wait_for_what_is_frozen():
    """Reductions start inside backward, and the memory of a unit goes when its gradients are there."""

    def run(rank):
        model, _ = zs.shard(seeded(Stack), None, stage=3, map_shared=False)
        runtime, started = model._zeroshard, []
        freeze(model, "blocks.0", "blocks.1.up", "first")
        finish = runtime.reductions.finish
        runtime.reductions.finish = lambda *agreed: (started.append(runtime.reductions.started), finish(*agreed))
        model(torch.ones(2, 7)).sum().backward()
        return started[0], {
            unit.number
            for unit in runtime.units
            if any(spec.name.startswith(("blocks.1", "blocks.2", "last")) for g in unit.groups for spec in g.specs)
        }

    for started, expected in run_threads(2, run):
        assert expected <= started


def test_it_costs_no_message_of_its_own():
    def sent(change):
        def run(rank):
            model, _ = zs.shard(seeded(Stack), None, stage=3)
            labels, exchange = [], model._zeroshard.comm.exchange
            change(model)
            model._zeroshard.comm.exchange = lambda data, label, *args: (labels.append(label), exchange(data, label, *args))[1]
            model(torch.ones(2, 7)).sum().backward()
            return labels

        return run_threads(2, run)

    assert sent(nothing) == sent(a_block)
