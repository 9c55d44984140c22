"""`optimizer.state` of a sharded optimizer: states by parameter, as in torch, built anew at each access.

States are kept in runs of flat shards (engine/runs.py). The tensors in the mapping are the states themselves, so writing into
them works as in torch. The dicts around them are views, which forward assignments and removals to the runs.

    state[p]["exp_avg"] = value     copied into the state; value is whole, or sharded like the parameter
    state[p]["step"] = 0            for that parameter alone: its run is split; the next step joins it with neighbouring
                                    runs whose states are then equal
    del state[p], state.clear()     as before the first step

Of a replicated state that rests encoded (tensor/state_column.py), the mapping has a decoded copy: assign a new value, since
writing into the copy changes nothing. Under FSDP2's door beside tensor parallelism a replicated state is shown as a DTensor: assign
a new value or write in place, since assigning the `.data` of a DTensor changes nothing (as in FSDP2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..engine.inner_optimizer import State, fresh, hashable, inner_copy
from ..engine.runs import Run
from ..engine.unit import ParamGroup
from ..errors import ConfigError, ModelClosed
from ..tensor.sharded_tensor import ShardedTensor, slice_like, trace_of
from ..tensor.state_column import is_column
from ..utils import torch_compat
from .state_loading import Restoring, SavedState, TensorReader, scalars_for, state_dtype
from .state_storage import StateHome, WholeState, check_shape, write_state

if TYPE_CHECKING:
    from ..engine.optimizer import OptimizerCore


D = TypeVar("D", bound="_HandsOn")


class _HandsOn(dict):
    """A dict whose methods make all changes through `__setitem__` and `__delitem__`; copies of it are plain dicts."""

    _core: OptimizerCore | None = None  # None: an ordinary dict, such as Lightning makes of this class from other entries
    _param: Tensor | None = None

    def bind(self: D, core: OptimizerCore, param: Tensor | None = None) -> D:
        self._core, self._param = core, param
        return self

    def pop(self, key: object, *default: object) -> object:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = _kept(self[key])
        del self[key]
        return value

    def popitem(self) -> tuple[object, object]:
        key = next(reversed(self), None)
        if key is None:
            raise KeyError("popitem(): no state")
        return key, self.pop(key)

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def setdefault(self, key: object, default: object = None) -> object:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Mapping) -> _HandsOn:  # type: ignore[misc, override]
        self.update(other)
        return self

    def copy(self) -> dict:
        return {key: value.copy() if isinstance(value, _HandsOn) else value for key, value in self.items()}

    def __reduce_ex__(self, protocol: object) -> tuple:
        return dict, (self.copy(),)


class ParameterState(_HandsOn):
    """The states of one parameter by name."""

    def __setitem__(self, key: str, value: object) -> None:
        if self._core is not None and self._param is not None:
            value = write_entry(self._core, self._param, key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if self._core is not None and self._param is not None:
            remove_entry(self._core, self._param, key)


class StateByParameter(_HandsOn):
    """The states of all parameters. A parameter without states has an empty dict, as in torch."""

    def __missing__(self, param: Tensor) -> dict:
        if self._core is not None and _is_outside(self._core, param):
            return self._core.inner.state[param]
        entries = ParameterState()
        if self._core is not None:
            entries.bind(self._core, param)
        super().__setitem__(param, entries)
        return entries

    def __setitem__(self, param: Tensor, entries: Mapping[str, object]) -> None:
        if self._core is not None:
            entries = replace(self._core, param, dict(entries))
        super().__setitem__(param, entries)

    def __delitem__(self, param: Tensor) -> None:
        super().__delitem__(param)
        if self._core is not None:
            replace(self._core, param, {})

    def clear(self) -> None:
        """Drop the states of all parameters at once: as before the first step."""
        dict.clear(self)
        if self._core is not None:
            load_state(self._core, {})

    def copy(self) -> dict:
        return defaultdict(dict, super().copy())

    def __reduce_ex__(self, protocol: object) -> tuple:
        return defaultdict, (dict, dict(super().copy()))


# -- reading -------------------------------------------------------------------------------------------------------


def state_by_param(core: OptimizerCore, whole: type[Tensor] = Tensor) -> dict[Tensor, State]:
    """Return the states by parameter as torch does, tensors as sharded (or `whole`) tensors of the parameter's shape."""
    core.runtime.gate.wait()
    result: dict[Tensor, State] = defaultdict(dict)
    for run in core.all_runs:
        state = run.states.load()
        if not state:
            continue
        for index in run.indices:
            views = {key: _view(core, run, index, value, whole) for key, value in state.items()}
            result[run.group.params[index]] = views
    return result


