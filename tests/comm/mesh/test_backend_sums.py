"""sums="backend" over gloo: one process within rounding, the same bits in each run, nothing beside the shard, collectives in order."""

import copy
import dataclasses
import gc
import itertools
import os

import pytest
import torch
import torch.distributed as dist
from helpers import MLP, Branches, OddGPT, Rounding, Task, reference, seeded, token_batches, train, vector_batches

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.comm import process_group
from zeroshard.engine.runtime import runtime_of
from zeroshard.packing.backend_sums import BackendSums
from zeroshard.testing import run_threads
from zeroshard.utils import torch_compat

pytestmark = pytest.mark.processes
NEAR = 1e-6
HOST = {"offload_optimizer": "cpu", "offload_gradient": "cpu"}


def _adamw(params: object) -> torch.optim.Optimizer:
    """A large epsilon: the gradient of a bias of keys is zero but for rounding, which nothing shall blow up."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def _tasks(world: int) -> dict[str, Task]:
    generator, chosen = torch.Generator().manual_seed(4), [(0, 1, 2), (2, 0, 1), (1,)]
    ragged = [[[(torch.randn(4, 6, generator=generator), chosen[rank % 3]) for rank in range(world)]] for _ in range(3)]
    fewer = [
        [[(torch.randn(4, 6, generator=generator), [(0, 2), (0, 1, 2)][rank % 2]) for rank in range(world)]] for _ in range(3)
    ]
    turns = [
        [
            [(torch.randn(4, 6, generator=generator), [*chosen, (0, 2)][(rank + micro) % 4]) for rank in range(world)]
            for micro in range(3)
        ]
        for _ in range(2)
    ]
    gpt = Task(seeded(OddGPT), token_batches(3, 2, world), _adamw, clip={1: 0.05})
    weighted = Task(seeded(MLP), vector_batches(2, 2, world), _adamw, weight=lambda batch: 1.0 + batch[0][0, 0].abs().item())
    return {
        "gpt": gpt,
        "held": dataclasses.replace(gpt, local_sums=True),
        "ragged": Task(seeded(Branches), ragged, _adamw),
        "fewer": Task(seeded(Branches), fewer, _adamw),  # rank 0 completes its units in another order than the model's
        "turns": Task(seeded(Branches), turns, _adamw, local_sums=True),
        "weighted": weighted,
    }


CELLS = {
    "stage 0": ("gpt", {"stage": 0}),
    "stage 1": ("gpt", {"stage": 1}),
    "stage 2": ("gpt", {"stage": 2}),
    "stage 3": ("gpt", {"stage": 3}),
    "stage 3, no overlap": ("gpt", {"stage": 3, "overlap": False}),
    "sums held back": ("held", {"stage": 1}),
    "sums held back, sharded": ("held", {"stage": 2}),
    "weighted": ("weighted", {"stage": 3}),
    "ranks take other branches": ("ragged", {"stage": 1}),
    "and of sharded gradients": ("ragged", {"stage": 2}),
    "rank 0 takes fewer branches": ("fewer", {"stage": 2}),
    "sums held back of other branches": ("turns", {"stage": 0}),
    "sums held back of other branches, sharded": ("turns", {"stage": 2}),
    "on the host": ("gpt", {"stage": 2, **HOST}),
    "on disk": ("gpt", {"stage": 3, **dict.fromkeys((*HOST, "offload_param"), "nvme")}),
    "groups": ("gpt", {"stage": 3, "shard_size": 2}),
    "groups of ranks that take other branches": ("ragged", {"stage": 2, "shard_size": 2}),
    "two hops": ("gpt", {"stage": 3, "zero_hpz_partition_size": 2}),
    "groups, rank 0 takes fewer branches": ("fewer", {"stage": 1, "shard_size": 2}),
    "two hops of ranks that take other branches": ("ragged", {"stage": 2, "shard_size": 2, "replicate_optimizer": False}),
    "bf16": ("gpt", {"stage": 2, "precision": "bf16"}),
    "fp16": ("gpt", {"stage": 3, "precision": "fp16", "loss_scale": 128.0}),
    "fp16, sent in fp16": ("gpt", {"stage": 3, "precision": "fp16", "loss_scale": 128.0, "reduce_dtype": "fp16"}),
}


def _cells(world: int) -> dict[str, tuple[str, dict]]:
    in_groups = world % 2 == 0 and world > 2
    return {
        name: cell for name, cell in CELLS.items() if in_groups or not {"shard_size", "zero_hpz_partition_size"} & set(cell[1])
    }


def _all(rank: int, world: int, folder: str) -> tuple[dict, dict]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tasks, found = _tasks(world), {}
    for name, (task, options) in _cells(world).items():
        found[name] = train(rank, tasks[task], sums="backend", comm="dist", offload_path=folder, **options)
    again = train(rank, tasks["gpt"], sums="backend", comm="dist", stage=2)
    return found, again.weights


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.limit(240)
def test_numbers_of_one_process(world, tmp_path):
    tasks, results = _tasks(world), run_processes(_all, world, str(tmp_path), timeout_s=200)
    ones = {}
    for name, (task, options) in _cells(world).items():
        precision = options.get("precision", "fp32")
        if (task, precision) not in ones:
            ones[task, precision] = reference(
                tasks[task], world, precision, scale=options.get("loss_scale", 1.0), rounding=Rounding()
            )
        one = ones[task, precision]
        for found, _ in results:
            got, near = found[name], NEAR if precision == "fp32" else 1e-3
            assert got.norms == pytest.approx(one.norms, rel=10 * near), name
            for key, value in one.weights.items():
                torch.testing.assert_close(
                    got.weights[key], value, rtol=near, atol=near, msg=lambda text, name=name: f"{name}: {text}"
                )
            for key, value in results[0][0][name].weights.items():  # and all ranks have the same bits
                assert torch.equal(got.weights[key], value), name
    for found, again in results:  # and each run
        assert all(torch.equal(found["stage 2"].weights[key], value) for key, value in again.items())


def _counted(rank: int, world: int) -> tuple[list, list]:
    """What torch.distributed is asked for in a step, and the bytes of what was allocated for it."""
    torch.set_num_threads(1)
    os.environ["ZEROSHARD_COMM"] = "dist"
    dist.init_process_group("gloo")
    calls, received = [], []
    scatter, collected = torch_compat.reduce_scatter_single, process_group.DistComm.collect

    def noted(out, whole, **kwargs):
        mine = whole.view(world, -1)[rank]
        calls.append((whole.dtype, whole.numel(), out.data_ptr() == mine.data_ptr()))
        return scatter(out, whole, **kwargs)

    torch_compat.reduce_scatter_single = noted
    process_group.DistComm.collect = lambda *args, **kwargs: received.append(args) or collected(*args, **kwargs)
    numels = []
    for precision, gradient_dtype in (("fp32", torch.float32), ("bf16", torch.float32), ("bf16", torch.bfloat16)):
        model = seeded(OddGPT)
        optimizer = torch.optim.AdamW(model.parameters())
        zs.shard(model, optimizer, stage=2, precision=precision, gradient_dtype=gradient_dtype, sums="backend")
        shards = [group.gradients.load().data_ptr() for group in runtime_of(model).groups]
        numels.append([group.layout.numel for group in runtime_of(model).groups])
        for _ in range(2):
            model(*token_batches(1, 1, world)[0][0][rank]).backward()
        assert shards == [group.gradients.load().data_ptr() for group in runtime_of(model).groups]
        zs.close(model)
        calls.append(None)
    return [calls, numels], received


def test_a_unit_is_reduced_by_one_collective_into_the_shard():
    """fp32 is sent, of bf16 models too; a sum that is added to, or rounded, takes this rank's slice of what was sent: no other memory."""
    for (calls, numels), received in run_processes(_counted, 2):
        assert not received
        models = [list(step) for after, step in itertools.groupby(calls, lambda call: call is None) if not after]
        for layouts, step in zip(numels, models, strict=True):
            first, second = step[: len(layouts)], step[len(layouts) :]
            assert sorted(numel for _, numel, _ in first) == sorted(numel for _, numel, _ in second) == sorted(layouts)
            assert {dtype for dtype, *_ in step} == {torch.float32}
            assert all(beside for *_, beside in second)  # added to the shard


