"""A class that nobody has described is tried at zs.shard: what steps more than elements is refused, and what is named helps."""

import copy
import types

import pytest
import torch
from helpers import OddGPT, seeded, token_batches
from optimizers import Lion
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard as zs
from zeroshard.optim import step_probe
from zeroshard.optim.step_probe import departure
from zeroshard.testing import run_threads

MODEL = seeded(lambda: OddGPT(dim=24, layers=3, tied=False))
DATA = token_batches(4, 1, 2)


class Each(torch.optim.Optimizer):
    """Gradient descent of a user: each parameter moves by what `move` makes of its gradient."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.move(param, group), alpha=float(group["lr"]))

    def move(self, param, group):
        return param.grad


class Normed(Each):
    def move(self, param, group):
        return param.grad / param.grad.norm()


class NormedAtTen(Each):
    """Looks at the whole in every tenth step."""

    def move(self, param, group):
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        return param.grad if state["step"] % 10 else param.grad / param.grad.norm()


class DecaysMatrices(Each):
    def move(self, param, group):
        return param.grad + (0.1 * param if param.dim() > 1 else 0.0)


class Rows(Each):
    def move(self, param, group):
        return param.grad / param.grad.norm(dim=-1, keepdim=True) if param.dim() == 2 else param.grad


class Together(Each):
    """Scales all parameters by one norm."""

    def step(self, closure=None):
        self.norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm().item()
        super().step()

    def move(self, param, group):
        return param.grad / self.norm


class Stacks(torch.optim.Optimizer):
    """Groups of two kinds; matrices of one shape are one stack, whose states the first of them has, and options count the steps."""

    def __init__(self, groups):
        super().__init__(groups, {})
        self._rate = torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            (self._step_elements if group["kind"] == "elements" else self._step_stack)(group)

    def _step_elements(self, group):
        for param in (p for p in group["params"] if p.grad is not None):
            state = self.state[param]
            if not state:
                state["square"] = torch.zeros_like(param)
            self._rate.fill_(group["lr"] / group["seen"] ** 0.5)
            state["square"].lerp_(param.grad.square(), 0.1)
            param.sub_(self._rate * param.grad / (state["square"].sqrt() + 1e-3))

    def _step_stack(self, group):
        params = group["params"]
        shape, state = params[0].shape, self.state[params[0]]
        grads = torch.stack([p.grad for p in params])
        if not state:
            state["momentum"] = torch.zeros_like(grads)
            state["rows"] = torch.zeros(len(params), shape[-2], 1)
        momentum = state["momentum"].lerp_(grads, 0.2)
        state["rows"].lerp_(momentum.square().mean(-1, keepdim=True), 0.5)
        update = torch.linalg.svd(momentum / (state["rows"].sqrt() + 1e-3), full_matrices=False)
        values = torch.stack(params) - group["lr"] * update.U @ update.Vh
        torch._foreach_copy_(params, list(values.unbind()))


class StacksTold(Stacks):
    """The same, declared."""


class StacksAll(Stacks):
    """Declared for all groups."""


zs.whole_matrix(StacksTold, where=lambda param, options: options["kind"] == "stack")
zs.whole_matrix(StacksAll)


def _stacks(model, cls):
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is other for other in hidden)]
    shapes = sorted({p.shape for p in hidden})
    groups = [{"kind": "elements", "lr": 0.02, "params": others}]
    return cls(groups + [{"kind": "stack", "lr": 0.03, "params": [p for p in hidden if p.shape == shape]} for shape in shapes])


def _train(model, optimizer, ranks, steps=range(4)):
    for step in steps:
        for rank in ranks:
            (model(*DATA[step][0][rank]) / len(ranks)).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        optimizer.zero_grad()
    return model


def _linears(cls, **options):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, cls(model.parameters(), **options)


@pytest.mark.parametrize("cls", [Normed, NormedAtTen, DecaysMatrices, Rows])
@pytest.mark.parametrize("lr", [0.1, 0.0, torch.tensor(0.0)], ids=["", "before warm-up", "tensor"])
def test_what_looks_at_a_whole_parameter_is_refused_and_the_remedy_serves_it(cls, lr):
    refused = type(f"Own{cls.__name__}", (cls,), {})
    model, optimizer = _linears(refused, lr=lr)
    for stage in (0, 1, 3):
        with pytest.raises(
            zs.ConfigError, match=rf"in a trial .*{refused.__name__} stepped .*zs.whole_matrix\({refused.__name__}\)"
        ):
            zs.shard(model, optimizer, stage=stage)
    assert type(optimizer) is refused and "_zeroshard" not in model.__dict__ and not optimizer.state
    zs.whole_matrix(refused)
    zs.shard(model, optimizer, stage=3)


def test_what_needs_several_parameters_is_refused_without_a_remedy_that_would_not_help():
    model, optimizer = _linears(Together)
    with pytest.raises(
        zs.ConfigError, match="values differ by .* Its step of a parameter depends on other parameters: use for example AdamW"
    ) as caught:
        zs.shard(model, optimizer)
    assert "whole_matrix" not in str(caught.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cls", [StacksTold, StacksAll])
def test_stacks_of_matrices_train_as_on_one_process(cls, stage, tmp_path):
    refused = _stacks(copy.deepcopy(MODEL), Stacks)
    model, stacks = copy.deepcopy(MODEL), len(refused.param_groups) - 1
    with pytest.raises(
        zs.ConfigError, match=r"in group 1, .* of \d.*fails on flat slices \(IndexError.*where=lambda param, options"
    ) as caught:
        zs.shard(model, _stacks(model, Stacks), stage=stage)
    assert f"in group {', '.join(map(str, range(1, stacks + 1)))} of {stacks + 1}" in str(caught.value)
    alone = _stacks(model, Stacks)
    _train(model, alone, range(2))
    expected, options = model.state_dict(), [{**group, "params": None} for group in alone.param_groups]

    def rank_main(rank):
        for place in ("device", "cpu"):
            model = copy.deepcopy(MODEL)
            model, optimizer = zs.shard(model, _stacks(model, cls), stage=stage, offload_optimizer=place)
            _train(model, optimizer, [rank], range(2))
            cut = optimizer.state[next(p for p in model.blocks[0].parameters() if p.dim() == 2)]
            assert cut["momentum"].shape == cut["momentum"].full_tensor().shape and cut["rows"].dim() == 3
            zs.save(tmp_path / place, model, optimizer)
            model = copy.deepcopy(MODEL)
            model, optimizer = zs.shard(model, _stacks(model, cls), stage=stage, offload_optimizer=place)
            zs.load(tmp_path / place, model, optimizer)
            _train(model, optimizer, [rank], range(2, 4))
            assert [{**group, "params": None} for group in optimizer.param_groups] == options  # every rank knows what was counted
            for name, value in zs.full_state_dict(model).items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{place}, {n}: {m}"
                )

    run_threads(2, rank_main)


class Foreach(Each):
    """Elementwise, by operations on lists, which must not be empty."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            torch._foreach_add_(params, [param.grad for param in params], alpha=-group["lr"])


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload_optimizer": "cpu"}], ids=str)
def test_a_step_of_lists_is_given_none_that_is_empty(options):
    def made():
        model = copy.deepcopy(MODEL)
        params = list(model.parameters())
        return model, Foreach([{"params": params[:3], "lr": 0.2}, {"params": params[3:]}])

    model, alone = made()
    expected = _train(model, alone, range(2)).state_dict()

    def rank_main(rank):
        model, optimizer = zs.shard(*made(), **options)
        _train(model, optimizer, [rank])
        assert [group["seen"] for group in optimizer.param_groups] == [4, 4]
        for name, value in zs.full_state_dict(model).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)

    run_threads(2, rank_main)