def outside_states(core: OptimizerCore) -> dict[Tensor, State]:
    """Return the states of the optimizer's parameters that are not the model's: the dicts themselves, as in torch."""
    return {param: core.inner.state[param] for params in core.outside for param in params if core.inner.state.get(param)}


def _is_outside(core: OptimizerCore, param: object) -> bool:
    return any(param is other for params in core.outside for other in params)


def entries_of(core: OptimizerCore, param: Tensor) -> State:
    """Return the states of one parameter, in the form of `state_by_param`."""
    core.runtime.gate.wait()
    run, index = _find(core, param)
    return {key: _view(core, run, index, value, Tensor) for key, value in run.states.load().items()}


def _view(core: OptimizerCore, run: Run, index: int, value: object, whole: type[Tensor]) -> Any:
    if not run.holds(value):
        return run.unmark(value)
    rest, begin = run.place(value, index)
    if not core.replicated:
        return StateHome(run.group.homes[index], rest, begin).tensor()
    slot = run.group.layout.slots[index]
    view, cut = rest.load(begin, begin + slot.numel).view(slot.shape), run.group.homes[index].hidden_cut
    return view if whole is Tensor else cut.wrap(view) if cut is not None else view.as_subclass(whole)


def _kept(value: object) -> Any:
    """Return a removed state in memory of its own."""
    if isinstance(value, dict):
        return {key: _kept(entry) for key, entry in value.items()}
    return value.detach().clone() if isinstance(value, (ShardedTensor, WholeState)) else value


# -- writing -------------------------------------------------------------------------------------------------------


def load_state(core: OptimizerCore, states: Mapping[int, Mapping[str, object]]) -> None:
    """Replace all states by those given, by id of the parameter; tensors are whole, or sharded like the parameter (collective then
    where each rank keeps all states)."""
    groups = core.runtime.groups
    if core.runtime.closed:
        if states:
            raise ModelClosed("optimizer states were given after zs.close(model): give them to the optimizer of a sharded model.")
        return
    places = {id(param): (group, index) for group in groups for index, param in enumerate(group.params)}
    states = {
        key: {name: _cut(core, *places[key], value) for name, value in each.items()} if key in places else each
        for key, each in states.items()
    }
    # a scalar parameter does not show which states are one number per parameter: its columns have the same shape ()
    shapes = {id(p): spec.shape for g in groups for p, spec in zip(g.params, g.specs, strict=True)}
    counters = {"step"} | {
        key
        for param, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 0 and shapes.get(param)
    }
    saved: dict[int, SavedState] = {}
    for group, index in [(each, index) for each in groups for index in range(len(each.params))]:
        param = group.params[index]
        entries = states.get(id(param))
        if not entries:
            continue
        state = saved[id(param)] = SavedState()
        for key, value in entries.items():
            if key in counters or not is_column(value, group.homes[index].shape):
                state.scalars[key] = value
            elif isinstance(value, ShardedTensor):  # a replicated core keeps the whole: FSDP2's door shows slices at stage 0, too
                whole = core.replicated
                state.tensors[key] = (
                    TensorReader(value.gathered()) if whole else TensorReader(value._local, group.homes[index].start)
                )
            else:
                state.tensors[key] = TensorReader(value)
    for group, index in [(each, index) for each in groups for index in range(len(each.params))]:
        _note(core, group, index, True, sorted(states.get(id(group.params[index]), {}).items(), key=lambda item: str(item[0])))
    Restoring(core, saved).put()
    _load_outside(core, states)


def _cut(core: OptimizerCore, group: ParamGroup, index: int, value: object) -> object:
    """Return a state as it came, but two kinds as this rank's slice: a DTensor of the parameter's shape (collective), and
    a whole tensor where the parameter shows a larger one."""
    home = group.homes[index]
    if not isinstance(value, Tensor) or tuple(value.shape) != home.shape:
        return value
    if isinstance(value, ShardedTensor):
        slice_like(value, home, home.shape, whole=core.replicated)
        return value
    cut = torch_compat.is_distributed(value) or home.hidden_cut is not None
    return home.wrap(home.slice_of(value).clone(), value.dtype) if cut else value


def _load_outside(core: OptimizerCore, states: Mapping[int, Mapping[str, object]]) -> None:
    """Replace the states of parameters that are not the model's, by a plain optimizer's load."""
    if not any(core.outside):
        return
    plain = inner_copy(core.inner)
    plain.param_groups = [{**group, "params": own} for group, own in zip(plain.param_groups, core.outside, strict=True)]
    told, params = plain.state_dict(), [param for own in core.outside for param in own]
    given = {number: fresh(dict(states[id(p)])) for number, p in enumerate(params) if states.get(id(p))}
    plain.load_state_dict({**told, "state": given})
    for param in params:
        core.inner.state.pop(param, None)
    core.inner.state.update({param: entries for param, entries in plain.state.items() if entries})


