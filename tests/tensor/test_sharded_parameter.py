"""The sharded parameter that rests in a module: true attributes outside, a slice inside, never a crash.

Initialisation and streaming are in test_init_context.py, zs.gathered in test_gathered.py. Ranks of random tests run one after
another over FakeComm, since threads share torch's generator.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import pickle

import pytest
import torch
from torch import nn
from zoo import Stack, adamw, normal_batches, run_threads, same, seeded, square

import zeroshard as zs
from zeroshard.comm.fake import FakeComm

INITIALISERS = {
    "uniform_": {}, "normal_": {"std": 0.1}, "constant_": {"val": 0.5}, "ones_": {}, "zeros_": {}, "eye_": {},
    "xavier_uniform_": {}, "xavier_normal_": {}, "kaiming_uniform_": {"a": 5**0.5}, "kaiming_normal_": {},
    "trunc_normal_": {"std": 0.02}, "orthogonal_": {}, "sparse_": {"sparsity": 0.3},
}  # fmt: skip


def fake(rank: int, world: int = 3, build=Stack, **options):
    """Rank `rank` of a stage 3 model with nobody else there."""
    model, _ = zs.shard(seeded(build), None, stage=3, comm=FakeComm(rank, world), **options)
    return model


def assert_slices_equal(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Every rank's slice equals that part of the whole values."""
    for name, param in model.named_parameters():
        flat = whole[name].reshape(-1)[param._home.start : param._home.stop]
        same(param.to_local().detach(), flat, name, 0.0)


def test_attributes_are_those_of_the_whole_parameter():
    base = seeded(Stack)
    ids = {name: id(param) for name, param in base.named_parameters()}
    plain = {
        name: (p.shape, p.numel(), p.dtype, p.device, p.requires_grad, p.ndim, p.stride()) for name, p in base.named_parameters()
    }
    model, _ = zs.shard(base, None, stage=3, comm=FakeComm(1, 3))
    for name, p in model.named_parameters():
        assert (p.shape, p.numel(), p.dtype, p.device, p.requires_grad, p.ndim, p.stride()) == plain[name]
        assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and id(p) == ids[name]
        assert p.is_leaf and p.grad is None and len(p) == p.shape[0] and name in repr(p)
    assert 0 < sum(p.to_local().numel() for p in model.parameters()) < sum(p.numel() for p in model.parameters()) / 2
    assert sum(p.numel() for p in model.parameters()) == sum(numel for _, numel, *_ in plain.values())


def test_state_dict_keys_and_full_state_dict():
    base = seeded(Stack)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3, map_shared=rank < 9)
        assert list(model.state_dict()) == list(base.state_dict())
        return zs.full_state_dict(model), {n: p.full_tensor() for n, p in model.named_parameters()}

    for state, tensors in run_threads(3, run):
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)
            same(tensors[name], value, name, 0.0)


