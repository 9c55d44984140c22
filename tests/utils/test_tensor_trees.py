"""What goes in and comes out of modules: tensors are found in all that can be looked into, and cast in copies of it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import Case, Stack, check, every_mode, normal_batches, run_threads, seeded, square

import zeroshard as zs
from zeroshard.utils.tensor_tree import cast_floating, find_tensors, map_tensors

# -- found -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Slots:
    first: Any
    second: Any = None


class Plain:
    __slots__ = ("__dict__", "__hidden", "unset")

    def __init__(self, hidden: Any, **attributes: Any) -> None:
        self.__hidden = hidden
        self.__dict__.update(attributes)


NAMED = collections.namedtuple("Named", "x y")


def nested(tensors: list[Tensor]) -> Any:
    """Five tensors in containers and objects of many kinds, one of them twice."""
    a, b, c, d, e = tensors
    deep = [({"b": ([[[[a]]]],)},), a]
    mapping = types.MappingProxyType({"x": b})
    return (deep, NAMED(3, mapping), collections.UserDict(y=Plain(c, more="text")), Slots(d), {e}, None, 1.0)


def test_every_tensor_is_found_once():
    tensors = list(torch.ones(5).unbind())
    found = find_tensors(nested(tensors))
    assert set(map(id, found)) == set(map(id, tensors)) and len(found) == 5
    assert find_tensors(tensors[0]) == [tensors[0]]


def test_a_circle_ends():
    circle: list = [torch.ones(1)]
    circle.append({"again": circle})
    assert find_tensors(circle) == [circle[0]]
    assert map_tensors(lambda t: t + 1, circle)[0].item() == 2


OPAQUE = [lambda: 1, iter([1]), Stack().forward, (x for x in "a"), object()]


@pytest.mark.parametrize("opaque", OPAQUE, ids=lambda o: type(o).__name__)
def test_what_can_not_be_looked_into_is_passed_over(opaque):
    x = torch.ones(1)
    assert find_tensors([opaque, x]) == [x]


def test_modules_and_what_leads_everywhere_are_not_walked():
    assert find_tensors([nn.Linear(2, 2), int, torch.float32, "text"]) == []
    assert len(find_tensors([Plain(torch.ones(1)) for _ in range(20_000)])) < 20_000


# -- outputs of blocks at stage 3 ----------------------------------------------------------------------------------


class Two(nn.Module):
    """Returns two tensors in some shape; the next block uses the one that is harder to see."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).tanh(), self.two(x).tanh()


OUTPUTS = {
    "deep": (lambda h, g: (h, [({"b": ([[g]],)},)]), lambda out: out[1][0][0]["b"][0][0][0]),
    "slots": (lambda h, g: {"h": h, "s": Slots(g)}, lambda out: out["s"].first),
    "userdict": (lambda h, g: (h, collections.UserDict(g=g)), lambda out: out[1]["g"]),
    "closure": (lambda h, g: (h, lambda: g), lambda out: out[1]()),
}


@every_mode
@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("frozen", [False, True])
def test_only_a_hidden_output_reaches_the_loss(mode, kind, frozen):
    pack, unpack = OUTPUTS[kind]

    class Packed(Two):
        def forward(self, x):
            return pack(*super().forward(x))

    class Root(Stack):
        def forward(self, x):
            for block in self.blocks:
                x = x + unpack(block(x))
            return self.last(self.first(x))

    model = seeded(Root, block=Packed)
    for block in model.blocks:
        block.one.requires_grad_(not frozen)
    check(Case(model, normal_batches(2, 2, 4, 7), square), **mode)


# -- cast ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Doubling:
    x: Tensor
    scale: dataclasses.InitVar[float]
    made: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self, scale: float) -> None:
        self.x, self.made = self.x * 2 * scale, [self.x]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


class Attributed(dict):
    def __init__(self, note: str, **items: Any) -> None:
        super().__init__(**items)
        self.note = note


class Rows(list):
    pass


x = torch.ones(2, 3)
INPUTS = {
    "OrderedDict": collections.OrderedDict(x=x),
    "defaultdict": collections.defaultdict(list, x=x),
    "UserDict": collections.UserDict(x=x),
    "dict subclass": Attributed("kept", x=x),
    "dataclass": Doubling(x, 3.0),
    "frozen": Frozen(x),
    "named": NAMED(x, 5),
    "list": Rows([x]),
    "structseq": torch.ones(2, 3).max(0),
    "packed": nn.utils.rnn.pack_sequence([x]),
    "in a list": [{"deep": (Frozen(x),)}],
}


@pytest.mark.parametrize("kind", INPUTS)
def test_casts_are_made_in_a_copy_of_the_same_class(kind):
    given = INPUTS[kind]
    before = [(id(t), t.dtype) for t in find_tensors(given)]
    made = cast_floating(given, torch.bfloat16)
    assert [(id(t), t.dtype) for t in find_tensors(given)] == before
    assert type(made) is type(given) and made is not given
    for new, old in zip(find_tensors(made), find_tensors(given), strict=True):
        floating = old.is_floating_point()
        assert torch.equal(new.to(old.dtype), old) and new.dtype == (torch.bfloat16 if floating else old.dtype)
    assert getattr(made, "note", None) == getattr(given, "note", None)


def test_what_holds_nothing_to_cast_is_itself():
    given = {"x": [torch.ones(1, dtype=torch.bfloat16)], "n": Slots(3)}
    assert cast_floating(given, torch.bfloat16) is given


def test_one_tensor_in_two_places_stays_one():
    first, (second,) = cast_floating((x, [x]), torch.bfloat16)
    assert first is second


@pytest.mark.parametrize("kind", ["OrderedDict", "UserDict", "dataclass"])
def test_batches_of_the_user_in_low_precision(kind):
    class Net(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x if kind == "dataclass" else batch["x"])

    batch, model = INPUTS[kind], seeded(Net, 3, 2)
    wanted = copy.deepcopy(model).bfloat16()(cast_floating(batch, torch.bfloat16))

    def run(rank):
        sharded, _ = zs.shard(copy.deepcopy(model), None, precision="bf16")
        return sharded(batch).detach()

    for got in run_threads(2, run):
        assert torch.equal(got, wanted)
    assert {t.dtype for t in find_tensors(batch)} == {torch.float32}


def test_a_loss_that_is_returned_twice_is_scaled_once():
    class Net(nn.Linear):
        def forward(self, x):
            loss = super().forward(x).float().square().mean()
            return {"loss": loss, "all": [loss]}

    model = seeded(Net, 3, 2)

    def run(rank):
        mine = copy.deepcopy(model)
        mine, optimizer = zs.shard(mine, torch.optim.SGD(mine.parameters(), lr=1.0), precision="fp16", initial_loss_scale=64.0)
        mine(x)["loss"].backward()
        optimizer.step()
        return optimizer.last_step.grad_norm

    outcomes = run_threads(2, run)
    model(x)["loss"].backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert outcomes == [pytest.approx(wanted, rel=1e-2)] * 2
