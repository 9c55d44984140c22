"""Pipelines of 2 ranks x 2 data-parallel ranks: bits of one process, in one world of 4 processes for all cells."""

import contextlib
import os
import time

import pipeline_kit as kit
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of
from zeroshard.parallel.pipeline import Pipeline, stages_of
from zeroshard.parallel.stages import cut_stages

WORLD, STALL_S = 4, 4.0
SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"
FEW = [  # (ZeRO stage, schedule, stages a rank, tied, max_grad_norm)
    (0, "1F1B", 1, False, None),
    (2, "1F1B", 1, True, 0.5),
    (3, "1F1B", 1, True, None),
    (1, "GPipe", 1, True, None),
    (1, "Interleaved1F1B", 2, True, 0.5),
    (1, "InterleavedZeroBubble", 2, True, None),
    (2, "ZBVZeroBubble", 2, True, None),
]
CELLS = (
    [
        *FEW,
        *((stage, "1F1B", 1, stage > 1, None) for stage in (1, 2)),
        (0, "1F1B", 1, True, 0.5),
        (2, "LoopedBFS", 2, False, None),
        (3, "Interleaved1F1B", 2, True, None),
        *((stage, "InterleavedZeroBubble", 2, False, None) for stage in (0, 3)),
        *((stage, "ZBVZeroBubble", 2, True, None) for stage in (0, 3)),
        (2, "DualPipeV", 2, False, None),
    ]
    if SLOW
    else FEW
)


def _stages(mesh, stage, schedule, per_rank, tied, max_norm=None, **options):
    pp = mesh["pp"]
    own = stages_of(pp.get_local_rank(), 2, per_rank, schedule)
    modules = cut_stages(kit.model(tied), 2 * per_rank, own)
    sharded = [
        zs.shard(module, kit.adamw(module.parameters()), mesh=mesh, stage=stage, max_grad_norm=max_norm, **options)
        for module in modules
    ]
    modules, optimizers = zip(*sharded, strict=True)
    return Pipeline(modules, pp, micro_batches=kit.MICRO, loss=kit.loss, schedule=schedule), modules, optimizers


def _train(mesh, *cell):
    (pipeline, modules, optimizers), dp = _stages(mesh, *cell), mesh["dp"]
    losses = []
    for step in range(kit.STEPS):
        tokens, targets = kit.batch(step, dp.get_local_rank())
        each = []
        losses.append(pipeline.step(tokens, target=targets, losses=each).item())
        assert len(each) == kit.MICRO
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    before = [
        pipeline.step(tokens, target=targets).item(),
        *(group.grads.reduced for m in modules for group in runtime_of(m).groups),
    ]
    assert pipeline.evaluate(tokens, target=targets).item() == before[0] and all(before[1:])
    values = {name: value for module in modules for name, value in zs.full_state_dict(module).items()}
    for module in modules:
        zs.close(module)
    return losses, values


def _skips(mesh, rank):
    """A gradient of one rank's second stage is not finite: which optimizers of this rank skip, in two steps."""
    pipeline, modules, optimizers = _stages(mesh, 1, "Interleaved1F1B", 2, False)
    tokens, targets = kit.batch(0, mesh["dp"].get_local_rank())
    if rank == 3:
        hook = next(modules[1].parameters()).register_hook(lambda grad: grad * float("nan"))
    rows = []
    for turn in range(2):
        pipeline.step(tokens, target=targets)
        for optimizer in reversed(optimizers):  # the stage with the gradient is asked first, and forgets it
            optimizer.step()
            optimizer.zero_grad()
        rows.append([optimizer.last_step.skipped for optimizer in optimizers])
        if rank == 3 and turn == 0:
            hook.remove()
    for module in modules:
        zs.close(module)
    return rows


def _adds_up(mesh):
    """Gradients of tied weights after the same batch once, and twice."""
    pipeline, (module,), _ = _stages(mesh, 2, "1F1B", 1, True)
    tokens, targets = kit.batch(0, mesh["dp"].get_local_rank())
    name = module.pipeline_stage.ties[0][module.pipeline_stage.index]
    found = []
    for _ in range(2):
        pipeline.step(tokens, target=targets)
        found.append(zs.full_gradients(module)[name])
    zs.close(module)
    return found


