"""Construction of models whose parameters are sharded from the start: no rank ever holds the whole model.

    with zs.init(stage=3): model = Net()      parameters are cut while the model is made, with rank 0's values
    zs.shard(meta_model, opt, weights=dir)    built on the meta device, slices streamed from safetensors
    zs.shard(meta_model, opt)                 built on the meta device, initialised module by module

A parameter under zs.init, in time:

    whole     from its registration on, on each rank: constructors read and write it as on one process
    cut       when a module registers a parameter and more than _WHOLE_NBYTES of other modules' are whole, by zs.gathered and
              what else needs sharded parameters, or at the context's end (collective): ranks with other values get rank 0's
    at rest   a write acts on each rank's slice (a random draw is of the whole, of which a slice is kept); zs.shard refuses a
              parameter that ranks have written differently
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Container, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from ..engine.comm.base import Comm
from ..engine.comm.messages import exchange_values
from ..engine.parameter import gather_flat
from ..errors import ModelMismatch, ShardedAccessError, ShardedWriteError
from ..guard import Origin, agree_on_values, check_alike
from ..tensor.attributes import attributes_of, whole_now
from ..tensor.home import Home
from ..tensor.sharded_tensor import ShardedParameter, ShardedTensor, checksum, set_data
from ..utils import torch_compat
from ..utils.dtypes import casts_to
from ..utils.garbage import collect_garbage
from ..utils.host import process_identity
from ..utils.module_names import own_name
from ..utils.torch_compat import exchange, is_distributed, own_buffers, own_parameters, swap, tree_map_only
from ..utils.transformers_compat import initialiser

_WHOLE_NBYTES = 64 << 20  # bytes of other modules' parameters that are whole when a parameter is registered: more are cut
_ALL = 0  # no module has this id
_LATER = ("full_tensor", "to_local", "__deepcopy__")  # methods that a whole parameter has beside those of its class
_numbers = itertools.count()  # number of births so far: in the same order on every rank, also if ranks are threads


class BirthHome(Home):
    """Home of a parameter made under zs.init, until zs.shard: the flattened elements are cut evenly over ranks."""

    def __init__(self, comm: Comm, name: str, numel: int) -> None:
        self.comm, self.name, self.number = comm, name, next(_numbers)
        self.origin: Origin | None = None
        self.written = 0
        self.numel, self.part = numel, -(-numel // comm.world_size)
        self.start, self.stop = self.cut(comm.rank)

    def cut(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's elements of the flattened parameter; (0, 0) if it has none."""
        start = rank * self.part
        return (start, min(start + self.part, self.numel)) if start < self.numel else (0, 0)

    @property
    def traced(self) -> bool:
        return not self.comm.control.alone

    @property
    def trace(self) -> int:
        return self.written

    def note(self, trace: int, anew: bool) -> None:
        self.written = zlib.crc32(f"{0 if anew else self.written} {trace}".encode())

    def gather_local(self, local: Tensor) -> Tensor:
        return gather_flat(self.comm, local, f"full tensor of {self.name}")

    def copy_of(self, param: ShardedParameter) -> ShardedParameter:
        """Return another parameter of the same value, cut alike."""
        home = BirthHome(self.comm, self.name, param.numel())
        home.written = self.written
        return ShardedParameter(param._local.clone(), tuple(param.shape), home, param.requires_grad)

    def set_gradient(self, value: Tensor | None) -> None:
        if value is not None:
            raise ShardedAccessError(f"{self.name} takes no gradient before zs.shard(model, optimizer).")

    def arrival(self, sliced: bool) -> Callable[[Tensor], Tensor]:
        def arrive(_: Tensor) -> Tensor:
            raise ShardedAccessError(f"{self.name} takes no gradient before zs.shard(model, optimizer).")

        return arrive

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> object:
        """Compute an operation; where slices do not allow it, on gathered values: all ranks build the model alike (collective).

        Initialisation code reads the results of parametrizations outside of zs.gathered, too. Return NotImplemented outside of
        `init`, and with gradients enabled, since no gradient could reach the slice.
        """
        if func is torch.clone or not _here.inits or torch.is_grad_enabled():  # full_tensor() itself calls clone
            return NotImplemented
        try:
            with torch_compat.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except ShardedWriteError:
            raise
        except ShardedAccessError:
            args, kwargs = tree_map_only(ShardedTensor, lambda tensor: tensor.detach().gathered(), (args, kwargs))
            return func(*args, **kwargs)

    def assign(self, param: Tensor, value: Tensor) -> None:
        """Carry out `param.data = value`, of any shape and dtype: a sharded value is used as it is, a whole one is cut."""
        if not isinstance(value, ShardedTensor):
            home = BirthHome(self.comm, self.name, value.numel())
            local = value.detach().reshape(-1)[home.start : home.stop].clone()
            home.written = checksum(value) if home.traced else 0
            value = ShardedTensor(local, tuple(value.shape), home)
        elif value._trace:
            value._home.note(value._trace, False)
        set_data(param, value)
        param._held, param._home = value._local, value._home  # type: ignore[attr-defined]


