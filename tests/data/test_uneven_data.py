"""Ranks with fewer batches than others: zs.join, zs.stop_together, and what is said without them (B02, C5).

The reference is one process that, in every step, takes the mean over the batches that exist.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import MLP, differences, flat, seeded, vector_batches
from recording_streams import RecordingStreams
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.comm.backend_select import _close_all
from zeroshard.comm.launch import run_processes
from zeroshard.config import Offload
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine.comm.process_group import DistComm
from zeroshard.engine.runtime import runtime_of
from zeroshard.seam import masters_shown
from zeroshard.testing import run_threads
from zeroshard.utils.setting import setting

LENGTHS = (7, 5, 6, 7)
STAGES = (0, 1, 2, 3)


def batches(lengths: tuple[int, ...] = LENGTHS) -> list[list[tuple[Tensor, Tensor]]]:
    """batches[rank][i]"""
    data = vector_batches(max(lengths), 1, len(lengths))
    return [[data[i][0][rank] for i in range(length)] for rank, length in enumerate(lengths)]


BASE = seeded(MLP)  # before threads share the generator


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def run(rank: int, lengths: tuple[int, ...], options: dict, every: int = 1, clip: float | None = None, schedule: bool = False,
        weigh: bool = False, held: bool = False, first: bool = False) -> tuple[dict, list[float], list[float]]:  # fmt: skip
    """One rank. every: batches a step. held: with zs.accumulate. first: zero_grad at the beginning of a step."""
    model = copy.deepcopy(BASE)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n)) if schedule else None
    norms = []
    with zs.join(model):
        for i, (x, y) in enumerate(batches(lengths)[rank]):
            ends = i % every == every - 1
            if first and i % every == 0:
                optimizer.zero_grad()
            with zs.accumulate(model) if held and not ends else contextlib.nullcontext():
                if weigh:
                    zs.backward(model, model(x, y), weight=1.0 + rank + i)
                else:
                    (model(x, y) / every).backward()
            if not ends:
                continue
            if clip is not None:
                zs.clip_grad_norm_(model, clip)
            optimizer.step()
            norms.append(optimizer.last_step.grad_norm)
            if scheduler is not None:
                scheduler.step()
            if not first:
                optimizer.zero_grad()
    state = zs.full_state_dict(model, masters=True)
    rates = [group["lr"] for group in optimizer.param_groups] + ([scheduler.last_epoch] if scheduler else [])
    zs.close(model)
    return state, norms, rates


def reference(lengths: tuple[int, ...], every: int = 1, clip: float | None = None, schedule: bool = False, weigh: bool = False,
              **_: Any) -> tuple[dict, list[float]]:  # fmt: skip
    model = copy.deepcopy(BASE)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n)) if schedule else None
    data, norms = batches(lengths), []
    for begin in range(0, max(lengths) - every + 1, every):
        there = [(r, i) for i in range(begin, begin + every) for r in range(len(lengths)) if i < lengths[r]]
        weights = [1.0 + r + i if weigh else 1.0 for r, i in there]
        for (r, i), weight in zip(there, weights, strict=True):
            (model(*data[r][i]) * (weight / sum(weights))).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return model.state_dict(), norms


def check(results: list, lengths: tuple[int, ...], **how: Any) -> None:
    expected, norms = reference(lengths, **how)
    longest = lengths.index(max(lengths))
    for state, _, rates in results:
        torch.testing.assert_close(flat(state), flat(expected), rtol=2e-5, atol=2e-6)
        assert torch.equal(flat(state), flat(results[0][0]))  # all ranks hold the same
        assert rates == results[0][2]
    torch.testing.assert_close(results[longest][1], norms, rtol=1e-5, atol=1e-6)


WAYS: dict[str, dict] = {
    "plain": {},
    "zero_first": {"first": True},
    "clip": {"clip": 0.05},
    "schedule": {"schedule": True},
    "weights": {"weigh": True},
    "accumulate": {"every": 2},
    "held": {"every": 2, "held": True},
    "held_first": {"every": 2, "held": True, "first": True},
    "held_weights": {"every": 3, "held": True, "weigh": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", STAGES)
def test_join_takes_the_mean_over_the_batches_that_exist(stage: int, way: str) -> None:
    results = run_threads(4, lambda rank: run(rank, LENGTHS, {"stage": stage}, **WAYS[way]))
    check(results, LENGTHS, **WAYS[way])


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (2, 2), (1, 4, 0)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_may_be_empty(stage: int, lengths: tuple[int, ...]) -> None:
    check(run_threads(len(lengths), lambda rank: run(rank, lengths, {"stage": stage})), lengths)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_before_the_loop_of_a_rank_without_data(stage: int, shown: bool) -> None:
    def write(model: nn.Module) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)

    def train(rank: int) -> dict:
        model = copy.deepcopy(BASE)
        with setting(masters_shown, shown):
            model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        write(model)
        with zs.join(model):
            for batch in batches((1, 0))[rank]:
                model(*batch).backward()
                optimizer.step()
        return zs.full_state_dict(model)

    model = copy.deepcopy(BASE)
    write(model)
    model(*batches((1, 0))[0][0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for got in run_threads(2, train):
        assert differences(got, model.state_dict()) == []


def test_no_rank_has_data() -> None:
    results = run_threads(2, lambda rank: run(rank, (0, 0), {"stage": 3}))
    assert torch.equal(flat(results[0][0]), flat(BASE.state_dict()))


def _over_sockets(rank: int, world_size: int, ways: list[str]) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for stage in STAGES:
        for way in ways:
            results[stage, way] = run(rank, LENGTHS, {"stage": stage, "comm": "dist", "stall_timeout_s": 20.0}, **WAYS[way])
    for stage in STAGES:
        comm = DistComm(None, torch.device("cpu"), 20.0, ordered=True, streams=RecordingStreams(), desk=JudgingDesk())
        results[stage, "ordered"] = run(rank, LENGTHS, {"stage": stage, "comm": comm})
    results[3, "empty"] = run(rank, (0, 2, 1, 0), {"stage": 3, "comm": "dist", "stall_timeout_s": 20.0})
    results[3, "disk"] = run(rank, LENGTHS, {"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"})
    return results


@pytest.mark.processes
def test_join_over_torch_distributed() -> None:
    """Where gathers need every rank: ranks without data are told of each."""
    ways = ["plain", "clip", "schedule", "held_weights", "held_first"]
    results = run_processes(_over_sockets, 4, ways)
    for stage in STAGES:
        for way in ways:
            check([rank[stage, way] for rank in results], LENGTHS, **WAYS[way])
        check([rank[stage, "ordered"] for rank in results], LENGTHS)
    check([rank[3, "empty"] for rank in results], (0, 2, 1, 0))
    check([rank[3, "disk"] for rank in results], LENGTHS)


KINDS: dict[str, dict] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "initial_loss_scale": 2.0**8},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "host": {"offload_optimizer": "cpu"},
    "delayed": {"offload_optimizer": "cpu", "delayed_update": 1},
}


@pytest.mark.parametrize("kind, stage", [(k, s) for k in KINDS for s in STAGES if s or "offload_optimizer" not in KINDS[k]])
def test_join_at_every_precision_and_tier(kind: str, stage: int) -> None:
    """The same as the fp32 reference, as nearly as the precision allows; on all ranks the same bits."""
    results = run_threads(4, lambda rank: run(rank, LENGTHS, {"stage": stage, **KINDS[kind]}))
    expected, _ = reference(LENGTHS, clip=KINDS[kind].get("max_grad_norm"))
    exact = "precision" not in KINDS[kind] and kind != "delayed"  # one step behind
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if exact else {"rtol": 0.0, "atol": 2e-2}
    for state, _, _ in results:
        torch.testing.assert_close(flat(state), flat(expected), **tolerance)
        assert torch.equal(flat(state), flat(results[0][0]))


@pytest.mark.parametrize("stage", [2, 3])
def test_join_with_all_states_on_disk(stage: int, tmp_path: Path) -> None:
    """Parameters on another tier: every rank takes part in each gather."""
    disk = Offload("nvme", path=str(tmp_path), any_filesystem=True, buffer_nbytes=1 << 16, buffer_count=2)
    options = {"stage": stage, "offload_optimizer": disk, "offload_gradient": disk}
    if stage == 3:
        options["offload_param"] = disk
    check(run_threads(4, lambda rank: run(rank, LENGTHS, options, schedule=True)), LENGTHS, schedule=True)


def _overflow(rank: int, stage: int) -> tuple[dict, list[bool], float]:
    """Rank 0's data ends after one batch; of rank 1's, the second overflows."""
    model = copy.deepcopy(BASE)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, precision="fp16", initial_loss_scale=2.0**8)
    skipped = []
    with zs.join(model):
        for i, (x, y) in enumerate(batches((1, 4))[rank]):
            (model(x, y) * (float("inf") if i == 1 else 1.0)).backward()
            optimizer.step()
            skipped.append(optimizer.last_step.skipped)
            optimizer.zero_grad()
    return zs.full_state_dict(model), skipped, runtime_of(model).progress.scaler.scale


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_data_skip_the_same_steps(stage: int) -> None:
    left, right = run_threads(2, _overflow, stage)
    assert right[1] == [False, True, False, False]
    assert left[2] == right[2] == 2.0**7
    assert torch.equal(flat(left[0]), flat(right[0]))


def _gradients(rank: int, stage: int) -> dict | None:
    model = copy.deepcopy(BASE)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage)
    seen = None
    with zs.join(model):
        for i, (x, y) in enumerate(batches((1, 2, 2))[rank]):
            model(x, y).backward()
            if i == 1:
                seen = {name: p.grad.to_local().clone() if stage else p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_the_mean_before_the_step(stage: int) -> None:
    """What a loop sees in p.grad is what is stepped."""
    seen = run_threads(3, _gradients, stage)[1]
    model = copy.deepcopy(BASE)
    optimizer = adamw(model.parameters())
    data = batches((1, 2, 2))
    for i in range(2):
        optimizer.zero_grad()
        there = [rank for rank in range(3) if i < len(data[rank])]
        for rank in there:
            (model(*data[rank][i]) / len(there)).backward()
        if i == 0:
            optimizer.step()
    for name, param in model.named_parameters():
        if seen[name].numel() == param.numel():
            torch.testing.assert_close(seen[name].view(param.shape), param.grad, rtol=1e-5, atol=1e-7)
    assert seen.keys() == dict(model.named_parameters()).keys()


# -- what ranks without data can not do -------------------------------------------------------------------------


REFUSED: dict[str, Callable[[nn.Module, Any], object]] = {
    "zs.full_state_dict": lambda model, _: zs.full_state_dict(model),
    "zs.full_gradients": lambda model, _: zs.full_gradients(model),
    "zs.full_optimizer_state": lambda model, _: zs.full_optimizer_state(model),
    "zs.full_optimizer_state_dict": lambda model, _: zs.full_optimizer_state_dict(model),
    "zs.gathered": lambda model, _: zs.gathered(model).__enter__(),
    "zs.close": lambda model, _: zs.close(model),
    "zs.save": lambda model, optimizer: zs.save("nowhere", model, optimizer),
    "full_tensor": lambda model, _: next(model.parameters()).full_tensor(),
    r"a norm .* zs\.clip_grad_norm_": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a norm": lambda model, _: next(p for p in model.parameters() if p.dim() > 1)[0].norm(),
    "a write to a parameter": lambda model, _: next(model.parameters()).data.mul_(0.9),
    "a write to the gradient": lambda model, _: next(model.parameters()).grad.mul_(0.9),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_every_rank_is_refused_once_one_has_ended(what: str) -> None:
    def body(rank: int) -> str:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        said = ""
        with zs.join(model):
            for i, (x, y) in enumerate(batches((1, 3, 2))[rank]):
                model(x, y).backward()
                if i == 1:
                    with pytest.raises(zs.ZeroshardError, match=f"{what}.*data of rank 0 has ended") as caught, torch.no_grad():
                        REFUSED[what](model, optimizer)
                    said = str(caught.value)
                optimizer.step()
                optimizer.zero_grad()
        zs.full_state_dict(model)
        return said

    said = run_threads(3, body)
    assert said[0] == "" and "zs.stop_together" in said[1] and said[1] == said[2]


def test_sums_held_back_beside_gradients_at_rest_of_a_rank_without_data() -> None:
    """Stage 0 in bf16: the rank with data has copied its reduced gradients aside for the sums, the other one has not."""

    def work(rank: int) -> list[float]:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=0, precision="bf16")
        batch = batches()[0][0]
        with zs.join(model):
            for step in range(1 + rank):
                with zs.accumulate(model) if step else contextlib.nullcontext():
                    model(*batch).backward()
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        return flat(zs.full_state_dict(model)).tolist()

    one, other = run_threads(2, work)
    assert one == other


def test_join_inside_join_is_refused() -> None:
    model = copy.deepcopy(BASE)
    model, _ = zs.shard(model, adamw(model.parameters()), stage=3)
    with zs.join(model), pytest.raises(zs.ZeroshardError, match="zs.join inside zs.join"), zs.join(model):
        pass


def test_ranks_with_other_schedulers_are_told_so() -> None:
    def body(rank: int) -> None:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=2)
        kept = torch.optim.lr_scheduler.StepLR(optimizer, 1) if rank else None
        with zs.join(model):
            for x, y in batches((1, 2))[rank]:
                model(x, y).backward()
                optimizer.step()
        assert not rank, kept

    with pytest.raises(zs.ZeroshardError, match="different learning-rate schedulers"):
        run_threads(2, body)


# -- schedulers ---------------------------------------------------------------------------------------------------


SCHEDULERS: dict[str, Callable] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_go_on_alike_after_the_block(kind: str) -> None:
    def body(rank: int) -> tuple[list[float], dict]:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=2)
        scheduler, rates = SCHEDULERS[kind](optimizer), []

        def step(measured: float) -> None:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([measured] if kind == "plateau" else []))

        with zs.join(model):
            for i, (x, y) in enumerate(batches((2, 5, 3))[rank]):
                model(x, y).backward()
                step(1.0 + i)
        for x, y in batches((2, 2, 2))[rank]:
            model(x, y).backward()
            step(9.0)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, zs.full_state_dict(model)

    results = run_threads(3, body)
    assert results[0][0] == results[1][0] == results[2][0]
    if kind != "plateau":
        optimizer = adamw(BASE.parameters())
        scheduler = SCHEDULERS[kind](optimizer)
        expected = []
        for _ in range(7):
            optimizer.step()
            scheduler.step()
            expected.append(optimizer.param_groups[0]["lr"])
        assert results[0][0] == expected[5:]


# -- all stop together --------------------------------------------------------------------------------------------


def _together(rank: int, lengths: tuple[int, ...], held: bool) -> tuple[int, int, dict]:
    model = copy.deepcopy(BASE)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
    data, runtime = batches(lengths)[rank], runtime_of(model)
    messages, count = [], 0
    exchange = runtime.comm.exchange
    runtime.comm.exchange = lambda payload, label: (messages.append(label), exchange(payload, label))[1]
    for count, (x, y) in enumerate(zs.stop_together(model, data), 1):
        with zs.accumulate(model) if held else contextlib.nullcontext():
            model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    asked = sum("stop_together" in label for label in messages)
    runtime.comm.exchange = exchange
    return count, asked, zs.full_state_dict(model)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (3, 3), (0, 2)], ids=str)
def test_all_ranks_stop_with_the_first(lengths: tuple[int, ...], held: bool, capsys: pytest.CaptureFixture) -> None:
    results = run_threads(len(lengths), _together, lengths, held)
    shortest = min(lengths)
    assert [count for count, _, _ in results] == [shortest] * len(lengths)
    assert [asked for _, asked, _ in results] == [1] * len(lengths)  # the first batch; the rest is told in passing
    said = capsys.readouterr().err
    assert ("stopped after" in said) == (len(set(lengths)) > 1)
    if len(set(lengths)) > 1:
        assert f"stopped after {shortest} batches, where the data of rank {lengths.index(shortest)} ended" in said


def test_stop_together_without_backward_asks_each_time() -> None:
    def body(rank: int) -> int:
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=3)
        with torch.no_grad():
            return len([model(x, y) for x, y in zs.stop_together(model, batches((3, 2))[rank])])

    assert run_threads(2, body) == [2, 2]


def test_stop_together_under_a_sampler_that_counts() -> None:
    """`follow` around it counts what the loop was given, not what was taken ahead."""

    def body(rank: int) -> int:
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=3)
        sampler = zs.ShardedSampler(12, shuffle=False, rank=rank, world_size=2)
        loader = torch.utils.data.DataLoader(torch.arange(12), batch_size=2, sampler=sampler)
        for _ in sampler.follow(zs.stop_together(model, loader)):
            return sampler.samples
        return -1

    assert run_threads(2, body) == [4, 4]


# -- what is said without zs.join -----------------------------------------------------------------------------------


LEFT = (
    r"Rank 0 left the training loop after step 2 \(its data ended\?\) while {} in step 3\..*zs\.join\(model\).*zs\.stop_together"
)


def _without_join(rank: int, stage: int, after: Callable[[nn.Module], object], **options: Any) -> None:
    model = copy.deepcopy(BASE)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, **options)
    for x, y in batches((2, 4, 4))[rank]:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    after(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_whose_script_ends_is_told_to_all(stage: int) -> None:
    with pytest.raises(zs.PeerFailed, match=LEFT.format("this rank is")) as caught:
        run_threads(3, _without_join, stage, lambda model: None)
    assert "ranks with errors: [1, 2]" in str(caught.value.__notes__)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_goes_on_to_another_call_is_told_to_all(stage: int) -> None:
    with pytest.raises(zs.CollectiveMismatch, match=LEFT.format("ranks 1, 2 are")) as caught:
        run_threads(3, _without_join, stage, zs.full_optimizer_state)
    assert "rank 0: optimizer state" in str(caught.value)
    assert "Has rank 0 alone made the call that waits at 'optimizer state: keys'? Make it on all ranks. Or: Rank 0" in str(
        caught.value
    )
    assert "ranks with errors: [0, 1, 2]" in str(caught.value.__notes__)


def test_a_rank_that_does_something_else_is_told_in_the_report_of_the_stall(monkeypatch) -> None:
    monkeypatch.setattr("zeroshard.comm.hub.CIRCLE_AFTER_S", 1.0)  # how long a rank waits before it asks who is busy

    def after(model: nn.Module) -> None:
        time.sleep(4)

    def body(rank: int) -> None:
        backend_select.current(None, torch.device("cpu"), 2.0).stall_timeout_s = 2.0
        _without_join(rank, 3, after)

    with pytest.raises(zs.StallError, match=LEFT.format("ranks 1, 2 are")):
        run_threads(3, body)


def _in_processes(rank: int, world_size: int) -> tuple[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        _without_join(rank, 2, zs.full_optimizer_state, comm="dist", stall_timeout_s=20.0)
        mismatch = ""
    except zs.CollectiveMismatch as error:
        mismatch = str(error)
    return mismatch, _after_its_end(rank)


def _after_its_end(rank: int) -> str:
    try:
        _without_join(rank, 2, lambda model: _close_all())
    except zs.PeerFailed as error:
        return str(error)
    time.sleep(1)  # until the others have seen how it left, not that it is gone
    return ""


@pytest.mark.processes
def test_processes_are_told_as_well() -> None:
    """Over torch.distributed of one that is in another call, over shared memory of one that has ended."""
    results = run_processes(_in_processes, 3)
    assert all(re.search(LEFT.format("ranks 1, 2 are"), mismatch) for mismatch, _ in results), results
    assert results[0][1] == "" and all(re.search(LEFT.format("this rank is"), said) for _, said in results[1:]), results


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_join_sends_nothing_before_a_rank_has_ended(stage: int) -> None:
    """As many messages a step inside as outside, where ranks read each other's memory."""

    def body(rank: int) -> list[int]:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage)
        comm, counts = runtime_of(model).comm, []
        exchange, comm.exchange = comm.exchange, lambda payload, label: (counts.append(label), exchange(payload, label))[1]
        found = []
        for inside in (False, True):
            with zs.join(model) if inside else contextlib.nullcontext():
                for x, y in batches((3, 3))[rank]:
                    counts.clear()
                    model(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(len(counts))
        comm.exchange = exchange
        return found

    outside, inside = run_threads(2, body)[0]
    assert outside == inside > 0
