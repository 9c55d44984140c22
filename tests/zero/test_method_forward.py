"""zs.register_forward: a method of another name is a forward of its module; gradients are those of one process."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Block, Stack, run_threads, same, seeded

import zeroshard as zs

DIM = 7
X = torch.linspace(-1, 1, 2 * DIM).view(2, DIM)
every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Encodes(Stack):
    """A model whose methods of other names compute with its own parameters and with those of its parts."""

    def __init__(self) -> None:
        super().__init__(DIM, 2)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def encode(self, x: Tensor, *, twice: bool = False) -> Tensor:
        """Hidden values, of the shape of x."""
        x = nn.functional.linear(x, self.first.weight) * self.scale
        for block in self.blocks:
            x = block(block(x) if twice else x)
        return x

    def both(self, x: Tensor) -> dict[str, object]:
        return {"hidden": [self.encode(x)], "output": self(x), "rows": len(x)}

    def past_hooks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward(x), self.scale * 2

    def value(self, x: Tensor) -> float:
        with torch.no_grad():
            return self.encode(x).sum().item()

    def fails(self, x: Tensor) -> Tensor:
        self.encode(x)
        raise KeyError("of the program")

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield self.encode(row[None])


class Asks(Encodes):
    """Its forward is made of its methods."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x) + checkpoint(self.encode, x, use_reentrant=False))


METHODS = ("encode", "both", "past_hooks", "value", "fails")


def _registered(model: nn.Module) -> nn.Module:
    for name in METHODS:
        zs.register_forward(model, name)
    return model


def _both(model: Encodes) -> Tensor:
    found = model.both(X)
    assert found["rows"] == 2
    return found["hidden"][0].square().mean() + found["output"].square().mean()


LOSSES: dict[str, tuple[type, Callable[[nn.Module], Tensor]]] = {
    "by itself": (Encodes, lambda model: model.encode(X).square().mean()),
    "keywords": (Encodes, lambda model: model.encode(x=X, twice=True).square().mean()),
    "calls the module": (Encodes, _both),
    "calls forward": (Encodes, lambda model: sum(each.square().mean() for each in model.past_hooks(X))),
    "beside forward": (Encodes, lambda model: model.encode(X).square().mean() + model(X).square().mean()),
    "called by forward": (Asks, lambda model: model(X).square().mean()),
    "several": (Encodes, lambda model: model.encode(model.encode(X)).square().mean()),
    "checkpointed": (Encodes, lambda model: checkpoint(model.encode, X, use_reentrant=False).square().mean()),
}


@every_stage
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", LOSSES)
def test_gradients_are_those_of_one_process(stage, precision, case):
    build, loss = LOSSES[case]
    base = seeded(build)
    plain = copy.deepcopy(base)
    loss(plain).backward()
    options = {"precision": precision, "loss_scale": 64.0} if precision == "fp16" else {}

    def run(rank: int) -> None:
        model = _registered(copy.deepcopy(base))
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, map_shared=False, **options)
        for _ in range(2):
            loss(model).backward()
            found = zs.full_gradients(model)
            for name, param in plain.named_parameters():
                assert (found[name] is None) == (param.grad is None), name
                if param.grad is not None:
                    same(found[name], param.grad, name, 1e-6 if precision == "fp32" else 2e-2)
            model.zero_grad()
        assert optimizer.last_step is None or not optimizer.last_step.skipped

    run_threads(2, run)


@every_stage
def test_a_method_that_fails_or_returns_a_number(stage):
    base = seeded(Encodes)
    value = base.value(X)

    def run(rank: int) -> None:
        model, _ = zs.shard(copy.deepcopy(base), None, stage=stage, map_shared=False)
        _registered(model)
        for _ in range(2):
            with pytest.raises(KeyError, match="of the program"):
                model.fails(X)
            assert model.value(X) == pytest.approx(value, rel=1e-5)
            same(model(X).detach(), base(X).detach(), "forward", 1e-6)
        zs.close(model)
        assert model.value(X) == pytest.approx(value, rel=1e-5)

    run_threads(2, run)