def _stays_uncut(param: Tensor) -> bool:
    """Return whether a parameter is not cut: on the meta device, without a shape yet, cut already, a DTensor, inside zs.gathered."""
    uncut = (ShardedTensor, torch_compat.UninitializedTensorMixin)
    return param.is_meta or isinstance(param, uncut) or id(param) in whole_now or is_distributed(param)


class _Born(NamedTuple):
    """A parameter that was registered inside of `init` and is whole. origin: the memory that it had before it was cast."""

    module: weakref.ref[nn.Module]
    name: str
    origin: Origin | None


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Note a parameter that a module registers inside of `init`: torch calls this on every thread, as long as any is inside."""
    if not _here.inits or param is None or _stays_uncut(param):
        return
    key, nbytes = id(module), _here.nbytes
    if nbytes[_ALL] - nbytes.get(key, 0) > _WHOLE_NBYTES:
        cut_whole(module)
    origin, wanted = None, casts_to(param.dtype, _here.inits[0][1])  # of the outermost context
    if wanted is not param.dtype:
        origin = Origin(param)
        set_data(param, param.detach().to(wanted))
        origin.slice = torch_compat.storage_id(param.untyped_storage())
    _mark(param)
    _here.born.append(_Born(weakref.ref(module), name, origin))
    _here.noted.add(id(param))
    for each in (key, _ALL):  # also of modules that are thrown away: ranks free them at different times
        nbytes[each] = nbytes.get(each, 0) + param.nbytes


def _module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Note the parameters in a module that were copied from others made inside: `copy.deepcopy` registers none."""
    for each in submodule.modules() if _here.inits and submodule is not None else ():
        for attribute, param in own_parameters(each).items():
            if param is not None and is_born(param) and id(param) not in _here.noted:
                _registered(each, attribute, param)


def is_born(param: Tensor) -> bool:
    """Return whether a parameter was made inside of `init`, and is whole."""
    return isinstance(param.__dict__.get(_LATER[0]), _Later)


def _mark(param: nn.Parameter) -> None:
    for verb in _LATER:
        param.__dict__[verb] = _Later(weakref.ref(param), verb)


class _Later(NamedTuple):
    """A method of one whole parameter. What only sharded ones have cuts those that are whole (collective), and calls theirs."""

    param: weakref.ref[nn.Parameter]
    verb: str

    def __call__(self, *memo: dict) -> Tensor:
        param: Any = self.param()
        if self.verb == "__deepcopy__":
            copy = nn.Parameter.__deepcopy__(param, *memo)
            _mark(copy)
            return copy
        cut_whole()
        if is_born(param):  # of no module any more, or left whole by an error
            return param.detach().clone() if self.verb == "full_tensor" else param.detach()
        return getattr(param, self.verb)()

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()  # no part of a pickled parameter


