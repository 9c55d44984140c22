"""What the programs share: tiny models of a fixed seed, batches, and whole weights told as one number a tensor."""

from collections.abc import Iterable

import deepspeed
import torch
from torch import Tensor, nn

STEPS, RESUMED_AT = 4, 2  # optimizer steps
WORDS, LENGTH = 37, 9
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # without biases: that of the keys has rounding errors for gradients, which Adam makes large
        self.attention = nn.MultiheadAttention(width, 1, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Odd sizes, a buffer, a frozen layer; tokens (batch, LENGTH) to a loss."""

    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("gain", torch.tensor([1.5]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens[:, :-1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy((self.head(x) * self.gain).flatten(0, 1), tokens[:, 1:].flatten())


def gpt2() -> nn.Module:
    """Two layers, embeddings tied, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **off)
    )


def llama() -> nn.Module:
    """Two layers, two heads of keys for four of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def tokens(count: int, seed: int = 1) -> Tensor:
    """(count, LENGTH): each word is often the successor of the one before, so there is something to learn."""
    draw = torch.Generator().manual_seed(seed)
    start, step = torch.randint(WORDS, (count, 1), generator=draw), torch.randint(1, 3, (count, LENGTH), generator=draw)
    return (start + step.cumsum(1)) % WORDS


def zero_section(stage: int, offload: str) -> dict:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return section if offload == "none" else {**section, "offload_optimizer": {"device": offload}}


def adamw(model: nn.Module, offload: str, lr: float) -> torch.optim.Optimizer:
    """What scripts give DeepSpeed: torch's, where states are offloaded DeepSpeed's own for the host."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    kind = torch.optim.AdamW if offload == "none" else DeepSpeedCPUAdam
    return kind([param for param in model.parameters() if param.requires_grad], lr=lr, weight_decay=0.1)


def directions(weights: Iterable[Tensor]) -> list[float]:
    """Each tensor's product with a fixed direction: any element that differs shows."""
    flat = [weight.detach().double().cpu().flatten() for weight in weights]
    return [torch.dot(weight, torch.cos(torch.arange(len(weight), dtype=torch.float64))).item() for weight in flat]


def whole_weights(model: nn.Module) -> list[float]:
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return directions(params)
