"""Copies of a model with activation checkpoints share its store: each checkpoints its own blocks, also while threads compute them."""

import copy
import sys

import pytest
import torch
from activation_kit import DIM, activator, gradients, store_of
from zoo import Stack, normal_batches, run_threads, same, seeded, square

import zeroshard as zs


@pytest.fixture
def activate(tmp_path):
    return activator(tmp_path)


def test_a_copy_of_the_model_checkpoints_its_own_blocks(activate):
    model, ((batch,),) = activate(seeded(Stack, DIM)), normal_batches(1, 1, 4, DIM)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    gradients(model, square(model, batch))
    mine = gradients(other, square(other, batch))
    zs.checkpoint_activations(other, off=True)
    wanted = gradients(other, square(other, batch))
    for name in wanted:
        same(mine[name], wanted[name], name, 0.0)
    assert zs.activation_report(model).packed == 6
    gradients(model, square(model, batch))
    assert zs.activation_report(model).packed == 9


def test_the_store_is_freed_when_the_model_and_its_copies_are_detached(activate):
    model = activate(seeded(Stack, DIM), "cpu")
    other, store = copy.deepcopy(model), store_of(model)
    zs.checkpoint_activations(model, off=True)
    assert not store.closed
    zs.checkpoint_activations(other, off=True)
    assert store.closed


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_copies_that_threads_compute_at_once(activate, place):
    """Each copy's batches grow, so the store they share makes larger arenas while others put and get."""
    model = activate(seeded(Stack, DIM, 5), place)
    copies = [copy.deepcopy(model) for _ in range(4)]
    batches = [(torch.randn(4 + 3 * step, DIM, generator=torch.Generator().manual_seed(step)),) for step in range(25)]
    plain = seeded(Stack, DIM, 5)
    wanted = [gradients(plain, square(plain, batch)) for batch in batches]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns at nearly every line
    try:
        found = run_threads(4, lambda rank: [gradients(copies[rank], square(copies[rank], batch)) for batch in batches])
    finally:
        sys.setswitchinterval(before)
    for mine in found:
        for step, (got, one) in enumerate(zip(mine, wanted, strict=True)):
            for name in one:
                same(got[name], one[name], f"{name} in step {step}", 0.0)
    assert store_of(model).alive() == 0
