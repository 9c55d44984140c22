"""WrappedComm: a communicator that calls another one, for programs that count, check or delay what ranks send each other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from ..engine.comm import DirectComm, Group

Method = TypeVar("Method", bound=Callable[..., Any])
Wrapped = TypeVar("Wrapped", bound="WrappedComm")


def passed_on(method: Method) -> Method:
    """Return a method that calls the one of the same name of `self.comm`."""

    @functools.wraps(method, updated=())  # not that it is abstract
    def pass_on(self: WrappedComm, *args: object, **options: object) -> Any:
        return getattr(self.comm, method.__name__)(*args, **options)

    return cast(Method, pass_on)


class WrappedComm(DirectComm):
    """A communicator that passes every call on to another one, `comm`, of the same ranks; a subclass overrides some of the calls.

    One that a program registers (`zeroshard.seam.register`) is made as `cls(comm)`, anew for each zs.shard, zs.init and other use of its name; zs.shard calls

        gather      to fill a whole tensor with the shards of all ranks: parameters, at the start of forward and backward
        reduce      to sum gradients, each rank its slice; `collect` where a codec packs them, and with sums="backend"
                    `reduce_scatter` and `all_reduce`
        all_to_all  to send each rank a part of a tensor (activations, tokens of experts)
        exchange    and `compare`, to agree on short messages; they block

    A method that is overridden must call that of `self.comm`, the same calls in the same order on every rank, and return what it
    returns. All but the last return a Collective, which runs until its `wait`; `Comm` describes their arguments. What
    `comm` calls itself does not come by here. Subgroups, which meshes, `shard_size` and hosts make, are copies of this object:
    they share its attributes, such as a dict of counts. Threads: as `comm`'s, one at a time.
    """

    def __init__(self, comm: DirectComm) -> None:
        self._wrap(comm)

    def _wrap(self, comm: DirectComm) -> None:
        self.comm, self.parts = comm, (comm,)  # of `parts` are open, release, forget, invalidate and holds
        for name in Group.__annotations__:  # rank, world_size, device, ...
            setattr(self, name, getattr(comm, name))
        self.desk, self.stall_timeout_s = comm.desk, comm.stall_timeout_s
        self.pending, self.progress = comm.pending, comm.progress

    def _around(self: Wrapped, comm: DirectComm) -> Wrapped:
        other = copy.copy(self)
        other._wrap(comm)
        return other

    def subgroup(self: Wrapped, parts: Sequence[Sequence[int]], apart: bool = False) -> Wrapped:
        return self._around(self.comm.subgroup(parts, apart))

    @property
    def local(self) -> DirectComm | None:  # type: ignore[override]
        return None if self.comm.local is None else self._around(self.comm.local)

    @property
    def failure(self) -> Exception | None:
        return self.comm.failure

    @property
    def alone(self) -> bool:
        return self.comm.alone

    @property
    def mail_nbytes(self) -> int:
        return self.comm.mail_nbytes

    gather, collect, reduce = passed_on(DirectComm.gather), passed_on(DirectComm.collect), passed_on(DirectComm.reduce)
    all_to_all = passed_on(DirectComm.all_to_all)
    exchange, compare = passed_on(DirectComm.exchange), passed_on(DirectComm.compare)
    reduce_scatter, all_reduce = passed_on(DirectComm.reduce_scatter), passed_on(DirectComm.all_reduce)
    open_sums, close_sums = passed_on(DirectComm.open_sums), passed_on(DirectComm.close_sums)
    drop_sums, new_serial = passed_on(DirectComm.drop_sums), passed_on(DirectComm.new_serial)
    allocate, allocate_common = passed_on(DirectComm.allocate), passed_on(DirectComm.allocate_common)
    reserve, reserve_slices = passed_on(DirectComm.reserve), passed_on(DirectComm.reserve_slices)
    read_precise, expect, needed = passed_on(DirectComm.read_precise), passed_on(DirectComm.expect), passed_on(DirectComm.needed)
    private, hops, sent = passed_on(DirectComm.private), passed_on(DirectComm.hops), passed_on(DirectComm.sent)
    announce, peers_wait = passed_on(DirectComm.announce), passed_on(DirectComm.peers_wait)
    fence_write, fence_read = passed_on(DirectComm.fence_write), passed_on(DirectComm.fence_read)
    wait_until, poll, fail = passed_on(DirectComm.wait_until), passed_on(DirectComm.poll), passed_on(DirectComm.fail)
    leave, join, serve = passed_on(DirectComm.leave), passed_on(DirectComm.join), passed_on(DirectComm.serve)