def _with_an_infinity(rank: int, world: int) -> list:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for options in ({}, {"reduce_dtype": "fp16"}):
        model = seeded(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.shard(
            model,
            optimizer,
            stage=2,
            precision="fp16",
            sums="backend",
            comm="dist",
            initial_loss_scale=256.0,
            loss_scale_window=2,
            **options,
        )
        begin = copy.deepcopy(zs.full_state_dict(model, masters=True))
        scales = []
        for step in range(4):
            x, y = vector_batches(1, 1, world)[0][0][rank]
            (model(x, y) * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
            optimizer.step()
            scales.append((optimizer.last_step.skipped, optimizer.last_step.loss_scale))
            optimizer.zero_grad()
        found.append(
            (scales, {name: (value - begin[name]).abs().max().item() for name, value in zs.full_state_dict(model).items()})
        )
        zs.close(model)
    return found


def test_an_overflow_on_one_rank_is_skipped_on_all():
    results = run_processes(_with_an_infinity, 2)
    assert results[0] == results[1]
    for scales, moved in results[0]:
        assert [skipped for skipped, _ in scales] == [False, True, False, False]
        assert max(moved.values()) < 10  # and nothing is infinite


def _uneven(rank: int, world: int) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for sums in ("ordered", "backend"):
        model = seeded(OddGPT)
        optimizer = _adamw(model.parameters())
        zs.shard(model, optimizer, stage=2, comm="dist", sums=sums)
        batches = [step[0][rank] for step in token_batches(3, 1, world)][: 3 - rank]
        with zs.join(model):
            for batch in batches:
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        found[sums] = zs.full_state_dict(model)
        zs.close(model)
    return found


def test_ranks_whose_data_has_ended_take_part_in_order():
    for found in run_processes(_uneven, 3):
        for name, value in found["ordered"].items():
            torch.testing.assert_close(found["backend"][name], value, rtol=NEAR, atol=NEAR)


def _two_models(rank: int, world: int) -> list:
    """Both in one loss; rank 1 takes fewer branches of the second, and so completes its units behind the first's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for sums in ("ordered", "backend"):
        models = [seeded(Branches, seed) for seed in (1, 2)]
        optimizers = [_adamw(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            zs.shard(model, optimizer, stage=2, comm="dist", sums=sums)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            (models[0](x, (0, 1, 2)) + models[1](x, [(0, 1, 2), (0, 2)][rank])).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append([zs.full_state_dict(model) for model in models])
        groups = len(dist.distributed_c10d._world.pg_map)
        for model in models:
            zs.close(model)
        assert len(dist.distributed_c10d._world.pg_map) == groups - 2 * (sums == "backend")
    return found


def test_two_models_keep_their_sums_apart():
    for ordered, backend in run_processes(_two_models, 2):
        for one, other in zip(ordered, backend, strict=True):
            for name, value in one.items():
                torch.testing.assert_close(other[name], value, rtol=NEAR, atol=NEAR)


def _frozen_for_a_step(rank: int, world: int) -> list[dict]:
    """Branch 1 is frozen in step 1; rank 1 does not use the last branch from then on, and so stops before the one that is thawed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for sums in ("ordered", "backend"):
        model = seeded(Branches)
        optimizer = _adamw(model.parameters())
        zs.shard(model, optimizer, stage=1, comm="dist", sums=sums)
        for step in range(4):
            model.branches[1].requires_grad_(step != 1)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x, (0, 1, 2) if rank == 0 or step == 0 else (0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(zs.full_state_dict(model))
        zs.close(model)
    return found


def test_a_unit_that_was_frozen_for_a_step():
    for ordered, backend in run_processes(_frozen_for_a_step, 2):
        for name, value in ordered.items():
            torch.testing.assert_close(backend[name], value, rtol=NEAR, atol=NEAR)


def _dropped(rank: int, world: int) -> None:
    """Process groups of models that nobody has closed end with the next one's start."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    counts = []
    for _ in range(4):
        model = seeded(MLP)
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, shard_size=2, sums="backend", comm="dist")
        model(*vector_batches(1, 1, world)[0][0][rank]).backward()
        counts.append(len(dist.distributed_c10d._world.pg_map))
        del model
        gc.collect()
    assert counts == counts[:1] * 4, counts
    model = seeded(MLP)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, sums="backend", comm="dist")
    dist.destroy_process_group()
    zs.close(model, restore=False)  # as with sums in rank order


def test_models_that_are_dropped_leave_no_process_groups():
    run_processes(_dropped, 4)


def _on_threads(rank: int) -> tuple:
    model = seeded(MLP)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, precision="bf16", sums="backend")
    runtime = runtime_of(model)
    return runtime.config.sums, runtime.config.sent_dtype(torch.bfloat16), zs.report(model).deviations


def test_ranks_that_share_memory_sum_in_rank_order_and_the_report_says_so():
    for sums, sent, notes in run_threads(2, _on_threads):
        assert (sums, sent) == ("ordered", torch.bfloat16)
        assert any("in rank order" in note for note in notes), notes


def test_what_does_not_go_together_is_refused():
    with pytest.raises(zs.ConfigError, match="sums: expected 'ordered' or 'backend', got 'nccl'"):
        zs.Config(sums="nccl")
    with pytest.raises(zs.ConfigError, match="sums='backend' with zero_quantized_gradients"):
        zs.Config(sums="backend", zero_quantized_gradients="int8")


class Alone:
    """Stands for a communicator of two ranks, this one and one that sends the same."""

    rank, world_size, ranks, nodes, device = 0, 2, [0, 1], [0, 0], torch.device("cpu")

    def reduce_scatter(self, out, whole, then, number, label):
        out.copy_(whole.view(2, -1)[0] * 2)
        then()


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rest", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_each_pair_of_dtypes(sent, rest, accumulate):
    """A sum of 0.3 x 2 values, into a shard of 1, in whatever dtypes are sent and kept."""
    comm = object.__new__(BackendSums)
    comm.comm, comm.rank, comm.world_size, comm._number = Alone(), 0, 2, 0
    whole, out = torch.arange(6, dtype=sent), torch.ones(3, dtype=rest)
    source = torch.nn.Module()
    source.tensor = whole
    comm.reduce(source, out, scale=0.3, accumulate=accumulate, tag=0, label="")
    expected = 0.6 * torch.arange(3.0) + accumulate
    torch.testing.assert_close(
        out.float(), expected, rtol=1e-2 if torch.float32 not in (sent, rest) or sent != rest else 1e-6, atol=1e-6
    )