@pytest.mark.parametrize(
    "options", [{"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}, {"stage": 3, "precision": "bf16"}], ids=str
)
def test_load_state_dict_from_whole_tensors(options):
    base, other, batches = seeded(Stack), seeded(Stack, seed=7), normal_batches(2, 2, 4, 7)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
        assert model.load_state_dict(other.state_dict()).missing_keys == []
        masters = zs.full_state_dict(model, masters=True) if options.get("precision") != "bf16" else None
        for ranks in batches:
            square(model, ranks[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return masters, zs.full_state_dict(model)

    for loaded, trained in run_threads(2, run):
        for name, value in other.state_dict().items():
            if loaded is not None:
                same(loaded[name], value, name, 0.0)
            assert (trained[name].float() - value).abs().max() < 0.04  # two steps away from the loaded values


def test_load_state_dict_strictness_and_shapes():
    model = fake(0)
    state = seeded(Stack).state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in state.items() if k != "last.bias"})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state | {"last.bias": torch.zeros(5)})


@pytest.mark.parametrize("name", INITIALISERS)
def test_b16_initialisers_act_on_the_logical_tensor_or_raise(name):
    initialise = getattr(nn.init, name)

    def everything(model):
        torch.manual_seed(5)
        for param in model.parameters():
            if param.ndim == 2 or name in ("uniform_", "normal_", "constant_", "ones_", "zeros_", "trunc_normal_"):
                initialise(param, **INITIALISERS[name])

    base = seeded(Stack)
    everything(base)
    for rank in range(3):
        model = fake(rank)
        try:
            everything(model)
        except zs.ShardedAccessError as error:
            assert "zs.gathered" in str(error)
            assert name in ("orthogonal_", "sparse_", "eye_"), f"{name} should work"
            continue
        assert_slices_equal(model, base.state_dict())


def test_b16_truncated_draws_are_repeated_on_all_ranks_alike():
    """A rejection on one rank makes all draw again, so generators stay together."""
    base, generator = seeded(Stack), torch.Generator()

    def everything(model, generator):
        for param in model.parameters():
            nn.init.trunc_normal_(param, std=1.0, a=-0.8, b=1.2, generator=generator.manual_seed(1))
            nn.init.trunc_normal_(param, mean=0.5, std=0.1, a=-0.2, b=0.4, generator=generator)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3)
        everything(model, torch.Generator())
        return zs.full_state_dict(model)

    traces = run_threads(3, run)
    everything(base, generator)
    for state in traces:
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)


@pytest.mark.parametrize("world", [1, 2])
def test_draws_in_place_that_depend_on_the_values(world):
    """Inference mode does not write them as other operations."""

    def run(rank):
        model, _ = zs.shard(seeded(lambda: nn.Linear(8, 8)), None, stage=3)
        before = model.weight.full_tensor().detach()
        with torch.inference_mode():
            nn.functional.dropout(model.weight.data, 0.5, True, inplace=True)
        after = model.weight.full_tensor().detach()
        assert torch.equal(after, torch.where(after == 0, 0, 2 * before)) and 0 < (after == 0).sum() < 64
        with torch.inference_mode():
            nn.functional.rrelu(model.bias.data, 2.0, 3.0, training=True, inplace=True)

    run_threads(world, run)


def test_b16_the_usual_init_weights_and_data_writes():
    def init_weights(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.5)
            with torch.no_grad():
                module.bias.copy_(torch.arange(7.0))
                module.bias.mul_(2).add_(1.0)
                module.weight += 1
                module.weight[2] = 9.0
                module.weight[4:6].zero_()

    base = seeded(Stack)
    torch.manual_seed(3)
    base.apply(init_weights)
    for rank in range(3):
        model = fake(rank)
        torch.manual_seed(3)
        model.apply(init_weights)
        assert_slices_equal(model, base.state_dict())


def test_b16_writes_reach_the_training():
    """Masters follow a write, and peers compute with it."""
    base, filled = seeded(Stack), seeded(Stack)
    for param in filled.parameters():
        param.data.fill_(0.01)
    wanted = filled(torch.ones(2, 7))

    def run(rank, options):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.5), **options)
        x = torch.ones(2, 7)
        square(model, (x,)).backward()
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.01)
        out = model(x)
        out.sum().backward()
        optimizer.step()
        return out, zs.full_state_dict(model)["last.weight"]

    for options in ({"stage": 2}, {"stage": 3}, {"stage": 3, "map_shared": False}, {"stage": 3, "precision": "bf16"}):
        for out, weight in run_threads(2, run, options):
            assert torch.allclose(out.float(), wanted, atol=1e-3), options
            assert not torch.allclose(weight.float(), torch.full((3, 7), 0.01), atol=1e-4)


def test_elementwise_arithmetic_is_local():
    whole = {n: p.detach() for n, p in seeded(Stack).named_parameters()}
    for rank in range(3):
        model = fake(rank)
        with torch.no_grad():
            result = {n: (p * 2 + p.abs().sqrt() - torch.ones(p.shape)).clamp(min=-0.5) for n, p in model.named_parameters()}
            moments = {n: torch.zeros_like(p).lerp_(p, 0.1) for n, p in model.named_parameters()}
            params = list(model.parameters())
            torch._foreach_mul_(params, 3.0)
        for name, value in whole.items():
            home = result[name]._home
            wanted = (value * 2 + value.abs().sqrt() - 1).clamp(min=-0.5).reshape(-1)[home.start : home.stop]
            same(result[name].to_local(), wanted, name, 0.0)
            same(moments[name].to_local(), (value * 0.1).reshape(-1)[home.start : home.stop], name, 1e-7)
        assert_slices_equal(model, {n: v * 3 for n, v in whole.items()})


