"""Real processes over gloo: equality to the reference, and every failure ends on every rank, in time, with a sentence.

Each group of scenarios shares one pair of processes where it can, since starting them costs more than running.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from zoo import Case, Language, MixtureOfExperts, Stack, adamw, compare, normal_batches, reference, seeded, sharded, square, token_batches

import zeroshard as zs
from zeroshard.launch import ProcessesFailed, run_processes

pytestmark = pytest.mark.processes


def cases(world):
    return {
        "language": Case(seeded(Language, tied=True), token_batches(2, world, 17, 2, 5)),
        "experts": Case(seeded(MixtureOfExperts), normal_batches(4, world, 3, 6), square),
        "stack": Case(seeded(Stack), normal_batches(2, world, 4, 7), square),
    }


def _start(rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def _train_everything(rank, world, comm):
    _start(rank, world)
    traces = {}
    for name, case in cases(world).items():
        for stage in range(4):
            for mapped in (True, False) if stage == 3 and comm == "shared" else (True,):
                trace = sharded(case, rank, stage=stage, map_shared=mapped, comm=comm)
                trace.notes = None
                traces[name, stage, mapped] = trace
    dist.destroy_process_group()
    return traces


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("comm", ["shared", "dist"])
def test_processes_equal_the_reference_at_every_stage(world, comm):
    results = run_processes(_train_everything, world, comm, timeout_s=90)
    for name, case in cases(world).items():
        wanted = reference(case)
        for rank, traces in enumerate(results):
            mine = {key: trace for key, trace in traces.items() if key[0] == name}
            assert len(mine) == (5 if comm == "shared" else 4)
            for trace in mine.values():
                compare(trace, wanted[rank], 0.0)


def _born_sharded(rank, world):
    """Random initialisation with a rejection loop, in processes that have generators of their own."""
    _start(rank, world)
    with zs.init(stage=3):
        model = seeded(Language)
        torch.manual_seed(3)
        torch.nn.init.trunc_normal_(model.head.weight, std=1.0, a=-1.0, b=1.0)
    zs.shard(model, None, stage=3)
    torch.manual_seed(4)
    torch.nn.init.trunc_normal_(model.embedding.weight, std=1.0, a=-1.0, b=1.0)
    return zs.full_state_dict(model)


def test_b16_born_sharded_in_processes_equals_one_process():
    base = seeded(Language)
    torch.manual_seed(3)
    torch.nn.init.trunc_normal_(base.head.weight, std=1.0, a=-1.0, b=1.0)
    torch.manual_seed(4)
    torch.nn.init.trunc_normal_(base.embedding.weight, std=1.0, a=-1.0, b=1.0)
    for state in run_processes(_born_sharded, 2):
        for name, value in base.state_dict().items():
            assert torch.equal(state[name], value), name


# -- failures ----------------------------------------------------------------------------------------------------


def _sharded_stack(comm, **options):
    model = seeded(Stack)
    return zs.shard(model, adamw(model.parameters()), comm=comm, **{"stage": 3, "stall_timeout_s": 10.0} | options)


def _train(model, optimizer, rank, steps=10**6, before=lambda step: None):
    for step in range(steps):
        before(step)
        square(model, (torch.ones(2, 7),)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _fail(rank, world, comm, fault):
    """What one rank does wrong at step 2; the others go on until they notice."""
    _start(rank, world)
    model, optimizer = _sharded_stack(comm)

    def hook(module, args):
        raise ValueError("the batch of rank 1 is empty")

    def before(step):
        if rank != 1 or step != 2:
            return
        if fault == "raise":
            model.blocks[1].register_forward_pre_hook(hook)
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exit":
            sys.exit(3)
        elif fault == "exit well":
            sys.exit(0)
        elif fault == "extra":
            zs.full_state_dict(model)
        elif fault == "leave":
            raise StopIteration

    try:
        _train(model, optimizer, rank, before=before)
    except StopIteration:
        time.sleep(40)


def _outcome(comm, fault, world=2):
    started = time.monotonic()
    results = run_processes(_fail, world, comm, fault, timeout_s=60, grace_s=30, check=False)
    return results, time.monotonic() - started


@pytest.mark.parametrize("comm", ["shared", "dist"])
def test_b04_an_exception_on_one_rank_reaches_the_others_with_its_traceback(comm):
    results, seconds = _outcome(comm, "raise", 3)
    assert seconds < 30 and all(r.exitcode != 0 for r in results), results
    assert "ValueError: the batch of rank 1 is empty" in results[1].error
    for rank in (0, 2):
        assert "PeerFailed: rank 1 failed" in results[rank].error
        assert "ValueError: the batch of rank 1 is empty" in results[rank].error, "the traceback of the peer"


@pytest.mark.parametrize("comm", ["shared", "dist"])
@pytest.mark.parametrize("fault", ["kill", "exit", "exit well"])
def test_b05_a_lost_rank_ends_the_others_within_seconds(comm, fault):
    results, seconds = _outcome(comm, fault)
    assert seconds < 25
    assert results[0].exitcode != 0 and "PeerFailed: rank 1 failed" in results[0].error.replace("rank -1", "rank 1")
    assert results[1].exitcode == {"kill": -signal.SIGKILL, "exit": 3, "exit well": 0}[fault]


@pytest.mark.parametrize("comm", ["shared", "dist"])
def test_b01_an_extra_collective_on_one_rank_names_the_ranks(comm):
    results, seconds = _outcome(comm, "extra")
    assert seconds < 40
    for result in results:
        assert result.exitcode != 0
        assert any(kind in result.error for kind in ("CollectiveMismatch", "StallError", "PeerFailed")), result.error
    text = results[0].error + results[1].error
    assert "CollectiveMismatch" in text or "StallError" in text
    assert "rank 0" in text and "rank 1" in text


def test_b02_a_rank_that_leaves_the_loop_is_named():
    results, seconds = _outcome("shared", "leave")
    assert seconds < 50
    assert "StallError" in results[0].error and "rank 1 computes or sleeps" in results[0].error


def _forgotten_group(rank, world):
    model = seeded(Stack)
    with pytest.raises(zs.ConfigError, match="init_process_group"):
        zs.shard(model, adamw(model.parameters()), stage=2)
    assert not any(hasattr(p, "_home") for p in model.parameters())


def _different_models(rank, world, comm, kind):
    _start(rank, world)
    model = seeded(Stack, blocks=3 + (kind == "layer" and rank))
    if kind == "dtype" and rank == 1:
        model.blocks[1].up.bfloat16()
    stage = 2 + (kind == "stage" and rank)
    types = [type(p) for p in model.parameters()]
    try:
        zs.shard(model, adamw(model.parameters()), stage=stage, comm=comm)
    except zs.ModelMismatch as error:
        assert types == [type(p) for p in model.parameters()]
        return str(error)



def test_b14_shard_before_the_process_group_exists():
    run_processes(_forgotten_group, 2)


@pytest.mark.parametrize("kind", ["layer", "dtype", "stage"])
def test_b15_different_models_are_named_on_every_rank(kind):
    expected = {
        "layer": ["parameter 20: rank 0: last.weight (3, 7)", "rank 1: blocks.3.norm.weight (7,)"],
        "dtype": ["rank 0: blocks.1.up.weight (14, 7) torch.float32", "rank 1: blocks.1.up.weight (14, 7) torch.bfloat16"],
        "stage": ["stage=2", "stage=3"],
    }
    for message in run_processes(_different_models, 2, "shared", kind):
        assert all(part in message for part in expected[kind]), message


def test_the_launcher_reports_the_first_failure():
    with pytest.raises(ProcessesFailed, match="the batch of rank 1 is empty"):
        run_processes(_fail, 2, "shared", "raise", timeout_s=60)
    assert copy is not None
