"""Options that go with offload, and what else may happen to a model whose states rest elsewhere.

Ratio, limits, dtypes, several disks or models, weighted and failing backwards, clipping. Every run is compared with the
same run without offload, as in test_tiers.py.
"""

import copy
import itertools
import math

import helpers
import pytest
import torch
from helpers import (
    OddGPT,
    Outcome,
    Task,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    state_differences,
    token_batches,
    train,
)
from offloading import (
    DATA,
    MODEL,
    TASK,
    TINY,
    assert_same,
    assert_same_log,
    plain_loop,
    tiers,
)
from private_ranks import PostOffice, PrivateComm
from torch import nn

import zeroshard as zs
from zeroshard.config import Offload, Tier
from zeroshard.engine.ledger import GATHERED, MASTERS, OPTIMIZER
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads


def test_gradients_leave_a_device_in_the_dtype_in_which_they_are_sent(disk, strict_device, monkeypatch):
    """bf16: the mean over ranks is summed in fp32, rounded once more, and travels with 2 bytes an element."""
    task = Task(MODEL, token_batches(2, 2, 2), clip={1: 0.05})

    def rank_run(rank: int, *devices: str) -> Outcome:
        strict_device(rank)
        return train(rank, task, stage=3, precision="bf16", **tiers(disk, *devices, fused=False))

    mean = helpers._mean
    monkeypatch.setattr(helpers, "_mean", lambda *args: {p: g.to(torch.bfloat16).float() for p, g in mean(*args).items()})
    for devices in (("none", "cpu", "cpu"), ("cpu", "nvme", "nvme")):
        for got in run_threads(2, rank_run, *devices):
            expected = reference(task, 2, "bf16", got.coefficients)
            assert_equal_runs(got, expected, f"{devices}")
            assert got.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0])
def test_ratio_is_the_part_of_the_states_that_is_offloaded(ratio, disk):
    """Unit by unit: what is on the host is `ratio` of all states within half of the largest unit's."""

    def rank_run(rank: int) -> tuple:
        task = Task(seeded(lambda: OddGPT(layers=6)), token_batches(2, 1, 2))
        model = copy.deepcopy(task.model)
        options = tiers(disk, optimizer="cpu", ratio=ratio) | {"offload_gradient": "none"}
        model, optimizer = zs.shard(model, task.make_optimizer(model), precision="bf16", **options)
        model(*task.data[0][0][rank]).backward()
        optimizer.step()
        runtime = runtime_of(model)
        here, there = runtime.tiers.ledger.now, runtime.tiers.ledger.elsewhere[Tier.HOST]
        states = [12 * group.layout.shard_numel for group in runtime.groups]  # master and two moments in fp32
        held = here[OPTIMIZER] + here[MASTERS], there[OPTIMIZER] + there[MASTERS]
        zs.close(model)
        return held, states, plain_loop(rank, task, **options), plain_loop(rank, task)

    for (here, there), states, got, expected in run_threads(2, rank_run):
        assert 0.9 * sum(states) <= here + there <= sum(states)  # on the device the end of a shard has no moments
        assert abs(there - ratio * sum(states)) <= max(states) / 2
        assert_same(got, expected, f"{ratio}")


