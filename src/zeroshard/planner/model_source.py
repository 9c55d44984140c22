"""The MODEL of `zeroshard plan` and `zeroshard simulate`: a source of models that are built without memory and fed a batch.

    gpt-60b, llama-3-70b, bloom, quickstart     a preset: shapes.csv, planner/presets.py, the model of ./quickstart
    config.json, a folder with one              a Hugging Face configuration, built by Transformers
    meta-llama/Llama-3.1-8B                     a Hugging Face model id, whose config.json lies in the local cache
    package.module:function                     the user's own: a function without arguments that returns a module

A model that does not read tokens is fed by an *example*: a function that makes the arguments of a forward pass (`example_of`).
A plan has no data that says which tokens go to which expert, so a mixture's experts compute as `grouped_experts`:

    tokens (n, dim) -> sort by expert (n * top_k, dim) -> products, gate, product -> back in order, weighted sum (n, dim)

This is how Transformers' "grouped_mm", its default in training, computes; its shapes and flops do not depend on the routing. But
on tensors without data its kernel accepts bf16 only, and the other implementations read the routing, or copy an expert for
each token. `grouped_experts` has the shapes and flops of "grouped_mm" in any dtype.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, did_you_mean
from ..utils import transformers_compat
from .faults import first_line, where
from .models import CASE_STUDIES, GPT, GPTConfig

SHAPES = Path(__file__).with_name("shapes.csv")
# the model of `zeroshard train` without options
QUICKSTART = GPTConfig(vocab_size=256, seq_len=256, dim=128, layers=3, heads=4, ngram_rows=8192)
EXPERTS = "zeroshard_planner"  # by which Transformers knows `grouped_experts`
ROUTING = "experts: Transformers' grouped products (grouped_mm), whose memory and flops are the same however tokens are routed"


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built. default_seq: tokens of a sequence; max_seq: the most that its table of positions has; context: those
    that it was published for, where positions are computed and a sequence may be longer; vocab: size of the vocabulary. layers, hidden, heads:
    of a decoder, where they are known. experts: of a block, 0: none. notes: assumptions of its plans. source: where its sizes are published. config: of a GPT of
    planner/models/gpt.py, else None."""

    name: str
    make: Callable[[], nn.Module]
    default_seq: int
    vocab: int
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    max_seq: int | None = None
    context: int | None = None
    experts: int = 0
    notes: tuple[str, ...] = ()
    source: str = ""
    config: GPTConfig | None = None
    example: Callable[[int], object] | None = None  # rows -> what a micro-batch reads, where that is not tokens

    def build(self) -> nn.Module:
        """Build the model, tokens (rows, seq) -> logits, or an output that has them; call this under `torch.device("meta")`.

        Raises ConfigError, which names the module that cannot be built so.
        """
        try:
            model = self.make()
        except ConfigError:
            raise
        except Exception as error:
            place = where(error) and f"{where(error)}: "  # "" if only torch and this library were at work
            raise ConfigError(
                f"{self.name}: cannot be built on the meta device: {place}{type(error).__name__}: {first_line(error)}. A constructor "
                "must not read values of tensors, or move them: compute from numbers there, and load weights afterwards."
            ) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{self.name}: expected a function that returns a torch.nn.Module, got {type(model).__name__}.")
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                raise ConfigError(
                    f"{self.name}: cannot be built on the meta device: {name} is on {parameter.device}. Leave out device= where it is "
                    "made: torch.device as a context says where tensors come to be."
                )
        return model


def source_of(text: str) -> ModelSource:
    """Return the model that `text` names: a preset, a Hugging Face configuration, or `module:function`. Raises ConfigError."""
    path, name = Path(text), text.lower()
    if name in names():
        return _preset(name)
    if path.is_dir() or path.is_file():
        return _configuration(path)
    if path.suffix == ".json" or text.startswith((".", "/", "~")):
        raise ConfigError(
            f"model: expected a Hugging Face configuration, {text!r} is no file. Give config.json or the folder around it."
        )
    if ":" in text:
        return _function(text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):  # a Hugging Face id: its configuration in the local cache; nothing is downloaded
        _transformers(text)
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(text, "config.json")
        if not isinstance(file, str):
            raise ConfigError(
                f"model: the configuration of {text!r} is not in the local cache of Hugging Face: download it with "
                f"`hf download {text} config.json`, or give a config.json."
            )
        return replace(_configuration(Path(file)), name=text)
    raise ConfigError(
        f"model: expected a preset, a Hugging Face config.json or model id, or module:function, got {text!r}.{did_you_mean(name, names())} "
        f"Presets: {', '.join(names())}."
    )


