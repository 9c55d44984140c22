"""Parameters that show slices of their fp32 masters at rest, as under FSDP2's door: at every stage the bits of one process."""

import copy

import pytest
import torch
from helpers import (
    DTYPES,
    Branches,
    OddGPT,
    Task,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    token_batches,
    train,
)
from private_ranks import PostOffice, PrivateComm

import zeroshard as zs
from zeroshard.seam import engine_of, masters_shown
from zeroshard.tensor.sharded_tensor import ShardedParameter
from zeroshard.testing import run_threads
from zeroshard.utils.setting import setting

MODEL = seeded(OddGPT)  # made once: threads share the generator
WORLD = 2
SMALL = {"stage": 3, "param_persistence_threshold": 31}
WAYS = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 2, "offload_optimizer": "cpu"}, {"stage": 1, "overlap": False},
    {"stage": 2, "units": "leaf"}, SMALL, SMALL | {"map_shared": False}, SMALL | {"map_shared": False, "max_live_parameters": 10**6},
    SMALL | {"offload_param": "cpu"}, {"stage": 2, "master_weights": "split"}, {"stage": 0, "master_weights": "split"},
]  # fmt: skip
CASES = [(way, True, "bf16") for way in WAYS]
CASES += [(way, False, precision) for way in ({"stage": 0}, {"stage": 1}, {"stage": 2}, SMALL) for precision in ("bf16", "fp32")]


def _shown(run, private=False):
    """Run a function (rank, comm) on threads whose models show masters. private: ranks that read no memory of each other."""
    office = PostOffice()

    def alone(rank):
        comm = PrivateComm(office, rank, WORLD, ordered=True) if private else None
        with setting(masters_shown, True):
            return run(rank, {"comm": comm} if private else {})

    return run_threads(WORLD, alone)


@pytest.mark.parametrize(("way", "private", "precision"), CASES, ids=str)
def test_bits_are_those_of_one_process(way, private, precision):
    task = Task(MODEL, token_batches(3, 2, WORLD), local_sums=True, clip={1: 0.05})
    for got in _shown(lambda rank, comm: train(rank, task, precision=precision, **way, **comm), private):
        assert_equal_runs(got, reference(task, WORLD, precision, got.coefficients), str(way))


