"""A program that keeps its own file (torch.save on rank 0, as nanoGPT does) goes on from it in plain torch and in zeroshard."""

import copy
import functools

import pytest
import torch
from helpers import OddGPT, seeded
from offloading import tiers

import zeroshard as zs
from zeroshard.testing import run_threads

BASE = seeded(OddGPT)
ROWS, STEPS, HALF = 6, 6, 3
_DRAW = torch.Generator().manual_seed(5)
DATA = [tuple(torch.randint(0, 11, (ROWS, 4), generator=_DRAW) for _ in range(2)) for _ in range(STEPS)]


def made(base=BASE):
    """nanoGPT's model and optimizer: what has two dimensions decays, and comes first."""
    model = copy.deepcopy(base)
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    # keys have no use of a bias: its gradients are noise
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-4)


def steps(model, optimizer, rank, world, numbers):
    for number in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)  # nanoGPT's get_lr
        rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        model(*(each[rows] for each in DATA[number])).backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def uninterrupted(upto=STEPS):
    """(model, optimizer) of one process and torch alone."""
    model, optimizer = made()
    steps(model, optimizer, 0, 1, range(upto))
    return model, optimizer


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=5e-6)


def as_torch(state):
    """That it has the form, order and kinds of a plain optimizer's."""
    plain = uninterrupted(HALF)[1].state_dict()
    assert list(state) == ["state", "param_groups"] and state["param_groups"] == plain["param_groups"]
    assert list(state["state"]) == list(plain["state"])
    for number, entries in plain["state"].items():
        assert list(state["state"][number]) == list(entries)
        for key, value in entries.items():
            got = state["state"][number][key]
            assert type(got) is torch.Tensor and (got.dtype, got.shape, got.device) == (value.dtype, value.shape, value.device)
            torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-6)
    storages = [value.untyped_storage().data_ptr() for entries in state["state"].values() for value in entries.values()]
    assert len(set(storages)) == len(storages)  # torch counts steps in place


def begin(rank, world, path, options):
    """Three steps, and the program's own file."""
    model, optimizer = made()
    zs.shard(model, optimizer, **options)
    steps(model, optimizer, rank, world, range(HALF))
    whole, state = zs.full_state_dict(model), zs.full_optimizer_state_dict(model)
    assert zs.full_optimizer_state_dict(model, every_rank=True)["param_groups"] == optimizer.state_dict()["param_groups"]
    if rank == 0:
        torch.save({"model": whole, "optimizer": state, "iter_num": HALF}, path)
    else:
        assert state == {}
    zs.close(model)


def resume(rank, world, path, options, after):
    """The other three; what the file has is loaded before or after zs.shard."""
    model, optimizer = made(seeded(OddGPT, 9))
    saved = torch.load(path, map_location="cpu", weights_only=True)
    weights = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in saved["model"].items()}
    if after:
        zs.shard(model, optimizer, **options)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved["optimizer"])
    if not after:
        zs.shard(model, optimizer, **options)
    steps(model, optimizer, rank, world, range(saved["iter_num"], STEPS))
    return zs.full_state_dict(model)


PLACES = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "host": ("none", "none", "cpu"),
    "disk": ("nvme", "nvme", "nvme"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_in_plain_torch_and_at_another_world_size(place, tmp_path):
    options = PLACES[place]
    options = options if isinstance(options, dict) else {"stage": 3, **tiers(str(tmp_path), *options)}
    path = tmp_path / "ckpt.pt"
    run_threads(2, begin, 2, path, options)
    saved = torch.load(path, weights_only=True)
    as_torch(saved["optimizer"])
    expected = uninterrupted()[0].state_dict()
    model, optimizer = made(seeded(OddGPT, 9))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, 0, 1, range(HALF, STEPS))
    same(model.state_dict(), expected)
    for world, stage, after in ((3, 3, True), (1, 2, False), (3, 1, False), (2, 0, True)):
        for state in run_threads(world, resume, world, path, {"stage": stage}, after):
            same(state, expected)


@pytest.mark.parametrize("after", [False, True], ids=["before zs.shard", "after zs.shard"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_file_of_a_ddp_run_is_loaded(stage, after, tmp_path):
    """Names have what DDP and torch.compile put before them, and the program takes that off."""
    model, optimizer = uninterrupted(HALF)
    weights = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "iter_num": HALF}, tmp_path / "ckpt.pt")
    for state in run_threads(2, resume, 2, tmp_path / "ckpt.pt", {"stage": stage}, after):
        same(state, uninterrupted()[0].state_dict())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_refusal_names_it(stage, tmp_path):
    """nanoGPT's own line, and what it is told; the test above follows that to its end."""

    def run(rank):
        model, optimizer = made()
        zs.shard(model, optimizer, stage=stage)
        steps(model, optimizer, rank, 2, range(1))
        for what in (optimizer.state_dict(), optimizer):
            with pytest.raises(zs.ShardedAccessError, match=r"zs\.full_optimizer_state_dict\(model\), on all ranks"):
                torch.save({"optimizer": what}, tmp_path / f"rank{rank}.pt")

    run_threads(2, run)


@pytest.mark.parametrize("make", [
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
], ids=["no state", "momentum", "amsgrad", "lr tensor", "rmsprop"])  # fmt: skip
def test_other_optimizers_have_the_form_of_one_process(make):
    """Also of a parameter that is frozen, and of one that has had no gradient."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x)).square().mean()

    base, inputs = seeded(Net), torch.ones(2, 3)

    def run(rank, sharded):
        model = copy.deepcopy(base)
        optimizer = make(model.parameters())
        if sharded:
            zs.shard(model, optimizer, stage=3)
        model(inputs).backward()
        optimizer.step()
        return zs.full_optimizer_state_dict(model) if sharded else optimizer.state_dict()

    expected, (got, _) = run(0, False), run_threads(2, run, True)
    assert got["param_groups"] == expected["param_groups"] and got["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert got["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            torch.testing.assert_close(got["state"][number][key], value)
