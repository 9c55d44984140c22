"""Construction of models whose parameters are sharded from the start: no rank ever holds the whole model.

    with zs.init(stage=3): model = Net()      each parameter is cut as soon as it is registered
    zs.shard(meta_model, opt, weights=dir)    built on the meta device, slices streamed from safetensors
    zs.shard(meta_model, opt)                 built on the meta device, initialised module by module

Random initialisation draws one whole parameter at a time and keeps a slice of it, so that the generator advances as on
one process and the values are equal bit for bit. Peak memory: one whole parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..comm import backend_select
from ..comm.base import Comm
from ..comm.process_group import talking_device
from ..config import Config, Placement
from ..errors import ShardedAccessError, ShardedWriteError
from ..tensor.attributes import attributes_of, whole_now
from ..tensor.home import Home
from ..tensor.sharded_tensor import ShardedParameter, ShardedTensor, set_data
from ..utils import torch_compat
from ..utils.dtypes import casts_to
from ..utils.module_names import own_name
from ..utils.torch_compat import own_buffers, own_parameters, swap, tree_map_only
from ..utils.transformers_compat import initialiser
from .parameter import gather_flat
from .rank_consistency import agree_on_values
from .shared_storage import Origin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import ShardOptions

_numbers = itertools.count()  # number of births so far: in the same order on every rank, also if ranks are threads


class BirthHome(Home):
    """Home of a parameter made under zs.init, until zs.shard: the flattened elements are cut evenly over ranks."""

    def __init__(self, comm: Comm, name: str, numel: int) -> None:
        self.comm, self.name, self.number = comm, name, next(_numbers)
        self.origin: Origin | None = None
        self.numel, self.part = numel, -(-numel // comm.world_size)
        self.start, self.stop = self.cut(comm.rank)

    def cut(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's elements of the flattened parameter; (0, 0) if it has none."""
        start = rank * self.part
        return (start, min(start + self.part, self.numel)) if start < self.numel else (0, 0)

    def gather_local(self, local: Tensor) -> Tensor:
        return gather_flat(self.comm, local, f"full tensor of {self.name}")

    def copy_of(self, param: ShardedParameter) -> ShardedParameter:
        """Return another parameter of the same value, cut alike."""
        home = BirthHome(self.comm, self.name, param.numel())
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
            args, kwargs = tree_map_only(ShardedTensor, lambda tensor: tensor.detach().full_tensor(), (args, kwargs))
            return func(*args, **kwargs)

    def assign(self, param: Tensor, value: Tensor) -> None:
        """Carry out `param.data = value`, of any shape and dtype: a sharded value is used as it is, a whole one is cut."""
        if not isinstance(value, ShardedTensor):
            home = BirthHome(self.comm, self.name, value.numel())
            local = value.detach().reshape(-1)[home.start : home.stop].clone()
            value = ShardedTensor(local, tuple(value.shape), home)
        set_data(param, value)
        param._held, param._home = value._local, value._home  # type: ignore[attr-defined]


def _stays_uncut(param: Tensor) -> bool:
    """Return whether a parameter is not cut: on the meta device, without a shape yet, cut already, or inside zs.gathered."""
    uncut = (ShardedTensor, torch_compat.UninitializedTensorMixin)
    return param.is_meta or isinstance(param, uncut) or id(param) in whole_now


def _born(comm: Comm, module: nn.Module, name: str, param: nn.Parameter | None, dtype: torch.dtype | None) -> nn.Parameter | None:
    """Cut a parameter, and return it: the same object where torch allows that. Return None if it is not to be cut."""
    if param is None or _stays_uncut(param):
        return None
    home, given = BirthHome(comm, f"{type(module).__name__}.{name}", param.numel()), attributes_of(param)
    local = param.detach().reshape(-1)[home.start : home.stop].clone()
    local = local.to(casts_to(local.dtype, dtype))
    home.origin = Origin(param, local)
    born = ShardedParameter(local, tuple(param.shape), home, param.requires_grad)
    if swap(param, born):  # keeps the user's object, so that registering it again makes a tie
        born = param  # type: ignore[assignment]
    born.__dict__.update(given)
    return born  # type: ignore[return-value]


def cut_module(module: nn.Module, comm: Comm) -> None:
    """Cut the parameters of an existing module as if it had been made under `init`, with rank 0's values (collective)."""
    _cut_present(comm, [(each, name, None) for each in module.modules() for name in own_parameters(each)])


