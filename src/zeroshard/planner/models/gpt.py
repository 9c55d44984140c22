"""A compact decoder-only GPT: the reference model of `zeroshard train`, the benchmarks and the tests.

With other options it is the architecture of the case studies (presets.py): biases, ALiBi, a normalised embedding; or a mixture of
experts (GShard, arXiv 2006.16668, section 2.2; no token is dropped, and there is no loss for balance).

It is an ordinary `nn.Module` without any code for sharding. Its `Block`s are in an `nn.ModuleList`, so that each becomes one
unit; embeddings, the last norm and the head form the root unit.

    tokens (batch, seq) -> embedding + position (+ n-grams) (-> norm) -> [Block] * layers -> norm -> head -> logits or loss

Words: *dim* is the width of the residual stream, *head_dim* = dim / heads, *seq* the tokens of one sequence.
*N-grams* are optional: tables with a vector for the 2, 3 and 4 tokens that end at a position, found by a hash. They
cost next to no arithmetic and teach a byte-level model short words at once: in 800 steps of 1,024 bytes of Python,
4 layers of dim 128 reach 2.06 bits per byte with tables of 4,096 rows, and 3.25 without.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...utils.grouped_mm import grouped_mm
from ..presets import GPTConfig

NGRAM_LENGTHS = (2, 3, 4)


def alibi_slopes(heads: int) -> list[float]:
    """Return each head's slope: the amount by which a key's score falls for each token between it and the query.

    For n heads, n a power of two: 2^(-8/n), its square, its cube, ... For other n: the slopes of the next lower power of
    two, then every other slope of the next higher one. ALiBi, arXiv 2108.12409, section 3 and its authors' code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


class Attention(nn.Module):
    """Causal multi-head attention with one fused projection to queries, keys and values.

    The rows of `qkv` (weight, bias) are three blocks (queries, keys, values), each head after head: (3, heads, head_dim).
    Tensor parallelism, which gives each rank some of the heads, takes rows out of each block and the same columns of `out`,
    and sets `heads` and `first_head`.
    """

    heads: int  # number of heads on this rank
    first_head: int  # index of the first of them among the model's heads, since ALiBi's slopes differ

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.first_head = config.heads, 0
        self.head_dim = config.dim // config.heads
        self.dropout = config.dropout
        # a list, not a buffer, so that a model built on the meta device has the values
        self.slopes = alibi_slopes(config.heads) if config.positions == "alibi" else None
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)  # weight (3 * dim, dim)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.qkv(x)
        batch, seq, _ = projected.shape
        heads = projected.view(batch, seq, 3, self.heads, self.head_dim)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, seq, head_dim)
        dropout = self.dropout if self.training else 0.0
        if self.slopes is None:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            slopes = torch.tensor(self.slopes[self.first_head : self.first_head + self.heads], device=q.device)
            places = torch.arange(seq, device=q.device)
            distance = places[:, None] - places  # (query, key)
            bias = -slopes[:, None, None] * distance
            # (1, heads, seq, seq): -slope x distance, and -inf for keys after the query
            bias = bias.masked_fill(distance < 0, -math.inf).to(q.dtype)[None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.dim
        self.up = nn.Linear(config.dim, hidden, bias=config.bias)
        self.out = nn.Linear(hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))  # (batch, seq, dim)


