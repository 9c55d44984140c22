"""The matrix for the models that users bring: graphs, images, diffusion, encoder-decoders, experts, and LoRA on each.

    (model, whole or LoRA) x (world {1, 2, 3}, {fp32, bf16}) x micro-batches x stage {0, 1, 2, 3, 3 mapped}

in cells in which every two values of these four meet. Each trains three steps of AdamW, the second clipped. Losses, gradients and
weights are the bits of one process (see equivalence_kit.py); norms differ by the order of their sums.

One cell has a tolerance. Where units have frozen parameters (LoRA), stage 3 learns when their backward is over by a node
of autograd in front of each: the gradient of what several of them read, as a T5's decoder reads the encoder's output, is
then added up unit by unit, and rounded in other places.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
from dataclasses import dataclass, replace

import pytest
import torch
from equivalence_kit import NORM_TOLERANCE
from helpers import DTYPES, Outcome, Rounding, Task, assert_equal_runs, reference, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from user_models import SUBJECTS, EncoderBlock, SparseBlock, Subject

import zeroshard as zs
from zeroshard.testing import run_threads

STEPS = 3
CLIP = {1: 1e-4}  # far below the norms met here
PLACEMENTS = ((0, True), (1, True), (2, True), (3, True), (3, False))
MODES = ((1, False), (2, False), (2, True))
REGROUPED = {"fp32": 1e-6, "bf16": 2e-2}  # of the largest element


@dataclass(frozen=True)
class Cell:
    model: tuple[str, bool]  # which, and whether with LoRA
    world: tuple[int, str]  # ranks, precision
    mode: tuple[int, bool]  # micro-batches, and whether they are summed under zs.accumulate
    placement: tuple[int, bool]  # the stage, and whether memory of other ranks is mapped

    def pairs(self) -> set[tuple]:
        return set(itertools.combinations(vars(self).items(), 2))

    @property
    def expectation(self) -> tuple:
        """Cells that are alike in this have one reference."""
        return self.model, self.world, self.mode

    def options(self) -> dict:
        return {"stage": self.placement[0], "map_shared": self.placement[1], "precision": self.world[1]}

    @property
    def regroups(self) -> bool:
        return self.model == ("t5", True) and self.placement[0] == 3


def task_of(subject: Subject, lora: bool, world_size: int, mode: tuple[int, bool] = (1, False)) -> Task:
    model = subject.adapter if lora else subject.model
    data = subject.batches(STEPS, mode[0], world_size)
    return Task(model, data, local_sums=mode[1], clip=CLIP, loss=subject.loss, weight=subject.weight)


@functools.cache
def cells() -> list[Cell]:
    """Every two values of different factors meet; of equally good cells one that shares its reference comes first."""
    models, worlds = itertools.product(SUBJECTS, (False, True)), itertools.product((1, 2, 3), ("fp32", "bf16"))
    everything = list(itertools.starmap(Cell, itertools.product(models, worlds, MODES, PLACEMENTS)))
    if os.environ.get("ZEROSHARD_SLOW") == "1":
        return everything
    missing, chosen, expectations = set().union(*(cell.pairs() for cell in everything)), [], set()
    while missing:
        chosen.append(max(everything, key=lambda cell: (len(cell.pairs() & missing), cell.expectation in expectations)))
        expectations.add(chosen[-1].expectation)
        missing -= chosen[-1].pairs()
    return chosen


def keep_buffers(base: nn.Module) -> Rounding:
    """The reference in low precision, with buffers as they are given (rotary frequencies): they keep their dtype."""
    buffers = dict(base.named_buffers())

    def prepare(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].clone()

    return Rounding(prepare=prepare)


def expected_of(task: Task, world_size: int, precision: str, coefficients: list[float]) -> Outcome:
    out = reference(task, world_size, precision, coefficients, rounding=keep_buffers(task.model))
    frozen = {name for name, param in task.model.named_parameters() if not param.requires_grad}
    out.gradients = [{n: grad for n, grad in grads.items() if n not in frozen} for grads in out.gradients]
    tied = set(out.weights) - {name for name, _ in task.model.named_parameters()}  # state dicts have every name of a weight
    frozen |= {name for name in tied if any(torch.equal(out.weights[name], out.weights[other]) for other in frozen)}
    out.weights = {n: w.to(DTYPES[precision]) if n in frozen else w for n, w in out.weights.items()}  # they have no masters
    return out


def compare(got: Outcome, expected: Outcome, rank: int, world_size: int, where: str) -> None:
    assert got.losses == expected.losses[rank::world_size], where
    assert_equal_runs(got, expected, where)
    assert got.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE), where
    assert got.coefficients[1] == CLIP[1] / (got.norms[1] + 1e-6) < 1.0 == got.coefficients[0] == got.coefficients[2], where


def compare_regrouped(got: Outcome, expected: Outcome, precision: str, where: str) -> None:
    """The first step's gradients, which are of the same weights."""
    assert got.gradients[0].keys() == expected.gradients[0].keys() and got.losses[0] in expected.losses, where
    for name, grad in expected.gradients[0].items():
        assert (got.gradients[0][name] - grad).abs().max() <= REGROUPED[precision] * grad.abs().max(), f"{where} {name}"


