"""The attention and the masks of Transformers' models over an axis sp, by its registries of attention and mask functions.

    forward of a model        its positions and padding mask are exchanged, so that each rank knows those of whole sequences
    a mask function           makes the mask of whole sequences: causal, padding, packed sequences, sliding windows
    an attention function     tokens are exchanged for heads, the configured function runs, heads are exchanged for tokens

The functions of each name ("sdpa", "flash_attention_2", ...) are wrapped once for the process. For modules of models without an
axis sp the wrapper calls the function itself. "eager" is no entry of the registry; a model configured so gets a name of ours.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..utils.autograd import Running
from ..utils.axes import SP
from .ulysses import SequenceParallel, active_in

_EAGER = "zeroshard_eager"
_MIXED_INPUTS = ("trigram_input", "keep_window_size")  # options of models whose tokens meet outside of the registry's attention
_POOLED = (
    "ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction", "BertForPreTraining",
    "DoubleHeadsModel",
)  # fmt: skip
_LAYERS = ("full_attention", "sliding_attention", "dense", "sparse", "moe")  # whose tokens meet in attention only
_LOCK = threading.Lock()  # of the registries, since ranks may be threads
_running = Running()  # the forwards of models, each with the _Forward by which masks are made; None: torch's own


@dataclass(frozen=True)
class _Forward:
    """The inputs of a model's forward, of whole sequences. padding: (B, S), True for tokens; positions: (B, S), without padding."""

    sequence: SequenceParallel
    padding: Tensor | None
    positions: Tensor | None


def check(name: str, model: Any, size: int) -> None:
    """Raise ConfigError if the attention of a Transformers model can not be shared by `size` ranks along sp."""
    config, what = model.config, f"sp: {type(model).__name__}{f' ({name})' if name else ''}"
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{what} does not take its attention from Transformers' registry of attention functions, where it could be exchanged. Shard "
            "it over dp and tp, or take a model whose class has _supports_attention_backend."
        )
    if config.is_encoder_decoder or any(hasattr(config, each) for each in ("vision_config", "audio_config", "text_config")):
        raise ConfigError(
            f"{what}: expected a model of one sequence of tokens, without encoder, images or sound. Shard it over dp and tp."
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))
    if others:
        raise ConfigError(
            f"{what} has layers of type {', '.join(others)}, which read neighbouring tokens: expected {' and '.join(_LAYERS[:2])} only. "
            "Shard it over dp and tp."
        )
    mixed = next((each for each in _MIXED_INPUTS if getattr(config, each, None)), None)
    tables = [each for key, each in model.named_modules() if key.endswith("position_embeddings")]
    why = (
        f"has {mixed}, by which tokens read others outside of attention"
        if mixed
        else "computes its output from one token of a sequence, or from all of them together"
        if type(model).__name__.endswith(_POOLED)
        else "counts the tokens that are no padding from its padding_idx on, which needs whole sequences"
        if any(getattr(each, "padding_idx", None) is not None for each in tables)
        else None
    )
    if why is not None:
        raise ConfigError(f"{what} {why}. Shard it over dp and tp.")
    heads = getattr(config, "num_attention_heads", size)
    if heads % size:
        near = max(each for each in range(1, size + 1) if heads % each == 0)
        raise ConfigError(
            f"{what} has {heads} attention heads, which {size} ranks along sp can not share evenly. Make a mesh with sp={near}, and give "
            "the other ranks to dp or tp."
        )


def attach(model: Any, sequence: SequenceParallel) -> list[Any]:
    """Let a Transformers model attend to whole sequences; return handles whose removal undoes that."""
    _wrap_registries()
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    counted = any(isinstance(each, nn.Embedding) and hasattr(each, "offset") for each in model.modules())  # OPT

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        outer = _running.values()
        if outer or active_in(module) is None:  # models nest: the outermost one begins
            _running.enter(module, outer[-1] if outer else None)
            return None
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        if "use_cache" in names and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False  # a cache is for generation, and masks of packed sequences are made without one only
        _running.enter(module, _begin(module, sequence, kwargs, counted))
        return (), kwargs

    def after(module: nn.Module, *_: object) -> None:
        _running.leave(module)

    handles: list[Any] = [
        model.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True),
        model.register_forward_hook(torch.compiler.disable(after), always_call=True),
    ]
    if model.config._attn_implementation == "eager":
        handles.append(_Eager(model.config))
    return handles


def _begin(model: nn.Module, sequence: SequenceParallel, kwargs: dict, counted: bool) -> _Forward:
    """Begin a model's forward: exchange what masks depend on (collective). counted: the model counts positions without padding."""
    mask, positions, what = kwargs.get("attention_mask"), kwargs.get("position_ids"), f"sp: {type(model).__name__}"
    keep = kwargs.get("logits_to_keep")
    if kwargs.get("past_key_values") is not None or isinstance(keep, Tensor) or keep:
        raise ConfigError(
            f"{what}: past_key_values and logits_to_keep: generation needs the whole model and sequence: zs.close(model) first."
        )
    if positions is None:
        raise ConfigError(
            f"{what}: the batch has no position_ids, and a rank's tokens do not begin at position 0. Cut the batch along its tokens by "
            "zs.shard_sequence(batch, model), which makes them."
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"{what}: attention_mask: expected (batch, tokens), got {found}. Masks of each layer are made from it here."
        )
    sequence.agree((positions if mask is None else mask).shape, "inputs")
    if mask is not None:
        padding = sequence.whole(mask.to(torch.uint8), f"{SP} all-gather padding").bool()
        if counted and bool((padding[:, 1:] & ~padding[:, :-1]).any()):
            raise ConfigError(f"{what} counts positions without padding, and there is padding before tokens: pad on the right.")
        return _Forward(sequence, padding, None)
    if positions.ndim != 2:
        return _Forward(sequence, None, None)
    whole = sequence.whole(positions, f"{SP} all-gather positions")
    return _Forward(sequence, None, None if sequence.comm.imagined else whole)


