"""Optimizers that a program makes after zs.shard(model), as with FSDP: they become the model's sharded optimizer at their first use.

    zs.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters())     the object's class becomes a subclass with LateOptimizer ...
    model(batch).backward()
    optimizer.step()                                      ... and here that of a sharded optimizer (assembly/sharded_optimizer.py)

torch has no hook for an optimizer that is made. So `watch` patches `Optimizer.add_param_group`, which gives each its parameters,
once per process. There the constructor is not over, so nothing is taken over yet, and until its first use the object is an ordinary
one: schedulers, groups and states may come. zs.shard can not know of an optimizer from before it that it is not given: where that
would step with slices of gradients, its step raises.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.inner_optimizer import members_of
from ..engine.optimizer import OptimizerCore, Tally
from ..engine.optimizers import ModelOptimizers
from ..engine.runtime import Runtime
from ..errors import ConfigError, ModelClosed
from ..optim.take_over import TakeOver
from ..optim.validation import held_optimizers
from ..utils.autograd import in_backward
from ..utils.garbage import collect_garbage
from .lr_schedulers import respect_skipped_steps
from .sharded_optimizer import CLASSES, GIVE, OfShardedModel, agree, derived, homes_of, runtimes_of, shard_optimizer, suit

if TYPE_CHECKING:
    _Optimizer = torch.optim.Optimizer
else:
    _Optimizer = object  # the class of the user's object is the second base of the derived classes

_given_back: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # late ones of models that were closed
_between: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that are being taken over


class LateOptimizer(_Optimizer):
    """Mixin for the class of an optimizer of sharded parameters, until its first use."""

    last_step = None
    tally: Tally  # of schedulers that are made before the first use

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the optimizer over, and take the first step. A program that has kept this bound method may call it later, too."""
        if isinstance(self, LateOptimizer):
            if self.wraps_another:  # its own step calls that of the other
                return super().step(*args, **kwargs)
            self.take_over()
        return type(self).step(self, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # torch would run its hooks here and in the sharded step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the optimizer over, and load this rank's slices."""
        if self.wraps_another:
            super().load_state_dict(state_dict)
        else:
            self.take_over()
            self.load_state_dict(state_dict)

    @property
    def wraps_another(self) -> bool:
        """True if the object holds another optimizer of sharded parameters, which is then the one that steps."""
        return any(runtimes_of(held.param_groups) for _, held in held_optimizers(self))

    def give_back(self) -> None:
        """Give the object the class back that the program has called. It is no sharded model's any more."""
        for runtime in runtimes_of(self.param_groups):
            all_optimizers(runtime).waiting.discard(self)
        _given_back.add(self)
        self.__dict__.pop("tally", None)
        self.__class__ = type(self).__bases__[1]

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Pickle one that has no sharded parameters (`expect`) as an object of the class that the program has called."""
        if runtimes_of(self.param_groups):
            return super().__reduce_ex__(protocol)
        return copyreg.__newobj__, (type(self).__bases__[1],), self.__getstate__()  # type: ignore[attr-defined]

    def take_over(self) -> None:
        """Make the object a sharded optimizer of its parameters' model (not collective: ranks compare theirs in the first step).

        Optimizers of its parameters that the program has dropped are closed. Parameters in its groups that are no sharded model's stay
        ordinary, and are stepped as they are. Raise ConfigError, with nothing else changed, for what zs.shard(model, optimizer) refuses
        else, for a parameter that another optimizer of the model has, and for states in a form that zs.shard must know to lay parameters
        out.
        """
        late, name, runtimes = type(self), type(self).__name__, runtimes_of(self.param_groups)
        if not runtimes:  # a deep copy of replicated parameters is one of ordinary ones
            return self.give_back()
        runtime = runtimes[0]
        if runtime.closed:
            raise ModelClosed(f"the model of this {name} was closed with zs.close().")
        if len(runtime.topology.stages) > 1:
            raise ConfigError(f"optimizer: stages of a pipeline step together. Make this {name} before, and write {GIVE}.")
        all_optimizers(runtime).release_dropped(members_of(self))
        taken, before, gate = TakeOver(self), dict(self.__dict__), runtime.gate
        planned, steppers = [group.plan for group in runtime.groups], list(gate.steppers)
        tally = self.__dict__.get("tally") or Tally(runtime.config.hold_schedulers)  # a copy of an optimizer has none
        with CLASSES:
            _between.add(self)
            self.give_back()
        try:
            suit(self, name, runtime, taken.begin(runtime.model, runtime.config))
            core: OptimizerCore = shard_optimizer(self, runtime).core  # type: ignore[attr-defined]
        except BaseException:
            for group, plan in zip(runtime.groups, planned, strict=True):
                group.plan = plan
            gate.steppers = steppers
            taken.undo()
            self.__class__ = late
            self.__dict__.clear()
            self.__dict__.update(before)
            for each in runtimes:
                all_optimizers(each).waiting.add(self)
            raise
        finally:
            _between.discard(self)
        runtime.optimizers.add(self)
        core.tally, core.agree = tally, functools.partial(agree, core)
        taken.tell(runtime.comm.rank)


class AllOptimizers(ModelOptimizers):
    """The optimizers of a model, with those that its program makes after zs.shard."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left: weakref.WeakSet[Any] = weakref.WeakSet()  # those that the last `__iter__` has not taken over
        # their parameters, also of those that are garbage by now, which ranks collect at different times
        self._of_left: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        if self.waiting and not (self.sharded and set(self.waiting) == set(self._left)):
            if self.free() and len(self.waiting) + len(self.sharded) > 1:
                collect_garbage()  # some may be garbage in circles, which ranks collect at different times
            free = self.free()
            held = Counter(key for each in free for key in members_of(each))
            refused: list[ConfigError] = []
            for optimizer in free:
                if all(held[key] == 1 for key in members_of(optimizer)):  # else: the first that steps is taken
                    try:
                        optimizer.take_over()
                    except ConfigError as error:  # beside others it raises at its own step
                        refused.append(error)
            if refused and not self.sharded:
                raise refused[0]
            self._left.clear()
            self._left.update(self.waiting)
            self._of_left = members_of(*self._left)
        return super().__iter__()

    @property
    def settled(self) -> list[Any]:
        if self.sharded:
            return self.sharded
        if len(self.free()) > 1:
            collect_garbage()
        return list(self) if len(self.free()) == 1 else []

    @property
    def holding(self) -> list[torch.optim.Optimizer]:
        def new() -> list[torch.optim.Optimizer]:
            return [each for each in self.waiting if not (self.sharded and each in self._left)]

        if (count := len(new())) and count + len(self.sharded) > 1:
            collect_garbage()  # as in `__iter__`
        return [*self.sharded, *new()]

    def left_alone(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return super().left_alone(optimizer) | self._of_left.difference(members_of(optimizer))

    def free(self) -> list[Any]:
        """Return those that wait and share no parameter with one taken over, in the order of their first parameters."""
        taken = {key for each in self.sharded for key in each.core.group_of}
        free = [each for each in self.waiting if not each.wraps_another and taken.isdisjoint(members_of(each))]
        if len(free) > 1:
            groups = self.runtime.groups
            numbers = {id(p): spec.number for group in groups for p, spec in zip(group.params, group.specs, strict=True)}
            free.sort(key=lambda each: min(numbers.get(key, len(numbers)) for key in members_of(each)))
        return free

    def take(self, given: Collection[object]) -> None:
        for each in given:
            if isinstance(each, LateOptimizer) and each in self.waiting and not each.wraps_another:
                each.take_over()

    def release_dropped(self, wanted: set[int]) -> None:
        """Close the optimizers of any of these parameters that the program has dropped; their delayed update is finished.

        The model keeps its optimizers, since ranks collect garbage at different times. All ranks meet this call, which collects: the
        first use of another optimizer of these parameters. Raise, with nothing changed, if states are away.
        """
        cores = [each.core for each in self.sharded if not wanted.isdisjoint(each.core.group_of)]
        if cores:
            self.runtime.gate.wait()
        self.sharded[:] = [each for each in self.sharded if each.core not in cores]
        dropped = [(core, weakref.ref(core.outer)) for core in cores]
        for core in cores:
            core.outer = None
        if any(where() is not None for _, where in dropped):
            collect_garbage()
        for core, where in dropped:
            core.outer = where()
            if core.outer is not None:  # the program holds it still
                self.add(core.outer)
        for core in cores:
            if core.outer is None:
                core.drain()
                core.close()


def all_optimizers(runtime: Runtime) -> AllOptimizers:
    """Return the optimizers of a model, to which zs.shard gives an object that knows of later ones."""
    assert isinstance(runtime.optimizers, AllOptimizers)
    return runtime.optimizers


def expect(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer become that of a sharded model at its first use, if its groups hold such a model's parameters by then."""
    with CLASSES:
        if isinstance(optimizer, OfShardedModel) or optimizer in _between:
            return
        respect_skipped_steps()
        optimizer.__class__ = derived(type(optimizer), LateOptimizer)
        for runtime in runtimes_of(optimizer.param_groups) if optimizer in _given_back else ():
            all_optimizers(runtime).waiting.add(optimizer)


@functools.cache
def watch() -> None:
    """From now on notice optimizers of sharded parameters. It acts on the whole process, and once."""
    plain = torch.optim.Optimizer.add_param_group

    @functools.wraps(plain)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        plain(self, param_group)
        if isinstance(self, OfShardedModel) and not isinstance(self, LateOptimizer):
            return  # it is taken over already
        runtimes = runtimes_of(self.param_groups[-1:])
        for runtime in runtimes:
            all_optimizers(runtime).waiting.add(self)
        with CLASSES:
            if runtimes and not isinstance(self, LateOptimizer):
                respect_skipped_steps()
                self.__class__ = derived(type(self), LateOptimizer)
                self.tally = Tally(runtimes[0].config.hold_schedulers)  # type: ignore[attr-defined]

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_refuse_earlier)


def _refuse_earlier(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Raise ConfigError for an optimizer from before zs.shard(model), unless the model's gradients are whole."""
    if isinstance(optimizer, OfShardedModel) or any(homes_of(held.param_groups) for _, held in held_optimizers(optimizer)):
        return  # the held one steps, and is asked then
    for home in homes_of(optimizer.param_groups):
        sliced = home.group.grads is not None and not home.group.grads.replicated
        if sliced and not in_backward():  # there a hook steps it, which UserHook refuses
            raise ConfigError(
                f"optimizer: this {type(optimizer).__name__} was made before zs.shard(model), and not given to it, or inside zs.gathered, so "
                f"it would step {home.name} apart from the model's other states. Write {GIVE}, or make the optimizer after zs.shard(model) "
                "and outside zs.gathered."
            )
