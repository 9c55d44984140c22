"""Styles of tensor parallelism: how each module of a model is sharded, and which numbers of ranks divide it.

Styles are data: full names of modules (and of parameters that no linear map holds, such as those of experts) -> style. They
come from the model itself, or one inside of it, if Transformers has some (`config.base_model_tp_plan`), else from FAMILIES.
`tensor_parallel.apply` shards the modules by them, with torch.distributed.tensor.parallel.

    one MLP, 2 ranks    x (replicated) -> up: rows 0..n/2 | n/2..n -> gelu -> down: columns 0..n/2 | n/2..n -> sum over ranks
                                          colwise                            rowwise          one all-reduce, none between

Words: *features* are the outputs of a linear map; *packed*: one weight holds several maps, one after the other (queries,
keys, values), each of which is sharded. Style names and meanings are those of Transformers.
Source: Megatron-LM, arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import Tensor, nn

from ..errors import ConfigError, did_you_mean
from ..utils import torch_compat
from ..utils.transformers_compat import tensor_parallel_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Style: TypeAlias = "str | ParallelStyle | None"  # one of STYLES, torch's own, or None: whole
V = TypeVar("V")
PACKED = {"packed_colwise": 2, "packed_qkv": 3, "packed_kv": 2}  # style -> how many maps one weight holds
COLWISE = ("colwise", "local_colwise", *PACKED)
GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")  # sharded by features, with gathered outputs
ROWWISE = ("rowwise", "local_rowwise", "rowwise_split_input", "rowwise_rep")
EXPERTS = "moe_tp_experts"  # a module whose own parameters are those of all experts; each expert is sharded
LOCAL_NORM = "replicated_with_grad_allreduce"  # whole parameters, applied to this rank's heads
VOCABULARY = "embedding_rowwise"
STYLES = (*COLWISE, *GATHERED, *ROWWISE, EXPERTS, LOCAL_NORM, VOCABULARY, "sequence_parallel", "replicate", "replicated")
HEADS = ("num_attention_heads", "n_head", "num_heads", "heads")  # names in configurations for the number of heads
MOST_RANKS = 64  # largest number of ranks to suggest


@dataclass(frozen=True)
class Family:
    """Styles of one architecture. Names are ends of full names: "attn.c_proj" is each module whose name ends with it."""

    styles: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # attributes that count heads or features
    embedding: str = ""  # full names, for models without get_input_embeddings and get_output_embeddings
    head: str = ""


FAMILIES = {
    "gpt2": Family(
        {
            "attn.c_attn": "packed_qkv",
            "crossattention.c_attn": "packed_kv",
            "crossattention.q_attn": "colwise",
            "attn.c_proj": "rowwise",
            "crossattention.c_proj": "rowwise",
            "mlp.c_fc": "colwise",
            "mlp.c_proj": "rowwise",
        },
        {"attn": ("num_heads", "split_size"), "crossattention": ("num_heads", "split_size")},
    ),
    "bert": Family(
        {
            **{f"*attention.self.{name}": "colwise" for name in ("query", "key", "value")},
            "intermediate.dense": "colwise",
            "output.dense": "rowwise",  # in attention and in the MLP
        },
        {"*attention.self": ("num_attention_heads", "all_head_size")},
    ),
    "t5": Family(
        {
            **{f"{kind}.{name}": "colwise" for kind in ("SelfAttention", "EncDecAttention") for name in "qkv"},
            "SelfAttention.o": "rowwise",
            "EncDecAttention.o": "rowwise",
            "SelfAttention.relative_attention_bias": "colwise",  # an embedding: a column for each head
            **{f"DenseReluDense.{name}": "colwise" for name in ("wi", "wi_0", "wi_1")},
            "DenseReluDense.wo": "rowwise",
        },
        dict.fromkeys(("SelfAttention", "EncDecAttention"), ("n_heads", "inner_dim")),
    ),
    "zeroshard.GPT": Family(
        {"attention.qkv": "packed_qkv", "attention.out": "rowwise", "mlp.up": "colwise", "mlp.out": "rowwise"},
        {"attention": ("heads",)},
        embedding="embedding",
        head="head",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ParallelStyles:
    """Styles of a model's modules, by full name; a module without a style is whole on every rank.

    by_name: name of a module or parameter -> one of STYLES, or a ParallelStyle of torch for a module.
    divided: name of a module -> its attributes that count heads or features, which `apply` divides by the number of ranks.
    head: name of the module that computes logits, if it is sharded; with loss_parallel the logits stay sharded.
    """

    by_name: Mapping[str, str | ParallelStyle]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head: str | None = None


def styles_for(model: nn.Module, styles: Mapping[str, Style] | None = None, *, vocabulary: bool = True) -> ParallelStyles:
    """Return the tensor-parallel styles of a model: its own, or those of its family, overridden by `styles`.

    Args:
        styles: pattern -> style (one of STYLES, a ParallelStyle of torch, or None: whole). A pattern is a full name whose parts
            between dots may hold `*`: "model.layers.*.mlp.up_proj".
        vocabulary: False leaves embedding and head whole.

    Raises:
        ConfigError: a pattern matches nothing, a style is not known, or neither the model nor its family has styles.
    """
    # modules without parameters have no styles: they may be a pipeline's stand-ins
    names = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    names += [name for name, _ in model.named_parameters()]
    ours = any(f"{cls.__module__}.{cls.__qualname__}" == "zeroshard.planner.models.gpt.GPT" for cls in type(model).__mro__)
    kind = "zeroshard.GPT" if ours else getattr(getattr(model, "config", None), "model_type", "")
    family = FAMILIES.get(kind, Family({}))
    given: dict[str, Style] = {**(_own_plan(model, names) or _inner_plan(model, names) or _by_tail(family.styles, names))}
    if not given and not styles:
        raise ConfigError(
            f"there are no tensor-parallel styles for {type(model).__name__}: give some, {{name: style}} with the styles colwise and "
            f"rowwise. Known are models that bring some (Transformers' base_model_tp_plan) and {', '.join(FAMILIES)}."
        )
    embedding, head = _ends(model, family)
    for name in (embedding, head):  # `vocabulary` decides about these two, not the model's own plan
        given.pop(name, None)
    if vocabulary and embedding:
        weight = model.get_submodule(embedding).weight
        tied = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and module.weight is weight]
        given |= dict.fromkeys((embedding, *tied), VOCABULARY)
    if vocabulary and head:
        given[head] = "colwise_gather_output"
    for pattern, style in (styles or {}).items():
        matched = [name for name in names if _matches(pattern, name)]
        if not matched:
            raise absent(model, pattern, names)
        if isinstance(style, str) and style not in STYLES:
            near = did_you_mean(style, STYLES)
            raise ConfigError(f"styles: {pattern!r}: there is no style {style!r}.{near} Known: {', '.join(STYLES)}.")
        given.update(dict.fromkeys(matched, style))
    kept = {name: style for name, style in given.items() if style is not None}
    unknown = {name: style for name, style in kept.items() if isinstance(style, str) and style not in STYLES}
    for name, style in unknown.items():
        raise ConfigError(
            f"the plan that {type(model).__name__} brings has the style {style!r} for {name}, which is not served: give that "
            f"module another, {{{name!r}: ...}}, one of {', '.join(STYLES)}, a ParallelStyle of torch, or None."
        )
    return ParallelStyles(kept, _by_tail(family.divided, names), head if head in kept else None)


def divides(model: nn.Module, tp: int, styles: ParallelStyles | None = None) -> list[str]:
    """Return a sentence for each size of a model that `tp` does not divide, with the nearest `tp` that divides all."""
    given = _sizes(model, styles or styles_for(model))
    fit = [ranks for ranks in range(1, MOST_RANKS + 1) if not any(size % ranks for size in given.values())]
    near = [max((n for n in fit if n < tp), default=None), min((n for n in fit if n > tp), default=None)]
    nearest = " and ".join(f"tp={ranks}" for ranks in near if ranks) + (" do" if all(near) else " does")
    sentences = []
    for what, size in given.items():
        if size % tp:
            sentence = f"tp={tp} does not divide the {size:,} {what} of {type(model).__name__}: {nearest}."
            if what == "tokens":
                sentence += f" Or leave them whole: styles_for(model, vocabulary=False), or pad them to {-(-size // tp) * tp}."
            sentences.append(sentence)
    return sentences


def most_ranks(model: nn.Module) -> int:
    """Return the largest number of tensor-parallel ranks that divides a model (its divisors do, too); 1 without styles."""
    try:
        return math.gcd(*_sizes(model, styles_for(model)).values()) or 1
    except ConfigError:
        return 1


def features(model: nn.Module, name: str, style: str) -> int:
    """Return the size that a style shards: features of a module or parameter (per packed map), or rows of an embedding."""
    owner, attribute = resolve(model, name)
    weight: Tensor = getattr(owner, attribute or "weight")
    if attribute is not None:  # (..., out, in), as experts have
        return weight.shape[-1] if style in ROWWISE else weight.shape[-2] // PACKED.get(style, 1)
    if isinstance(owner, nn.Embedding):
        return weight.shape[0 if style == VOCABULARY else 1]
    outward = 1 if is_conv1d(owner) else 0
    return weight.shape[1 - outward if style in ROWWISE else outward] // PACKED.get(style, 1)


def absent(model: nn.Module, name: str, names: list[str]) -> ConfigError:
    """Return the error for a name or pattern that the model does not have."""
    near = did_you_mean(name, names)
    return ConfigError(f"styles: {name!r} is no module or parameter of {type(model).__name__}.{near}")


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's Conv1D, a linear map whose weight is (in, out)."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def _sizes(model: nn.Module, styles: ParallelStyles) -> dict[str, int]:
    """Return the sizes that the number of ranks has to divide: description -> size."""
    config = _configuration(model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes: dict[str, int] = {}
    attention = [name for name in styles.by_name if "att" in name.lower()]
    if attention and config is not None:
        heads = next((getattr(config, word) for word in HEADS if isinstance(getattr(config, word, None), int)), None)
        groups = getattr(config, "num_key_value_heads", None)
        sizes |= {"attention heads": heads} if heads else {}
        sizes |= {"key-value heads": groups} if isinstance(groups, int) and groups != heads else {}
    for name, style in styles.by_name.items():
        if not isinstance(style, str) or style in ("sequence_parallel", "replicate", "replicated", EXPERTS, LOCAL_NORM):
            continue
        if style == VOCABULARY or name == styles.head:
            sizes["tokens"] = features(model, name, style)
        elif not (sizes.get("attention heads") and name in attention):
            word = "features between the linear maps (intermediate size)"
            number = features(model, name, style)
            if word in sizes and sizes[word] != number:
                word = f"features of {name}"
            sizes[word] = number
    return sizes


# ------------------------------------------------------------------------------------------------------ names


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern, part by part: `*` matches one part, or a piece of it, and never a dot."""
    parts, given = name.split("."), pattern.split(".")
    return len(parts) == len(given) and all(map(fnmatchcase, parts, given))