def test_a_method_of_a_part_of_the_model():
    """Called from the model's forward, and by itself."""

    class Part(Block):
        def project(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.up.weight)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part(DIM) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return sum(part.project(x) for part in self.parts)

    base = seeded(Whole)
    plain = copy.deepcopy(base)
    (plain(X).square().mean() + plain.parts[1].project(X).square().mean()).backward()

    def run(rank: int) -> None:
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3, units=("Part",), map_shared=False)
        with pytest.raises(zs.ShardedAccessError, match=r'zs.register_forward\(module, "encode"\)'):
            model.parts[1].project(X)
        for part in model.parts:
            zs.register_forward(part, "project")
        (model(X).square().mean() + model.parts[1].project(X).square().mean()).backward()
        for name, grad in zs.full_gradients(model).items():
            wanted = dict(plain.named_parameters())[name].grad
            assert (grad is None) == (wanted is None), name
            if grad is not None:
                same(grad, wanted, name, 1e-6)

    run_threads(2, run)


def test_a_module_that_is_not_sharded():
    """Its hooks see the calls; a forward of the instance stays; so do signature and documentation."""
    model, seen = seeded(Encodes), []
    wanted = model.encode(X)
    signature = inspect.signature(model.encode)
    own = model.forward
    model.forward = lambda x: own(x) * 2
    kept = model.__dict__["forward"]
    _registered(model)
    model.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    same(model.encode(X), wanted, "encode", 0.0)
    assert seen == [Tensor] and model.__dict__["forward"] is kept
    same(model.both(X)["output"], own(X) * 2, "the instance's forward", 0.0)
    assert model.__dict__["forward"] is kept and inspect.signature(model.encode) == signature
    before = model.encode
    zs.register_forward(model, "encode")
    assert model.encode is before


def test_copies_and_pickles_have_their_own():
    model = seeded(Encodes)
    _registered(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    encode = io.BytesIO()
    torch.save(model.encode, encode)  # by itself, with its module
    encode.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False), torch.load(encode, weights_only=False).module]
    with torch.no_grad():
        model.scale.zero_()
    for each in copies:
        assert each.encode.module is each and each is not model
        assert each.encode(X).abs().sum() > 0 and "forward" not in each.__dict__


def test_a_function_that_stands_in_the_instance():
    model = seeded(Encodes)
    model.probe = lambda x: model.encode(x) + 1
    wanted = model.probe(X)
    zs.register_forward(model, "probe")
    same(model.probe(X), wanted, "probe", 0.0)


def test_what_is_refused():
    model = seeded(Encodes)
    for name, why in (
        ("forward", "needs no registration"), ("missing", "Encodes has no method"), ("first", "no method"), ("scale", "no method"),
        ("pieces", "runs after its call is over.*register the method that it calls at each turn"),
    ):  # fmt: skip
        with pytest.raises(zs.ConfigError, match=f"{name}.*{why}"):
            zs.register_forward(model, name)
    with pytest.raises(TypeError, match="expected a torch.nn.Module, got function"):
        zs.register_forward(lambda: None, "encode")
    assert not any(name in model.__dict__ for name in ("forward", "missing", "first", "scale", "pieces"))


def test_a_generator_whose_turns_are_forwards():
    base = seeded(Encodes)
    wanted = torch.cat(list(base.pieces(X)))

    def run(rank: int) -> None:
        model, _ = zs.shard(_registered(copy.deepcopy(base)), None, stage=3, map_shared=False)
        same(torch.cat(list(model.pieces(X))).detach(), wanted.detach(), "pieces", 1e-6)

    run_threads(2, run)


def test_a_compiled_module_is_asked_for_its_own():
    model = seeded(Encodes)
    zs.register_forward(torch.compile(model), "encode")
    assert type(model.__dict__["encode"]).__name__ == "MethodForward"