def _note(core: OptimizerCore, group: ParamGroup, index: int, anew: bool, *given: object) -> None:
    """Note what the program has given as states, so that ranks see at the next step whether all were given the same."""
    if core.runtime.values.watches(group):
        group.masters.note(index, trace_of(*given), anew, "states")


def replace(core: OptimizerCore, param: Tensor, entries: State) -> dict:
    """Replace all states of one parameter ({}: drop them); return the dict for `optimizer.state[param]`."""
    given = {key: _kept(value) for key, value in entries.items()}  # a state may be given under another's name
    if _is_outside(core, param):
        core.inner.state[param] = given
        return given
    shown = _find(core, param)[0].states.load() if given or id(param) in core.group_of else {}
    for key in [key for key in shown if key not in given]:
        remove_entry(core, param, key)
    return ParameterState({key: write_entry(core, param, key, value) for key, value in given.items()}).bind(core, param)


def remove_entry(core: OptimizerCore, param: Tensor, key: str) -> None:
    """Remove one state of one parameter."""
    if key in _find(core, param)[0].states.load():
        core.runtime.gate.before()
        run, index = _alone(core, param)
        run.states.remove(key)
        core.states_changed()
        _note(core, run.group, index, False, key)


@torch.no_grad()
def write_entry(core: OptimizerCore, param: Tensor, key: str, value: object) -> object:
    """Write one state of one parameter; return the entry for `optimizer.state[param]` (for a column, a view of the state)."""
    core.runtime.gate.before()
    run, index = _find(core, param)
    states, home, name = run.states.load(), run.group.homes[index], f"{run.group.specs[index].name}, {key!r}"
    was_column = key in states and run.holds(states[key])
    if is_column(value, home.shape) and not was_column:
        loaded = [(each, each.states.load()) for each in core.all_runs]
        # a parameter of shape () does not show which of its states are one number per parameter: other parameters do
        if key != "step" and not any(key in found and not each.holds(found[key]) for each, found in loaded):
            run, index = _alone(core, param)
            if key in states:
                run.states.remove(key)
            run.states.put(key, run.states.column(key, state_dtype(run.group, value.dtype)))
            was_column = True
    if was_column and isinstance(value, Tensor):
        shown = _view(core, run, index, run.states.load()[key], WholeState)
        if core.replicated and home.hidden_cut is not None:
            # `shown` is a DTensor; its local tensor is this rank's part, all of which is stored here
            check_shape(shown, value, name)
            value = _cut(core, run.group, index, value)
            assert isinstance(value, ShardedTensor)
            write_state(view := torch_compat.local_part(shown), value.gathered(), name)
        else:
            write_state(view := shown, value, name)
        if core.replicated:  # for an encoded column, the view is one of a decoded copy
            rest, begin = run.place(run.states.load()[key], index)
            rest.store(begin, view.as_subclass(Tensor).reshape(-1))
        core.states_changed()
        _note(core, run.group, index, False, key, value)
        return shown
    if key not in states or was_column or hashable(states[key]) != hashable(value):
        run, index = _alone(core, param)
        if was_column:
            run.states.remove(key)
        options = core.outer.param_groups[core.group_of[id(param)]]
        run.states.put(key, scalars_for(run, options, SavedState(scalars={key: value}))[key])
        core.states_changed()
        _note(core, run.group, index, False, key, value)
    return run.states.load()[key]


def _find(core: OptimizerCore, param: object) -> tuple[Run, int]:
    """Return the run of a parameter, and the parameter's index in its group. Raise ConfigError if no run has the parameter."""
    for run in core.all_runs:
        for index in run.indices:
            if run.group.params[index] is param:
                return run, index
    what = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
    raise ConfigError(
        f"optimizer.state[key]: the key is {what}, which is not a parameter that this optimizer steps. Use a parameter of "
        "optimizer.param_groups, before zs.close(model); keep values that belong to no parameter outside of optimizer.state."
    )


def _alone(core: OptimizerCore, param: Tensor) -> tuple[Run, int]:
    """Split the parameter's run, if it has others; return the run of this parameter alone, and its index in its group."""
    run, index = _find(core, param)
    if len(run.indices) > 1:
        runs = core.runs[core.group_of[id(param)]]
        position = runs.index(run)
        runs[position : position + 1] = core.maker.split(run)
        run, index = _find(core, param)
    core.parted = True
    return run, index