class Experts(nn.Module):
    """MLPs without biases, of which each token has some."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_experts, hidden = config.experts, config.mlp_ratio * config.dim
        self.up = nn.Parameter(torch.empty(config.experts, hidden, config.dim))
        self.out = nn.Parameter(torch.empty(config.experts, config.dim, hidden))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over k of weights * expert(x): (tokens, dim), for x (tokens, dim), index and weights (tokens, k)."""
        experts, order = index.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=x.device), right=True)
        hidden = grouped_mm(x[order // index.shape[-1]], self.up.transpose(-2, -1), ends)
        rows = grouped_mm(F.gelu(hidden, approximate="tanh"), self.out.transpose(-2, -1), ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return (rows[back].unflatten(0, index.shape) * weights.unsqueeze(-1)).sum(dim=-2)


class Mixture(nn.Module):
    """Experts, and the router that chooses some for each token: those of highest probability, with these as weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.chosen, self.router, self.experts = (
            config.experts_per_token,
            nn.Linear(config.dim, config.experts, bias=False),
            Experts(config),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).float().softmax(dim=-1).topk(self.chosen, dim=-1)
        return self.experts(tokens, index, (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)).view_as(x)


class Block(nn.Module):
    """One pre-norm transformer block: 12 dim^2 parameters at mlp_ratio 4, and two norms; with biases, 13 dim more in all."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.mlp = Mixture(config) if config.experts else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # (batch, seq, dim)


def ngram_hash(tokens: Tensor, length: int, rows: int) -> Tensor:
    """Return the table row, 0..rows-1, of the `length` tokens that end at each position: (batch, seq) int64, as `tokens`.

    The hash is a polynomial in the tokens, with zeros before the beginning, then mixed; n-grams may collide.
    """
    mixed = tokens
    for distance in range(1, length):
        earlier = F.pad(tokens[:, : max(0, tokens.shape[1] - distance)], (min(distance, tokens.shape[1]), 0))
        mixed = mixed * 1_000_003 + earlier + 1
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    return (mixed ^ (mixed >> 12)).remainder(rows)


class GPT(nn.Module):
    """Decoder-only language model. `model(tokens)` returns logits, `model(tokens, targets)` the mean loss in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position = nn.Embedding(config.seq_len, config.dim) if config.positions == "learned" else None
        self.ngrams = nn.ModuleList(nn.Embedding(config.ngram_rows, config.dim) for _ in NGRAM_LENGTHS if config.ngram_rows)
        self.embedding_norm = nn.LayerNorm(config.dim, bias=config.bias) if config.embedding_norm else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw Normal(0, init_std), as GPT-2 does; layers that write to the residual stream are scaled by 1 / sqrt(2 layers)."""
        std = self.config.init_std
        if isinstance(module, (Attention, MLP)):  # apply() visits children first, so this overrides theirs
            for name, weight in module.out.named_parameters():  # the weight, or those of its tiles (zs.tile)
                if not name.endswith("bias"):
                    nn.init.normal_(weight, std=std / math.sqrt(2 * self.config.layers))
        elif isinstance(module, Experts):
            nn.init.normal_(module.up, std=std)
            nn.init.normal_(module.out, std=std / math.sqrt(2 * self.config.layers))
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, position_ids: Tensor | None = None, sequences: Tensor | None = None
    ) -> Tensor:
        """Return logits (batch, seq, vocab) or, with `targets` (batch, seq), the mean cross entropy, computed in fp32.

        position_ids: where the tokens stand, (batch, seq); None: in order. sequences: whole sequences, (batch, tokens), of which
        `tokens` are those at position_ids (sequence parallelism); n-grams may begin before these.
        """
        seq = tokens.shape[1]
        if seq > self.config.seq_len:
            raise ValueError(f"tokens: expected at most seq_len={self.config.seq_len} per sequence, got {seq}")
        x = self.embedding(tokens)  # (batch, seq, dim)
        if self.position is not None:
            x = x + self.position(torch.arange(seq, device=tokens.device) if position_ids is None else position_ids)
        for length, table in zip(NGRAM_LENGTHS, self.ngrams, strict=False):  # no tables without ngram_rows
            rows = ngram_hash(tokens if sequences is None else sequences, length, self.config.ngram_rows)
            x = x + table(rows if position_ids is None else rows.gather(1, position_ids))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, seq, vocab)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,  # (batch, prompt)
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,  # on the CPU
    ) -> Tensor:  # (batch, prompt + count)
        """Append `count` sampled tokens to each prompt; temperature 0 takes the most likely one.

        Each token is one forward of the whole model, which at stage 3 is collective: every rank must call
        `generate` with as many steps, and with an equally seeded generator if all are to read the same text.
        """
        for _ in range(count):
            logits = self(tokens[:, -self.config.seq_len :])[:, -1].float().cpu()  # (batch, vocab)
            if top_k is not None:
                worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < worst, -math.inf)
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen.to(tokens.device)], dim=1)
        return tokens