class Noisy(Normed):
    """Draws at random: two trials differ by that alone."""

    def move(self, param, group):
        return super().move(param, group) + torch.randn_like(param)


class WithModel(Normed):
    """Holds what can not be copied."""

    def __init__(self, params):
        super().__init__(params)
        self.model = nn.Linear(2, 2)


class AsksForClosure(Normed):
    def step(self, closure=None):
        closure()
        super().step()


class CountsItself(Each):
    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        self.history.append(self.count)
        super().step()


@pytest.mark.parametrize("cls", [Each, Lion, Noisy, WithModel, AsksForClosure, type("OwnAdam", (torch.optim.AdamW,), {})])
def test_elementwise_ones_and_those_of_which_a_trial_tells_nothing_are_taken(cls):
    model, optimizer = _linears(cls)
    before = torch.get_rng_state()
    zs.shard(model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_leaves_the_users_optimizer_as_it_is():
    model, optimizer = _linears(CountsItself)
    optimizer.history, optimizer.buffer = [7], torch.zeros(3)
    model(torch.ones(2, 3)).sum().backward()
    grads, options = [p.grad.clone() for p in model.parameters()], [dict(group) for group in optimizer.param_groups]
    assert departure(optimizer) is None
    assert optimizer.history == [7] and not hasattr(optimizer, "count") and not optimizer.state
    assert optimizer.param_groups == options and all(map(torch.equal, grads, (p.grad for p in model.parameters())))


def test_it_is_the_same_of_parameters_without_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        assert departure(Normed(model.parameters())).alone and departure(Each(model.parameters())) is None
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = Normed(model.parameters(), lr=torch.tensor(0.1))
        optimizer.buffer = torch.zeros(3)
        assert departure(optimizer).groups == [0]


def test_states_that_were_made_before_the_first_step():
    class Adagrad(torch.optim.Adagrad):
        """Its constructor makes them."""

    class NormedAdagrad(Normed):
        def move(self, param, group):
            return super().move(param, group) / self.state[param]["sum"].add_(1.0)

    model, optimizer = _linears(Adagrad)
    assert departure(optimizer) is None
    optimizer = NormedAdagrad(model.parameters())
    assert departure(optimizer) is None  # it fails on whole parameters, too
    for param in model.parameters():
        optimizer.state[param]["sum"] = torch.zeros_like(param)
    assert "values differ" in departure(optimizer).how


class OldGradient(Each):
    """Moves by the mean of this gradient and the last, of which it keeps a copy."""

    def move(self, param, group):
        old, self.state[param]["old"] = self.state[param].get("old", param.grad), param.grad.clone()
        return (param.grad + old) / 2


class OldGradientItself(Each):
    def move(self, param, group):
        old, self.state[param]["old"] = self.state[param].get("old", param.grad), param.grad
        return (param.grad + old) / 2


def test_a_class_that_keeps_the_gradient_itself_is_told_to_copy_it():
    model, optimizer = _linears(OldGradientItself)
    with pytest.raises(zs.ConfigError, match=r"keeps p\.grad, .* Let its state hold a copy: p\.grad\.clone\(\)\."):
        zs.shard(model, optimizer)
    assert departure(OldGradient(model.parameters())) is None


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_old_gradient_is_the_one_of_the_last_step(stage):
    def run(rank, sharded, cls):
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)))
        optimizer = cls(model.parameters())
        if sharded:
            model, optimizer = zs.shard(model, optimizer, stage=stage)
        for step in range(4):
            model(torch.full((2, 6), float(step + 1))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in (zs.full_state_dict(model) if sharded else model.state_dict()).values()]

    @zs.whole_matrix
    class Whole(OldGradientItself):
        """Steps tensors of its own, so that it may keep them."""

    expected = run(0, False, OldGradientItself)
    for cls in (OldGradient, Whole):
        for found in run_threads(2, run, True, cls):
            assert all(map(torch.equal, found, expected))