def _by_tail(table: Mapping[str, V], names: list[str]) -> dict[str, V]:
    found = {}
    for name in names:
        for tail, value in table.items():
            if _matches(tail, ".".join(name.split(".")[-tail.count(".") - 1 :])):
                found[name] = value
    return found


def _own_plan(model: nn.Module, names: list[str]) -> dict[str, str]:
    """Return the styles that a Transformers model brings; its base model's patterns are relative to the base model."""
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    rules = {prefix + pattern: style for pattern, style in (getattr(config, "base_model_tp_plan", None) or {}).items()}
    rules |= tensor_parallel_plan(model)
    return {name: style for pattern, style in rules.items() for name in names if _matches(pattern, name)}


def _inner_plan(model: nn.Module, names: list[str]) -> dict[str, str]:
    """Return the styles of layers that a Transformers model inside of a model brings; embedding and head are not among them."""
    config = _configuration(model)
    plan = {pattern: style for pattern, style in (getattr(config, "base_model_tp_plan", None) or {}).items() if "*" in pattern}
    held = [name for name, module in model.named_modules() if plan and config == getattr(module, "config", None)]
    return _by_tail(plan, [each for each in names if each.startswith(tuple(f"{name}." if name else "" for name in held))])


def _configuration(model: nn.Module) -> Any:
    """Return the configuration of the first module, outermost first, that brings a plan; else that of the model itself, or None."""
    found = (getattr(module, "config", None) for module in model.modules())
    return next((each for each in found if getattr(each, "base_model_tp_plan", None)), getattr(model, "config", None))


def _ends(model: nn.Module, family: Family) -> tuple[str, str]:
    """Return the names of the token embedding and of the head, '' for one that is missing."""
    names = {id(module): name for name, module in model.named_modules()}
    maps = {name for name, module in model.named_modules() if isinstance(module, (nn.Embedding, nn.Linear))}
    ends = [name if name in maps else "" for name in (family.embedding, family.head)]  # "" if a pipeline stage lacks one
    for number, ask in enumerate(("get_input_embeddings", "get_output_embeddings")):
        try:
            found = getattr(model, ask)() if hasattr(model, ask) else None
        except NotImplementedError:
            found = None
        if isinstance(found, (nn.Embedding, nn.Linear)):
            ends[number] = names.get(id(found), "")
    return ends[0], ends[1]


def resolve(model: nn.Module, name: str) -> tuple[nn.Module, str | None]:
    """Return (module, None) for a module's name, or (owner, attribute) for a parameter's."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    if last in torch_compat.own_parameters(owner):
        return owner, last
    return getattr(owner, last), None
