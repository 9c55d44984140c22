"""The models that users bring, small: graphs, images, diffusion, encoder-decoders, mixtures of experts, and LoRA on them.

`SUBJECTS[name]` is a `Subject`: how the model is built, the batch of (step, micro-batch, rank), its loss, and its weight
in the mean over the global batch where batches are ragged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from helpers import seeded
from torch import Tensor, nn

DIM = 6


# -- a graph network ----------------------------------------------------------------------------------------------


class MessagePassing(nn.Module):
    """Messages along edges, added up at their targets."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.update = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:  # (nodes, dim), (2, edges)
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1))  # (edges, dim)
        sums = torch.zeros_like(nodes).index_add(0, target, messages)
        return self.norm(nodes + self.update(torch.cat([nodes, sums], -1)))


class GraphNet(nn.Module):
    """`model(kinds, edges, targets)` is the mean over nodes of the squared error."""

    def __init__(self, dim: int = DIM, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, dim)
        self.layers = nn.ModuleList(MessagePassing(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1)

    def forward(self, kinds: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
        nodes = self.embedding(kinds)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return (self.head(nodes).squeeze(-1) - targets).square().mean()


def graph(draw: torch.Generator, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """From 2 nodes to 8, one graph in three without any edge."""
    count = 2 + (3 * rank + 2 * step + micro) % 7
    edges = 0 if (step + micro + rank) % 3 == 2 else 2 * count
    random = functools.partial(torch.randint, generator=draw)
    return random(5, (count,)), random(count, (2, edges)), torch.randn(count, generator=draw)


def nodes_of(batch: tuple) -> float:
    return float(len(batch[0]))


# -- a diffusion UNet ---------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(2, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """Down and up again, with skip connections. `model(x, t, noise)` is the loss of the predicted noise."""

    def __init__(self, channels: int = 4, time: int = 6) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        self.down = nn.ModuleList([ResidualBlock(channels, channels, time), ResidualBlock(channels, 2 * channels, time)])
        self.halve = nn.ModuleList([nn.Conv2d(channels, channels, 3, 2, 1), nn.Conv2d(2 * channels, 2 * channels, 3, 2, 1)])
        self.middle = ResidualBlock(2 * channels, 2 * channels, time)
        self.up = nn.ModuleList([ResidualBlock(4 * channels, channels, time), ResidualBlock(2 * channels, channels, time)])
        self.leave = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        angles = t[:, None] * torch.tensor([1.0, 0.1])
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        x, skips = self.enter(x), []
        for block, halve in zip(self.down, self.halve, strict=True):
            skips.append(block(x, time))
            x = halve(skips[-1])
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), skips.pop()], 1), time)
        return F.mse_loss(self.leave(x), noise)


