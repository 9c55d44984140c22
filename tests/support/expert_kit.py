"""Small mixtures of experts: of Transformers, and layers of a user's own."""

import torch
from helpers import seeding
from torch import nn

import zeroshard as zs

TOKENS = 64
COMMON = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4},
    "DeepseekV3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 4, "layer_types": ["full_attention"] * 2},
}  # fmt: skip


def make(family, **options):
    import transformers

    with seeding(0):
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **options})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for param in model.parameters():  # routers that choose experts unevenly, biases that are not 0
                param.add_(torch.randn_like(param) * 0.1)
    return model


class Net(nn.Module):
    """One layer of experts of a user's own, chosen by the first element of a token. The loss is a mean over tokens."""

    def __init__(self, experts=8, listed=False):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.experts = zs.Experts(nn.Linear(4, 4) for _ in range(experts)) if listed else Own(experts)

    def forward(self, x, wanted):
        """x (T, 4), wanted (T, K): the experts."""
        return self.experts(self.mix(x), wanted, torch.full(wanted.shape, 0.5)).square().sum(dim=-1).mean()


class Own(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.num_experts, self.weight = experts, nn.Parameter(torch.randn(experts, 4, 4))

    def forward(self, x, wanted, shares):
        return (torch.einsum("th,tkhf->tkf", x, self.weight[wanted]).tanh() * shares.unsqueeze(-1)).sum(dim=1)


def net(experts=8, listed=False):
    with seeding(1):
        return Net(experts, listed)