@cache
def names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return ("quickstart", *_shapes(), *CASE_STUDIES)


@cache
def _shapes() -> dict[str, dict[str, Any]]:
    """Return the rows of shapes.csv by name, with digits as int."""
    with SHAPES.open(newline="", encoding="utf-8") as file:
        rows = [{key: int(text) if text.isdigit() else text for key, text in row.items()} for row in csv.DictReader(file)]
    return {str(row["name"]): row for row in rows}


def _preset(name: str) -> ModelSource:
    row = _shapes().get(name)
    if row is not None and row["family"] != "gpt":
        return ModelSource(
            name, partial(_of_shape, row), row["seq"], row["vocab"], row["layers"], row["hidden"], row["heads"], context=row["context"],
            experts=row["experts"], notes=(ROUTING,) if row["experts"] else (), source=row["source"],
        )  # fmt: skip
    if row is not None:
        config = GPTConfig(row["vocab"], row["seq"], row["hidden"], row["layers"], row["heads"], bias=True, tied=True)
        source = row["source"]
    elif (study := CASE_STUDIES.get(name)) is not None:
        config, source = study.full, "; ".join(f"{what}: {where}" for what, where in study.sources.items())
    else:
        config, source = QUICKSTART, ""
    return ModelSource(
        name, partial(GPT, config), config.seq_len, config.vocab_size, config.layers, config.dim, config.heads,
        max_seq=config.seq_len if config.positions == "learned" else None, source=source, config=config,
    )  # fmt: skip


def _of_shape(row: dict[str, Any]) -> nn.Module:
    """Build a Llama, a Mixtral or a DeepSeek-V3 by Transformers' own classes, with their defaults for what the row does not tell."""
    transformers = _transformers(row["name"])
    sizes = {
        "num_hidden_layers": row["layers"], "hidden_size": row["hidden"], "num_attention_heads": row["heads"],
        "num_key_value_heads": row["kv_heads"], "intermediate_size": row["ffn"], "vocab_size": row["vocab"],
        "max_position_embeddings": row["context"],
    }  # fmt: skip
    if row["family"] == "deepseek":
        return _of_config(transformers.DeepseekV3Config(**sizes, n_routed_experts=row["experts"]))
    if row["experts"]:
        return _of_config(transformers.MixtralConfig(**sizes, num_local_experts=row["experts"]))
    return _of_config(transformers.LlamaConfig(**sizes))


def _configuration(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model: expected a Hugging Face configuration, there is no config.json in {path}.")
    transformers = _transformers(str(path))
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # its validators raise errors of their own
        raise ConfigError(f"model: expected a Hugging Face configuration in {file}: {first_line(error)}.") from error
    text = config.get_text_config()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or not getattr(text, "vocab_size", None):
        raise ConfigError(
            f"model: {file} is of {config.model_type!r}, which is no causal language model: give a function that makes the model, "
            "module:function, or zs.plan(model_fn, batch=make_batch, loss=...)."
        )
    longest, computed = getattr(text, "max_position_embeddings", None), _computes_positions(text)
    name = f"{config.model_type} of {path}"
    experts = _experts(text)
    notes = (ROUTING,) if experts else ()
    return ModelSource(
        name, partial(_of_config, config), min(longest or 1024, 4096), text.vocab_size, getattr(text, "num_hidden_layers", None),
        getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None), max_seq=None if computed else longest,
        context=longest if computed else None, experts=experts, notes=notes,
    )  # fmt: skip


def example_of(source: ModelSource, text: str) -> ModelSource:
    """Return the same model, fed by `module:function`, which makes a tensor, or a tuple or dictionary of a forward's arguments.

    The function is called with the rows of a micro-batch if it takes an argument. The loss is the model's output if that is one
    number, or the output's `loss`; else the mean of its first tensor of floats stands in for one.
    """
    function = _imported("--example", text)
    takes_rows = bool(inspect.signature(function).parameters)
    note = f"batches are those of {text}" + ("" if takes_rows else ", which takes no number of rows: --micro-batch is not used")
    example = function if takes_rows else lambda rows: function()
    return replace(source, example=example, default_seq=1, max_seq=None, notes=(*source.notes, note))