def _cut_present(comm: Comm, places: list[tuple[nn.Module, str, torch.dtype | None]]) -> None:
    """Cut the parameters that modules have under these names, with rank 0's values (collective if any is to be cut)."""
    there = [(m, n, own_parameters(m)[n], dtype) for m, n, dtype in places if own_parameters(m).get(n) is not None]
    whole = {id(p): (f"{type(m).__name__}.{n}", p) for m, n, p, _ in there if not _stays_uncut(p)}
    if whole:
        agree_on_values(comm, list(whole.values()))
    cut: dict[int, nn.Parameter | None] = {}
    for module, name, param, dtype in there:
        if id(param) not in cut:
            cut[id(param)] = _born(comm, module, name, param, dtype)
        if cut[id(param)] is not None:
            own_parameters(module)[name] = cut[id(param)]


@contextlib.contextmanager
def init(
    config: Config | None = None, *, comm: object = None, dtype: torch.dtype | None = None, **options: Unpack[ShardOptions]
) -> Iterator[None]:
    """Inside this context each parameter is sharded as soon as it is made, so that no rank holds the whole model.

    It is for stages that shard parameters. Give the same stage (and comm) to zs.shard afterwards. Every rank must have the same
    seed here; values then equal, bit for bit, those of one process with that seed. Parameters are made on torch's default device
    (`with torch.device("cuda"), zs.init(...)`); a model made on the host can be moved by `model.cuda()` before zs.shard. Source:
    ZeRO-Infinity, arXiv 2104.07857, section 7.2.

    Args:
        dtype: dtype of floating-point parameters, in which they are initialised; None: as the model makes them.
    """
    config = Config.build(config, **options)
    group = backend_select.current(comm, talking_device(torch.get_default_device()), config.stall_timeout_s)  # type: ignore[arg-type]
    if config.row.parameter is not Placement.SHARDED:
        yield
        return
    with _hook.lock:
        if _hook.contexts == 0:  # one hook for all threads: torch iterates its hooks while other threads register parameters
            _hook.handle = register_module_parameter_registration_hook(_cut_registered)
        _hook.contexts += 1
    _here.inits.append((group, dtype))
    try:
        yield
    finally:
        _here.inits.remove((group, dtype))
        with _hook.lock:
            _hook.contexts -= 1
            if _hook.contexts == 0:
                _hook.handle.remove()


def _cut_registered(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
    """Cut a parameter that a module registers inside of `init`: torch calls this on every thread, as long as any is inside."""
    if not _here.inits:
        return None
    comm, dtype = _here.inits[0]  # the outermost context; what it has cut, an inner one would leave as it is
    if _here.late is None:
        return _born(comm, module, name, param, dtype)
    _here.late.append((comm, module, name, dtype))
    return None


class _Hook:
    """torch's hook, which cuts parameters, and the number of `init` contexts, on all threads, that need it."""

    lock = threading.Lock()
    contexts = 0
    handle: Any = None


class _Here(threading.local):
    """State of a thread. inits: the `init` contexts that it is in, as (comm, dtype).

    late: parameters that it cuts at the end of `whole_births`, as (comm, module, name, dtype); None outside of it.
    """

    def __init__(self) -> None:
        self.inits: list[tuple[Comm, torch.dtype | None]] = []
        self.late: list[tuple[Comm, nn.Module, str, torch.dtype | None]] | None = None


_hook, _here = _Hook(), _Here()


@contextlib.contextmanager
def whole_births() -> Iterator[None]:
    """Delay the cut of parameters that are registered inside to its end (collective if there are any), with rank 0's values.

    Inside zs.gathered a program makes new parameters of gathered ones, and computes with both (torch.nn.utils.weight_norm).
    """
    if _here.late is not None:  # the outermost `whole_births` cuts them
        yield
        return
    _here.late = []
    try:
        yield
        late = _here.late
    finally:
        _here.late = None
    for comm in {id(each[0]): each[0] for each in late}.values():
        _cut_present(comm, [(module, name, dtype) for group, module, name, dtype in late if group is comm])


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
    if (undefined or made_on_meta) and not isinstance(torch.empty(0), torch_compat.FakeTensor):  # a dry run has no values
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
