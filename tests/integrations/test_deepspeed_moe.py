"""deepspeed.moe: layers of experts, divided over two ranks and whole; what the gate keeps; groups for an optimizer."""

import pytest
import torch
from helpers import seeding
from torch import nn
from zeroshard.deepspeed.moe.layer import MoE
from zeroshard.deepspeed.moe.utils import has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer

import zeroshard as zs
import zeroshard.deepspeed as deepspeed
from zeroshard.comm.launch import run_processes
from zeroshard.integrations.deepspeed.sections import DeepSpeedConfigError

WIDTH, STEPS = 6, 3


class Expert(nn.Module):
    """Returns a bias beside its output, as Megatron's do."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.map(x)), self.map.bias


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        with seeding(3):
            self.before, self.moe = nn.Linear(WIDTH, WIDTH), MoE(WIDTH, Expert(), num_experts=4, **options)
            with torch.no_grad():
                for param in self.moe.deepspeed_moe.experts.parameters():
                    param.add_(torch.randn_like(param))

    def forward(self, x):
        out, loss, _ = self.moe(torch.tanh(self.before(x)))
        return out.square().mean() + 0.1 * loss


def _trains(rank, ranks, folder):
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    told, given = {}, {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.05}

    def engine_of(ep_size, k, **more):
        model = Net(ep_size=ep_size, k=k, drop_tokens=False, top2_2nd_expert_sampling=False, use_residual=k == 2)
        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**given, **more})[0]

    def train(engine, first=0, last=STEPS):
        found = []
        for step in range(first, last):
            x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), engine.get_global_grad_norm()))
        return found

    for k in (1, 2):
        for ep_size in (2, 1):
            engine = engine_of(ep_size, k)
            assert engine.has_moe_layers and engine.num_experts == 4
            told[k, ep_size] = train(engine)
            if (k, ep_size) == (1, 2):
                shown = dict(engine.module.named_parameters())
                assert len(shown) == len(list(engine.module.parameters())) - 4 and all(
                    param.max() >= param.min() for param in shown.values()
                )
                engine(torch.ones(2, 5, WIDTH)).backward()
                with pytest.raises(
                    zs.ZeroshardError, match=r"ranks ask for norms of different tensors at once.*as of model.parameters\(\)"
                ):
                    nn.utils.get_total_norm([param.grad for param in shown.values()])
                norm = nn.utils.get_total_norm([param.grad for param in engine.module.parameters() if param.grad is not None])
                norms = [each.item() for each in (norm, zs.clip_grad_norm_(engine.module, 100.0))]
                assert norms[0] == pytest.approx(norms[1])
                engine.module.zero_grad()
                engine.save_checkpoint(folder)
                own = sum(
                    param.numel() > 0 for param in engine.module.moe.deepspeed_moe.experts.deepspeed_experts[0].parameters()
                )
            weights = zs.full_state_dict(engine.module) if ep_size == 1 else {}
            told["further by one"] = train(engine, STEPS, STEPS + 1) if (k, ep_size) == (1, 1) else told.get("further by one")
            engine.destroy()
            if (k, ep_size) == (1, 1):
                engine = engine_of(1, 1)
                engine.load_checkpoint(folder)
                loaded = zs.full_state_dict(engine.module)
                told["loaded"] = max((loaded[name] - weights[name]).abs().max().item() for name in weights)
                told["further"] = train(engine, STEPS, STEPS + 1)
                engine.destroy()
    said = []
    for options, more in (({"ep_size": 4}, {}), ({"ep_size": 2}, {"tensor_parallel": {"autotp_size": 2}})):
        with pytest.raises(DeepSpeedConfigError) as caught:
            engine_of(**options, k=1, **more)
        said.append(str(caught.value))
    return told, own, said


@pytest.mark.processes
def test_divided_experts_train_as_whole_ones(tmp_path):
    for rank, (told, own, said) in enumerate(run_processes(_trains, 2, str(tmp_path))):
        for k in (1, 2):
            torch.testing.assert_close(torch.tensor(told[k, 2]), torch.tensor(told[k, 1]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(told["further"]), torch.tensor(told["further by one"]), rtol=1e-5, atol=1e-6)
        assert told["loaded"] < 1e-5 and own == (2 if rank == 0 else 0)
        assert "a divisor of the 2 ranks" in said[0] and "tensor_parallel" in said[1]


def gate(k, logits, **options):
    """The kept choices (token, expert, weight) of a gate with these logits, the loss, and the counts."""
    made = MoE(4, nn.Linear(4, 4), num_experts=4, k=k, min_capacity=0, **options).deepspeed_moe.gate.train()
    with torch.no_grad():
        made.wg.weight.copy_(torch.eye(4))
        tokens, experts, weights, loss, counts = made(torch.tensor(logits))
    return list(zip(tokens.tolist(), experts.tolist(), weights.tolist(), strict=True)), loss.item(), counts.tolist()


def test_the_gate_keeps_what_an_expert_has_capacity_for():
    alike = [[2.0, 1.0, 0.0, 0.0]] * 4
    share = torch.tensor(alike[0]).softmax(0)
    kept, loss, counts = gate(1, alike, use_rts=False)
    assert [(token, expert) for token, expert, _ in kept] == [(0, 0)] and counts == [4, 0, 0, 0]
    assert kept[0][2] == pytest.approx(share[0].item()) and loss == pytest.approx(4 * share[0].item())
    assert len(gate(1, alike, capacity_factor=2.0)[0]) == 2 and len(gate(1, alike, drop_tokens=False)[0]) == 4
    kept, loss, counts = gate(2, alike, top2_2nd_expert_sampling=False)
    assert [(token, expert) for token, expert, _ in kept] == [(0, 0), (0, 1), (1, 0), (1, 1)] and counts == [4, 4, 0, 0]
    assert kept[0][2] + kept[1][2] == pytest.approx(1) and loss == pytest.approx(4 * share[0].item())
    kept, loss, counts = gate(3, [[3.0, 2.0, 1.0, 0.0], [4.0, 2.0, 1.0, 0.0]], capacity_factor=0.6)
    assert {(token, expert) for token, expert, _ in kept} == {(1, 0), (0, 1), (0, 2)} and counts == [2, 2, 2, 0]


def test_noise_and_used_tokens():
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, noisy_gate_policy="RSample", drop_tokens=False)
    jitter = MoE(4, nn.Linear(4, 4), num_experts=2, k=3 - 1, noisy_gate_policy="Jitter", drop_tokens=False)
    x = torch.randn(9, 4)
    _, _, counts = layer(x, torch.tensor([1, 1, 1, 0, 0, 0, 0, 0, 0]))
    assert counts.sum() == 3 and jitter(x)[2].tolist() == [9, 9]
    first, second = (layer.eval()(x)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(AssertionError, match="should be divisible"):
        MoE(4, nn.Linear(4, 4), num_experts=3, ep_size=2)
    with pytest.raises(DeepSpeedConfigError, match="enable_expert_tensor_parallelism"):
        MoE(4, nn.Linear(4, 4), enable_expert_tensor_parallelism=True)


def test_groups_of_parameters():
    net = Net(ep_size=2)
    shared, divided = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "name": "a", "lr": 1.0}
    )
    assert (divided["name"], divided["moe"], divided["lr"]) == ("ep_size_2", True, 1.0) and len(divided["params"]) == 8
    assert not any(map(is_moe_param, shared["params"])) and all(map(is_moe_param, divided["params"]))
    assert has_moe_layers(net) == (True, 4) and has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    with pytest.raises(ValueError, match="param_groups: expected a dict"):
        split_params_into_different_moe_groups_for_optimizer(3)
