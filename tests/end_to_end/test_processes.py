"""Real processes over gloo: equality to the reference, and every failure ends on every rank, in time, with a sentence.

Starting processes costs more than all that they do here. So three ranks are started, once; for each scenario all of
them, or the first two, fork a child, which forms a process group of its own and lives and dies as a rank would
(forked_scenarios.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from forked_scenarios import Outcome, run_forked
from zoo import (
    Case,
    Language,
    MixtureOfExperts,
    Stack,
    adamw,
    compare,
    normal_batches,
    reference,
    seeded,
    sharded,
    square,
    token_batches,
)

import zeroshard as zs
from zeroshard.comm.launch import free_port, run_processes

# ranks that were spawned would import torch anew for each of the scenarios; Linux, where shared memory is used, has fork
pytestmark = [pytest.mark.processes, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


# -- scenarios ---------------------------------------------------------------------------------------------------


def cases(world: int) -> dict[str, Case]:
    return {
        "language": Case(seeded(Language, tied=True), token_batches(2, world, 17, 2, 5)),
        "experts": Case(seeded(MixtureOfExperts), normal_batches(4, world, 3, 6), square),
        "stack": Case(seeded(Stack), normal_batches(2, world, 4, 7), square),
    }


def train_all(comm: str):
    def run(rank: int, world: int):
        dist.init_process_group("gloo")
        traces = {}
        for name, case in cases(world).items():
            # at stage 3 every rank must send its part of a unit, so ranks that use different experts need shared memory
            for stage in range(3 if (name, comm) == ("experts", "dist") else 4):
                for mapped in (True, False) if stage == 3 and comm == "shared" else (True,):
                    trace = sharded(case, rank, stage=stage, map_shared=mapped, comm=comm)
                    trace.notes = None
                    traces[name, stage, mapped] = pickle.dumps(trace)
        dist.destroy_process_group()
        return traces

    return run


def born_sharded(rank: int, world: int):
    """Random initialisation with rejection loops: processes have generators of their own."""
    dist.init_process_group("gloo")
    with zs.init(stage=3):
        model = seeded(Language)
        torch.manual_seed(3)
        torch.nn.init.trunc_normal_(model.head.weight, std=1.0, a=-1.0, b=1.0)
    zs.shard(model, None, stage=3)
    torch.manual_seed(4)
    torch.nn.init.trunc_normal_(model.embedding.weight, std=1.0, a=-1.0, b=1.0)
    return {name: value.numpy() for name, value in zs.full_state_dict(model).items()}


def fault(comm: str, kind: str):
    """Rank 1 does something at step 2; the others go on until they notice."""

    def empty(module, args):
        raise ValueError("the batch of rank 1 is empty")

    def run(rank: int, world: int):
        dist.init_process_group("gloo")
        pids = [None] * world
        dist.all_gather_object(pids, os.getpid())
        model = seeded(Stack)
        told = comm == "shared" and kind not in ("extra", "leave")  # else it is missed after a while
        stall_s = 3600.0 if told else 2.5 if kind in ("extra", "leave") else 5.0
        model, optimizer = zs.shard(model, adamw(model.parameters()), comm=comm, stage=3, stall_timeout_s=stall_s)
        for step in range(10**6):
            if rank == 1 and step == 2:
                if kind == "raise":
                    model.blocks[1].register_forward_pre_hook(empty)
                elif kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif kind == "exit":
                    sys.exit(3)
                elif kind == "exit well":
                    sys.exit(0)
                elif kind == "extra":
                    zs.full_optimizer_state(model)
                elif kind == "leave":
                    _wait_until_gone(pids[0])
                    return
            square(model, (torch.ones(2, 7),)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def forks(rank: int, world: int):
    """Rank 1 forks a child that acts as a rank and fails, then one that outlives it."""
    dist.init_process_group("gloo")
    model = seeded(Stack)
    model, optimizer = zs.shard(
        model, adamw(model.parameters()), comm="shared", stage=3, map_shared=False, stall_timeout_s=3600.0
    )
    pids: list = [None] * world
    dist.all_gather_object(pids, os.getpid())
    for step in range(10**6):
        if rank == 1 and step == 1:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                try:
                    zs.full_optimizer_state(model)  # parameters it may read: they are in shared memory
                except BaseException as error:
                    os.write(writer, f"{type(error).__name__}: {error}".encode())
                    sys.excepthook(type(error), error, error.__traceback__)  # as an interpreter that it ends
                finally:
                    os._exit(1)
            os.close(writer)
            os.waitpid(pid, 0)
            told = os.read(reader, 1 << 16).decode()
            assert told.startswith("ZeroshardError: process") and "was forked from rank 1 and is not a rank" in told, told
            time.sleep(0.3)  # for what the child may have told the peers
        if rank == 1 and step == 3:
            if os.fork() == 0:
                _wait_until_gone(pids[0])  # which notices that rank 1 is gone while this child is there, or hangs
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            square(model, (torch.ones(2, 7),)).backward()
            optimizer.step()
            optimizer.zero_grad()
        except zs.PeerFailed as error:
            return step, str(error)


def _wait_until_gone(pid: int) -> None:
    """However long that takes: LIMIT_S ends it."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.05)


