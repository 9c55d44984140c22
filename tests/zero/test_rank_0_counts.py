"""Ranks that compute other values: a model is rank 0's, or is refused by name; never a part of each rank's."""

import gc
import threading
import time

import numpy as np
import pytest
import torch
from helpers import seeded
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.comm.launch import run_processes
from zeroshard.seam import engine_of
from zeroshard.testing import run_threads
from zeroshard.values import init_context

WHOLE = torch.from_numpy(np.random.RandomState(0).randn(200)).float()


def own(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.RandomState(rank).randn(200)).float()


def copied(w, rank):
    w.copy_(own(rank))


def data_assigned(w, rank):
    w.data = own(rank)


def data_written(w, rank):
    w.data[:] = own(rank)


def by_numpy(w, rank):
    w.numpy()[:] = own(rank).numpy()


def on_rank_0(w, rank):
    if rank == 0:
        w.copy_(WHOLE)


def by_generator(w, rank):
    w.normal_(generator=torch.Generator().manual_seed(rank))


def upper_part_on_rank_0(w, rank):
    w.copy_(WHOLE)
    if rank == 0:
        w[100:].fill_(1)


def orthogonal(w, rank):
    nn.init.orthogonal_(w.view(20, 10), generator=torch.Generator().manual_seed(rank))


def truncated(w, rank):
    nn.init.trunc_normal_(w, generator=torch.Generator().manual_seed(rank))


def computed(w, rank):
    w.copy_(torch.ones(200)).mul_(rank + 2)


WRITES = [
    copied,
    data_assigned,
    data_written,
    by_numpy,
    on_rank_0,
    by_generator,
    upper_part_on_rank_0,
    orthogonal,
    truncated,
    computed,
]


class Written(nn.Module):
    """A module whose constructor writes its parameter; `later`: only when another module is there already."""

    def __init__(self, write, rank, later=False):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(200))
        self.register_buffer("seen", torch.full((2,), float(rank)))
        if not later:
            self.write(write, rank)
        self.inner = nn.Linear(3, 3)
        if later:
            self.write(write, rank)

    @torch.no_grad()
    def write(self, write, rank):
        write(self.w, rank)


def wanted(write) -> torch.Tensor:
    return Written(write, 0).w.detach()


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_a_constructor_writes_is_rank_0s(write, later):
    def run(rank):
        with zs.init(stage=3):
            model = Written(write, rank, later)
        zs.shard(model, None, stage=3)
        return zs.full_state_dict(model)

    for state in run_threads(3, run):
        assert torch.equal(state["w"], wanted(write)) and state["seen"].tolist() == [0.0, 0.0]


CUT = [write for write in WRITES if write not in (data_written, by_numpy)]  # what slices allow


@pytest.mark.parametrize("write", CUT, ids=lambda write: write.__name__)
def test_what_is_written_once_it_is_cut_is_refused_by_name(write, monkeypatch):
    """On every rank, and nothing has changed: whoever writes the same may go on."""
    monkeypatch.setattr(init_context, "_WHOLE_NBYTES", 0)

    def run(rank):
        with zs.init(stage=3):
            model = Written(lambda w, rank: None, rank)
            outer = nn.Sequential(model, nn.Linear(3, 3))
            assert model.w.to_local().numel() == 100
            with torch.no_grad():
                write(model.w, rank)
        with pytest.raises(zs.ModelMismatch, match=r"different values into 0\.w after zs\.init.*modifier_rank=0"):
            zs.shard(outer, None, stage=3)
        if write is not data_assigned:  # now of the same memory as its operand
            with zs.gathered(model, modifier_rank=0), torch.no_grad():
                write(model.w, rank)
        else:
            model.w.data = WHOLE.clone()
        zs.shard(outer, None, stage=3)
        return zs.full_state_dict(outer)["0.w"]

    for value in run_threads(2, run):
        assert torch.equal(value, wanted(write))