def test_an_average_of_weights_can_be_kept_beside_the_model():
    base = seeded(Stack)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        average = {n: p.detach().clone() for n, p in model.named_parameters()}
        square(model, (torch.ones(2, 7),)).backward()
        optimizer.step()
        for n, p in model.named_parameters():
            average[n].mul_(0.9).add_(p.detach(), alpha=0.1)
        return {n: t.full_tensor() for n, t in average.items()}, zs.full_state_dict(model)

    for average, state in run_threads(2, run):
        for name, value in base.state_dict().items():
            same(average[name], value * 0.9 + state[name] * 0.1, name, 1e-6)


REFUSED = {
    "matmul": lambda p: torch.ones(1, p.shape[0]) @ p, "sum of a view": lambda p: p.view(-1).sum(),
    "norm": lambda p: p.norm(), "transpose": lambda p: p.t(), "item": lambda p: p[0, 0].item(),
    "numpy": lambda p: p.detach().numpy(), "tolist": lambda p: p.tolist(), "linear": lambda p: nn.functional.linear(torch.ones(1, 7), p),
    "column": lambda p: p[:, 1], "mask": lambda p: p[p > 0], "einsum": lambda p: torch.einsum("ij->i", p),
    "cat": lambda p: torch.cat([p, p]), "iterate": lambda p: [float(x) for r in p for x in r],
    "save": lambda p: torch.save(p, io.BytesIO()), "pickle": lambda p: pickle.dumps(p),
    "deepcopy": lambda p: copy.deepcopy(p), "data_ptr": lambda p: torch.empty(1).set_(p), "resize": lambda p: p.data.resize_(3),
    "column write": lambda p: p.data[:, 0].zero_(), "out": lambda p: torch.mm(torch.ones(7, 7), torch.ones(7, 7), out=p.data),
    "out whole": lambda p: torch.add(p.data, 1, out=torch.ones(7, 7)),
    "index_put": lambda p: p.data.index_put_((torch.tensor([0]),), torch.tensor(1.0)), "embedding": lambda p: nn.functional.embedding(torch.tensor([0]), p),
    "backward": lambda p: (p * 2).sum().backward(),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_whatever_needs_the_whole_raises_with_the_remedy(what):
    for rank in range(2):
        model = fake(rank, 2)
        weight = model.first.weight
        before = weight.to_local().clone()
        with pytest.raises((zs.ShardedAccessError, RuntimeError, NotImplementedError, TypeError)) as caught:
            REFUSED[what](weight)
        assert isinstance(caught.value, zs.ShardedAccessError), f"{type(caught.value)}: {caught.value}"
        assert "first.weight" in str(caught.value) and ("zs." in str(caught.value) or "full_tensor" in str(caught.value))
        same(weight.to_local(), before, what, 0.0)


@pytest.mark.parametrize("born", [False, True])
def test_an_address_tells_parameters_apart_and_is_no_number(born):
    """Transformers counts parameters by it, and PEFT compares tied ones; who reads at it is refused."""
    with zs.init(stage=3, comm=FakeComm(1, 2)) if born else contextlib.nullcontext():
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7))
        model[2].weight = model[1].weight
    if not born:
        model, _ = zs.shard(model, comm=FakeComm(1, 2), stage=3)
    every = [param for module in model for param in module.parameters()]
    assert sum({param.data_ptr(): param.numel() for param in every}.values()) == 7 * 5 + 7 * 7 + 3 * 7
    one, two, weight = model[0].weight, model[0].bias, model[0].weight.detach()
    assert one.data_ptr() == weight.data_ptr() == weight.view(-1).data_ptr() != two.data_ptr() and one.data_ptr() != 0
    assert born or one[0].data_ptr() != one.data_ptr()
    for read in (int, hex, lambda at: at % 16, lambda at: at + 4, lambda at: sorted([at, 5]), lambda at: f"{at:x}"):
        with pytest.raises(zs.ShardedAccessError, match="weight: this rank holds a slice.*zs.full_state_dict"):
            read(one.data_ptr())
    with pytest.raises(TypeError):
        ctypes.c_void_p(one.data_ptr())
    with pytest.raises(zs.ShardedAccessError, match="this rank holds a slice"):
        (one * 2).data_ptr()