def cut_whole(around: nn.Module | None = None) -> None:
    """Cut the parameters that are whole inside of `init`, with rank 0's values (collective if there are any).

    around: the module whose constructor is running; its own parameters stay whole.
    """
    now = [] if _here.holds else [born for born in _here.born if born.module() is not around]
    if now:
        _here.born = [born for born in _here.born if born.module() is around]
        left = _here.nbytes.get(id(around), 0)
        _here.nbytes.clear()
        _here.nbytes.update({id(around): left, _ALL: left})
        _here.noted.clear()
        with contextlib.suppress(ModelMismatch):
            return _cut_present(_here.inits[0][0], _places(now))
        collect_garbage()  # some ranks may have freed modules in reference cycles, which others still have
        _cut_present(_here.inits[0][0], _places(now))


def _places(born: list[_Born]) -> list[tuple[nn.Module, str, Origin | None]]:
    return [(module, each.name, each.origin) for each in born if (module := each.module()) is not None]


def cut_module(module: nn.Module, comm: Comm) -> None:
    """Cut the parameters of an existing module as if it had been made under `init`, with rank 0's values (collective)."""
    _cut_present(comm, [(each, name, None) for each in module.modules() for name in own_parameters(each)])


def _cut_present(comm: Comm, places: list[tuple[nn.Module, str, Origin | None]]) -> None:
    """Cut the parameters that modules have under these names, with rank 0's values (collective if any is to be cut)."""
    last = {(id(m), n): (m, n, origin) for m, n, origin in places}  # of a parameter that another has replaced, the other
    there = [(m, n, own_parameters(m)[n], origin) for m, n, origin in last.values() if own_parameters(m).get(n) is not None]
    whole = {id(p): (f"{type(m).__name__}.{n}", p) for m, n, p, _ in there if not _stays_uncut(p)}
    if whole and not comm.imagined:
        check_alike(comm, {"parameter": [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in whole.values()]}, "zs.init")
        agree_on_values(comm, list(whole.values()), "zs.init: compare values")
    for name, param in whole.values():
        if param.grad is not None:
            raise ShardedAccessError(f"{name} takes no gradient before zs.shard(model, optimizer).")
    cut: dict[int, nn.Parameter | None] = {}
    for module, name, param, origin in there:
        if id(param) not in cut:
            cut[id(param)] = None if _stays_uncut(param) else _cut(comm, module, name, param, origin)
        if cut[id(param)] is not None:
            own_parameters(module)[name] = cut[id(param)]


def _cut(comm: Comm, module: nn.Module, name: str, param: nn.Parameter, origin: Origin | None) -> nn.Parameter:
    """Cut a parameter, and return it: the same object."""
    home = BirthHome(comm, f"{type(module).__name__}.{name}", param.numel())
    given = {key: value for key, value in attributes_of(param).items() if key not in _LATER}
    local = param.detach().reshape(-1)[home.start : home.stop].clone()
    if origin is None or origin.slice != torch_compat.storage_id(param.untyped_storage()):  # the program gave it other memory
        origin = Origin(param)
    origin.slice = torch_compat.storage_id(local.untyped_storage())
    home.origin = origin
    born = ShardedParameter(local, tuple(param.shape), home, param.requires_grad)
    if not swap(param, born):  # a weak reference, or a graph, has the user's object
        exchange(param, born)
    param.__dict__.update(given)  # the user's object is kept, so that registering it again makes a tie
    return param