def no_process_group(rank: int, world: int):
    model = seeded(Stack)
    try:
        zs.shard(model, adamw(model.parameters()), stage=2)
    except zs.ConfigError as error:
        return str(error), any(hasattr(p, "_home") for p in model.parameters())


def different(kind: str):
    def run(rank: int, world: int):
        dist.init_process_group("gloo")
        model = seeded(Stack, blocks=3 + (kind == "layer" and rank))
        if kind == "dtype" and rank == 1:
            model.blocks[1].up.bfloat16()
        types = [type(p) for p in model.parameters()]
        try:
            zs.shard(model, adamw(model.parameters()), stage=2 + (kind == "stage" and rank))
        except zs.ModelMismatch as error:
            return str(error), types == [type(p) for p in model.parameters()]

    return run


COMMS = ("shared", "dist")
FAULTS = ("raise", "kill", "exit", "exit well", "extra")
SCENARIOS = {f"train {comm}": train_all(comm) for comm in COMMS}
SCENARIOS |= {f"{kind} {comm}": fault(comm, kind) for comm in COMMS for kind in FAULTS}
SCENARIOS |= {"leave shared": fault("shared", "leave"), "born": born_sharded, "forks": forks, "no group": no_process_group}
SCENARIOS |= {f"different {kind}": different(kind) for kind in ("layer", "dtype", "stage")}
WAITING = ("kill dist", "exit dist", "exit well dist", "extra dist", "leave shared")  # seconds, until somebody is missed
THREE = ("train shared", "train dist", "raise shared", "raise dist")


def _run_both(rank: int, _: int, triple: dict[str, int], pair: dict[str, int]) -> dict[int, dict[str, Outcome]]:
    """World size -> name -> how it ended. Three ranks first: none may wait in a child until the others have time."""
    ended = {3: run_forked(rank, 3, triple, SCENARIOS, WAITING)}
    return ended | {2: run_forked(rank, 2, pair, SCENARIOS, WAITING)} if rank < 2 else ended


@pytest.fixture(scope="module")
def ended():
    triple, pair = ({name: free_port() for name in names} for names in (THREE, SCENARIOS))
    return run_processes(_run_both, 3, triple, pair)


@pytest.fixture(scope="module")
def pair(ended):
    return [rank[2] for rank in ended[:2]]


@pytest.fixture(scope="module")
def triple(ended):
    return [rank[3] for rank in ended]