def _of_whole_sequences(function: Callable) -> Callable:
    """Wrap a function of masks whose argument `position_ids` shows packed sequences: it sees those of whole sequences."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        forward: _Forward | None = next(reversed(_running.values()), None)
        if forward is None or forward.positions is None:
            return function(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        given.arguments["position_ids"] = forward.positions.expand(len(given.arguments["position_ids"]), -1)
        return function(*given.args, **given.kwargs)

    wrapped._zeroshard = True  # type: ignore[attr-defined]
    return wrapped


def _mask(function: Callable, **kwargs: Any) -> Any:
    """Call a mask function of the registry: in a forward over an axis sp, for whole sequences."""
    forward: _Forward | None = next(reversed(_running.values()), None)
    if forward is None:
        return function(**kwargs)
    length = kwargs["q_length"]
    if kwargs["kv_length"] != length:
        raise ConfigError(
            f"sp: a mask of {length} queries and {kwargs['kv_length']} keys: attention must be of sequences to themselves."
        )
    whole = length * forward.sequence.size
    kwargs |= {"q_length": whole, "kv_length": whole, "attention_mask": forward.padding}
    return function(**kwargs)


def _attend(
    function: Callable, flash: bool, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Call an attention function of the registry for whole sequences and this rank's heads. query: (B, H, S / n, D)."""
    sequence = active_in(module)
    assert sequence is not None
    if kwargs.get("position_bias") is not None:
        raise ConfigError(
            f"sp: {type(module).__name__} has a position bias for each head and pair of tokens. Shard it over dp and tp."
        )
    heads = query.shape[1]
    query, key, value = sequence.to_heads(query, key, value)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 4:
        attention_mask = sequence.heads_of(attention_mask, heads, query.shape[2])
    if flash and kwargs.get("position_ids") is not None:  # flash attention finds packed sequences by them
        kwargs["position_ids"] = sequence.whole(kwargs["position_ids"], f"{SP} all-gather positions")
    own = slice(sequence.rank * query.shape[1], (sequence.rank + 1) * query.shape[1])
    if kwargs.get("s_aux") is not None:  # attention sinks, (H,), as flash and flex attention take them
        kwargs["s_aux"] = kwargs["s_aux"][own]
    module = _OfRank(module, query.shape[1] // key.shape[1], own)
    with sequence.inside():
        out = function(module, query, key, value, attention_mask, *args, **kwargs)[0]  # (B, S, H / n, D)
    return sequence.to_tokens(out, 2, 1), None


class _OfRank:
    """A module of attention as its rank computes it: `groups` query heads for each key and value head, its heads' sinks."""

    def __init__(self, module: nn.Module, groups: int, own: slice) -> None:
        self._module, self.num_key_value_groups = (
            module,
            groups,
        )  # where key and value heads were repeated, less than the module's
        if getattr(module, "sinks", None) is not None:
            self.sinks = module.sinks[own]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Eager:
    """Handle: a config whose attention is "eager" names an entry of the registry instead, until `remove`."""

    def __init__(self, config: Any) -> None:
        self.config = config
        config._attn_implementation = _EAGER

    def remove(self) -> None:
        """Restore the name."""
        self.config._attn_implementation = "eager"


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function `eager_attention_forward` of the file that defines the module's class, as the module itself would."""
    inner = module._module if isinstance(module, _OfRank) else module
    files = (vars(sys.modules[kind.__module__]) for kind in type(inner).__mro__)
    function = next((found["eager_attention_forward"] for found in files if "eager_attention_forward" in found), None)
    if function is None:
        raise ConfigError(
            f"sp: the eager attention of {type(inner).__name__} was not found: model.set_attn_implementation('sdpa')."
        )
    return function(module, *args, **kwargs)


def _wrap_registries() -> None:
    """Wrap the functions of Transformers' registries that are not wrapped yet."""
    from transformers import AttentionInterface, masking_utils
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with _LOCK:
        for name in ("find_packed_sequence_indices", "packed_sequence_compatibility_function"):
            if not hasattr(function := getattr(masking_utils, name), "_zeroshard"):
                setattr(masking_utils, name, _of_whole_sequences(function))
        if _EAGER not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(_EAGER, _eager)
            AttentionMaskInterface.register(_EAGER, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
            if not hasattr(function, "_zeroshard"):
                AttentionInterface.register(name, _wrapped_attention(function, "flash" in name))
        for name, function in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
            if not hasattr(function, "_zeroshard"):
                AttentionMaskInterface.register(name, _wrapped_mask(function))


def _wrapped_attention(function: Callable, flash: bool) -> Callable:
    @functools.wraps(function)
    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        if active_in(module) is None:
            return function(module, *args, **kwargs)
        return _attend(function, flash, module, *args, **kwargs)

    attention._zeroshard = True  # type: ignore[attr-defined]
    return attention


def _wrapped_mask(function: Callable) -> Callable:
    @functools.wraps(function)
    def mask(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if args else _mask(function, **kwargs)

    mask._zeroshard = True  # type: ignore[attr-defined]
    return mask
