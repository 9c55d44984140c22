"""deepspeed.moe: a layer of experts. Each token goes to its k most probable experts; a loss, `l_aux`, is least if all get equally many.

`initialize` divides the experts of a model over neighbouring ranks (ep_size) by `zs.divide_experts`. Choices beyond an expert's
capacity are dropped before tokens travel. Sources: GShard, arXiv 2006.16668; Switch Transformers, 2101.03961; DeepSpeed-MoE,
2201.05596. `l_aux` is computed from this rank's tokens alone, as in DeepSpeed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...seam import engine_of
from ...tensor.part import distribution_of
from .sections import DeepSpeedConfigError

_JITTER = 1e-2  # inputs of the gate are multiplied by numbers in 1 - _JITTER .. 1 + _JITTER


def _output(module: nn.Module, args: object, output: Any) -> Any:
    """Return an expert's output without the bias that some return beside it."""
    return output[0] if isinstance(output, tuple) else output


class TopKGate(nn.Module):
    """Chooses experts for tokens. Its attributes are arguments of MoE."""

    k: int
    min_capacity: int
    capacity_factor: float
    eval_capacity_factor: float
    noisy_gate_policy: str | None
    drop_tokens: bool
    use_rts: bool
    top2_2nd_expert_sampling: bool

    def __init__(self, hidden_size: int, num_experts: int, **options: Any) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.__dict__.update(options)

    def forward(self, hidden: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return (tokens (R,), experts (R,), weights (R,), l_aux, number of choices of each expert (E,)) for tokens (S, H).

        The first three are the choices that are kept. used (S,): 0 for tokens that no expert gets, with k=1.
        """
        x = hidden.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = x * torch.empty_like(x).uniform_(1 - _JITTER, 1 + _JITTER)
        logits = F.linear(x, self.wg.weight.float())
        gates, experts = logits.softmax(dim=1), logits.shape[1]
        index = self._choose(logits, gates)
        chosen = F.one_hot(index, experts)  # (S, k, E)
        if used is not None and self.k == 1:
            chosen = chosen * used.reshape(-1, 1, 1).to(chosen.dtype)
        routed = chosen[:, :1].sum(dim=1) if self.k <= 2 else chosen.sum(dim=1) / self.k
        loss = (gates.mean(dim=0) * routed.float().mean(dim=0)).sum() * experts
        kept = self._within_capacity(gates, chosen) if self.drop_tokens else chosen
        weights = gates.gather(1, index) * kept.sum(dim=2)
        if self.k > 1:
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
        tokens, choices = kept.sum(dim=2).nonzero(as_tuple=True)
        return tokens, index[tokens, choices], weights[tokens, choices], loss, chosen.sum(dim=(0, 1)).detach()

    def _choose(self, logits: Tensor, gates: Tensor) -> Tensor:
        """Return each token's experts (S, k)."""
        if self.k > 2:
            return gates.topk(self.k, dim=1).indices
        noise = torch.distributions.Gumbel(torch.zeros((), device=logits.device), torch.ones((), device=logits.device))
        if self.k == 1:
            noisy = self.noisy_gate_policy == "RSample" and self.training
            return (logits + noise.sample(logits.shape) if noisy else gates).argmax(dim=1, keepdim=True)
        first = gates.argmax(dim=1, keepdim=True)
        sampled = logits.detach() + noise.sample(logits.shape) if self.top2_2nd_expert_sampling else logits.detach()
        return torch.cat([first, sampled.scatter(1, first, -math.inf).argmax(dim=1, keepdim=True)], dim=1)

    def _within_capacity(self, gates: Tensor, chosen: Tensor) -> Tensor:
        """Return `chosen` without choices beyond each expert's capacity.

        With k=1 random tokens are kept (use_rts), or the first ones of the batch; with k=2 the first choices of tokens before second
        ones, each in the order of the batch; with larger k the most probable choices.
        """
        count, _, experts = chosen.shape
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        most = max(math.ceil(count / experts * factor * self.k), self.min_capacity)
        if self.k == 2 or (self.k == 1 and not self.use_rts):
            places = chosen.transpose(0, 1).flatten(0, 1).cumsum(dim=0).view(self.k, count, experts).transpose(0, 1)
            return chosen * (places <= most)
        wanted = chosen.sum(dim=1)
        rank = wanted * (torch.rand(wanted.shape, device=wanted.device) if self.k == 1 else gates)
        best = rank.topk(min(most, count), dim=0).indices
        return chosen * torch.zeros_like(wanted).scatter(0, best, 1).unsqueeze(1)


class Experts(nn.Module):
    """The experts of a MoE, with the names that DeepSpeed gives their parameters."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.deepspeed_experts = experts

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.deepspeed_experts(hidden, index, weights)


class MOELayer(nn.Module):
    """Gate and experts of a MoE."""

    def __init__(self, gate: TopKGate, experts: nn.ModuleList) -> None:
        super().__init__()
        self.gate, self.experts = gate, Experts(experts)

    def forward(self, hidden: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, l_aux, choices of each expert) of hidden (..., H)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        tokens, experts, weights, loss, counts = self.gate(rows, used)
        out = self.experts(rows[tokens], experts.unsqueeze(1), weights.unsqueeze(1))
        return torch.zeros_like(rows).index_add(0, tokens, out).view_as(hidden), loss, counts


class MoE(nn.Module):
    """A layer whose experts are `num_experts` copies of a module. It returns (output, l_aux, number of choices of each expert)."""

    def __init__(
        self, hidden_size: int, expert: nn.Module, num_experts: int = 1, ep_size: int = 1, k: int = 1, capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0, min_capacity: int = 4, use_residual: bool = False, noisy_gate_policy: str | None = None,
        drop_tokens: bool = True, use_rts: bool = True, use_tutel: bool = False, enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:  # fmt: skip
        """Make the layer with all experts; `deepspeed.initialize` later drops those of other ranks.

        Args:
            ep_size: number of neighbouring ranks over which experts are divided.
            k: number of experts of a token. Their outputs are weighted by their probabilities; if k > 1, divided by the sum of these.
            capacity_factor, eval_capacity_factor: in training, and in evaluation, an expert takes at most the larger of min_capacity
                and factor * k * tokens / num_experts choices of a rank's tokens. drop_tokens=False: all choices.
            use_rts: with k=1 the choices to drop are selected at random.
            use_residual: mix the output with that of one further copy, which computes all tokens, in learned shares.
            noisy_gate_policy: in training: "Jitter" multiplies inputs of the gate by noise; "RSample" (k=1) adds noise to logits.
            use_tutel: no effect. top2_2nd_expert_sampling: with k=2 the second expert is drawn by its probability.

        Raises AssertionError for experts that ep_size does not divide, DeepSpeedConfigError for expert tensor parallelism.
        """
        super().__init__()
        from ...parallel import experts as divisible

        assert num_experts % ep_size == 0, f"{num_experts} experts should be divisible by expert parallel size ({ep_size})"
        assert noisy_gate_policy in (None, "None", "Jitter", "RSample"), f"Unsupported noisy_gate_policy: {noisy_gate_policy}"
        if enable_expert_tensor_parallelism:
            raise DeepSpeedConfigError(
                "enable_expert_tensor_parallelism is not supported: an expert is whole on its rank; leave it out."
            )
        self.ep_size, self.num_experts, self.num_local_experts = ep_size, num_experts, num_experts // ep_size
        self.use_residual, self.expert_group_name = use_residual, f"ep_size_{ep_size}"
        experts = divisible.Experts(copy.deepcopy(expert) for _ in range(num_experts))
        for each in experts:
            each.register_forward_hook(_output)
            for param in each.parameters():
                param.__dict__.update(allreduce=False, group_name=self.expert_group_name)
        gate = TopKGate(
            hidden_size, num_experts, k=k, capacity_factor=capacity_factor, eval_capacity_factor=eval_capacity_factor, use_rts=use_rts,
            min_capacity=min_capacity, noisy_gate_policy=noisy_gate_policy, drop_tokens=drop_tokens,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = MOELayer(gate, experts)
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return (output, l_aux, choices of each expert). used_token: with k=1, 0 for tokens that no expert gets."""
        output, loss, counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            shares = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * shares[..., :1] + _output(self.mlp, (), self.mlp(hidden_states)) * shares[..., 1:]
        return output, loss, counts


def ranks_of(model: nn.Module, ranks: int, cut: bool) -> int:
    """Return the number of ranks over which the experts of a model are divided; 1: they are not.

    cut: whether other axes than data parallelism divide the ranks. Raises DeepSpeedConfigError if experts cannot be divided then,
    or not over this number of ranks.
    """
    sizes = {module.ep_size for module in model.modules() if isinstance(module, MoE)} or {1}
    if len(sizes) > 1 or ranks % max(sizes):
        raise DeepSpeedConfigError(
            f"MoE: ep_size = {sorted(sizes)}: expected one for all layers, a divisor of the {ranks} ranks."
        )
    if max(sizes) > 1 and cut:
        raise DeepSpeedConfigError(
            f"MoE: ep_size = {max(sizes)} beside an mpu, a PipelineModule or tensor_parallel: experts are divided over neighbours of all "
            "ranks. Leave the others out, or take ep_size=1."
        )
    return max(sizes)


def divide(model: nn.Module, line: DeviceMesh) -> None:
    """Divide the experts of all MoE layers over the ranks of an axis, in place. Raises ConfigError if they can not be divided."""
    from ...public import divide_experts

    of_a_layer = "deepspeed_moe.experts.deepspeed_experts"
    names = [f"{name}.{of_a_layer}".lstrip(".") for name, module in model.named_modules() if isinstance(module, MoE)]
    divide_experts(model, line, experts=names)


def show_own(model: nn.Module) -> None:
    """Let the `named_parameters` of a sharded model leave out experts of other ranks, of which a rank has no elements.

    DeepSpeed has no such parameters. `parameters` has them, so that ranks clip and gather the same ones.
    """

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in type(model).named_parameters(model, *args, **kwargs):
            distribution = distribution_of(param)
            if distribution is None or not distribution.absent:
                yield name, param

    def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for _, param in type(model).named_parameters(model, recurse=recurse))

    shown = {"named_parameters": named_parameters, "parameters": parameters}
    model.__dict__.update(shown)
    engine_of(model).also_remove([SimpleNamespace(remove=lambda: [model.__dict__.pop(name, None) for name in shown])])


# -- deepspeed.moe.utils -----------------------------------------------------------------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a MoE, and the number of experts of the first."""
    found = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter is an expert's (`param.allreduce = False`)."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Return groups for an optimizer: each without its experts' parameters, then groups of these, with "moe": True.

    max_group_size: no effect: shards are flat buffers. Raises ValueError if param_groups are no groups.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"param_groups: expected a dict, or a list or tuple of them, got {type(param_groups).__name__}")
    shared, divided = [], list[dict[str, Any]]()
    for group in [param_groups] if isinstance(param_groups, dict) else param_groups:
        params = list(group["params"])
        shared.append({**group, "params": [param for param in params if not is_moe_param(param)]})
        for name in dict.fromkeys(param.group_name for param in params if is_moe_param(param)):
            own = [param for param in params if is_moe_param(param) and param.group_name == name]
            divided.append({**group, "name": name, "moe": True, "params": own})
    return shared + divided