@contextlib.contextmanager
def sharding_births(group: Comm, dtype: torch.dtype | None) -> Iterator[None]:
    """Shard the parameters that modules make inside over the ranks of a Comm (collective; api.py:init describes it)."""
    with contextlib.ExitStack() as stack:
        if not _here.inits:
            stack.enter_context(generators_of_rank_0(group, "zs.init: seeds"))
        with _hook.lock:
            if _hook.contexts == 0:  # one hook for all threads: torch iterates its hooks while other threads register parameters
                _hook.handles = (
                    register_module_parameter_registration_hook(_registered),
                    register_module_module_registration_hook(_module_registered),
                )
            _hook.contexts += 1
        _here.inits.append((group, dtype))
        try:
            yield
            if len(_here.inits) == 1:
                cut_whole()
        finally:
            _here.inits.remove((group, dtype))
            if not _here.inits:  # not empty after an error
                for module, attribute, _ in _places(_here.born):
                    for verb in _LATER:
                        vars(own_parameters(module).get(attribute, module)).pop(verb, None)
                _here.born.clear()
                _here.noted.clear()
                _here.nbytes.clear()
                _here.nbytes[_ALL] = 0
            with _hook.lock:
                _hook.contexts -= 1
                if _hook.contexts == 0:
                    for handle in _hook.handles:
                        handle.remove()


@contextlib.contextmanager
def generators_of_rank_0(comm: Comm, label: str, in_turn: bool = False) -> Iterator[None]:
    """Give torch's generators of all ranks rank 0's states; the end restores those of the other ranks (collective).

    Ranks that are threads share their process's generators: they keep them, or, if `in_turn`, run what is inside one after another,
    each from rank 0's states. It may then not be collective.
    """
    if comm.control.alone:
        yield
        return
    generators = [torch.default_generator]
    if comm.device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    with _turn if in_turn else contextlib.nullcontext():  # another thread may be between its `set_state` and its draw
        mine = [generator.get_state() for generator in generators]
    said = b"".join(bytes(state.numpy()) for state in mine)
    everyone = exchange_values(comm, (zlib.crc32(said), process_identity()), label)
    threads = len({told[1] for told in everyone}) < len(everyone)
    if not in_turn if threads else len({told[0] for told in everyone}) == 1:  # the second: all are equal already
        yield
        return
    given = comm.exchange(said if comm.rank == 0 else b"", f"{label}: the generators of rank 0")[0]
    with _turn if threads else contextlib.nullcontext():
        for generator, state in zip(generators, mine, strict=True):
            generator.set_state(torch.frombuffer(bytearray(given[: state.numel()]), dtype=torch.uint8))
            given = given[state.numel() :]
        try:
            yield
        finally:
            other = everyone[comm.rank][0] != everyone[0][0]  # ranks with rank 0's seed go on with it
            for generator, state in zip(generators if other else [], mine, strict=False):
                generator.set_state(state)


_turn = threading.Lock()  # of ranks that are threads and draw from one generator


class _Hook:
    """torch's hooks, which note parameters, and the number of `init` contexts, on all threads, that need them."""

    lock = threading.Lock()
    contexts = 0
    handles: tuple[Any, ...] = ()


class _Here(threading.local):
    """State of a thread. inits: the `init` contexts that it is in, as (comm, dtype), the outermost first.

    born: the parameters that are whole, noted: their ids; nbytes: their bytes, by id of the module, _ALL: of all. holds: number of `whole_births` that it is in,
    inside of which none is cut.
    """

    def __init__(self) -> None:
        self.inits: list[tuple[Comm, torch.dtype | None]] = []
        self.born: list[_Born] = []
        self.noted: set[int] = set()
        self.nbytes: dict[int, int] = {_ALL: 0}
        self.holds = 0


_hook, _here = _Hook(), _Here()


@contextlib.contextmanager
def whole_births() -> Iterator[None]:
    """Delay the cut of parameters that are registered inside to its end (collective if there are any), with rank 0's values.

    Inside zs.gathered a program makes new parameters of gathered ones, and computes with both (torch.nn.utils.weight_norm).
    """
    _here.holds += 1
    try:
        yield
    finally:
        _here.holds -= 1
    if not _here.holds:  # the outermost `whole_births` cuts them
        cut_whole()


