"""Divided experts where no process group is needed: the exchange among threads, plans, and what can not be divided."""

import pytest
import torch
from expert_kit import Own, make, net
from torch import nn

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.config import Tier
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import imagined_mesh, run_threads


def test_parts_of_any_length_are_exchanged():
    counts = [[0, 3, 1], [2, 0, 0], [1, 1, 0]]  # from rank, to rank

    def on_rank(rank):
        comm, found = backend_select.current(None, torch.device("cpu"), 60.0), []
        for scale in (1, 4000):  # the second outgrows the memory of the first
            sent, came = ([scale * n for n in each] for each in (counts[rank], [row[rank] for row in counts]))
            work = comm.all_to_all(out := torch.full((sum(came),), -1), torch.full((sum(sent),), rank), "parts", came, sent)
            work.wait()
            assert out.tolist() == [r for r, n in enumerate(came) for _ in range(n)]
            found.append(sum(work.sent) == 8 * (sum(sent) - sent[rank]))
        equal = torch.empty(3, 1, dtype=torch.bfloat16)
        comm.all_to_all(equal, torch.arange(3, dtype=torch.bfloat16).view(3, 1) + 3 * rank).wait()
        return all(found) and equal.flatten().tolist() == [rank, rank + 3, rank + 6]

    assert run_threads(3, on_rank) == [True] * 3


@pytest.mark.parametrize("dp, ep", [(2, 2), (1, 4)])
def test_a_plan_has_the_bytes_of_experts_and_of_their_exchange(dp, ep):
    config = GPTConfig(vocab_size=64, seq_len=16, dim=16, layers=2, heads=2, experts=8)
    names = ["blocks.*.mlp.experts"]
    plans = [
        zs.plan(
            lambda: GPT(config),
            axes=axes,
            batch=(2, 16),
            stage=1,
            separate=False,
            parallel={"experts": names} if len(axes) > 1 else {},
        )
        for axes in ({"dp": 4}, {"dp": dp, "ep": ep})
    ]
    whole, divided = (plan.phases[-1].held[Tier.DEVICE]["parameters"] for plan in plans)
    experts = 2 * 8 * (64 * 16 + 16 * 64) * 4  # layers, experts, matrices, bytes
    assert whole - divided == experts * (ep - 1) // ep
    rows = 2 * 16 * 2  # tokens, choices
    assert plans[1].sent["ep"] == 4 * 2 * rows * (ep - 1) // ep * 16 * 4  # four ways, layers, width, bytes


BAD = {
    "experts has 6 experts, which 4 ranks do not divide: take an axis of 3 ranks": (6, {"experts": ["experts"]}),
    "Net has no module of experts of Transformers' interface to divide over 4 ranks: name": (8, {}),
    "experts: Net has no module named 'expert'. Did you mean 'experts'": (8, {"experts": ["expert"]}),
    r"mix \(Linear\) has no num_experts: expected": (8, {"experts": ["mix"]}),
    "capacity_factor: expected a finite number above 0, .*got 0": (8, {"experts": ["experts"], "capacity_factor": 0}),
    "capacity_factor: .*got inf": (8, {"experts": ["experts"], "capacity_factor": float("inf")}),
    "capacity_factor: .*got '1'": (8, {"experts": ["experts"], "capacity_factor": "1"}),
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_can_not_be_divided(sentence):
    experts, options = BAD[sentence]
    with imagined_mesh({"dp": 1, "ep": 4}) as mesh:
        model = net(experts)
        before = dict(model.named_parameters())
        with pytest.raises(zs.ConfigError, match=sentence):
            zs.divide_experts(model, mesh["ep"], **options)
        assert all(param is before[name] for name, param in model.named_parameters()) and type(model.experts) is Own
        with pytest.raises(zs.ConfigError, match=r"expected one axis of a mesh, such as mesh\['ep'\]"):
            zs.divide_experts(model, mesh)


def test_shared_parameters_are_refused_and_shared_modules_are_divided_once():
    with imagined_mesh({"dp": 1, "ep": 4}) as mesh:
        model = nn.ModuleList([net(), net()])
        model[1].experts.weight = model[0].experts.weight
        with pytest.raises(zs.ConfigError, match=r"1\.experts\.weight is 0\.experts\.weight: .* Let both places call one module"):
            zs.divide_experts(model, mesh["ep"], experts=["*.experts"])
        model[1].experts = model[0].experts
        zs.divide_experts(model, mesh["ep"], experts=["*.experts"])
        assert model[1].experts is model[0].experts and model[0].experts.num_experts == 2


def test_adapters_of_divided_parameters_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("Mixtral"), peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"]))
    with imagined_mesh({"dp": 1, "ep": 4}) as mesh:
        zs.divide_experts(model, mesh["ep"])
        with pytest.raises(
            zs.ConfigError, match=r"experts adapts parameters .* the axis 'ep' .*\(target_modules\), or leave 'ep' out"
        ):
            zs.shard(model, None, mesh=mesh)
    assert not hasattr(model, "_zeroshard")


def test_a_method_of_the_programs_own_with_the_name_of_one_of_peft_is_not_called():
    class Block(nn.Linear):
        def get_base_layer(self, number):
            raise AssertionError

    zs.shard(nn.Sequential(Block(4, 4)), None, stage=0)