def _write(rank, way, comm, precision):
    """Write parameters at rest, in ways that ranks gather lazily; return what forwards then compute, and what masters have."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = zs.shard(model, optimizer, precision=precision, **way, **comm)
    inputs = token_batches(1, 1, WORLD)[0][0][0]
    found = [model(*inputs).item()]
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            assert isinstance(param, ShardedParameter) and param.dtype == torch.float32
            param.mul_(1 + number / 64) if number % 2 else param.copy_(param.full_tensor() + 2**-11)
        model.blocks[1].into.weight[1:3].fill_(0.25)
    model.norm.bias.data = torch.full_like(model.norm.bias.full_tensor(), 0.125)
    model(*inputs).backward()
    found.append([param.grad.norm().item() if param.grad is not None else None for param in model.parameters()])
    for param in model.parameters():
        if param.grad is not None:
            param.grad = param.detach() * 0.25
    optimizer.step()
    found.append(model(*inputs).item())
    found.append({name: value.tolist() for name, value in zs.full_state_dict(model, masters=True).items()})
    found.append({name: value.full_tensor().tolist() for name, value in model.state_dict().items()})
    rounded = zs.full_state_dict(model)
    zs.value_of(model.blocks[0].into.weight).set_full(torch.full(model.blocks[0].into.weight.shape, 0.1))
    found.append(model(*inputs).item())
    return found, {name: value.tolist() for name, value in rounded.items()}


@pytest.mark.parametrize(("way", "private", "precision"), CASES, ids=str)
def test_writes_reach_masters_and_what_forwards_use(way, private, precision):
    expected = _shown(lambda rank, comm: _write(rank, {"stage": 3}, comm, precision))
    got = _shown(lambda rank, comm: _write(rank, way, comm, precision), private)
    for (found, rounded), (other, whole) in zip(got, expected, strict=True):
        assert found[1] == pytest.approx(other[1], rel=1e-6)  # norms: summed in another order where another flat buffer is cut
        assert found[0] == other[0] and found[2:] == other[2:] and rounded == whole
        dtype = DTYPES[precision]
        assert all(torch.tensor(value).to(dtype).tolist() == rounded[name] for name, value in found[3].items())


BRANCHES = seeded(Branches)


@pytest.mark.parametrize("written", ["all", "a branch"])
@pytest.mark.parametrize(
    ("way", "private"), [(way, private) for way in WAYS[:3] for private in (False, True)] + [(SMALL, False)], ids=str
)
def test_after_a_write_ranks_may_use_other_units(way, private, written):
    """The wholes that ranks keep are behind then, and each rank gathers those of units that it does not use, too."""
    inputs = torch.randn(WORLD, 3, 6, generator=torch.Generator().manual_seed(0))

    def program(model, optimizer, ranks):
        def write():
            with torch.no_grad():
                for param in (model if written == "all" else model.branches[0]).parameters():
                    param.mul_(0.9)
                for rank in ranks:
                    model.branches[rank](inputs[rank])

        for step in range(4):
            for rank in ranks:
                (model(inputs[rank], (0, 1) if step == 0 else (rank,)) / len(ranks)).backward()
            if step % 2:
                write()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                write()
        return model

    def run(rank, comm):
        model = copy.deepcopy(BRANCHES)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), units=("Sequential",), **way, **comm)
        return zs.full_state_dict(program(model, optimizer, [rank]))

    model = copy.deepcopy(BRANCHES)
    expected = program(model, torch.optim.SGD(model.parameters(), lr=0.1), range(WORLD)).state_dict()
    for got in _shown(run, private):
        assert differences(got, expected) == []


def test_states_moved_away_averages_and_checkpoints(tmp_path):
    def run(rank, comm):
        found = []
        for stage in (3, 2, 1, 0):
            model = copy.deepcopy(MODEL)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = zs.shard(model, optimizer, precision="bf16", stage=stage)
            inputs = token_batches(1, 1, WORLD)[0][0][0]
            if stage != 3:
                zs.load(tmp_path, model, optimizer)
            average = zs.ema(model, 0.5)
            model(*inputs).backward()
            if stage == 3:
                zs.save(tmp_path, model, optimizer)
            optimizer.step()
            zs.offload_states(model)
            zs.reload_states(model)
            with average.swapped():
                swapped = model(*inputs).item()
            found.append((swapped, model(*inputs).item(), zs.value_of(model.norm.bias).full().tolist()))
            zs.close(model)
            assert type(model.norm.bias) is torch.nn.Parameter and model.norm.bias.dtype == torch.float32
            found[-1] = (*found[-1], model.norm.bias.tolist())
        return found

    for found in _shown(run):
        assert found == found[:1] * 4


def test_gathers_send_nothing_without_a_write():
    def run(rank, comm):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, precision="bf16", **comm)
        inputs = token_batches(1, 1, WORLD)[0][0][0]
        counts = []
        for _ in range(2):
            model(*inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(engine_of(model).snapshot().traffic["gather"].count)
        return counts, len(engine_of(model).snapshot().groups)

    for counts, groups in _shown(run, private=True):
        assert counts == [groups, 2 * groups]


@pytest.mark.parametrize("unshards", [False, True])
@pytest.mark.parametrize(
    "way",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2, "precision": "bf16"},
        {"stage": 3, "map_shared": False},
        SMALL | {"map_shared": False},
    ],
    ids=str,
)
def test_a_write_to_wholes_that_ranks_keep_makes_the_model_unusable_until_a_load(way, unshards, tmp_path):
    """At stages 0 to 2 forwards go on to use them; at stage 3 they are dropped, but those of small parameters."""

    def write(module):
        with torch.no_grad():
            module.bias.add_(1.0)

    def run(rank, comm):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), **way)
        inputs = token_batches(1, 1, WORLD)[0][0][0]
        zs.save(tmp_path, model, optimizer)
        expected, values = model(*inputs).item(), zs.full_state_dict(model)
        stays = way["stage"] < 3 or "param_persistence_threshold" in way
        told = (
            "where each rank keeps the whole: it has other values now. Load a" if stays else "where each rank has a copy that is"
        )
        if unshards:
            units = engine_of(model).units(list(model.modules()))
            units.unshard()()
            write(model.norm)
            with pytest.raises(zs.ShardedWriteError, match=f"norm.bias: written in place after unshard.., {told}"):
                units.reshard()
        else:
            handle = model.norm.register_forward_hook(lambda module, *_: write(module))
            with pytest.raises(zs.ShardedWriteError, match=f"norm.bias: written in place inside a forward, {told}"):
                model(*inputs)
            handle.remove()
        if stays:
            for call in (lambda: model(*inputs), lambda: zs.full_state_dict(model), lambda: zs.save(tmp_path / "late", model)):
                with pytest.raises(zs.ShardedWriteError, match=f"norm.bias: .*{told}"):
                    call()
            if unshards:
                zs.load(tmp_path, model, optimizer)
            else:  # all parameters are to be written, and not by themselves
                model.load_state_dict(model.state_dict())
                model.load_state_dict({name: values[name] for name in ("norm.bias", "norm.weight")}, strict=False)
                with pytest.raises(zs.ShardedWriteError, match=r"Load all parameters \(model.load_state_dict"):
                    model(*inputs)
                model.load_state_dict(values)
        assert model(*inputs).item() == expected

    _shown(run)