HALF = {"precision": "fp16", "initial_loss_scale": 2.0**20, "loss_scale_window": 2, "loss_scale_hysteresis": 1}  # overflows first
HALF_STEPS = 8
HALF_CELLS = [(0, "1F1B", 1), (1, "GPipe", 1), (3, "1F1B", 1), (2, "InterleavedZeroBubble", 2), (1, "ZBVZeroBubble", 2)]


def _half(step, optimizer):
    """What a step in fp16 tells: the loss, the norm (0 if it was skipped), whether it was skipped, the scale that it had."""
    value = step().item()
    optimizer.step()
    optimizer.zero_grad()
    done = optimizer.last_step
    return value, 0.0 if done.skipped else done.grad_norm, done.skipped, done.loss_scale


def _trains_in_half(mesh, *cell):
    pipeline, modules, optimizers = _stages(mesh, *cell, False, 0.5, **HALF)

    def step(number):
        tokens, targets = kit.batch(number, mesh["dp"].get_local_rank())
        return pipeline.step(tokens, target=targets)

    told = []
    for number in range(HALF_STEPS):
        told.append(_half(lambda number=number: step(number), optimizers[0]))
        for optimizer in optimizers[1:]:
            optimizer.step()
            optimizer.zero_grad()
    for module in modules:
        zs.close(module)
    return told


def _one_in_half():
    """The same of one process: both data-parallel ranks' losses, and what the steps tell. Its scale is twice as large, because it
    takes the mean over both before the backward."""
    model, losses = kit.model(False), []
    model, optimizer = zs.shard(model, kit.adamw(model.parameters()), max_grad_norm=0.5, **HALF | {"initial_loss_scale": 2.0**21})

    def step(number):
        batches = [kit.batch(number, dp) for dp in range(2)]
        parts = [(x, y) for each in batches for x, y in zip(*(rows.chunk(kit.MICRO) for rows in each), strict=True)]
        found = []
        for at, (x, y) in enumerate(parts):
            with zs.accumulate(model) if at < len(parts) - 1 else contextlib.nullcontext():
                value = kit.loss(model(x), y) / kit.MICRO
                (value / 2).backward()
                found.append(value.detach())
        losses.append([sum(found[: kit.MICRO]).item(), sum(found[kit.MICRO :]).item()])
        return torch.zeros(())

    told = [_half(lambda number=number: step(number), optimizer)[1:] for number in range(HALF_STEPS)]
    zs.close(model)
    return losses, told


def _all(rank, ranks, cells):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    half = {cell: _trains_in_half(mesh, *cell) for cell in HALF_CELLS}
    trained = {cell: _train(mesh, *cell) for cell in cells}
    return mesh["dp"].get_local_rank(), trained, half, _skips(mesh, rank), _adds_up(mesh)


@pytest.mark.processes
@pytest.mark.limit(1200 if SLOW else 240)
def test_bits_of_one_process():
    expected = {}
    for _, schedule, _, tied, max_norm in CELLS:
        task = tied, schedule == "LoopedBFS", max_norm
        expected[task] = expected.get(task) or kit.one_process(tied, 2, *task[1:])
    results = run_processes(_all, WORLD, CELLS)
    for cell in CELLS:
        losses, values = expected[cell[3], cell[1] == "LoopedBFS", cell[4]]
        atol = 0.0 if cell[4] is None else 1e-6  # a norm is added up in another order
        for dp, found, *_ in results:
            torch.testing.assert_close(found[cell][0], [row[dp] for row in losses], rtol=0, atol=atol, msg=f"{cell}: losses")
            for name, value in found[cell][1].items():
                torch.testing.assert_close(value, values[name], rtol=0, atol=atol, msg=f"{cell}: {name}")
        assert {name for _, found, *_ in results for name in found[cell][1]} == set(values)
    losses, one = _one_in_half()
    assert 0 < sum(skipped for _, skipped, _ in one) < HALF_STEPS - 3
    for dp, _, half, *_ in results:
        for cell, told in half.items():
            assert [(skipped, 2 * scale) for *_, skipped, scale in told] == [row[1:] for row in one], cell
            norms = [row[0] for row in one]
            torch.testing.assert_close([norm for _, norm, *_ in told], norms, rtol=1e-3, atol=0, msg=f"{cell}")
            torch.testing.assert_close([loss for loss, *_ in told], [row[dp] for row in losses], rtol=0, atol=2e-4, msg=f"{cell}")
    for *_, skipped, (once, twice) in results:
        assert skipped == [[True, True], [False, False]], "stages of one rank have one verdict"
        torch.testing.assert_close(twice, 2 * once)