def test_the_same_writes_of_all_ranks_are_no_difference(monkeypatch):
    monkeypatch.setattr(init_context, "_WHOLE_NBYTES", 0)

    def run(rank):
        with zs.init(stage=3):
            model = Written(copied, 0)
            outer = nn.Sequential(model, nn.Linear(3, 3))
            with torch.no_grad():
                for p in outer.parameters():
                    p.copy_(torch.linspace(0, 1, p.numel()).view(p.shape)).mul_(2).add_(p)
                    p[:1].fill_(3)
        zs.shard(outer, None, stage=3)
        return zs.full_state_dict(outer)["0.w"]

    for value in run_threads(2, run):
        assert value[0] == 3 and torch.allclose(value[1:], 4 * torch.linspace(0, 1, 200)[1:])


def test_a_model_is_cut_while_it_is_made(monkeypatch):
    """At most the limit, and the parameters of the module that is being made, are whole."""
    monkeypatch.setattr(init_context, "_WHOLE_NBYTES", 4 * 4 * 32 * 32)
    most = []

    class Layer(nn.Linear):
        def reset_parameters(self):
            most.append(init_context._here.nbytes[init_context._ALL])
            super().reset_parameters()

    def run(rank):
        with zs.init(stage=3):
            model = nn.Sequential(*(Layer(32, 32) for _ in range(40)))
            assert isinstance(model[0].weight, torch.nn.Parameter)
        return sum(p.to_local().numel() for p in model.parameters())

    assert run_threads(2, run) == [40 * 33 * 16] * 2
    assert max(most) <= (5 + 1) * 4 * 33 * 32


def test_other_models_on_other_ranks_are_told():
    def run(rank):
        with (
            pytest.raises(
                zs.ModelMismatch,
                match=r"zs\.init: ranks built different models.*rank 0: Linear\.weight \(3, 2\).*; rank 1: Linear\.weight \(3, 3\)",
            ),
            zs.init(stage=3),
        ):
            kept = nn.Linear(2 + rank, 3)
        assert kept.weight.shape == (3, 2 + rank)

    run_threads(2, run)


def test_copies_ties_and_other_objects_are_kept():
    """deepcopy, LSTM's weak references, an optimizer made inside, a parameter under two names."""

    def run(rank):
        torch.manual_seed(1)
        with zs.init(stage=3):
            first = nn.Linear(4, 4)
            first.note = first.weight
            with torch.no_grad():
                first.weight.fill_(rank + 1.0)
            layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            model = nn.ModuleDict({"first": first, "encoder": nn.TransformerEncoder(layer, 2), "lstm": nn.LSTM(4, 5)})
            model["second"] = nn.Linear(4, 4)
            model["second"].weight = first.weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
        assert model["second"].weight is first.weight and first.note is first.weight
        assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        assert all(a is b for a, b in zip(model["lstm"]._flat_weights, model["lstm"].parameters(), strict=True))
        zs.shard(model, optimizer, stage=3)
        return zs.full_state_dict(model)

    one, two = run_threads(2, run)
    assert one["first.weight"].unique().tolist() == [1.0]
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def seeds(rank: int, ranks: int) -> tuple:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    with zs.init(stage=3):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        kept = torch.get_rng_state()
        with torch.no_grad():
            model[0].weight.full_tensor()  # cuts
            for p in model.parameters():
                p.normal_()  # as `_init_weights` does when all modules are there
    zs.shard(model, None, stage=3)
    goes_on = torch.equal(torch.get_rng_state(), before) if rank else not torch.equal(torch.get_rng_state(), kept)
    state = {name: value.numpy() for name, value in zs.full_state_dict(model).items()}
    torch.distributed.destroy_process_group()
    return state, goes_on


