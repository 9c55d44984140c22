"""`zs.gathered`: makes parameters ordinary and whole inside a `with` block.

    at rest     the user's object, in the modules as well, is the sharded parameter
    gathered    the same object is an ordinary Parameter over a copy (the sharded one waits in another object)

On exit objects are exchanged back, and ranks compare, in one exchange, how the copies were changed. Written values are kept
only if announced: equal ones of all ranks (write=True), or those of one rank for all (modifier_rank). Any other change
raises on every rank and leaves the model as it was. Parameters made under `zs.init` can be gathered as well.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.comm.base import DirectComm
from ..engine.comm.messages import exchange_values
from ..engine.hooks import at_rest
from ..engine.ledger import GATHERED
from ..engine.parameter import ParamHome
from ..engine.shard_model import write_value
from ..engine.unit import Unit
from ..engine.verbs import begin
from ..errors import ConfigError, ShardedAccessError, ShardedWriteError, ZeroshardError
from ..tensor.attributes import attributes_of, whole_now
from ..utils import torch_compat
from ..utils.aligned import host_bytes
from ..utils.torch_compat import exchange
from .init_context import BirthHome, cut_whole, whole_births, writes_of

_BROADCAST_NBYTES = 1 << 26  # bytes of one rank's values in one exchange


@contextlib.contextmanager
def gathered(what: Any, *, write: bool = False, modifier_rank: int | None = None) -> Iterator[Any]:
    """Inside this context parameters are ordinary, whole tensors on every rank (collective). One unit at a time is gathered to
    copy them.

    Args:
        what: a module, a parameter, or an iterable of parameters (None, duplicates and ordinary tensors may be among them). Every
            rank gives the same ones, in any order. Parameters made under `zs.init` count as well.
        write: keep the values written inside. Every rank must write the same values.
        modifier_rank: keep, on all ranks, the values that this rank writes inside; writes of other ranks are dropped. Of divided
            experts (an axis ep) it is a rank among those with the same experts.

    Without `write` and `modifier_rank` a write raises ShardedWriteError on exit, on every rank, and nothing is kept. Inside of a
    running forward that takes gradients, operations compute with the gathered parameters already, gradients included. Parameters
    that are made inside, under `zs.init`, are whole until the end.
    """
    cut_whole()
    module = isinstance(what, nn.Module)
    if module:
        params = list(what.parameters())
        if any(map(is_gathered, params)):
            raise ZeroshardError("zs.gathered inside zs.gathered: this module, or a part of it, is gathered already.")
    else:
        given = list(what) if isinstance(what, Iterable) and not isinstance(what, Tensor) else [what]
        params = [each for each in given if each is not None]
        for each in params:
            if not isinstance(each, Tensor):
                expected = "a module, a parameter or an iterable of parameters"
                raise TypeError(f"zs.gathered: expected {expected}, got {type(each).__name__}.")
    gathering = Gathering(params, write=write, modifier_rank=modifier_rank)
    if module and not gathering.found:
        raise ZeroshardError("zs.gathered: no parameter of this module is sharded; call zs.shard first.")
    with whole_births():
        gathering.open()
        try:
            yield what if isinstance(what, (nn.Module, Tensor)) else params
        except BaseException:
            gathering.close()
            raise
        gathering.close()
        refuse(gathering.agree())
        gathering.keep()


def is_gathered(param: Tensor) -> bool:
    """Return whether `zs.gathered` has made a parameter whole."""
    return id(param) in whole_now


def home_of(param: Any) -> ParamHome | BirthHome | None:
    """Return the home of a parameter at rest, of a sharded model or born under `zs.init`; None for any other tensor."""
    home = getattr(param, "_home", None)
    return home if isinstance(param, nn.Parameter) and isinstance(home, (ParamHome, BirthHome)) else None


class Gathering:
    """Parameters that are whole between `open` and `close`; then `agree` and, if it found no problem, `keep`."""

    def __init__(self, params: Iterable[Tensor], *, write: bool = False, modifier_rank: int | None = None) -> None:
        self.write, self.modifier_rank = write, modifier_rank
        self._writes = write or modifier_rank is not None
        self._wholes: list[_Whole] = []
        self._opened: list[tuple[Unit, bool, int]] = []  # (unit, whether it was pinned before, bytes of its copies)
        self._told: list[tuple[list[_Whole], list[list[Any]]]] = []  # by group of ranks: parameters, `_Whole.told` by rank
        params = list({id(param): param for param in at_rest(params)}.values())
        again = [whole_now[id(param)].home.name for param in params if is_gathered(param)]
        if again and self._writes:
            raise ZeroshardError(f"zs.gathered inside zs.gathered: {again[0]} is gathered already. Announce the write there.")
        # sharded parameters, in the same order on every rank
        self.found: list[nn.Parameter] = sorted(filter(home_of, params), key=_order)  # type: ignore[arg-type]
        homes = [home_of(param) for param in self.found]
        for home in homes:
            world_size = _everyone(home).world_size
            if write and modifier_rank is not None:
                raise ConfigError("zs.gathered: expected write=True (all ranks write) or modifier_rank=... (one does), got both.")
            if modifier_rank is not None and modifier_rank not in range(world_size):
                raise ConfigError(f"modifier_rank: expected None or a rank from 0 to {world_size - 1}, got {modifier_rank!r}.")
        runtimes = [home.group.runtime for home in homes if isinstance(home, ParamHome)]
        for runtime in {id(runtime): runtime for runtime in runtimes}.values():
            begin(runtime, "zs.gathered")
            rounded = runtime.shows_masters and any(isinstance(home, ParamHome) and home.shows_master for home in homes)
            if self._writes and rounded:
                raise ZeroshardError(
                    "zs.gathered with a write, of a model of zeroshard.fsdp: the copies are rounded to the dtype of computation. Write to the "
                    "parameters themselves, under torch.no_grad()."
                )
            if self._writes and runtime.in_forward:
                raise ZeroshardError("zs.gathered inside a forward or a backward of the model: write before it, or after it.")

    def open(self) -> None:
        """Gather copies, and exchange the parameters' objects for them (collective)."""
        units: dict[int, list[nn.Parameter]] = {}
        try:
            for param in self.found:
                home = home_of(param)
                if isinstance(home, ParamHome):
                    units.setdefault(id(home.group.unit), []).append(param)
                else:
                    self._wholes.append(_Whole(param, param.gathered(), self))  # type: ignore[attr-defined]
            for params in units.values():
                self._open_unit(params)
        except BaseException:
            self.close()
            raise

    def _open_unit(self, params: list[nn.Parameter]) -> None:
        homes: list[ParamHome] = [param._home for param in params]  # type: ignore[attr-defined]
        unit, runtime = homes[0].group.unit, homes[0].group.runtime
        busy = unit.depth > 0 or unit.in_backward
        if unit.sharded and not self._writes:  # parameters that are whole at rest can be read as they are
            homes = [home for home in homes if home.group.values.sharded]
            params = [home.group.params[home.index] for home in homes]
        # inside a forward that takes gradients, operations use the gathered parameters already
        if not params or (runtime.in_forward and torch.is_grad_enabled()):
            return
        if not busy:
            unit.entries.swap_out()
        unit.wait_for_unshard()
        views = [home.group.values.views[home.index].detach().clone() for home in homes]
        wholes = [_Whole(param, view, self) for param, view in zip(params, views, strict=True)]
        self._wholes += wholes
        if not busy:
            unit.reshard()
        nbytes = sum(view.nbytes for view in views)
        unit.groups[0].values.ledger.enter(GATHERED, nbytes)  # beside the unit's own gathered memory
        self._opened.append((unit, unit.pinned, nbytes))
        # if only some of a unit's parameters are made whole, to be read, forwards still gather the unit
        whole = self._writes or not unit.sharded or len(params) == sum(len(group.specs) for group in unit.gathered)
        unit.pinned = unit.pinned or (whole and not busy)

    def close(self) -> None:
        """Exchange the objects back for the sharded parameters, without keeping any written value. Not collective."""
        for unit, pinned, nbytes in reversed(self._opened):
            unit.pinned = pinned
            unit.groups[0].values.ledger.strike(GATHERED, nbytes)
        self._opened = []
        for whole in self._wholes:
            whole.close()

    def agree(self) -> dict[str, list[str]]:
        """Return problem -> ["name (on rank r)", ...] for copies whose values must not be kept (collective)."""
        named: dict[str, list[str]] = {}
        comms = {id(comm): comm for comm in (_everyone(whole.home) for whole in self._wholes)}
        for key, comm in comms.items():
            wholes = [whole for whole in self._wholes if id(_everyone(whole.home)) == key]
            befell = [(what, whole.home.name) for whole in wholes for what in whole.problems]
            problems = [(what, name) for what, name in befell if not (self._writes and what == "written")]
            tells = self.write or self.modifier_rank == comm.rank
            mine = [whole.told(changed=not self.write) if tells else None for whole in wholes]
            label = f"end of gathered(write={self.write}, modifier_rank={self.modifier_rank})"
            everyone = exchange_values(comm, (problems, mine), label)
            for rank, (theirs, _) in enumerate(everyone):
                for what, name in theirs:
                    named.setdefault(what, []).append(f"{name} (on rank {rank})")
            told = [told for _, told in everyone]
            if self.write and not named:
                _check_equal(wholes, told)
            self._told.append((wholes, told))
        return named

    def keep(self) -> None:
        """Write the announced values to the sharded parameters (collective)."""
        for wholes, told in self._told if self._writes else ():
            comm = _everyone(wholes[0].home)
            comm.fence_write()
            for number, whole in enumerate(wholes):
                if self.write:
                    whole.take(whole.copy)
                elif self.modifier_rank is not None and told[self.modifier_rank][number] is not None:
                    whole.take(_from_rank(comm, self.modifier_rank, whole, told[self.modifier_rank][number]))
            comm.fence_read()