def _pipeline(mesh, micro_batches=kit.MICRO, comm=None, **options):
    pp = mesh["pp"]
    (stage,) = cut_stages(kit.model(), 2, [pp.get_local_rank()])
    stage, optimizer = zs.shard(stage, kit.adamw(stage.parameters()), mesh=None if comm else mesh, comm=comm, stage=1, **options)
    return Pipeline(stage, pp, micro_batches=micro_batches, loss=kit.loss), stage, optimizer


def _once_and_bad_input(rank, ranks):
    """How often gradients are reduced in a step, and every sentence on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, stage, _ = _pipeline(mesh)
    runtime = runtime_of(stage)
    reduced = []
    for group in runtime.groups:
        plain = group.grads.reduce
        group.grads.reduce = lambda plain=plain: (reduced.append(runtime.in_backward), plain())
    tokens, targets = kit.batch(0, 0)
    rows = slice(4 * (1 + mesh["pp"].get_local_rank()))
    with pytest.raises(zs.ConfigError) as other_rows:
        pipeline.step(tokens[rows], target=targets[rows])
    pipeline.step(tokens, target=targets)
    said = [(len(reduced), len(runtime.groups), any(reduced))]
    for wrong in (
        lambda: pipeline.step(tokens[:6], target=targets[:6]),
        lambda: _pipeline(mesh, micro_batches=2 if mesh["dp"].get_local_rank() else 4),
        lambda: _pipeline(mesh, micro_batches=2 if mesh["pp"].get_local_rank() else 4),
        lambda: _pipeline(mesh, comm=mesh["dp"]),
        lambda: Pipeline([stage, stage], mesh["pp"], micro_batches=4, loss=kit.loss),
        lambda: Pipeline(stage, mesh["pp"], micro_batches=4, loss=kit.loss, schedule="1F2B"),
    ):
        with pytest.raises(zs.ConfigError) as caught:
            wrong()
        said.append(str(caught.value))
    return [*said, str(other_rows.value)]


@pytest.mark.processes
def test_one_reduction_a_step_and_a_sentence_on_every_rank():
    for once, *said in run_processes(_once_and_bad_input, WORLD):
        assert once == (once[1], once[1], True), "each group is reduced once, and that begins inside of the last backward"
        sentences = (
            "a batch of [6] rows", "data-parallel ranks", "have built different pipelines", "data-parallel ranks alone",
            "2 stages a rank", "schedule: expected", "have given different batches",
        )  # fmt: skip
        for sentence, text in zip(sentences, said, strict=True):
            assert sentence in text, text


def _failing(rank, ranks, how):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline, stage, optimizer = _pipeline(mesh, stall_timeout_s=STALL_S)
    tokens, targets = kit.batch(0, 0)
    pipeline.step(tokens, target=targets)
    optimizer.step()

    def fail(*_):
        if how == "dies":
            os._exit(3)
        if how == "sleeps":
            time.sleep(4 * STALL_S)
        raise ValueError("the second stage is out of sorts")

    if rank == 3:
        stage.blocks[1].register_forward_pre_hook(fail)
    pipeline.step(tokens, target=targets)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["raises", "dies"] if SLOW else ["dies"])
def test_a_rank_that_fails_in_one_stage_ends_all(how):
    results = run_processes(_failing, WORLD, how, grace_s=100, check=False)
    assert all(result.exitcode not in (0, -9, -15) for result in results), [result.exitcode for result in results]
    for result in results[:3]:
        assert "PeerFailed" in result.error and "rank 3" in result.error, result.error


@pytest.mark.processes
@pytest.mark.slow  # it waits for limits of time
def test_a_schedule_that_stands_still_is_told():
    results = run_processes(_failing, WORLD, "sleeps", grace_s=STALL_S, check=False)
    told = [result.error for result in results[:3] if result.error and "StallError" in result.error]
    assert told, [result.error for result in results]
    assert all("pipeline stage 0: gradients of micro-batch 0 from stage 1" in text for text in told), told[0]