def test_known_classes_are_not_tried(monkeypatch):
    monkeypatch.setattr(step_probe, "_apart", lambda: pytest.fail("tried"))
    for cls in (torch.optim.AdamW, torch.optim.SGD, zs.Lion):
        model, optimizer = _linears(cls, lr=0.1)
        zs.shard(model, optimizer)


def test_nothing_is_compiled_for_a_trial():
    compiled = []

    @torch.compile(dynamic=False, backend=lambda graph, inputs: compiled.append(graph) or graph.forward)
    def kernel(param, grad):
        param.sub_(0.1 * grad)

    class Compiled(Each):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    kernel(param, param.grad / (param.grad.norm() if group["normed"] else 1.0))

    for normed in (False, True):
        assert (departure(_linears(Compiled, normed=normed)[1]) is not None) is normed
    assert not compiled


dist = torch.distributed


class Averages(Each):
    """Sends its gradients, as those do that need no DDP."""

    def move(self, param, group):
        if dist.is_initialized():
            dist.all_reduce(param.grad)
        return param.grad


class CountsRanks(Each):
    """Sends a number alone."""

    def move(self, param, group):
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        return param.grad / ranks


class AveragesTold(Averages):
    """Declared."""


zs.whole_matrix(AveragesTold)


def test_one_that_sends_gradients_itself(tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for cls in (Averages, AveragesTold):
            model, optimizer = _linears(cls)
            with pytest.raises(
                zs.ConfigError, match=rf"the step of {cls.__name__} sent data to other ranks.*allreduce.*a `dist`"
            ):
                zs.shard(model, optimizer)
        zs.shard(*_linears(CountsRanks))
        monkeypatch.setitem(globals(), "dist", types.SimpleNamespace(is_initialized=lambda: False))  # the remedy
        for cls in (Averages, AveragesTold):
            model, optimizer = zs.shard(*_linears(cls))
            before = zs.full_state_dict(model)["0.bias"].clone()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            assert not torch.equal(zs.full_state_dict(model)["0.bias"], before)
    finally:
        torch.distributed.destroy_process_group()