@pytest.mark.processes
def test_draws_of_ranks_with_other_seeds_are_rank_0s():
    """Inside zs.init every rank draws as rank 0; afterwards each has its own generator again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    for state, goes_on in run_processes(seeds, 2):
        assert goes_on
        for name, value in model.state_dict().items():
            assert np.array_equal(state[name], value.numpy()), name


# -- at rest, at stage 3 -------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def loss(model, scale=1.0):
    return model(torch.ones(2, 5) * scale).square().mean()


def weight_of(model):
    return next(p for p in model.parameters() if p.dim() == 2)


AT_REST = {
    "orthogonal": lambda w, rank: nn.init.orthogonal_(w, generator=torch.Generator().manual_seed(rank)),
    "copy": lambda w, rank: w.copy_(torch.full(w.shape, float(rank))),
    "draw": lambda w, rank: w.normal_(generator=torch.Generator().manual_seed(rank)),
    "rows": lambda w, rank: w[rank : rank + 1].zero_(),
    "computed": lambda w, rank: w.copy_(w * (1 + rank)),
    "noise": lambda w, rank: w.add_(torch.randn(w.shape, generator=torch.Generator().manual_seed(rank))),
    "data": lambda w, rank: setattr(w, "data", torch.full(w.shape, float(rank))),
    "foreach": lambda w, rank: torch._foreach_mul_([w.data], 1.0 + rank),
}


def trained(rank, stage=3):
    model = seeded(Net)
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, map_shared=False)
    loss(model, rank + 1).backward()
    return model, optimizer


@pytest.mark.parametrize("when", ["step", "clip", "save"])
@pytest.mark.parametrize("what", list(AT_REST))
def test_writes_at_rest_that_differ_are_told_when_ranks_meet(what, when, tmp_path):
    def run(rank):
        model, optimizer = trained(rank)
        weight = weight_of(model)
        with torch.no_grad():
            AT_REST[what](weight, rank)
        name = next(name for name, p in model.named_parameters() if p is weight)
        act = {
            "step": optimizer.step,
            "clip": lambda: zs.clip_grad_norm_(model, 1.0),
            "save": lambda: zs.save(str(tmp_path / "saved"), model, optimizer),
        }[when]
        for _ in range(2):
            with pytest.raises(
                zs.ModelMismatch, match=rf"{name} \(ranks 1 have written it otherwise than rank 0\).*modifier_rank=0"
            ):
                act()  # again at the next attempt
        with zs.gathered(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(0.5)
        act()
        optimizer.step()
        return zs.full_state_dict(model)

    one, two = run_threads(2, run)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def alone(rank: int, ranks: int) -> None:
    """Where ranks share memory a write is an operation of all; here it is not."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = Net()
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, comm="dist")
    loss(model).backward()
    with torch.no_grad():
        for write in (lambda: weight_of(model).fill_(1.0), lambda: weight_of(model)[:2].zero_()):
            if rank == 1:
                write()
            with pytest.raises(zs.ModelMismatch, match=r"0\.weight \(ranks 1 have written it otherwise than rank 0\)"):
                optimizer.step()
            weight_of(model).fill_(0.5)
    optimizer.step()
    torch.distributed.destroy_process_group()