def test_the_remedy_is_that_of_the_case():
    """A norm that autograd would follow is refused; a whole parameter takes the whole of its gradient."""
    with pytest.raises(zs.ShardedAccessError, match=r"For its norm take that of `p.full_tensor\(\)`") as caught:
        fake(0).first.weight.norm()
    assert "clip" not in str(caught.value)
    model, _ = zs.shard(seeded(Stack), None, stage=2)
    model(torch.ones(1, 7)).sum().backward()
    weight = model.first.weight
    with pytest.raises(zs.ShardedAccessError, match="p.grad.full_tensor"):
        weight.grad.norm(dim=0)
    with torch.no_grad():
        before = weight.clone()
        for write in (lambda: weight.sub_(0.1 * weight.grad), lambda: weight.add_(weight.grad, alpha=-0.1)):
            with pytest.raises(zs.ShardedAccessError, match=r"whole tensor is to be changed.*`p.grad.full_tensor\(\)`"):
                write()
        same(weight, before, "refused", 0.0)
        weight -= 0.1 * weight.grad.full_tensor()
        same(weight, before - 0.1 * weight.grad.full_tensor(), "by hand", 1e-7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizers_state_dict_can_be_copied_and_given_back(stage):
    """copy.deepcopy(optimizer.state_dict()), as whoever keeps the best states in memory does; torch.save names the remedy."""

    def rank_run(rank: int) -> None:
        model = seeded(Stack)
        model, optimizer = zs.shard(model, torch.optim.Adam(model.parameters()), stage=stage)

        def step() -> None:
            model(torch.ones(1, 7)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        states, best = zs.full_optimizer_state(model), copy.deepcopy(optimizer.state_dict())
        with pytest.raises(zs.ShardedAccessError, match="zs.full_optimizer_state_dict"):
            torch.save(optimizer.state_dict(), io.BytesIO())
        step()
        assert not torch.equal(zs.full_optimizer_state(model)["first.weight"]["exp_avg_sq"], states["first.weight"]["exp_avg_sq"])
        optimizer.load_state_dict(best)
        for name, state in zs.full_optimizer_state(model).items():
            for key, value in state.items():
                same(value, states[name][key], f"{name}.{key}", 0.0)
        model(torch.ones(1, 7)).sum().backward()
        gradient = copy.deepcopy(model.first.weight.grad)
        same(gradient.full_tensor(), model.first.weight.grad.full_tensor(), "gradient", 0.0)
        zs.close(model)

    run_threads(2, rank_run)


def test_copying_and_pickling_a_sharded_model_is_refused_by_name():
    model = fake(0)
    for action in (copy.deepcopy, lambda m: torch.save(m.state_dict(), io.BytesIO())):
        with pytest.raises(zs.ShardedAccessError, match="zs.full_state_dict"):
            action(model)
    with pytest.raises((zs.ShardedAccessError, AttributeError)):
        pickle.dumps(model)
    model, _ = zs.shard(seeded(Stack), None, stage=2)
    with pytest.raises(zs.ShardedAccessError, match="zs.full_state_dict"):
        copy.deepcopy(model)
    block = copy.deepcopy(model.blocks[0])  # replicated: an ordinary module
    block(torch.ones(1, 7)).sum().backward()
    assert all(type(p) is nn.Parameter and p.grad is not None for p in block.parameters())


def test_a_whole_tensor_may_be_added_into_a_parameter():
    def run(rank):
        model, _ = zs.shard(seeded(Stack), None, stage=3)
        torch.add(torch.ones(7, 7), 1, out=model.first.weight.data)
        return (
            zs.full_state_dict(model)["first.weight"],
            bool(model.first.weight.isnan().any()),
            bool((model.first.weight == 2).all()),
        )

    for weight, any_nan, all_two in run_threads(2, run):
        assert (weight == 2).all() and all_two and not any_nan


def test_gradients_have_the_true_shape_and_support_arithmetic():
    base, batches = seeded(Stack), normal_batches(1, 2, 4, 7)

    def run(rank, stage, scale):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage)
        square(model, batches[0][rank]).backward()
        grads = {}
        for name, p in model.named_parameters():
            assert p.grad.shape == p.shape and p.grad.dtype == p.dtype
            with torch.no_grad():
                p.grad.mul_(scale)
            grads[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        before = zs.full_state_dict(model)
        model.last.bias.grad = None
        optimizer.step()
        after = zs.full_state_dict(model)
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return grads, {n: before[n] - after[n] for n in before}

    for stage in (1, 2, 3):
        plain = [g for g, _ in run_threads(2, run, stage, 1.0)]
        for grads, change in run_threads(2, run, stage, 0.25):
            for name, grad in grads.items():
                same(grad, plain[0][name] * 0.25, name, 0.0)
                wanted = torch.zeros_like(grad) if name == "last.bias" else grad
                same(change[name], wanted, name, 1e-6)


def test_stale_references_raise_and_never_crash():
    base = seeded(Stack)

    def run(rank):
        model = copy.deepcopy(base)
        weight, data, detached = model.first.weight, model.first.weight.data, model.first.weight.detach()
        linked = model.last.weight[1:3]  # a live graph: torch can not exchange this parameter in place
        last = model.last.weight
        model, _ = zs.shard(model, None, stage=3, map_shared=False)
        compute = []
        model.blocks[0].up.register_forward_hook(lambda m, a, o: compute.append(m.weight))
        square(model, (torch.ones(2, 7),)).backward()
        assert weight is model.first.weight and weight.shape == (7, 7)
        for old in (data, linked, detached):  # taken before: their own memory, as it was
            assert torch.isfinite(old).all()
        assert last is not model.last.weight and last.numel() == 0
        return compute[0].shape

    assert run_threads(2, run) == [(14, 7)] * 2


def test_a_parameter_kept_from_inside_a_forward_raises_once_it_is_released():
    """Its memory is gone then: reading it would end the process with a segmentation fault."""
    kept: list[torch.Tensor] = []

    class Keeping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(self.weight)
            return super().forward(x)

    model = nn.Sequential(Keeping(4, 4), Keeping(4, 4))
    before = [layer.weight.detach().clone() for layer in model]
    model, _ = zs.shard(model, None, stage=3, map_shared=False)
    model(torch.ones(2, 4)).sum().backward()
    uses = (torch.sum, lambda w: w + 1, lambda w: w.view(-1)[0], lambda w: w.numpy(force=True), lambda w: w.data.zero_())
    for use in (*uses, lambda w: w.full_tensor(), lambda w: w.to_local()):
        with pytest.raises(zs.ShardedAccessError, match="kept from inside a forward"):
            use(kept[0])
    assert "not gathered" in repr(kept[0]) and kept[0].shape == (4, 4)
    model(torch.ones(2, 4)).sum().backward()  # gathered again, it is the parameter again
    zs.close(model)
    for layer, value in zip(model, before, strict=True):
        same(layer.weight.detach(), value, "weight", 0.0)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_whose_model_was_closed_is_spent(stage):
    """Whatever it is asked for, it says what to do."""
    model = seeded(Stack)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage)
    with pytest.raises(zs.ZeroshardError, match="sharded already"):
        zs.shard(model, optimizer, stage=stage)
    zs.close(model)
    for action in (optimizer.step, lambda: zs.shard(model, optimizer, stage=stage)):
        with pytest.raises(zs.ZeroshardError, match="closed?.*: make a new one|make a new optimizer"):
            action()
    zs.close(zs.shard(model, adamw(model.parameters()), stage=stage)[0])