@pytest.mark.parametrize("parameter", ["none", "nvme"])
def test_max_live_parameters_saves_exactly_the_gathers_that_fit(parameter, disk):
    """A block whose forward ended k blocks before the end of the model is needed again after k other blocks' forward and
    backward and the root's: it stays if they all, itself and the root, are not more than the limit. R elements in the
    root, B in each of L blocks, limit M: the root stays if R <= M, and blocks k = 1, 2, ... as long as R + k B <= M.
    """
    task = Task(seeded(lambda: OddGPT(layers=4)), token_batches(4, 1, 2))

    def rank_run(rank: int) -> None:
        expected = plain_loop(rank, task, False, map_shared=False)
        root, block = 192, 512  # elements with padding; checked below
        for limit in (root - 1, root + block - 1, root + 3 * block, 10**9):
            options = {"map_shared": False, "overlap": False, "max_live_parameters": limit, **tiers(disk, parameter)}
            model = copy.deepcopy(task.model)
            model, optimizer = zs.shard(model, task.make_optimizer(model), **options)
            runtime = runtime_of(model)
            assert sorted(unit.gathered_numel for unit in runtime.units) == sorted([root, *4 * [block]])
            gathers, losses = [], []
            for step in task.data:
                before = runtime.tiers.ledger.traffic["gather"].count
                loss = model(*step[0][rank])
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
                gathers.append(runtime.tiers.ledger.traffic["gather"].count - before)
            kept = 0 if limit < root else 1 + min((limit - root) // block, 4)
            assert gathers == [10, *3 * [10 - kept]], (limit, gathers)  # the first step is recorded
            peak = runtime.tiers.ledger.peak[GATHERED]
            assert peak <= 4 * (max(root, min(limit, root + 4 * block)) + block), (limit, peak)
            assert runtime.tiers.ledger.now[GATHERED] == 0
            zs.close(model)
            assert losses == expected.losses and not differences(model.state_dict(), expected.weights)

    run_threads(2, rank_run)


@pytest.mark.parametrize("private", [True, False])
def test_what_was_gathered_ahead_is_not_used_after_a_write(private, disk):
    """A forward without backward leaves units gathered for the backward that does not come."""
    office = PostOffice()

    def rank_run(rank: int, **options) -> list[float]:
        comm = PrivateComm(office, rank, 2, ordered=False) if private else None
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm, **options)
        for step in DATA[:2]:
            model(*step[0][rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = []
        for _ in range(2):
            losses.append(model(*DATA[2][0][rank]).item())
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        losses.append(model(*DATA[2][0][rank]).item())
        zs.close(model)
        return losses

    expected = run_threads(2, lambda rank: rank_run(rank, stage=0))
    for parameter, live in itertools.product(("none", "nvme"), (0, 10**9)):
        options = {"map_shared": False, "max_live_parameters": live, **tiers(disk, parameter)}
        assert run_threads(2, lambda rank, o=options: rank_run(rank, **o)) == expected, (parameter, live)


@pytest.mark.parametrize("disks", [True, False])
def test_dtypes_of_their_own_are_gathered_with_their_unit(disks, disk):
    task = Task(MODEL, TASK.data, clip=TASK.clip)
    options = {"stage": 3, "precision": "bf16", "dtypes": {"LayerNorm": torch.float32}}
    offloaded = tiers(disk, *(["nvme"] * 3 if disks else ["cpu"] * 3), **TINY)

    def rank_run(rank: int) -> tuple[Outcome, Outcome]:
        return train(rank, task, **options), train(rank, task, **options, **offloaded)

    for expected, got in run_threads(2, rank_run):
        assert_same(got, expected, "mixed dtypes")


def test_doubles_rest_and_come_back_as_doubles(disk, strict_device):
    """They have no fp32 masters; what a step needs within its reach is a copy in fp64."""
    task = Task(seeded(lambda: OddGPT(dim=24, layers=2)).double(), DATA)

    def rank_run(rank: int) -> list:
        results = []
        for devices, own_device in (
            (("nvme", "nvme", "nvme"), False),
            (("nvme", "none", "none"), False),
            (("none", "cpu", "cpu"), True),
        ):
            strict_device(rank, False)
            expected = plain_loop(rank, task, stage=3)
            strict_device(rank, own_device)
            results.append((f"{devices}", expected, plain_loop(rank, task, stage=3, **tiers(disk, *devices, **TINY))))
        return results

    for results in run_threads(2, rank_run):
        for where, expected, got in results:
            assert got.weights["embedding.weight"].dtype == torch.float64
            assert_same(got, expected, where)


@pytest.mark.parametrize("stage", [2, 3])
def test_weighted_backwards(stage, disk):
    """zs.backward: what is still to be divided by the weights travels and rests as it is."""

    def rank_run(rank: int, *devices: str) -> list:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(
            model, TASK.make_optimizer(model), stage=stage, max_grad_norm=0.5, **tiers(disk, *devices, **TINY)
        )
        log = []
        for number, micros in enumerate(TASK.data):
            for micro, ranks in enumerate(micros):
                zs.backward(model, model(*ranks[rank]), weight=1.0 + rank + 2 * micro + number)
            optimizer.step()
            log += [optimizer.last_step.grad_norm, zs.full_gradients(model)]
            optimizer.zero_grad()
        zs.close(model)
        return [*log, model.state_dict()]

    expected = run_threads(2, rank_run)
    for devices in (("none", "nvme", "cpu"), ("none", "cpu", "nvme")):
        for got, wanted in zip(run_threads(2, rank_run, *devices), expected, strict=True):
            assert_same_log(got, wanted, f"{devices}")


def test_states_may_rest_on_different_disks(tmp_path):
    """Each state names its own folder, or takes offload_path; a mapping of fields will do."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    places = {
        "offload_param": {"device": "nvme", "any_filesystem": True},
        "offload_gradient": {"device": "nvme", "path": str(tmp_path / "other"), "any_filesystem": True, "checksum": True},
        "offload_optimizer": Offload("disk", path=str(tmp_path / "other"), any_filesystem=True),
        "offload_path": str(tmp_path / "one"),
    }

    def rank_run(rank: int) -> tuple:
        model = copy.deepcopy(MODEL)
        zs.shard(model, TASK.make_optimizer(model), stage=3, **places)
        folders = sorted(folder.swap.path.parent.name for folder in runtime_of(model).tiers._folders.values())
        zs.close(model, restore=False)
        with pytest.raises(zs.ModelClosed):
            model(*DATA[0][0][rank])
        return folders, plain_loop(rank, TASK, stage=3), plain_loop(rank, TASK, stage=3, **places)

    for folders, expected, got in run_threads(2, rank_run):
        assert folders == ["one", "other"]
        assert_same(got, expected, "two disks")
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("memory", ["shared", "private"])
def test_an_offload_to_disk_without_a_path_takes_offload_path(tmp_path, memory):
    """As a name or a mapping does: of the call, of the Config, and of a call that has another than its Config."""
    disk, own = Offload("nvme", any_filesystem=True), Offload("nvme", path=str(tmp_path / "own"), any_filesystem=True)
    call, config, other = (tmp_path / name for name in ("call", "config", "other"))
    for folder in (call, config, other, tmp_path / "own"):
        folder.mkdir()
    states = {"offload_optimizer": disk, "offload_gradient": disk, "offload_param": own}
    chosen = zs.Config(stage=3, offload_path=config, **states)

    def rank_run(rank: int) -> list:
        options = {} if memory == "shared" else {"comm": PrivateComm(office, rank, 2, ordered=True)}
        folders, expected = [], plain_loop(rank, TASK, stage=3)
        both = {"config": chosen, "offload_path": other}
        for given in ({"stage": 3, "offload_path": call, **states}, {"config": chosen}, both):
            model = copy.deepcopy(MODEL)
            zs.shard(model, TASK.make_optimizer(model), **given, **options)
            folders.append(sorted(folder.swap.path.parent.name for folder in runtime_of(model).tiers._folders.values()))
            zs.close(model, restore=False)
        assert_same(plain_loop(rank, TASK, config=chosen, **options), expected, "offload_path")
        return folders

    office = PostOffice()
    assert run_threads(2, rank_run) == [[["call", "own"], ["config", "own"], ["other", "own"]]] * 2
    assert not list(tmp_path.glob("*/*"))


def test_an_offload_to_disk_whose_folder_nobody_names_is_named():
    with pytest.raises(zs.ConfigError, match=r"^offload_gradient: offload to 'nvme' needs a path.*offload_path='"):
        zs.Config(offload_gradient=Offload("nvme"))
    with pytest.raises(zs.ConfigError, match=r"^offload: offload to 'nvme' needs a path.* path='\.\.\.' for all"):
        zs.checkpoint_activations(copy.deepcopy(MODEL), offload=Offload("nvme"))


@pytest.mark.parametrize("options, words", [
    ({"offload_param": "nvm"}, "offload device: expected 'none', 'cpu' or 'nvme', got 'nvm'. Did you mean 'nvme'"),
    ({"offload_optimizer": "nvme"}, "offload to 'nvme' needs"),
    ({"offload_optimizer": {"devise": "cpu"}}, "offload_optimizer: unknown field 'devise'. Did you mean 'device'"),
    ({"offload_optimizer": 3}, "offload_optimizer: expected 'none', 'cpu', 'nvme', an Offload or a mapping, got int"),
    ({"offload_param": "cpu", "stage": 2}, "offload_param='cpu' needs stage 3: at stage 2 this state is replicated"),
    ({"offload_gradient": "cpu", "stage": 1}, "offload_gradient='cpu' needs stage 2 or 3: at stage 1 this state is partial"),
    ({"offload_optimizer": "cpu", "stage": 0}, "offload_optimizer='cpu' needs stage 1, 2 or 3"),
    ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "offload ratio: expected a number from 0 to 1, got 1.5"),
    ({"offload_optimizer": {"device": "cpu", "buffer_count": 1}}, "offload buffers: expected a buffer_count of at least 2"),
    ({"delayed_update": 3}, "delayed_update needs offload_optimizer='cpu' or 'nvme'"),
    ({"delayed_update": -1, "offload_optimizer": "cpu"}, "delayed_update: expected a whole number of at least 0, got -1"),
    ({"max_live_parameters": "1e9"}, "max_live_parameters: expected a whole number of at least 0"),
])  # fmt: skip
def test_options_are_checked_when_they_are_given(options, words):
    with pytest.raises(zs.ConfigError) as caught:
        zs.Config.build(None, **options)
    assert words in str(caught.value)


def test_two_models_swap_in_one_folder(disk):
    everything = tiers(disk, "nvme", "nvme", "nvme", **TINY)

    def rank_run(rank: int) -> list:
        expected = plain_loop(rank, TASK, stage=3)
        models = [copy.deepcopy(MODEL) for _ in range(2)]
        pairs = [zs.shard(model, TASK.make_optimizer(model), stage=3, **everything) for model in models]
        losses = []
        for step, micros in enumerate(TASK.data):
            for ranks in micros:
                for model, _ in pairs:
                    loss = model(*ranks[rank])
                    loss.backward()
                    losses.append(loss.item())
            for model, optimizer in pairs:
                if step in TASK.clip:
                    zs.clip_grad_norm_(model, TASK.clip[step])
                optimizer.step()
                optimizer.zero_grad()
        for model, _ in reversed(pairs):
            zs.close(model)
        return [expected, losses, *models]

    for expected, losses, *models in run_threads(2, rank_run):
        assert losses[::2] == losses[1::2] == expected.losses
        for model in models:
            assert not differences(model.state_dict(), expected.weights)
            assert type(model.embedding.weight) is nn.Parameter


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_non_finite_gradient_skips_the_step_on_all_ranks(precision, disk):
    """B20 with states elsewhere: nothing is stepped, the record names parameter and rank, the run goes on."""
    options = {"stage": 3, "precision": precision, "initial_loss_scale": 256.0}

    def rank_run(rank: int, **offloaded) -> tuple:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, TASK.make_optimizer(model), **options, **offloaded)
        records = []
        for step, micros in enumerate(DATA):
            for ranks in micros:
                loss = model(*ranks[rank])
                handle = None
                if step == 1 and rank == 1:
                    handle = model.blocks[1].out.weight.register_hook(lambda grad: grad * math.inf)
                loss.backward()
                handle.remove() if handle is not None else None
            optimizer.step()
            records.append(optimizer.last_step)
            optimizer.zero_grad()
        states = zs.full_optimizer_state(model)
        zs.close(model)
        return records, states, model.state_dict()

    (expected, *_) = run_threads(2, rank_run)
    assert [record.skipped for record in expected[0]] == [False, True, False]
    for devices in (("nvme", "nvme", "nvme"), ("none", "cpu", "cpu"), ("none", "nvme", "nvme")):
        for records, states, weights in run_threads(2, lambda rank, d=devices: rank_run(rank, **tiers(disk, *d))):
            assert [(r.skipped, r.loss_scale) for r in records] == [(r.skipped, r.loss_scale) for r in expected[0]]
            assert any("blocks.1.out.weight" in name for name in records[1].nonfinite)
            assert not differences(weights, expected[2]) and not state_differences(states, expected[1])


def test_an_exception_in_forward_or_backward_costs_one_step(disk, strict_device):
    """All ranks raise in the same place, drop the step and go on; a gradient already on its way is forgotten."""

    class Stop(Exception):
        pass

    def rank_run(rank: int, own_device: bool, fails: str, **options) -> Outcome:
        strict_device(rank, own_device)
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, TASK.make_optimizer(model), stage=3, **options)
        out = Outcome()

        def stop(*_) -> None:
            raise Stop

        for step, micros in enumerate(TASK.data):
            if step:
                place = model.blocks[0 if fails == "backward" else 1].norm
                hook = place.register_full_backward_hook(stop) if fails == "backward" else place.register_forward_hook(stop)
                with pytest.raises(Stop):
                    model(*micros[0][rank]).backward()
                hook.remove()
            for ranks in micros:
                loss = model(*ranks[rank])
                loss.backward()
                out.losses.append(loss.item())
            optimizer.step()
            out.norms.append(optimizer.last_step.grad_norm)
            optimizer.zero_grad()
        zs.close(model)
        out.weights = model.state_dict()
        return out

    for fails, own_device in itertools.product(("forward", "backward"), (False, True)):
        expected = run_threads(2, rank_run, False, fails)
        for devices in (("nvme", "nvme", "nvme"), ("cpu", "cpu", "none")):
            options = tiers(disk, *devices, fused=False)
            got = run_threads(2, lambda rank, o=options: rank_run(rank, own_device, fails, **o))
            for left, right in zip(got, expected, strict=True):
                assert_same(left, right, f"{fails} {own_device} {devices}")


class Odd(nn.Module):
    """Parameters of 1, 3, 7 and 1000 elements (C07)."""

    def __init__(self) -> None:
        super().__init__()
        for numel in (1, 3, 7, 1000):
            self.register_parameter(f"p{numel}", nn.Parameter(torch.linspace(-1, 1, numel)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((param * (x + index) - 1).square().sum() for index, param in enumerate(self.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_c07_clip_norm_under_offload_with_uneven_shards(stage, device, disk):
    """The norm is that of one process, a Python float that is global, and after clipping it is at most the limit."""
    data = [[[(torch.tensor(0.1 * rank),) for rank in range(3)]]] * 2
    task = Task(seeded(Odd), data, clip={0: 5.0, 1: 5.0})
    places = (device if stage == 3 else "none", device if stage > 1 else "none", device)

    def rank_run(rank: int) -> Outcome:
        model = copy.deepcopy(task.model)
        model, optimizer = zs.shard(model, task.make_optimizer(model), stage=stage, **tiers(disk, *places))
        model(*data[0][0][rank]).backward()
        norm = zs.clip_grad_norm_(model, 5.0)
        assert isinstance(float(norm), float) and norm.shape == ()
        clipped = torch.cat([grad.flatten() for grad in zs.full_gradients(model).values()])
        zs.close(model)
        return float(norm), float(clipped.norm()), train(rank, task, stage=stage, **tiers(disk, *places))

    for norm, clipped, got in run_threads(3, rank_run):
        expected = reference(task, 3, coefficients=got.coefficients)
        assert norm == pytest.approx(got.norms[0], rel=1e-7) == pytest.approx(expected.norms[0], rel=1e-6) and norm > 5.0
        assert clipped <= 5.0 * (1 + 1e-6)
        assert_equal_runs(got, expected, f"stage {stage} {device}")
