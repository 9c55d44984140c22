"""Activation checkpointing of both kinds and torch.compile per block, before and after sharding.

Gradients equal plain torch's, nothing is compiled again after the second step, gathered memory is released. Compiled
models run on one rank in the main thread (dynamo is not made for ranks as threads); units, gathers and releases are
the same there.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint
from zoo import Block, Case, Stack, adamw, check, every_mode, normal_batches, reference, same, seeded, sgd, square

import zeroshard as zs


class Outside(Stack):
    """The root checkpoints its blocks."""

    reentrant = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class OutsideReentrant(Outside):
    reentrant = True


class Inside(Block):
    """The block checkpoints a part of itself."""

    def forward(self, x):
        h = checkpoint(self.up, self.norm(x), use_reentrant=False)
        return x + checkpoint(lambda h: self.down(torch.tanh(h)), h, use_reentrant=False)


class Twice(Outside):
    """One checkpoint around several blocks, of which one is called twice."""

    def forward(self, x):
        def segment(x):
            for number in (0, 1, 0, 2):
                x = self.blocks[number](x)
            return x

        return self.last(checkpoint(segment, self.first(x), use_reentrant=self.reentrant))


class TwiceReentrant(Twice):
    reentrant = True


def wrapped(impl):
    def build():
        model = Stack()
        wrap = lambda module: checkpoint_wrapper(module, checkpoint_impl=impl)  # noqa: E731
        apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, Block))
        return model

    return build


CHECKPOINTED = {
    "outside": Outside, "outside reentrant": OutsideReentrant, "inside": lambda: Stack(block=Inside), "twice": Twice,
    "twice reentrant": TwiceReentrant, "wrapper": wrapped(CheckpointImpl.NO_REENTRANT),
    "wrapper reentrant": wrapped(CheckpointImpl.REENTRANT),
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_checkpointed_gradients_equal_plain_torch(mode, kind):
    # reentrant checkpoints add a parameter's gradients in parts: another order of additions
    tolerance = 1e-5 if "reentrant" in kind or kind == "twice" else 0.0
    case = Case(seeded(CHECKPOINTED[kind]), normal_batches(3, 2, 4, 7), square, sgd, tolerance=tolerance)
    traces = check(case, **mode)
    block_nbytes = 4 * (sum(p.numel() + 32 for p in Block(7).parameters()) + 64)
    if kind.startswith(("outside", "wrapper")):
        for trace in traces:  # the root unit, a block, one gathered ahead
            assert trace.notes.peak["gathered units"] <= 3 * block_nbytes
            assert trace.notes.deviations == ()


@every_mode
def test_wrapping_after_sharding(mode):
    base, batches = seeded(Stack), normal_batches(3, 1, 4, 7)
    wanted = reference(Case(base, batches, square))[0].state
    model = copy.deepcopy(base)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    train(model, optimizer, batches)
    state = zs.full_state_dict(model)
    assert list(state) == list(model.state_dict())
    for name, value in wanted.items():
        same(model.state_dict()[name].full_tensor() if mode["stage"] == 3 else state[name], value, name, 0.0)


@every_mode
def test_checkpoints_with_dropout_recompute_the_same_mask(mode):
    class Dropped(Outside):
        def forward(self, x):
            return nn.functional.dropout(super().forward(nn.functional.dropout(x, 0.3)), 0.2)

    base, (batch,) = seeded(Dropped), normal_batches(1, 1, 4, 7)
    torch.manual_seed(2)
    square(base, batch[0]).backward()
    model, _ = zs.shard(copy.deepcopy(base), None, **mode)
    torch.manual_seed(2)
    square(model, batch[0]).backward()
    for name, param in base.named_parameters():
        same(zs.full_gradients(model)[name], param.grad, name, 0.0)


# -- compile -----------------------------------------------------------------------------------------------------


class Counter:
    """A backend that counts compilations and runs the graph as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def train(model, optimizer, batches, counts=None, counter=None):
    for ((x,),) in batches:
        square(model, (x,)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if counts is not None:
            counts.append(counter.count)


def compile_blocks(model, how, backend):
    for number, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)


@every_mode
@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks(mode, how, when):
    base, batches = seeded(Stack), normal_batches(5, 1, 4, 7)
    wanted = reference(Case(base, batches, square))[0].state
    torch._dynamo.reset()
    counter, counts = Counter(), []
    model = copy.deepcopy(base)
    if when == "before":
        compile_blocks(model, how, counter)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
    plain, _ = zs.shard(copy.deepcopy(base), None, **mode)
    assert [unit.name for unit in model._zeroshard.units] == [unit.name for unit in plain._zeroshard.units]
    zs.close(plain)
    if when == "after":
        compile_blocks(model, how, counter)
    train(model, optimizer, batches, counts, counter)
    assert counts[-1] > 0 and counts[-1] == counts[1], f"compilations after each step: {counts}"
    state = zs.full_state_dict(model)
    for (name, value), got in zip(wanted.items(), state.values(), strict=True):
        same(got, value, name, 1e-6)
    held = model._zeroshard.tiers.ledger.now["gathered units"]
    assert held == 0
    zs.close(model)
    square(model, batches[0][0]).backward()


@every_mode
@pytest.mark.parametrize("build", [Stack, Outside], ids=["plain", "checkpointed"])
def test_compiled_by_aot_autograd(build, mode):
    """The backward is compiled as well, with or without checkpoints; its gradients arrive like others."""
    base, batches = seeded(build), normal_batches(3, 1, 4, 7)
    wanted = reference(Case(base, batches, square))[0].state
    torch._dynamo.reset()
    model = copy.deepcopy(base)
    compile_blocks(model, "in place", "aot_eager")
    model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
    train(model, optimizer, batches)
    for name, value in wanted.items():
        same(zs.full_state_dict(model)[name], value, name, 1e-5)


@every_mode
@pytest.mark.parametrize("units", ["auto", [nn.Linear], "leaf"], ids=str)
def test_blocks_that_compile_wraps_are_units_and_checkpoints(mode, units):
    """The wrapper is the block, also where it is named by the class of what it wraps; a class inside is compiled with it."""
    base, batches = seeded(Stack), normal_batches(3, 1, 4, 7)
    wanted = reference(Case(base, batches, square))[0].state
    torch._dynamo.reset()
    model = copy.deepcopy(base)
    compile_blocks(model, "wrapped", "aot_eager")
    blocks = [type(base.blocks[0])] if units == "auto" else "auto"
    model = zs.checkpoint_activations(model, blocks=blocks, min_numel=1)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **{**mode, "units": units})
    train(model, optimizer, batches)
    for (name, value), got in zip(wanted.items(), zs.full_state_dict(model).values(), strict=True):
        same(got, value, name, 1e-5)
    report = zs.activation_report(model)
    assert (
        report.blocks == tuple(f"blocks.{number}" for number in range(len(model.blocks))) and report.packed == report.unpacked > 0
    )
    zs.close(model)
