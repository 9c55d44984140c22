"""PipelineModule: a model as a list of layers, cut into two stages (STAGES: another number); the cell names at its end what is unusual.

pipeline_of_four has four ranks. Each micro-batch is read by the ranks of the first and the last stage.
"""

import itertools
from collections.abc import Iterator

import deepspeed
import torch
from common import ADAMW, RESUMED_AT, STEPS, WORDS, Block, tokens, whole_weights
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, ROWS, EVALUATED = 9, 3, 4
STAGES = {"one_stage": 1, "four_stages": 4, "four_uniform": 4, "four_tied": 4}


class Masked(nn.Module):
    """Takes and returns tuples: hidden states, and a mask that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = state
        return x + torch.tanh(self.map(x)) * mask.unsqueeze(-1), mask


class Noisy(nn.Module):
    """Dropout: what it drops depends on the seed that its layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.map(x), 0.3, self.training)


def masked(embed: nn.Module, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return embed(state[0]), state[1]


def unmasked(state: tuple[Tensor, Tensor]) -> Tensor:
    return state[0]


def head(embed: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embed.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def scaled(x: Tensor) -> Tensor:
    return x * 1.5


def layers(name: str) -> list:
    blocks = [LayerSpec(Block, WIDTH) for _ in range(4)]
    first, last = LayerSpec(nn.Embedding, WORDS, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS)
    if name in ("tied", "four_tied", "tied_frozen"):
        first, last = (TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=fn) for fn in (None, head))
    if name == "tuples":
        blocks = [*(LayerSpec(Masked) for _ in range(4)), unmasked]
        first = TiedLayerSpec("embed", nn.Embedding, WORDS, WIDTH, forward_fn=masked)
    if name == "functions":
        blocks = [LayerSpec(Block, WIDTH), scaled, Block(WIDTH), scaled]
    if name == "seeded":
        blocks = [LayerSpec(Noisy) for _ in range(4)]
    return [first, *blocks, last]


class Samples(Dataset):
    """(inputs, labels) of STEPS + 1 steps of two micro-batches and two data-parallel ranks."""

    def __init__(self) -> None:
        self.tokens = tokens(4 * ROWS * 2 * (STEPS + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return self.tokens[at, :-1], self.tokens[at, 1:]


def make(stage: int, accumulation: int, name: str, stages: int | None = None):
    method = {"uniform": "uniform", "four_uniform": "uniform", "types": "type:block|linear"}.get(name, "parameters")
    torch.manual_seed(1)
    options = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]} if "recomputed" in name else {}
    net = PipelineModule(
        layers(name), num_stages=stages or STAGES.get(name, 2), loss_fn=loss_of, partition_method=method,
        seed_layers=name == "seeded", seed_fn=torch.manual_seed, **options,
    )  # fmt: skip
    frozen = {"frozen": itertools.islice(net.parameters(), 2), "tied_frozen": net.tied_modules.parameters()}
    for param in frozen.get(name, ()):
        param.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": accumulation, "optimizer": ADAMW, "steps_per_print": 1000,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": 0.02}},
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.7 if stage else 0.0,
    }  # fmt: skip
    if name == "sgd":
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        config["zero_allow_untested_optimizer"] = True
    if name == "interval_key":
        config["pipeline"] = {"activation_checkpoint_interval": 2, "use_reentrant": False}
    trained = [param for param in net.parameters() if param.requires_grad]
    data = {"training_data": Samples()} if name == "loader" else {}
    return deepspeed.initialize(model=net, model_parameters=trained, config=config, **data)[0]


def batches(engine, step: int, count: int, name: str) -> Iterator[tuple]:
    """`count` micro-batches of a data-parallel rank."""
    for micro in range(count):
        words = tokens(ROWS, seed=1000 * step + 10 * micro + engine.grid.get_data_parallel_rank())
        yield (words[:, :-1], (words[:, 1:] % 3 > 0).long()) if name == "tuples" else words[:, :-1], words[:, 1:]


def train(engine, first: int, last: int, name: str) -> dict:
    told = {"losses": [], "rates": []}
    for step in range(first, last):
        own = batches(engine, step, engine.gradient_accumulation_steps(), name)
        loss = engine.train_batch(None if name == "loader" else own)
        told["losses"].append(float(loss))
        if engine.gradient_clipping():  # DeepSpeed has no norm otherwise at stage 0
            told.setdefault("norms", []).append(float(engine.get_global_grad_norm()))
        told["rates"].append(engine.get_lr()[0])
    told["evaluations"] = [float(engine.eval_batch(batches(engine, 50, EVALUATED, name), num_micro_batches=EVALUATED))]
    return told


def run(stage: int, accumulation: int, name: str, folder: str) -> dict:
    deepspeed.init_distributed("gloo")
    engine = make(stage, accumulation, name)
    whole = train(engine, 0, RESUMED_AT, name)
    forwards = engine.module.micro_offset  # from which the seeds of layers are made; no checkpoint has it
    engine.save_checkpoint(folder, client_state={"epoch": 5})
    rest = train(engine, RESUMED_AT, STEPS, name)
    whole = {key: [*values, *rest[key]] for key, values in whole.items()}
    whole["weights"] = whole_weights(engine.module)  # of the first stage
    whole["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    engine = make(stage, accumulation, name)
    _, state = engine.load_checkpoint(folder)
    assert state["epoch"] == 5
    engine.module.micro_offset = forwards
    for _ in range(RESUMED_AT * accumulation if name == "loader" else 0):
        next(engine.data_iterator)
    return {"whole": whole, "resumed": train(engine, RESUMED_AT, STEPS, name)}