def noisy_images(draw: torch.Generator, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    x, noise = torch.randn(2, 2, 1, 8, 8, generator=draw)
    return x, torch.randint(10, (2,), generator=draw), noise


# -- a vision transformer -----------------------------------------------------------------------------------------


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Class token and positions are parameters of the root. `model(images, labels)` is the loss."""

    def __init__(self, dim: int = DIM, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.ModuleList(EncoderBlock(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 4, dim)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


def labelled_images(draw: torch.Generator, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8, generator=draw), torch.randint(3, (2,), generator=draw)


# -- a mixture of experts -----------------------------------------------------------------------------------------


class SparseBlock(nn.Module):
    """Each token goes to the `top` best of the experts in a list; an expert without tokens is not called."""

    def __init__(self, dim: int, experts: int, top: int = 2) -> None:
        super().__init__()
        self.norm, self.router, self.top = nn.LayerNorm(dim), nn.Linear(dim, experts, bias=False), top
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 9), nn.SiLU(), nn.Linear(9, dim)) for _ in range(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (tokens, dim)
        h = self.norm(x)
        shares = self.router(h).softmax(-1)
        weights, chosen = shares.topk(self.top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        for number, expert in enumerate(self.experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                x = x.index_add(0, rows, expert(h[rows]) * weights[rows, places, None])
        return x, (shares.mean(0) * F.one_hot(chosen, len(self.experts)).sum(1).to(x.dtype).mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """Two sparse blocks between embedding and head. `model(tokens, targets)` is the loss with that of balance."""

    def __init__(self, dim: int = DIM, experts: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(SparseBlock(dim, experts) for _ in range(2))
        self.head = nn.Linear(dim, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, balance = self.embedding(tokens), 0.0
        for block in self.blocks:
            x, share = block(x)
            balance = balance + share
        return F.cross_entropy(self.head(x), targets) + 0.01 * balance


def few_tokens(draw: torch.Generator, step: int, micro: int, rank: int) -> tuple[Tensor, ...]:
    """Two tokens choose four of six experts at most: in each step a rank leaves some out, and others than its peers."""
    return tuple(torch.randint(11, (2, 2), generator=draw))


# -- models of Transformers ---------------------------------------------------------------------------------------

SMALL = {"vocab_size": 23, "attn_implementation": "eager", "pad_token_id": 0}


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=DIM, d_kv=3, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, **SMALL
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        d_model=DIM, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=8, scale_embedding=True, **SMALL,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=8, num_local_experts=5, num_experts_per_tok=2, output_router_logits=True, **SMALL,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def sequences(draw: torch.Generator, step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 23, (2, 2, 4), generator=draw)
    return ids[0], ids[1]


def language_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=ids, labels=labels).loss


def causal_loss(model: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


# -- all of them, and LoRA ----------------------------------------------------------------------------------------


def plain_loss(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch)


@dataclass(frozen=True)
class Subject:
    """A model, its data, and what PEFT adapts in it."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, int, int], tuple]
    loss: Callable[..., Tensor] = plain_loss
    weight: Callable[[tuple], float] | None = None
    adapted: str = ""  # LoRA on the modules whose names this matches
    adapted_parameters: tuple[str, ...] = ()  # and on these parameters

    @functools.cached_property
    def model(self) -> nn.Module:
        return seeded(self.build)

    @functools.cached_property
    def adapter(self) -> nn.Module:
        """The model with LoRA, whose B is not zero, or A would have no gradient."""

        def build() -> nn.Module:
            targets = {"target_parameters": list(self.adapted_parameters)} if self.adapted_parameters else {}
            config = peft.LoraConfig(r=2, target_modules=self.adapted, lora_dropout=0.0, **targets)
            model = peft.get_peft_model(self.build(), config)
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(param, std=0.2)
            return model

        return seeded(build)

    def batches(self, steps: int, micro: int, world_size: int) -> list:
        """batches[step][micro][rank]; a rank's do not depend on how many ranks there are."""

        def one(step: int, number: int, rank: int) -> tuple:
            seed = 1 + rank + 10 * number + 100 * step
            return self.draw(torch.Generator().manual_seed(seed), step, number, rank)

        return [[[one(s, m, r) for r in range(world_size)] for m in range(micro)] for s in range(steps)]


SUBJECTS = {
    "graph": Subject(GraphNet, graph, weight=nodes_of, adapted=r".*(message\.0|update|embedding)"),
    "unet": Subject(UNet, noisy_images, adapted=r".*(conv1|conv2|time\.0)"),
    "vit": Subject(VisionTransformer, labelled_images, adapted=r".*(qkv|patches)"),
    "experts": Subject(MixtureOfExperts, few_tokens, adapted=r".*(experts\.\d+\.(0|2)|router)"),
    "t5": Subject(t5, sequences, language_loss, adapted=r".*\.(q|v)|.*encoder\.embed_tokens"),
    "bart": Subject(bart, sequences, language_loss, adapted=r".*(q|v)_proj"),
    "mixtral": Subject(mixtral, sequences, causal_loss, adapted=r".*q_proj", adapted_parameters=("mlp.experts.gate_up_proj",)),
}