def _everyone(home: Any) -> DirectComm:
    """Return the communicator of all ranks that hold the parameter: its slices, and the same slices in other replicas."""
    return home.group.topology.control if isinstance(home, ParamHome) else home.comm


def _order(param: nn.Parameter) -> tuple[int, int, int]:
    """Return a sort key that is the same on every rank, in whatever order parameters were given."""
    home: Any = home_of(param)
    return (1, home.group.values.number, home.index) if isinstance(home, ParamHome) else (0, home.number, 0)


class _Whole:
    """A parameter made whole. copy: the ordinary parameter, in `param` until `close`. problems: keys of _REMEDIES."""

    def __init__(self, param: nn.Parameter, value: Tensor, gathering: Gathering) -> None:
        self.param, self.gathering = param, gathering
        home: Any = home_of(param)
        self.home = home
        self.copy = nn.Parameter(value, requires_grad=param.requires_grad)
        self.copy.__dict__.update(attributes_of(param))
        self.problems: list[str] = []
        self._open = [True]
        if self.copy.requires_grad:
            name, opened = home.name, self._open

            def refuse_late(_: Tensor) -> None:  # it must refer neither to `self` nor to the copy: see engine/hooks.py
                if not opened:
                    raise ShardedAccessError(
                        f"{name}: a backward reached what was computed with it inside zs.gathered: the gradient is that of a copy, and "
                        "would be lost. Compute it in the model's forward, or outside of zs.gathered with `p.full_tensor()`: gradients "
                        "go through both."
                    )

            self.copy.register_hook(refuse_late)
        self._version, self._shape = writes_of(self.copy), value.shape
        tells = gathering.modifier_rank == _everyone(self.home).rank
        self._sum = zlib.crc32(host_bytes(self.copy)) if tells else None
        exchange(param, self.copy)
        whole_now[id(param)] = self

    def close(self) -> None:
        """Exchange the objects back, and record in `problems` how the copy was changed."""
        if not self._open:
            return
        self._open.clear()
        del whole_now[id(self.param)]
        exchange(self.param, self.copy)
        copy, home = self.copy, self.home
        if isinstance(home, BirthHome):
            local = self.param._held  # type: ignore[attr-defined]
        else:
            local = home.group.values.rest.load(home.begin, home.end)
            spec = home.group.specs[home.index]
            if any(torch_compat.own_parameters(owner).get(attribute) is not self.param for owner, attribute in spec.owners):
                self.problems.append("replaced")
            elif tuple(copy.shape) != spec.shape:
                self.problems.append("resized")
            for owner, attribute in spec.owners:
                torch_compat.own_parameters(owner)[attribute] = self.param
        if not self.problems and copy.grad is not None:
            self.problems.append("given a gradient")
        if not self.problems:
            mine = copy.detach().reshape(-1)[home.start : home.stop]
            # a quantizing communicator has gathered it, so the copy differs from the slice at rest
            rounded = not isinstance(home, BirthHome) and home.group.values.comm is not home.group.comm
            alike = rounded or not mine.numel() or bytes(host_bytes(mine)) == bytes(host_bytes(local))
            same = copy.shape == self._shape and alike
            if writes_of(copy) != self._version or not same:
                self.problems.append("written")
        for key, value in attributes_of(copy).items():
            setattr(self.param, key, value)
        if self.param.requires_grad is not copy.requires_grad:
            self.param.requires_grad_(copy.requires_grad)

    def told(self, changed: bool) -> tuple[list[int], str, int] | None:
        """Return shape, dtype and checksum of the copy, for the other ranks; with `changed`, None if nothing was written."""
        found = zlib.crc32(host_bytes(self.copy))
        if changed and not self.problems and found == self._sum:  # this rank has written nothing
            return None
        return list(self.copy.shape), str(self.copy.dtype).removeprefix("torch."), found

    @torch.no_grad()
    def take(self, value: Tensor) -> None:
        """Write the whole `value` to the sharded parameter."""
        home = self.home
        if isinstance(home, ParamHome):
            write_value(home.group, home.index, value)
            if home.group.values.replicated:
                home.group.put_whole(home.index)
        elif (value.shape, value.dtype) == (self.param.shape, self.param.dtype):
            self.param.copy_(value)
        else:  # the shape and dtype of a parameter may change until zs.shard
            self.param.data = value.to(self.param.device)