# set around a zs.shard that allocates parameters and buffers of the meta device, and leaves their values to the program
values_to_come: ContextVar[bool] = ContextVar("values to come", default=False)


def give_values(model: nn.Module, device: torch.device, made_on_meta: set[str], stored: Container[str] | None) -> None:
    """Allocate meta-device buffers, and initialise buffers and parameters that get no values from a checkpoint.

    made_on_meta: names of meta-device parameters. stored: names in the checkpoint, which has all parameters; None: there is none.
    """
    undefined = []  # names of buffers
    for prefix, module in model.named_modules():
        for name, buffer in own_buffers(module).items():
            if buffer is not None and buffer.is_meta:
                own_buffers(module)[name] = torch.empty_like(buffer, device=device)
                undefined.append(f"{prefix}.{name}" if prefix else name)
    if stored is not None:
        made_on_meta, undefined = set(), [name for name in undefined if own_name(model, name) not in stored]
    # a dry run has no values
    if (undefined or made_on_meta) and not values_to_come.get() and not isinstance(torch.empty(0), torch_compat.FakeTensor):
        initialise(model, made_on_meta, undefined)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield every module once, each after its children."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def initialise(model: nn.Module, meta_names: set[str], undefined_buffers: list[str]) -> None:
    """Initialise a model that was built on the meta device, in the order in which its constructor would have.

    First, modules with `reset_parameters` that hold any of these tensors are reset, children before parents, as in constructors.
    Then `_init_weights`, if the model has it, is applied to every module, as constructors commonly do last (if only buffers are
    undefined, to the modules that hold them). Raise ShardedAccessError for parameters and buffers that nothing initialises.
    """
    covered: set[str] = set()
    wanted = meta_names | set(undefined_buffers)
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}  # ties: one name
    for module in _children_first(model, set()):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            continue
        inside = {names[id(tensor)] for tensor in (*module.parameters(), *module.buffers())}
        if inside.isdisjoint(wanted):  # its values come from elsewhere: do not overwrite them
            continue
        with torch.no_grad():
            reset()
        covered |= inside
    if wanted and (own := initialiser(model)) is not None:
        covered |= meta_names | _initialise_by(own, model, bool(meta_names), set(undefined_buffers))
    missing = sorted(wanted - covered)
    what = f"nothing initialises {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''} of this meta-device model"
    if meta_names.intersection(missing):
        raise ShardedAccessError(
            f"{what}. Give the module a reset_parameters(), pass weights=<a checkpoint>, or build under zs.init()."
        )
    if missing:
        raise ShardedAccessError(
            f"{what}: buffers that the checkpoint does not hold (one that is not persistent is in none). Build under "
            "zs.init(stage=3) instead, which makes buffers as ever; or give the module a reset_parameters() that writes them, or assign "
            "them (module.name = tensor) before zs.shard."
        )


@torch.no_grad()
def _initialise_by(own: Callable[[nn.Module], object], model: nn.Module, everywhere: bool, undefined: set[str]) -> set[str]:
    """Apply a model's method `own` to all modules, or to those with undefined buffers; return the buffers that it wrote."""
    holders = {id(model.get_submodule(name.rpartition(".")[0])) for name in undefined}
    before = {name: (buffer, writes_of(buffer)) for name, buffer in model.named_buffers() if name in undefined}
    for module in model.modules() if not everywhere else ():
        if id(module) in holders:
            own(module)
    if everywhere:
        model.apply(own)  # type: ignore[arg-type]
    after = dict(model.named_buffers())
    return {name for name, (buffer, writes) in before.items() if after.get(name) is not buffer or writes_of(buffer) != writes}


def writes_of(tensor: Tensor) -> int:
    """Return the version counter of a tensor, 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else torch_compat.version(tensor)