@pytest.mark.processes
def test_one_rank_that_writes_alone_is_told_over_a_process_group():
    run_processes(alone, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_states_of_one_rank_are_told(stage):
    def run(rank):
        model, optimizer = trained(rank, stage)
        optimizer.step()
        state = zs.full_optimizer_state_dict(model)
        if rank == 0:
            for entries in state["state"].values():
                entries["exp_avg"] = entries["exp_avg"] * 2
            optimizer.load_state_dict(state)
        loss(model).backward()
        with pytest.raises(zs.ModelMismatch, match="their optimizer states or averages"):
            optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_that_one_rank_writes_is_told(stage):
    def run(rank):
        model, optimizer = trained(rank, stage)
        optimizer.step()
        with torch.no_grad():
            for entries in optimizer.state.values():
                entries["exp_avg"].mul_(1 + rank)
        loss(model).backward()
        with pytest.raises(zs.ModelMismatch, match="their optimizer states or averages"):
            optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("what", ["states", "average"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_ranks_load_alike_after_a_refusal_is_taken(stage, what):
    """And masters keep their precision, whatever is loaded beside them."""

    def run(rank):
        model = seeded(Net)
        model, optimizer = zs.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-5), stage=stage, precision="bf16", map_shared=False
        )
        average = zs.ema(model)

        def load(factor):
            if what == "states":
                state = optimizer.state_dict()
                for entries in state["state"].values():
                    for name in ("exp_avg", "exp_avg_sq"):
                        entries[name] = torch.full(tuple(entries[name].shape), 1e-3 * factor)
                optimizer.load_state_dict(state)
            else:
                average.load_state_dict({name: value * factor for name, value in average.full_state_dict().items()})

        loss(model).backward()
        optimizer.step()
        masters = zs.full_state_dict(model, masters=True)
        load(1 + rank)
        loss(model).backward()
        with pytest.raises(zs.ModelMismatch, match="their optimizer states or averages"):
            optimizer.step()
        load(1)
        optimizer.step()
        after = zs.full_state_dict(model, masters=True)
        return max((after[name] - value).abs().max().item() for name, value in masters.items())

    for moved in run_threads(2, run):
        assert 1e-6 < moved < 5e-5  # steps of lr 1e-5, which bf16 would swallow


def by_entry(optimizer, rank):
    for entries in optimizer.state.values():
        entries["step"] = torch.tensor(float(rank + 1))


def cleared(optimizer, rank):
    if rank == 0:
        optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def and_then_the_parameter(optimizer, rank):
    with torch.no_grad():
        for param, entries in optimizer.state.items():
            entries["exp_avg"].mul_(1 + rank)
            param.copy_(torch.ones(param.shape))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("write", [by_entry, cleared, and_then_the_parameter], ids=lambda write: write.__name__)
def test_states_that_are_written_entry_by_entry_are_told(write, stage):
    if stage == 0 and write is and_then_the_parameter:
        pytest.skip("at stage 0 each rank has ordinary tensors as states, which it may write in place, as under DDP")

    def run(rank):
        model, optimizer = trained(rank, stage)
        optimizer.step()
        write(optimizer, rank)
        loss(model).backward()
        with pytest.raises(zs.ModelMismatch, match="their optimizer states or averages"):
            optimizer.step()

    run_threads(2, run)


def history(w, rank):
    """A copy of a parameter has the parameter's history."""
    w.mul_(1.0 + rank)
    copy = w.clone()
    w.fill_(1.0)
    w.copy_(copy)


def part(w, rank):
    """A write to rows of a result is a write to the result."""
    copy = w * 1.0
    copy[1:3].fill_(1.0 + rank)
    w.copy_(copy)


RESULTS = {
    "detach": lambda w, rank: w.copy_((w * (1 + rank)).detach()),
    "view": lambda w, rank: w.copy_((w * (1 + rank)).view(w.shape)),
    "row": lambda w, rank: w[0].copy_((w * (1 + rank))[0]),
    "history": history,
    "part": part,
    "average": lambda w, rank: w.copy_((w * 1.0).mul_(1 + rank).data),
}


@pytest.mark.parametrize("what", list(RESULTS))
def test_results_and_their_aliases_carry_how_they_were_computed(what):
    def run(rank):
        model, optimizer = trained(rank)
        with torch.no_grad():
            RESULTS[what](weight_of(model), rank)
        with pytest.raises(zs.ModelMismatch, match=r"0\.weight"):
            optimizer.step()

    run_threads(2, run)


def test_lists_of_operands_are_compared_one_by_one():
    """A buffer of this rank in the same list says nothing of the parameters."""

    def run(rank):
        model, optimizer = trained(rank)
        averages = [p.detach() * 1.0 for p in model.parameters()]
        local = torch.full((3,), float(rank))
        with torch.no_grad():
            torch._foreach_mul_([*(p.data for p in model.parameters()), local], 0.5)
            torch._foreach_mul_([*averages, local.clone()], 0.9)
            torch._foreach_add_([*averages, local.clone()], [*(p.data for p in model.parameters()), local], alpha=0.1)
            torch._foreach_copy_([*(p.data for p in model.parameters()), local.clone()], [*averages, local])
        optimizer.step()
        return optimizer.last_step.skipped

    assert run_threads(2, run) == [False, False]


def test_memory_that_parameters_share_when_they_are_cut_counts():
    class Two(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            if shared:
                self.b.weight.data = self.a.weight.data
            else:
                self.b.weight = nn.Parameter(self.a.weight.data)
                self.b.weight.data = self.b.weight.data.clone()

    def run(rank):
        with zs.init(stage=3):
            model, apart = Two(True), Two(False)
        with pytest.raises(zs.ShardedAccessError, match=r"a\.weight and b\.weight are two parameters that share memory"):
            zs.shard(model, None, stage=3)
        zs.shard(apart, None, stage=3)

    run_threads(2, run)


def test_errors_and_calls_of_one_rank_inside_of_init():
    def run(rank):
        with zs.init(stage=3):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            if rank == 0:  # nothing of this is a collective
                assert hasattr(model[0].weight, "to_local") and sum(p.numel() for p in nn.Linear(3, 3).parameters()) == 12
                assert type(__import__("copy").deepcopy(model)[0].weight) is nn.Parameter
        with pytest.raises(zs.ShardedAccessError, match="Linear.weight takes no gradient"), zs.init(stage=3):
            other = nn.Linear(4, 4)
            other(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="the real cause"), zs.init(stage=3):
            other = nn.Linear(4, 4)
            raise ValueError("the real cause")
        assert not init_context._here.born and not init_context._here.inits
        with zs.init(stage=3):
            third = nn.Linear(4, 4)
        assert third.weight.to_local().numel() == 8 and "to_local" not in vars(third.weight)
        return model[0].weight.full_tensor()

    one, two = run_threads(2, run)
    assert torch.equal(one, two)


def test_averages_that_ranks_give_differently_are_told():
    def run(rank):
        model, optimizer = trained(rank)
        average = zs.ema(model, 0.5)
        average.load_state_dict({name: value * (1 + rank) for name, value in average.full_state_dict().items()})
        with pytest.raises(zs.ModelMismatch):
            optimizer.step()

    run_threads(2, run)


def test_programs_that_write_alike_at_rest_train_on():
    """Decay by hand, clamps, a load of whole values, rows: each step, with numbers that all ranks have."""

    def run(rank):
        model, optimizer = trained(rank)
        for _ in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99).clamp_(-1, 1)
                    p[:1].add_(0.01)
            model.load_state_dict(zs.full_state_dict(model))
            optimizer.step()
            optimizer.zero_grad()
            loss(model).backward()
        assert not any(group.masters.traces for group in model._zeroshard.groups)
        return optimizer.last_step.skipped

    assert run_threads(2, run) == [False, False]


def test_a_checkpoint_ends_a_difference(tmp_path):
    def run(rank):
        model, optimizer = trained(rank)
        optimizer.step()
        zs.save(str(tmp_path / "saved"), model, optimizer)
        loss(model).backward()
        with torch.no_grad():
            weight_of(model).mul_(1.0 + rank)
            optimizer.state[weight_of(model)]["exp_avg"].mul_(1.0 + rank)
        with pytest.raises(zs.ModelMismatch):
            optimizer.step()
        zs.load(str(tmp_path / "saved"), model, optimizer)
        loss(model).backward()
        optimizer.step()
        return zs.full_state_dict(model)

    one, two = run_threads(2, run)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_parameters_that_no_module_has_any_more_and_modules_from_before():
    def run(rank):
        teacher = nn.Linear(4, 4)
        with zs.init(stage=3):
            student = nn.Module()
            student.teacher, student.own = teacher, nn.Linear(3, 3)
            replaced = student.own.weight
            nn.init.ones_(replaced)
            student.own.weight = nn.Parameter(torch.zeros(3, 3))
            gone = nn.Linear(2, 2).weight
            assert replaced.full_tensor().eq(1).all() and gone.full_tensor().shape == (2, 2)
        assert type(teacher.weight) is nn.Parameter and not hasattr(teacher.weight, "to_local")
        with pytest.raises(ValueError), zs.init(stage=3):
            left = nn.Linear(3, 3)
            raise ValueError
        assert not init_context.is_born(left.weight) and not hasattr(left.weight, "full_tensor")

    run_threads(2, run)


def test_modules_in_cycles_that_some_ranks_have_freed():
    def run(rank):
        with zs.init(stage=3):
            loose = nn.Linear(4, 4)
            loose.__dict__["itself"] = loose
            if rank == 1:
                loose.__dict__.pop("itself")  # as if its garbage had been collected
            del loose
            model = nn.Linear(3, 3)
        return model.weight.full_tensor()

    one, two = run_threads(2, run)
    assert torch.equal(one, two)


def test_modules_in_cycles_while_another_thread_collects_garbage():
    """gc.collect() then returns at once: the ranks of a program that has such a thread held other modules."""
    begun, ended = threading.Event(), threading.Event()

    class Slow:
        def __del__(self):
            begun.set()
            ended.wait(0.2)

    def collect():
        while not ended.is_set():
            slow = Slow()
            slow.itself = slow
            del slow
            gc.collect()

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        begun.wait()
        test_modules_in_cycles_that_some_ranks_have_freed()
    finally:
        ended.set()
        thread.join()


def test_many_small_modules_take_linear_time():
    def made(count: int) -> float:
        begin = time.process_time()
        with zs.init(stage=3, comm=FakeComm(0, 2)):
            nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        return time.process_time() - begin

    made(200)
    assert made(3000) < 8 * made(750) + 0.5


def test_two_averages_and_dtypes_are_told_apart():
    def run(rank):
        model, optimizer = trained(rank)
        one, two = zs.ema(model), zs.ema(model)
        whole = one.full_state_dict()
        one.load_state_dict({name: value + rank for name, value in whole.items()})
        two.load_state_dict(whole)
        with pytest.raises(zs.ModelMismatch):
            optimizer.step()
        one.load_state_dict(whole)
        with torch.no_grad():
            weight_of(model).copy_(weight_of(model).to(torch.bfloat16 if rank else torch.float16))
        with pytest.raises(zs.ModelMismatch, match=r"0\.weight"):
            optimizer.step()

    run_threads(2, run)


def test_a_state_that_is_refused_leaves_no_trace():
    def run(rank):
        model, optimizer = trained(rank)
        optimizer.step()
        if rank == 0:
            with pytest.raises(zs.ConfigError):
                optimizer.state[weight_of(model)]["exp_avg"] = torch.zeros(7)
        loss(model).backward()
        optimizer.step()

    run_threads(2, run)


class LastTurn:
    """A lock that rank 1 asks for a little later than the others."""

    def __init__(self):
        self.lock, self.rank = threading.Lock(), threading.local()

    def __enter__(self):
        time.sleep(0.05 * self.rank.number)
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_draws_of_threads_are_all_different(monkeypatch):
    """A rank that is ahead does not give out the state of generators to which a slower one has just set them."""
    turn = LastTurn()
    monkeypatch.setattr(init_context, "_turn", turn)

    def run(rank):
        turn.rank.number = rank
        comm, drawn = engine_of(zs.shard(nn.Linear(2, 2), None, stage=3)[0]).ranks, []
        for _ in range(3):
            with init_context.generators_of_rank_0(comm, "draws", in_turn=True):
                time.sleep(0.1 * rank)
                drawn.append(float(torch.rand(1)))
            time.sleep(0.1 * (1 - rank))  # rank 0 comes back while rank 1 has its turn
        return drawn

    first, second = run_threads(2, run)
    assert first == second and len(set(first)) == 3