def check(chosen: list[Cell], outcomes: list[list[Outcome]]) -> None:
    """outcomes[rank][number of the cell]"""
    expected: dict[tuple, Outcome] = {}
    for rank, number in itertools.product(range(len(outcomes)), range(len(chosen))):
        got, cell = outcomes[rank][number], chosen[number]
        (name, lora), (world_size, precision), where = cell.model, cell.world, f"{cell} rank {rank}:"
        key = (*cell.expectation, *got.coefficients)
        if key not in expected:
            task = task_of(SUBJECTS[name], lora, world_size, cell.mode)
            expected[key] = expected_of(task, world_size, precision, got.coefficients)
        if cell.regroups:
            compare_regrouped(got, expected[key], precision, where)
        else:
            compare(got, expected[key], rank, world_size, where)


@pytest.mark.limit(150)  # whole: 20 s
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2, 3])  # one rank: test_equivalence
def test_models_of_users_equal_one_process(subject: str, world_size: int) -> None:
    chosen = [cell for cell in cells() if cell.model[0] == subject and cell.world[0] == world_size]
    tasks = [task_of(SUBJECTS[subject], cell.model[1], world_size, cell.mode) for cell in chosen]

    def run(rank: int) -> list[Outcome]:
        return [train(rank, task, **cell.options()) for task, cell in zip(tasks, chosen, strict=True)]

    check(chosen, run_threads(world_size, run))


def test_the_cells_meet_each_other() -> None:
    chosen = cells()
    for factor, values in (("placement", PLACEMENTS), ("mode", MODES)):
        met = {(cell.model, getattr(cell, factor)) for cell in chosen}
        assert met == set(itertools.product(itertools.product(SUBJECTS, (False, True)), values))
    assert os.environ.get("ZEROSHARD_SLOW") == "1" or len(chosen) < 100


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ragged_graphs_weigh_as_their_union(stage: int) -> None:
    """Graphs of 2 to 8 nodes on three ranks, weighted by nodes, against one graph of all nodes on one process."""
    subject = SUBJECTS["graph"]
    split = task_of(subject, False, 3)

    def union(graphs: list[tuple]) -> tuple:
        kinds, edges, targets = zip(*graphs, strict=True)
        begins = [0, *itertools.accumulate(map(len, kinds))]
        return torch.cat(kinds), torch.cat([e + b for e, b in zip(edges, begins, strict=False)], 1), torch.cat(targets)

    whole = replace(split, data=[[[union(ranks)] for ranks in micros] for micros in split.data], weight=None)
    assert len({len(batch[0]) for batch in split.data[0][0]}) == 3
    for got in run_threads(3, lambda rank: train(rank, split, stage=stage)):
        expected = reference(whole, 1, coefficients=got.coefficients)
        assert got.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, grad in expected.gradients[0].items():
            torch.testing.assert_close(got.gradients[0][name], grad, rtol=1e-4, atol=1e-6)
        for name, weight in expected.weights.items():  # Adam magnifies the rounding of small gradients
            torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=1e-4)


# -- recomputed and compiled ---------------------------------------------------------------------------------------


def recomputed(name: str, lora: bool) -> nn.Module:
    """A model whose blocks are checkpointed, as their libraries do it."""
    subject = SUBJECTS[name]
    model = copy.deepcopy(subject.adapter if lora else subject.model)
    if hasattr(model, "gradient_checkpointing_enable"):
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    else:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, (EncoderBlock, SparseBlock)))
    return model


@pytest.mark.parametrize(
    ("name", "lora", "precision"),
    [
        ("vit", False, "bf16"),
        ("experts", False, "fp32"),
        ("t5", False, "fp32"),
        ("mixtral", False, "fp32"),
        ("mixtral", True, "bf16"),
    ],
)
def test_checkpointed_models_of_users(name: str, lora: bool, precision: str) -> None:
    task = replace(task_of(SUBJECTS[name], lora, 2), model=recomputed(name, lora))
    outcomes = run_threads(2, lambda rank: train(rank, task, precision=precision, stage=3, map_shared=False))
    for rank, got in enumerate(outcomes):
        compare(got, expected_of(task, 2, precision, got.coefficients), rank, 2, f"rank {rank}:")


@pytest.mark.parametrize(("name", "backend"), [("graph", "eager"), ("vit", "aot_eager")])
def test_compiled_models_of_users(name: str, backend: str) -> None:
    """Compiled blocks, on one rank; of graphs no two have the same number of nodes."""
    task = task_of(SUBJECTS[name], False, 1)
    torch._dynamo.reset()
    model = copy.deepcopy(task.model)
    for block in model.layers if name == "graph" else model.blocks:
        block.compile(backend=backend)
    model, optimizer = zs.shard(model, task.make_optimizer(model), stage=3, map_shared=False)
    for ((batch,),) in task.data:
        loss = task.loss(model, *batch)
        zs.backward(model, loss, weight=task.weight(batch)) if task.weight else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = reference(replace(task, clip={}), 1)
    for weight_name, weight in zs.full_state_dict(model).items():
        torch.testing.assert_close(weight, expected.weights[weight_name], rtol=0, atol=1e-5)
