"""A step over a slow link between two nodes of two ranks: its time and its bytes in each way, beside FSDP2's.

    ZEROSHARD_SLOW=1 pytest tests/comm/mesh/test_slow_link.py -s         200 Mbit/s, some 3 minutes on 2 cores
    ZEROSHARD_LINK=1e9 ZEROSHARD_SLOW=1 pytest ...                       another bandwidth, in bits a second

A proxy of that bandwidth stands between the nodes (support/nodes.py). Ranks of one node share memory; FSDP2's use gloo there.
All ways are alive in the same four processes and take turns in each round; times are of the slowest rank, bytes those that node
0 sends. The *bound* of a step is its bytes over the bandwidth; the rest of a step is computation and waiting.
"""

import functools
import os
import time
from statistics import median

import pytest
import torch
import torch.distributed as dist
from nodes import Nodes
from torch import nn

import zeroshard as zs
from benchmarks.contenders import plain_step
from benchmarks.micro import take_turns
from benchmarks.plan import ModelShape, Workload
from benchmarks.race import LOSS_TOLERANCE
from benchmarks.tables import median_ratio
from benchmarks.workload import batch, blocks, build_model, build_optimizer
from zeroshard.comm.launch import run_processes

RANKS, RANKS_HERE, ROUNDS = 4, 2, 3
LINK = float(os.environ.get("ZEROSHARD_LINK", "200e6"))
# few operations for the bytes that it sends
WORKLOAD = Workload(shape=ModelShape(vocab_size=256, seq_len=32, dim=512, layers=3), sequences=1, ranks=RANKS)
HPZ, QWZ, QGZ = {"zero_hpz_partition_size": RANKS_HERE}, {"zero_quantized_weights": True}, "zero_quantized_gradients"
WAYS = {  # options of zs.shard at stage 3, or the mesh of FSDP2
    "one hop": {"hierarchical": False}, "two hops": {}, "HSDP": {"shard_size": RANKS_HERE}, "hpZ": HPZ, "qwZ": QWZ,
    "qgZ": {QGZ: True}, "hpZ + qwZ + qgZ": HPZ | QWZ | {QGZ: True}, "the same, gradients int4": HPZ | QWZ | {QGZ: "int4"},
    "gradients of low rank": {QGZ: "low_rank"}, "gradients' top 1%": {QGZ: "top_k"}, "FSDP2": (4,), "FSDP2, 2-D mesh": (2, 2),
}  # fmt: skip


def build(how) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(WORKLOAD)
    if isinstance(how, dict):
        return zs.shard(model, build_optimizer(model.parameters(), WORKLOAD), stage=3, **how)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", how, mesh_dim_names=("replicate", "shard")[-len(how) :])
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh)
    return model, build_optimizer(model.parameters(), WORKLOAD)


def train(rank: int, world_size: int, nodes: Nodes):
    """By way: (seconds, bytes that the node sent, loss) of each round, and the bytes of a step by the formula."""
    nodes.enter(rank // RANKS_HERE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=nodes.init_method)
    trained, steps = {name: build(how) for name, how in WAYS.items()}, dict.fromkeys(WAYS, 0)

    def turn(name: str) -> tuple[float, int, float]:
        tokens, targets = batch(WORKLOAD, steps[name], rank)
        steps[name] += 1
        dist.barrier()
        sent, begin = nodes.sent_nbytes(), time.perf_counter()
        loss = plain_step(*trained[name])(tokens, targets)
        seconds = time.perf_counter() - begin
        dist.barrier()  # until then other ranks of this node may still send for this step
        return seconds, nodes.sent_nbytes() - sent, loss.item()

    # the first round warms up memory and the sockets' windows
    turns = take_turns({name: functools.partial(turn, name) for name in WAYS}, ROUNDS, warmup=1)
    formulas = {}
    for name in (name for name, how in WAYS.items() if isinstance(how, dict)):
        report = zs.report(trained[name][0])
        counted = name == "gradients of low rank"  # there is no formula for its factors, whose sizes vary by matrix
        formulas[name] = report.measured_between_nbytes_per_step if counted else report.theory_between_nbytes_per_step
    return turns, formulas


@pytest.mark.slow  # 3 minutes; bytes and losses of the ways: test_two_nodes
@pytest.mark.processes
@pytest.mark.limit(900)
def test_packed_steps_are_faster_in_proportion_to_a_slow_link():
    with Nodes(LINK) as nodes:
        ranks = run_processes(train, RANKS, nodes)
    seconds, sent, losses = {}, {}, {}
    for name in WAYS:
        rounds = list(zip(*(turns[name] for turns, _ in ranks), strict=True))  # [round][rank]
        seconds[name] = [max(each_s for each_s, *_ in each) for each in rounds]
        sent[name] = median(each[0][1] for each in rounds)
        losses[name] = [sum(loss for *_, loss in each) / RANKS for each in rounds]
        told = (
            f"{1e3 * median(seconds[name]):6.0f} ms, bound {8e3 * sent[name] / LINK:6.0f} ms, {sent[name] / 1e6:6.2f} MB a node"
        )
        print(f"{name:26s} {told}, loss {losses[name][-1]:.5f}")
        if formula := sum(formulas.get(name, 0.0) for _, formulas in ranks[:RANKS_HERE]):  # both ranks of node 0
            assert sent[name] == pytest.approx(formula, rel=0.05), name
        if not any(str(each).startswith("zero_quantized") for each in WAYS[name]):
            assert losses[name] == pytest.approx(losses["one hop"], rel=LOSS_TOLERANCE["fp32"]), name
    for plain in ("one hop", "two hops"):
        faster = median_ratio(seconds[plain], seconds["hpZ + qwZ + qgZ"])
        print(f"hpZ + qwZ + qgZ is {faster:.2f} times faster than {plain}")
        assert LINK > 200e6 or faster >= 2.5
