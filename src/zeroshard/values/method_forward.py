"""Registration of methods other than `forward` that compute with a module's parameters (`zs.register_forward`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..utils.autograd import forward_runs
from ..utils.torch_compat import original


def register_forward(module: nn.Module, name: str) -> None:
    """Make a call of the method `module.<name>` a forward of the module: its parameters are gathered and its hooks run.

    At stage 3 parameters are whole only inside of their module's forward; any other method that a program calls itself
    (`model.encode(x)`) would find slices. At every stage the method's inputs and outputs then count as those of a forward: they
    are cast, and in fp16 gradients of the outputs get the loss scale. FSDP2's counterpart: `register_fsdp_forward_method`.

    Call it on every rank, before or after zs.shard. Inside of a forward of the module, in methods that it calls, and while
    torch.compile traces, the method runs as before. In a model that is not sharded only the module's own forward hooks see the
    calls. Registering a method again changes nothing, and a deep copy of the module has its methods registered as well.

    Args:
        module: the module that has the method; the method may use all parameters inside of it.
        name: the name of the method.

    Raises:
        ConfigError: the module has no such method; or it is `forward`, which needs no registration; or it is a generator or
            coroutine, most of which runs after its call is over: register what it calls at each turn.

    Example::

        zs.register_forward(model, "encode")
        model, optimizer = zs.shard(model, optimizer, stage=3)
        model.encode(x).sum().backward()
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}.")
    module = original(module)
    method = getattr(module, name, None)
    if isinstance(method, MethodForward):
        return
    why = ""
    if name == "forward":
        why = "a forward needs no registration"
    elif not callable(method) or isinstance(method, nn.Module):
        why = f"{type(module).__name__} has no method of this name"
    elif any(kind(method) for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
        why = "its body runs after its call is over, when parameters are released; register the method that it calls at each turn"
    if why:
        raise ConfigError(f"zs.register_forward: {name!r}: {why}.")
    module.__dict__[name] = MethodForward(module, name, module.__dict__.get(name))


class MethodForward:
    """Replacement, in a module, of one of its methods: a call of it calls the module, with the method as the forward.

    given: the attribute of this name in the instance's `__dict__`, None if the method is one of the class.
    """

    def __init__(self, module: nn.Module, name: str, given: Callable | None) -> None:
        # no bound method is kept here: pickle stores one by its name, under which it would then find this object
        self.module, self.name, self.given = module, name, given

    @property
    def __wrapped__(self) -> Callable:
        """The replaced method, under the name by which `inspect` finds it."""
        if self.given is not None:
            return self.given
        return inspect.getattr_static(type(self.module), self.name).__get__(self.module, type(self.module))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        module, method = self.module, self.__wrapped__
        if torch.compiler.is_compiling() or forward_runs(module):  # its parameters are gathered already, or hooks would be traced
            return method(*args, **kwargs)
        instance = module.__dict__
        before = {"forward": instance["forward"]} if "forward" in instance else {}

        def forward(*args: object, **kwargs: object) -> Any:
            put_back()  # first: the method may call the module's own forward
            return method(*args, **kwargs)

        def put_back() -> None:
            if instance.get("forward") is forward:
                del instance["forward"]
                instance.update(before)

        instance["forward"] = forward
        try:
            return module(*args, **kwargs)
        finally:
            put_back()
