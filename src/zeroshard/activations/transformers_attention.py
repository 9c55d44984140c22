"""Attention and masks of Transformers' models over an axis sp: wrappers of the functions in its registries of attention and masks.

    forward of a model        its positions and padding mask are exchanged, so that each rank knows those of whole sequences
    a mask function           makes the mask of whole sequences: causal, padding, packed sequences, sliding windows; of its rows
                              those for this rank's queries
    an attention function     tokens are exchanged for heads, the configured function runs, heads are exchanged for tokens

The functions of each name ("sdpa", "flash_attention_2", ...) are wrapped once for the process. For modules of models without an
axis sp the wrapper calls the function itself. The registry has no eager attention: a model that is configured for it gets the entry
"zeroshard_eager", until the model is closed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..utils.autograd import Running
from ..utils.axes import SP
from ..utils.releases import lacking
from ..utils.torch_compat import FakeTensor, PlanMode
from ..utils.transformers_compat import (
    answer_for_packed,
    attention_of,
    eager_attention,
    replace_eager,
    takes_registered_attention,
)
from .causal import LAST_QUERIES
from .ulysses import SequenceParallel, active_in

_EAGER = "zeroshard_eager"
_BY_MASK = (_EAGER, "flex_attention")  # functions that are told by the mask alone which keys a query sees
_MIXED_INPUTS = ("trigram_input", "keep_window_size")  # options of models whose tokens meet outside of the registry's attention
_POOLED = (
    "ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction", "BertForPreTraining",
    "DoubleHeadsModel",
)  # fmt: skip
_LAYERS = ("full_attention", "sliding_attention", "dense", "sparse", "moe")  # whose tokens meet in attention only
_OF_MASKS = ("q_length", "kv_length", "attention_mask", "mask_function", "config")  # arguments of mask functions
_FEATURE = "sequence parallelism (an axis sp)"
_LOCK = threading.Lock()  # of the registries, since ranks may be threads
_running = Running()  # the forwards of models, each with the _Forward by which masks are made; None: torch's own


@dataclass
class _Forward:
    """The inputs of a model's forward, of whole sequences. padding: (B, S), True for tokens; positions: (B, S), without padding.

    is_packed: rows of `positions` have several sequences. packed: `positions` for the mask that is being made, if its maker has
    looked for packed sequences, which not every model does; else None.
    """

    sequence: SequenceParallel
    padding: Tensor | None
    positions: Tensor | None
    is_packed: bool = False
    packed: Tensor | None = None


def check(name: str, model: Any) -> None:
    """Raise ConfigError if the attention of a Transformers model can not be shared by ranks along sp."""
    config, what = model.config, f"sp: {type(model).__name__}{f' ({name})' if name else ''}"
    attention_of(config)  # which is read and set later
    _wrap_registries()
    if not takes_registered_attention(model):
        raise ConfigError(
            f"{what} does not take its attention from Transformers' registry of attention functions, where it could be exchanged. Shard "
            "it over dp and tp, or take a model whose is_backend_compatible() is True."
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


def attach(model: Any, sequence: SequenceParallel) -> list[Any]:
    """Let a Transformers model, which `check` has let pass, attend to whole sequences; return handles whose removal undoes that."""
    with contextlib.suppress(ConfigError):  # else batches with packed sequences are refused
        answer_for_packed(find_packed, "sp")
    parameters = inspect.signature(type(model).forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]  # a stage of a pipeline takes *args
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
        return args[len(names) :], kwargs

    def after(module: nn.Module, *_: object) -> None:
        _running.leave(module)

    handles: list[Any] = [
        model.register_forward_pre_hook(torch.compiler.disable(before), with_kwargs=True),
        model.register_forward_hook(torch.compiler.disable(after), always_call=True),
    ]
    return handles + replace_eager(model.config, _EAGER)


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
    if sequence.comm.imagined:
        return _Forward(sequence, None, None)
    packed = bool(_parts(whole).any())
    if packed:
        answer_for_packed(find_packed, f"{what}: the batch has packed sequences")
    return _Forward(sequence, None, whole, packed)


def _parts(positions: Tensor) -> Tensor:
    """Return the number, from 0, of each token's sequence in its row. positions: (B, S), which go on by 1 inside of a sequence."""
    return (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def find_packed(find: Callable, position_ids: Tensor) -> Tensor | None:
    """Return what `find` does outside of a forward over an axis sp; in one, note that the next mask is of packed sequences.

    None: there is one sequence. In a plan, and over imagined ranks, positions can not be read, and are taken for those of one:
    else attention would have a mask of tokens x tokens, and compute the whole square of scores.
    """
    forward: _Forward | None = next(reversed(_running.values()), None)
    planned = isinstance(position_ids, FakeTensor) and isinstance(position_ids.fake_mode, PlanMode)
    if planned or (forward is not None and forward.sequence.comm.imagined):
        return None
    if forward is None or forward.positions is None:
        return find(position_ids)
    forward.packed = forward.positions.expand(len(position_ids), -1) if forward.is_packed else None
    return None


def _mask(function: Callable, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a mask function of the registry: in a forward over an axis sp, for whole sequences."""
    forward: _Forward | None = next(reversed(_running.values()), None)
    if forward is None or args:
        return function(*args, **kwargs)
    if missing := [each for each in _OF_MASKS if each not in kwargs]:
        raise lacking("transformers", f"{', '.join(missing)} in calls of mask functions", _FEATURE)
    length = kwargs["q_length"]
    if kwargs["kv_length"] != length:
        raise ConfigError(
            f"sp: expected as many keys as queries, got a mask of {length} queries and {kwargs['kv_length']} keys: over an axis sp, attention "
            "is of sequences to themselves."
        )
    sequence, heads = forward.sequence, getattr(kwargs["config"], "num_attention_heads", None)
    whole = length * sequence.size
    kwargs |= {"q_length": whole, "kv_length": whole, "attention_mask": forward.padding}
    positions, forward.packed = forward.packed, None
    if positions is not None:  # tokens see those of their own sequence, where positions begin anew
        of_positions, parts = kwargs["mask_function"], _parts(positions)
        kwargs["allow_is_causal_skip"] = False
        kwargs["mask_function"] = lambda row, head, query, key: (
            (parts[row, query] == parts[row, key]) & of_positions(row, head, positions[row, query], positions[row, key])
        )
    share = sequence.share(heads // sequence.tp if isinstance(heads, int) else sequence.size)
    in_groups = share.groups > 1
    if in_groups and name not in _BY_MASK:
        mask = function(**kwargs | {"q_length": 1, "q_offset": whole - 1})  # of the last query
        # then the attention function knows what is causal, and takes a mask (B, S) of padding at most
        in_groups = mask is not None and mask.ndim != 2
    if in_groups:
        of_pair = kwargs["mask_function"]
        kwargs |= {"q_length": share.among * length, "allow_is_causal_skip": False}
        kwargs["mask_function"] = lambda batch, head, query, key: of_pair(batch, head, share.row(query, length), key)
    if in_groups or share.groups == 1:
        mask = function(**kwargs)
    # without a mask sdpa would take its rows for one causal sequence
    if mask is None and name == "sdpa" and (positions is not None or in_groups):
        raise lacking("transformers", "allow_is_causal_skip of mask functions", _FEATURE)
    return mask


def _attention(function: Callable, name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an attention function of the registry: in a model over an axis sp, for whole sequences."""
    return (function if active_in(module) is None else functools.partial(_attend, function, name))(module, *args, **kwargs)


def _attend(
    function: Callable, name: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Call an attention function of the registry for whole sequences and this rank's heads. query: (B, H, S / n, D)."""
    sequence, what, flash = active_in(module), f"sp: {type(module).__name__}", "flash" in name
    assert sequence is not None
    if kwargs.get("position_bias") is not None:
        raise ConfigError(f"{what} has a position bias for each head and pair of tokens. Shard it over dp and tp.")
    mask, heads, length = attention_mask, query.shape[1], query.shape[2]
    share = sequence.share(heads)
    query, key, value = sequence.to_heads(share, query, key, value)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        mask = sequence.mask_of(share, mask, heads, query.shape[2], key.shape[2])
    if flash and kwargs.get("position_ids") is not None:  # flash attention finds packed sequences by them
        kwargs["position_ids"] = sequence.whole(kwargs["position_ids"], f"{SP} all-gather positions")
    own, groups = share.heads(heads), query.shape[1] // key.shape[1]
    if kwargs.get("s_aux") is not None:  # attention sinks, (H,), as flash and flex attention take them
        kwargs["s_aux"] = kwargs["s_aux"][own]
    in_runs = query.shape[2] < key.shape[2] and _in_runs(name, what, module, query, mask, kwargs)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = mask if not in_runs else LAST_QUERIES if not flash else None if mask is None else mask[:, : key.shape[2]]
        of_rank = _OfRank(module, 1 if given is LAST_QUERIES else groups, own)  # else keys and values would be repeated for it
        return function(of_rank, query, key, value, given, *args, **kwargs)[0]

    with sequence.inside():
        if in_runs:
            out = share.causal(length, attend, query, key, value, 1)
        else:
            out = attend(query, key, value)  # (B, S / g, H / u, D)
    return sequence.to_tokens(share, out, 2, 1), None


def _in_runs(name: str, what: str, module: Any, query: Tensor, mask: Any, kwargs: dict) -> bool:
    """Return whether runs of queries are to attend to the keys before their ends, in an attention of fewer queries than keys.

    Elsewhere the mask says what each query sees, or it sees all. Raise ConfigError where a function has no such attention.
    """
    if name in _BY_MASK or (mask is not None and mask.ndim == 4):
        return False
    causal, positions = kwargs.get("is_causal"), kwargs.pop("position_ids", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if "flash" in name:
        packed = positions is not None and query.shape[0] == 1 and bool((positions.diff(dim=-1) != 1).any())
        fits = not packed and kwargs.get("cu_seq_lens_q") is None and (causal or mask is None)
    else:
        fits = name == "sdpa" or (mask is None and not causal)
    if not fits:
        raise ConfigError(
            f"{what}: the ranks along sp are more than can share its heads, and then {name} has no attention over packed "
            "sequences, and none over padding that is not causal; functions other than those of Transformers have no causal one. "
            "Call model.set_attn_implementation('sdpa') before zs.shard, or make a mesh whose sp divides the heads."
        )
    return causal


class _OfRank:
    """An attention module as this rank computes it: with the sinks of its heads, and `groups` query heads for each key and value head."""

    def __init__(self, module: nn.Module, groups: int, own: slice) -> None:
        self._module = module
        self.num_key_value_groups = groups  # less than the module's, if key and value heads were repeated for the exchange
        if getattr(module, "sinks", None) is not None:
            self.sinks = module.sinks[own]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute eager attention as the module itself would."""
    return eager_attention(module._module if isinstance(module, _OfRank) else module)(module, *args, **kwargs)


def _wrap_registries() -> None:
    """Wrap the functions of Transformers' registries that are not wrapped yet."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise lacking("transformers", "AttentionInterface and AttentionMaskInterface", _FEATURE) from None
    with _LOCK:
        attentions, masks = AttentionInterface(), AttentionMaskInterface()  # all objects of a registry show the same entries
        if _EAGER not in attentions:
            attentions.register(_EAGER, _eager)
            masks.register(_EAGER, masks["eager"])
        for registry, ours in ((attentions, _attention), (masks, _mask)):
            for name, function in list(registry.items()):
                if getattr(function, "func", None) is not ours:
                    registry.register(name, functools.update_wrapper(functools.partial(ours, function, name), function))