_REMEDIES = {
    "written": "Announce it: zs.gathered(module, write=True).",
    "replaced": "Write in place (p.copy_(...)); to exchange parameters zs.close(model) first.",
    "resized": "zs.close(model) first, resize, then zs.shard() it again.",
    "given a gradient": "Copies have it, not the model. Run forward and backward outside; for a loss of the parameters use `p.full_tensor()`.",
}


def refuse(problems: dict[str, list[str]]) -> None:
    """Raise ShardedWriteError for the first problem that `Gathering.agree` found."""
    for what, names in problems.items():
        how = " without write=True" if what == "written" else ""
        raise ShardedWriteError(f"{what} inside zs.gathered(){how}: {', '.join(names[:6])}. Nothing was kept. {_REMEDIES[what]}")


def _check_equal(wholes: list[_Whole], told: list[list[Any]]) -> None:
    for whole, given in zip(wholes, zip(*told, strict=True), strict=True):
        ranks = [rank for rank, value in enumerate(given) if value != given[0]]
        if ranks:
            raise ShardedWriteError(
                f"{whole.home.name}: ranks {ranks} wrote other values than rank 0 inside zs.gathered("
                "write=True). Write the same on every rank (same seed), or let one write (modifier_rank=0). Nothing was kept."
            )


def _from_rank(comm: DirectComm, rank: int, whole: _Whole, told: tuple[list[int], str, int]) -> Tensor:
    """Return, on the host of every rank, the value that a rank has written into its copy (collective)."""
    shape, dtype, _ = told
    value = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    given = host_bytes(whole.copy) if comm.rank == rank else b""
    content = host_bytes(value)
    label = f"what rank {rank} wrote into {whole.home.name}"
    for start in range(0, value.nbytes, _BROADCAST_NBYTES):
        part = comm.exchange(bytes(given[start : start + _BROADCAST_NBYTES]), label)[rank]
        content[start : start + len(part)] = part
    return value
