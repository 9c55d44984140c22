"""Tiny models of each family, and one training step of them on two tensor-parallel ranks against one process."""

import copy
import os
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.planner.models.gpt import GPT, GPTConfig

VOCAB, SEQ, BATCH = 48, 12, 3
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = dict(**SMALL, num_key_value_heads=2, max_position_embeddings=32)


def llama(**options) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**ROTARY, **options))


def mixtral(**options) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**ROTARY, num_local_experts=4, num_experts_per_tok=2, **options))


def qwen3(**options) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**ROTARY, head_dim=8, **options))


def gpt2(**options) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, **off, **options))


def bert(**options) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
    return BertForMaskedLM(BertConfig(**SMALL, **off, **options))


def t5(**options) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **options))


def gpt(**options) -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, seq_len=32, dim=32, heads=4, layers=2, **options))


_FAMILIES = {"llama", "mixtral", "qwen3", "gpt2", "bert", "t5", "gpt"}

# name -> what makes the model, options of apply: every family with and without sequence parallelism
CELLS: dict[str, tuple[Callable[..., nn.Module], dict, dict]] = {
    f"{build.__name__}{' sequence' * sequence}": (build, {}, {"sequence_parallel": sequence})
    for build in (llama, mixtral, qwen3, gpt2, bert, t5, gpt)
    for sequence in (False, True)
} | {
    "llama tied loss": (llama, {"tie_word_embeddings": True}, {"sequence_parallel": True, "loss_parallel": True}),
    "llama biases": (llama, {"attention_bias": True, "mlp_bias": True}, {"sequence_parallel": True}),
    "llama eager": (llama, {"attn_implementation": "eager"}, {}),
    "mixtral router": (mixtral, {"output_router_logits": True}, {}),
    "mixtral loss": (mixtral, {}, {"sequence_parallel": True, "loss_parallel": True}),
    "mixtral eager sequence": (mixtral, {"experts_implementation": "eager"}, {"sequence_parallel": True}),
    "gpt2 loss": (gpt2, {}, {"loss_parallel": True}),
    "gpt2 eager sequence loss": (gpt2, {"attn_implementation": "eager"}, {"sequence_parallel": True, "loss_parallel": True}),
    "bert loss": (bert, {}, {"loss_parallel": True}),
    "t5 untied gated": (t5, {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}, {"sequence_parallel": True}),
    "gpt tied loss": (gpt, {"tied": True, "ngram_rows": 16}, {"loss_parallel": True}),
    "gpt tied sequence loss": (gpt, {"tied": True}, {"sequence_parallel": True, "loss_parallel": True}),
    "gpt alibi biases": (gpt, {"positions": "alibi", "bias": True, "embedding_norm": True}, {"sequence_parallel": True}),
    "gpt whole vocabulary": (gpt, {"tied": True}, {"vocabulary": False}),
}
FEW = ("llama tied loss", "mixtral router", "t5 untied gated", "gpt tied sequence loss", "gpt alibi biases")
if os.environ.get("ZEROSHARD_SLOW") != "1":  # a sample of what goes beyond families
    CELLS = {name: cell for name, cell in CELLS.items() if name.removesuffix(" sequence") in _FAMILIES or name in FEW}


def loss_of(model: nn.Module) -> Tensor:
    """Of one fixed batch."""
    tokens = torch.randint(1, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(7))
    if isinstance(model, GPT):
        return model(tokens[:, :-1], tokens[:, 1:])  # 11 tokens: unequal shares of a stream that is cut
    mask = {} if model.config.model_type == "t5" else {"attention_mask": torch.ones_like(tokens).tril(SEQ - 2)}
    return model(input_ids=tokens, labels=tokens.roll(1, 0), **mask).loss


def outside(model: nn.Module) -> int:
    """How many parameters norms have that stand in no block."""
    return sum(
        1
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not any(part.isdigit() for part in name.split("."))
        for _ in module.parameters()
    )


def differences(cell: str, mesh) -> tuple[float, float, str]:
    """Of the loss and of the gradients, relative to the largest of each parameter; and where that is."""
    from contextlib import nullcontext

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from zeroshard.parallel.styles import styles_for
    from zeroshard.parallel.tensor_parallel import apply

    build, of_model, given = CELLS[cell]
    options = dict(given)
    torch.manual_seed(0)
    reference = build(**of_model)
    with torch.no_grad():
        for param in reference.parameters():  # norms and biases that start alike would hide mistakes
            param.add_(torch.randn_like(param) * 0.05)
    model = copy.deepcopy(reference)
    if mesh.get_local_rank():
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # all start from the first rank's values
    styles = styles_for(model, vocabulary=options.pop("vocabulary", True))
    assert apply(model, mesh, styles, **options) is model
    norms = [p for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()]
    cut = len(norms) - outside(model) if options.get("sequence_parallel") else 4 * (build is qwen3)
    assert sum(isinstance(p, DTensor) for p in norms) == cut
    with loss_parallel() if options.get("loss_parallel") else nullcontext():
        loss = loss_of(model)
        loss.backward()
    expected = loss_of(reference)
    expected.backward()
    found = loss.full_tensor() if isinstance(loss, DTensor) else loss
    worst, where = 0.0, ""
    wanted = dict(reference.named_parameters())
    assert wanted.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        error = float((grad - wanted[name].grad).abs().max() / max(1.0, float(wanted[name].grad.abs().max())))
        if isinstance(param, DTensor):
            assert torch.equal(param.full_tensor(), wanted[name]), name
        if not error <= worst:
            worst, where = error, name
    return abs(float(found.detach() - expected.detach())), worst, where


class Collectives(TorchDispatchMode):
    """Counts what is sent, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from torch.distributed.tensor import DTensor

        if DTensor in types:
            return NotImplemented  # what it does below, on plain tensors, comes here again
        kind = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and kind.split("_")[0] in ("all", "reduce", "broadcast"):
            self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def collectives(build: Callable[..., nn.Module], sequence_parallel: bool, mesh) -> tuple[dict, dict]:
    """Of a forward, and of a forward with backward."""
    from zeroshard.parallel.tensor_parallel import apply

    model = apply(build(), mesh, sequence_parallel=sequence_parallel)
    with Collectives() as seen:
        loss = loss_of(model)
        forward = dict(seen.counts)
        loss.backward()
    return forward, dict(seen.counts)


def on_rank(rank: int, world_size: int) -> dict[str, object]:
    """All cells; an error's text where one failed. Then how much two models send."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    outcomes: dict[str, object] = {}
    for cell in CELLS:
        try:
            outcomes[cell] = differences(cell, mesh["tp"])
        except Exception as error:  # of all cells, one report
            import traceback

            outcomes[cell] = "".join(traceback.format_exception(error))[-1800:]
    for build in (llama, gpt2, gpt):
        for sequence in (False, True):
            outcomes[f"sent by {build.__name__}{' sequence' * sequence}"] = collectives(build, sequence, mesh["tp"])
    dist.destroy_process_group()
    return outcomes