def example_loss(model: nn.Module, batch: object) -> Tensor:
    """Return the loss of a model that is fed by an example; see `example_of`."""
    output = model(**batch) if isinstance(batch, dict) else model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else (output,)
    found = next((each for each in values if isinstance(each, Tensor) and each.is_floating_point()), None)
    if found is None:
        raise ConfigError(f"model: expected a tensor of floating point numbers from the example, got {type(output).__name__}.")
    return found if found.ndim == 0 else found.float().mean()


def _of_config(config: Any) -> nn.Module:
    """Build the causal language model of a Hugging Face configuration: attention by torch's own kernels, parameters in fp32."""
    transformers = _transformers(config.model_type)
    config.use_cache = False
    # None: sdpa where a model has it, not what the configuration names, which may need a GPU
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=None, dtype=torch.float32)
    if _experts(config.get_text_config()):
        group_experts(model)
    return model


def _experts(config: object) -> int:
    """Return the experts of a block by a configuration of Transformers; 0: none."""
    found = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    return next((each for each in found if isinstance(each, int) and each), 0)


def _computes_positions(config: object) -> bool:
    """Return whether a model's configuration has rotary positions, which are computed: there is no table that ends."""
    return any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta"))


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} is built by the library transformers, which is not installed; in a clone of zeroshard: pip install -e '.[cli]'"
        ) from error


def _imported(what: str, text: str) -> Callable:
    """Import `module:function`, looking in the working directory first. what: the argument that names it, for error messages."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{what}: expected module:function, got {text!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script may end itself
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        place = where(error) and f"{where(error)}: "
        why = "there is no such module" if missing else first_line(error)
        raise ConfigError(
            f"{what}: cannot import {module_name!r} of {text!r}: {place}{why}. It is looked for in {here} and in the environment."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        callables = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise ConfigError(f"{what}: {module_name} has no function {name!r}.{did_you_mean(name, callables)}")
    return function


def _function(text: str) -> ModelSource:
    """Return the user's own model, with the sizes that its `config` or its embeddings tell."""
    function = _imported("model", text)
    with torch.device("meta"):
        model = ModelSource(text, function, 1024, 2).build()
    config = getattr(model, "config", None)

    def size(*known: str) -> int | None:  # of the first of these fields that holds a number
        values = [getattr(config, name, None) for name in known]
        return next((value for value in values if isinstance(value, int)), None)

    longest = size("max_position_embeddings", "n_positions", "seq_len")
    embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    vocab = size("vocab_size") or max(embeddings, default=2)
    return ModelSource(
        text, function, min(longest or 1024, 4096), vocab, size("num_hidden_layers", "n_layer", "layers"),
        size("hidden_size", "n_embd", "dim"), size("num_attention_heads", "n_head", "heads"),
        max_seq=None if _computes_positions(config) else longest, context=longest if _computes_positions(config) else None,
    )  # fmt: skip


def group_experts(model: Any) -> None:
    """Make a model of Transformers compute its experts by `grouped_experts`."""
    if not any(map(transformers_compat.are_experts, model.modules())) and not transformers_compat.can_have_experts(model):
        raise ConfigError(f"{type(model).__name__}: its experts read the routing of tokens, which a plan does not have.")
    transformers_compat.compute_experts_by(model, EXPERTS, grouped_experts)


class _GroupedProduct(torch.autograd.Function):
    """A product of rows (S, in) and each one's expert of weights (experts, in, out): (S, out). Its shapes, bytes and flops are
    right, its values are not: all rows go to the first expert, since the routing changes only values."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        of_weights = torch.zeros_like(weights)
        torch.mm(rows.T, gradient, out=of_weights[0])
        return gradient @ weights[0].T, of_weights


def grouped_experts(experts: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Return the output (tokens, dim) for hidden (tokens, dim), chosen and scores (tokens, top_k). Its values mean nothing."""
    tokens, top_k = chosen.shape
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    rows = hidden[order // top_k]  # (tokens * top_k, dim)
    gated, biased, transposed = transformers_compat.form_of(experts)

    def linear(rows: Tensor, name: str) -> Tensor:
        weights = getattr(experts, name)
        rows = _GroupedProduct.apply(rows, weights if transposed else weights.transpose(-2, -1))
        return rows + getattr(experts, f"{name}_bias")[sorted_experts] if biased else rows

    rows = linear(rows, "gate_up_proj" if gated else "up_proj")
    rows = linear(transformers_compat.apply_gate(experts, rows) if gated else experts.act_fn(rows), "down_proj")
    rows = rows * scores.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(tokens, top_k, -1).sum(1).to(hidden.dtype)