# -- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("world", [2, 3])
def test_processes_equal_the_reference_at_every_stage(pair, triple, world, comm):
    outcomes = [rank[f"train {comm}"] for rank in (pair if world == 2 else triple)]
    assert [o.exitcode for o in outcomes] == [0] * world, outcomes
    for name, case in cases(world).items():
        wanted = reference(case)
        for rank, outcome in enumerate(outcomes):
            mine = {key: pickle.loads(trace) for key, trace in outcome.value.items() if key[0] == name}
            assert len(mine) == (5 if comm == "shared" else 3 if name == "experts" else 4)
            for trace in mine.values():
                compare(trace, wanted[rank], 0.0)


def test_children_that_are_forked_neither_speak_for_their_rank_nor_keep_it_looking_alive(pair):
    noticed, died = (rank["forks"] for rank in pair)
    assert noticed.value and died.exitcode == -signal.SIGKILL, (noticed, died)
    step, text = noticed.value
    assert step == 3 and "killed" in text, noticed


def test_b16_born_sharded_in_processes_equals_one_process(pair):
    base = seeded(Language)
    torch.manual_seed(3)
    torch.nn.init.trunc_normal_(base.head.weight, std=1.0, a=-1.0, b=1.0)
    torch.manual_seed(4)
    torch.nn.init.trunc_normal_(base.embedding.weight, std=1.0, a=-1.0, b=1.0)
    for rank in pair:
        assert rank["born"].exitcode == 0, rank["born"].text
        for name, value in base.state_dict().items():
            assert torch.equal(torch.from_numpy(rank["born"].value[name]), value), name


@pytest.mark.parametrize("comm", COMMS)
def test_b04_an_exception_on_one_rank_reaches_the_others_with_its_traceback(triple, comm):
    outcomes = [rank[f"raise {comm}"] for rank in triple]
    assert all(o.exitcode == 1 for o in outcomes), outcomes
    assert "ValueError: the batch of rank 1 is empty" in outcomes[1].text
    for rank in (0, 2):
        assert "PeerFailed: rank 1 failed" in outcomes[rank].text
        assert "ValueError: the batch of rank 1 is empty" in outcomes[rank].text


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("kind", ["kill", "exit", "exit well"])
def test_b05_a_lost_rank_ends_the_others(pair, comm, kind):
    survivor, lost = (rank[f"{kind} {comm}"] for rank in pair)
    assert lost.exitcode == {"kill": -signal.SIGKILL, "exit": 3, "exit well": 0}[kind]
    assert survivor.exitcode == 1, survivor  # by itself: one that hangs is killed
    assert "PeerFailed" in survivor.text, survivor.text
    if comm == "shared":
        assert "rank 1 failed" in survivor.text


@pytest.mark.parametrize("comm", COMMS)
def test_b01_an_extra_collective_on_one_rank_names_the_ranks(pair, comm):
    outcomes = [rank[f"extra {comm}"] for rank in pair]
    assert all(o.exitcode == 1 for o in outcomes), outcomes
    text = outcomes[0].text + outcomes[1].text
    assert "CollectiveMismatch" in text or "StallError" in text
    assert "rank 0" in text and "rank 1" in text


def test_b02_a_rank_that_leaves_the_loop_is_named(pair):
    waiting = pair[0]["leave shared"]
    assert waiting.exitcode == 1
    assert "StallError" in waiting.text and "rank 1 computes or sleeps" in waiting.text


def test_b14_shard_before_the_process_group_exists(pair):
    for rank in pair:
        message, changed = rank["no group"].value
        assert "init_process_group" in message and "WORLD_SIZE=2" in message and not changed


@pytest.mark.parametrize("kind", ["layer", "dtype", "stage"])
def test_b15_different_models_are_named_on_every_rank(pair, kind):
    expected = {
        "layer": ["rank 0: last.weight (3, 7)", "rank 1: blocks.3.norm.weight (7,)"],
        "dtype": ["rank 0: blocks.1.up.weight (14, 7) torch.float32", "rank 1: blocks.1.up.weight (14, 7) torch.bfloat16"],
        "stage": ["stage=2", "stage=3"],
    }
    for rank in pair:
        message, unchanged = rank[f"different {kind}"].value
        assert all(part in message for part in expected[kind]) and unchanged, message
